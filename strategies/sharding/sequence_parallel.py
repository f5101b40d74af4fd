"""Hold the tokens of a part of the context on each rank, and all tokens of some heads in attention; pay four exchanges.

Each rank has T / R consecutive tokens of every row. Around attention an exchange gives it all tokens of H / R heads, so
that any attention runs inside. Peak of a rank: the activations of its tokens; parameters, gradients and moments whole.
The heads must be a multiple of the ranks; shared heads of keys and values are repeated where they are fewer.
(DeepSpeed-Ulysses: Jacobs et al., 2023, arXiv:2309.14509.)
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

from harness import Parts
from strategies.sharding.shares import in_order


def in_torch(parts: Parts) -> Parts:
    import torch.distributed as dist

    from strategies.sharding import on_torch as ranks

    inner = parts.mix

    def positions(parts: Parts, tokens: int) -> tuple[slice, ...]:
        start = dist.get_rank() * tokens
        return (slice(start, start + tokens),)

    def all_tokens(x_BTHK: Any) -> Any:
        """Give all tokens of this rank's heads."""
        B, T, H, K = x_BTHK.shape
        R = dist.get_world_size()
        sent = x_BTHK.view(B, T, R, H // R, K).permute(2, 0, 1, 3, 4)
        return ranks.exchanged(sent).permute(1, 0, 2, 3, 4).reshape(B, R * T, H // R, K)

    def all_heads(x_BTHK: Any) -> Any:
        """Give all heads of this rank's tokens."""
        B, T, H, K = x_BTHK.shape
        R = dist.get_world_size()
        sent = x_BTHK.reshape(B, R, T // R, H, K).permute(1, 0, 2, 3, 4)
        return ranks.exchanged(sent).permute(1, 2, 0, 3, 4).reshape(B, T // R, R * H, K)

    def exchanging(attend: Any, parts: Parts, q_BTHK: Any, k_BTGK: Any, v_BTGK: Any) -> Any:
        R, H, G = dist.get_world_size(), q_BTHK.shape[2], k_BTGK.shape[2]
        repeats = R // math.gcd(G, R)
        if H % R or H % (G * repeats):
            raise ValueError(
                f"sequence_parallel gives each of {R} ranks as many of {H} heads: take a divisor, or ring_attention"
            )
        k_BTGK, v_BTGK = (x.repeat_interleave(repeats, 2) if repeats > 1 else x for x in (k_BTGK, v_BTGK))
        return all_heads(attend(parts, *(all_tokens(x.contiguous()) for x in (q_BTHK, k_BTGK, v_BTGK))))

    def mix(parts: Parts, p: Any, x_BTD: Any) -> Any:
        return inner(replace(parts, attend=partial(exchanging, parts.attend)), p, x_BTD)

    return replace(
        parts,
        mix=mix,
        positions=positions,
        **ranks.dividing(parts, ranks.tokens_by(in_order)),
    )


def in_jax(parts: Parts) -> Parts:
    from strategies.sharding import on_jax

    return on_jax.sequence_parallel(parts)
