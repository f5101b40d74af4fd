"""Hold the moments and the gradients of a part of every parameter on each rank; pay as `zero1`, in the backward pass.

Each gradient is summed into the parts as soon as the backward pass has made it, and the whole of it is dropped. Peak of
a rank: 4 + 12 / R bytes per parameter in float32 under AdamW, the gradients of one block or of the classifier, and the
activations of its rows. The update is that of `zero1`. (ZeRO, stage 2: Rajbhandari et al., 2020, arXiv:1910.02054.)

torch only: in JAX the gradients come out of a scan over the layers as whole arrays, unless parameters go in as parts;
but then they are gathered in it as well, which is `fsdp`.
"""

from harness import Parts


def on_torch(parts: Parts) -> Parts:
    from strategies.sharding.zero2._torch import zero2

    return zero2(parts)
