"""Keep the rows on the device and cut each batch there as vmapped dynamic slices; pay the rows on the device as well.

Peak: the source twice where host and device share a memory (JAX on the CPU uses the host's rows themselves if they
begin at a multiple of 64 bytes), plus one batch. One compilation serves all batches of a size. Source: JAX,
`vmap(lax.dynamic_slice_in_dim)`, which moves a start beyond the end back without a word: they are checked on the host.
"""

from typing import Any

from harness import Extent, Held, Parts, Strategy, hookimpl


def on_jax(parts: Parts) -> Parts:
    import jax

    from strategies.data.windows.jax_gather import resident

    def cut(rows: Any, starts_B: Any, window: int) -> Any:
        return jax.vmap(lambda start: jax.lax.dynamic_slice_in_dim(rows, start, window))(starts_B)

    return resident(parts, cut)


def holds(extent: Extent) -> Held:
    """Count the rows on the device, which here is the CPU."""
    return Held(windows=extent.base + extent.input_bytes * (not extent.target_bytes))


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [Strategy("jax_slices", rewrites=("windows",), on={"jax": on_jax}, about=__doc__, holds=holds)]
