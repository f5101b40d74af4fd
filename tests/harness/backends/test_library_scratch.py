"""What the libraries of the CPU keep between products: predicted, or taken before anything is measured."""

import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.backends import processor, torch_kernels
from harness.backends.torch_kernels import CAPACITY, PROBED, different_sizes
from harness.backends.torch_storage import LiveStorage
from harness.machine import environment, facts

BFLOAT16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> int:
    """Return what a kernel is said to take, as this processor may keep none; one of a block three times."""
    monkeypatch.setattr(torch_kernels, "KERNEL", 1 << 15)
    monkeypatch.setattr(torch_kernels, "BLOCK_KERNEL", 3 << 15)
    return 1 << 15


def taken(dtype: torch.dtype, sizes: list[int]) -> int:
    """Return the bytes that products of such squares are predicted to leave, their results apart."""
    with FakeTensorMode(), LiveStorage() as live:
        for size in sizes:
            square = torch.empty(size, size, dtype=dtype)
            square @ square
            del square
        return live.live


def test_a_kernel_is_counted_once_for_each_size_in_bfloat16_on_the_cpu(kernel: int) -> None:
    assert taken(torch.bfloat16, [64, 64, 128]) == 2 * kernel
    assert taken(torch.float32, [64, 128]) == 0


@pytest.mark.parametrize(("dtypes", "kernels"), [({torch.bfloat16}, 0), ({torch.bfloat16, torch.float16}, 2)])
def test_kernels_in_float16_are_counted_where_the_library_has_them(
    kernel: int, monkeypatch: pytest.MonkeyPatch, dtypes: set[torch.dtype], kernels: int
) -> None:
    monkeypatch.setattr(torch_kernels, "DTYPES", dtypes)
    assert taken(torch.float16, [64, 64, 128]) == kernels * kernel


def test_no_more_kernels_are_counted_than_the_library_has_room_for(kernel: int) -> None:
    assert taken(torch.bfloat16, list(range(1, CAPACITY + 50))) == CAPACITY * kernel


def grouped(dtype: torch.dtype, calls: int, rows: int = 1024, groups: int = 4) -> int:
    """Return the bytes that products of so many groups are predicted to leave, their results apart."""
    with FakeTensorMode(), LiveStorage() as live:
        x, offsets = torch.empty(rows, 64, dtype=dtype), torch.empty(groups, dtype=torch.int32)
        matrices = torch.empty(groups, 64, 128, dtype=dtype)
        before = live.live
        for _ in range(calls):
            torch._grouped_mm(x, matrices, offs=offsets)
        return live.live - before


def test_the_groups_of_experts_bring_sizes_of_their_own_at_each_call(kernel: int) -> None:
    assert 3.5 * kernel <= grouped(torch.bfloat16, 1) <= 4 * kernel
    assert 6.5 * kernel <= grouped(torch.bfloat16, 2) <= 8 * kernel, "routing gives other sizes"
    assert grouped(torch.bfloat16, 9, groups=1) == kernel, "all rows are one size"


def test_what_the_probe_keeps_leaves_less_room(kernel: int) -> None:
    with FakeTensorMode(), LiveStorage(kernels=PROBED + 2) as live:
        x, offsets = torch.empty(1024, 64, dtype=torch.bfloat16), torch.empty(4, dtype=torch.int32)
        torch._grouped_mm(x, torch.empty(4, 64, 128, dtype=torch.bfloat16), offs=offsets)
        assert live.kernels.bytes == 2 * kernel


def test_as_many_sizes_differ_as_when_rows_are_routed_at_random() -> None:
    draw = np.random.Generator(np.random.Philox(key=0))
    for drawn, rows, groups in ((48, 1024, 4), (96, 1024, 8), (12, 65_536, 2)):
        routed = [len(np.unique(draw.binomial(rows, 1 / groups, drawn))) for _ in range(300)]
        assert different_sizes(drawn, rows, groups) == pytest.approx(np.mean(routed), rel=0.03)
        deviation = np.std(draw.binomial(rows, 1 / groups, 9999))
        wider = [len(np.unique(np.rint(draw.normal(0, 2 * deviation, drawn)))) for _ in range(300)]
        assert different_sizes(drawn, rows, groups, 2) == pytest.approx(np.mean(wider), rel=0.03)


