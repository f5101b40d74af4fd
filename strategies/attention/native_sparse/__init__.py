"""Attend to block means, some chosen blocks and a window; lose all other links, and choose for each token.

The three branches are those of native sparse attention (NSA; Yuan et al., 2025, arXiv:2502.11089). A token attends
to the means of keys and values of each block of `block` tokens that ends no later than itself; to the tokens of
`blocks` whole blocks, namely the first, its own, and those which the means gave the largest shares, summed over the
heads that share keys and values (of equal ones the earlier block); and to the last `window` tokens, itself included.
What a branch has nothing to see for is zero. The result is the mean of the three.

The paper learns two things that are fixed here, because only queries, keys and values are at hand: how a block is
compressed (here its mean, without overlap), and the gate of each branch (here a third). So memory and speed are
those of NSA without its fused kernel, and the quality of the model is not. No gradient passes through the choice.

Peak beside queries, keys and values: `chunk` queries C at a time, recomputed in the backward pass, with 4 B G C blocks
block K elements of gathered keys, values and their gradients, and 3 B H C (T / block + blocks block + window) of
scores; two more copies of keys and values, and gradients in float32 at the least. So memory is linear in T (keys are
padded to whole blocks), and time is T (T / block + blocks block + window): far from the square, yet the gathers of each
token on its own are what a fused kernel would save, and without one it is slow where T is short. Softmax is in float32
at the least.
"""

from dataclasses import replace

from harness import Parts, Strategy, hookimpl


def checked(block: int, blocks: int, window: int, chunk: int) -> None:
    """Refuse a choice that has no room for the first block and the token's own."""
    if min(block, window, chunk) < 1 or blocks < 2:
        raise ValueError(
            "native_sparse_attention: block, window and chunk must be at least 1, and blocks at least 2 for the first "
            f"and the token's own, not {block}, {window}, {chunk} and {blocks}"
        )


def on_torch(parts: Parts, block: int = 64, blocks: int = 16, window: int = 512, chunk: int = 32) -> Parts:
    from strategies.attention.native_sparse._torch import attention

    checked(block, blocks, window, chunk)
    return replace(parts, attend=lambda parts, q, k, v: attention(q, k, v, block, blocks, window, chunk))


def on_jax(parts: Parts, block: int = 64, blocks: int = 16, window: int = 512, chunk: int = 32) -> Parts:
    from strategies.attention.native_sparse._jax import attention

    checked(block, blocks, window, chunk)
    return replace(parts, attend=lambda parts, q, k, v: attention(q, k, v, block, blocks, window, chunk))


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "native_sparse_attention",
            rewrites=("attend",),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            approximate=True,
            probe={"block": 4, "blocks": 3, "window": 6, "chunk": 8},
            conflicts={
                "ulysses": "ranks that outnumber the heads of keys part heads that choose blocks together: use "
                "tensor_parallel"
            },
        )
    ]
