"""All tokens of some heads, for some tokens of all heads, and back: in JAX."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp

from harness import Parts
from strategies.sharding._jax import dividing, exchanged, positions_by, tokens_by
from strategies.sharding.shares import TOKENS, in_order


def ulysses(parts: Parts) -> Parts:
    """Divide the tokens of every row; around attention, exchange them for all tokens of some heads."""
    inner = parts.mix

    def exchanging(attend: Any, parts: Parts, q_BTHK: Any, k_BTGK: Any, v_BTGK: Any) -> Any:
        if (heads := q_BTHK.shape[2]) % parts.ranks:
            raise ValueError(
                f"ulysses gives each of {parts.ranks} ranks as many of {heads} heads: take a divisor, or ring_attention"
            )
        if k_BTGK.shape[2] % parts.ranks:  # each rank needs the keys of its own heads
            k_BTGK, v_BTGK = (jnp.repeat(x, heads // x.shape[2], 2) for x in (k_BTGK, v_BTGK))
        q, k, v = (exchanged(parts, x, 2, 1) for x in (q_BTHK, k_BTGK, v_BTGK))
        return exchanged(parts, attend(parts, q, k, v), 1, 2)

    def mix(parts: Parts, p: Any, x_BTD: Any) -> Any:
        return inner(replace(parts, attend=partial(exchanging, parts.attend)), p, x_BTD)

    parts = replace(parts, mix=mix, positions=positions_by(in_order))
    return dividing(parts, tokens_by(in_order), TOKENS)
