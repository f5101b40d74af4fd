"""Fill arrays of all windows by functional updates, one window at a time; pay a copy of all windows for each of them.

Peak: the source plus 2 N W elements for inputs and targets, integers in 4 bytes, and one more array of all windows; N
times their bytes are moved. A negative control: `out = out.at[i].set(...)` outside of `jit`, where nothing is donated.
More than `limit_mib` of moved bytes raise an error.
"""

from dataclasses import replace
from typing import Any

from harness import Extent, Holding, Parts, Source, Strategy, Windows, hookimpl, knobs
from strategies.data.windows.jax_vmap import taken


def on_jax(parts: Parts, limit_mib: int = 4096) -> Parts:
    knobs.above_0("jax_row_updates", limit_mib=limit_mib)

    def windows(parts: Parts, source: Source) -> Windows:
        import jax
        import jax.numpy as jnp
        import numpy as np

        def filled(rows: Any) -> Any:
            dtype = jax.dtypes.canonicalize_dtype(np.int32 if rows.dtype.kind in "iu" else rows.dtype)
            out = jnp.zeros((source.count, source.window, *rows.shape[1:]), dtype)
            for index in range(source.count):
                start = index * source.stride
                out = out.at[np.int32(index)].set(rows[start : start + source.window].astype(dtype))
            return jax.block_until_ready(out)

        def size(rows: Any) -> int:
            item = 4 if rows.dtype.kind in "iu" else rows.dtype.itemsize
            return source.count * source.window * rows[0].size * item

        moved = source.count * (size(source.inputs) + size(source.targets))
        if moved > limit_mib << 20:
            raise ValueError(
                f"jax_row_updates: {source.count:,} updates would move {moved >> 20:,} MiB, more than {limit_mib:,}; "
                "use fewer windows, or raise limit_mib"
            )

        return Windows(source, taken(source, filled(source.inputs), filled(source.targets)))

    return replace(parts, windows=windows)


def holds(extent: Extent, limit_mib: int = 4096) -> Holding:
    """Count the copy that each update makes, of inputs (before there are targets) or of targets."""
    windows = extent.count * extent.window
    x, y = windows * max(4, extent.input_bytes), windows * max(4, extent.target_bytes or extent.input_bytes)
    return Holding(windows=x + y, making=max(x - y, y))


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [Strategy("jax_row_updates", rewrites=("windows",), on={"jax": on_jax}, about=__doc__, holds=holds)]
