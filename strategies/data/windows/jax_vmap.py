"""Materialise all windows up front with vmapped dynamic slices; pay the overlap, and 4 bytes for every id.

Peak: the source, 2 N W elements for inputs and targets, integers in 4 bytes, and while they are made the rows on the
device (inputs and targets once, where they are views of one array) with 4 N bytes of offsets. Source: JAX,
`jit(vmap(dynamic_slice))`; plain slices with traced bounds would not compile.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from harness import Extent, Holding, Parts, Source, Strategy, Windows, hookimpl
from strategies.data.windows.jax_gather import refuse_uncountable
from strategies.data.windows.jax_slices import cut


def on_jax(parts: Parts) -> Parts:
    def windows(parts: Parts, source: Source) -> Windows:
        import jax
        import numpy as np

        refuse_uncountable(source)
        starts_N = (np.arange(source.count, dtype=np.int64) * source.stride).astype(np.int32)
        all_of = jax.jit(lambda rows, starts_N: cut(rows, starts_N, source.window))
        if (joined := source.joined) is not None:
            rows = wide(joined)
            x_NW, y_NW = all_of(rows, starts_N), all_of(rows, starts_N + np.int32(1))
            del rows
        else:
            x_NW, y_NW = all_of(wide(source.inputs), starts_N), all_of(wide(source.targets), starts_N)
        jax.block_until_ready((x_NW, y_NW))
        return Windows(source, taken(source, x_NW, y_NW))

    return replace(parts, windows=windows)


def taken(source: Source, x_NW: Any, y_NW: Any) -> Callable[[Any], tuple[Any, Any]]:
    """Return a function that takes a batch of windows on the device, compiled."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    @jax.jit
    def both(x_NW: Any, y_NW: Any, at_B: Any) -> tuple[Any, Any]:
        return jnp.take(x_NW, at_B, axis=0, mode="clip"), jnp.take(y_NW, at_B, axis=0, mode="clip")

    return lambda indices_B: both(x_NW, y_NW, source.checked(indices_B).astype(np.int32))


def wide(rows: Any) -> Any:
    """Move rows to the device, integers as int32."""
    import jax
    import numpy as np

    return jax.device_put(rows.astype(np.int32) if rows.dtype.kind in "iu" else rows)


def holds(extent: Extent) -> Holding:
    x, y = max(4, extent.input_bytes), max(4, extent.target_bytes or extent.input_bytes)
    rows = extent.rows * (x + y * (extent.target_bytes > 0))
    return Holding(windows=extent.count * extent.window * (x + y), making=rows + 8 * extent.count)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [Strategy("jax_vmap", rewrites=("windows",), on={"jax": on_jax}, about=__doc__, holds=holds)]
