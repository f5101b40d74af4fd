"""Sparse attentions compute what a dense mask of the same links would, look at no later token, and are linear in T."""

import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from harness import Parts, Place
from harness.backends import torch_storage
from harness.contract import plugins
from harness.workloads.decoder._torch import RotaryTable

LOADED = plugins.load()
BOTH = pytest.mark.parametrize("backend", ["torch", "jax"])
BLOCKS = {"block": 4, "local": 2, "global_blocks": 1, "chunk": 8}
NATIVE = {"block": 4, "blocks": 3, "window": 6, "chunk": 5}
SPARSE = pytest.mark.parametrize(
    ("name", "knobs"),
    [("window_attention", {"window": 8}), ("block_sparse_attention", BLOCKS), ("native_sparse_attention", NATIVE)],
)


def drawn(tokens, heads=4, key_heads=2, width=6, batch=2):
    random = np.random.Generator(np.random.Philox(key=tokens))
    return [random.standard_normal((batch, tokens, count, width)) for count in (heads, key_heads, key_heads)]


def attending(name, backend, **knobs):
    """The part `attend` of a strategy, its first argument given."""
    parts = LOADED.strategies[name].on[backend](Parts(None, Place(backend, "cpu")), **knobs)
    return partial(parts.attend, parts)


@cache
def jitted(name, knobs):
    """The result, and the gradients of half its square, compiled once for each shape."""
    attends = attending(name, "jax", **dict(knobs))

    @jax.jit
    def both(*leaves):
        actual, pull = jax.vjp(attends, *leaves)
        return (actual, *pull(actual))

    return both


def attend(name, backend, arrays, dtype="float64", **knobs):
    """The result, and the gradients of half its square, in float64."""
    if backend == "torch":
        leaves = [torch.from_numpy(x).to(getattr(torch, dtype)).requires_grad_() for x in arrays]
        actual = attending(name, backend, **knobs)(*leaves)
        assert actual.dtype == leaves[0].dtype
        gradients = torch.autograd.grad(actual.double().square().sum() / 2, leaves)
        return [x.detach().double().numpy() for x in (actual, *gradients)]
    with jax.enable_x64(True):
        leaves = [jnp.asarray(x, dtype) for x in arrays]
        results = jitted(name, tuple(knobs.items()))(*leaves)
        assert results[0].dtype == leaves[0].dtype
        return [np.asarray(x, np.float64) for x in results]


# The oracles: numpy, float64, all scores


def masked(q, k, v, seen):
    """Attend from q [B,H,T,K] to k, v [B,H,S,K] where `seen` [B,H,T,S]; give result, shares and the backward pass."""
    scores = np.einsum("bhtk,bhsk->bhts", q, k) / math.sqrt(q.shape[-1])
    powers = np.where(seen, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    shares = powers / np.maximum(powers.sum(-1, keepdims=True), 1e-300)

    def backward(dy):
        d_shares = np.einsum("bhtk,bhsk->bhts", dy, v)
        d_scores = shares * (d_shares - (shares * d_shares).sum(-1, keepdims=True)) / math.sqrt(q.shape[-1])
        return (
            np.einsum("bhts,bhsk->bhtk", d_scores, k),
            np.einsum("bhts,bhtk->bhsk", d_scores, q),
            np.einsum("bhts,bhtk->bhsk", shares, dy),
        )

    return np.einsum("bhts,bhsk->bhtk", shares, v), shares, backward


def by_heads(arrays):
    """Put heads first, keys and values repeated for each of their queries."""
    q, k, v = (x.transpose(0, 2, 1, 3) for x in arrays)
    return q, *(np.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))


def by_tokens(arrays, dq, dk, dv):
    """Put tokens first, the gradients of repeated keys and values summed."""
    B, T, G, K = arrays[1].shape
    dk, dv = (x.reshape(B, G, -1, T, K).sum(2) for x in (dk, dv))
    return [x.transpose(0, 2, 1, 3) for x in (dq, dk, dv)]


def band(arrays, window):
    q, k, v = by_heads(arrays)
    t, s = np.arange(q.shape[2])[:, None], np.arange(q.shape[2])
    seen = (s <= t) & (s > t - window)
    y, _, backward = masked(q, k, v, np.broadcast_to(seen, (*q.shape[:2], *seen.shape)))
    return [y.transpose(0, 2, 1, 3), *by_tokens(arrays, *backward(y))]


