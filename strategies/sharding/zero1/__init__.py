"""Hold the moments of a part of every parameter on each rank; pay a transfer of all parameters after each step.

The gradients are summed into parts, one after the other, each rank updates its part of every parameter, and the parts
are put together again. Peak of a rank: 8 + 8 / R bytes per parameter in float32 under AdamW while the gradients are
whole, and the activations of its rows. The moments are those of AdamW: other update rules are refused beside it. (ZeRO,
stage 1: Rajbhandari et al., 2020, arXiv:1910.02054.)
"""

from harness import Parts


def on_torch(parts: Parts) -> Parts:
    from strategies.sharding.zero1._torch import zero1

    return zero1(parts)


def on_jax(parts: Parts) -> Parts:
    from strategies.sharding.zero1._jax import zero1

    return zero1(parts)
