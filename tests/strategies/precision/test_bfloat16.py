"""Everything is held in bfloat16, the loss is not computed in it, and training still moves the weights."""

import math
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from harness import backends, tree
from harness.contract import place, plugins
from harness.contract.assembly import assemble
from harness.contract.loop import training
from harness.records import Applied, Case

LOADED = plugins.load()
UPDATES = 20


def parts_in(backend):
    workload = LOADED.workloads["decoder"]
    case = Case(
        workload="decoder",
        shape=workload.probe(workload.shape()).model_dump(),
        place=f"{backend}/cpu",
        corpus="drawn",
        tokenizer="none",
        strategies=(Applied(name="bfloat16"),),
    )
    return assemble(LOADED, case)


@pytest.fixture(scope="module", params=place.NAMES)
def trained(request):
    """The first parameters, the losses of 20 updates and the last state, at the probe shape."""
    module = backends.load(request.param)
    parts = parts_in(request.param)
    first = module.arrays(parts.init(parts, None)["params"])
    step, seen = module.prepare(parts), {}

    def watched(state, x, y):
        seen["state"], loss = step(state, x, y)
        seen["loss"] = loss
        return seen["state"], loss

    losses = [float(loss) for loss, _ in islice(training(parts, watched), UPDATES)]
    return module, first, losses, seen["state"], seen["loss"]


@pytest.mark.long_in_jax
def test_parameters_and_moments_are_bfloat16(trained):
    module, first, _, state, _ = trained
    moments = {key: value for key, value in state.items() if key not in ("params", "steps")}
    stored = module.arrays(state["params"]) | {f"m.{k}": v for k, v in module.arrays(moments).items()}
    assert len(stored) == 3 * len(first), "two moments for each parameter"
    assert {dtype for _, dtype in stored.values()} == {"bfloat16"}
    assert {dtype for _, dtype in first.values()} == {"bfloat16"}


def test_gradients_are_bfloat16():
    parts = parts_in("torch")
    x, y = next(parts.batches(parts, parts.windows(parts, parts.source(parts))))
    _, grads = parts.grad(parts, parts.init(parts, None), x, y)
    assert {leaf.dtype for _, leaf in tree.leaves(grads)} == {torch.bfloat16}


def test_the_loss_is_finite_and_falls(trained):
    _, _, losses, _, _ = trained
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0] - 0.05


def test_every_drawn_parameter_moves(trained):
    """Updates below about 1/256 of a weight are lost: that stops the scales at 1, and must stop nothing else."""
    module, first, _, state, _ = trained
    drawn = {name: before for name, (before, _) in first.items() if not np.all(before == 1)}
    assert len(drawn) >= 9
    for name, (after, _) in module.arrays(state["params"]).items():
        if name in drawn:
            assert np.mean(drawn[name] != after) > 0.9, name


def test_the_loss_is_float32(trained):
    module, _, _, _, loss = trained
    ((_, dtype),) = module.arrays([loss]).values()
    assert dtype == "float32"


def hidden():
    random = np.random.Generator(np.random.Philox(key=0))
    x = random.standard_normal((2, 40, 16), np.float32)
    w = random.standard_normal((300, 16), np.float32)
    return x, w, random.integers(0, 300, (2, 40))


def test_torch_sums_the_loss_in_float32():
    parts = parts_in("torch")
    x, w, y = (torch.from_numpy(array) for array in hidden())
    x, w = x.bfloat16(), w.bfloat16()
    due = torch.nn.functional.cross_entropy((x.reshape(-1, 16) @ w.T).double(), y.reshape(-1))
    assert parts.loss(parts, x, w, y).item() == pytest.approx(due.item(), rel=1e-6)


def test_jax_sums_the_loss_in_float32():
    parts = parts_in("jax")
    x, w, y = hidden()
    x, w = jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16)
    # The compiled product may keep float32 inside; what it gave is what the loss is judged by.
    logits = np.asarray((x.reshape(-1, 16) @ w.T).astype(jnp.float32), np.float64)
    y_N = y.reshape(-1)
    due = np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y_N)), y_N])
    with jax.disable_jit():
        result = parts.loss(parts, x, w, jnp.asarray(y, jnp.int32))
    assert result.dtype == jnp.float32
    assert float(result) == pytest.approx(due, rel=1e-6)
