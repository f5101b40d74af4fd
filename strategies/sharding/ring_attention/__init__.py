"""Hold the tokens of a part of the context on each rank and pass keys and values round; pay R - 1 passes of them.

Each rank attends from its queries to the keys and values of one rank after the other, and merges what they give by the
logarithm of their sums in float32. The backward pass sends them round once more, with their gradients. Peak of a rank:
the activations of T / R tokens, and twice its keys and values on their way; in JAX also the float32 scores of these
tokens against as many, for each head. With `zigzag` a rank has the r-th block of 2 R from the start and the r-th from
the end, so that all have the same work under causal attention; else the r-th of R. (Liu et al., 2023, arXiv:2310.01889;
the order: Zhu, "ring-flash-attention", 2024, after Brandon et al., "Striped Attention", 2023, arXiv:2311.09431, who
interleave single tokens.)
"""

from dataclasses import replace
from typing import Any

from harness import Parts
from strategies.sharding.shares import TOKENS, folded, in_order


def on_torch(parts: Parts, zigzag: bool = True) -> Parts:
    import torch.distributed as dist

    from strategies.sharding import _torch as ranks
    from strategies.sharding.ring_attention._torch import ring_attention

    blocks = folded if zigzag else in_order

    def positions(parts: Parts, tokens: int) -> tuple[slice, ...]:
        return ranks.spans(tokens * dist.get_world_size(), blocks)

    def attend(parts: Parts, q_BTHK: Any, k_BTGK: Any, v_BTGK: Any) -> Any:
        return ring_attention(q_BTHK, k_BTGK, v_BTGK, zigzag)

    parts = replace(parts, attend=attend, positions=positions)
    return ranks.dividing(parts, ranks.tokens_by(blocks), TOKENS)


def on_jax(parts: Parts, zigzag: bool = True) -> Parts:
    from strategies.sharding.ring_attention import _jax

    return _jax.ring_attention(parts, zigzag)
