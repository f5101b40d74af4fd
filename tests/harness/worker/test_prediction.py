"""What is predicted without running is what a memory worker then measures."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from harness import Place
from harness.backends.torch_flops import Work
from harness.backends.torch_operators import Operators
from harness.backends.torch_storage import LiveStorage
from harness.contract import plugins
from harness.contract.data import Extent
from harness.machine import environment
from harness.records import Applied, Case, Task, store
from harness.run import runner, session
from harness.run.bench import Options, Progress
from harness.suite import reader
from harness.worker import prediction

SHAPE = {"layers": 4, "width": 256, "heads": 4, "vocabulary": 8192, "tokens": 1024}
LONG = {"layers": 36, "width": 2560, "heads": 32, "kv_heads": 8, "head_width": 128, "hidden": 9728, "tied": True}
LONG |= {"vocabulary": 151_936, "query_key_norm": True, "tokens": 131_072}
LOADED = plugins.load()
PLAIN, CHECKPOINT, EXPANDABLE = (), ("checkpoint",), ("expandable_segments",)
CHUNKED, FUSED, COMPOSED = ("chunked_loss",), ("fused_loss",), ("checkpoint", "fused_loss")
KNOBS = {"chunked_loss": {"chunk": 256}, "fused_loss": {"chunk": 256}}
MIB = 1 << 20
SHORT_ROWS = {"layers": 4, "width": 256, "heads": 1, "vocabulary": 8192, "batch": 16, "tokens": 64}
"""A scan whose attention is small: XLA's products of [B, H, T, T] take scratch that no analysis holds."""
DENSE = {"layers": 2, "width": 128, "heads": 4, "vocabulary": 512, "tokens": 1024}
"""A step of which that scratch is a third."""
LONG_VOCABULARY = {"layers": 1, "width": 256, "heads": 4, "vocabulary": 32000, "batch": 1, "tokens": 128}
"""A step whose products with the head pack columns of 15.6 MiB."""

ASKED = {
    "torch/cpu": [PLAIN, CHECKPOINT, CHUNKED, FUSED, COMPOSED],
    "torch/cuda": [PLAIN, EXPANDABLE, COMPOSED],
    "jax/cpu": [PLAIN, CHECKPOINT],
}


def task(kind, place, *rows, shape=None, **settings):
    cases = tuple(
        Case(
            workload="decoder",
            shape=shape or SHAPE,
            place=place,
            corpus="drawn",
            tokenizer="none",
            strategies=tuple(Applied(name=name, knobs=KNOBS.get(name, {})) for name in names),
        )
        for names in rows
    )
    return Task(kind=kind, cases=cases, run_id=f"prediction-{kind}", parent=0, folder="", **{"steps": 3} | settings)


@cache
def predictions(place):
    """One worker predicts all cases of a place."""
    return dict(zip(ASKED[place], runner.run(task("predict", place, *ASKED[place]), 1, 120.0), strict=True))


def predicted(place, names):
    record = predictions(place)[names]
    assert record.status == "ok", record.evidence
    assert record.prediction.predicted_peak_bytes, record.missing
    return record


@cache
def measured(place, names, again=False):
    (record,) = runner.run(task("memory", place, names), 1, 120.0)
    assert record.status == "ok", record.evidence
    return record


def residual(place, names):
    peak = predicted(place, names).prediction.predicted_peak_bytes
    return (measured(place, names).memory.peak_host_bytes - peak) / peak


# torch


def test_variables_of_strategies_reach_the_allocator_that_is_simulated():
    plain, expandable = (predicted("torch/cuda", names).prediction for names in (PLAIN, EXPANDABLE))
    gaps = [each.predicted_reserved_bytes - each.predicted_peak_bytes for each in (plain, expandable)]
    assert gaps[1] < 0.9 * gaps[0]
    assert [each.beside_bytes(within_budget=False) for each in (plain, expandable)] == gaps
    assert [each.beside_bytes(within_budget=True) for each in (plain, expandable)] == [gap - 64 * MIB for gap in gaps]
    assert expandable.predicted_peak_bytes == pytest.approx(plain.predicted_peak_bytes, rel=0.02)


