"""Tied and sparse embeddings: their gradients, their steps, and the bytes that they leave out."""

from itertools import islice

import numpy as np
import pytest
import torch

from harness import Place, backends
from harness.contract import place, plugins
from harness.contract.assembly import assemble
from harness.contract.loop import training
from harness.records import Applied, Case

LOADED = plugins.load()
DECODER = LOADED.workloads["decoder"]


def parts_of(backend, *names, **shape):
    applied = tuple(Applied(name=name, knobs=dict(LOADED.strategies[name].probe)) for name in names)
    case = Case(
        workload="decoder",
        shape=DECODER.probe(DECODER.shape()).model_dump() | shape,
        place=f"{backend}/cpu",
        corpus="drawn",
        tokenizer="none",
        strategies=applied,
    )
    return assemble(LOADED, case)


def trained(backend, *names, steps=5, **shape):
    module = backends.load(backend)
    module.start(Place(backend, "cpu"))
    parts, last = parts_of(backend, *names, **shape), {}
    step = module.prepare(parts)

    def watched(state, x, y):
        last["state"], loss = step(state, x, y)
        return last["state"], loss

    losses = [float(loss) for loss, _ in islice(training(parts, watched, finish=module.wait), steps)]
    return {name: array for name, (array, _) in module.arrays(last["state"]["params"]).items()}, losses


@pytest.mark.parametrize("backend", place.NAMES)
def test_tied_is_the_model_with_one_matrix(backend):
    answer, losses = trained(backend, "tied")
    reference, plain = trained(backend, tied=True)
    assert losses == plain and "head" not in answer
    assert all(np.array_equal(answer[name], reference[name]) for name in reference)


def test_a_sparse_gradient_makes_the_steps_of_a_dense_one():
    answer, losses = trained("torch", "sparse_embedding_gradient", weight_decay=0.1)
    reference, plain = trained("torch", weight_decay=0.1)
    assert losses == pytest.approx(plain, rel=1e-6)
    assert all(np.allclose(answer[name], reference[name], rtol=1e-5, atol=1e-7) for name in reference)
    unread = set(range(67)) - {int(i) for i in read_ids()}
    assert unread and all(not np.array_equal(answer["embed"][i], first_embedding()[i]) for i in unread), (
        "decay moves all"
    )


def read_ids():
    parts = parts_of("torch")
    batches = parts.batches(parts, parts.windows(parts, parts.source(parts)))
    return torch.cat([x.flatten() for x, _ in islice(batches, 5)])


def first_embedding():
    parts = parts_of("torch")
    return parts.init(parts, None)["params"]["embed"].detach().numpy()


def test_no_dense_gradient_of_the_embedding_is_made():
    """No tensor of V x D is made in a step beside the parameter and its two moments."""
    from torch.utils._python_dispatch import TorchDispatchMode

    made = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and "view" not in str(func) and out.numel() >= 670 * 48:
                made.append(str(func))
            return out

    sizes = {"vocabulary": 670, "layers": 1}
    for names, expected in (((), True), (("sparse_embedding_gradient",), False)):
        parts = parts_of("torch", *names, **sizes)
        state = parts.init(parts, None)
        batches = parts.batches(parts, parts.windows(parts, parts.source(parts)))
        state, _ = parts.step(parts, state, *next(batches))
        made.clear()
        with Watching():
            parts.step(parts, state, *next(batches))
        assert any("embedding_dense_backward" in each for each in made) == expected, made


def test_a_tied_head_is_refused():
    with pytest.raises(ValueError, match="tied to the embedding"):
        trained("torch", "sparse_embedding_gradient", steps=1, tied=True)


@pytest.mark.parametrize("names", [("lora", "sparse_embedding_gradient"), ("sparse_embedding_gradient", "qlora")])
def test_an_embedding_that_is_frozen_has_no_gradient(names):
    with pytest.raises(ValueError, match="frozen beside adapters"):
        trained("torch", *names, steps=1)


@pytest.mark.parametrize(
    "names", [("sparse_embedding_gradient", "checkpoint"), ("fused_loss", "sparse_embedding_gradient")]
)
def test_it_goes_with_others(names):
    answer, _ = trained("torch", *names)
    reference, _ = trained("torch")
    for name in reference:  # single numbers may differ more: AdamW divides the least gradients by themselves
        apart = np.linalg.norm(answer[name] - reference[name])
        assert apart <= 1e-5 * np.linalg.norm(reference[name]), name
