"""Native sparse attention in JAX, some queries at a time."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Sizes(NamedTuple):
    """What a token may see: blocks of `block` tokens, `blocks` of them whole, and the last `window` tokens."""

    block: int
    blocks: int
    window: int
    chunk: int


def wide(x: Any) -> Any:
    """Return the type of a sum or a softmax: float32 at the least."""
    return jnp.promote_types(x.dtype, jnp.float32)


def softmax(scores: Any, seen: Any) -> Any:
    """Share out over what is seen; where nothing is, all shares are zero."""
    shares = jax.nn.softmax(jnp.where(seen, scores, jnp.finfo(scores.dtype).min), axis=-1)
    return jnp.where(seen, shares, 0)


def shares(q_BGCRK: Any, k_BGSK: Any, seen_CS: Any) -> Any:
    """Share out [B, G, C, R, S] over the keys that are seen."""
    scores = jnp.einsum("bgcrk,bgsk->bgcrs", q_BGCRK, k_BGSK, preferred_element_type=wide(q_BGCRK))
    return softmax(scores * q_BGCRK.shape[-1] ** -0.5, seen_CS[:, None])


def weighed(shares_BGCRS: Any, v_BGSK: Any) -> Any:
    """Sum the values by their shares."""
    return jnp.einsum("bgcrs,bgsk->bgcrk", shares_BGCRS.astype(v_BGSK.dtype), v_BGSK)


def ended(token_C: Any, blocks: int, size: int) -> Any:
    """Return which blocks end no later than each token."""
    return jnp.arange(1, blocks + 1) * size <= token_C[:, None] + 1


def choose(weight_BGCN: Any, token_C: Any, sizes: Sizes) -> Any:
    """Number `blocks` blocks for each query: the first, its own, and those of the largest weights; the rest is -1."""
    number_N, own_C = jnp.arange(weight_BGCN.shape[-1]), token_C // sizes.block
    always_CN = (number_N == 0) | (number_N == own_C[:, None])
    weight = jnp.where(always_CN, jnp.inf, weight_BGCN.astype(jnp.float32))
    weight = jnp.where(number_N > own_C[:, None], -1, weight)
    weight, chosen = lax.top_k(weight, min(sizes.blocks, len(number_N)))  # of equal ones the earlier
    return jnp.where(weight < 0, -1, chosen)


def at(x_BGTK: Any, chosen_BGCF: Any, size: int) -> Any:
    """Point at the chosen blocks [B, G, C, F, size, K]; what stands for none is the first."""
    B, G = chosen_BGCF.shape[:2]
    rows = jnp.arange(B)[:, None, None, None], jnp.arange(G)[:, None, None], jnp.maximum(chosen_BGCF, 0)
    return x_BGTK.reshape(B, G, -1, size, x_BGTK.shape[-1]).at[rows]


def some(token_C: Any, start: Any, chosen_BGCF: Any, sizes: Sizes, leaves: Any, picked: Any) -> Any:
    """Attend from the queries at `token_C` to the means of blocks, to picked ones and to the window from `start` on."""
    q_BGCRK, mean_k_BGNK, mean_v_BGNK, near_k_BGWK, near_v_BGWK = leaves
    B, G, C, _, K = q_BGCRK.shape
    y_means = weighed(shares(q_BGCRK, mean_k_BGNK, ended(token_C, mean_k_BGNK.shape[2], sizes.block)), mean_v_BGNK)

    keys, values = (x.reshape(B, G, C, -1, K) for x in picked)
    key_BGCFS = chosen_BGCF[..., None] * sizes.block + jnp.arange(sizes.block)
    seen = ((key_BGCFS <= token_C[:, None, None]) & (key_BGCFS >= 0)).reshape(B, G, C, 1, -1)
    scores = jnp.einsum("bgcrk,bgcsk->bgcrs", q_BGCRK, keys, preferred_element_type=wide(q_BGCRK)) * K**-0.5
    y_chosen = jnp.einsum("bgcrs,bgcsk->bgcrk", softmax(scores, seen).astype(values.dtype), values)

    back_CW = token_C[:, None] - start - jnp.arange(near_k_BGWK.shape[2])
    y_near = weighed(shares(q_BGCRK, near_k_BGWK, (back_CW >= 0) & (back_CW < sizes.window)), near_v_BGWK)
    return ((y_means.astype(wide(q_BGCRK)) + y_chosen + y_near) / 3).astype(q_BGCRK.dtype)


def read(inputs: tuple[Any, ...], turn: Any, sizes: Sizes) -> tuple[Any, Any]:
    """Return where one chunk is and what it chooses; and what it reads, namely leaves and picked blocks."""
    q_XBGCRK, k_BGTK, v_BGTK, mean_k_BGNK, mean_v_BGNK = inputs
    q_BGCRK = q_XBGCRK[turn]
    C, tokens = q_BGCRK.shape[2], k_BGTK.shape[2]
    token_C = turn * C + jnp.arange(C)
    reach = min(tokens, sizes.window - 1 + C)
    start = jnp.clip(turn * C - sizes.window + 1, 0, tokens - reach)
    near = (lax.dynamic_slice_in_dim(x, start, reach, 2) for x in (k_BGTK, v_BGTK))
    by_means = shares(q_BGCRK, mean_k_BGNK, ended(token_C, mean_k_BGNK.shape[2], sizes.block))
    chosen_BGCF = choose(by_means.sum(3), token_C, sizes)
    picked = tuple(at(x, chosen_BGCF, sizes.block).get() for x in (k_BGTK, v_BGTK))
    return (token_C, start, chosen_BGCF), ((q_BGCRK, mean_k_BGNK, mean_v_BGNK, *near), picked)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def by_chunks(sizes: Sizes, *inputs: Any) -> Any:
    """Attend `chunk` queries at a time, keeping the inputs alone.

    The gradient of what a chunk gathers is added to one buffer in place. Autodiff would make a gradient as long as
    all keys for each chunk, and so take time that grows with the square of the length.
    """

    def one(turn: Any) -> Any:
        (token_C, start, chosen_BGCF), what = read(inputs, turn, sizes)
        return some(token_C, start, chosen_BGCF, sizes, *what)

    return lax.map(one, jnp.arange(len(inputs[0])))


def forward(sizes: Sizes, *inputs: Any) -> tuple[Any, tuple[Any, ...]]:
    return by_chunks(sizes, *inputs), inputs


def backward(sizes: Sizes, inputs: tuple[Any, ...], dy_XBGCRK: Any) -> tuple[Any, ...]:
    def one(sums: tuple[Any, ...], turn: Any) -> tuple[tuple[Any, ...], Any]:
        (token_C, start, chosen_BGCF), what = read(inputs, turn, sizes)
        pull = jax.vjp(partial(some, token_C, start, chosen_BGCF, sizes), *what)[1]
        (dq, d_mean_k, d_mean_v, *d_near), d_picked = pull(dy_XBGCRK[turn])
        both = []
        for total, picked, near in zip(sums[:2], d_picked, d_near, strict=True):
            total = at(total, chosen_BGCF, sizes.block).add(picked.astype(total.dtype)).reshape(total.shape)
            so_far = lax.dynamic_slice_in_dim(total, start, near.shape[2], 2)
            both.append(lax.dynamic_update_slice_in_dim(total, so_far + near, start, 2))
        return (*both, sums[2] + d_mean_k, sums[3] + d_mean_v), dq

    sums = tuple(jnp.zeros(x.shape, wide(x)) for x in inputs[1:])
    sums, dq = lax.scan(one, sums, jnp.arange(len(inputs[0])))
    return dq, *(total.astype(x.dtype) for total, x in zip(sums, inputs[1:], strict=True))


by_chunks.defvjp(forward, backward)


def attention(q_BTHK: Any, k_BTGK: Any, v_BTGK: Any, block: int, blocks: int, window: int, chunk: int) -> Any:
    """Average attention to the means of blocks, to chosen blocks and to a window."""
    B, T, H, K = q_BTHK.shape
    G, chunk = k_BTGK.shape[2], min(chunk, T)

    def padded(x: Any, multiple: int) -> Any:
        return jnp.pad(x, ((0, 0), (0, -T % multiple), (0, 0), (0, 0)))

    q_XBGCRK = padded(q_BTHK, chunk).reshape(B, -1, chunk, G, H // G, K).transpose(1, 0, 3, 2, 4, 5)
    keys = [padded(x, block).swapaxes(1, 2) for x in (k_BTGK, v_BTGK)]
    # The mean of a last block with padding is never seen.
    means = [x.reshape(B, G, -1, block, K).mean(3) for x in keys]
    y_XBGCRK = by_chunks(Sizes(block, blocks, window, chunk), q_XBGCRK, *keys, *means)
    return y_XBGCRK.transpose(1, 0, 3, 2, 4, 5).reshape(B, -1, H, K)[:, :T]
