"""Label smoothing, z-loss and soft cap are one function, whichever strategy computes it; the oracle is in numpy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from harness import IGNORED, Objective, Parts, Place
from harness.contract import plugins
from harness.workloads.decoder import Shape, _jax, _torch, probe
from harness.workloads.temporal import Shape as TemporalShape

STRATEGIES = plugins.load().strategies
KNOBS = {
    "the plain loss": None,
    "chunked_loss": {"chunk": 7},
    "fused_loss": {"chunk": 7},
    "cut_loss": {"rows": 7, "tile": 5},
    "automatic_loss": {"threshold_gib": 0.0},
    "chunked_backward_loss": {"chunk": 7},
    "drop_ignored": {},
}
PARALLEL = "vocabulary_parallel_loss"
SETTINGS = {
    "smoothing": {"label_smoothing": 0.2},
    "z": {"z_loss": 0.3},
    "cap": {"soft_cap": 2.5},
    "all": {"label_smoothing": 0.2, "z_loss": 0.3, "soft_cap": 2.5},
}
ROWS, WIDTH, VOCABULARY = 41, 12, 23
BOUND = {"float64": 1e-14, "float32": 3e-6, "bfloat16": 1.5e-2}
ROUNDED = [*((settings, "float64") for settings in SETTINGS), ("all", "float32"), ("all", "bfloat16")]
"""Each setting in the type that shows a wrong term, and where types round, all three terms at once."""


def problem(scale=1.0):
    """Rows that fill neither a chunk nor a tile, some of them ignored, and one chunk of seven altogether."""
    random = np.random.Generator(np.random.Philox(key=7))
    x = random.standard_normal((1, ROWS, WIDTH)) * scale
    w = random.standard_normal((VOCABULARY, WIDTH))
    y = random.integers(0, VOCABULARY, (1, ROWS))
    y[random.random(y.shape) < 0.2] = IGNORED
    y[0, 14:21] = IGNORED
    return x, w, y


def oracle(x, w, y, label_smoothing=0.0, z_loss=0.0, soft_cap=0.0):
    """The loss and its two gradients in float64, written down from the definition."""
    flat, targets = x.reshape(-1, x.shape[-1]), y.reshape(-1)
    a = flat @ w.T
    z, slope = (soft_cap * np.tanh(a / soft_cap), 1 / np.cosh(a / soft_cap) ** 2) if soft_cap else (a, 1.0)
    counted = np.flatnonzero(targets != IGNORED)
    wanted = np.zeros_like(z)
    wanted[counted, targets[counted]] = 1 - label_smoothing
    wanted[counted] += label_smoothing / z.shape[1]
    exponentials = np.exp(z - z.max(1, keepdims=True))
    lse = np.log(exponentials.sum(1)) + z.max(1)
    losses = lse - (wanted * z).sum(1) + z_loss * lse**2
    p = exponentials / exponentials.sum(1, keepdims=True)
    da = (p * (1 + 2 * z_loss * lse[:, None]) - wanted) * slope
    da[targets == IGNORED] = 0
    return losses[counted].mean(), (da / len(counted) @ w).reshape(x.shape), da.T / len(counted) @ flat


def loss_of(name, backend, settings):
    plain = {"torch": _torch.loss, "jax": _jax.loss}[backend]
    parts = Parts(Shape(**settings), Place(backend, "cpu"), loss=plain)
    if KNOBS[name] is not None:
        parts = STRATEGIES[name].on[backend](parts, **KNOBS[name])
    return partial(parts.loss, parts)


def computed(name, backend, dtype, x, w, y, settings):
    """The inputs as rounded, and the loss and both gradients, all in float64."""
    loss = loss_of(name, backend, settings)
    if backend == "torch":
        leaves = [torch.from_numpy(array).to(getattr(torch, dtype)).requires_grad_() for array in (x, w)]
        value = loss(*leaves, torch.from_numpy(y))
        actual = [value.detach(), *torch.autograd.grad(value, leaves)]
        return [leaf.detach().double().numpy() for leaf in leaves], [result.double().numpy() for result in actual]
    with jax.enable_x64(dtype == "float64"):
        leaves = [jnp.asarray(array, dtype) for array in (x, w)]
        both = jax.jit(jax.value_and_grad(lambda x, w: loss(x, w, jnp.asarray(y)), argnums=(0, 1)))
        value, gradients = both(*leaves)
        return [np.asarray(leaf, np.float64) for leaf in leaves], [
            np.asarray(result, np.float64) for result in (value, *gradients)
        ]


def assert_close(actual, due, bound):
    for name, answer, true in zip(("loss", "dHidden", "dWeight"), actual, due, strict=True):
        assert np.linalg.norm(answer - true) <= bound * np.linalg.norm(true), name


@pytest.mark.parametrize(("settings", "dtype"), ROUNDED)
@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("name", KNOBS)
def test_every_strategy_computes_the_same_function(name, backend, settings, dtype):
    x, w, y = problem()
    (x, w), actual = computed(name, backend, dtype, x, w, y, SETTINGS[settings])
    assert_close(actual, oracle(x, w, y, **SETTINGS[settings]), BOUND[dtype])


@pytest.fixture
def one_rank():
    """Be the only rank of a group: its part of the vocabulary is all of it."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_vocabulary_in_parts_computes_the_same_function_and_rounds_nothing_to_float32(settings):
    x, w, y = problem()
    parts = Parts(Shape(vocabulary=VOCABULARY, **SETTINGS[settings]), Place("torch", "cpu"), loss=_torch.loss)
    parts = STRATEGIES[PARALLEL].on["torch"](parts, chunk=7)
    leaves = [torch.from_numpy(array).requires_grad_() for array in (x, w)]
    value = parts.loss(parts, *leaves, torch.from_numpy(y))
    actual = [each.numpy() for each in (value.detach(), *torch.autograd.grad(value, leaves))]
    assert_close(actual, oracle(x, w, y, **SETTINGS[settings]), BOUND["float64"])


