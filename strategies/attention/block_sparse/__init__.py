"""Attend from each block of tokens to some first blocks and those just before it; lose all other links.

The pattern is that of BigBird (Zaheer et al., 2020, arXiv:2007.14062) without its random blocks and turned causal: a
token sees what is not later than itself in the first `global_blocks` blocks, in its own block, and in the
`local - 1` blocks before that. Blocks are `block` tokens long; the defaults are the sizes of the paper, whose window
of three blocks has one on the other side. Each block of queries gathers its F = (global_blocks + local) block keys
and values, so both memory and time grow with T and not with its square. It is another function than full attention.

Peak beside queries, keys and values: C queries at a time, recomputed in the backward pass, with 3 B H C F elements of
scores and 4 B G C F K of gathered keys, values and their gradients. `chunk` is C, in whole blocks and at least one.
Softmax is in float32 at the least.
"""

from dataclasses import replace

from harness import Parts, Strategy, hookimpl


def checked(block: int, local: int, global_blocks: int, chunk: int) -> None:
    """Refuse a pattern in which a token does not see itself."""
    if min(block, local, chunk) < 1 or global_blocks < 0:
        raise ValueError(
            "block_sparse_attention: block, local and chunk must be at least 1 and global_blocks at least 0, "
            f"not {block}, {local}, {chunk} and {global_blocks}"
        )


def on_torch(parts: Parts, block: int = 64, local: int = 3, global_blocks: int = 2, chunk: int = 512) -> Parts:
    from strategies.attention.block_sparse._torch import by_blocks

    checked(block, local, global_blocks, chunk)
    return replace(parts, attend=lambda parts, q, k, v: by_blocks(q, k, v, block, local, global_blocks, chunk))


def on_jax(parts: Parts, block: int = 64, local: int = 3, global_blocks: int = 2, chunk: int = 512) -> Parts:
    from strategies.attention.block_sparse._jax import by_blocks

    checked(block, local, global_blocks, chunk)
    return replace(parts, attend=lambda parts, q, k, v: by_blocks(q, k, v, block, local, global_blocks, chunk))


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "block_sparse_attention",
            rewrites=("attend",),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            approximate=True,
            probe={"block": 4, "local": 2, "global_blocks": 1, "chunk": 8},
        )
    ]
