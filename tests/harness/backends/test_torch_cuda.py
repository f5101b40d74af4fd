"""A device that is not there takes what a real one would: its kernels, scratch, workspaces, page-locked memory."""

import contextlib
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from harness import Place, backends
from harness.backends.cards import CARDS
from harness.backends.torch_cuda_operators import attention_kernel, pretended
from harness.backends.torch_cuda_storage import DeviceStorage
from harness.contract import plugins
from harness.contract.assembly import assemble, shape_of
from harness.records import Applied, Case

MIB = 1 << 20
T4, H100 = CARDS["t4"], CARDS["h100"]


@contextlib.contextmanager
def device(card=H100, torch_version=(2, 10)):
    with FakeTensorMode(allow_non_fake_inputs=True), DeviceStorage(card, torch_version) as storage, pretended(storage):
        yield storage


def heads(dtype, count=8, grad=True):
    return torch.empty(1, count, 1024, 64, dtype=dtype, device="cuda", requires_grad=grad)


@pytest.mark.parametrize(
    ("dtype", "card", "key_heads", "masked", "kernel"),
    [
        (torch.bfloat16, H100, 8, False, "flash"),
        (torch.bfloat16, H100, 2, False, "flash"),  # which takes grouped heads as they are
        (torch.bfloat16, H100, 8, True, "efficient"),
        (torch.float32, H100, 8, False, "efficient"),
        (torch.float32, H100, 2, False, "math"),
        (torch.float16, T4, 8, False, "efficient"),
        (torch.bfloat16, T4, 8, False, "math"),
    ],
)
def test_attention_takes_the_kernel_of_the_card(dtype, card, key_heads, masked, kernel):
    with device():
        q, k = heads(dtype), heads(dtype, key_heads)
        mask = torch.empty(1024, 1024, dtype=dtype, device="cuda") if masked else None
        assert attention_kernel(q, k, k, mask, card) == kernel
        with sdpa_kernel(SDPBackend.MATH):
            assert attention_kernel(q, k, k, mask, card) == "math"


@pytest.mark.parametrize("again", [False, True])
def test_fused_attention_keeps_no_scores_even_where_it_is_recomputed(again):
    def peak(dtype):
        with device() as storage:
            q = heads(dtype)
            attend = lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True).sum()  # noqa: E731
            (checkpoint(attend, use_reentrant=False) if again else attend()).backward()
            return storage.allocator.peak_allocated

    scores = 8 * 1024 * 1024 * 4
    assert peak(torch.float32) < scores
    with sdpa_kernel(SDPBackend.MATH):
        assert peak(torch.float32) > scores


def test_the_backward_pass_of_softmax_makes_a_product_first():
    def peak(function):
        with device() as storage:
            x = torch.empty(64, MIB, device="cuda", requires_grad=True)
            y = function(x)
            y.backward(torch.empty_like(y))
            return storage.allocator.peak_allocated // (256 * MIB)

    assert peak(lambda x: x.softmax(-1)) == 5  # input, output, its gradient, the product, the result
    assert peak(lambda x: x.log_softmax(-1)) == 4


def test_softmax_widens_half_types_within_its_kernel():
    with device() as storage:
        x = torch.empty(MIB, 64, dtype=torch.float16, device="cuda")
        assert F.softmax(x, -1, dtype=torch.float32).dtype == torch.float32
        assert storage.allocator.peak_allocated == (128 + 256) * MIB


@pytest.mark.parametrize(("card", "size"), [(T4, 8519680), (H100, 32 * MIB)])
def test_each_thread_keeps_one_workspace_of_cublas(card, size):
    with device(card) as storage:
        x = torch.empty(1024, 1024, device="cuda", requires_grad=True)
        for forward in (1, 2):
            y = x @ x
            assert storage.allocator.allocated == 8 * MIB + forward * size
            y.backward(y.detach())
            x.grad = None
            del y
        assert storage.allocator.allocated == 4 * MIB + 2 * size


@pytest.mark.parametrize(("version", "staying"), [((2, 6), 0), ((2, 10), 2)])
def test_a_bias_is_added_by_cublaslt_in_a_workspace_of_its_own(version, staying):
    with device(T4, version) as storage:
        layer = torch.nn.Linear(1024, 1024, device="cuda")
        x = torch.empty(1024, 1024, device="cuda", requires_grad=True)
        checkpoint(lambda x: layer(layer(x)), x, use_reentrant=False).sum().backward()  # the first layer runs twice
        x.grad = layer.weight.grad = layer.bias.grad = None
        assert storage.allocator.allocated == 8 * MIB + 4096 + 2 * 8519680 + staying * MIB


def test_what_moves_to_the_host_leaves_the_device_in_locked_powers_of_two():
    with device() as storage:
        x = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
        for _ in range(2):
            copy = torch.empty(3 * MIB, dtype=torch.uint8, pin_memory=True)
            copy.copy_(x, non_blocking=True)
            del copy
        assert storage.pinned.locked == 4 * MIB  # the second is served from the first
        plain = torch.empty(5 * MIB, dtype=torch.uint8)
        assert (storage.host, storage.allocator.requested) == (5 * MIB, 3 * MIB)
        del plain
        assert storage.host == 0
        assert x.cpu().pin_memory().device.type == "cpu"
        assert storage.pinned.locked == 4 * MIB