def with_frozen(name, frozen, rows, vocabulary, dtype, settings):
    """The gradients of `x` and `w`, None if frozen, and the elements of the largest tensor that is made."""
    from torch.utils._python_dispatch import TorchDispatchMode

    draws = torch.Generator().manual_seed(0)
    x, w = (torch.randn(size, 48, generator=draws).to(dtype) for size in (rows, vocabulary))
    y = torch.randint(vocabulary, (1, rows), generator=draws)
    leaves = {"x": x.requires_grad_(frozen != "x"), "w": w.requires_grad_(frozen != "w")}
    inputs = {leaf.untyped_storage()._cdata for leaf in leaves.values()}
    parts = Parts(Shape(vocabulary=vocabulary, **settings), Place("torch", "cpu"), loss=_torch.loss)
    if (knobs := {**KNOBS, PARALLEL: {"chunk": 7}}[name]) is not None:
        parts = STRATEGIES[name].on["torch"](parts, **knobs)

    class Watch(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            actual = function(*args, **(kwargs or {}))
            for tensor in actual if isinstance(actual, tuple | list) else (actual,):
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in inputs:
                    self.largest = max(self.largest, tensor.numel())
            return actual

    with Watch() as watch:
        parts.loss(parts, x[None], w, y).backward()
    return {name: leaf.grad for name, leaf in leaves.items()}, watch.largest


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("settings", ["all", "smoothing"])
@pytest.mark.parametrize(
    ("name", "frozen"),
    [*((name, "w") for name in [*KNOBS, PARALLEL]), ("cut_loss", "x"), (PARALLEL, "x")],
)
def test_of_what_is_frozen_no_gradient_is_made(name, frozen, settings, dtype):
    trained, rows, vocabulary = ("x", 10, 40) if frozen == "w" else ("w", 40, 10)
    both, _ = with_frozen(name, "", rows, vocabulary, dtype, SETTINGS[settings])
    one, largest = with_frozen(name, frozen, rows, vocabulary, dtype, SETTINGS[settings])
    assert torch.equal(one[trained], both[trained])
    assert largest < 40 * 48, "as large as what is frozen"


@pytest.mark.parametrize("name", ["cut_loss", "fused_loss", "chunked_backward_loss"])
def test_the_compiler_leaves_out_the_gradient_of_a_frozen_classifier(name):
    loss, y = loss_of(name, "jax", {}), jnp.zeros((1, 70), jnp.int32)
    x, w = (jax.ShapeDtypeStruct(size, jnp.float32) for size in ((1, 70, 12), (VOCABULARY, 12)))
    of_one, of_both = (
        jax.jit(jax.grad(lambda x, w: loss(x, w, y), argnums=which)).lower(x, w).compile().as_text().count(" dot(")
        for which in (0, (0, 1))
    )
    assert of_one == of_both - 1


def test_each_setting_changes_every_result_by_more_than_is_tolerated():
    plain = oracle(*problem())
    for settings in SETTINGS.values():
        for one, without in zip(oracle(*problem(), **settings), plain, strict=True):
            assert np.linalg.norm(one - without) > 100 * BOUND["float32"] * np.linalg.norm(without)


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("name", KNOBS)
def test_logits_of_ten_thousand_stay_finite(name, backend):
    settings = SETTINGS["all"] | {"soft_cap": 3e4}
    x, w, y = problem(scale=3e3)
    assert np.abs(x[0] @ w.T).max() > 1e4
    (x, w), actual = computed(name, backend, "float32", x, w, y, settings)
    assert all(np.isfinite(result).all() for result in actual)
    # In float32 such logits are off by a thousandth themselves, and so are their exponentials.
    assert_close(actual, oracle(x, w, y, **settings), 2e-3)


@pytest.mark.parametrize("settings", ["none", "all"])
@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("name", KNOBS)
def test_without_a_target_the_loss_is_nan_and_the_gradients_are_zero(name, backend, settings):
    x, w, _ = problem()
    y = np.full((1, ROWS), IGNORED)
    _, (value, *gradients) = computed(name, backend, "float32", x, w, y, SETTINGS.get(settings, {}))
    assert np.isnan(value)
    for gradient in gradients:
        np.testing.assert_array_equal(gradient, np.zeros_like(gradient))


@pytest.mark.parametrize("chunk", [64, 4096])
def test_kept_logits_compute_the_same_function(chunk):
    x, w, y = problem()
    for backend in ("torch", "jax"):
        parts = Parts(Shape(**SETTINGS["all"]), Place(backend, "cpu"))
        parts = STRATEGIES["chunked_loss"].on[backend](parts, chunk=chunk, recompute=False)
        array = torch.from_numpy if backend == "torch" else jnp.asarray
        value = float(parts.loss(parts, array(x), array(w), array(y)))
        assert value == pytest.approx(oracle(x, w, y, **SETTINGS["all"])[0], rel=1e-5)


@pytest.mark.parametrize("name", ["fused_loss", "cut_loss"])
def test_no_tensor_holds_all_logits(name):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            actual = function(*args, **(kwargs or {}))
            for tensor in actual if isinstance(actual, tuple | list) else (actual,):
                if isinstance(tensor, torch.Tensor):
                    self.largest = max(self.largest, tensor.numel())
            return actual

    x, w = torch.randn(1, 300, 4, requires_grad=True), torch.randn(200, 4, requires_grad=True)
    loss = loss_of(name, "torch", SETTINGS["all"])
    with Watch() as watch:
        loss(x, w, torch.zeros(1, 300, dtype=torch.int64)).backward()
    assert watch.largest <= max(x.numel(), w.numel(), 7 * 200)


def test_the_cut_loss_computes_in_the_type_of_autocast():
    x, w, y = (torch.from_numpy(array) for array in problem())
    loss = loss_of("cut_loss", "torch", SETTINGS["all"])
    leaves = [x.float().requires_grad_(), w.float().requires_grad_()]
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(*leaves, y)
    gradients = torch.autograd.grad(value, leaves)
    halves = [x.bfloat16().requires_grad_(), w.bfloat16().requires_grad_()]
    due = loss(*halves, y)
    assert torch.equal(value, due)
    for answer, half in zip(gradients, torch.autograd.grad(due, halves), strict=True):
        assert answer.dtype == torch.float32 and torch.equal(answer, half.float())


@pytest.mark.parametrize("name", KNOBS)
def test_under_autocast_the_loss_is_that_of_narrow_inputs_and_gradients_are_wide(name):
    x, w, y = (torch.from_numpy(array) for array in problem())
    loss = loss_of(name, "torch", SETTINGS["all"])
    leaves = [x.float().requires_grad_(), w.float().requires_grad_()]
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(*leaves, y)
    halves = [x.bfloat16().requires_grad_(), w.bfloat16().requires_grad_()]
    due = loss(*halves, y)
    assert value.dtype == torch.float32 and value.item() == pytest.approx(due.item(), rel=1e-5)
    for answer, half in zip(torch.autograd.grad(value, leaves), torch.autograd.grad(due, halves), strict=True):
        assert answer.dtype == torch.float32
        assert (answer - half.float()).norm() <= BOUND["bfloat16"] * half.float().norm()


def test_the_cut_loss_has_no_second_derivative():
    x, w, y = (torch.from_numpy(array) for array in problem())
    value = loss_of("cut_loss", "torch", {})(x.requires_grad_(), w, y)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(value, x, create_graph=True)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_torchs_own_function_refuses_what_it_cannot_compute(settings):
    with pytest.raises(ValueError, match="leave them at 0, or use fused_loss"):
        STRATEGIES["native_loss"].on["torch"](Parts(Shape(**settings), Place("torch", "cpu")))


def test_the_objective_is_read_from_a_shape_that_may_not_have_one():
    assert Objective.of(Shape(**SETTINGS["all"])) == Objective(0.2, 0.3, 2.5)
    assert Objective.of(probe(Shape(**SETTINGS["all"]))) == Objective(0.2, 0.3, 2.5), "answers are compared without it"
    assert Objective.of(TemporalShape()) == Objective.of(None) == Objective()


@pytest.mark.parametrize(
    "wrong", [{"label_smoothing": 1.0}, {"label_smoothing": -0.1}, {"z_loss": -1}, {"soft_cap": -1}]
)
def test_a_setting_out_of_range_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Shape(**wrong)
