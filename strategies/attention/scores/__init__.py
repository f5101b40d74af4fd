"""Causal attention in other ways than the framework's fused one: all scores at once, chunks of queries, a window.

Scores are B H rows of queries times keys. `dense_attention` makes and keeps all of them, 3 B H T T elements with the
softmax and its gradient. `chunked_attention` takes `chunk` queries at a time and recomputes them in the backward pass:
3 B H chunk T. `window_attention` lets a token see itself and the `window - 1` before it (Child et al., 2019,
arXiv:1904.10509; Beltagy et al., 2020, arXiv:2004.05150), in blocks of `window` queries against the keys they can
reach: 6 B H window window for a block, so the memory is linear in T; it is another function than full attention.
Softmax is in float32 at the least.
"""

from dataclasses import replace

from harness import Parts, Strategy, hookimpl, knobs


def dense_on_torch(parts: Parts) -> Parts:
    from strategies.attention.scores._torch import attention

    return replace(parts, attend=lambda parts, q, k, v: attention(q, k, v, 0, 0, q.shape[1]))


def dense_on_jax(parts: Parts) -> Parts:
    from strategies.attention.scores._jax import attention

    return replace(parts, attend=lambda parts, q, k, v: attention(q, k, v, 0, 0, q.shape[1]))


def chunked_on_torch(parts: Parts, chunk: int = 512) -> Parts:
    from strategies.attention.scores._torch import by_chunks

    knobs.above_0("chunked_attention", chunk=chunk)
    return replace(parts, attend=lambda parts, q, k, v: by_chunks(q, k, v, chunk))


def chunked_on_jax(parts: Parts, chunk: int = 512) -> Parts:
    from strategies.attention.scores._jax import by_chunks

    knobs.above_0("chunked_attention", chunk=chunk)
    return replace(parts, attend=lambda parts, q, k, v: by_chunks(q, k, v, chunk, q.shape[1]))


def window_on_torch(parts: Parts, window: int = 512) -> Parts:
    from strategies.attention.scores._torch import by_windows

    knobs.above_0("window_attention", window=window)
    return replace(parts, attend=lambda parts, q, k, v: by_windows(q, k, v, window))


def window_on_jax(parts: Parts, window: int = 512) -> Parts:
    from strategies.attention.scores._jax import by_chunks

    knobs.above_0("window_attention", window=window)
    return replace(parts, attend=lambda parts, q, k, v: by_chunks(q, k, v, window, window))


def about(first: str) -> str:
    return f"{first}\n\n{__doc__}"


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "dense_attention",
            rewrites=("attend",),
            on={"torch": dense_on_torch, "jax": dense_on_jax},
            about=about("Compute and keep all T x T scores of attention; pay memory that grows with the square of T."),
        ),
        Strategy(
            "chunked_attention",
            rewrites=("attend",),
            on={"torch": chunked_on_torch, "jax": chunked_on_jax},
            about=about("Compute the scores of some queries at a time, twice; keep queries, keys and values alone."),
            probe={"chunk": 8},
        ),
        Strategy(
            "window_attention",
            rewrites=("attend",),
            on={"torch": window_on_torch, "jax": window_on_jax},
            about=about("Attend to the last `window` tokens alone; lose all longer links."),
            approximate=True,
            probe={"window": 8},
        ),
    ]
