"""Keep the rows on the device and gather each batch by the index of every row; pay the rows on the device as well.

Peak: the source twice where host and device share a memory (JAX on the CPU uses the host's rows themselves if they
begin at a multiple of 64 bytes), plus one batch and 4 B W bytes of index. One compilation serves all batches of a size.
Source: JAX, `jnp.take`; indices beyond the end would be clamped without a word, so they are checked on the host.
"""

from dataclasses import replace
from typing import Any

from harness import Extent, Held, Parts, Source, Strategy, Windows, hookimpl


def on_jax(parts: Parts) -> Parts:
    def windows(parts: Parts, source: Source) -> Windows:
        import jax
        import jax.numpy as jnp
        import numpy as np

        inputs, targets, later = placed(source)
        jax.block_until_ready((inputs, targets))  # the copy is made in the background

        @jax.jit
        def both(inputs: Any, targets: Any, starts_B: Any) -> tuple[Any, Any]:
            at_BW = starts_B[:, None] + jnp.arange(source.window, dtype=starts_B.dtype)
            x = jnp.take(inputs, at_BW, axis=0, mode="clip")
            return x, jnp.take(targets, at_BW + later, axis=0, mode="clip")

        def batch(indices_B: Any) -> tuple[Any, Any]:
            indices_B = np.asarray(indices_B, np.int64)
            if indices_B.min() < 0 or indices_B.max() >= source.count:
                raise IndexError(
                    f"windows {indices_B.min()} to {indices_B.max()} are not all in 0 to {source.count - 1}"
                )
            return both(inputs, targets, (indices_B * source.stride).astype(np.int32))

        return Windows(source, batch)

    return replace(parts, windows=windows)


def placed(source: Source) -> tuple[Any, Any, int]:
    """Move the rows to the device; where inputs and targets are views of one array, one row apart, move that once.

    Returns inputs, targets, and how many rows later the targets begin. Raises ValueError for more rows than JAX counts.
    """
    import jax
    from numpy.lib.stride_tricks import as_strided

    x, y = source.inputs, source.targets
    if len(x) >= 1 << 31:
        raise ValueError(
            f"jax_gather: JAX counts to 2,147,483,647 and the source has {len(x):,} rows; take a strategy for numpy"
        )
    if (x.dtype, x.shape, x.strides) == (y.dtype, y.shape, y.strides) and y.ctypes.data - x.ctypes.data == x.strides[0]:
        rows = jax.device_put(as_strided(x, (len(x) + 1, *x.shape[1:]), x.strides))
        return rows, rows, 1
    return jax.device_put(x), jax.device_put(y), 0


def holds(extent: Extent) -> Held:
    """Count the rows on the device, which here is the CPU, and the index of a batch."""
    rows = extent.base + extent.input_bytes * (not extent.target_bytes)
    return Held(windows=rows, batches=4 * extent.batch * extent.window)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [Strategy("jax_gather", rewrites=("windows",), on={"jax": on_jax}, about=__doc__, holds=holds)]
