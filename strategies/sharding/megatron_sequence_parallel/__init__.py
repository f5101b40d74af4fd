"""Hold some heads and inner columns of every layer on each rank, and between them some tokens; pay the same exchanges.

Tensor parallelism whose hidden states are divided, too: where it sums what the ranks add to all tokens, each rank keeps
the sum for its T / R tokens, and gathers all tokens again before the next product. A sum and these two pass the same
bytes. Peak of a rank: 16 / R bytes per parameter of the layers, 1 / R of what attention and feed save, and of the
hidden states, norms and logits. Embedding and head are whole. The heads must be multiples of the ranks. (Megatron-LM's
sequence parallelism: Korthikanti et al., 2022, arXiv:2205.05198. Of Ulysses, which goes by the same name, see
`ulysses`.)
"""

from harness import Parts


def on_torch(parts: Parts) -> Parts:
    from strategies.sharding.megatron_sequence_parallel._torch import megatron_sequence_parallel

    return megatron_sequence_parallel(parts)


def on_jax(parts: Parts) -> Parts:
    from strategies.sharding.megatron_sequence_parallel._jax import megatron_sequence_parallel

    return megatron_sequence_parallel(parts)
