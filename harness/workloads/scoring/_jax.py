"""Scoring in JAX: the decoder's functions, scanned over layers and tokens, around a cache that is carried along."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from harness.contract.data import IGNORED, Source
from harness.contract.objective import Objective
from harness.contract.parts import Parts
from harness.contract.place import Place
from harness.workloads.data import rows
from harness.workloads.decoder import _jax as decoder
from harness.workloads.decoder import both
from harness.workloads.scoring import Shape


def cache(parts: Parts, batch: int, tokens: int, like: Any) -> tuple[Any, Any]:
    """Reserve all tokens from the start and write in place: a compiled program's arrays cannot grow.

    A write beyond the end raises where the position is known, and gives NaN where it is traced: XLA would move it to
    the last slots without a word.
    """
    shape: Shape = parts.shape
    size = (shape.layers, batch, tokens, shape.key_heads, shape.head)

    def empty() -> tuple[Any, Any]:
        return jnp.zeros(size, like.dtype), jnp.zeros(size, like.dtype)

    def append(storage: Any, layer: Any, position: Any, k_BTGK: Any, v_BTGK: Any) -> Any:
        end = position + k_BTGK.shape[1]
        if isinstance(end, int) and end > tokens:
            raise ValueError(f"the cache holds {tokens} tokens, and token {end} is written: reserve more")
        new = (jnp.where(end <= tokens, each, jnp.nan) for each in (k_BTGK, v_BTGK))
        storage = tuple(
            lax.dynamic_update_slice(old, each[None].astype(old.dtype), (layer, 0, position, 0, 0))
            for old, each in zip(storage, new, strict=True)
        )
        k, v = (lax.dynamic_index_in_dim(each, layer, keepdims=False) for each in storage)
        if isinstance(end, int):
            k, v = k[:, :end], v[:, :end]
        return storage, k, v, None

    return empty, append


def attention(q_BTHK: Any, k_BSGK: Any, v_BSGK: Any, position: Any, seen_TS: Any) -> Any:
    """Attend to the keys that each query sees; without a word about it to those of its own position and before."""
    if seen_TS is None:
        query_T = position + jnp.arange(q_BTHK.shape[1])
        seen_TS = jnp.arange(k_BSGK.shape[1]) <= query_T[:, None]
    narrow = q_BTHK.dtype
    if narrow == jnp.float16:  # XLA has no such product on a CPU
        q_BTHK, k_BSGK, v_BSGK = (x.astype(jnp.float32) for x in (q_BTHK, k_BSGK, v_BSGK))
    return jax.nn.dot_product_attention(q_BTHK, k_BSGK, v_BSGK, mask=seen_TS[None, None]).astype(narrow)


def through(
    parts: Parts, append: Any, params: dict[str, Any], storage: Any, position: Any, x_BT: Any
) -> tuple[Any, Any]:
    """Run the tokens from `position` on through all layers; return the cache and the last hidden state [B, D]."""
    shape = parts.shape
    at_T = position + jnp.arange(x_BT.shape[1])
    x_BTD = parts.embed(replace(parts, positions=lambda parts, tokens: at_T), params, x_BT)
    angles = None
    if shape.positions == "rotary":
        cos, sin = (
            lax.dynamic_slice_in_dim(each, position, x_BT.shape[1])
            for each in parts.rotary(parts, (slice(0, shape.tokens),), x_BTD)
        )
        angles = cos, sin

    def one(carry: Any, turn: Any) -> Any:
        x_BTD, storage = carry
        layer, p = turn

        def mix(parts: Parts, p: dict[str, Any], x_BTD: Any) -> Any:
            nonlocal storage
            q, k, v = decoder.projected(parts, p, x_BTD, angles)
            storage, k, v, seen = append(storage, layer, position, k, v)
            y_BTHK = attention(q, k, v, position, seen)
            return parts.linear(parts, p, "wo", y_BTHK.reshape(*x_BTD.shape[:2], -1))

        x_BTD = decoder.block(replace(parts, mix=mix), p, x_BTD)
        return (x_BTD, storage), None

    (x_BTD, storage), _ = lax.scan(one, (x_BTD, storage), (jnp.arange(shape.layers), params["layers"]))
    return storage, decoder.for_head(shape, params, x_BTD[:, -1])


def logits(shape: Shape, params: dict[str, Any], x_BD: Any) -> Any:
    """Score all tokens of the vocabulary, in float32 at the least."""
    logits_BV = decoder.at_least_float32(x_BD @ both.head(params).T)
    return shape.soft_cap * jnp.tanh(logits_BV / shape.soft_cap) if shape.soft_cap else logits_BV


def step(parts: Parts, state: dict[str, Any], x_BT: Any, y_BT: Any) -> tuple[dict[str, Any], Any]:
    """Score one batch: the prompt at once, then token by token; the losses and the last logits are `observed`."""
    shape, params = parts.shape, state["params"]
    prompt, (batch, tokens) = shape.prompt, x_BT.shape
    _, append = parts.cache(parts, batch, tokens, params["embed"])
    storage, _ = through(parts, append, params, state["kept"], 0, x_BT[:, :prompt])

    def one(carry: Any, turn: Any) -> Any:
        storage, _ = carry
        position, x_B, y_B = turn
        storage, x_BD = through(parts, append, params, storage, position, x_B[:, None])
        logits_BV = logits(shape, params, x_BD)
        return (storage, logits_BV), Objective().in_jax(logits_BV, y_B)

    turns = (jnp.arange(prompt, tokens), x_BT[:, prompt:].T, y_BT[:, prompt:].T)
    (storage, logits_BV), losses_TB = lax.scan(one, (storage, jnp.zeros_like(state["observed"]["logits"])), turns)
    observed = {"losses": losses_TB.T, "logits": logits_BV}
    counted = jnp.maximum((y_BT[:, prompt:] != IGNORED).sum(), 1)
    return {"params": params, "kept": storage, "observed": observed}, losses_TB.sum() / counted


def init(parts: Parts, source: Source | None = None) -> dict[str, Any]:
    """Make the parameters, an empty cache, which every step fills anew, and room for what a step observes."""
    shape, params = parts.shape, decoder.drawn(parts)
    empty, _ = parts.cache(parts, shape.batch, shape.tokens, params["embed"])
    wide = jnp.promote_types(params["embed"].dtype, jnp.float32)
    observed = {
        "losses": jnp.zeros((shape.batch, shape.tokens - shape.prompt), wide),
        "logits": jnp.zeros((shape.batch, shape.vocabulary), wide),
    }
    return {"params": params, "kept": empty(), "observed": observed}


def build(shape: Shape, place: Place, corpus: Any, seed: int = 0) -> Parts:
    """Build the untouched parts."""
    return replace(
        rows.data_parts(shape, place, corpus, partial(rows.token_source, seed=seed)),
        transfer=decoder.transfer,
        draw=partial(decoder.draw, seed),
        init=init,
        embed=decoder.embed,
        add_positions=decoder.add_positions,
        linear=both.linear,
        rotary=decoder.rotary,
        feed=decoder.feed,
        step=step,
        cache=cache,
    )
