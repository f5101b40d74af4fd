"""Scoring in torch: the decoder's functions, token by token, around a cache."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from harness.contract.data import IGNORED, Source
from harness.contract.parts import Parts
from harness.contract.place import Place
from harness.workloads.data import rows
from harness.workloads.decoder import _torch as decoder
from harness.workloads.decoder import both
from harness.workloads.scoring import Shape


def cache(parts: Parts, batch: int, tokens: int, like: torch.Tensor) -> tuple[Any, Any]:
    """Keep tensors of the exact length; pay a copy of all keys and values for every token, as DynamicCache does."""

    def empty() -> list[Any]:
        return [None] * parts.shape.layers

    def append(storage: Any, layer: int, position: int, k_BTGK: torch.Tensor, v_BTGK: torch.Tensor) -> Any:
        if position:
            k_BTGK, v_BTGK = (torch.cat(pair, 1) for pair in zip(storage[layer], (k_BTGK, v_BTGK), strict=True))
        storage[layer] = k_BTGK, v_BTGK
        return storage, k_BTGK, v_BTGK, None

    return empty, append


def attention(
    place: Place, q_BTHK: torch.Tensor, k_BSGK: torch.Tensor, v_BSGK: torch.Tensor, seen_TS: torch.Tensor | None
) -> torch.Tensor:
    """Attend to the keys that each query sees; without a word about it to all that are not later, the last its own."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BSGK, v_BSGK))
    (B, H, T, K), G, S = q.shape, k.shape[1], k.shape[2]
    if T == 1:  # the heads that share keys stand as rows of queries, or the keys would be copied for each of them
        y = F.scaled_dot_product_attention(q.reshape(B, G, H // G, K), k, v, attn_mask=seen_TS)
        return y.reshape(B, 1, H, K)
    if seen_TS is None and S > T:
        seen_TS = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    k, v, grouped = decoder.shared_heads(place, q, k, v, masked=seen_TS is not None)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen_TS, is_causal=seen_TS is None, enable_gqa=grouped)
    return y.transpose(1, 2)


def through(parts: Parts, append: Any, state: dict[str, Any], position: int, x_BT: torch.Tensor) -> torch.Tensor:
    """Run the tokens from `position` on through all layers; return the last one's hidden state [B, D]."""
    shape, params = parts.shape, state["params"]
    at = (slice(position, position + x_BT.shape[1]),)
    x_BTD = parts.embed(replace(parts, positions=lambda parts, tokens: at), params, x_BT)
    angles = parts.rotary(parts, at, x_BTD) if shape.positions == "rotary" else None

    def mix(layer: int, parts: Parts, p: dict[str, torch.Tensor], x_BTD: torch.Tensor) -> torch.Tensor:
        q, k, v = decoder.projected(parts, p, x_BTD, angles)
        state["kept"], k, v, seen = append(state["kept"], layer, position, k, v)
        return parts.linear(parts, p, "wo", attention(parts.place, q, k, v, seen).flatten(2))

    for layer, p in enumerate(params["layers"]):
        x_BTD = decoder.block(replace(parts, mix=partial(mix, layer)), p, x_BTD)
    return decoder.for_head(shape, params, x_BTD[:, -1])


def logits(shape: Shape, params: dict[str, Any], x_BD: torch.Tensor) -> torch.Tensor:
    """Score all tokens of the vocabulary, in float32 at the least."""
    logits_BV = x_BD @ both.head(params).T
    logits_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    return shape.soft_cap * torch.tanh(logits_BV / shape.soft_cap) if shape.soft_cap else logits_BV


@torch.no_grad()
def step(
    parts: Parts, state: dict[str, Any], x_BT: torch.Tensor, y_BT: torch.Tensor
) -> tuple[dict[str, Any], torch.Tensor]:
    """Score one batch: the prompt at once, then token by token; the losses and the last logits are `observed`."""
    shape, params = parts.shape, state["params"]
    B, T = x_BT.shape
    _, append = parts.cache(parts, B, T, params["embed"])
    through(parts, append, state, 0, x_BT[:, : shape.prompt])
    losses = []
    for position in range(shape.prompt, x_BT.shape[1]):
        x_BD = through(parts, append, state, position, x_BT[:, position : position + 1])
        logits_BV = logits(shape, params, x_BD)
        losses.append(F.cross_entropy(logits_BV, y_BT[:, position], ignore_index=IGNORED, reduction="none"))
    losses_BT = torch.stack(losses, 1)
    counted = (y_BT[:, shape.prompt :] != IGNORED).sum().clamp(min=1)
    return {**state, "observed": {"losses": losses_BT, "logits": logits_BV}}, losses_BT.sum() / counted


@torch.no_grad()
def init(parts: Parts, source: Source | None = None) -> dict[str, Any]:
    """Make the parameters and an empty cache, which every step fills anew."""
    shape, params = parts.shape, decoder.drawn(parts)
    empty, _ = parts.cache(parts, shape.batch, shape.tokens, params["embed"])
    return {"params": params, "kept": empty()}


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
        rotary=partial(decoder.rotary, decoder.RotaryTable(shape.rotated, shape.rotary_base)),
        feed=decoder.feed,
        step=step,
        cache=cache,
    )