@pytest.mark.parametrize("names", ASKED["torch/cpu"], ids=lambda names: "+".join(names) or "plain")
def test_torch_measures_what_was_predicted(names):
    assert abs(residual("torch/cpu", names)) <= 0.05


WIDE = {"network": "lstm", "frames": 1000, "features": 7, "classes": 3, "window": 2, "batch": 8, "width": 1024}
"""An LSTM whose weights, 32 MiB, are a tenth of its peak: the library has them in an order of its own as well."""
BESIDE = {"network": "attention", "frames": 40_000, "window": 16, "batch": 4, "layers": 2, "width": 512}
"""A model beside whose state, 42 MiB of it, `take_from_view` makes a copy of all windows."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("shape", "names", "phase"),
    [(WIDE, (), "backward"), (BESIDE, ("take_from_view",), "batches")],
    ids=["lstm", "data"],
)
def test_a_temporal_run_is_measured_as_predicted(shape, names, phase, tmp_path):
    suite = {"title": "one", "workload": "temporal", "places": ["torch/cpu"], "shape": shape, "rounds": 0}
    (tmp_path / "one.yaml").write_text(json.dumps(suite | {"strategies": [names[0] if names else "nothing"]}))
    plan = reader.read(tmp_path / "one.yaml", LOADED)
    options = Options(tmp_path / "results", cache=tmp_path / "cache")
    records = store.read(session.run(plan, LOADED, options, Progress()))[0]
    of = {r.slot.kind: r for r in records if r.slot and r.case.label == (names[0] if names else "baseline")}
    peak, forecast = of["memory"].memory.peak_host_bytes, of["predict"].prediction
    assert forecast.predicted_phase.endswith(phase)
    assert forecast.predicted_peak_bytes == pytest.approx(peak, rel=0.02) and peak <= 1.01 * forecast.at_most_bytes


def test_a_second_run_measures_the_same():
    runs = measured("torch/cpu", PLAIN), measured("torch/cpu", PLAIN, again=True)
    first, second = (record.memory.peak_host_bytes for record in runs)
    assert abs(first - second) <= 0.005 * first


def test_the_phases_of_a_torch_run_are_predicted():
    record = predicted("torch/cpu", PLAIN)
    peaks = {phase.name: phase.peak_bytes for phase in record.prediction.predicted_phases}
    steps = {f"{step}/{name}" for step in ("first_step", "steady_step") for name in STEP}
    assert {"init", *steps} <= peaks.keys()
    assert record.prediction.predicted_peak_bytes == max(peaks.values()) == peaks[record.prediction.predicted_phase]
    assert record.prediction.predicted_peak_bytes > record.prediction.floor_bytes > 0
    # The moments come with the first update, so they are not in the first step's backward pass.
    moments = 2 * peaks["init"]
    assert peaks["steady_step/backward"] - peaks["first_step/backward"] == pytest.approx(moments, rel=0.02)


STEP = ("forward", "loss", "backward", "update")


@pytest.mark.parametrize("name", ["init", *(f"steady_step/{name}" for name in STEP)])
def test_each_phase_is_measured_as_predicted(name):
    of = {phase.name: phase.peak_bytes for phase in measured("torch/cpu", PLAIN).memory.phases}
    due = {phase.name: phase.peak_bytes for phase in predicted("torch/cpu", PLAIN).prediction.predicted_phases}
    assert of[name] == pytest.approx(due[name], rel=0.05, abs=2 * MIB)  # a process's base alone moves by 1 MiB


@pytest.mark.parametrize(
    ("config", "names", "due"),
    [
        ("mixtral-8x7b", (), True),
        ("mixtral-8x7b", ("bfloat16",), False),
        ("mixtral-8x7b", ("checkpoint", "bfloat16"), False),
        ("smollm2-135m", ("bfloat16",), True),
    ],
)
def test_a_mixture_of_experts_in_16_bits_has_no_bound(config, names, due):
    shape = LOADED.workloads["causal_lm"].shape(config=config, tokens=64).model_dump()
    applied = tuple(Applied(name=name) for name in names)
    case = Case(
        workload="causal_lm", shape=shape, place="torch/cpu", corpus="drawn", tokenizer="none", strategies=applied
    )
    assert prediction.is_bounded(LOADED, case) is due


# JAX


@pytest.mark.long
@pytest.mark.alone  # beside others, XLA's threads pack less at once
@pytest.mark.parametrize(
    ("names", "shape"),
    [
        pytest.param(PLAIN, SHORT_ROWS, marks=pytest.mark.slow, id="plain"),
        pytest.param(CHECKPOINT, SHORT_ROWS, id="checkpoint"),
        pytest.param(PLAIN, DENSE | {"batch": 1}, marks=pytest.mark.slow, id="one row of heads"),
        pytest.param(PLAIN, DENSE | {"batch": 2}, id="as many rows as threads"),
        pytest.param(CHECKPOINT, DENSE | {"batch": 4}, marks=pytest.mark.slow, id="more rows than threads"),
        pytest.param(PLAIN, LONG_VOCABULARY, id="long vocabulary"),
    ],
)
def test_jax_measures_arguments_and_temporaries_and_outputs(names, shape):
    threads = len(os.sched_getaffinity(0))
    (said,) = runner.run(task("predict", "jax/cpu", names, shape=shape), threads, 120.0)
    (found,) = runner.run(task("memory", "jax/cpu", names, shape=shape), threads, 120.0)
    due = said.prediction.predicted_peak_bytes
    assert abs(found.memory.peak_host_bytes - due) <= max(4 * MIB, 0.02 * due)


@pytest.mark.long
def test_programs_that_draw_the_state_are_in_no_peak_of_jax():
    """JAX compiles one for each shape: drawn for the first time after the base they took 38 MiB."""
    names = ("bfloat16", "qlora", "checkpoint", "fused_loss")
    shape = {"layers": 4, "width": 128, "heads": 8, "vocabulary": 4096, "batch": 1, "tokens": 64}
    kinds = ("predict", "memory")
    forecast, record = (runner.run(task(kind, "jax/cpu", names, shape=shape), 2, 120.0)[0] for kind in kinds)
    assert record.memory.peak_host_bytes - forecast.prediction.predicted_peak_bytes < 10 * MIB


def test_the_phases_of_a_jax_run_are_predicted():
    record = predicted("jax/cpu", PLAIN)
    peaks = {phase.name: phase.peak_bytes for phase in record.prediction.predicted_phases}
    assert peaks.keys() == {"source", "windows", "batches", "init", "steady_step"}
    assert 0 < peaks["source"] <= peaks["windows"] < peaks["init"] < peaks["batches"], "batches come beside the state"
    assert record.prediction.predicted_phase == "steady_step"
    assert peaks["init"] == pytest.approx(predicted("torch/cpu", PLAIN).prediction.floor_bytes * 3 / 4, rel=0.02)


@pytest.mark.long
def test_parameters_are_drawn_in_three_copies_each_where_nothing_later_takes_more():
    shape = {"layers": 1, "width": 256, "heads": 4, "vocabulary": 50021, "batch": 1, "tokens": 32}
    kinds = ("predict", "memory")
    forecast, measured = (runner.run(task(kind, "jax/cpu", ("lora",), shape=shape), 2, 120.0)[0] for kind in kinds)
    due, embedding = forecast.prediction.predicted_peak_bytes, 50021 * 256 * 4
    assert forecast.prediction.predicted_phase == measured.memory.peak_phase == "init"
    assert 4 * embedding < due < 4.2 * embedding, "the embedding, and the head three times"
    assert measured.memory.peak_host_bytes == pytest.approx(due, rel=0.03)


# Both


@pytest.mark.parametrize("place", ["torch/cpu", pytest.param("jax/cpu", marks=pytest.mark.slow)])
def test_a_checkpoint_saves_in_truth_what_it_was_said_to(place):
    said = (
        predicted(place, PLAIN).prediction.predicted_peak_bytes
        - predicted(place, CHECKPOINT).prediction.predicted_peak_bytes
    )
    saved = measured(place, PLAIN).memory.peak_host_bytes - measured(place, CHECKPOINT).memory.peak_host_bytes
    assert said > 50 * MIB
    assert saved >= 0.5 * said


def test_torch_ranks_as_predicted():
    names = ASKED["torch/cpu"]
    said = sorted(names, key=lambda each: predicted("torch/cpu", each).prediction.predicted_peak_bytes)
    found = sorted(names, key=lambda each: measured("torch/cpu", each).memory.peak_host_bytes)
    assert found[0] == said[0] == COMPOSED and found[-1] == said[-1] == PLAIN


# What no machine here could run

PROGRAM = """
import json, sys
from harness.contract import plugins
from harness.machine import memory
from harness.records import Task
from harness.worker.tasks import run
records = [run(Task.model_validate_json(line), plugins.load()) for line in sys.stdin]
found = [(record.prediction, record.missing) for record in records]
print(json.dumps([[each.predicted_peak_bytes, each.predicted_phase, missing] for each, missing in found]))
print(memory.read().peak)
"""


@pytest.mark.slow
def test_a_model_of_four_billion_parameters_is_predicted_without_its_memory():
    tasks = [task("predict", "torch/cpu", names, shape=LONG) for names in (PLAIN, COMPOSED)]
    env = environment.variables("predict", Place("torch", "cpu"), "prediction", 1, None)
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input="\n".join(one.model_dump_json() for one in tasks),
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    told, peak = done.stdout.splitlines()
    assert time.monotonic() - started < 60
    assert int(peak) < 2e9
    (plain, phase, missing), (composed, _, _) = json.loads(told)
    assert not missing
    assert phase == "steady_step/backward"
    state = 4_022_468_096 * 4 * 3
    logits = 131_072 * 151_936 * 4
    assert plain > state + 2 * logits
    assert state < composed < plain / 4


@pytest.mark.parametrize("names", [PLAIN, COMPOSED], ids=["plain", "composed"])
def test_a_gpu_is_predicted_for_without_one(names):
    on_gpu, on_cpu = (predicted(place, names).prediction.predicted_peak_bytes for place in ("torch/cuda", "torch/cpu"))
    assert on_gpu == pytest.approx(on_cpu, rel=0.05)


BRANCHING = '''
"""Branch on a value."""
from dataclasses import replace

from harness import Strategy, hookimpl


def on_torch(parts):
    inner = parts.loss

    def loss(parts, x, w, y):
        value = inner(parts, x, w, y)
        return value.repeat(4)[value.repeat(4) > 0].mean()

    return replace(parts, loss=loss)


def on_jax(parts):
    inner = parts.loss

    def loss(parts, x, w, y):
        value = inner(parts, x, w, y)
        return value if float(value) > 0 else value * 2

    return replace(parts, loss=loss)


@hookimpl
def harness_strategies():
    return [Strategy("branching", ("loss",), {"torch": on_torch, "jax": on_jax}, __doc__)]
'''


def test_a_number_that_a_step_asks_for_is_supposed_and_said():
    rows = (("foreach_adamw",), ("fused_adamw",), ("float16_scaled",), PLAIN)
    foreach, fused, scaled, plain = runner.run(task("predict", "torch/cpu", *rows), 1, 120.0)
    for record in (foreach, scaled):
        assert record.prediction.predicted_peak_bytes and "taken to be 1" in record.notes["prediction"], record.missing
    assert not plain.notes and not fused.notes
    update = {id(r): r.prediction.predicted_phases[-1].peak_bytes for r in (foreach, fused)}
    parameters = plain.prediction.floor_bytes / 4  # of parameters, gradients and two moments
    assert update[id(foreach)] - update[id(fused)] == pytest.approx(parameters, rel=0.1), "a copy of all of them"
    assert scaled.prediction.predicted_peak_bytes < plain.prediction.predicted_peak_bytes


def test_a_number_that_is_known_is_no_guess():
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, LiveStorage() as live:
        live.run_operator = Operators(fake, Work())
        number, truth, computed = torch.tensor(128), torch.tensor(False), torch.ones(3).sum()
        assert (number.item(), bool(truth), live.supposed) == (128, False, 0)
        number.add_(1)
        assert (number.item(), computed.item(), live.supposed) == (1, 1.0, 2), "nobody knows what was computed"
    with LiveStorage() as live:
        assert (torch.ones(1, device="meta").item(), torch.tensor(7).item(), live.supposed) == (1.0, 7, 1)


FAILING = """
from harness.workloads.user_model import of_torch
from torch import nn

