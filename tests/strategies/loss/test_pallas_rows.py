"""The row kernel of the fused loss in JAX: interpreted against float64, and compiled for GPUs that are not there."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from harness import IGNORED, Objective, Parts, Place
from harness.backends import jax_cuda, jax_flops
from harness.contract import plugins
from harness.workloads.decoder import Shape
from strategies.loss.fused_loss import _jax, _pallas

LACK = jax_cuda.lacking(jax.__version__)
ALL = {"soft_cap": 5.0, "label_smoothing": 0.1, "z_loss": 0.1}
TYPES = {"float32": ("float32", "float32"), "bfloat16": ("bfloat16", "bfloat16"), "mixed": ("bfloat16", "float32")}
interpreted = partial(_pallas.differentiated, interpret=True)


def problem(of_x, of_w):
    """Hidden states, a weight and targets: some rows are confident, some carry no loss, and no size is even."""
    draw = np.random.Generator(np.random.Philox(key=5))
    x, w = draw.standard_normal((37, 24)), draw.standard_normal((1037, 24)) / 2
    w[5] *= 40
    y = draw.integers(0, 1037, 37)
    y[:9], y[3::7] = 5, IGNORED
    return jnp.asarray(x, of_x), jnp.asarray(w, of_w), jnp.asarray(y, jnp.int32)


def exact(x, w, y, objective):
    """Return the loss and both gradients in float64."""
    x, w = (torch.from_numpy(np.asarray(each, np.float64)).requires_grad_() for each in (x, w))
    loss = objective.in_torch(x @ w.T, torch.from_numpy(np.asarray(y, np.int64)))
    return float(loss.detach()), [each.numpy() for each in torch.autograd.grad(loss, (x, w))]


def error(actual, due):
    return max(
        float(np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b))
        for a, b in zip(actual, due, strict=True)
    )


@pytest.mark.parametrize("settings", [{}, ALL], ids=["plain", "all"])
@pytest.mark.parametrize("types", TYPES)
def test_the_interpreted_kernel_is_as_exact_as_other_code(types, settings):
    """In float32 as exact as what XLA makes of the same loss, here with the options of tests; else as plain code."""
    x, w, y = problem(*TYPES[types])
    objective = Objective(**settings)
    due_loss, due = exact(x, w, y, objective)

    def plain(x, w):
        half = jnp.bfloat16 if types == "mixed" else w.dtype
        rows_N = objective.in_jax(x @ w.astype(half).T, y)
        return rows_N.sum() / (y != IGNORED).sum()

    fused = partial(_jax.fused_loss, y_BT=y, chunk=16, objective=objective)
    loss, actual = jax.value_and_grad(partial(fused, kernel=interpreted), (0, 1))(x, w)
    assert [each.dtype for each in actual] == [x.dtype, w.dtype]
    assert float(loss) == pytest.approx(due_loss, rel=1e-6 if types == "float32" else 1e-2)
    if types == "float32":
        assert error(actual, due) < 1.1 * error(jax.grad(fused, (0, 1))(x, w), due)
    else:
        assert error(actual, due) < 2 * error(jax.grad(plain, (0, 1))(x, w), due)


def test_a_loss_without_targets_is_none_and_its_gradients_are_zero():
    x, w, y = problem("float32", "float32")
    fused = partial(_jax.fused_loss, y_BT=jnp.full_like(y, IGNORED), chunk=16, kernel=interpreted)
    loss, gradients = jax.value_and_grad(fused, (0, 1))(x, w)
    assert bool(jnp.isnan(loss)) and not any(bool(each.any()) for each in gradients)


@pytest.mark.parametrize("V", [5, _pallas.BLOCK, _pallas.BLOCK + 1, 9000])
def test_rows_of_any_length_are_whole(V):
    """XLA's own way and the kernel give the same, at the ends of blocks as well."""
    z = 4 * jax.random.normal(jax.random.key(0), (5, V))
    y = jnp.array([0, V - 1, V // 2, IGNORED, 1])
    losses, g, rest = interpreted(z, y, IGNORED, Objective(), True)
    counts = y != IGNORED
    due = _jax._differentiated(z, jnp.where(counts, y, 0), counts, Objective(), True)
    for actual, expected in zip((losses, g, rest), due, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def traced(device, dtype):
    """Trace the gradients of the loss that the strategy makes for a device."""
    parts = Parts(Shape(), Place("jax", device))
    parts = plugins.load().strategies["fused_loss"].on["jax"](parts)
    x, w, y = (jax.ShapeDtypeStruct(*each) for each in (((512, 64), dtype), ((9000, 64), dtype), ((512,), "int32")))
    return jax.make_jaxpr(jax.grad(lambda x, w, y: parts.loss(parts, x, w, y), (0, 1)))(x, w, y)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_gpu_alone_takes_the_kernel_and_its_work_is_that_of_its_products(dtype):
    assert "differentiate_rows" not in str(traced("cpu", dtype))
    program = traced("cuda", dtype)
    assert "differentiate_rows" in str(program)
    work = jax_flops.work(program)
    assert sum(each.flops for each in work) == 3 * 2 * 512 * 64 * 9000
    (scan,) = (each for each in program.jaxpr.eqns if each.primitive.name == "scan")
    (rows,) = (each for each in scan.params["jaxpr"].eqns if each.primitive.name == "pallas_call")
    assert rows.outvars[0].aval.dtype == dtype, "the logits stay as narrow as they are"


COMPILED = """
import json
import jax
from functools import partial
from harness import IGNORED, Objective
from harness.backends import cards, jax_cuda
from strategies.loss.fused_loss import _pallas

settings, sizes = {"soft_cap": 5.0, "label_smoothing": 0.1, "z_loss": 0.1}, []
for card in ("a100", "l4", "h100"):
    on = jax.sharding.SingleDeviceSharding(jax_cuda.device(cards.CARDS[card]))
    for dtype, each, apart in (("bfloat16", {}, False), ("bfloat16", settings, False), ("float32", {}, True)):
        rows = partial(_pallas.differentiated, ignore_index=IGNORED, objective=Objective(**each), apart=apart)
        z, y = (jax.ShapeDtypeStruct(*of, sharding=on) for of in (((2048, 128_256), dtype), ((2048,), "int32")))
        analysis = jax.jit(rows, donate_argnums=0).lower(z, y).compile().memory_analysis()
        beside = analysis.output_size_in_bytes + analysis.temp_size_in_bytes - analysis.alias_size_in_bytes
        sizes.append((z.size * z.dtype.itemsize, analysis.alias_size_in_bytes, beside))
print(json.dumps(sizes))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Compile for three cards in a process of its own; return the sizes, and the folder with the programs."""
    folder = tmp_path_factory.mktemp("programs")
    folders = os.pathsep.join(filter(None, (str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH"))))
    flags = f"--xla_gpu_autotune_level=0 --xla_dump_to={folder}"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": folders}
    env.pop("JAX_COMPILATION_CACHE_DIR", None)  # what is read from it is not compiled
    done = subprocess.run([sys.executable, "-c", COMPILED], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout), folder


@pytest.mark.skipif(LACK is not None, reason=LACK or "")
def test_gpus_write_the_gradient_over_the_logits(compiled):
    sizes, _ = compiled
    assert len(sizes) == 9
    assert all(alias == logits and beside < 1 << 16 for logits, alias, beside in sizes), sizes


@pytest.mark.skipif(LACK is not None, reason=LACK or "")
@pytest.mark.skipif(find_spec("triton") is None, reason="the assembler comes with the package triton, not installed")
def test_the_compiled_kernel_spills_nothing(compiled):
    from triton.backends.nvidia.compiler import get_ptxas

    kernels = []
    for path in compiled[1].glob("*.ptx"):
        if "entry differentiate_rows" in (text := path.read_text()):
            of = re.search(r"\.target (sm_\w+)", text)[1]
            command = [get_ptxas(100).path, "-v", f"-arch={of}", str(path), "-o", os.devnull]
            report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
            spills = sum(int(size) for size in re.findall(r"(\d+) bytes spill", report))
            kernels.append((of, spills, int(re.search(r"Used (\d+) registers", report)[1])))
    assert {of for of, *_ in kernels} == {"sm_80", "sm_89", "sm_90a"} and len(kernels) == 9
    assert all(spills == 0 and registers <= 128 for _, spills, registers in kernels), kernels
