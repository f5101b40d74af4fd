"""Keep the rows on the device and gather each batch by the index of every row; pay the rows on the device as well.

Peak: the source twice where host and device share a memory (JAX on the CPU uses the host's rows themselves if they
begin at a multiple of 64 bytes), plus one batch and 4 B W bytes of index. One compilation serves all batches of a size.
Source: JAX, `jnp.take`; it would silently clamp indices beyond the end, so they are checked on the host.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from harness import Extent, Holding, Parts, Source, Strategy, Windows, hookimpl


def on_jax(parts: Parts) -> Parts:
    import jax.numpy as jnp

    def gather(rows: Any, starts_B: Any, window: int) -> Any:
        at_BW = starts_B[:, None] + jnp.arange(window, dtype=starts_B.dtype)
        return jnp.take(rows, at_BW, axis=0, mode="clip")

    return resident(parts, gather)


def resident(parts: Parts, cut: Callable[[Any, Any, int], Any]) -> Parts:
    """Move the rows to the device once, and cut each batch there by `cut(rows, starts_B, window)`, compiled.

    Where inputs and targets are views of one array, that array is moved.
    """

    def windows(parts: Parts, source: Source) -> Windows:
        import jax
        import numpy as np

        refuse_uncountable(source)
        both_rows, later = source.joined, 1
        if both_rows is None:
            inputs, targets, later = jax.device_put(source.inputs), jax.device_put(source.targets), 0
        else:
            inputs = targets = jax.device_put(both_rows)
        jax.block_until_ready((inputs, targets))  # the copy is made in the background

        @jax.jit
        def both(inputs: Any, targets: Any, starts_B: Any) -> tuple[Any, Any]:
            return cut(inputs, starts_B, source.window), cut(targets, starts_B + later, source.window)

        def batch(indices_B: Any) -> tuple[Any, Any]:
            return both(inputs, targets, source.starts(indices_B).astype(np.int32))

        return Windows(source, batch)

    return replace(parts, windows=windows)


def refuse_uncountable(source: Source) -> None:
    """Raise ValueError for more rows than an index of JAX can count."""
    if len(source.inputs) >= 1 << 31:
        raise ValueError(
            f"JAX counts to 2,147,483,647 and the source has {len(source.inputs):,} rows; "
            "choose a strategy for numpy or torch"
        )


def rows_bytes(extent: Extent) -> int:
    """Compute the bytes of the rows on the device, which is the CPU in a prediction."""
    return extent.base + extent.input_bytes * (not extent.target_bytes)


def holds(extent: Extent) -> Holding:
    """Count the rows on the device and the index of a batch."""
    return Holding(windows=rows_bytes(extent), batches=4 * extent.batch * extent.window)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [Strategy("jax_gather", rewrites=("windows",), on={"jax": on_jax}, about=__doc__, holds=holds)]
