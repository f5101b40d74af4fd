"""A network over frames is the same model in torch and in JAX, looks back and never ahead, and can learn."""

from collections import Counter
from functools import cache, partial
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from pydantic import ValidationError

from harness import Place, backends
from harness.contract import plugins
from harness.contract.assembly import assemble, never_called
from harness.contract.loop import training
from harness.contract.place import NAMES
from harness.records import Applied, Case
from harness.worker import numerics

LOADED = plugins.load()
TEMPORAL = LOADED.workloads["temporal"]
NETWORKS = ["lstm", "gru", "mamba", "attention", "jamba"]
SCANS = ["mamba", "jamba"]
UPDATES = 4


def probe(network, **sizes):
    return TEMPORAL.probe(TEMPORAL.shape(network=network)).model_copy(update=sizes)


def parts_of(backend, shape, corpus=None):
    return TEMPORAL.on[backend](shape, Place(backend, "cpu"), corpus, 0)


def case(backend, network, *names):
    return Case(
        workload="temporal",
        shape=probe(network).model_dump(),
        place=f"{backend}/cpu",
        corpus="drawn",
        tokenizer="none",
        strategies=tuple(Applied(name=name, knobs=dict(LOADED.strategies[name].probe)) for name in names),
    )


@cache
def outcome(backend, network, *names, dtype=None):
    """Losses of four steps, the gradients that the first update got and the parameters after the last one."""
    module = backends.load(backend)
    module.start(Place(backend, "cpu"))
    module.deterministic(Place(backend, "cpu"))
    draw = (lambda inner: module.cast(inner, dtype)) if dtype else None
    return numerics.observer(LOADED, case(backend, network, *names), module, draw, updates=UPDATES)(0)


def away(answer, reference):
    """The norm of the difference of two sets of gradients, relative to that of the second."""
    assert answer.keys() == reference.keys()
    off = sum(float(np.sum((answer[name].astype(np.float64) - reference[name]) ** 2)) for name in reference)
    return (off / sum(float(np.sum(reference[name].astype(np.float64) ** 2)) for name in reference)) ** 0.5


# One model in two frameworks


@pytest.mark.parametrize(
    "network", [pytest.param(each, marks=[pytest.mark.long] * (each in ("mamba", "jamba"))) for each in NETWORKS]
)
def test_torch_and_jax_give_the_same_losses_and_gradients(network, stacked):
    answer, reference = outcome("torch", network), outcome("jax", network)
    assert len(answer.trajectory) == UPDATES == len(set(answer.trajectory))
    assert answer.trajectory == pytest.approx(reference.trajectory, rel=1e-5)
    assert answer.loss == pytest.approx(np.log(7), rel=0.05), "untrained, it knows nothing"
    answer, reference = stacked(answer.gradients), reference.gradients
    assert away(answer, reference) < 1e-5
    for name, value in reference.items():
        assert np.abs(value).max() > 0, f"{name} has no influence"
        np.testing.assert_allclose(answer[name], value, rtol=1e-3, atol=1e-5 * np.abs(value).max(), err_msg=name)


@pytest.mark.parametrize("network", NETWORKS)
def test_float64_parameters_make_a_float64_reference(network):
    actual = outcome("torch", network, dtype="float64")
    assert set(actual.dtypes.values()) == {"float64"}
    assert actual.trajectory == pytest.approx(outcome("torch", network).trajectory, rel=1e-5)


def test_recurrences_have_the_parameters_of_those_of_torch():
    for network, arrays in (("lstm", torch.nn.LSTM(24, 24)), ("gru", torch.nn.GRU(24, 24))):
        shapes = TEMPORAL.shape(network=network, width=24).parameter_shapes()
        ours = [shapes[f"layers.{name}"][0] for name in ("wx", "wh", "bx", "bh")]
        assert ours == [tuple(weight.shape) for weight in arrays.parameters()]


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("backend", NAMES)
def test_the_parameters_made_are_those_of_the_shape(backend, network, stacked):
    shape = probe(network, width=42)
    parts = parts_of(backend, shape)
    params = backends.load(backend).arrays(parts.init(parts, None)["params"])
    arrays = {name: array for name, (array, _) in params.items()}
    arrays = stacked(arrays) if backend == "torch" else arrays
    due = {
        name: (shape.layers, *size) if name.startswith("layers.") else size
        for name, (size, _) in shape.parameter_shapes().items()
    }
    assert {name: array.shape for name, array in arrays.items()} == due
    assert sum(array.size for array in arrays.values()) == shape.parameters()


