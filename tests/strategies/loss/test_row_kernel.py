"""The row kernel of the fused loss: in Triton's interpreter against float64, and what compilers make of it."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from harness import IGNORED, Objective
from harness.backends.torch_flops import Work
from strategies.loss.fused_loss import _rows

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="the package triton is not installed")

INTERPRETED = """
import json, sys
import torch
import torch.nn.functional as F
from harness import IGNORED, Objective
from strategies.loss.fused_loss import _rows, _torch
from harness.workloads.decoder import Shape

import triton.runtime.interpreter as interpreter
inner = interpreter._patch_lang_tensor
def patched(tensor, scope):  # numpy 2.4 makes no number of an array of one element
    inner(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))
interpreter._patch_lang_tensor = patched

_rows.takes = lambda x, dtype: dtype in _rows.TYPES
dtypes = {name: (getattr(torch, name),) * 2 for name in ("float32", "bfloat16", "float16")}
dtypes["mixed"] = torch.bfloat16, torch.float32

def problem(kind):
    torch.manual_seed(0)
    of_x, of_w = dtypes[kind]
    x, w = torch.randn(37, 24).to(of_x), (torch.randn(1037, 24) / 2).to(of_w)
    w[5] = 40 * w[5]  # some rows are confident
    y = torch.randint(1037, (37,))
    y[:9], y[3::7] = 5, IGNORED
    return x.requires_grad_(), w.requires_grad_(), y

def gradients(value, x, w):
    return [g.double() for g in torch.autograd.grad(value, (x, w))]

def error(actual, due):
    return max(float((a - b).norm() / b.norm()) for a, b in zip(actual, due))

rows = {}
for kind in dtypes:
    for settings in ({}, {"soft_cap": 5.0, "label_smoothing": 0.1, "z_loss": 0.1}):
        objective = Objective(**settings)
        x, w, y = problem(kind)
        wide = [each.detach().double().requires_grad_() for each in (x, w)]
        due_loss = objective.in_torch(wide[0] @ wide[1].T, y)
        due = gradients(due_loss, *wide)
        value = _torch.fused_loss(x, w, y, 16, IGNORED, objective)
        actual = gradients(value, x, w)
        half = [each.detach().to(torch.bfloat16 if kind == "mixed" else each.dtype).requires_grad_() for each in (x, w)]
        plain = gradients(objective.in_torch(half[0] @ half[1].T, y), *half)
        rows[f"{kind} {'all' if settings else 'plain'}"] = {
            "loss": abs(float(value.double() - due_loss)) / float(due_loss), "error": error(actual, due),
            "plain": error(plain, due), "finite": all(bool(g.isfinite().all()) for g in actual),
        }
x, w, y = problem("float32")
none = _torch.fused_loss(x, w, torch.full_like(y, IGNORED), 16, IGNORED, Objective())
rows["nothing counts"] = {"nan": bool(none.isnan()), "zero": float(sum(g.abs().sum() for g in gradients(none, x, w)))}
x, w, y = problem("float32")
pairs = torch.stack((torch.full_like(y, 7), y), 1)
values = [_torch.fused_loss(x, w, each, 16, IGNORED, Objective()) for each in (y, pairs[:, 1])]
close, strided = ([value.detach(), *gradients(value, x, w)] for value in values)
rows["strided"] = {"stride": pairs[:, 1].stride(0), "same": all(map(torch.equal, close, strided))}
x, w = torch.full((1200, 8), 60.0, dtype=torch.float16), torch.zeros(16, 8, dtype=torch.float16)
x, w, y = x.requires_grad_(), w.requires_grad_(), torch.zeros(1200, dtype=torch.int64)
due = gradients(F.cross_entropy(x @ w.T, y), x, w)[1]
actual = gradients(_torch.fused_loss(x, w, y, 1024, IGNORED, Objective()), x, w)[1]
rows["large"] = {"due": float(due.abs().max()), "error": float((actual - due).norm() / due.norm())}
print(json.dumps(rows))
"""

COMPILED = """
import glob, json, os, re, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from strategies.loss.fused_loss._kernel import BLOCK, WARPS, differentiate_rows

signature = dict(stride="i64", y_ptr="*i64", seen_ptr="*fp32", V="i32", ignored="i64", cap="fp32", smoothing="fp32",
                 z_loss="fp32", half="fp32", BLOCK="constexpr", CAPPED="constexpr", APART="constexpr")
kernels = []
for capability in (80, 89, 90, 100):
    for dtype, capped in (("*bf16", False), ("*bf16", True), ("*fp32", False)):
        apart = dtype == "*fp32"
        constants = dict(BLOCK=BLOCK, CAPPED=capped, APART=apart)
        source = ASTSource(fn=differentiate_rows, signature=dict(z_ptr=dtype, **signature), constexprs=constants)
        kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": WARPS})
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(kernel.asm["ptx"])
            file.flush()
            arch = re.search(r"\\.target (sm_\\w+)", kernel.asm["ptx"])[1]
            command = [get_ptxas(capability).path, "-v", f"-arch={arch}", file.name, "-o", os.devnull]
            report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        kernels.append({
            "capability": capability, "dtype": dtype,
            "spills": sum(int(size) for size in re.findall(r"(\\d+) bytes spill", report)),
            "stack": int(re.search(r"(\\d+) bytes stack frame", report)[1]),
            "registers": int(re.search(r"Used (\\d+) registers", report)[1]),
        })
