"""Attention that makes fewer scores at once computes the same, and keeps less.

What a window computes is held against its mask in `test_sparse_attention.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from harness import Parts, Place
from harness.contract import plugins

STRATEGIES = plugins.load().strategies
BOTH = pytest.mark.parametrize("backend", ["torch", "jax"])


def reference(q, k, v):
    """Attend with an explicit mask, in numpy and float64."""
    T, H, K = q.shape[1:]
    k, v = (np.repeat(x, H // k.shape[2], axis=2) for x in (k, v))
    scores = np.einsum("bthk,bshk->bhts", q, k) / K**0.5
    scores = np.where(np.tri(T, dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhts,bshk->bthk", shares / shares.sum(-1, keepdims=True), v)


def drawn(tokens, heads=4, key_heads=2, width=6, batch=2):
    random = np.random.Generator(np.random.Philox(key=tokens))
    return [random.standard_normal((batch, tokens, count, width)) for count in (heads, key_heads, key_heads)]


def attend(name, backend, arrays, **knobs):
    """The result, and the gradients of its square, in float64."""
    parts = STRATEGIES[name].on[backend](Parts(None, Place(backend, "cpu")), **knobs)
    if backend == "torch":
        leaves = [torch.from_numpy(x).requires_grad_() for x in arrays]
        actual = parts.attend(parts, *leaves)
        return [actual.detach().numpy(), *(g.numpy() for g in torch.autograd.grad(actual.square().sum(), leaves))]
    with jax.enable_x64(True):
        leaves = [jnp.asarray(x) for x in arrays]

        def squared(*qkv):
            actual = parts.attend(parts, *qkv)
            return jnp.square(actual).sum(), actual

        gradients, actual = jax.jit(jax.grad(squared, argnums=(0, 1, 2), has_aux=True))(*leaves)
        return [np.asarray(actual), *map(np.asarray, gradients)]


@BOTH
@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 33])
@pytest.mark.parametrize(("name", "knobs"), [("dense_attention", {}), ("chunked_attention", {"chunk": 8})])
def test_all_scores_at_once_or_some_at_a_time_give_full_attention(name, knobs, tokens, backend):
    arrays = drawn(tokens)
    answer = attend(name, backend, arrays, **knobs)
    np.testing.assert_allclose(answer[0], reference(*arrays), rtol=1e-10, atol=1e-12)
    plain = attend("dense_attention", "torch", arrays)
    for actual, due in zip(answer, plain, strict=True):
        np.testing.assert_allclose(actual, due, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("name", "knobs"), [("chunked_attention", {"chunk": 64}), ("window_attention", {"window": 64})]
)
def test_the_scores_of_all_tokens_are_never_in_memory(name, knobs):
    shapes = [jax.ShapeDtypeStruct((1, 2048, 2, 16), jnp.float32)] * 3
    taken = {}
    for each, options in (("dense_attention", {}), (name, knobs)):
        parts = STRATEGIES[each].on["jax"](Parts(None, Place("jax", "cpu")), **options)
        step = jax.jit(jax.grad(lambda q, k, v, parts=parts: parts.attend(parts, q, k, v).sum(), argnums=(0, 1, 2)))
        taken[each] = step.lower(*shapes).compile().memory_analysis().temp_size_in_bytes
    assert taken[name] < 0.2 * taken["dense_attention"]


@pytest.mark.parametrize(
    ("name", "short", "long"),
    [("chunked_attention", {"chunk": 64}, {"chunk": 4096}), ("window_attention", {"window": 64}, {"window": 4096})],
)
def test_in_jax_a_chunk_or_window_beyond_the_row_takes_what_the_row_does(name, short, long):
    shapes = [jax.ShapeDtypeStruct((1, 64, 2, 16), jnp.float32)] * 3
    taken = []
    for options in (short, long):
        parts = STRATEGIES[name].on["jax"](Parts(None, Place("jax", "cpu")), **options)
        step = jax.jit(jax.grad(lambda q, k, v, parts=parts: parts.attend(parts, q, k, v).sum(), argnums=(0, 1, 2)))
        taken.append(step.lower(*shapes).compile().memory_analysis().temp_size_in_bytes)
    assert taken[1] <= 1.1 * taken[0]


def saved_bytes(name, tokens, **knobs):
    """The bytes that autograd keeps of one call in torch."""
    parts = STRATEGIES[name].on["torch"](Parts(None, Place("torch", "cpu")), **knobs)
    leaves = [torch.zeros(1, tokens, 2, 8, requires_grad=True) for _ in range(3)]
    saved = {}

    def keep(tensor):
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = parts.attend(parts, *leaves)
    assert result.shape == (1, tokens, 2, 8)
    return sum(saved.values())


def test_what_torch_keeps_grows_with_the_square_or_with_the_length():
    assert saved_bytes("dense_attention", 512) > 3.5 * saved_bytes("dense_attention", 256)
    for name, knobs in (("chunked_attention", {"chunk": 64}), ("window_attention", {"window": 64})):
        assert saved_bytes(name, 512, **knobs) < 0.2 * saved_bytes("dense_attention", 512)
        assert saved_bytes(name, 512, **knobs) < 2.2 * saved_bytes(name, 256, **knobs)


@pytest.mark.parametrize(
    "name",
    ["dense_attention", "chunked_attention", "window_attention", "block_sparse_attention", "native_sparse_attention"],
)
def test_values_of_another_width_are_refused_in_a_sentence(name):
    q, k, v = drawn(12)
    with pytest.raises(ValueError, match=r"values are 4 wide, and (queries|keys) 6: this attention takes equal widths"):
        attend(name, "torch", (q, k, v[..., :4]))