def test_names_of_the_device_mean_the_one_that_is_counted():
    with device() as storage:
        tensors = [
            torch.ones(MIB, device="cuda:0"),
            torch.ones(MIB).to("cuda"),
            torch.ones(MIB).to(torch.device("cuda")),
            torch.ones(MIB).cuda(),
        ]
        assert storage.allocator.allocated == 4 * len(tensors) * MIB


def test_autocast_narrows_products_and_widens_losses():
    with device() as storage, torch.autocast("cuda", torch.bfloat16):
        layer = torch.nn.Linear(64, 64, bias=False, device="cuda")
        x = torch.empty(8, 64, device="cuda")
        y = layer(x)
        assert y.dtype == torch.bfloat16
        assert torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16
        assert F.cross_entropy(y, torch.empty(8, dtype=torch.int64, device="cuda")).dtype == torch.float32
        before = storage.allocator.allocated
        z = layer(x)  # the weight in 16 bits is there already
        assert storage.allocator.allocated == before + 2 * 1024  # the result, and the input in 16 bits
        with torch.autocast("cuda", enabled=False):
            assert layer(x).dtype == torch.float32
        del z
    assert not torch.is_autocast_enabled("cpu")


def test_dropout_keeps_a_mask_of_bytes():
    with device() as storage:
        x = torch.empty(MIB, device="cuda")
        y = F.dropout(x, 0.5, training=True)
        assert storage.allocator.peak_allocated == (4 + 4 + 1) * MIB
        assert F.dropout(y, 0.5, training=False) is y


def forecast(*names, place="torch/cuda"):
    loaded = plugins.load(())
    shape = {"layers": 4, "width": 256, "heads": 4, "vocabulary": 512, "tokens": 1024}
    case = Case(
        workload="decoder",
        shape=shape,
        place=Place.parse(place),
        corpus="drawn",
        tokenizer="none",
        strategies=tuple(Applied(name=name) for name in names),
    )
    torch_backend = backends.load("torch")
    build = lambda: assemble(loaded, case, draw=lambda inner: torch_backend.abstract_draw)  # noqa: E731
    batch = loaded.workloads["decoder"].abstract_batch(shape_of(loaded, case))
    return torch_backend.predict(build, case.place, batch, 0, 2)


def test_what_strategies_move_to_the_host_is_counted_there():
    plain, offloaded, moments = forecast("checkpoint"), forecast("offload_boundary"), forecast("offloaded_moments")
    hidden = 1024 * 256 * 4
    assert plain.host_bytes < hidden
    assert offloaded.host_bytes >= 4 * hidden
    assert offloaded.peaks["first_step/loss"] <= plain.peaks["first_step/loss"] - 3 * hidden
    parameters = sum(each.bytes for each in plain.standing if each.where == "parameters")
    assert moments.host_bytes >= 2 * parameters
    assert plain.reserved_bytes % (2 * MIB) == 0 and plain.reserved_bytes > max(plain.peaks.values())


@pytest.mark.parametrize("place", ["torch/cpu", "torch/cuda"])
def test_what_stands_at_the_peak_is_all_of_it(place):
    shown = forecast(place=place)
    whole = sum(each.bytes for each in shown.standing)
    assert whole == pytest.approx(max(shown.peaks.values()), rel=0.02)  # but for blocks that were not split
    assert shown.standing == tuple(sorted(shown.standing, key=lambda each: each.bytes, reverse=True))
    assert {"parameters", "update", "loss", "backward"} <= {each.where for each in shown.standing}


@pytest.mark.parametrize("place", ["torch/cpu", "torch/cuda"])
def test_a_step_that_asks_for_values_says_what_would_help_and_how_far_it_came(place):
    loaded = plugins.load(())
    shape = {"layers": 1, "width": 64, "heads": 1, "vocabulary": 64, "tokens": 32}
    case = Case(workload="decoder", shape=shape, place=Place.parse(place), corpus="drawn", tokenizer="none")
    torch_backend = backends.load("torch")

    def build():
        parts = assemble(loaded, case, draw=lambda inner: torch_backend.abstract_draw)
        inner = parts.feed
        return replace(parts, feed=lambda parts, p, x: inner(parts, p, x) + x.nonzero().sum())

    batch = loaded.workloads["decoder"].abstract_batch(shape_of(loaded, case))
    with pytest.raises(backends.Incomplete, match=r"'aten.nonzero.default' asks for values.*a mask") as ended:
        torch_backend.predict(build, case.place, batch, 0, 2)
    assert ended.value.peaks["init"] > 0 and "first_step/loss" not in ended.value.peaks


def test_the_card_that_is_chosen_decides_what_is_reserved(monkeypatch):
    monkeypatch.setenv("HARNESS_GPU", "h100")
    hopper = forecast()
    monkeypatch.setenv("HARNESS_GPU", "a100")
    ampere = forecast()
    assert hopper.reserved_bytes - ampere.reserved_bytes > 40 * MIB  # two workspaces of 32 MiB, not of 8
    assert max(hopper.peaks.values()) == pytest.approx(max(ampere.peaks.values()), rel=0.05)
    assert "A100" in ampere.target


def test_the_context_is_added_where_that_of_the_card_is_known(monkeypatch):
    monkeypatch.setenv("HARNESS_GPU", "t4")
    turing = forecast()
    assert turing.driver_bytes == turing.reserved_bytes + CARDS["t4"].context_bytes
    monkeypatch.setenv("HARNESS_GPU", "h100")
    assert forecast().driver_bytes is None
