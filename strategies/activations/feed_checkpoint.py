"""Recompute the feed part of each layer in the backward pass; keep its input, and run it twice.

Peak: the inner activations (4 D wide and more) of one layer instead of all; what attention and the norms save stays.
Between keeping everything and a `checkpoint` of whole layers: where attention is the dear part it is not run again. The
whole feed of one layer is there at once: `tiled_feed` has less. Source: Chen et al., "Training Deep Nets with Sublinear
Memory Cost" (2016).
"""

from dataclasses import replace
from functools import partial
from typing import Any

from harness import Parts, Strategy, hookimpl


def on_torch(parts: Parts) -> Parts:
    from torch.utils.checkpoint import checkpoint

    return replace(parts, feed=partial(checkpoint, parts.feed, use_reentrant=False))


def on_jax(parts: Parts) -> Parts:
    import jax

    inner = parts.feed

    def feed(parts: Parts, p: Any, x_BTD: Any) -> Any:
        return jax.checkpoint(partial(inner, parts), prevent_cse=False)(p, x_BTD)

    return replace(parts, feed=feed)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "feed_checkpoint",
            rewrites=("feed",),
            calls=("feed", "grad"),  # what has no backward pass has nothing to recompute
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
        )
    ]
