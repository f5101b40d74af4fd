"""A loss in chunks is the loss: whatever the chunk, however its ignored targets lie. With `recompute` it keeps none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from harness import Parts, Place, backends
from harness.contract import plugins
from harness.contract.place import NAMES
from harness.workloads.decoder import Shape
from strategies.loss.chunked_loss import on_jax, on_torch

ON = {"torch": on_torch, "jax": on_jax}
N, D, V = 74, 12, 41
CHUNKS = [10, 37, 73, 1000]  # 10 and 73 leave an uneven last one, 1000 makes one chunk of all


def problem(ignored):
    random = np.random.Generator(np.random.Philox(key=1))
    x = random.standard_normal((2, N // 2, D), np.float32)
    w = random.standard_normal((V, D), np.float32)
    y = random.integers(0, V, (2, N // 2))
    if ignored == "early":  # every chunk has another number of targets that count
        y[random.random(y.shape) < np.linspace(0.9, 0, N).reshape(y.shape)] = -100
    elif ignored == "whole chunks":
        y[0, 10:30] = -100
    return x, w, y


def truth(x, w, y):
    """Loss and both gradients in float64."""
    x, w = (torch.from_numpy(array).double().requires_grad_() for array in (x, w))
    loss = torch.nn.functional.cross_entropy(x.reshape(-1, D) @ w.T, torch.from_numpy(y).reshape(-1))
    loss.backward()
    return loss.item(), x.grad.numpy(), w.grad.numpy()


def gradients_of(backend, **knobs):
    """A function to the loss and both gradients."""
    parts = ON[backend](Parts(None, Place(backend, "cpu")), **knobs)
    if backend == "jax":
        compiled = jax.jit(jax.value_and_grad(lambda x, w, y: parts.loss(parts, x, w, y), (0, 1)))
        return lambda x, w, y: jax.tree.leaves(compiled(x, w, jnp.asarray(y)))

    def loss(x, w, y):
        x, w = (torch.from_numpy(array.copy()).requires_grad_() for array in (x, w))
        value = parts.loss(parts, x, w, torch.from_numpy(y))
        value.backward()
        return value.item(), x.grad.numpy(), w.grad.numpy()

    return loss


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_every_chunk_gives_the_loss_and_its_gradients(backend, recompute, chunk):
    ours = gradients_of(backend, chunk=chunk, recompute=recompute)
    for ignored in ("none", "early", "whole chunks"):
        x, w, y = problem(ignored)
        (value, dx, dw), due = ours(x, w, y), truth(x, w, y)
        assert float(value) == pytest.approx(due[0], rel=1e-6), ignored
        np.testing.assert_allclose(dx, due[1], rtol=1e-4, atol=1e-7, err_msg=ignored)
        np.testing.assert_allclose(dw, due[2], rtol=1e-4, atol=1e-6, err_msg=ignored)


def test_the_chunks_of_this_test_would_show_a_mean_of_means():
    x, w, y = problem("early")
    loss = truth(x, w, y)[0]
    pairs = zip(np.split(x.reshape(N, D), range(10, N, 10)), np.split(y.reshape(N), range(10, N, 10)), strict=True)
    assert abs(np.mean([truth(x_CD, w, y_C)[0] for x_CD, y_C in pairs]) / loss - 1) > 1e-3


# What it keeps

LOGITS = Shape(layers=1, width=16, heads=1, hidden=16, vocabulary=8192, batch=64, tokens=64)
WORKLOAD = plugins.load().workloads["decoder"]
NV = LOGITS.batch * LOGITS.tokens * LOGITS.vocabulary * 4


@pytest.fixture(scope="module", params=NAMES)
def peaks(request):
    """Predicted peaks, with few parameters beside the logits."""
    place = Place(request.param, "cpu")

    def build(knobs):
        parts = WORKLOAD.on[request.param](LOGITS, place, None, 0)
        return parts if knobs is None else ON[request.param](parts, **knobs)

    def peak(knobs):
        predicted = (
            backends.load(request.param)
            .predict(
                lambda: build(knobs),
                Place(request.param, "cpu"),
                WORKLOAD.abstract_batch(LOGITS),
                source_bytes=0,
                steps=1,
            )
            .peaks
        )
        return max(predicted.values())

    return {
        "baseline": peak(None),
        "kept": peak({"chunk": 64, "recompute": False}),
        "recomputed": peak({"chunk": 64, "recompute": True}),
        "whole": peak({"chunk": 1 << 20, "recompute": True}),
    }


@pytest.mark.long_in_jax
def test_without_recomputation_every_logit_is_kept(peaks):
    assert peaks["kept"] >= NV
    assert peaks["baseline"] >= 2 * NV


def test_with_recomputation_none_is(peaks):
    assert peaks["recomputed"] < 0.5 * NV
    assert peaks["recomputed"] < 0.3 * peaks["baseline"]


def test_one_chunk_saves_nothing(peaks):
    assert peaks["whole"] >= 0.95 * peaks["baseline"]
