"""Cut each document after `tokens` tokens; pay what stood behind.

Peak: that of a batch padded to `tokens` at most, whatever the longest document is. The share of the tokens that is left
out is noted. Trainers of chat models cut so by default, as `max_length`.
"""

from dataclasses import replace

from harness import Documents, Extent, Holding, Parts, Source, Strategy, hookimpl


def on_any(parts: Parts, tokens: int = 1024) -> Parts:
    if tokens < 1:
        raise ValueError(f"truncated: no document has {tokens} tokens: set tokens to 1 or more")
    inner, untouched = parts.source, parts.shape
    shape = untouched.model_copy(update={"tokens": min(tokens, untouched.tokens)})

    def source(parts: Parts) -> Source:
        import numpy as np

        whole = inner(replace(parts, shape=untouched))
        assert isinstance(whole, Documents)
        lengths_N = np.minimum(whole.lengths_N, tokens)
        left = 1 - lengths_N.sum() / whole.lengths_N.sum()
        parts.notes["truncated"] = f"{left:.0%} of the tokens are cut off"
        parts.notes["truncated_share"] = float(left)
        return replace(whole, lengths_N=lengths_N, window=min(whole.window, tokens))

    return replace(parts, shape=shape, source=source)


def holds(extent: Extent, tokens: int = 1024) -> Holding:
    """Count nothing: the rows that are cut off are read all the same."""
    return Holding()


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "truncated",
            rewrites=("source",),
            on={"torch": on_any, "jax": on_any},
            about=__doc__,
            approximate=True,
            probe={"tokens": 11},
            feeds="other",
            data="documents",
            holds=holds,
        )
    ]