def attended(tokens: int, features: int = 64, heads: int = 4, dtype: torch.dtype = torch.bfloat16) -> tuple[int, int]:
    """Return the bytes that attention is predicted to leave: after its forward pass, and of its backward pass."""
    with FakeTensorMode(), LiveStorage() as live:
        x = torch.empty(1, tokens, heads * features, dtype=dtype, requires_grad=True)
        q = x.view(1, tokens, heads, features).transpose(1, 2)
        o = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).reshape(x.shape)
        forward = live.kernels.bytes
        torch.autograd.grad(o, x, torch.empty_like(x))
        return forward, live.kernels.bytes - forward


def test_attention_in_bfloat16_keeps_products_of_its_blocks(kernel: int) -> None:
    scores_and_others = 3 * 3 * kernel
    assert attended(1024)[1] == attended(4096)[1] == scores_and_others, "scores, transposed, plain; the rest is alike"
    assert attended(768)[1] == 6 * 3 * kernel, "blocks of 512 and of 256 keys"
    assert attended(1000)[1] == 12 * 3 * kernel, "blocks of 256 and 232 queries, of 512 and 488 keys"
    assert attended(1024)[0] == attended(4096)[0] > attended(512)[0] > attended(64)[0] > 0
    assert attended(1024, dtype=torch.float32) == (0, 0)


ATTENTION = """
import ctypes, gc, sys, torch
torch.set_num_threads(2)
def resident():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status["RssAnon"].split()[0]) << 10
def attend(tokens, features, heads=4):
    x = torch.randn(1, tokens, heads * features, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.ones_like(x)
    before = resident()
    q = x.view(1, tokens, heads, features).transpose(1, 2)
    o = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).reshape(x.shape)
    o.backward(gradient)
    x.grad = None
    del o, q
    return resident() - before
torch.randn(64, 64, dtype=torch.bfloat16) @ torch.randn(64, 64, dtype=torch.bfloat16)
attend(8, 16)
print(attend(*map(int, sys.argv[1:])), attend(*map(int, sys.argv[1:])))
"""


HALF = facts.facts()["half_precision"] or ()
of_no_tiles = pytest.mark.skipif("amx_bf16" in HALF, reason="with AMX a kernel takes 0.3 to 1 MiB, by its size")


