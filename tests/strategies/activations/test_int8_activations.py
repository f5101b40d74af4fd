"""Activations of products kept in 8 bits: what is rounded, by how much, what stays exact, and what is left out."""

import pytest
import torch

from harness import Place, backends, tree
from harness.contract import plugins
from harness.contract.assembly import assemble
from harness.records import Applied, Case
from strategies.activations.int8_activations._torch import RoundedProducts, narrow, widened

LOADED = plugins.load()
DECODER = LOADED.workloads["decoder"]


def parts_of(*names, **shape):
    case = Case(
        workload="decoder",
        shape=DECODER.probe(DECODER.shape()).model_dump() | shape,
        place="torch/cpu",
        corpus="drawn",
        tokenizer="none",
        strategies=tuple(Applied(name=name, knobs=dict(LOADED.strategies[name].probe)) for name in names),
    )
    return assemble(LOADED, case)


def gradients_of(*names):
    backends.load("torch").start(Place("torch", "cpu"))
    parts = parts_of(*names)
    state = parts.init(parts, None)
    x, y = next(iter(parts.batches(parts, parts.windows(parts, parts.source(parts)))))
    loss, grads = parts.grad(parts, state, x, y)
    return float(loss), dict(tree.leaves(grads))


@pytest.mark.parametrize("size", [(3, 37, 48), (7,), (1, 1)])
def test_a_number_is_off_by_half_a_step_of_its_group(size):
    x = torch.randn(size, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, size[-1])
    codes, scales = narrow(x, 16)
    assert codes.dtype == torch.int8
    off = (widened(codes, scales, x.shape) - x).abs().view(-1)
    step = scales.repeat_interleave(16)[: x.numel()]
    assert (off <= 0.51 * step).all() and torch.equal(widened(*narrow(x * 0, 16), x.shape), x * 0)


def test_only_gradients_of_weights_are_rounded():
    loss, grads = gradients_of("int8_activations")
    plain, exact = gradients_of()
    assert loss == plain, "the forward pass is exact"
    off = {name: float((grads[name] - g).norm() / g.norm()) for name, g in exact.items()}
    products = {"wq", "wk", "wv", "wo", "up", "gate", "down"}
    rounded = {name for name, error in off.items() if error > 1e-6}
    assert rounded == {name for name in off if name.rpartition(".")[2] in products}
    assert max(off.values()) < 0.02


def test_an_input_of_several_weights_is_kept_once_and_narrow():
    saved = []
    x = torch.randn(64, 32, requires_grad=True)
    weights = [torch.randn(32, 32, requires_grad=True) for _ in range(3)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t), RoundedProducts(16):
        sum((x @ w).sum() for w in weights)
    codes = [each for each in saved if each.dtype == torch.int8]
    assert len(codes) == 3 and len({each.data_ptr() for each in codes}) == 1
    assert not any(each.shape == x.shape and each.is_floating_point() for each in saved)


def test_it_goes_with_checkpoints():
    loss, grads = gradients_of("int8_activations", "checkpoint")
    alone, same = gradients_of("int8_activations")
    assert loss == alone and all(torch.equal(grads[name], g) for name, g in same.items())
