"""Hold the tokens of a part of the context on each rank, and all tokens of some heads in attention; pay four exchanges.

Each rank has T / R consecutive tokens of every row. Around attention an exchange gives it all tokens of H / R heads, so
that any attention runs inside. Peak of a rank: the activations of its tokens; parameters, gradients and moments whole.
The heads must be a multiple of the ranks; shared heads of keys and values are repeated where they are fewer.
(DeepSpeed-Ulysses: Jacobs et al., 2023, arXiv:2309.14509.)
"""

from harness import Parts


def on_torch(parts: Parts) -> Parts:
    from strategies.sharding.ulysses._torch import ulysses

    return ulysses(parts)


def on_jax(parts: Parts) -> Parts:
    from strategies.sharding.ulysses._jax import ulysses

    return ulysses(parts)
