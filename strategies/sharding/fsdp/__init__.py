"""Hold a part of every parameter, gradient and moment on each rank; pay three transfers of all parameters in a step.

A block's parameters are made whole before it runs and dropped after, made whole again, one by one, in the backward
pass, and their gradients are summed into the parts at once. Peak of a rank: 16 / R bytes per parameter, one whole block
or the embedding or head, and the activations of its rows. Vectors (norms, biases) stay whole. Under a checkpoint of
layers the parameters come with the recomputation. Two things keep whole parameters until the backward pass: autocast,
whose copies in 16 bits stay, and in torch a checkpoint of a block or of its feed part, which is passed them. Of a
matrix that `qlora`, named before, has packed, the codes are divided; what a strategy adds beside the model (adapters)
stays whole. (ZeRO, stage 3: Rajbhandari et al., 2020, arXiv:1910.02054; Zhao et al., "PyTorch FSDP", 2023,
arXiv:2304.11277.)
"""

from harness import Parts


def on_torch(parts: Parts) -> Parts:
    from strategies.sharding.fsdp._torch import fsdp

    return fsdp(parts)


def on_jax(parts: Parts) -> Parts:
    from strategies.sharding.fsdp._jax import fsdp

    return fsdp(parts)
