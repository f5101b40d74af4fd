"""Layers in columns and rows, in JAX."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jax import lax

from harness import Parts
from strategies.sharding._jax import (
    Size,
    divided,
    dividing,
    for_all,
    gathered,
    lies_divided,
    over_ranks,
    own_rank,
    sizes,
)
from strategies.sharding.shares import WHOLE
from strategies.sharding.tensor_parallel import COLUMNS, ROWS, refuse_added

KEYS = ("wk", "wv")
"""Matrices that are divided only where there are enough heads of keys and values."""


def tensor_parallel(parts: Parts) -> Parts:
    """Hold some heads of attention and some columns of the feed part; sum what each adds to the tokens of all."""
    return dividing(in_columns_and_rows("tensor_parallel", parts, _same_tokens, over_ranks), for_all, WHOLE)


def _same_tokens(parts: Parts, x_BTD: Any) -> Any:
    """Return the tokens, which are those of all ranks; raise ValueError where each has others."""
    if parts.division.granularity > WHOLE:
        raise ValueError("tensor_parallel needs the same tokens on all ranks: leave out what divides the batch")
    return x_BTD


def in_columns_and_rows(strategy: str, parts: Parts, before: Callable[..., Any], after: Callable[..., Any]) -> Parts:
    """Hold some heads and columns of every layer: `before` gives a part all tokens, `after` sums what the ranks add."""
    inner_draw, inner_mix, inner_feed = parts.draw, parts.mix, parts.feed

    def draw(parts: Parts, name: str, shape: Size, deviation: float) -> Any:
        value = inner_draw(parts, name, shape, deviation)
        refuse_added(name in sizes(parts), value)
        short = name.removeprefix("layers.")
        if short == name:
            return value
        if lies_divided(value):
            raise ValueError(f"{strategy} parts what another strategy has parted already: leave out one of the two")
        if short.removeprefix("b") in KEYS and parts.shape.key_heads % parts.ranks:
            return value
        if short.removeprefix("b") in COLUMNS:
            return divided(parts, name, value, axis=len(shape) - 1)
        return divided(parts, name, value) if short in ROWS else value

    def added(parts: Parts, inner: Callable[..., Any], p: Any, x_BTD: Any, out: str) -> Any:
        """Sum what the ranks add; a bias is added by each, and so in parts."""
        bias = {f"b{out}": p[f"b{out}"] / parts.ranks} if f"b{out}" in p else {}
        return after(parts, inner(parts, {**p, **bias}, before(parts, x_BTD)))

    def mix(parts: Parts, p: Any, x_BTD: Any) -> Any:
        shape, ranks = parts.shape, parts.ranks
        if shape.heads % ranks:
            raise ValueError(f"{strategy} gives each of {ranks} ranks as many of {shape.heads} heads: take a divisor")
        own = {"heads": shape.heads // ranks, "head_width": shape.head, "kv_heads": shape.key_heads // ranks}
        if shape.key_heads % ranks:
            if ranks % shape.key_heads:
                raise ValueError(
                    f"{strategy} cannot share {shape.key_heads} heads for keys and values among {ranks} ranks: take a "
                    "divisor or a multiple of them"
                )
            start = own_rank(parts) * shape.key_heads // ranks * shape.head
            of_keys = [name for name in p if name.removeprefix("b") in KEYS]
            p = p | {name: lax.dynamic_slice_in_dim(p[name], start, shape.head, -1) for name in of_keys}
            own["kv_heads"] = 1
        small = replace(parts, shape=shape.model_copy(update=own))
        return added(small, inner_mix, p, x_BTD, "wo")

    def feed(parts: Parts, p: Any, x_BTD: Any) -> Any:
        return added(parts, inner_feed, p, x_BTD, "down")

    gather_parameters = gathered(parts.gather_parameters)
    return replace(parts, draw=draw, mix=mix, feed=feed, gather_parameters=gather_parameters)
