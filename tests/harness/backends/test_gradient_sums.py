"""Gradients of what is used twice are added on fake tensors where autograd adds them on plain ones."""

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from harness.backends import torch_storage  # noqa: E402
from harness.backends.torch_storage import LiveStorage  # noqa: E402

SIZE = (512, 256)


def residual(w):
    """The first gradient of `h` is fresh, and nobody else waits for it."""
    h = w * 1.0
    y = h + h.tanh()
    return h, y, y.exp().sum()


def shared(w):
    """The first gradient of `h` is that of `y`, and `b` still waits for it."""
    b, h = w.sin(), w * 1.0
    other = h.exp()
    y = h + b
    return h, y, y.exp().sum() + other.sum()


def transposed(w):
    """The first gradient of `h` is a view of that of `y`."""
    h = w * 1.0
    other = h.exp()
    y = h.T
    return h, y, y.exp().sum() + other.sum()


class Sums(LiveStorage):
    """Note what was decided; where `plainly`, add as under any mode."""

    def __init__(self, plainly=False):
        super().__init__()
        self.plainly, self.decided = plainly, []

    def _sums_in_place(self, one, other, alpha=1):
        self.decided.append(super()._sums_in_place(one, other, alpha))
        return self.decided[-1] and not self.plainly


def on_fake(run, plainly=False):
    with FakeTensorMode(), Sums(plainly) as live, live.phase("step"):
        run(torch.empty(SIZE, requires_grad=True))[2].backward()
    return live


@pytest.mark.parametrize(("run", "in_place"), [(residual, True), (shared, False), (transposed, False)])
def test_a_second_gradient_goes_where_it_goes_without_a_mode(run, in_place):
    at = {}
    h, y, loss = run(torch.randn(SIZE, requires_grad=True))
    y.register_hook(lambda gradient: at.update(y=gradient.data_ptr()))
    h.register_hook(lambda gradient: at.update(h=gradient.data_ptr()))
    loss.backward()
    assert (at["y"] == at["h"]) is in_place, "so it is on plain tensors"
    assert on_fake(run).decided[0] is in_place


def test_tied_weights_have_two_gradients_and_not_a_third():
    def run(w):
        class Head(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, weight):
                ctx.save_for_backward(torch.ones_like(weight))
                return x.sum()

            @staticmethod
            def backward(ctx, gradient):
                return torch.ones(3, SIZE[1]), ctx.saved_tensors[0].mul_(gradient)

        return None, None, Head.apply(torch.nn.functional.embedding(torch.zeros(3, dtype=torch.long), w), w)

    weight = 4 * SIZE[0] * SIZE[1]
    own, third = (on_fake(run, plainly).peaks["step"] for plainly in (False, True))
    assert 0.99 * weight < third - own <= weight and 3 * weight < own < 3.1 * weight, "the weight and its two gradients"


def test_sums_that_the_step_itself_makes_are_left_as_they_are():
    def run(w):
        class Doubled(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2

            @staticmethod
            def backward(ctx, gradient):
                return gradient * 1.0 + gradient * 1.0

        return None, None, Doubled.apply(w).sum()

    assert on_fake(run).decided == []


def test_where_torch_counts_no_holders_each_sum_is_a_third_tensor(monkeypatch):
    live = on_fake(residual)
    assert live.decided[0]
    monkeypatch.setattr(torch_storage, "_holders_of_first_gradient", lambda: None)
    assert not any(on_fake(residual).decided)
