"""Strategies of the gradient, of precision and of the update: equal to what they stand for, step by step."""

from dataclasses import replace
from functools import cache
from itertools import islice

import numpy as np
import pytest
import torch

from harness import Place, backends, tree
from harness.contract import place, plugins
from harness.contract.assembly import assemble
from harness.contract.loop import training
from harness.records import Applied, Case

LOADED = plugins.load()
DECODER = LOADED.workloads["decoder"]


def leaves(of):
    """The leaves of a tree without their names."""
    return (leaf for _, leaf in tree.leaves(of))


def parts_of(backend, *applied, **shape):
    sizes = DECODER.probe(DECODER.shape()).model_dump() | shape
    case = Case(
        workload="decoder",
        shape=sizes,
        place=f"{backend}/cpu",
        corpus="drawn",
        tokenizer="none",
        strategies=tuple(Applied(name=name, knobs=knobs) for name, knobs in applied),
    )
    return assemble(LOADED, case)


def states_of(parts, backend, steps):
    """The state after each step, and the losses."""
    module = backends.load(backend)
    module.start(Place(backend, "cpu"))
    step = module.prepare(parts)
    seen = []

    def watched(state, x, y):
        state, loss = step(state, x, y)
        seen.append({name: array for name, (array, _) in module.arrays(state["params"]).items()})
        return state, loss

    losses = [float(loss) for loss, _ in islice(training(parts, watched, finish=module.wait), steps)]
    return seen, losses


@cache
def ten_plain(backend, **shape):
    return states_of(parts_of(backend, **shape), backend, 10)


def plain_states(backend, steps, **shape):
    """The same of the untouched parts: ten steps, of which each test takes the first, are run once for all."""
    seen, losses = ten_plain(backend, **shape)
    return seen[:steps], losses[:steps]


def away(actual, expected):
    off = sum(float(np.sum((actual[name] - expected[name]) ** 2)) for name in expected)
    return (off / sum(float(np.sum(expected[name] ** 2)) for name in expected)) ** 0.5


# Accumulation


@pytest.mark.long_in_jax
@pytest.mark.parametrize("backend", place.NAMES)
@pytest.mark.parametrize("pieces", [1, 2, 3, 8])
def test_pieces_add_up_to_the_gradient_of_the_batch_however_targets_are_ignored(backend, pieces):
    changes = {"batch": 5, "ignored": 0.5}
    actual, _ = states_of(parts_of(backend, ("accumulate", {"pieces": pieces}), **changes), backend, 2)
    expected, _ = plain_states(backend, 2, **changes)
    assert away(actual[-1], expected[-1]) < 1e-5


@pytest.mark.parametrize("backend", place.NAMES)
def test_a_piece_without_any_target_adds_nothing(backend):
    def hidden_row(parts):
        inner = parts.transfer

        def transfer(parts, x, y):
            y = np.array(y)
            y[0] = -100
            return inner(parts, x, y)

        return replace(parts, transfer=transfer)

    actual, losses = states_of(hidden_row(parts_of(backend, ("accumulate", {"pieces": 3}))), backend, 2)
    expected, plain = states_of(hidden_row(parts_of(backend)), backend, 2)
    assert np.isfinite(losses).all() and losses == pytest.approx(plain, rel=1e-5)
    assert away(actual[-1], expected[-1]) < 1e-5


def test_the_loop_runs_the_model_once_for_each_piece():
    parts = parts_of("torch", ("accumulate", {"pieces": 2}), batch=4)
    calls = []
    inner = parts.embed
    parts = replace(parts, embed=lambda parts, params, x: calls.append(len(x)) or inner(parts, params, x))
    states_of(parts, "torch", 1)
    assert calls == [2, 2]


# Feed


@pytest.mark.long_in_jax
@pytest.mark.parametrize("backend", place.NAMES)
@pytest.mark.parametrize("rows", [1, 16, 111, 1000])
def test_a_feed_of_tiles_is_the_feed(backend, rows):
    actual, _ = states_of(parts_of(backend, ("tiled_feed", {"rows": rows})), backend, 2)
    expected, _ = plain_states(backend, 2)
    assert away(actual[-1], expected[-1]) < 1e-5


# Checkpoints that keep some


