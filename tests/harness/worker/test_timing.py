"""What a time worker may call a step: waited for, after the warm-up, and without the meters."""

import gc
import os
import time
from collections import Counter
from itertools import count, islice
from statistics import median
from types import SimpleNamespace

import pytest

from harness import backends
from harness.contract import plugins
from harness.contract.assembly import assemble
from harness.contract.instruments import counted, metered
from harness.contract.loop import training
from harness.contract.place import Place
from harness.machine.memory import PhaseMeter
from harness.records import Applied, Case, Task
from harness.run import runner
from harness.run.pacing import pace
from harness.worker import memory, timing

alone = pytest.mark.alone
"""For what measures time."""

SHAPE = {"layers": 1, "width": 32, "heads": 2, "vocabulary": 128, "batch": 1, "tokens": 33}
LONG = {"layers": 2, "width": 256, "heads": 4, "vocabulary": 8192, "batch": 1, "tokens": 512}
"""A step of some 100 ms, far above what handing it over costs."""
SLOW_SECONDS = 0.6

SLOW_AT_FIRST = f"""
import time
from dataclasses import replace
from harness import Strategy, hookimpl

def on_torch(parts):
    if parts.shape.tokens != 33:  # priming
        return parts
    inner, calls = parts.step, []

    def step(parts, state, x, y):
        calls.append(1)
        if len(calls) == 1:
            time.sleep({SLOW_SECONDS})
        return inner(parts, state, x, y)

    return replace(parts, step=step)

@hookimpl
def harness_strategies():
    return [Strategy("slow_at_first", rewrites=("step",), on={{"torch": on_torch}}, about="Compile, as it were.")]
"""

numbers = count()


def make(kind, place="torch/cpu", shape=SHAPE, strategies=(), **settings):
    place = {"place": place, "corpus": "drawn", "tokenizer": "none"}
    case = Case(workload="decoder", shape=shape, strategies=strategies, **place)
    run_id = f"speed-{os.getpid()}-{next(numbers)}"
    return Task(kind=kind, cases=(case,), run_id=run_id, parent=os.getpid(), folder="", **settings)


@pytest.fixture(scope="module")
def loaded():
    return plugins.load()


@pytest.fixture
def thawed():
    """Undo what a time worker does to the collector of its process."""
    yield
    gc.unfreeze()
    gc.enable()


@alone
@pytest.mark.parametrize("waits", [True, False])
def test_steps_that_were_not_waited_for_are_an_error_never_a_time(thawed, loaded, waits):
    backend = backends.load("jax")
    early = SimpleNamespace(**vars(backend))
    early.finish = backend.finish if waits else lambda outputs: time.perf_counter_ns()
    record = timing.measure(make("time", "jax/cpu", LONG, steps=4, warmup=1), loaded, early)
    assert len(record.times.step_seconds) == 4
    if waits:
        assert record.status == "ok", record.evidence
    else:
        assert record.status == "error"
        assert "not synchronised" in record.evidence["message"]


@pytest.fixture(scope="module")
def slow_at_first(tmp_path_factory):
    """The pilot of a step that is slow once, the pace it sets, and the time worker that keeps to it."""
    path = tmp_path_factory.mktemp("speed") / "slow_at_first.py"
    path.write_text(SLOW_AT_FIRST)
    common = {"strategies": (Applied(name="slow_at_first"),), "plugins": (str(path),)}
    (pilot,) = runner.run(make("pilot", **common), 1, 60)
    assert pilot.status == "ok", pilot.evidence
    pacing = pace(pilot.times.step_seconds)
    (timed,) = runner.run(make("time", steps=pacing.steps, warmup=pacing.warmup, **common), 1, 60)
    assert timed.status == "ok", timed.evidence
    return pilot, pacing, timed


def test_a_sandbox_that_resets_no_mark_leaves_the_times(monkeypatch, thawed, loaded):
    def absent():
        raise FileNotFoundError("/proc/self/clear_refs")

    monkeypatch.setattr(timing, "reset_peak", absent)
    record = timing.measure(make("time", steps=2, warmup=0), loaded, backends.load("torch"))
    assert record.status == "ok", record.evidence
    assert len(record.times.step_seconds) == 2 and record.times.native_peak_host_bytes is None


@alone
def test_what_comes_before_the_first_step_is_no_time_of_the_pilot(monkeypatch):
    clock = count(0.0, 4.0).__next__  # 4 seconds go by with every look
    monkeypatch.setattr(timing.time, "monotonic", clock)
    begun = []

    def slow_to_begin():
        for _ in range(5):
            clock()
        for step in count():
            begun.append(step)
            yield None, step

    eager = SimpleNamespace(finish=lambda outputs: "begin", agreed=lambda late: late)
    assert timing._pilot(slow_to_begin(), eager) == ["begin", 0, 1, 2, 3]
    assert begun == [0, 1, 2, 3]


