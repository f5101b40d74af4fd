"""Keep the rows on the device and cut each batch there as vmapped dynamic slices; pay the rows on the device as well.

Peak: the source twice where host and device share a memory (JAX on the CPU uses the host's rows themselves if they
begin at a multiple of 64 bytes), plus one batch. One compilation serves all batches of a size. Source: JAX,
`vmap(lax.dynamic_slice_in_dim)`, which moves a start beyond the end back without a word: they are checked on the host.
"""

from dataclasses import replace
from typing import Any

from harness import Extent, Held, Parts, Source, Strategy, Windows, hookimpl


def on_jax(parts: Parts) -> Parts:
    def windows(parts: Parts, source: Source) -> Windows:
        import jax
        import numpy as np

        inputs, targets, later = placed(source)
        jax.block_until_ready((inputs, targets))  # the copy is made in the background

        def cut(rows: Any, starts_B: Any) -> Any:
            return jax.vmap(lambda start: jax.lax.dynamic_slice_in_dim(rows, start, source.window))(starts_B)

        @jax.jit
        def both(inputs: Any, targets: Any, starts_B: Any) -> tuple[Any, Any]:
            return cut(inputs, starts_B), cut(targets, starts_B + later)

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
            f"jax_slices: JAX counts to 2,147,483,647 and the source has {len(x):,} rows; take a strategy for numpy"
        )
    if (x.dtype, x.shape, x.strides) == (y.dtype, y.shape, y.strides) and y.ctypes.data - x.ctypes.data == x.strides[0]:
        rows = jax.device_put(as_strided(x, (len(x) + 1, *x.shape[1:]), x.strides))
        return rows, rows, 1
    return jax.device_put(x), jax.device_put(y), 0


def holds(extent: Extent) -> Held:
    """Count the rows on the device, which here is the CPU."""
    return Held(windows=extent.base + extent.input_bytes * (not extent.target_bytes))


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [Strategy("jax_slices", rewrites=("windows",), on={"jax": on_jax}, about=__doc__, holds=holds)]
