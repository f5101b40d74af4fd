"""A device that is not there takes what a real one would: its kernels, scratch, workspaces, page-locked memory."""

import contextlib
import os
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from harness import Place, backends
from harness.backends.cards import CARDS
from harness.backends.torch_cuda_operators import attention_kernel, pretended
from harness.backends.torch_cuda_storage import DeviceStorage
from harness.backends.torch_flops import Work
from harness.contract import plugins
from harness.contract.assembly import assemble, shape_of
from harness.records import Applied, Case, Task
from harness.worker import prediction

MIB = 1 << 20
T4, A100, H100 = CARDS["t4"], CARDS["a100"], CARDS["h100"]
LOADED = plugins.load()


@contextlib.contextmanager
def device(card=H100, torch_version=(2, 10)):
    with FakeTensorMode(allow_non_fake_inputs=True), DeviceStorage(card, torch_version) as storage, pretended(storage):
        yield storage


def heads(dtype, count=8, grad=True, tokens=1024, width=64):
    return torch.empty(1, count, tokens, width, dtype=dtype, device="cuda", requires_grad=grad)


@pytest.mark.parametrize(
    ("dtype", "card", "key_heads", "masked", "kernel"),
    [
        (torch.bfloat16, H100, 8, False, "cudnn"),  # which torch 2.13 asks first on Hopper, from cuDNN 9.15 on
        (torch.bfloat16, H100, 2, True, "cudnn"),  # and which takes grouped heads under a mask
        (torch.bfloat16, A100, 8, False, "flash"),
        (torch.bfloat16, A100, 2, False, "flash"),  # which takes grouped heads as they are
        (torch.bfloat16, A100, 8, True, "efficient"),
        (torch.bfloat16, A100, 2, True, "math"),
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


@pytest.mark.parametrize(
    ("width", "dropout", "masked", "kernel"),
    [
        (256, 0.0, False, "cudnn"),
        (12, 0.0, False, "flash"),  # which pads it to 16
        (64, 0.1, False, "flash"),  # cuDNN drops multiples of a sixteenth
        (64, 0.125, False, "cudnn"),
        (64, 0.0, True, "efficient"),  # cuDNN has no gradient of a mask
        (320, 0.0, False, "efficient"),
    ],
)
def test_what_cudnn_does_not_take_goes_to_the_next_kernel(width, dropout, masked, kernel):
    with device():
        q = heads(torch.bfloat16, width=width)
        mask = torch.empty(1024, 1024, dtype=q.dtype, device="cuda", requires_grad=True) if masked else None
        assert attention_kernel(q, q, q, mask, H100, dropout) == kernel
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION]):
            assert attention_kernel(q, q, q, mask, H100, dropout) != "cudnn"


def peak_of_attention(card, key_heads=8, masked=True):
    with device(card) as storage:
        q, k = heads(torch.bfloat16), heads(torch.bfloat16, key_heads)
        mask = torch.empty(1024, 1024, dtype=torch.bool, device="cuda") if masked else None
        F.scaled_dot_product_attention(q, k, k, mask, is_causal=not masked, enable_gqa=key_heads < 8).sum().backward()
        assert q.grad.shape == q.shape and k.grad.shape == k.shape
        return storage.allocator.peak_allocated


def test_grouped_heads_under_a_mask_make_no_scores_on_hopper():
    scores = 8 * 1024 * 1024 * 2
    assert peak_of_attention(H100, 2) < scores < peak_of_attention(A100, 2)


def test_cudnn_takes_for_a_call_what_flash_attention_does():
    assert peak_of_attention(H100, masked=False) == pytest.approx(peak_of_attention(A100, masked=False), abs=8192)


@pytest.mark.parametrize(("card", "tokens", "row"), [(A100, 1024, 1024), (A100, 1001, 1008), (H100, 1001, 1001)])
def test_a_mask_of_booleans_becomes_numbers_that_the_backward_pass_keeps(card, tokens, row):
    def kept(dtype):
        with device(card) as storage:
            q = heads(torch.bfloat16, tokens=tokens)
            mask = torch.empty(tokens, row, dtype=dtype, device="cuda")[:, :tokens]
            before = storage.allocator.requested
            attended = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
            return storage.allocator.requested - before, attended.shape

    (booleans, shape), (numbers, _) = kept(torch.bool), kept(torch.bfloat16)
    assert shape == (1, 8, tokens, 64)
    assert booleans - numbers == tokens * row * 2


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


@pytest.mark.parametrize("function", [F.softmax, F.log_softmax])
@pytest.mark.parametrize(("dtype", "copy"), [(torch.float16, 0), (torch.bfloat16, 256)])
def test_softmax_widens_float16_within_its_kernel_and_bfloat16_in_a_copy(function, dtype, copy):
    with device() as storage:
        x = torch.empty(MIB, 64, dtype=dtype, device="cuda")
        assert function(x, -1, dtype=torch.float32).dtype == torch.float32
        assert storage.allocator.peak_allocated == (128 + 256 + copy) * MIB


