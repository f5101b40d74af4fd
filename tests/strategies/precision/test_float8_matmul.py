"""Products in 8 bits: what is rounded and how far, what is kept in 8 bits, and what does not overflow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harness import Parts, Place
from harness.contract import place, plugins

FLOAT8 = plugins.load().strategies["float8_matmul"]


def product(backend):
    parts = FLOAT8.on[backend](Parts(None, Place(backend, "cpu")))
    return lambda p, x: parts.linear(parts, p, "up", x)


def drawn(scale=1.0):
    random = np.random.Generator(np.random.Philox(key=0))
    x, w, up = (random.standard_normal(size, np.float32) for size in ((2, 64, 32), (32, 48), (2, 64, 48)))
    return x * np.float32(scale), w, up


def answer(backend, x, w, up):
    """The product, and its gradients for both factors."""
    if backend == "torch":
        leaves = [torch.from_numpy(each).requires_grad_() for each in (x, w)]
        y = product("torch")({"up": leaves[1]}, leaves[0])
        return [each.detach().numpy() for each in (y, *torch.autograd.grad(y, leaves, torch.from_numpy(up)))]
    y, back = jax.vjp(lambda x, w: product("jax")({"up": w}, x), jnp.asarray(x), jnp.asarray(w))
    return [np.asarray(each) for each in (y, *back(jnp.asarray(up)))]


def exact(x, w, up):
    return [x @ w, up @ w.T, np.einsum("btd,btf->df", x, up)]


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("backend", place.NAMES)
def test_the_error_is_that_of_three_bits_at_any_scale(backend, scale):
    for value, true in zip(answer(backend, *drawn(scale)), exact(*drawn(scale)), strict=True):
        off = np.linalg.norm(value - true) / np.linalg.norm(true)
        assert 0.01 < off < 0.1, "a roundoff of 1/16 or 1/8, averaged over a sum"


@pytest.mark.parametrize("frozen", [0, 1])
def test_of_a_frozen_factor_no_gradient_is_made(frozen):
    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += function in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
            return function(*args, **(kwargs or {}))

    x, w, up = (torch.from_numpy(each) for each in drawn())
    (x, w)[1 - frozen].requires_grad_()
    with Products() as products:
        product("torch")({"up": w}, x).backward(up)
    assert products.count == 2, "one forward, one backward"
    assert (x, w)[frozen].grad is None and (x, w)[1 - frozen].grad is not None


def test_both_frameworks_round_alike():
    for one, other in zip(answer("torch", *drawn()), answer("jax", *drawn()), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3 * np.abs(other).max())


@pytest.mark.parametrize("backend", place.NAMES)
def test_what_8_bits_can_hold_is_multiplied_exactly(backend):
    x, w = np.array([[[448.0, 2.0]]], np.float32), np.array([[0.5], [-448.0]], np.float32)
    value, of_x, of_w = answer(backend, x, w, np.array([[[1.0]]], np.float32))
    assert value.item() == pytest.approx(448 * 0.5 - 2 * 448, rel=1e-6)
    np.testing.assert_allclose(of_x.ravel(), w.ravel(), rtol=1e-6)
    np.testing.assert_allclose(of_w.ravel(), x.ravel(), rtol=1e-6)


@pytest.mark.parametrize("backend", place.NAMES)
def test_zeros_stay_zeros(backend):
    x, w, up = (np.zeros_like(each) for each in drawn())
    assert all(np.array_equal(each, np.zeros_like(each)) for each in answer(backend, x, w, up))


def test_the_input_is_kept_in_8_bits():
    saved = []
    x, w, _ = (torch.from_numpy(each).requires_grad_() for each in drawn())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        product("torch")({"up": w}, x)
    assert sorted(t.dtype.itemsize * t.numel() for t in saved) == [4, x.numel(), 4 * w.numel()]


@pytest.mark.parametrize("backend", place.NAMES)
def test_a_bias_is_added_as_it_is(backend):
    array = torch.from_numpy if backend == "torch" else jnp.asarray
    x, w, _ = (array(each) for each in drawn())
    bias = array(np.full(48, 1 + 2**-20, np.float32))
    with_bias, without = product(backend)({"up": w, "bup": bias}, x), product(backend)({"up": w}, x)
    assert np.array_equal(np.asarray(with_bias), np.asarray(without + bias))
