"""Thousands of cases: the process that runs them stays as it is, and each costs as much as the first."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from harness.contract import plugins
from harness.machine import orphans
from harness.records import Case, Memory, Origin, Prediction, Record, Task, store
from harness.records.record import Verdict
from harness.run import bench, runner, session, template
from harness.suite import reader

ROOT = Path(__file__).resolve().parents[2]
MEASURED = r"""
import re, sys, time
from pathlib import Path
from harness.cli import commands
started = time.process_time()  # which leaves out what the neighbours do
try:
    commands.main()
finally:
    # not ru_maxrss: across an exec the kernel carries the peak of the process that started this one over into it
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]
    print(time.process_time() - started, peak, file=sys.stderr)
"""
CASES = 1000
SLOWER = 2
"""How much slower than two quiet cores the neighbours may make the machine that runs the tests."""
SUITE = """
title: Many cases
workload: decoder
places: [torch/cpu]
corpus: zipf
tokenizer: bytes
shape: {{layers: 1, width: 32, heads: 2, vocabulary: 300, batch: 1, tokens: [64, 128, 192, 256]}}
strategies: [{{checkpoint: {{every: {every}}}}}]
rounds: 0
"""
ANSWER = Verdict("bit_exact", 1.0, None, None, None, (), "it is")
MADE = {
    "predict": Record(
        prediction=Prediction(predicted_peak_bytes=1 << 20, floor_bytes=1 << 19), origin=Origin(worker_seconds=0.1)
    ),
    "reference": Record(),
    "numerics": Record(numerics=ANSWER),
    "memory": Record(
        memory=Memory(peak_host_bytes=1 << 20, losses=(1.0, 0.9, 0.8), batches_digests=("a",), resolution_bytes=1 << 12)
    ),
}


@pytest.mark.long
def test_a_report_of_ten_thousand_records_takes_seconds_and_little_memory(tmp_path: Path, slowness: float) -> None:
    files = sorted((ROOT / "results").rglob("*.jsonl"))
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    lines = [line for line in lines if "slot" in line and "case" in line]
    path = tmp_path / "suite" / "machine" / "20260101T000000Z-x.jsonl"
    path.parent.mkdir(parents=True)
    with open(path, "w") as file:
        for number in range(10_000):
            copy, line = divmod(number, len(lines))
            case = {**lines[line]["case"], "seed": copy}
            slot = {**lines[line]["slot"], "case": f"{lines[line]['slot']['case']}-{copy}"}
            file.write(json.dumps({**lines[line], "case": case, "slot": slot}) + "\n")
    command = [sys.executable, "-c", MEASURED, "report", str(tmp_path), "--format"]
    for form in ("markdown", "json"):
        done = subprocess.run([*command, form], capture_output=True, text=True, check=True)
        seconds, kib = map(float, done.stderr.splitlines()[-1].split())
        print(f"{form} of 10,000 records: {seconds:.1f} s, {kib / 1024:.0f} MiB")
        assert len(done.stdout) > 100_000
        assert seconds < 5 * SLOWER * slowness and kib * 1024 < 500e6


SCREEN = "import rich.console, typer"
ARGUMENTS = f"{SCREEN}, pydantic; pydantic.TypeAdapter(str)"  # what typer reads the arguments of a verb by


@pytest.mark.parametrize(
    ("words", "least", "most", "without"),
    [
        (["--help"], SCREEN, 2, ("pydantic", "numpy", "psutil", "torch", "jax")),
        (["list"], ARGUMENTS, 3, ("numpy", "psutil", "torch", "jax")),
    ],
)
def test_the_first_words_come_at_once(words: list[str], least: str, most: float, without: tuple[str, ...]) -> None:
    """They load little beyond the libraries that print and that read arguments: so many times their seconds at most."""

    def once(command: list[str]) -> float:
        before = os.times()
        subprocess.run([sys.executable, *command], check=True, capture_output=True)
        after = os.times()  # of processors: it leaves out what the neighbours do
        return sum(getattr(after, name) - getattr(before, name) for name in ("children_user", "children_system"))

    verb = ["-m", "harness", *words]
    rounds = [(once(verb), once(["-c", least])) for _ in range(5)]
    assert min(ours for ours, _ in rounds) < most * min(theirs for _, theirs in rounds)
    done = subprocess.run([sys.executable, "-X", "importtime", *verb], check=True, capture_output=True, text=True)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "typer" in loaded and not loaded & set(without)


STANDS_IN = """#!{python} -IS
import json, os, sys
if sys.argv[2] != "harness.worker":
    os.execv("{python}", ["{python}", *sys.argv[1:]])
task = json.load(open(sys.argv[3]))
if task["kind"] == "reference":
    os.makedirs(task["reference"])
made = json.load(open("{made}"))[task["kind"]]
with open(sys.argv[4], "w") as file:
    file.writelines(json.dumps({{**made, "case": case}}) + chr(10) for case in task["cases"])
"""
"""A worker that begins, answers and ends like any other, in hundredths of a second: it loads nothing."""


@pytest.mark.long
@pytest.mark.parametrize("workers", ["none", pytest.param("processes", marks=pytest.mark.slow)])
def test_a_thousand_cases_leave_the_parent_as_it_is(
    workers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is looked at is the process that starts the workers, and its file: what workers do is made up."""

    def instead(task: Task, *rest: object) -> list[Record]:
        if task.kind == "reference":
            Path(str(task.reference)).mkdir(parents=True)
        return [MADE[task.kind]] * len(task.cases)

    if workers == "none":
        monkeypatch.setattr(runner, "run", instead)
    else:
        made, script = tmp_path / "made.json", tmp_path / "worker"
        made.write_text(json.dumps({kind: json.loads(record.model_dump_json()) for kind, record in MADE.items()}))
        script.write_text(STANDS_IN.format(python=sys.executable, made=made))
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
        monkeypatch.setattr(template, "ready", lambda *rest: "a worker is made up")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "many.yaml"
    path.write_text(SUITE.format(every=list(range(1, CASES // 4))))
    loaded = plugins.load()
    plan = reader.read(path, loaded)
    assert len(plan.cases) == CASES
    me = psutil.Process(os.getpid())
    orphans.start()
    before = {child.pid for child in me.children()}
    seen: list[tuple[float, int, int]] = []

    class Watched(bench.Progress):
        def finish(self, record: Record, case: Case) -> None:
            assert record.status == "ok", record.evidence
            if record.slot is not None and record.slot.kind == "memory":
                seen.append((time.process_time(), me.memory_info().rss, me.num_fds()))

    file = session.run(plan, loaded, bench.Options(tmp_path / "results"), Watched())
    assert len(seen) == CASES
    quarter = CASES // 4
    growth = seen[-1][1] - seen[quarter][1]
    first, last = (seen[b][0] - seen[a][0] for a, b in ((quarter, 2 * quarter), (3 * quarter, CASES - 1)))
    each = f"{1e3 * first / quarter:.2f} ms in the second quarter, {1e3 * last / quarter:.2f} ms in the last"
    size = file.stat().st_size / CASES
    print(f"{CASES} cases: {growth / 1e6:.2f} MB over three quarters; a case {each}; {size:.0f} bytes")
    assert growth < 2.5e6
    assert last < SLOWER * first
    assert seen[-1][2] == seen[quarter][2], "files are left open"
    assert {child.pid for child in me.children()} <= before, "processes are left, or not reaped"
    _, problems = store.read(file)
    sizes = [len(line) for line in file.read_bytes().splitlines()]
    assert problems == [] and max(sizes) < 10_000
    assert file.stat().st_size < 3 * CASES * 3000
