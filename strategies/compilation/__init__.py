"""The framework's compiler, applied to blocks or to the whole step.

A compiler fuses operations, so that fewer intermediates are kept for the backward pass. Compiling takes time and memory
of its own at the first step. JAX compiles every step already, so these are for torch.
"""
