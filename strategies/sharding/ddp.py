"""Hold everything on every rank and divide the rows of the batch; pay a sum of all gradients in each step.

Peak of a rank: 16 bytes per parameter in float32 under AdamW, and the activations of its rows. The gradients are
summed tensor by tensor, in place, after the backward pass. Each rank counts by the targets in its rows that carry loss,
so that the mean over the ranks is the mean over the tokens. Source: Li et al., "PyTorch Distributed: Experiences on
Accelerating Data Parallel Training" (2020, arXiv:2006.15704).
"""

from harness import Parts
from strategies.sharding.shares import ROWS


def on_torch(parts: Parts) -> Parts:
    from strategies.sharding._torch import by_rows, dividing

    return dividing(parts, by_rows, ROWS)


def on_jax(parts: Parts) -> Parts:
    from strategies.sharding._jax import by_rows, dividing

    return dividing(parts, by_rows, ROWS)