def kept_bytes(*applied, **shape):
    """What autograd keeps of a forward pass in torch, parameters left out."""
    parts = parts_of("torch", *applied, **shape)
    state = parts.init(parts, None)
    own = {p.untyped_storage()._cdata for p in leaves(state["params"])}
    storages = {}

    def keep(tensor):
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.zeros(2, parts.shape.tokens, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = parts.stack(parts, state["params"]["layers"], parts.embed(parts, state["params"], x))
    assert hidden.shape[:2] == x.shape
    return sum(size for key, size in storages.items() if key not in own)


def test_a_feed_of_tiles_keeps_less():
    shape = {"width": 64, "tokens": 256, "hidden": 512}
    assert kept_bytes(("tiled_feed", {"rows": 64}), **shape) < 0.7 * kept_bytes(**shape)


def test_a_selective_checkpoint_keeps_less():
    """Of what its policy saves the hooks of autograd see nothing: `test_stack.py` counts that."""
    shape = {"width": 64, "tokens": 256, "hidden": 512}
    assert kept_bytes(("selective_checkpoint", {}), **shape) < 0.8 * kept_bytes(**shape)


def test_a_selective_checkpoint_trains_bit_for_bit_in_torch():
    actual, _ = states_of(parts_of("torch", ("selective_checkpoint", {})), "torch", 3)
    expected, _ = plain_states("torch", 3)
    assert all(np.array_equal(actual[-1][name], expected[-1][name]) for name in expected[-1])


def test_offloaded_tensors_come_back_and_leave_no_file(tmp_path):
    knobs = {"least_kib": 1, "folder": str(tmp_path)}
    parts = parts_of("torch", ("offload_activations", knobs), width=64, tokens=128)
    actual, _ = states_of(parts, "torch", 2)
    expected, _ = plain_states("torch", 2, width=64, tokens=128)
    assert all(np.array_equal(actual[-1][name], expected[-1][name]) for name in expected[-1])
    assert list(tmp_path.iterdir()) == []


def test_tensors_are_really_offloaded(tmp_path, monkeypatch):
    taken = []
    inner = torch.from_file
    monkeypatch.setattr(torch, "from_file", lambda *a, **k: taken.append(k["size"]) or inner(*a, **k))
    knobs = {"least_kib": 16, "folder": str(tmp_path)}
    states_of(parts_of("torch", ("offload_activations", knobs), width=64, tokens=128), "torch", 1)
    assert len(taken) > 10 and min(taken) * 4 >= 16 << 10


# Optimizers


@pytest.mark.parametrize("name", ["foreach_adamw", "fused_adamw"])
def test_torch_s_own_adamw_makes_the_same_steps(name):
    actual, _ = states_of(parts_of("torch", (name, {}), weight_decay=0.1), "torch", 10)
    expected, _ = plain_states("torch", 10, weight_decay=0.1)
    assert away(actual[-1], expected[-1]) < 1e-5


@pytest.mark.parametrize("backend", place.NAMES)
def test_momentum_is_that_of_torch(backend):
    parts = parts_of(backend, ("sgd_momentum", {"momentum": 0.8}), weight_decay=0.0, learning_rate=0.01)
    actual, _ = states_of(parts, backend, 4)
    plain = parts_of("torch", weight_decay=0.0, learning_rate=0.01)
    state = plain.init(plain, None)
    optimizer = torch.optim.SGD(list(leaves(state["params"])), lr=0.01, momentum=0.8)
    batches = plain.batches(plain, plain.windows(plain, plain.source(plain)))
    for x, y in islice(batches, 4):
        _, grads = plain.grad(plain, state, x, y)
        for p, g in zip(leaves(state["params"]), leaves(grads), strict=True):
            p.grad = g
        optimizer.step()
    expected = {name: p.detach().numpy() for name, p in tree.leaves(state["params"])}
    if backend == "jax":
        for short in [name.removeprefix("layers.0.") for name in expected if name.startswith("layers.0.")]:
            layers = [expected.pop(f"layers.{at}.{short}") for at in range(plain.shape.layers)]
            expected[f"layers.{short}"] = np.stack(layers)
    assert away({name: actual[-1][name] for name in expected}, expected) < 1e-5


def test_momentum_keeps_one_moment():
    parts = parts_of("torch", ("sgd_momentum", {}))
    state = parts.init(parts, None)
    assert sum(m.numel() for m in leaves(state["moments"])) == sum(p.numel() for p in leaves(state["params"]))


# float16 with a loss scale

SCALED = ["float16_scaled", "float16_master"]
OF_SCALE = {"scale", "good_steps", "skipped_steps"}


def overflowing(parts, at):
    """Make the gradient of some steps infinite."""
    inner, count = parts.grad, [0]

    def grad(parts, state, x, y):
        value, grads = inner(parts, state, x, y)
        if count[0] in at:
            next(leaves(grads)).fill_(torch.inf)
        count[0] += 1
        return value, grads

    return replace(parts, grad=grad)


def on_host(of):
    """The leaves of a tree as arrays of numpy, by name."""
    return {
        name: np.asarray(leaf.detach() if isinstance(leaf, torch.Tensor) else leaf) for name, leaf in tree.leaves(of)
    }


def bits(state):
    """All of a state but the scale and its counts: bytes by name."""
    return {name: array.tobytes() for name, array in on_host(state).items() if name not in OF_SCALE}


def changed(before, after):
    """The entries of a state that are not the same after a step, bit for bit."""
    return {name.partition(".")[0] for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def has_rounded_its_masters(state):
    weights, masters = on_host(state["params"]), on_host(state["master"])
    return all(weights[name].tobytes() == master.astype(np.float16).tobytes() for name, master in masters.items())


@pytest.mark.parametrize("name", SCALED)
def test_the_scale_follows_that_of_torch_and_a_bad_step_changes_nothing(name):
    bad, interval, steps = {2, 7, 8}, 3, 14
    parts = overflowing(parts_of("torch", (name, {"scale": 1024.0, "interval": interval})), bad)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=interval)
    weight = torch.ones((), requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    state = parts.init(parts, None)
    batches = parts.batches(parts, parts.windows(parts, parts.source(parts)))
    actual, expected = [], []
    for number, (x, y) in enumerate(islice(batches, steps)):
        before = bits(state)
        state, loss = parts.step(parts, state, x, y)
        assert changed(before, bits(state)) == (set() if number in bad else state.keys() - OF_SCALE)
        assert name == "float16_scaled" or has_rounded_its_masters(state)
        assert torch.isfinite(loss)
        scaler.scale(weight * 1.0).backward()
        if number in bad:
            weight.grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        actual.append(state["scale"])
        expected.append(scaler.get_scale())
    assert actual == expected and len(set(expected)) == 3
    assert state["skipped_steps"] == len(bad)


@pytest.mark.parametrize("name", SCALED)
def test_jax_scales_as_torch_does_and_a_bad_step_changes_nothing(name):
    import jax
    import jax.numpy as jnp

    bad, interval, steps = {2, 7, 8}, 3, 14
    knobs = {"scale": 1024.0, "interval": interval}
    eager = parts_of("torch", (name, knobs))
    compiled = parts_of("jax", (name, knobs))
    actual, expected = [], []
    state, other = eager.init(eager, None), compiled.init(compiled, None)
    update = jax.jit(lambda state, grads: compiled.update(compiled, state, grads))
    for number in range(steps):
        value = torch.inf if number in bad else 1e-3
        like = state.get("master", state["params"])
        grads = tree.mapped(lambda p, value=value: torch.full_like(p, value), like)
        state = eager.update(eager, state, grads)
        before, like = bits(other), other.get("master", other["params"])
        other = update(other, jax.tree.map(lambda p, value=value: jnp.full_like(p, value), like))
        assert changed(before, bits(other)) == (set() if number in bad else other.keys() - OF_SCALE)
        assert name == "float16_scaled" or has_rounded_its_masters(other)
        assert int(other["steps"]) == state["steps"]
        actual.append(float(other["scale"]))
        expected.append(state["scale"])
    assert actual == expected
    assert int(other["skipped_steps"]) == len(bad)


@pytest.mark.long_in_jax
@pytest.mark.parametrize("backend", place.NAMES)
@pytest.mark.parametrize(("name", "stored"), [("float16_scaled", "float32"), ("float16_master", "float16")])
def test_training_in_float16_stays_near_float32(name, stored, backend):
    actual, losses = states_of(parts_of(backend, (name, {})), backend, 5)
    expected, plain = plain_states(backend, 5)
    assert losses == pytest.approx(plain, rel=5e-3)
    assert losses != plain
    assert {str(array.dtype) for array in actual[-1].values()} == {stored}
    assert away(actual[-1], expected[-1]) < 0.05


@pytest.mark.long_in_jax
@pytest.mark.parametrize("backend", place.NAMES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_autocast_multiplies_in_16_bit_and_keeps_float32(dtype, backend):
    inner = parts_of(backend, (f"{dtype}_autocast", {}))
    multiplied, stored = set(), set()

    def note(seen, *arrays):
        seen.update(str(array.dtype).removeprefix("torch.") for array in arrays)

    def attend(parts, q, k, v):
        note(multiplied, q, k, v)
        return inner.attend(parts, q, k, v)

    def loss(parts, x, w, y):
        if backend == "jax":  # in torch the product itself narrows them
            note(multiplied, x, w)
        return inner.loss(parts, x, w, y)

    def update(parts, state, grads):
        state = inner.update(parts, state, grads)
        note(stored, *leaves(state["params"]), *leaves(grads))
        return state

    _, losses = states_of(replace(inner, attend=attend, loss=loss, update=update), backend, 1)
    assert (multiplied, stored) == ({dtype}, {"float32"})
    _, plain = plain_states(backend, 1)
    assert losses != plain and losses == pytest.approx(plain, rel=5e-3)


@pytest.mark.long
@pytest.mark.parametrize("backend", place.NAMES)
def test_a_float32_master_keeps_updates_that_bfloat16_loses(backend):
    shape = {"learning_rate": 1e-5, "weight_decay": 0.0}
    expected, _ = plain_states(backend, 4, **shape)
    actual, _ = states_of(parts_of(backend, ("float32_master", {}), **shape), backend, 4)
    lost, _ = states_of(parts_of(backend, ("bfloat16", {}), **shape), backend, 4)

    def moved(states):
        return {name: states[-1][name] - states[0][name] for name in states[0]}

    assert away(moved(actual), moved(expected)) < 0.1 < 0.5 < away(moved(lost), moved(expected))


@pytest.mark.long_in_jax
@pytest.mark.parametrize("backend", place.NAMES)
def test_with_a_float32_master_the_model_sees_bfloat16_alone(backend):
    parts = parts_of(backend, ("float32_master", {}))
    seen = set()
    inner = parts.attend
    parts = replace(parts, attend=lambda parts, q, k, v: seen.add(str(v.dtype)[-8:]) or inner(parts, q, k, v))
    states_of(parts, backend, 1)
    assert seen == {"bfloat16"}
