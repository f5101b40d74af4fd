"""Ring attention as one `jax.custom_vjp`: keys and values go round the row of devices, merged by their log-sum-exp."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from harness import Parts
from strategies.sharding._jax import AXIS, dividing, positions_by, tokens_by
from strategies.sharding.shares import TOKENS, folded, in_order


def ring_attention(parts: Parts, zigzag: bool = True) -> Parts:
    """Divide the tokens of every row; pass the keys and values round, and attend to those that are there."""
    blocks = folded if zigzag else in_order

    def attend(parts: Parts, q_BTHK: Any, k_BTGK: Any, v_BTGK: Any) -> Any:
        B, T, H, K = q_BTHK.shape
        q_BTGRK = q_BTHK.reshape(B, T, k_BTGK.shape[2], -1, K)
        return in_ring(parts.ranks, zigzag, q_BTGRK, k_BTGK, v_BTGK).reshape(B, T, H, K)

    parts = replace(parts, attend=attend, positions=positions_by(blocks))
    return dividing(parts, tokens_by(blocks), TOKENS)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def in_ring(ranks: int, zigzag: bool, q_BTGRK: Any, k_BTGK: Any, v_BTGK: Any) -> Any:
    """Attend causally to the tokens of all ranks; in the backward pass the scores are computed again."""
    return _ring_forward(ranks, zigzag, q_BTGRK, k_BTGK, v_BTGK)[0]


def passed_on(ranks: int, values: Any) -> Any:
    """Send to the next rank, and receive from the one before."""
    return jax.tree.map(lambda value: lax.ppermute(value, AXIS, [(r, (r + 1) % ranks) for r in range(ranks)]), values)


def _ring_forward(ranks: int, zigzag: bool, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """Attend to the own tokens, of which each sees those before, and then to what comes round, see `_halves`."""
    half = q.shape[1] // 2
    own = _attended(q, k, v, _in_order(q.shape[1]))

    def plain_turn(at: int, carried: Any) -> Any:
        kv, so_far = carried
        kv = passed_on(ranks, kv)
        return kv, lax.cond(_earlier(at), lambda: _merged(so_far, _attended(q, *kv)), lambda: so_far)

    def turn(at: int, carried: Any) -> Any:
        (k, v), (first, second) = carried
        k, v = passed_on(ranks, (k, v))
        earlier, q_either, (k_either, v_either) = _halves(at, half, q, (k, v))
        second = _merged(second, _attended(q[:, half:], k[:, :half], v[:, :half]))
        out, lse = _attended(q_either, k_either, v_either)
        first = _merged(first, (out, jnp.where(earlier, lse, -jnp.inf)))
        return (k, v), (first, _merged(second, (out, jnp.where(earlier, -jnp.inf, lse))))

    if zigzag:
        of_halves = tuple(tuple(each[:, span] for each in own) for span in (slice(half), slice(half, None)))
        _, (first, second) = _turns(ranks, turn, ((k, v), of_halves))
        out, lse = (jnp.concatenate(pair, 1) for pair in zip(first, second, strict=True))
    else:
        _, (out, lse) = _turns(ranks, plain_turn, ((k, v), own))
    out = out.astype(q.dtype)
    return out, (q, k, v, out, lse)


def _ring_backward(ranks: int, zigzag: bool, residuals: Any, d_out: Any) -> tuple[Any, Any, Any]:
    """Send the gradients of keys and values round with them, until they are home."""
    q, k, v, out, lse = residuals
    half = q.shape[1] // 2
    wide = lse.dtype
    inner = (d_out.astype(wide) * out.astype(wide)).sum(-1)
    own = q, d_out, lse, inner
    first, second = (tuple(each[:, span] for each in own) for span in (slice(half), slice(half, None)))
    dq, dk, dv = _gradients(own, k, v, _in_order(q.shape[1]))

    def plain_turn(at: int, carried: Any) -> Any:
        kvs, dq = carried
        k, v, dk, dv = passed_on(ranks, kvs)
        more = lax.cond(_earlier(at), lambda: _gradients(own, k, v), lambda: jax.tree.map(jnp.zeros_like, (dq, dk, dv)))
        return (k, v, dk + more[1], dv + more[2]), dq + more[0]

    def turn(at: int, carried: Any) -> Any:
        (k, v, dk, dv), dq = carried
        k, v, dk, dv = passed_on(ranks, (k, v, dk, dv))
        earlier, _, (k_either, v_either) = _halves(at, half, q, (k, v))
        either = tuple(jnp.where(earlier, a, b) for a, b in zip(first, second, strict=True))
        dq_second, dk_first, dv_first = _gradients(second, k[:, :half], v[:, :half])
        dq_either, dk_either, dv_either = _gradients(either, k_either, v_either)
        dq = dq + _placed(earlier, dq_either) + jnp.pad(dq_second, _before(half, q.ndim))
        dk, dv = (
            so_far + _placed(earlier, new) + jnp.pad(always, _after(half, k.ndim))
            for so_far, new, always in ((dk, dk_either, dk_first), (dv, dv_either, dv_first))
        )
        return (k, v, dk, dv), dq

    (_, _, dk, dv), dq = _turns(ranks, turn if zigzag else plain_turn, ((k, v, dk, dv), dq))
    if ranks > 1:
        dk, dv = passed_on(ranks, (dk, dv))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


in_ring.defvjp(_ring_forward, _ring_backward)


def _turns(ranks: int, turn: Callable[..., Any], carried: Any) -> Any:
    """Run all turns; written out, for a loop that passes something would stand beside what else passes in a layer."""
    for at in range(1, ranks):
        carried = turn(at, carried)
    return carried


def _earlier(at: int) -> Any:
    """Return whether what is here after so many turns comes from a rank before this one."""
    return lax.axis_index(AXIS) >= at


def _halves(at: int, half: int, q: Any, kv: Any) -> tuple[Any, Any, Any]:
    """Choose what else is attended to after so many turns, besides the second half of q to the first half of k and v.

    Those are always seen. Of an earlier rank the first half sees the first half too, of a later one the second half the
    second: as much for all. `earlier` says which it is.
    """
    earlier = _earlier(at)
    either = jax.tree.map(lambda each: jnp.where(earlier, each[:, :half], each[:, half:]), (q, kv))
    return earlier, *either


def _in_order(tokens: int) -> Any:
    return jnp.tri(tokens, dtype=bool)


def _scores(q_BTGRK: Any, k_BSGK: Any) -> Any:
    wide = jnp.promote_types(q_BTGRK.dtype, jnp.float32)
    scale = q_BTGRK.shape[-1] ** -0.5
    return jnp.einsum("btgrk,bsgk->bgrts", q_BTGRK, k_BSGK, preferred_element_type=wide) * scale


def _attended(q_BTGRK: Any, k_BSGK: Any, v_BSGK: Any, seen_TS: Any = None) -> tuple[Any, Any]:
    """Attend to some tokens; give the values in float32, and the log-sum-exp [B, T, G, R] of the scores."""
    scores = _scores(q_BTGRK, k_BSGK)
    if seen_TS is not None:
        scores = jnp.where(seen_TS, scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, -1)
    shares = jnp.exp(scores - lse[..., None]).astype(v_BSGK.dtype)
    out = jnp.einsum("bgrts,bsgk->btgrk", shares, v_BSGK, preferred_element_type=scores.dtype)
    return out, jnp.moveaxis(lse, -1, 1)


def _merged(some: Any, others: Any) -> tuple[Any, Any]:
    """Join what was attended to apart, by the log-sum-exp of both."""
    (a, lse_a), (b, lse_b) = some, others
    lse = jnp.logaddexp(lse_a, lse_b)
    return a * jnp.exp(lse_a - lse)[..., None] + b * jnp.exp(lse_b - lse)[..., None], lse


def _gradients(queries: Any, k_BSGK: Any, v_BSGK: Any, seen_TS: Any = None) -> tuple[Any, Any, Any]:
    """Return the gradients of q, k and v by these scores, in float32: they are computed again."""
    q, d_out, lse, inner = queries
    wide = lse.dtype
    shares = jnp.exp(_scores(q, k_BSGK) - jnp.moveaxis(lse, 1, -1)[..., None])
    if seen_TS is not None:
        shares = jnp.where(seen_TS, shares, 0)
    product = partial(jnp.einsum, preferred_element_type=wide)
    dv = product("bgrts,btgrk->bsgk", shares.astype(d_out.dtype), d_out)
    d_shares = product("btgrk,bsgk->bgrts", d_out, v_BSGK)
    d_scores = shares * (d_shares - jnp.moveaxis(inner, 1, -1)[..., None]) * q.shape[-1] ** -0.5
    d_scores = d_scores.astype(q.dtype)
    dq, dk = product("bgrts,bsgk->btgrk", d_scores, k_BSGK), product("bgrts,btgrk->bsgk", d_scores, q)
    return dq, dk, dv


def _placed(first: Any, half: Any) -> Any:
    """Put a half where it belongs, zeros in the other."""
    nothing = jnp.zeros_like(half)
    return jnp.concatenate([jnp.where(first, half, nothing), jnp.where(first, nothing, half)], 1)


def _before(size: int, dimensions: int) -> Any:
    return [(size if at == 1 else 0, 0) for at in range(dimensions)]


def _after(size: int, dimensions: int) -> Any:
    return [(0, size if at == 1 else 0) for at in range(dimensions)]
