"""Compute the cosines and sines of rotary positions in each layer; keep no table, pay them again and again.

Peak: no table, which has 4 bytes for each position and number of a head that is turned. But the backward pass needs the
values: each layer keeps its own, unless it is recomputed. So this is for use beside `checkpoint`, and alone it costs.
In torch they are computed in float64, as the table is. In JAX, which has no float64 there, an angle is a coarse step of
256 positions and a fine one, both from small exact tables, joined by the sum formulas: a plain product in float32 would
be off by a hundredth of a radian at position 131,072. Source: Su et al., "RoFormer" (2021, arXiv:2104.09864).
"""

from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl
from strategies.attention.rope_cache import computed, last, refuse_learned

FINE = 256
"""Positions between two coarse steps."""


def on_torch(parts: Parts) -> Parts:
    import torch

    refuse_learned(parts, "rope_on_the_fly")

    def rotary(parts: Parts, positions: tuple[slice, ...], like: Any) -> tuple[Any, Any]:
        at_T = torch.cat([torch.arange(each.start, each.stop, device=like.device) for each in positions])
        cos, sin = computed(parts.shape, at_T, torch.promote_types(like.dtype, torch.float32), like.device)
        return cos, sin

    return replace(parts, rotary=rotary)


def on_jax(parts: Parts) -> Parts:
    import jax.numpy as jnp
    import numpy as np

    refuse_learned(parts, "rope_on_the_fly")

    def rotary(parts: Parts, positions: tuple[slice, ...], like: Any) -> tuple[Any, Any]:
        if not isinstance(positions, tuple):
            raise ValueError(
                "rope_on_the_fly: in JAX packed rows have positions of their own: leave out one of the two"
            )
        shape: Any = parts.shape
        dtype = jnp.promote_types(like.dtype, jnp.float32)
        exponents = np.arange(0, shape.rotated, 2) / shape.rotated

        def exact(at_P: Any) -> tuple[Any, Any]:
            angles = np.outer(at_P, shape.rotary_base**-exponents)
            return jnp.asarray(np.cos(angles), dtype), jnp.asarray(np.sin(angles), dtype)

        at_T = jnp.concatenate([jnp.arange(each.start, each.stop) for each in positions])
        cos_c, sin_c = (of[at_T // FINE] for of in exact(np.arange(0, last(positions), FINE)))
        cos_f, sin_f = (of[at_T % FINE] for of in exact(np.arange(FINE)))
        return cos_c * cos_f - sin_c * sin_f, sin_c * cos_f + cos_c * sin_f

    return replace(parts, rotary=rotary)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [Strategy("rope_on_the_fly", rewrites=("rotary",), on={"torch": on_torch, "jax": on_jax}, about=__doc__)]
