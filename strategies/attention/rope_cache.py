"""Compute the cosines and sines of rotary positions once, for `tokens` positions; pay for those never reached.

Peak: 4 bytes for each position and number of a head that is turned, in float32, however many layers there are; of
16-bit inputs as well, whose positions beyond 256 (bfloat16) or 2,048 (float16) would be the same number. The table lies
where the inputs are, is made in float64 and rounded once. It grows by doubling when a row is longer, and keeps what it
had. `tokens` 0 takes as many as the first row has: so does the untouched code. In JAX the table is a constant of the
compiled program.

`positions_on` "cpu" makes the positions of a table on the CPU, wherever its frequencies are, as document D found in its
model: on a GPU the step ends there, with an error that names two devices. Source: Su et al., "RoFormer" (2021,
arXiv:2104.09864); the caches of torchtitan and transformers.
"""

from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl, knobs

PLACES = ("inputs", "cpu")


def grown(length: int, needed: int) -> int:
    """Return how many positions a table of `length` has when `needed` are asked for: at least twice as many as before.

    A table that is long enough stays as it is.
    """
    return length if needed <= length else max(needed, 2 * length)


def last(positions: tuple[slice, ...]) -> int:
    """Return the number of positions up to the last of these."""
    return max(each.stop for each in positions)


def refuse_learned(parts: Parts, name: str) -> None:
    """Refuse a model whose heads are not turned."""
    if getattr(parts.shape, "positions", "rotary") == "learned":
        raise ValueError(f"{name}: the positions of this model are learned, so that there are no angles: leave it out")


def check_place(positions_on: str) -> None:
    """Refuse a place of the positions that is none."""
    if positions_on not in PLACES:
        raise ValueError(f"rope_cache: 'positions_on' is one of {', '.join(PLACES)}, not '{positions_on}'")


def on_torch(parts: Parts, tokens: int = 0, positions_on: str = "inputs") -> Parts:
    import torch

    knobs.at_least_0("rope_cache", tokens=tokens)
    refuse_learned(parts, "rope_cache")
    check_place(positions_on)

    tables: dict[Any, Any] = {}

    def table(parts: Parts, needed: int, like: Any) -> Any:
        """Return cosines and sines [2, P, rotated / 2] of at least so many positions, on the device of `like`."""
        key = like.device, torch.promote_types(like.dtype, torch.float32)
        known = tables.get(key)
        length = grown(0 if known is None else known.shape[1], max(tokens, needed))
        if known is None or known.shape[1] < length:
            at_T = torch.arange(length, device="cpu" if positions_on == "cpu" else like.device)
            tables[key] = computed(parts.shape, at_T, key[1], like.device)
        return tables[key]

    def rotary(parts: Parts, positions: tuple[slice, ...], like: Any) -> tuple[Any, Any]:
        cos, sin = table(parts, last(positions), like)
        if len(positions) == 1:
            return cos[positions[0]], sin[positions[0]]
        return torch.cat([cos[each] for each in positions]), torch.cat([sin[each] for each in positions])

    return replace(parts, rotary=rotary)


def computed(shape: Any, at_T: Any, dtype: Any, device: Any) -> Any:
    """Compute in torch cosines and sines [2, T, rotated / 2] of positions [T], in float64, and round them once.

    Their frequencies are made on `device`, where the positions must lie.
    """
    import torch

    exponents = torch.arange(0, shape.rotated, 2, dtype=torch.float64, device=device) / shape.rotated
    angles = torch.outer(at_T.double(), shape.rotary_base**-exponents)
    return torch.stack([angles.cos(), angles.sin()]).to(dtype)


def on_jax(parts: Parts, tokens: int = 0, positions_on: str = "inputs") -> Parts:
    import jax.numpy as jnp
    import numpy as np

    knobs.at_least_0("rope_cache", tokens=tokens)
    refuse_learned(parts, "rope_cache")
    check_place(positions_on)  # a constant of the program, which XLA puts where it runs
    lengths = [tokens]

    def rotary(parts: Parts, positions: tuple[slice, ...], like: Any) -> tuple[Any, Any]:
        if not isinstance(positions, tuple):
            raise ValueError("rope_cache: in JAX packed rows have positions of their own: leave out one of the two")
        shape: Any = parts.shape
        lengths[0] = grown(lengths[0], last(positions))
        exponents = np.arange(0, shape.rotated, 2) / shape.rotated
        angles = np.outer(np.arange(lengths[0]), shape.rotary_base**-exponents)
        table = (jnp.asarray(of(angles), jnp.promote_types(like.dtype, jnp.float32)) for of in (np.cos, np.sin))
        cos, sin = (jnp.concatenate([of[each] for each in positions]) for of in table)
        return cos, sin

    return replace(parts, rotary=rotary)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "rope_cache",
            rewrites=("rotary",),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            probe={"tokens": 64},
        )
    ]
