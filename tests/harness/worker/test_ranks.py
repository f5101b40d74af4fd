"""A case on several ranks is one record: of all, or of the one whose failure ended it; and nobody stays behind."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness import Place
from harness.contract import plugins
from harness.machine import orphans
from harness.records import Applied, Case, Claim, Memory, Phase, Rank, Record, Slot, Task, Times, store
from harness.run import runner, session, template
from harness.run.schedule import Summary
from harness.verdicts import claims, judge
from harness.worker import process, ranks

pytest.importorskip("torch", reason="the ranks are torch's")

MIB = 1 << 20
PLUGIN = '''
"""Strategies of which one rank of two dies, in the second step."""

import os, signal, time
from dataclasses import replace

from harness import Strategy, hookimpl


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def crash():
    os.abort()


def memory():
    raise MemoryError("asked for too much")


def error():
    raise ValueError("wrong on purpose")


def leaves():
    os._exit(3)


def hang():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def strategy(fault):
    def on_torch(parts):
        import torch.distributed as dist

        inner = parts.reduce_gradients

        def reduce_gradients(parts, loss, grads):
            if parts.shape.tokens == 96 and dist.get_rank() == 1:
                fault()
            dist.all_reduce(loss)
            return inner(parts, loss / dist.get_world_size(), grads)

        return replace(parts, reduce_gradients=reduce_gradients)

    return Strategy(
        "rank_" + fault.__name__,
        rewrites=("reduce_gradients",),
        on={"torch": on_torch},
        about="Die on one rank.",
        ranks=True,
    )


@hookimpl
def harness_strategies():
    return [strategy(fault) for fault in (killed, crash, memory, error, leaves, hang)]
'''


def case(*names, count=2, budget=None):
    shape = {"layers": 2, "width": 64, "heads": 4, "vocabulary": 512, "batch": 4, "tokens": 96}
    decoder = plugins.load().workloads["decoder"]
    return Case(
        workload="decoder",
        shape=decoder.shape.model_validate(shape).model_dump(),
        place="torch/cpu",
        corpus="drawn",
        tokenizer="none",
        strategies=tuple(Applied(name=name) for name in names),
        budget_bytes=budget,
        ranks=count if names else 1,
    )


def run(kind, *names, extra=(), deadline=120.0, **settings):
    task = Task(
        kind=kind, cases=(case(*names),), run_id="test", parent=os.getpid(), folder="", plugins=tuple(extra), **settings
    )
    return runner.run(task, 2, deadline)[0]


def workers():
    """Every process that this one started for a case."""
    started = {pid for pid in orphans._processes() if orphans._mark_of(pid) == orphans.mark()}
    return [pid for pid in started - template.processes() if not orphans._over(pid)]


def test_ranks_leave_one_record_of_all_of_them():
    plain, divided = run("memory"), run("memory", "fsdp")
    assert (plain.status, divided.status) == ("ok", "ok")
    assert divided.memory.losses == pytest.approx(plain.memory.losses, rel=1e-5)
    assert len(divided.memory.ranks) == 2 and not plain.memory.ranks
    peaks = [rank.peak_bytes for rank in divided.memory.ranks]
    assert divided.memory.peak_host_bytes == max(peaks) and divided.memory.all_ranks_bytes == sum(peaks)
    assert divided.memory.peak_host_bytes < plain.memory.peak_host_bytes
    assert divided.memory.batches_digests == plain.memory.batches_digests
    assert "child_processes" not in divided.flags
    assert all(
        {"steady_step/backward", "init"} <= {phase.name for phase in rank.phases} for rank in divided.memory.ranks
    )


@pytest.mark.long
def test_ranks_take_the_same_as_forks_of_their_leader_and_as_fresh_processes():
    with template.forking():
        forked = run("memory", "fsdp")
    with template.suspended():
        fresh = run("memory", "fsdp")
    assert (forked.origin.start, fresh.origin.start) == ("forked", "fresh")
    assert fresh.memory.losses == forked.memory.losses
    pairs = zip(forked.memory.ranks, fresh.memory.ranks, strict=True)
    assert all(abs(one.peak_bytes - other.peak_bytes) <= 2 * MIB for one, other in pairs)


@pytest.mark.alone  # beside others, ranks that wait for a core may find that their clock was read too early
def test_ranks_are_timed_together_and_a_pilot_ends_on_all_of_them():
    timed = run("time", "ddp", steps=5, warmup=1)
    assert timed.status == "ok" and len(timed.times.step_seconds) == 5
    assert run("pilot", "ddp").status == "ok"


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "status", "message"),
    [
        ("killed", "killed_unknown", "rank 1 of 2 ended by SIGKILL"),
        ("crash", "crash", "rank 1 of 2 ended by SIGABRT"),
        ("memory", "oom_host", "rank 1 of 2: asked for too much"),
        ("error", "error", "rank 1 of 2: wrong on purpose"),
        ("leaves", "error", "rank 1 of 2 left no result"),
    ],
)
@pytest.mark.parametrize("starts", [template.forking, template.suspended])
def test_a_rank_that_dies_ends_the_case_with_its_evidence(starts, fault, status, message, tmp_path: Path):
    plugin = tmp_path / "dying.py"
    plugin.write_text(PLUGIN)
    started = time.monotonic()
    with starts():
        record = run("memory", f"rank_{fault}", extra=[str(plugin)])
    assert (record.status, record.evidence["rank"], record.evidence["message"]) == (status, 1, message)
    assert time.monotonic() - started < 60
    assert not workers()


@pytest.mark.long
@pytest.mark.alone  # to the second, which neighbours would take
def test_a_rank_that_hangs_and_does_not_listen_ends_at_the_deadline(tmp_path: Path):
    plugin = tmp_path / "dying.py"
    plugin.write_text(PLUGIN)
    started = time.monotonic()
    assert run("memory", "rank_hang", extra=[str(plugin)], deadline=15.0).status == "timeout"
    assert time.monotonic() - started < 15 + 6 + 2
    assert not workers()


@pytest.mark.alone  # to the second, which neighbours would take
def test_no_rank_outlives_the_harness(tmp_path: Path, cache: Path):
    plugin = tmp_path / "dying.py"
    plugin.write_text(PLUGIN)
    (tmp_path / "ranks.yaml").write_text(
        "title: One rank hangs\nworkload: decoder\nplaces: [torch/cpu]\ncorpus: zipf\ntokenizer: bytes\n"
        "shape: {layers: 2, width: 64, heads: 4, vocabulary: 512, batch: 4, tokens: 96}\n"
        "strategies: [rank_hang]\nrounds: 0\n"
    )
    command = [sys.executable, "-m", "harness", "run", "ranks.yaml", "--plugin", str(plugin)]
    env = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        mark = f"{process.pid}:"
        until = time.monotonic() + 90
        while len(carried(mark)) < 3 and time.monotonic() < until:  # the worker that leads, and two ranks
            time.sleep(0.05)
        assert len(carried(mark)) >= 3
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    until = time.monotonic() + 2
    while carried(mark) and time.monotonic() < until:
        time.sleep(0.02)
    assert not carried(mark)


def carried(mark):
    marks = {pid: orphans._mark_of(pid) for pid in orphans._processes()}
    return [pid for pid, its in marks.items() if (its or "").startswith(mark) and not orphans._over(pid)]


# The cause of a failure

LOST = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1457. Check the remote worker"
NCCL = "NCCL error in: work.cpp:1, remote process exited or there was a network error, NCCL version 2.29"


def failed(status, message):
    return Record(status=status, evidence={"message": message})


@pytest.mark.parametrize("lost", [LOST, NCCL, "Failed to recv, got 0 bytes. Connection was likely closed."])
@pytest.mark.parametrize("status", ["oom_host", "oom_device", "oom_budget", "error"])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 0, 1)])
def test_a_rank_with_an_error_of_its_own_is_the_cause_and_not_those_that_lost_it(status, lost, order):
    left = {0: failed("error", lost), 1: failed(status, "asked for too much"), 2: failed("error", lost)}
    record = ranks.cause({rank: left[rank] for rank in order}, {0: 1, 2: 1, 1: 1}, 3, kernel_killed=False)
    assert (record.status, record.evidence["rank"]) == (status, 1)
    assert record.evidence["message"] == "rank 1 of 3: asked for too much"


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
@pytest.mark.parametrize(
    ("code", "kernel_killed", "status"),
    [
        (-signal.SIGKILL, True, "oom_host"),
        (-signal.SIGKILL, False, "killed_unknown"),
        (-signal.SIGSEGV, False, "crash"),
        (3, False, "error"),
    ],
)
def test_a_rank_that_left_nothing_is_the_cause_unless_the_launcher_ended_it(code, kernel_killed, status, order):
    codes = {0: 1, 1: code, 2: -signal.SIGTERM}
    ended = {rank: codes[rank] for rank in order}
    record = ranks.cause({0: failed("error", LOST)}, ended, 3, kernel_killed)
    assert (record.status, record.evidence["rank"]) == (status, 1)


def test_memory_that_ran_out_is_the_cause_of_a_crash_and_not_the_reverse():
    left = {1: failed("oom_device", "out of memory")}
    record = ranks.cause(left, {0: -signal.SIGABRT, 1: 1}, 2, kernel_killed=False)
    assert (record.status, record.evidence["rank"]) == ("oom_device", 1)


def test_a_rank_that_only_lost_its_peer_is_named_where_nobody_shows_a_cause():
    record = ranks.cause({0: failed("error", LOST)}, {0: 1, 1: -signal.SIGTERM}, 2, kernel_killed=False)
    assert (record.status, record.evidence["rank"]) == ("error", 0)
    silent = ranks.cause({0: Record()}, {}, 2, kernel_killed=False)
    assert (silent.status, silent.evidence["message"]) == ("error", "rank 1 of 2 left no result")


# Joining records


def seen(peak, phase, *flags):
    phases = (Phase(name=phase, entry_bytes=0, peak_bytes=peak, exit_bytes=0),)
    return Record(flags=flags, memory=Memory(peak_host_bytes=peak, peak_phase=phase, phases=phases))


def test_together_the_largest_rank_counts():
    joined = ranks.together([seen(10, "init", "noisy"), seen(30, "update")])
    memory = joined.memory
    assert (memory.peak_host_bytes, memory.peak_phase, memory.all_ranks_bytes) == (30, "update", 40)
    assert joined.flags == ("noisy",)
    assert [(rank.peak_bytes, rank.peak_phase) for rank in memory.ranks] == [(10, "init"), (30, "update")]


def test_ranks_are_listed_by_their_number_whichever_ends_first(tmp_path: Path, monkeypatch):
    def left(task, work, paths):
        for rank, peak in ((1, 30), (0, 10)):
            path = Path(paths[1].format(rank))
            path.write_text(seen(peak, "init").model_dump_json() + "\n")
            os.utime(path, ns=(2 - rank, 2 - rank))
        return {}

    monkeypatch.setattr(ranks, "_forked", left)
    task = Task(kind="memory", cases=(case("fsdp"),), run_id="test", parent=os.getppid(), folder=str(tmp_path))
    joined = ranks.lead(task, lambda spec, result: 0)
    assert [rank.peak_bytes for rank in joined.memory.ranks] == [10, 30]


def test_where_a_rank_shows_no_peak_there_is_no_sum():
    memory = ranks.together([seen(10, "init"), Record()]).memory
    assert (memory.peak_host_bytes, memory.all_ranks_bytes) == (10, None)
    assert [rank.peak_bytes for rank in memory.ranks] == [10, None]


def test_together_the_slowest_steps_count():
    alone = [Record(times=Times(step_seconds=steps)) for steps in ((1.0, 5.0), (2.0, 4.0))]
    assert ranks.together(alone).times.step_seconds == (2.0, 5.0)


def test_together_the_largest_native_peak_and_the_latest_first_step_count():
    alone = [
        Record(times=Times(step_seconds=(1.0,), native_peak_host_bytes=peak, first_step_seconds=first))
        for peak, first in ((10, 3.0), (30, 2.0), (None, None))
    ]
    times = ranks.together(alone).times
    assert (times.native_peak_host_bytes, times.first_step_seconds) == (30, 3.0)


def test_a_rank_that_cannot_join_says_why(tmp_path: Path, monkeypatch):
    """Where this process sees no GPU, two ranks of a GPU cannot join."""
    two = case("fsdp").model_copy(update={"place": Place("torch", "cuda")})
    task = Task(kind="memory", cases=(two,), run_id="test", parent=os.getppid(), folder=str(tmp_path))
    (tmp_path / "spec.json").write_text(task.model_dump_json())
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("CUDA_VISIBLE_DEVICES", "")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(process, "arm", lambda parent: None)
    assert process.work(tmp_path / "spec.json", tmp_path / "rank-1.jsonl", plugins.load()) == 1
    record = store.parse((tmp_path / "rank-1.jsonl").read_bytes())
    assert (record.status, record.evidence["message"]) == (
        "unsupported",
        "2 ranks need as many GPUs, and torch finds 0",
    )


def rows(*cases_and_peaks):
    records = []
    for at, (each, peak, more) in enumerate(cases_and_peaks):
        slot = Slot(case=each.digest(), kind="memory")
        records.append(
            Record(slot=slot, case=each, position=at, memory=Memory(peak_host_bytes=peak, resolution_bytes=0, **more))
        )
    return judge.judge(records)


def test_rows_on_ranks_stand_beside_the_one_process_they_are_compared_to():
    two, four = (case("fsdp"), 52 * MIB, {"all_ranks_bytes": 104 * MIB}), (case("fsdp", count=4), 28 * MIB, {})
    tables = rows((case(), 100 * MIB, {}), two, four)
    assert [[row.label for row in table.rows] for table in tables] == [
        ["baseline", "fsdp on 2 ranks", "fsdp on 4 ranks"]
    ]
    assert [row.peak_ratio for row in tables[0].rows] == [1.0, 0.52, 0.28]
    assert any("holds 104 MiB for all of them" in note for note in tables[0].rows[1].notes)


@pytest.mark.parametrize(
    ("that", "where", "verdict"),
    [
        ("peak(fsdp) <= 0.55 * peak(baseline)", {"ranks": 2}, "verified"),
        ("peak(fsdp) <= 0.3 * peak(baseline)", {"ranks": 2}, "refuted"),
        ("peak(fsdp, ranks=4) <= 0.3 * peak(baseline)", {}, "verified"),
        ("peak(fsdp) <= 1", {}, "untested"),
        ("all_ranks(fsdp, ranks=2) >= peak(baseline)", {}, "verified"),
        ("answer(fsdp) == 'reassociated'", {"ranks": 2}, "untested"),
    ],
)
def test_claims_name_the_ranks(that, where, verdict):
    tables = rows((case(), 100, {}), (case("fsdp"), 52, {"all_ranks_bytes": 104}), (case("fsdp", count=4), 28, {}))
    assert claims.answer(Claim(id="x", says="x", that=that, where=where), tables).verdict == verdict


def test_the_guard_counts_the_memory_of_all_ranks():
    known = Summary("ok", need_bytes=100 << 20)
    one, four = case(), case("fsdp", count=4)
    run = object.__new__(session.Session)
    run.schedule = SimpleNamespace(digest=lambda case: case.digest())
    run.latest = {Slot(case=each.digest(), kind="predict"): known for each in (one, four)}
    run.options = SimpleNamespace(max_bytes=300 << 20)
    assert run.over_memory(one) is None
    refused = run.over_memory(four)
    assert refused.status == "skipped_guard" and refused.evidence["need_bytes"] == 400 << 20


# What a record keeps


def test_a_case_on_ranks_is_compared_to_one_process():
    assert case("fsdp").comparison_key == case("fsdp", count=4).comparison_key == case().comparison_key
    assert case("fsdp").plain == case() and case("fsdp").digest() != case("fsdp", count=4).digest()
    read = store.parse(store.encoded(Record(case=case("fsdp"), memory=Memory(ranks=(Rank(peak_bytes=1),)))))
    assert read.case == case("fsdp") and read.memory.ranks[0].peak_bytes == 1


@pytest.mark.long
def test_a_prediction_is_that_of_each_rank():
    cases = (case(), case("fsdp"), case("fsdp", count=4), case("ring_attention"))
    task = Task(kind="predict", cases=cases, run_id="test", parent=os.getpid(), folder="", steps=2)
    plain, two, four, ring = (record.prediction.predicted_peak_bytes for record in runner.run(task, 2, 120.0))
    assert four < two < plain and ring < plain
    floors = [record.prediction.floor_bytes for record in runner.run(task, 2, 120.0)]
    assert math.isclose(floors[2], floors[0] / 4, rel_tol=0.01)


@pytest.mark.long
def test_each_rank_holds_its_part_of_the_state():
    """Of a deep model with few tokens the peak is the state, in float32: parameters, gradients and two moments."""
    decoder = plugins.load().workloads["decoder"]
    deep = decoder.shape(layers=12, width=256, heads=4, vocabulary=256, batch=4, tokens=4)
    kinds = [(name, count) for name in ("fsdp", "tensor_parallel", "zero1", "zero2") for count in (2, 4)]
    cases = tuple(case(name, count=count).model_copy(update={"shape": deep.model_dump()}) for name, count in kinds)
    task = Task(kind="predict", cases=cases, run_id="test", parent=os.getpid(), folder="", steps=2)
    peaks = (record.prediction.predicted_peak_bytes for record in runner.run(task, 2, 120.0))
    shares = {kind: peak / (16 * decoder.parameters(deep)) for kind, peak in zip(kinds, peaks, strict=True)}
    for name in ("fsdp", "tensor_parallel"):
        assert 1 / 2 <= shares[name, 2] <= 0.6 and 1 / 4 <= shares[name, 4] <= 0.35
    for count in (2, 4):
        assert shares["zero1", count] <= 1 / 2 + 1 / 2 / count + 0.05, "all but moments is whole"
        others = 1 / 4 * (1 - 1 / count)  # gradients of what other ranks update
        assert shares["zero2", count] < shares["zero1", count] - 0.5 * others