def block_sparse(arrays, block, local, global_blocks, chunk=None):
    q, k, v = by_heads(arrays)
    t, s = np.arange(q.shape[2])[:, None], np.arange(q.shape[2])
    near = t // block - s // block < local
    seen = (s <= t) & (near | (s // block < global_blocks))
    y, _, backward = masked(q, k, v, np.broadcast_to(seen, (*q.shape[:2], *seen.shape)))
    return [y.transpose(0, 2, 1, 3), *by_tokens(arrays, *backward(y))]


def native(arrays, block, blocks, window, chunk=None):
    q, k, v = by_heads(arrays)
    (B, H, T, _), G = q.shape, arrays[1].shape[2]
    t, s = np.arange(T)[:, None], np.arange(T)
    N = -(-T // block)
    pooling = (s // block == np.arange(N)[:, None]) / block
    ended = (np.arange(N) + 1) * block <= t + 1
    y_means, shares, back_means = masked(q, pooling @ k, pooling @ v, np.broadcast_to(ended, (B, H, T, N)))

    chosen = np.zeros((B, G, T, N), bool)
    for b, g, token in np.ndindex(B, G, T):
        weight = shares[b].reshape(G, H // G, T, N)[g, :, token].sum(0)
        own = token // block
        others = sorted((n for n in range(1, own)), key=lambda n, weight=weight: (-weight[n], n))
        chosen[b, g, token, [0, own, *others[: max(0, blocks - 2)]]] = True
    seen = np.repeat(np.repeat(chosen, H // G, axis=1), block, axis=-1)[..., :T] & (s <= t)
    y_chosen, _, back_chosen = masked(q, k, v, seen)

    near = np.broadcast_to((s <= t) & (s > t - window), (B, H, T, T))
    y_near, _, back_near = masked(q, k, v, near)
    y = (y_means + y_chosen + y_near) / 3
    dq, dk, dv = back_means(y / 3)
    dk, dv = pooling.T @ dk, pooling.T @ dv
    for back in (back_chosen, back_near):
        dq, dk, dv = (total + part for total, part in zip((dq, dk, dv), back(y / 3), strict=True))
    return [y.transpose(0, 2, 1, 3), *by_tokens(arrays, dq, dk, dv)]


def assert_close(answer, due, rtol=1e-9, atol=1e-11):
    for actual, expected, what in zip(answer, due, ("y", "dq", "dk", "dv"), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol, err_msg=what)


REACHES = [(1, 1), (1, 8), (7, 1), (7, 3), (7, 8), (8, 3), (8, 8), (9, 3), (9, 8), (9, 64),
           (33, 1), (33, 3), (33, 8), (33, 64)]  # fmt: skip
"""Tokens and a window of one token, of a part of them, of as many, and of more."""


@BOTH
@pytest.mark.parametrize(
    ("tokens", "window", "key_heads"),
    [*((*reach, 2) for reach in REACHES), *((*reach, heads) for reach in ((9, 8), (33, 3)) for heads in (1, 4))],
)
def test_a_window_gives_what_its_mask_gives(tokens, window, key_heads, backend):
    arrays = drawn(tokens, key_heads=key_heads)
    assert_close(attend("window_attention", backend, arrays, window=window), band(arrays, window), 1e-10, 1e-12)


@BOTH
@pytest.mark.parametrize(
    ("tokens", "key_heads", "knobs"),
    [
        (33, 2, BLOCKS),
        (32, 1, BLOCKS),
        (21, 4, {"block": 4, "local": 1, "global_blocks": 0, "chunk": 4}),
        (13, 2, {"block": 3, "local": 3, "global_blocks": 2, "chunk": 1}),
        (21, 2, {"block": 5, "local": 2, "global_blocks": 3, "chunk": 100}),
        (3, 2, BLOCKS),
        (1, 2, BLOCKS),
    ],
)
def test_blocks_give_what_their_mask_gives(tokens, key_heads, knobs, backend):
    arrays = drawn(tokens, key_heads=key_heads)
    assert_close(attend("block_sparse_attention", backend, arrays, **knobs), block_sparse(arrays, **knobs))


@BOTH
@pytest.mark.parametrize(
    ("tokens", "key_heads", "knobs"),
    [
        (33, 2, NATIVE),
        (32, 1, {"block": 2, "blocks": 4, "window": 1, "chunk": 32}),
        (21, 4, {"block": 3, "blocks": 2, "window": 100, "chunk": 1}),
        (20, 2, {"block": 8, "blocks": 16, "window": 3, "chunk": 8}),
        (3, 2, NATIVE),
        (1, 2, NATIVE),
    ],
)
def test_the_three_branches_give_what_their_masks_give(tokens, key_heads, knobs, backend):
    arrays = drawn(tokens, key_heads=key_heads)
    assert_close(attend("native_sparse_attention", backend, arrays, **knobs), native(arrays, **knobs))


@BOTH
def test_of_blocks_with_equal_shares_the_earlier_is_chosen(backend):
    q, k, v = drawn(33)
    arrays = q, np.ones_like(k), v
    assert_close(attend("native_sparse_attention", backend, arrays, **NATIVE), native(arrays, **NATIVE))


@BOTH
def test_heads_that_share_keys_share_the_chosen_blocks(backend):
    """Head 0 is for block 1 and head 1, less so, for block 2; together they choose block 1, and only that."""
    q, k, v = np.zeros((1, 17, 2, 2)), np.zeros((1, 17, 1, 2)), np.zeros((1, 17, 1, 2))
    k[0, 4:8, 0, 0] = k[0, 8:12, 0, 1] = 1
    q[0, 16, 0, 0], q[0, 16, 1, 1] = 5, 4
    v[0, 4:8, 0, 0] = v[0, 8:12, 0, 1] = 1
    knobs = {"block": 4, "blocks": 3, "window": 1, "chunk": 4}
    actual, *_ = attend("native_sparse_attention", backend, (q, k, v), **knobs)
    np.testing.assert_allclose(actual, native((q, k, v), **knobs)[0], rtol=1e-9, atol=1e-12)
    means = np.exp(4 / math.sqrt(2)) / (np.exp(4 / math.sqrt(2)) + 3)
    assert actual[0, 16, 1, 1] == pytest.approx(means / 3), "head 1 sees block 2 in its mean alone"


@BOTH
@SPARSE
def test_a_later_token_changes_nothing_before_it(name, knobs, backend):
    arrays = drawn(33)
    before, *_ = attend(name, backend, arrays, **knobs)
    for token in (4, 7, 20, 32):
        changed = [x.copy() for x in arrays]
        for x in changed:
            x[:, token:] = np.pi * x[:, token:][:, ::-1] + 3
        after, *_ = attend(name, backend, changed, **knobs)
        np.testing.assert_array_equal(after[:, :token], before[:, :token])
        assert (after[:, token] != before[:, token]).any()


@BOTH
@pytest.mark.parametrize(
    ("name", "knobs", "zeros"),
    [
        ("window_attention", {"window": 300}, 0),
        ("block_sparse_attention", {"block": 100, "local": 3}, 0),
        ("native_sparse_attention", {"block": 100, "window": 300, "chunk": 100}, 99),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_shares_of_half_precision_are_summed_in_float32(dtype, name, knobs, zeros, backend):
    """Among 300 equal keys each share is 1/300; a sum in bfloat16 would stop at 256 of them."""
    q, k, v = drawn(300, batch=1)
    arrays = q, np.zeros_like(k), np.ones_like(v)
    actual, *gradients = attend(name, backend, arrays, dtype=dtype, **knobs)
    bound = 1e-2 if dtype == "bfloat16" else 2e-3
    np.testing.assert_allclose(actual[:, zeros:], 1, rtol=bound)
    np.testing.assert_allclose(actual[:, :zeros], 2 / 3, rtol=bound)  # one of three branches sees nothing yet
    exact = attend(name, backend, arrays, **knobs)
    for answer, due in zip(gradients, exact[1:], strict=True):
        assert np.abs(answer - due).max() <= 2 * bound * max(1, np.abs(due).max())


@BOTH
@SPARSE
def test_large_scores_are_not_nan(name, knobs, backend):
    arrays = [60 * x for x in drawn(33)]
    assert all(np.isfinite(x).all() for x in attend(name, backend, arrays, dtype="float32", **knobs))


@pytest.mark.parametrize(
    ("name", "knobs", "sentence"),
    [
        ("block_sparse_attention", {"local": 0}, "local"),
        ("block_sparse_attention", {"block": 0}, "block"),
        ("block_sparse_attention", {"global_blocks": -1}, "global_blocks"),
        ("native_sparse_attention", {"blocks": 1}, "blocks at least 2"),
        ("native_sparse_attention", {"window": 0}, "window"),
    ],
)
@BOTH
def test_a_pattern_in_which_a_token_does_not_see_itself_is_refused(name, knobs, sentence, backend):
    with pytest.raises(ValueError, match=sentence):
        attending(name, backend, **knobs)


# Memory


def held(attend, tokens, heads=2, key_heads=2, width=8):
    """The most bytes that torch holds in one forward and backward pass of attention, in float32."""
    with torch_storage.LiveStorage() as live, live.phase("both"):
        shapes = [(1, tokens, count, width) for count in (heads, key_heads, key_heads)]
        leaves = [torch.zeros(shape, requires_grad=True) for shape in shapes]
        torch.autograd.grad(attend(*leaves).sum(), leaves)
    return live.peaks["both"]


def predicted(attend, tokens):
    """The same without any computation."""
    with torch_storage.FakeTensorMode():
        return held(attend, tokens)


def compiled(attend, tokens, heads=2, key_heads=2, width=8):
    """The bytes of temporaries of the same in JAX."""
    shapes = [jax.ShapeDtypeStruct((1, tokens, count, width), jnp.float32) for count in (heads, key_heads, key_heads)]
    step = jax.jit(jax.grad(lambda q, k, v: attend(q, k, v).sum(), argnums=(0, 1, 2)))
    return step.lower(*shapes).compile().memory_analysis().temp_size_in_bytes


NARROW = {
    "window_attention": {"window": 32},
    "block_sparse_attention": {"block": 16, "local": 2, "global_blocks": 1, "chunk": 32},
    "native_sparse_attention": {"block": 16, "blocks": 3, "window": 16, "chunk": 32},
}


@pytest.mark.long
@pytest.mark.parametrize(("backend", "count"), [("torch", predicted), ("jax", compiled)])
@pytest.mark.parametrize("name", NARROW)
def test_memory_is_linear_in_the_length(name, count, backend):
    attends = attending(name, backend, **NARROW[name])
    short, long = (count(attends, tokens) for tokens in (512, 2048))
    assert math.log(long / short, 4) < 1.05
    assert long < 0.1 * count(attending("dense_attention", backend), 2048)


@pytest.mark.parametrize("key_heads", [2, 1])
def test_torch_attends_without_all_scores(key_heads):
    """The kernel is chosen inside of torch, and one of them makes T x T scores: notice when that one is taken."""
    decoder = LOADED.workloads["decoder"]
    parts = decoder.on["torch"](decoder.shape(), Place("torch", "cpu"), None)
    short, long = (held(partial(parts.attend, parts), tokens, key_heads=key_heads) for tokens in (256, 1024))
    assert long < 4.2 * short
    assert long < 2 * 4 * 1024 * 1024 / 4, "a quarter of one set of scores"


# Rotary positions


def test_rotary_positions_past_the_first_length_stay_where_the_inputs_are():
    table = RotaryTable(8, 10_000.0)
    here, elsewhere = torch.zeros(1), torch.zeros(1, device="meta")
    for tokens in (7, 8, 40):
        for like in (here, elsewhere):
            assert all(
                part.device == like.device and part.shape == (tokens, 4) for part in table((slice(0, tokens),), like)
            )
    assert torch.equal(table((slice(0, 40),), here)[0], RotaryTable(8, 10_000.0)((slice(0, 40),), here)[0])


def test_training_goes_on_with_longer_rows():
    """A model that saw rows of 5 tokens, then of 600, computes what a fresh one does at 600."""
    decoder = LOADED.workloads["decoder"]
    shape = decoder.shape(layers=1, width=8, heads=2, vocabulary=11, tokens=600)
    ids = np.random.default_rng(0).integers(0, 11, (1, 601))

    def loss(parts, tokens):
        x, y = parts.transfer(parts, ids[:, :tokens], ids[:, 1 : tokens + 1])
        return float(parts.grad(parts, parts.init(parts, None), x, y)[0])

    used, fresh = (decoder.on["torch"](shape, Place("torch", "cpu"), None) for _ in range(2))
    loss(used, 5)
    assert loss(used, 600) == loss(fresh, 600)
