"""What several operators save leaves the device once, comes back as it was, and is gone after the step."""

import gc
import weakref

import pytest
import torch

from harness import Parts, Place
from harness.contract import plugins

OFFLOAD = plugins.load().strategies["offload_activations"].on["torch"]


@pytest.fixture
def copies(monkeypatch):
    """Weak references to all copies in files, in the order in which they are made."""
    made = []
    original = torch.from_file

    def from_file(path, **knobs):
        copy = original(path, **knobs)
        made.append((knobs["size"], weakref.ref(copy.untyped_storage())))
        return copy

    monkeypatch.setattr(torch, "from_file", from_file)
    return made


def gradient(loss, *sizes, offloads=True):
    """The gradients of a loss of drawn leaves, and what the loss saves, as it is given back."""
    draws = torch.Generator().manual_seed(0)
    leaves = [torch.randn(size, generator=draws, dtype=torch.float64).requires_grad_() for size in sizes]
    parts = Parts(None, Place("torch", "cpu"), grad=lambda *_: torch.autograd.grad(loss(*leaves), leaves))
    return (OFFLOAD(parts, least_kib=1) if offloads else parts).grad(parts, None, None, None)


def assert_as_without(loss, *sizes):
    for actual, due in zip(gradient(loss, *sizes), gradient(loss, *sizes, offloads=False), strict=True):
        assert torch.equal(actual, due) and actual.stride() == due.stride()


def three_products(x, *weights):
    x = x * 2
    return sum((x @ w).sum() for w in weights)


def test_what_three_products_read_is_moved_once(copies):
    assert_as_without(three_products, (20, 16), *[(16, 16)] * 3)
    assert [size for size, _ in copies] == [20 * 16]


def parts_of_one(x, w):
    q, k, v = (x @ w).chunk(3, dim=1)
    return (q * k.T.contiguous().T * v).sum()


def test_parts_of_a_storage_are_moved_with_it_once(copies):
    assert_as_without(parts_of_one, (20, 16), (16, 48))
    assert sorted(size for size, _ in copies if size > 20 * 16) == [20 * 48]


class Square(torch.autograd.Function):
    """The square of a view, which notes how it lies when it is saved and when it is read."""

    @staticmethod
    def forward(ctx, x, seen):
        ctx.save_for_backward(x)
        ctx.seen = seen
        seen.append((x.shape, x.stride(), x.storage_offset(), x.clone()))
        return x.square()

    @staticmethod
    def backward(ctx, upstream):
        (x,) = ctx.saved_tensors
        ctx.seen.append((x.shape, x.stride(), x.storage_offset(), x.clone()))
        return 2 * x * upstream, None


VIEWS = {
    "transposed": lambda x: x.T,
    "behind the first": lambda x: x[3:, 5:],
    "every second": lambda x: x[::2, ::2],
    "expanded": lambda x: x[:, None].expand(-1, 7, -1),
    "a diagonal": lambda x: x.as_strided((16,), (17,), 2),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_comes_back_as_it_lay(view, copies):
    seen = []
    gradient(lambda x: Square.apply(view(x * 2), seen).sum(), (20, 16))
    (*saved, value), (*read, again) = seen
    assert saved == read and torch.equal(value, again)
    assert [size for size, _ in copies] == [20 * 16]


def test_what_is_changed_in_place_between_is_moved_again(copies):
    def loss(x, w):
        scale = x * 2
        first = w * scale
        with torch.no_grad():
            scale.add_(1)
        return (first + w * scale * 3).sum()

    draws = [torch.randn(20, 16, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    parts = Parts(None, Place("torch", "cpu"), grad=lambda *_: torch.autograd.grad(loss(*draws), draws))
    _, of_w = OFFLOAD(parts, least_kib=1).grad(parts, None, None, None)
    assert len(copies) == 2
    assert torch.allclose(of_w, draws[0] * 2 + (draws[0] * 2 + 1) * 3)


def test_a_conjugate_is_not_taken_for_what_it_is_of():
    def loss(x):
        z = torch.view_as_complex(x * 2)
        return (z * z.conj() * z).real.sum()

    assert_as_without(loss, (20, 16, 2))


def test_parameters_stay(copies):
    assert_as_without(lambda w: (w.T @ w).square().sum().sqrt(), (20, 16))
    assert [size for size, _ in copies] == [16 * 16]  # the product alone, which is squared


def test_copies_are_gone_after_the_step(copies):
    gc.disable()  # nothing waits for the collector
    try:
        for _ in range(3):
            gradient(three_products, (20, 16), *[(16, 16)] * 3)
            assert [copy() for _, copy in copies] == [None] * len(copies)
    finally:
        gc.enable()
    assert len(copies) == 3


def test_a_copy_is_gone_after_the_last_that_reads_it(copies):
    """The backward pass goes from the end: a layer's copies do not wait for those before it."""
    alive = []

    def loss(x, *weights):
        for w in weights:
            x = x @ w
            x.register_hook(lambda _: alive.append(sum(copy() is not None for _, copy in copies)))
        return x.square().sum()

    gradient(loss, (20, 16), *[(16, 16)] * 4)
    assert alive == sorted(alive, reverse=True) and alive[0] > alive[-1]