def test_a_jamba_group_has_the_parts_of_both_blocks():
    of = {network: set(TEMPORAL.shape(network=network).parameter_shapes()) for network in NETWORKS}
    assert of["jamba"] == of["mamba"] | of["attention"] | {"layers.mamba_norm"}
    assert of["mamba"] & of["attention"] == of["lstm"] & of["gru"] & of["attention"]


# Across frames


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("backend", NAMES)
def test_a_frame_changes_no_output_before_it_and_every_one_after(backend, network):
    shape = probe(network)
    parts = parts_of(backend, shape)
    params = parts.init(parts, None)["params"]

    def outputs(x, y):
        return parts.stack(parts, params["layers"], parts.embed(parts, params, x))

    if backend == "jax":
        outputs = jax.jit(outputs)
    random = np.random.Generator(np.random.Philox(key=0))
    frames = random.standard_normal((2, 13, shape.features), np.float32)
    labels = np.zeros((2, 13), np.int32)

    def numbers(frames):
        actual = outputs(*parts.transfer(parts, frames, labels))
        return np.asarray(actual.detach() if backend == "torch" else actual)

    before = numbers(frames)
    for t in (0, 5, 12):
        other = frames.copy()
        other[0, t] += 1
        change = np.abs(numbers(other) - before).max(-1)
        assert (change[0, :t] < 1e-6).all() and (change[1] < 1e-6).all()
        assert (change[0, t:] > 2e-6).all(), "what came before is forgotten"


@pytest.mark.parametrize("network", ["gru", "mamba"])
def test_it_learns_labels_that_were_to_be_seen_three_frames_ago(network):
    sizes = {"frames": 3000, "features": 4, "classes": 4, "window": 12, "stride": 3, "batch": 32, "shuffle": True}
    shape = TEMPORAL.shape(network=network, **sizes, width=32, states=4, learning_rate=1e-2)
    parts = parts_of("torch", shape)
    losses = [float(loss) for loss, _ in islice(training(parts, partial(parts.step, parts)), 150)]
    # The first three labels of a window cannot be known: a quarter of log 4 is left.
    assert np.mean(losses[-10:]) < 0.75 * np.log(4)


# The scan


def rows(T, dtype=np.float64, strength=1.0, seed=0):
    """Inputs of a scan [2, T, 3] with 4 states, drawn; `strength` multiplies the step sizes."""
    random = np.random.Generator(np.random.Philox(key=seed))
    x, b, c = (random.standard_normal((2, T, n)) for n in (3, 4, 4))
    delta, a = strength * random.random((2, T, 3)), -np.exp(random.standard_normal((3, 4)))
    return tuple(array.astype(dtype) for array in (x, delta, a, b, c))


def recurrence(x, delta, a, b, c):
    """The definition, step by step, in float64."""
    h, ys = np.zeros((len(x), *a.shape)), []
    for t in range(x.shape[1]):
        h = np.exp(delta[:, t, :, None] * a) * h + (delta[:, t] * x[:, t])[..., None] * b[:, t, None]
        ys.append(np.einsum("bes,bs->be", h, c[:, t]))
    return np.stack(ys, 1)