def make(shape):
    raise ArithmeticError("no such width")

def harness_workloads(): return [of_torch("failing", make)]
harness_workloads = __import__("harness").hookimpl(harness_workloads)
"""


def test_a_model_that_cannot_be_made_says_why_where_it_is_predicted(tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    case = Case(workload="failing", shape={}, place="torch/cpu", corpus="", tokenizer="")
    asked = Task(kind="predict", cases=(case,), run_id="", parent=0, folder="", plugins=(str(tmp_path / "failing.py"),))
    (record,) = runner.run(asked, 1, 120.0)
    assert record.status == "ok" and "ArithmeticError: no such width" in record.missing["predicted_peak_bytes"]


@pytest.mark.parametrize("place", ["torch/cpu", "jax/cpu"])
def test_what_depends_on_data_is_not_predicted_but_explained(place, tmp_path):
    path = tmp_path / "branching.py"
    path.write_text(BRANCHING)
    (record,) = runner.run(task("predict", place, ("branching",), plugins=(str(path),)), 1, 120.0)
    assert record.status == "ok", record.evidence
    assert record.prediction.predicted_peak_bytes is None and record.prediction.at_most_bytes is None
    phases = {phase.name for phase in record.prediction.predicted_phases}
    assert {"source", "windows", "batches"} <= phases, "what could be predicted is there"
    assert "steady_step" not in phases, "and nothing that looks whole"
    assert len(record.missing["predicted_peak_bytes"]) > 20
    assert record.prediction.floor_bytes > 0


# What memory is for


def test_the_stages_of_a_first_step_are_predicted_and_measured():
    due, of = (predicted("torch/cpu", PLAIN).prediction, measured("torch/cpu", PLAIN).memory)
    names = ["parameters", "embedding", "first layer", "forward", "loss"]
    assert list(due.predicted_stages) == list(of.stages) == names
    stages = list(due.predicted_stages.values())
    assert stages == sorted(stages) and stages[0] == pytest.approx(4 * due.parameters, rel=0.002)  # and the tokens
    hidden = SHAPE["tokens"] * SHAPE["width"] * 4
    assert due.predicted_stages["embedding"] - stages[0] == pytest.approx(hidden, rel=0.05)
    for name in names:
        assert of.stages[name] == pytest.approx(due.predicted_stages[name], rel=0.05, abs=2 * MIB)


def test_the_kinds_of_a_step_are_predicted_and_measured():
    due, of = (predicted("torch/cpu", PLAIN).prediction, measured("torch/cpu", PLAIN).memory)
    weights = 4 * due.parameters
    exact = {"parameters": weights, "gradients": weights, "moments": 2 * weights, "batch": 2 * 8 * SHAPE["tokens"]}
    for kinds in (due.predicted_kinds, of.kinds):
        assert {kind: kinds[kind] for kind in exact} == exact
    logits = SHAPE["tokens"] * SHAPE["vocabulary"] * 4
    assert due.predicted_kinds["logits"] == pytest.approx(2 * logits, rel=0.02)
    assert of.kinds["logits"] == pytest.approx(due.predicted_kinds["logits"], rel=0.1)
    assert of.kinds["activations"] == pytest.approx(due.predicted_kinds["activations"], rel=0.15)
    assert due.predicted_kinds["workspace"] > 0


@pytest.mark.long
def test_jax_tells_the_kinds_that_its_state_shows():
    (record,) = runner.run(task("memory", "jax/cpu", CHECKPOINT, shape=SHORT_ROWS), 1, 120.0)
    kinds = record.memory.kinds
    assert kinds["moments"] == 2 * kinds["parameters"] > 0
    assert kinds.keys() == {"parameters", "moments", "batch"} and not record.memory.stages


CPU_TABLE = """
from dataclasses import replace
from harness import Strategy, hookimpl