def test_functions_take_their_arguments_by_name():
    with device() as storage:
        q = heads(torch.bfloat16)
        assert F.scaled_dot_product_attention(value=q, key=q, query=q, is_causal=True).shape == q.shape
        assert storage.allocator.peak_allocated < 8 * 1024 * 1024 * 2
        x = torch.empty(64, 64, dtype=torch.float16, device="cuda")
        assert torch.softmax(input=x, dim=-1, dtype=torch.float32).dtype == torch.float32
        assert torch.log_softmax(dim=-1, input=x).shape == F.dropout(input=x).shape == x.shape
        assert (
            torch.rms_norm(input=x, normalized_shape=(64,)).shape == F.rms_norm(input=x, normalized_shape=(64,)).shape
        )
        assert torch.empty(4).pin_memory(device=None).is_pinned(device=None)


def test_a_norm_keeps_its_input_and_a_number_for_each_row():
    x_bytes, rows = 4096 * 1024 * 4, 4096
    with device() as storage:
        x = torch.empty(4096, 1024, device="cuda", requires_grad=True)
        weight = torch.empty(1024, device="cuda", requires_grad=True)
        before = storage.allocator.requested
        y = F.rms_norm(x, (1024,), weight, 1e-6)
        assert storage.allocator.requested - before == x_bytes + 4 * rows, "the result, and what each row is divided by"
        storage.allocator.reset_peaks()
        y.backward(torch.empty_like(y))
        assert x.grad.shape == x.shape and weight.grad.shape == weight.shape
        assert storage.allocator.peak_requested - before == 3 * x_bytes + 4 * rows + 1024 * 4, "both gradients come"


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_a_norm_whose_weight_has_another_type_is_taken_apart():
    with device() as storage:
        x = torch.empty(4096, 1024, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        before = storage.allocator.requested
        y = F.rms_norm(x, (1024,), torch.empty(1024, device="cuda"), 1e-6)
        assert storage.allocator.requested - before > 1.5 * y.nbytes


def test_a_gradient_is_added_into_another_from_the_version_on_that_was_measured():
    """Liger's rotary positions: 92,815,872 bytes in early 2025, 88,621,568 with torch 2.11 on an H200."""

    def peak(version):
        with device(torch_version=version) as storage:
            x = torch.empty(1024, 1024, device="cuda", requires_grad=True)
            both = x * 2 + x * 3
            storage.allocator.reset_peaks()
            both.backward(torch.empty_like(both))
            return storage.allocator.peak_requested

    assert peak((2, 5)) - peak((2, 11)) == 4 * MIB


def test_attention_with_grouped_heads_counts_the_products_of_all_queries():
    def flops(key_heads, causal):
        with device(A100):
            q, k = heads(torch.bfloat16), heads(torch.bfloat16, key_heads)
            with Work() as work:
                y = F.scaled_dot_product_attention(q, k, k, is_causal=causal, enable_gqa=key_heads < 8)
                y.backward(torch.empty_like(y))
            return sum(each.flops for each in work.taken())

    whole = (2 + 5) * 2.0 * 8 * 1024 * 1024 * 64
    assert flops(2, False) == flops(8, False) == whole
    assert flops(2, True) == whole / 2


def test_attention_within_a_module_takes_the_kernels_of_the_card_as_well():
    def peak(tokens):
        with device() as storage:
            layer = torch.nn.TransformerEncoderLayer(
                256, 8, 256, dropout=0.0, batch_first=True, device="cuda", dtype=torch.bfloat16
            )
            x = torch.empty(1, tokens, 256, dtype=torch.bfloat16, device="cuda")
            layer(x).sum().backward()
            return storage.allocator.peak_requested

    assert peak(4096) - peak(2048) < 8 * 4096 * 4096  # less than scores of one byte each


def test_autocast_reaches_products_within_a_function_of_python():
    with device(), torch.autocast("cuda", torch.bfloat16):
        attention = torch.nn.MultiheadAttention(64, 4, device="cuda")
        x = torch.empty(8, 2, 64, device="cuda")
        assert attention(x, x, x, need_weights=False)[0].dtype == torch.bfloat16


def test_a_generator_of_the_device_draws_nothing_and_one_of_the_host_draws():
    own = torch.Generator
    with device():
        for name in ("cuda", torch.empty(1, device="cuda").device):
            drawn = torch.Generator(name).manual_seed(1)
            assert torch.randn(4, 3, generator=drawn, device="cuda").device.type == "meta"
            assert torch.empty(4, device="cuda").exponential_(generator=drawn).shape == (4,)
            assert isinstance(drawn, torch.Generator)
        assert torch.Generator().manual_seed(7).initial_seed() == 7
        assert type(torch.Generator("cpu")) is own
    assert torch.Generator is own


@pytest.mark.parametrize(
    ("card", "version", "size"),
    [
        (T4, (2, 12), 8519680),
        (H100, (2, 10), 32 * MIB),
        (CARDS["rtx5090"], (2, 11), 8519680),
        (CARDS["rtx5090"], (2, 12), 32 * MIB),  # from there on Blackwell has as much as Hopper
    ],
)
def test_each_thread_keeps_one_workspace_of_cublas(card, version, size):
    with device(card, version) as storage:
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


class Running(TorchDispatchMode):
    """Write down which operators run on which types."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [str(each.dtype) for each in args if isinstance(each, torch.Tensor)]
        if tensors and func is not torch.ops.prim.device.default:
            self.seen.append((str(func), tensors, str((kwargs or {}).get("dtype"))))
        return func(*args, **(kwargs or {}))


AUTOCAST = {
    "softmax": lambda x, y: x.softmax(-1),
    "log_softmax": lambda x, y: F.log_softmax(x, -1),
    "sum": lambda x, y: (x.sum(), torch.sum(x, -1), x.sum(dtype=x.dtype), y.sum()),
    "prod": lambda x, y: (torch.prod(x), x.prod(-1)),
    "cumsum": lambda x, y: (x.cumsum(-1), torch.cumprod(x, -1)),
    "norm": lambda x, y: (x.norm(), torch.norm(x, dim=-1)),
    "pow": lambda x, y: x**2,
    "cross_entropy": lambda x, y: F.cross_entropy(x, y),
    "layer_norm": lambda x, y: F.layer_norm(x, (64,)),
    "linear": lambda x, y: F.linear(x, torch.empty(64, 64, device="cuda")),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast_runs_what_torchs_own_runs_on_fake_tensors_of_cuda(name, dtype):
    def run():
        with torch.no_grad(), Running() as running:
            x = torch.empty(8, 64, dtype=dtype, device="cuda")
            AUTOCAST[name](x, torch.empty(8, dtype=torch.int64, device="cuda"))
            return running.seen

    with device(), torch.autocast("cuda", dtype):
        actual = run()
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        with FakeTensorMode():
            due = run()
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.clear_autocast_cache()
    assert actual == due and due


def test_autocast_widens_what_an_rms_norm_reads():
    with device(), torch.autocast("cuda", torch.bfloat16):
        x = torch.empty(8, 64, dtype=torch.bfloat16, device="cuda")
        norm = torch.nn.RMSNorm(64, device="cuda")
        assert norm(x).dtype == torch.rms_norm(x, (64,)).dtype == torch.float32


@pytest.mark.parametrize(("smoothing", "kept"), [(0.0, 2 + 4), (0.1, 4)])
def test_a_loss_under_autocast_keeps_logarithms_in_both_types(smoothing, kept):
    with device() as storage, torch.autocast("cuda", torch.bfloat16):
        z = torch.empty(1024, 8192, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        y = torch.empty(1024, dtype=torch.int64, device="cuda")
        before = storage.allocator.allocated
        loss = F.cross_entropy(z, y, label_smoothing=smoothing)
        assert storage.allocator.allocated - before == pytest.approx(kept * z.numel(), rel=0.01)
        loss.backward()
    assert loss.dtype == torch.float32 and z.grad.dtype == torch.bfloat16


def test_dropout_keeps_a_mask_of_bytes():
    with device() as storage:
        x = torch.empty(MIB, device="cuda")
        y = F.dropout(x, 0.5, training=True)
        assert storage.allocator.peak_allocated == (4 + 4 + 1) * MIB
        assert F.dropout(y, 0.5, training=False) is y


def forecast(*names, place="torch/cuda"):
    loaded = LOADED
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
    assert (hopper.base_bytes, ampere.base_bytes) == (64 * MIB, 2 * 8519680)
    assert max(hopper.peaks.values()) == pytest.approx(max(ampere.peaks.values()), rel=0.05)
    assert "A100" in ampere.target


def test_the_context_is_added_where_that_of_the_card_is_known(monkeypatch):
    monkeypatch.setenv("HARNESS_GPU", "t4")
    turing = forecast()
    assert turing.driver_bytes == turing.reserved_bytes + CARDS["t4"].context_bytes
    monkeypatch.setenv("HARNESS_GPU", "h100")
    assert forecast().driver_bytes is None


def every_strategy():
    """Each strategy that torch/cuda takes, on the first workload that it goes with."""
    for name, strategy in sorted(LOADED.strategies.items()):
        for workload, made in sorted(LOADED.workloads.items(), key=lambda item: item[0] != "decoder"):
            if "torch" in made.on and strategy.obstacle(Place("torch", "cuda"), made) is None:
                yield pytest.param(name, workload, id=name)
                break


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(("name", "workload"), list(every_strategy()))
def test_each_strategy_is_predicted_or_says_why_not(name, workload):
    strategy, made = LOADED.strategies[name], LOADED.workloads[workload]
    shape = made.shape()
    small = made.probe(shape)
    case = Case(
        workload=workload,
        shape=small.model_dump(),
        place="torch/cuda",
        corpus="drawn",
        tokenizer="none",
        strategies=(Applied(name=name, knobs=strategy.probed({}, shape, small)),),
        ranks=2 if strategy.ranks else 1,
    )
    task = Task(kind="predict", cases=(case,), run_id="all", parent=os.getpid(), folder="", environment={})
    record = prediction.measure(task, LOADED, backends.load("torch"))
    assert record.prediction.error is None, record.prediction.error
    assert record.prediction.predicted_peak_bytes or record.missing["predicted_peak_bytes"]
