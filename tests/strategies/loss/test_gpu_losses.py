"""Losses whose kernels run on GPUs alone: what they ask of their packages, held against stand-ins made of torch."""

import enum
import sys
from functools import partial
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from harness import IGNORED, Parts, Place
from harness.contract import plugins
from harness.workloads.decoder import Shape
from harness.workloads.decoder._torch import loss as plain

STRATEGIES = plugins.load().strategies
CPU, GPU = Place("torch", "cpu"), Place("torch", "cuda")
ALL = {"label_smoothing": 0.2, "z_loss": 0.3, "soft_cap": 2.5}


class Liger(torch.nn.Module):
    """The signature of liger-kernel 0.8.5."""

    def __init__(
        self,
        ce_weight=None,
        ignore_index=-100,
        lse_square_scale=0.0,
        label_smoothing=0.0,
        reduction="mean",
        softcap=None,
        return_z_loss=False,
        accum_dtype=None,
        use_token_scaling=False,
        return_token_accuracy=False,
        return_predicted_tokens=False,
    ):
        super().__init__()
        assert softcap is None or softcap > 0
        assert accum_dtype is torch.float32, "the weight gradient would be summed in the type of the weight"
        self.smoothing, self.scale, self.cap = label_smoothing, lse_square_scale, softcap
        self.ignored, self.reduction = ignore_index, reduction

    def forward(self, lin_weight, _input, target, bias=None):
        (rows, width), (_, same) = _input.shape, lin_weight.shape
        assert width == same and target.shape == (rows,)
        a = (_input @ lin_weight.t()).float()
        z = a if self.cap is None else self.cap * torch.tanh(a / self.cap)
        counted = target != self.ignored
        squares = (z.logsumexp(1).square() * counted).sum() / counted.sum()
        return self.scale * squares + F.cross_entropy(
            z, target, ignore_index=self.ignored, label_smoothing=self.smoothing, reduction=self.reduction
        )


Released = enum.IntEnum("Released", ["CCE", "TORCH_COMPILE"])
Source = enum.IntEnum("Source", ["CCE", "TORCH_COMPILE", "CCE_KAHAN_FULL_C", "CCE_KAHAN_FULL_E", "CCE_EXACT"])


def cut(impls, asked, e, c, targets, *, ignore_index, softcap, reduction, shift, impl):
    """What both releases of cut_cross_entropy take by name."""
    assert impl.upper() in impls.__members__ and shift in (False, 0)
    assert softcap is None or softcap > 0
    assert e.size()[:-1] == targets.size() and e.size(-1) == c.size(1)
    asked.append(impl)
    a = (e @ c.t()).float()
    z = a if softcap is None else softcap * torch.tanh(a / softcap)
    return F.cross_entropy(z, targets, ignore_index=ignore_index, reduction=reduction)


def stand_in(patch, name, **contents):
    """Put a module in the place of one that is not installed, with the packages above it."""
    for end in range(1, name.count(".") + 2):
        above = ".".join(name.split(".")[:end])
        patch.setitem(sys.modules, above, ModuleType(above))
    vars(sys.modules[name]).update(contents)


@pytest.fixture
def liger(monkeypatch):
    name = "liger_kernel.transformers.fused_linear_cross_entropy"
    stand_in(monkeypatch, name, LigerFusedLinearCrossEntropyLoss=Liger)


@pytest.fixture
def cce(monkeypatch):
    def install(impls):
        asked = []
        contents = {"LinearCrossEntropyImpl": impls, "linear_cross_entropy": partial(cut, impls, asked)}
        stand_in(monkeypatch, "cut_cross_entropy", **contents)
        return asked

    return install


def results(loss, settings, dtype=torch.float32):
    torch.manual_seed(0)
    x, w = (torch.randn(*size).to(dtype).requires_grad_() for size in ((2, 9, 6), (17, 6)))
    y = torch.randint(17, (2, 9))
    y[0, :4] = IGNORED
    value = loss(Parts(Shape(**settings), GPU), x, w, y)
    assert value.shape == ()
    return [value.detach(), *torch.autograd.grad(value, (x, w))]


