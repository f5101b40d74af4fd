"""Keep the activations of one window of a sequence and merge overlapping outputs; tokens see no further than a window.

The whole stack is applied to `window` tokens every `stride`, the last window ending with the sequence, and again in the
backward pass. Rotary positions restart in each window, which they do not notice, being relative; learned ones are added
before the stack and stay those of the sequence. Where windows overlap their outputs are merged in float32 by `merge`:
`average` (their sum over their number) or `max` (elementwise). Peak: what the stack saves of one window, and the
outputs of all windows, about window / stride times the sequence; so the activations do not grow with the sequence, and
time grows in proportion to it. A sequence that fits one window is left alone. Not the same function: in the first half
of a window the tokens attend to less than they did. Related: Beltagy et al., "Longformer" (2020, arXiv:2004.05150),
where layers and not the stack are windowed.
"""

from dataclasses import replace
from functools import partial, reduce
from itertools import pairwise
from typing import Any

from harness import Parts, Strategy, hookimpl

MERGES = ("average", "max")
conflicts: dict[str, str] = {
    **dict.fromkeys(
        ("ring_attention", "ulysses", "megatron_sequence_parallel"),
        "each rank has a stretch of every row, and would cut its windows out of that",
    ),
    **dict.fromkeys(
        ("before checkpoint", "before nested_checkpoint", "before budget_checkpoint"),
        "outputs would be merged after each segment of layers, and not after all layers: name it after",
    ),
}
"""Strategies with which no windows over a sequence go together, or not in that order."""


def checked(window: int, stride: int, merge: str) -> None:
    """Refuse windows that leave a token out, and unknown merges."""
    if not 1 <= stride <= window:
        raise ValueError(f"sequence_windows: stride must be from 1 to window ({window}), not {stride}")
    if merge not in MERGES:
        raise ValueError(f"sequence_windows: merge is '{merge}': use one of {', '.join(MERGES)}")


def starts(tokens: int, window: int, stride: int) -> list[int]:
    """Return the first token of each window; the last window ends with the sequence."""
    return [*range(0, tokens - window, stride), tokens - window]


def on_torch(parts: Parts, window: int = 4096, stride: int = 2048, merge: str = "average") -> Parts:
    import torch
    from torch.utils.checkpoint import checkpoint

    checked(window, stride, merge)
    inner = parts.stack

    def merged(covering: list[Any]) -> Any:
        if merge == "max":
            return reduce(torch.maximum, covering)
        return sum(covering[1:], covering[0]) / len(covering)

    def joined(parts: Parts, ps: Any, *pieces_in: Any) -> Any:
        return inner(parts, ps, torch.cat(pieces_in, 1))

    def stack(parts: Parts, ps: Any, x_BTD: Any) -> Any:
        T = x_BTD.shape[1]
        if window >= T:
            parts.notes["unchanged"] = f"{T:,} tokens fit one window of {window:,}"
            return inner(parts, ps, x_BTD)
        begins = starts(T, window, stride)
        # Between two borders the same windows cover all tokens. One long tensor that windows are cut out of, or added
        # into, would be quadratic: its gradient is as long as the sequence for every window.
        borders = sorted({*begins, *(begin + window for begin in begins)})
        pieces: dict[int, list[Any]] = {border: [] for border in borders[:-1]}
        lengths = [b - a for a, b in pairwise(borders)]
        inputs = dict(zip(borders, x_BTD.split(lengths, 1), strict=False))
        wide = torch.promote_types(x_BTD.dtype, torch.float32)
        for begin in begins:
            within = [border for border in borders[:-1] if begin <= border < begin + window]
            pieces_in = [inputs[border] for border in within]
            y_BWD = checkpoint(partial(joined, parts, ps), *pieces_in, use_reentrant=False)
            sizes = [piece.shape[1] for piece in pieces_in]
            for border, piece in zip(within, y_BWD.to(wide).split(sizes, 1), strict=True):
                pieces[border].append(piece)
        return torch.cat([merged(covering) for covering in pieces.values()], 1).to(x_BTD.dtype)

    return replace(parts, stack=stack)


def on_jax(parts: Parts, window: int = 4096, stride: int = 2048, merge: str = "average") -> Parts:
    import jax
    import jax.numpy as jnp
    import numpy as np

    checked(window, stride, merge)
    inner = parts.stack

    def stack(parts: Parts, ps: Any, x_BTD: Any) -> Any:
        B, T, D = x_BTD.shape
        if window >= T:
            parts.notes["unchanged"] = f"{T:,} tokens fit one window of {window:,}"
            return inner(parts, ps, x_BTD)
        if len(jax.tree.leaves(ps)[0]) < parts.shape.layers:
            raise ValueError(
                "sequence_windows and automatic_windows merge windows after all layers, and another strategy runs the "
                "layers one by one, as update_in_backward and lomo do in JAX: leave out one of the two"
            )
        begins = np.array(starts(T, window, stride))
        wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
        one = jax.checkpoint(partial(inner, parts), prevent_cse=False)
        cut = partial(jax.lax.dynamic_slice_in_dim, slice_size=window, axis=1)

        def over(merged_BTD: Any, begin: Any) -> Any:
            y_BWD = one(ps, cut(x_BTD, begin)).astype(wide)
            held_BWD = cut(merged_BTD, begin)
            y_BWD = jnp.maximum(held_BWD, y_BWD) if merge == "max" else held_BWD + y_BWD
            return jax.lax.dynamic_update_slice_in_dim(merged_BTD, y_BWD, begin, 1), None

        nothing = jnp.full((B, T, D), -jnp.inf if merge == "max" else 0, wide)
        merged_BTD = jax.lax.scan(over, nothing, jnp.asarray(begins))[0]
        if merge == "average":
            tokens = np.arange(T)
            counts_T = ((tokens >= begins[:, None]) & (tokens < begins[:, None] + window)).sum(0)
            merged_BTD = merged_BTD / jnp.asarray(counts_T[:, None], wide)
        return merged_BTD.astype(x_BTD.dtype)

    return replace(parts, stack=stack)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "sequence_windows",
            rewrites=("stack",),
            calls=("stack",),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            approximate=True,
            probe={"window": 16, "stride": 8},
            conflicts={**conflicts, "automatic_windows": "it would cut windows out of windows"},
        )
    ]
