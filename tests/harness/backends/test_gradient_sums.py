"""Gradients of what is used twice are added on fake tensors where autograd adds them on plain ones."""

from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from harness.backends import torch_storage  # noqa: E402
from harness.backends.torch_flops import Work  # noqa: E402
from harness.backends.torch_operators import Operators  # noqa: E402
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


def gathered(x):
    return x.gather(1, torch.zeros(SIZE, dtype=torch.long))


WRITTEN_INTO_ZEROS = {
    "gather": gathered,
    "index": lambda x: x[:, torch.zeros(SIZE[1], dtype=torch.long)],
    "take": lambda x: x.take(torch.zeros(SIZE, dtype=torch.long)),
    "sort": lambda x: x.sort(1)[0],
    "max": lambda x: x.max(1)[0],
    "topk": lambda x: x.topk(2, 1)[0],
    "index_select": lambda x: x.index_select(0, torch.zeros(2, dtype=torch.long)),
}

IN_PLACE = {f"aten::{name}_" for name in ("scatter_add", "scatter", "index_add", "_index_put_impl", "put")}


@pytest.mark.parametrize("name", WRITTEN_INTO_ZEROS)
def test_a_gradient_is_written_into_zeros_without_a_second_tensor(name):
    """As on plain tensors, where the kernels are in place: what the profiler sees of them."""
    x = torch.randn(SIZE, requires_grad=True)
    made = WRITTEN_INTO_ZEROS[name](x)
    with torch.profiler.profile() as seen:
        made.backward(torch.ones_like(made))
    assert any(event.name in IN_PLACE for event in seen.events())
    with FakeTensorMode(), LiveStorage() as live:
        x = torch.empty(SIZE, requires_grad=True)
        made = WRITTEN_INTO_ZEROS[name](x)
        upstream, before = torch.empty_like(made), live.live
        with live.phase("backward"):
            torch.autograd.grad(made, x, upstream)
    assert live.peaks["backward"] - before <= 1.02 * 4 * SIZE[0] * SIZE[1]


# sizes that change


def on_fake_or_not(fake):
    return FakeTensorMode() if fake else nullcontext()


@pytest.mark.parametrize("fake", [False, True])
def test_a_tensor_that_is_resized_counts_as_much_as_it_has(fake):
    with on_fake_or_not(fake), LiveStorage() as live:
        before = live.live
        x = torch.empty(0)
        x.resize_(1024)
        assert live.live - before == 4096
        x.resize_(4096)
        assert live.live - before == 4 * 4096
        del x
        assert live.live == before


@pytest.mark.parametrize("times", [1, 3])
def test_an_output_that_is_written_where_nothing_was_counts(times):
    with FakeTensorMode() as fake, LiveStorage() as live:
        live.run_operator = Operators(fake, Work())
        y, before = torch.empty(SIZE), live.live
        for _ in range(times):
            made = torch.mul(y, y, out=torch.empty(0))
            assert made.shape == SIZE and live.live - before == 4 * SIZE[0] * SIZE[1]
            del made


@pytest.mark.parametrize(
    ("sparse", "size"),
    [(torch.Tensor.to_sparse, 100 * (4 + 2 * 8)), (torch.Tensor.to_sparse_csr, 100 * (4 + 2 * 8) + 101 * 8)],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_tensor_counts_its_places_and_its_values(sparse, size):
    with LiveStorage() as live:
        dense = torch.eye(100)
        before = live.live
        made = sparse(dense)
        assert made.layout is not torch.strided and live.live - before == size


@pytest.mark.parametrize("fake", [False, True])
def test_a_sparse_gradient_is_followed(fake):
    with on_fake_or_not(fake), LiveStorage() as live:
        table = torch.empty(1000, 64, requires_grad=True)
        rows = torch.nn.functional.embedding(torch.zeros(10, dtype=torch.long), table, sparse=True)
        (gradient,) = torch.autograd.grad(rows.sum(), table)
        assert gradient.layout is torch.sparse_coo and live.live < 2 * 4 * 1000 * 64