def assert_is_the_plain_loss(name, settings, dtype=torch.float32, **knobs):
    parts = STRATEGIES[name].on["torch"](Parts(Shape(**settings), GPU, loss=plain), **knobs)
    for answer, due in zip(results(parts.loss, settings, dtype), results(plain, settings, dtype), strict=True):
        torch.testing.assert_close(answer, due, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("settings", [{}, *({name: value} for name, value in ALL.items()), ALL])
def test_liger_is_asked_for_the_whole_objective(liger, settings):
    assert_is_the_plain_loss("liger_loss", settings)


@pytest.mark.parametrize("settings", [{}, {"soft_cap": 2.5}])
@pytest.mark.parametrize("impl", ["cce", "cce_exact", "cce_kahan_full_c"])
def test_cce_is_asked_for_the_same_function(cce, settings, impl):
    asked = cce(Source)
    assert_is_the_plain_loss("cce_loss", settings, torch.bfloat16, impl=impl)
    assert asked == [impl]


def test_the_released_cce_has_one_implementation(cce):
    cce(Released)
    assert_is_the_plain_loss("cce_loss", {}, torch.bfloat16)
    with pytest.raises(ValueError, match="the installed cut_cross_entropy has no impl 'cce_exact'"):
        STRATEGIES["cce_loss"].on["torch"](Parts(Shape(), GPU), impl="cce_exact")


def test_cce_refuses_32_bits_in_words(cce):
    cce(Released)
    with pytest.raises(ValueError, match=r"take 16-bit types alone: write \[cce_loss, bfloat16\]"):
        assert_is_the_plain_loss("cce_loss", {})


@pytest.mark.parametrize("settings", [{"label_smoothing": 0.1}, {"z_loss": 0.1}])
def test_cce_refuses_what_its_kernels_lack(settings):
    with pytest.raises(ValueError, match="no label_smoothing and no z_loss"):
        STRATEGIES["cce_loss"].on["torch"](Parts(Shape(**settings), GPU))


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="impl is one of cce, cce_exact, cce_kahan_full_c, not 'fast'"):
        STRATEGIES["cce_loss"].on["torch"](Parts(Shape(), GPU), impl="fast")


@pytest.mark.parametrize(("name", "package"), [("liger_loss", "liger_kernel"), ("cce_loss", "cut_cross_entropy")])
def test_what_stands_in_the_way_is_said(name, package, monkeypatch):
    monkeypatch.setattr("harness.contract.strategy.find_spec", lambda wanted: None)
    strategy = STRATEGIES[name]
    assert strategy.obstacle(CPU) == f"'{name}' does not run on torch/cpu: its kernels are written for GPUs"
    assert strategy.obstacle(GPU) == f"'{name}' needs the package {package}: install it to measure this strategy"
    assert "has nothing for jax" in strategy.obstacle(Place("jax", "cuda"))
    monkeypatch.setattr("harness.contract.strategy.find_spec", lambda wanted: object())
    assert strategy.obstacle(GPU) is None


def test_a_torch_that_is_too_old_for_its_own_loss_is_named(monkeypatch):
    monkeypatch.setattr("harness.contract.strategy.version", lambda package: "2.11.0+cu130")
    expected = "'native_loss' needs torch 2.13 or newer, and 2.11.0+cu130 is installed: install it to measure"
    assert STRATEGIES["native_loss"].obstacle(GPU).startswith(expected)
    for newer in ("2.13.0", "2.14.1+cu130", "3.0"):
        monkeypatch.setattr("harness.contract.strategy.version", lambda package, newer=newer: newer)
        assert STRATEGIES["native_loss"].obstacle(GPU) is None


def test_only_the_filtered_one_is_approximate():
    assert STRATEGIES["cce_loss"].approximate and not STRATEGIES["liger_loss"].approximate
