"""Apply the feed part to a few rows at a time and recompute them in the backward pass; keep its input alone.

Peak: the wide activations (4 D and more) of `rows` tokens instead of all. Without `recompute` every tile saves what it
needs, and little is gained: the tiles alone are not what helps. Source: tiled MLP of ALST (Bekman et al., 2025,
arXiv:2506.13996) and Liger Kernel. Gradients of the weights are summed tile by tile.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from harness import Parts, Strategy, hookimpl, knobs


def on_torch(parts: Parts, rows: int = 1024, recompute: bool = True) -> Parts:
    import torch
    from torch.utils.checkpoint import checkpoint

    knobs.above_0("tiled_feed", rows=rows)
    inner = parts.feed

    def feed(parts: Parts, p: Any, x_BTD: Any) -> Any:
        tiles = x_BTD.reshape(1, -1, x_BTD.shape[-1]).split(rows, dim=1)
        one = partial(checkpoint, inner, use_reentrant=False) if recompute else inner
        outputs = [one(parts, p, tile) for tile in tiles]
        return torch.cat(outputs, dim=1).view(x_BTD.shape)

    return replace(parts, feed=feed)


def on_jax(parts: Parts, rows: int = 1024, recompute: bool = True) -> Parts:
    import jax
    import jax.numpy as jnp

    knobs.above_0("tiled_feed", rows=rows)
    inner = parts.feed

    def feed(parts: Parts, p: Any, x_BTD: Any) -> Any:
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        count = -(-len(x_ND) // rows)
        even = -(-len(x_ND) // count)
        tiles = jnp.pad(x_ND, ((0, count * even - len(x_ND)), (0, 0))).reshape(count, 1, even, -1)
        one = jax.checkpoint(partial(inner, parts), prevent_cse=False) if recompute else partial(inner, parts)
        outputs = jax.lax.map(lambda tile: one(p, tile), tiles)
        return outputs.reshape(count * even, -1)[: len(x_ND)].reshape(x_BTD.shape)

    return replace(parts, feed=feed)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "tiled_feed",
            rewrites=("feed",),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            probe={"rows": 16},
        )
    ]
