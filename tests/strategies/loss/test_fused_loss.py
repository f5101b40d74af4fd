"""The fused loss against float64, against plain code in the same type, and against its own contract."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import strategies.loss.fused_loss as fused_loss_package
from harness import Parts, Place
from strategies.loss.fused_loss import _jax, _torch
from strategies.loss.fused_loss._torch import fused_loss


def plain(x, w, y, ignore_index=-100):
    logits = (x.reshape(-1, x.shape[-1]) @ w.T).to(torch.promote_types(x.dtype, torch.float32))
    return F.cross_entropy(logits, y.reshape(-1), ignore_index=ignore_index)


def problem(n=150, D=32, V=300, dtype=torch.float32, ignored=0.3, scale=1.0, seed=0):
    """Hidden states [2, n / 2, D], a weight and targets, of which the early ones are ignored more often."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(2, n // 2, D, generator=random).mul(scale).to(dtype)
    w = (torch.randn(V, D, generator=random) / D**0.5 * 3).to(dtype)
    y = torch.randint(V, (n,), generator=random)
    y[torch.rand(n, generator=random) < torch.linspace(2 * ignored, 0, n)] = -100
    return x.requires_grad_(), w.requires_grad_(), y.view(2, n // 2)


def gradients(loss, x, w, y, *knobs, factor=1.0):
    """The loss and the gradients of `factor` times it, in float64."""
    x, w = (t.detach().clone().requires_grad_() for t in (x, w))
    value = loss(x, w, y, *knobs)
    (factor * value).backward()
    return [t.detach().double() for t in (value, x.grad, w.grad)]


def rms(a, b):
    return (a - b).square().mean().sqrt().item()


def assert_as_good_as_plain(x, w, y, *knobs, factor=1.0):
    """Every result errs, against float64, at most 2 (float32) or 3 (16 bit) times as much as plain code."""
    truth = gradients(plain, x.double(), w.double(), y, factor=factor)
    ours = gradients(fused_loss, x, w, y, *knobs, factor=factor)
    theirs = gradients(plain, x, w, y, factor=factor)
    bound, resolution = (2, 2**-24) if x.dtype == torch.float32 else (3, 2**-16)
    for name, gt, a, b in zip(("loss", "dx", "dw"), truth, ours, theirs, strict=True):
        floor = resolution * gt.square().mean().sqrt().item()  # a scalar's own error may be zero by luck
        assert rms(a, gt) <= bound * max(rms(b, gt), floor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [0, 1, 16, 75, 150, 1000])
def test_loss_and_gradients_err_no_more_than_plain_code(dtype, chunk):
    x, w, y = problem(dtype=dtype)
    assert_as_good_as_plain(x, w, y, chunk)
    assert fused_loss(x, w, y, chunk).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vocabulary_larger_than_a_tile(dtype):
    assert_as_good_as_plain(*problem(n=40, D=8, V=2 * _torch.TILE + 77, dtype=dtype), 16)


def test_float64_inputs_are_computed_in_float64():
    x, w, y = problem(dtype=torch.float64)
    for a, b in zip(gradients(fused_loss, x, w, y, 16), gradients(plain, x, w, y), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_upstream_factor(dtype):
    assert_as_good_as_plain(*problem(dtype=dtype), 16, factor=3.0)


def test_the_upstream_factor_is_not_rounded_to_bfloat16():
    x, w, y = problem(n=256, dtype=torch.bfloat16, ignored=0)
    factor = 1.3007  # 0.3 % from the nearest bfloat16
    truth = gradients(plain, x.double(), w.double(), y, factor=factor)
    for gt, a in zip(truth[1:], gradients(fused_loss, x, w, y, 16, factor=factor)[1:], strict=True):
        assert abs((a * gt).sum() / gt.square().sum() - 1) < 1e-3


def test_a_loss_scale_keeps_float16_gradients_from_underflowing():
    x, w, y = problem(n=4096, D=8, V=64, dtype=torch.float16)
    assert_as_good_as_plain(x, w, y, 512, factor=1024.0)


@pytest.mark.parametrize("ignore_index", [-100, -1, 5])
def test_ignore_index_also_inside_the_vocabulary(ignore_index):
    x, w, y = problem()
    y = torch.where(y == -100, ignore_index, y)
    for a, b in zip(
        gradients(fused_loss, x, w, y, 16, ignore_index), gradients(plain, x, w, y, ignore_index), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_one_valid_row_and_whole_chunks_ignored():
    x, w, y = problem()
    only = torch.full_like(y, -100)
    only[1, 3] = y[1].max()
    assert_as_good_as_plain(x, w, only, 16)


def test_all_ignored_is_nan_with_gradients_of_zero_as_in_plain_code():
    x, w, y = problem()
    y = torch.full_like(y, -100)
    for results in (
        gradients(fused_loss, x, w, y, 16),
        gradients(plain, x, w, y),
        jax_gradients(x, w, y, 16),
    ):
        loss, dx, dw = results
        assert loss.isnan()
        assert dx.count_nonzero() == dw.count_nonzero() == 0


def test_only_one_input_requires_a_gradient():
    x, w, y = problem()
    both = gradients(fused_loss, x, w, y, 16)
    fused_loss(x, w.detach(), y, 16).backward()
    fused_loss(x.detach(), w, y, 16).backward()
    assert torch.equal(x.grad.double(), both[1])
    assert torch.equal(w.grad.double(), both[2])


def test_no_grad_makes_no_gradients(monkeypatch):
    x, w, y = problem()
    runs = []
    real = _torch._loss_and_gradients
    monkeypatch.setattr(_torch, "_loss_and_gradients", lambda *a: runs.append(real(*a)) or runs[-1])
    with torch.no_grad():
        loss = fused_loss(x, w, y, 16)
    assert not loss.requires_grad
    assert runs[0][2:] == (None, None)
    assert torch.equal(loss, fused_loss(x, w, y, 16).detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_very_large_logits_stay_finite(dtype):
    x, w, y = problem(dtype=dtype)
    # One more feature, 100 in both, adds 1e4 to every logit and changes no probability.
    x, w = (torch.cat([t.detach(), torch.full_like(t[..., :1], 100)], -1) for t in (x, w))
    for result in gradients(fused_loss, x, w, y, 16):
        assert result.isfinite().all()
    assert_as_good_as_plain(x, w, y, 16)


def test_confident_rows_keep_their_gradient_in_bfloat16():
    # Probabilities of the targets are near 1: p - 1 must be taken before p is narrowed.
    x, w, y = problem(n=64, D=64, V=64, dtype=torch.bfloat16, ignored=0)
    w = (torch.eye(64) * 8).bfloat16()
    x = F.one_hot(y, 64).bfloat16()
    assert_as_good_as_plain(x, w, y, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_weight_gets_the_sum_of_both_uses(dtype):
    _, w, y = problem(dtype=dtype)

    def tied(loss, dtype):
        table = w.detach().to(dtype).requires_grad_()
        loss(F.embedding(y.clamp(min=0), table).sin(), table, y).backward()
        return table.grad.double()

    truth = tied(plain, torch.float64)
    assert rms(tied(fused_loss, dtype), truth) <= 3 * rms(tied(plain, dtype), truth)


def test_the_error_in_bfloat16_does_not_grow_with_the_number_of_chunks():
    x, w, y = problem(n=512, dtype=torch.bfloat16)
    truth = gradients(plain, x.double(), w.double(), y)
    errors = [
        [rms(a, b) for a, b in zip(gradients(fused_loss, x, w, y, 512 // k), truth, strict=True)] for k in (1, 8, 64)
    ]
    for _, dx, dw in errors[1:]:
        assert dx <= 1.1 * errors[0][1]
        assert dw <= 1.2 * errors[0][2]
    for loss, _, _ in errors:
        assert loss <= 1e-4 * truth[0].item()


def test_autocast_returns_gradients_in_the_types_of_the_inputs():
    x, w, y = problem()
    with torch.autocast("cpu", torch.bfloat16):
        results = gradients(fused_loss, x, w, y, 16)
    fused_loss(x, w, y, 16).backward()
    assert x.grad.dtype == w.grad.dtype == torch.float32
    halves = gradients(fused_loss, x.bfloat16(), w.bfloat16(), y, 16)
    for a, b in zip(results, halves, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-6)


def test_mixed_input_types_are_promoted():
    x, w, y = problem()
    mixed = gradients(fused_loss, x, w.bfloat16(), y, 16)
    same = gradients(fused_loss, x, w.bfloat16().float(), y, 16)
    assert torch.equal(mixed[0], same[0])
    torch.testing.assert_close(mixed[2], same[2], rtol=2**-7, atol=0)


def test_inputs_that_are_not_contiguous_and_int32_targets():
    x, w, y = problem()
    expected = gradients(fused_loss, x, w, y, 16)

    def strided(x, w, y, chunk):
        # Strided inside the graph: leaves cloned by `gradients` would be contiguous again.
        return fused_loss(x.transpose(0, 1).contiguous().transpose(0, 1), w.t().contiguous().t(), y.int(), chunk)

    for a, b in zip(gradients(strided, x, w, y, 16), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_a_second_derivative_is_refused():
    x, w, y = problem()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(fused_loss(x, w, y, 16), x, create_graph=True)


def test_a_second_backward_pass_is_refused():
    x, w, y = problem()
    loss = fused_loss(x, w, y, 16)
    loss.backward(retain_graph=True)
    once = x.grad.clone()
    with pytest.raises(RuntimeError, match="compute the loss again"):
        loss.backward()
    assert torch.equal(x.grad, once)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_runs_without_data(dtype):
    with FakeTensorMode():
        x = torch.empty(2, 75, 32, dtype=dtype, requires_grad=True)
        w = torch.empty(300, 32, dtype=dtype, requires_grad=True)
        loss = fused_loss(x, w, torch.zeros(2, 75, dtype=torch.int64), 16)
        loss.backward()
    assert (loss.shape, loss.dtype) == ((), torch.float32)
    assert (x.grad.shape, x.grad.dtype, w.grad.shape, w.grad.dtype) == (x.shape, dtype, w.shape, dtype)


def test_no_live_tensor_holds_the_logits():
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for t in result if isinstance(result, (tuple, list)) else [result]:
                largest = max(largest, t.numel() if isinstance(t, torch.Tensor) else 0)
            return result

    x, w, y = problem()
    with Watch():
        fused_loss(x, w, y, 16).backward()
    assert largest == w.numel() < y.numel() * len(w)


def test_the_chosen_chunk():
    # A quarter of the bytes of the float32 gradients holds 160 rows of logits.
    gradient_bytes = (8192 + 32000) * 512 * 4
    assert _torch.chunk_rows(8192, 32000, gradient_bytes, 4) == 128
    assert _torch.chunk_rows(8192, 32000, 2**40, 4) == 4096
    assert _torch.chunk_rows(8192, 32000, 1, 4) == 64
    assert _torch.chunk_rows(10, 32000, 1, 4) == 10
    assert [_jax.chunk_rows(32000, size) for size in (gradient_bytes, 2**40, 1)] == [128, 4096, 64]


@pytest.mark.parametrize("loss", [fused_loss, _jax.fused_loss])
def test_wrong_arguments_are_refused(loss):
    x, w, y = problem()
    if loss is not fused_loss:
        x, w, y = (jnp.asarray(t.detach().numpy()) for t in (x, w, y))
    with pytest.raises(ValueError, match="leading shape"):
        loss(x, w, y.reshape(-1))
    with pytest.raises(ValueError, match="chunk is -1"):
        loss(x, w, y, -1)


def to_jax(t):
    t = t.detach()
    if t.dtype == torch.bfloat16:
        return jnp.asarray(t.float().numpy(), jnp.bfloat16)
    return jnp.asarray(t.int().numpy() if t.dtype == torch.int64 else t.numpy())


def jax_gradients(x, w, y, *knobs, factor=1.0):
    def scaled(x, w, y):
        return factor * _jax.fused_loss(x, w, y, *knobs)

    value, (dx, dw) = jax.jit(jax.value_and_grad(scaled, argnums=(0, 1)))(to_jax(x), to_jax(w), to_jax(y))
    assert (dx.dtype, dw.dtype) == (to_jax(x).dtype, to_jax(w).dtype)
    assert value.dtype == jnp.float32
    return [torch.from_numpy(np.array(a, np.float64)) for a in (value / factor, dx, dw)]


@pytest.mark.parametrize("chunk", [0, 1, 16, 75, 1000])
def test_jax_equals_torch(chunk):
    x, w, y = problem()
    theirs = gradients(fused_loss, x, w, y, chunk, factor=3.0)
    for a, b in zip(jax_gradients(x, w, y, chunk, factor=3.0), theirs, strict=True):
        assert rms(a, b) <= 1e-6 * b.square().mean().sqrt().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_jax_errs_no_more_than_plain_code(dtype):
    x, w, y = problem(dtype=dtype)
    truth, theirs = gradients(plain, x.double(), w.double(), y), gradients(plain, x, w, y)
    bound, resolution = (2, 2**-23) if dtype == torch.float32 else (3, 2**-16)
    for gt, a, b in zip(truth, jax_gradients(x, w, y, 16), theirs, strict=True):
        assert rms(a, gt) <= bound * max(rms(b, gt), resolution * gt.square().mean().sqrt().item())


def test_jax_ignores_targets_inside_the_vocabulary():
    x, w, y = problem()
    y = torch.where(y == -100, 5, y)
    for a, b in zip(jax_gradients(x, w, y, 16, 5), gradients(plain, x, w, y, 5), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_jax_without_gradients_and_with_one():
    x, w, y = map(to_jax, problem())
    value, dx = jax.value_and_grad(_jax.fused_loss)(x, w, y, 16)
    assert jnp.allclose(value, _jax.fused_loss(x, w, y, 16), rtol=1e-6)
    assert jnp.array_equal(dx, jax.grad(_jax.fused_loss, argnums=(0, 1))(x, w, y, 16)[0])


def test_jax_keeps_no_logits():
    n, D, V, chunk = 1024, 16, 4096, 32
    shapes = [jax.ShapeDtypeStruct(s, t) for s, t in (((n, D), "float32"), ((V, D), "float32"), ((n,), "int32"))]
    step = jax.jit(jax.grad(lambda x, w, y: _jax.fused_loss(x, w, y, chunk), argnums=(0, 1)))
    temporary = step.lower(*shapes).compile().memory_analysis().temp_size_in_bytes
    assert temporary <= 4 * chunk * V * 4 + 2 * (n + V) * D * 4 < n * V * 4 / 4


def test_the_strategy_replaces_the_loss_alone():
    (strategy,) = fused_loss_package.harness_strategies()
    parts = Parts(shape=None, place=Place("torch", "cpu"), loss=print)
    x, w, y = problem()
    x, w = x.detach(), w.detach()
    assert strategy.rewrites == ("loss",)
    for backend, arrays in (("torch", (x, w, y)), ("jax", tuple(map(to_jax, (x, w, y))))):
        rewritten = strategy.on[backend](parts, chunk=16)
        assert dataclasses.replace(rewritten, loss=parts.loss) == parts
        assert abs(float(rewritten.loss(rewritten, *arrays)) - float(plain(x, w, y))) < 1e-5
    # Importing the forms must not replace the functions that lead to them.
    assert fused_loss_package.harness_strategies()[0].on == strategy.on
