"""A suite of strategies that die in every way: each is a row with its own status, and the run goes on."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness import keeper, records

pytestmark = pytest.mark.alone

DEADLINE = 8
PLUGIN = '''
"""Strategies that die in the update of the run whose peak is taken, each in its way."""

import ctypes, os, signal, subprocess, sys, time
from dataclasses import replace
from pathlib import Path

from harness import Strategy, hookimpl


def memory_error():
    raise MemoryError("asked for too much")


def error():
    raise ValueError("wrong on purpose")


def torch_memory():
    import torch
    torch.empty(1 << 50)


def over_budget():
    import torch
    torch.ones(1 << 28)


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def crash():
    ctypes.string_at(0)


def abort():
    os.abort()


def hang():
    time.sleep(600)


def stubborn():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def grandchild():
    subprocess.Popen(["sleep", "600"], start_new_session=True)  # holds stdout and stderr


def flood():
    for _ in range(100):
        os.write(1, bytes(1 << 20))
    time.sleep(600)


def broken():
    Path(sys.argv[2]).write_text('{"status": "o')
    os._exit(0)


def not_a_number():
    Path(sys.argv[2]).write_text('{"losses": [NaN]}')
    os._exit(0)


FAULTS = (
    memory_error, error, torch_memory, over_budget, killed, crash, abort, hang, stubborn, grandchild, flood, broken,
    not_a_number,
)


def strategy(fault):
    def on_torch(parts):
        inner = parts.update

        def update(*args):
            if parts.shape.tokens == 96:
                fault()
            return inner(*args)

        return replace(parts, update=update)

    return Strategy("dies_" + fault.__name__, rewrites=("update",), on={"torch": on_torch}, about="Die.")


@hookimpl
def harness_strategies():
    return [strategy(fault) for fault in FAULTS]
'''
DUE = {
    "memory_error": "oom_budget",
    "error": "error",
    "torch_memory": "oom_budget",
    "over_budget": "oom_budget",
    "killed": "killed_unknown",
    "crash": "crash",
    "abort": "crash",
    "hang": "timeout",
    "stubborn": "timeout",
    "grandchild": "ok",
    "flood": "invalid_output",
    "broken": "invalid_output",
    "not_a_number": "invalid_output",
}
SUITE = f"""
title: Every way to die
workload: decoder
places: [torch/cpu]
corpus: zipf
tokenizer: bytes
shape: {{layers: 1, width: 32, heads: 2, vocabulary: 300, batch: 1, tokens: 96}}
budget_gib: 0.5
strategies: [{", ".join(f"dies_{name}" for name in DUE)}, checkpoint]
rounds: 0
timeout_seconds: {DEADLINE}
"""


@pytest.mark.slow
def test_every_way_to_die_is_a_row_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "faults.py").write_text(PLUGIN)
    (tmp_path / "faults.yaml").write_text(SUITE)
    command = [sys.executable, "-m", "harness.cli", "run", "faults.yaml", "--plugin", "faults.py"]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    started = time.monotonic()
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started < 300
    (path,) = tmp_path.glob("results/faults/*/*.jsonl")
    found, problems = records.read(path)
    assert problems == []
    last = {r.case.label.removeprefix("dies_"): r for r in found if r.case and r.slot and r.slot.kind == "memory"}
    table = [
        (name, record.status, record.evidence.get("seconds", record.worker_seconds), record.evidence.get("message", ""))
        for name, record in last.items()
    ]
    print(
        *(f"{name:>14} {status:<15} {seconds or 0:5.1f} s  {message}" for name, status, seconds, message in table),
        sep="\n",
    )
    assert {name: status for name, status, *_ in table} == {"baseline": "ok", **DUE, "checkpoint": "ok"}
    assert all((seconds or 0) <= DEADLINE + 6 for _, _, seconds, _ in table)
    assert all(record.evidence.get("message") for name, record in last.items() if record.status != "ok")
    rows = [line for line in done.stdout.splitlines() if line.startswith("| `dies_")]
    assert len(rows) == len(DUE), "every fault is a row"
    marks = [keeper._mark_of(pid) for pid in keeper._processes() if not keeper._over(pid)]
    assert [mark for mark in marks if mark and mark != keeper.mark()] == []
    assert all(json.loads(line) for line in path.read_text().splitlines()), "the file stays readable"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise RuntimeError('at import')", "raises when loaded (RuntimeError: at import)"),
        (
            "from harness import hookimpl\n@hookimpl\ndef harness_strategies():\n"
            "    raise RuntimeError('in the hook')\n",
            "raises in harness_strategies (RuntimeError: in the hook)",
        ),
        (
            "from harness import Strategy, hookimpl\n"
            "class Bad(Strategy):\n"
            "    @property\n    def summary(self):\n        raise RuntimeError('in about')\n"
            "@hookimpl\ndef harness_strategies():\n"
            "    return [Bad('bad', rewrites=(), on={}, about='x')]\n",
            "RuntimeError: in about",
        ),
    ],
)
def test_a_plugin_that_raises_is_one_sentence(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(text)
    command = [sys.executable, "-m", "harness.cli", "list", "--plugin", "bad.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr, done.stderr