print(json.dumps(kernels))
"""


def answer_of(program, **variables):
    """Run a program in a process of its own: Triton decides when it is imported whether it interprets."""
    folders = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@needs_triton
def test_the_interpreted_kernel_is_as_exact_as_plain_code():
    rows = answer_of(INTERPRETED, TRITON_INTERPRET="1")
    nothing, strided, large = (rows.pop(name) for name in ("nothing counts", "strided", "large"))
    assert nothing == {"nan": True, "zero": 0.0}
    assert strided == {"stride": 2, "same": True}
    assert large["due"] > 50 and large["error"] < 1e-3, "the sum of 1,200 rows is beyond float16, their mean is not"
    assert len(rows) == 8
    for name, row in rows.items():
        assert row["finite"], name
        assert row["loss"] < (1e-6 if name.startswith("float32") else 1e-2), (name, row)
        assert row["error"] < (1e-6 if name.startswith("float32") else 2 * row["plain"]), (name, row)


@needs_triton
@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_the_compiled_kernel_spills_nothing(capability, compiled):
    kernels = [each for each in compiled if each["capability"] == capability]
    assert len(kernels) == 3
    for kernel in kernels:
        assert kernel["spills"] == kernel["stack"] == 0, kernel
        assert kernel["registers"] <= 128, kernel


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return answer_of(COMPILED, TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton")), TRITON_INTERPRET="0")


@needs_triton
def test_the_kernel_is_not_tuned_while_it_is_measured():
    program = (
        "import json; from strategies.loss.fused_loss import _kernel\n"
        "print(json.dumps(type(_kernel.differentiate_rows).__name__))"
    )
    assert answer_of(program, TRITON_INTERPRET="0") == "JITFunction"


# Without Triton: shapes, work and the choice


def on_meta(dtype, n=5000, D=64, V=9000, of_w=None):
    x = torch.empty(n, D, dtype=dtype, device="meta", requires_grad=True)
    w = torch.empty(V, D, dtype=of_w or dtype, device="meta", requires_grad=True)
    return x, w, torch.empty(n, dtype=torch.int64, device="meta")


@pytest.mark.parametrize(
    ("of_x", "of_w"), [(torch.bfloat16,) * 2, (torch.float32,) * 2, (torch.bfloat16, torch.float32)]
)
def test_the_step_is_traced_and_counted_where_there_is_no_gpu(of_x, of_w):
    with torch.no_grad(), FakeTensorMode(), Work() as work:
        x, w, y = on_meta(of_x, of_w=of_w)
        loss, _, dx, dw = _rows.loss_and_gradients(x, w, y, 0, IGNORED, Objective(), (True, True), of_x)
    assert loss.shape == () and loss.dtype == torch.float32
    assert (dx.shape, dx.dtype, dw.shape, dw.dtype) == (x.shape, of_x, w.shape, of_w)
    assert sum(each.flops for each in work.taken()) == 3 * 2 * 5000 * 64 * 9000


def test_the_kernel_is_for_gpus_and_for_types_that_it_computes_in(monkeypatch):
    cpu, meta = torch.empty(2, 2), torch.empty(2, 2, device="meta")
    assert not _rows.takes(cpu, torch.float32)
    assert _rows.takes(meta, torch.bfloat16) and not _rows.takes(meta, torch.float64)


def test_a_weight_in_float16_is_summed_in_float32():
    tiles = _rows.weight_sums(torch.empty(9000, 8, dtype=torch.float16), torch.float16, 1)
    assert {tile.dtype for tile in tiles} == {torch.float32} and sum(map(len, tiles)) == 9000


def test_a_weight_in_bfloat16_is_summed_in_its_type_only_where_few_chunks_round():
    w = torch.empty(9000, 8, dtype=torch.bfloat16)
    (few,) = _rows.weight_sums(w, torch.bfloat16, _rows.ROUNDINGS)
    many = _rows.weight_sums(w, torch.bfloat16, _rows.ROUNDINGS + 1)
    assert few.dtype == torch.bfloat16 and {tile.dtype for tile in many} == {torch.float32}
    assert sum(map(len, many)) == len(w) and len(many) == 3
    (own,) = _rows.weight_sums(w.float(), torch.bfloat16, 100)
    assert own.dtype == torch.float32 and own.shape == w.shape


def test_the_sum_of_products_rounds_nothing_to_16_bits():
    torch.manual_seed(0)
    z, x = torch.randn(64, 30).bfloat16(), torch.randn(64, 20).bfloat16()
    sums = torch.ones(30, 20)
    _rows.add_product_(sums, z, x)
    torch.testing.assert_close(sums.double(), 1 + z.double().T @ x.double(), rtol=1e-6, atol=1e-5)