@pytest.mark.long
@of_no_tiles
@pytest.mark.parametrize(("tokens", "features"), [(1024, 64), (1000, 64)])
def test_attention_in_bfloat16_keeps_what_is_predicted(tokens: int, features: int) -> None:
    env = {**os.environ, **environment.PINS}
    command = [sys.executable, "-c", ATTENTION, str(tokens), str(features)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    first, second = map(int, done.stdout.split())
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        predicted = sum(attended(tokens, features))
    finally:
        torch.set_num_threads(threads)
    assert second < 256 << 10, "it is kept, not taken again"
    assert abs(first - predicted) <= max(0.25 * predicted, 1 << 20)


GROUPS = """
import re
from pathlib import Path
import torch

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

torch.manual_seed(0)
x = torch.ones(1024, 64, dtype=torch.bfloat16)
matrices = torch.ones(4, 64, 128, dtype=torch.bfloat16)
grown = []
for step in range(60):
    before = resident()
    offsets = torch.bincount(torch.randint(4, (1024,)), minlength=4).cumsum(0).to(torch.int32)
    torch._grouped_mm(x, matrices, offs=offsets)
    grown.append(resident() - before)
print(sum(grown[10:]))
"""


@of_no_tiles
@pytest.mark.skipif(not BFLOAT16, reason="the library has no products in bfloat16 for this CPU")
def test_a_process_grows_by_what_is_counted_for_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten calls go before: in the first the library is loaded. Rows are routed at random here, each by itself."""
    monkeypatch.setattr(torch_kernels, "SPREAD", 1.0)
    env = {**os.environ, **environment.PINS}
    done = subprocess.run([sys.executable, "-c", GROUPS], env=env, capture_output=True, text=True, check=True)
    counted = grouped(torch.bfloat16, 60) - grouped(torch.bfloat16, 10)
    assert int(done.stdout) == pytest.approx(counted, rel=0.25)


PRODUCTS = """
import re, sys
from pathlib import Path
import torch
from harness import Place
from harness.backends import torch as backend

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

place = Place("torch", "cpu")
backend.start(place)
if sys.argv[1] == "warm":
    backend.warm(place)
grown = 0
for m, k, n in ((64, 64, 64), (256, 1024, 4096), (1024, 256, 8192), (512, 512, 16384)):
    a, b, out = torch.ones(m, k), torch.ones(k, n), torch.ones(m, n)
    before = resident()
    torch.mm(a, b, out=out)
    grown += resident() - before
print(grown)
"""


def grown(way: str) -> int:
    """Return by how many KiB the products make a process larger."""
    env = {**os.environ, **environment.PINS, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PRODUCTS, way], env=env, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.long
def test_after_a_warm_start_no_product_makes_the_process_larger() -> None:
    if "mkl" not in torch.__config__.show().lower():
        pytest.skip("this torch has another library for products")
    assert grown("warm") < 2048 < grown("cold")


PROGRAM = """
%fused_computation (param_0: f32[4,8,64,64]) -> f32[4,8,64,64] {
  %param_0 = f32[4,8,64,64]{3,2,1,0} parameter(0)
  %dot = f32[4,8,64,64]{3,2,1,0} dot(%param_0, %param_0), rhs_contracting_dims={3}
  %product = f32[4,8,64,64]{3,2,1,0} multiply(%dot, %param_0)
  %sum = f32[4,8,64]{2,1,0} reduce(%product, %zero), dimensions={3}, to_apply=%add
  ROOT %out = f32[4,8,64,64]{3,2,1,0} divide(%param_0, %sum)
}

%fused_computation.1 (param_0: f32[4,8,128,64]) -> f32[4,8,128,128] {
  %param_0 = f32[4,8,128,64]{3,2,1,0} parameter(0)
  ROOT %dot = f32[4,8,128,128]{3,2,1,0} dot(%param_0, %param_0), rhs_contracting_dims={3}
}

ENTRY %main (a: f32[4,8,64,64]) -> f32[4,8,64,64] {
  %ynn_fusion = f32[4,8,64,64]{3,2,1,0} fusion(%a), kind=kCustom, calls=%fused_computation
  %ynn_fusion.1 = f32[4,8,128,128]{3,2,1,0} fusion(%b), kind=kCustom, calls=%fused_computation.1
}
"""


PACKED = 128 * 64 * 4
"""Bytes of the columns that are packed at once of the larger product's right factor."""


TILES = 2 * 6 * (128 << 10)
"""Bytes of the arrays that two threads work on in a sum."""


def test_the_library_of_jax_takes_scratch_for_sums_of_products_over_batches_alone() -> None:
    from harness.backends.jax_scratch import scratch

    scores = 4 * 8 * 64 * 64 * 4
    assert scratch(PROGRAM, 2, True) == 3 * scores + TILES, "the larger product sums nothing"
    assert scratch(PROGRAM.replace(" reduce(", " negate("), 2, True) == PACKED, "no sum, no tiles"
    softmax = PROGRAM.replace(" multiply(", " exponential(")
    assert scratch(softmax, 2, True) == PACKED + TILES, "without its derivative"
    logits = PROGRAM.replace("[4,8,64,64]", "[1,64,64]").replace(
        "%param_0), rhs_contracting_dims={3}\n  %pro", "%param_0), rhs_contracting_dims={2}\n  %pro"
    )
    assert scratch(logits, 2, True) == PACKED + TILES, "logits of one row are no batch"
    assert scratch(PROGRAM, 2, False) == scores + TILES, "with narrow vectors the scores alone"
    assert scratch(softmax, 2, False) == PACKED // 2 + TILES


@pytest.mark.parametrize(
    ("lengths", "times"),
    [((1, 64, 64), 6), ((1, 8, 64, 64), 6), ((8, 1, 64, 64), 6), ((4, 8, 64, 64), 0), ((8, 64, 64), 0), ((64, 64), 0)],
)
def test_a_sum_without_matrix_products_is_made_whole_where_a_batch_has_a_length_of_one(
    lengths: tuple[int, ...], times: int
) -> None:
    from harness.backends.jax_scratch import scratch

    program = PROGRAM.replace("{3,2,1,0} dot(%param_0", "{3,2,1,0} add(%param_0")
    program = program.replace("[4,8,64,64]", f"[{','.join(map(str, lengths))}]")
    size = math.prod(lengths) * 4
    assert scratch(program, 2, True) == times * size + TILES
    elsewhere = program.replace("multiply(%dot", "add(%dot") + PRODUCTS_ELSEWHERE.format(",".join(map(str, lengths)))
    assert scratch(elsewhere, 2, True) == max(times - 1, 0) * size + TILES
    assert scratch(program, 2, False) == max(times - 4, 0) * size + TILES, "four arrays less with narrow vectors"


PRODUCTS_ELSEWHERE = """
%fused_computation.2 (param_0: f32[{0}]) -> f32[1] {{
  %product = f32[{0}]{{3,2,1,0}} multiply(%param_0, %param_0)
  ROOT %sum = f32[1]{{0}} reduce(%product, %zero), dimensions={{3}}, to_apply=%add
}}

ENTRY %other (a: f32[{0}]) -> f32[1] {{
  %ynn_fusion.2 = f32[1]{{0}} fusion(%a), kind=kCustom, calls=%fused_computation.2
}}
"""


@pytest.mark.parametrize(
    ("batch", "heads", "threads", "times"),
    [(4, 8, 2, 3), (8, 8, 2, 2), (2, 8, 2, 5), (1, 8, 2, 2), (1, 2, 2, 5), (1, 1, 2, 5), (4, 8, 1, 2), (2, 8, 1, 3)],
)
def test_each_thread_takes_scratch_for_its_part_of_a_batch(batch: int, heads: int, threads: int, times: int) -> None:
    from harness.backends.jax_scratch import scratch

    program = PROGRAM.replace("[4,8,64,64]", f"[{batch},{heads},64,64]")
    assert scratch(program, threads, True) == times * batch * heads * 64 * 64 * 4 + TILES // 2 * threads


NORM = """
import ctypes, sys
import jax
import jax.numpy as jnp
from harness.backends.jax_scratch import scratch

class Mapped(ctypes.Structure):
    _fields_ = [(f"other{at}", ctypes.c_size_t) for at in range(4)] + [("bytes", ctypes.c_size_t)]
    _fields_ += [(f"more{at}", ctypes.c_size_t) for at in range(5)]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Mapped
rows, tokens, width = map(int, sys.argv[1:])

def norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale

def backward(x, scale, gradient):
    of_x, of_scale = jax.vjp(norm, x, scale)[1](gradient)
    return of_x + x, of_scale

x, scale = jnp.ones((rows, tokens, width)), jnp.ones(width)
program = jax.jit(backward).lower(x, scale, x).compile()
jax.block_until_ready(x)
plan = program.memory_analysis()
print(libc.mallinfo2().bytes + plan.temp_size_in_bytes + plan.output_size_in_bytes, scratch(program.as_text(), 2))
jax.block_until_ready(program(x, scale, x))
libc.malloc_stats()
"""


@pytest.mark.skipif("glibc" not in platform.libc_ver(), reason="this allocator keeps no mark of what it maps")
@pytest.mark.parametrize("rows", [1, 2])
def test_the_derivative_of_a_norm_takes_what_is_predicted(rows: int) -> None:
    """What is allocated by the allocator's own mark: not all of the plan is written when the most is allocated."""
    array = 16 << 20
    command = [sys.executable, "-c", NORM, str(rows), str((32 << 10) // rows), "128"]
    done = subprocess.run(command, env={**os.environ, **environment.PINS}, capture_output=True, text=True, check=True)
    planned, predicted = map(int, done.stdout.split())
    mark = re.search(r"max mmap bytes\s+=\s+(\d+)", done.stderr)
    arrays = 6 if processor.is_wide() else 2
    assert mark and predicted == TILES + (arrays * array if rows == 1 else 0)
    assert int(mark[1]) - planned == pytest.approx(predicted, abs=array // 4)


LOGITS = """
%fused_computation (param_0: f32[256,32000], param_1: f32[32000,512]) -> f32[256,512] {
  %param_0 = f32[256,32000]{1,0} parameter(0)
  %param_1 = f32[32000,512]{1,0} parameter(1)
  ROOT %dot = f32[256,512]{1,0} dot(%param_0, %param_1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (a: f32[256,32000], b: f32[32000,512]) -> f32[256,512] {
  ROOT %ynn_fusion = f32[256,512]{1,0} fusion(%a, %b), kind=kCustom, calls=%fused_computation
}
"""


def test_the_library_of_jax_packs_some_columns_of_a_right_factor_over_all_its_length() -> None:
    from harness.backends.jax_scratch import scratch

    assert scratch(LOGITS, 2, True) == 128 * 32000 * 4
    few = LOGITS.replace("[32000,512]", "[32000,32]").replace("[256,512]", "[256,32]")
    assert scratch(few, 2, True) == scratch(few, 2, False) == 32 * 32000 * 4
    assert scratch(LOGITS, 2, False) == 64 * 32000 * 4, "half as many with narrow vectors"
    assert scratch(LOGITS.replace("[256,", "[64,"), 2, False) == 128 * 32000 * 4, "but for a few rows"
    turned = LOGITS.replace("[32000,512]", "[512,32000]").replace(
        "rhs_contracting_dims={0}", "rhs_contracting_dims={1}"
    )
    assert scratch(turned, 2, True) == 128 * 32000 * 4
    assert scratch(LOGITS.replace("%ynn_fusion", "%other_fusion"), 2) == 0, "computed by another library"


LEFT = """
import jax
from harness.contract import plugins
from harness.backends import jax as backend
from harness.contract.assembly import assemble
from harness.records import Case
from harness.machine import memory
from harness.worker import batch_sizes

case = Case(
    workload="decoder", shape={"layers": 4, "width": 128, "heads": 4, "vocabulary": 4096, "tokens": 128},
    place="jax/cpu", corpus="drawn", tokenizer="none",
)
loaded = plugins.load()
parts = assemble(loaded, case)
abstract = assemble(loaded, case, draw=lambda inner: backend.abstract_draw)
step = backend.prepare(parts, backend.like(batch_sizes.sizes(loaded.workloads["decoder"], parts)), abstract)
memory.settle()
before = memory.read().rss
jax.jit(lambda: jax.numpy.ones(())).lower().compile()
memory.trim()
print(before - memory.read().rss)
"""


@pytest.mark.long
def test_no_program_that_a_run_compiles_frees_what_the_step_left_in_the_compiler() -> None:
    env = {**os.environ, **environment.PINS, "XLA_FLAGS": "", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    done = subprocess.run([sys.executable, "-c", LEFT], env=env, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1 << 20


def test_gloo_copies_the_whole_while_it_gathers_and_scatters() -> None:
    from harness.backends.torch import pretended
    from strategies.sharding._torch import all_gather, reduce_scatter

    def peak(collective: Callable[[torch.Tensor], torch.Tensor], size: int) -> int:
        with pretended(2), FakeTensorMode(), LiveStorage() as live:
            sent = torch.empty(size, dtype=torch.uint8)
            with live.phase("step"):
                result = collective(sent)
            assert live.live == sent.numel() + result.numel(), "the copy is gone"
            return live.peaks["step"]

    assert peak(reduce_scatter, 4096) == 4096 + 2048 + 4096
    assert peak(all_gather, 2048) == 2048 + 4096 + 4096


def test_steps_are_run_as_long_as_each_takes_more(kernel: int) -> None:
    """A step of experts in bfloat16 leaves kernels; one in float32, or of fixed sizes, is as the one before."""
    from harness import Parts, Place
    from harness.backends.torch import predict

    def peak(experts: bool, steps: int) -> int:
        x, matrix = (torch.empty(1024, 64, dtype=torch.bfloat16), torch.empty(64, 128, dtype=torch.bfloat16))
        ran.append(0)

        def step(parts: Parts, state: torch.Tensor, *batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            ran[-1] += 1
            if experts:
                torch._grouped_mm(x, matrix.expand(4, 64, 128), offs=torch.empty(4, dtype=torch.int32))
            else:
                x @ matrix
            return state, torch.zeros(())

        parts = Parts(None, Place("torch", "cpu"), init=lambda parts, seed: torch.zeros(1), step=step)
        return predict(lambda: parts, parts.place, [((1,), "int32")] * 2, 0, steps).peaks["steady_step"]

    ran: list[int] = []
    assert peak(False, 8) == peak(False, 2) and ran == [2, 2]
    assert peak(True, 4) > peak(True, 2) + 4 * kernel and ran[2:] == [4, 2]