def on_torch(parts):
    import torch
    inner = parts.rotary
    def rotary(parts, positions, like):
        return tuple(each + torch.zeros(each.shape) for each in inner(parts, positions, like))
    return replace(parts, rotary=rotary)

@hookimpl
def harness_strategies():
    return [Strategy("table_on_the_cpu", rewrites=("rotary",), on={"torch": on_torch}, about="Add a table of the CPU.")]
"""


def test_a_table_that_stays_on_the_cpu_ends_what_is_predicted_for_a_gpu(tmp_path):
    (tmp_path / "cpu_table.py").write_text(CPU_TABLE)
    rows = task("predict", "torch/cuda", PLAIN, ("table_on_the_cpu",), plugins=(str(tmp_path / "cpu_table.py"),))
    plain, wrong = runner.run(rows, 1, 120.0)
    assert plain.prediction.predicted_peak_bytes
    assert wrong.prediction.predicted_peak_bytes is None
    assert "device" in wrong.missing["predicted_peak_bytes"]


def test_windows_in_order_touch_fewer_pages_of_a_mapped_file_than_shuffled_ones():
    loaded, extent = plugins.load(), Extent(4_000_000, 2, 0, window=128, stride=128, batch=64)

    def held(*names, extent=extent, **changes):
        (case,) = task("predict", "torch/cpu", names, shape=SHAPE | changes).cases
        return prediction.host_peaks(loaded, case, extent)

    in_order = held("mapped")
    assert in_order.resident == 3 * 64 * 128 * 2 + 2 * 65536
    assert in_order.reclaimable == 2 * ((2 << 20) - 65536)
    pieces = np.random.default_rng(0).integers(0, extent.base, (100, 3 * 64))
    covered = np.mean([np.unique(row // 65792).size * 65792 for row in pieces])
    for shuffled in (held("mapped", shuffle=True), held("mapped", "bijective_shuffle")):
        assert shuffled.resident == pytest.approx(covered, rel=0.02)
        assert shuffled.resident + shuffled.reclaimable == extent.base, "the kernel may map whole folios"
    more = held("mapped", shuffle=True, extent=replace(extent, steps=24))
    assert shuffled.resident < 0.9 * extent.base < more.resident


def test_the_batches_that_a_case_will_read_decide_what_is_mapped_of_its_file():
    frames = {"frames": 100_000, "features": 64, "window": 32, "batch": 16, "width": 16, "classes": 4, "shuffle": True}
    (decoder,) = task("predict", "torch/cpu", ("mapped",)).cases
    case = decoder.model_copy(update={"workload": "temporal", "shape": frames})

    def peaks(batches):
        asked = task("predict", "torch/cpu", (), steps=batches).model_copy(update={"cases": (case,)})
        (record,) = runner.run(asked, 1, 120.0)
        return {phase.name: phase.peak_bytes for phase in record.prediction.predicted_phases}

    few, many = peaks(2), peaks(24)
    assert few["batches"] < many["batches"] and few["init"] < many["init"] and few["source"] == many["source"]


def test_windows_of_narrow_rows_are_narrow():
    loaded, extent = plugins.load(), Extent(100_000, 4 * 64, 4, window=32, stride=1, batch=16)

    def windows(*names):
        case = task("predict", "torch/cpu", names).case
        return prediction.host_peaks(loaded, case, extent).peaks["windows"]

    narrow, wide = windows("float16_rows", "numpy_copy"), windows("numpy_copy")
    assert narrow == windows("numpy_copy", "float16_rows"), "whichever comes first"
    assert wide - narrow == 100_000 * 2 * 64 + extent.count * 32 * 2 * 64


@pytest.mark.parametrize(
    ("fewer", "count"),
    [(("max_examples", {"count": 1000}), 1000), (("blocks", {}), 3125), (("max_examples", {}), 10_000)],
)
def test_windows_are_counted_as_many_as_another_strategy_leaves(fewer, count):
    loaded, extent = plugins.load(), Extent(100_000, 4, 0, window=32, stride=1, batch=16)
    case = task("predict", "torch/cpu", ("numpy_copy",)).case
    name, knobs = fewer

    def making(*strategies):
        row = case.model_copy(update={"strategies": tuple(strategies)})
        host = prediction.host_peaks(loaded, row, extent)
        return host.peaks["windows"] - host.peaks["source"]

    copy, other = case.strategies[0], Applied(name=name, knobs=knobs)
    alone = making(other)
    assert making(copy, other) - alone == making(other, copy) - alone == count * 32 * 2 * 4
    assert making(copy) == extent.count * 32 * 2 * 4
