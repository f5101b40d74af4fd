"""Keep the rows on the device and cut each batch there as vmapped dynamic slices; pay the rows on the device as well.

Peak: the source twice where host and device share a memory (JAX on the CPU uses the host's rows themselves if they
begin at a multiple of 64 bytes), plus one batch. One compilation serves all batches of a size. Source: JAX,
`vmap(lax.dynamic_slice_in_dim)`; it would silently move starts beyond the end back, so they are checked on the host.
"""

from typing import Any

from harness import Extent, Holding, Parts, Strategy, hookimpl
from strategies.data.windows import jax_gather


def on_jax(parts: Parts) -> Parts:
    return jax_gather.resident(parts, cut)


def cut(rows: Any, starts_B: Any, window: int) -> Any:
    """Cut the windows that begin at these rows [B, W ...]."""
    import jax

    return jax.vmap(lambda start: jax.lax.dynamic_slice_in_dim(rows, start, window))(starts_B)


def holds(extent: Extent) -> Holding:
    return Holding(windows=jax_gather.rows_bytes(extent))


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [Strategy("jax_slices", rewrites=("windows",), on={"jax": on_jax}, about=__doc__, holds=holds)]