@alone
def test_the_pilot_keeps_every_step_and_the_slow_first_one_lies_before_the_warm_up_ends(slow_at_first):
    pilot, pacing, _ = slow_at_first
    assert len(pilot.times.step_seconds) == timing.PILOT_STEPS
    assert pilot.times.step_seconds[0] >= SLOW_SECONDS > max(pilot.times.step_seconds[1:])
    assert pacing.warmup >= 1


@alone
def test_the_slow_first_step_is_in_no_sample(slow_at_first):
    _, pacing, timed = slow_at_first
    assert timed.times.first_step_seconds >= SLOW_SECONDS
    assert max(timed.times.step_seconds) < SLOW_SECONDS
    assert timed.times.warmup_steps == pacing.warmup


@alone
def test_every_timed_step_is_kept_raw(slow_at_first):
    _, pacing, timed = slow_at_first
    assert len(timed.times.step_seconds) == pacing.steps >= 10
    assert len(set(timed.times.step_seconds)) > 1
    assert min(timed.times.step_seconds) > 0
    assert sum(timed.times.step_seconds) + timed.times.first_step_seconds < timed.origin.worker_seconds


@alone
def test_a_time_worker_runs_unmetered_with_its_own_allocator(slow_at_first):
    _, _, timed = slow_at_first
    assert timed.times.regime == "native"
    assert timed.memory.phases == ()
    assert timed.memory.peak_host_bytes is None
    assert timed.times.native_peak_host_bytes > 0


@alone
@pytest.mark.long
def test_compiling_is_timed_apart_from_every_step():
    (record,) = runner.run(make("time", "jax/cpu", steps=5, warmup=1), 1, 60)
    assert record.status == "ok", record.evidence
    assert len(record.times.step_seconds) == 5
    (measured,) = runner.run(make("memory", "jax/cpu", steps=5), 1, 60)
    assert measured.memory.compile_seconds > max(record.times.first_step_seconds, *record.times.step_seconds)


# What the meters themselves cost


def observed(parts, strategy, folder):
    """The parts and the meter as a memory worker wires them, its phase file included."""
    tell = memory._phase_file(folder)
    meter = PhaseMeter(lambda meter: tell(meter.current, meter.peak_bytes, meter.base.rss))
    meter.start()
    return metered(counted(parts, strategy, Counter()), meter), meter


@alone
def test_a_phase_boundary_costs_less_than_a_millisecond(tmp_path):
    tell = memory._phase_file(tmp_path)
    meter = PhaseMeter(lambda meter: tell(meter.current, meter.peak_bytes, meter.base.rss))
    meter.start()
    seconds = []
    for index in range(300):
        started = time.perf_counter()
        meter.enter(f"steady_step/{index % 8}")
        seconds.append(time.perf_counter() - started)
    assert median(seconds) < 1e-3


@alone
@pytest.mark.slow
def test_all_meters_together_cost_at_most_one_percent_of_a_step_of_200_milliseconds(tmp_path, loaded):
    """Bare and observed steps of one process take turns; CPU time leaves out what the neighbours do."""
    backend = backends.load("torch")
    shape = {**LONG, "layers": 4, "tokens": 512}
    case = make("memory", shape=shape, strategies=(Applied(name="checkpoint"),)).case
    strategy = loaded.strategies["checkpoint"]
    plain = assemble(loaded, case)
    watched, meter = observed(plain, strategy, tmp_path)
    bare_loop = training(plain, backend.prepare(plain), finish=backend.finish)
    watched_loop = training(watched, backend.prepare(watched), meter.phase, backend.wait)
    spent = {"bare": [], "watched": []}
    for pair in range(24):
        turns = [("bare", bare_loop), ("watched", watched_loop)]
        for name, loop in turns if pair % 2 else reversed(turns):
            started = time.process_time()
            for loss, _ in islice(loop, 1):
                float(loss)
            spent[name].append(time.process_time() - started)
    bare, all_meters = (median(seconds[3:]) for seconds in spent.values())
    assert 0.1 < bare < 1.0
    assert len(meter.readings["steady_step/forward"]) >= 20
    assert all_meters / bare - 1 <= 0.01, f"{bare * 1e3:.1f} ms bare, {all_meters * 1e3:.1f} ms with all meters"


@pytest.mark.parametrize("place", ["torch/cpu", "jax/cpu"])
def test_plugins_load_a_second_time_after_a_case_was_built(loaded, place):
    case = make("time", place).case
    assemble(loaded, case)
    assert assemble(plugins.load(), case).place == Place.parse(place)