@pytest.mark.parametrize("T", [1, 2, 3, 13, 30, 32])
@pytest.mark.parametrize("backend", NAMES)
def test_the_scan_is_the_recurrence(backend, T):
    inputs = rows(T)
    parts = parts_of(backend, probe("mamba"))
    if backend == "torch":
        actual = parts.scan(parts, *map(torch.from_numpy, inputs)).numpy()
    else:
        with jax.enable_x64(True):
            actual = np.asarray(jax.jit(partial(parts.scan, parts))(*map(jnp.asarray, inputs)))
    assert actual.dtype == np.float64
    np.testing.assert_allclose(actual, recurrence(*inputs), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("strength", [1e-4, 1e3], ids=["weak", "strong"])
@pytest.mark.parametrize("backend", NAMES)
def test_a_long_scan_stays_finite_however_strong_its_decay(backend, strength):
    inputs = rows(4096, np.float32, strength)
    parts = parts_of(backend, probe("mamba"))
    if backend == "torch":
        tensors = [torch.from_numpy(array).requires_grad_() for array in inputs]
        y = parts.scan(parts, *tensors)
        grads = torch.autograd.grad(y.sum(), tensors)
        y = y.detach()
    else:

        def summed(*inputs):
            y = parts.scan(parts, *inputs)
            return y.sum(), y

        grads, y = jax.jit(jax.grad(summed, argnums=range(5), has_aux=True))(*inputs)
    assert all(np.isfinite(np.asarray(grad)).all() for grad in grads)
    due = recurrence(*(array.astype(np.float64) for array in inputs))
    np.testing.assert_allclose(np.asarray(y), due, rtol=1e-3, atol=1e-4 * np.abs(due).max())


def test_decays_and_states_are_float32_under_bfloat16():
    """A sum of many small inputs would stand still in 8 bits."""
    x, delta, a, b, c = rows(600, np.float32)
    x, b, c, delta, a = np.ones_like(x), np.ones_like(b), np.ones_like(c), delta * 0 + 1e-3, a * 1e-3
    due = recurrence(*(array.astype(np.float64) for array in (x, delta, a, b, c)))
    for backend in NAMES:
        parts = parts_of(backend, probe("mamba"))
        if backend == "torch":
            low = [torch.from_numpy(array).bfloat16() for array in (x, b, c)]
            y = parts.scan(parts, low[0], torch.from_numpy(delta), torch.from_numpy(a), *low[1:])
            assert y.dtype == torch.bfloat16
            y = y.float().numpy()
        else:
            low = [jnp.asarray(array, jnp.bfloat16) for array in (x, b, c)]
            y = jax.jit(partial(parts.scan, parts))(low[0], delta, a, *low[1:])
            assert y.dtype == jnp.bfloat16
            y = np.asarray(y.astype(jnp.float32))
        np.testing.assert_allclose(y, due, rtol=2**-8)


@pytest.mark.parametrize("network", NETWORKS)
def test_the_scan_is_called_by_the_networks_that_have_one(network):
    calls = Counter()
    parts = assemble(LOADED, case("torch", network, "sequential_scan"), calls=calls)
    next(training(parts, partial(parts.step, parts)))
    idle = never_called(calls)
    assert idle is None if network in SCANS else "'sequential_scan' rewrote 'scan', but it was never called" in idle


# Under strategies


@pytest.mark.parametrize("network", NETWORKS)
def test_a_checkpoint_gives_the_same_bits(network):
    answer, reference = outcome("torch", network, "checkpoint"), outcome("torch", network)
    assert answer.trajectory == reference.trajectory
    assert all(np.array_equal(answer.gradients[name], reference.gradients[name]) for name in reference.gradients)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(("name", "bound"), [("fused_loss", 1e-5), ("bfloat16", 2e-2)])
def test_strategies_of_the_decoder_serve_it_as_well(name, bound, network):
    answer, reference = outcome("torch", network, name), outcome("torch", network)
    assert answer.trajectory == pytest.approx(reference.trajectory, rel=bound)
    assert away(answer.gradients, reference.gradients) < bound
    assert set(answer.dtypes.values()) == {"bfloat16" if name == "bfloat16" else "float32"}


@pytest.mark.long
@pytest.mark.parametrize("name", ["checkpoint", "fused_loss", "bfloat16"])
def test_they_serve_it_in_jax(name):
    answer, reference = outcome("jax", "gru", name), outcome("jax", "gru")
    bound = 2e-2 if name == "bfloat16" else 1e-5
    assert answer.trajectory == pytest.approx(reference.trajectory, rel=bound)
    assert away(answer.gradients, reference.gradients) < bound


# Prediction


@pytest.mark.parametrize(
    ("backend", "network"), [*(("torch", network) for network in NETWORKS), ("jax", "lstm"), ("jax", "mamba")]
)
def test_each_network_is_predicted(backend, network):
    shape = TEMPORAL.tiny(TEMPORAL.shape(network=network))
    place = Place(backend, "cpu")
    peaks = (
        backends.load(backend)
        .predict(lambda: parts_of(backend, shape), place, TEMPORAL.abstract_batch(shape), source_bytes=0, steps=2)
        .peaks
    )
    assert peaks["steady_step" if backend == "jax" else "steady_step/backward"] > 0
    window = shape.window * (shape.features + 1) * 4
    assert max(peaks.values()) >= TEMPORAL.floor(shape) - window


def test_the_log_depth_scan_is_what_dominates_a_predicted_mamba():
    shape = TEMPORAL.shape(network="mamba", batch=8)
    peaks = (
        backends.load("torch")
        .predict(
            lambda: parts_of("torch", shape),
            Place("torch", "cpu"),
            TEMPORAL.abstract_batch(shape),
            source_bytes=0,
            steps=1,
        )
        .peaks
    )
    states = shape.batch * shape.window * shape.channels * shape.states * 4
    assert 6 * states < peaks["first_step/backward"] - peaks["init"] < 12 * states


# Data


@pytest.mark.parametrize("backend", NAMES)
def test_batches_are_windows_of_the_frames_with_a_label_each(backend):
    shape = probe("lstm")
    parts = parts_of(backend, shape)
    source = parts.source(parts)
    assert (source.inputs.shape, source.targets.shape) == ((54, 11), (54,))
    batches = parts.batches(parts, parts.windows(parts, source))
    (size_x, _), (size_y, _) = TEMPORAL.abstract_batch(shape)
    for number, (x, y) in enumerate(islice(batches, 3)):
        assert (tuple(x.shape), tuple(y.shape)) == (size_x, size_y)
        assert str(x.dtype).endswith("float32")
        start = (3 * number + 1) * shape.stride
        assert np.array_equal(np.asarray(x)[1], source.inputs[start : start + 13])
        assert np.array_equal(np.asarray(y)[1], source.targets[start : start + 13])
    extent = TEMPORAL.extent(shape, None, 3)
    assert extent.base == source.inputs.nbytes + source.targets.nbytes
    assert extent.batch_bytes == np.prod(size_x) * 4 + np.prod(size_y) * 4


@pytest.mark.parametrize("backend", NAMES)
def test_frames_of_any_float_arrive_as_float32_also_when_they_are_read_only(backend):
    parts = parts_of(backend, probe("lstm"))
    for dtype in (np.float16, np.float32, np.float64):
        frames = np.arange(12).reshape(1, 4, 3).astype(dtype)
        frames.flags.writeable = False
        x, y = parts.transfer(parts, frames[:, ::-1], np.zeros((1, 4), np.uint8))
        assert str(x.dtype).endswith("float32") and np.array_equal(np.asarray(x), frames[:, ::-1])
        assert str(y.dtype).endswith("int64" if backend == "torch" else "int32")


# Shapes


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("preset", [{}, *TEMPORAL.presets.values()], ids=["default", *TEMPORAL.presets])
def test_reduced_shapes_are_valid_and_keep_the_network(preset, network):
    shape = TEMPORAL.shape(network=network, **preset)
    for reduced in (TEMPORAL.tiny(shape), TEMPORAL.probe(shape)):
        assert TEMPORAL.shape.model_validate(reduced.model_dump()) == reduced
        assert reduced.network == network and reduced.parameters() < shape.parameters()
    parts = parts_of("torch", TEMPORAL.probe(shape))
    source = parts.source(parts)
    assert source.count >= 5 * source.batch and source.batch > 1


def test_the_document_is_asked_for_whole():
    shape = TEMPORAL.shape(**TEMPORAL.presets["document"])
    assert TEMPORAL.wanted(shape, 3) == {"frames": 380_000, "features": 287, "classes": 16}
    assert TEMPORAL.tokens_per_step(shape) == 256 * 30
    assert TEMPORAL.extent(shape, None, 3).count == 379_971


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"frames": 20, "window": 30}, "window of 30 is longer than the 20 rows"),
        ({"frames": 40, "window": 30}, "40 frames hold 11 windows, fewer than one batch of 64"),
        ({"network": "jamba", "width": 50}, "width 50 is not a multiple of heads 4"),
        ({"network": "attention", "width": 4}, "too narrow for rotary positions"),
        ({"network": "transformer"}, "network\n.*'lstm', 'gru', 'mamba', 'attention' or 'jamba'"),
        ({"classes": 1}, "classes\n.*greater than or equal to 2"),
        ({"stride": 0}, "stride\n.*greater than or equal to 1"),
        ({"depth": 4}, "depth\n.*not permitted"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_in_words(sizes, sentence):
    with pytest.raises(ValidationError, match=sentence):
        TEMPORAL.shape(**sizes)


def test_a_width_need_not_fit_heads_that_are_not_there():
    assert TEMPORAL.shape(network="lstm", width=50).parameters() > 0
