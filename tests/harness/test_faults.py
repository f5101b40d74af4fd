"""A suite of strategies that die in every way: each is a row with its own status, and the run goes on."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from harness.machine import orphans
from harness.records import store

DEADLINES = {"torch": 8, "jax": 15}
"""Seconds: JAX compiles first."""
PLUGIN = '''
"""Strategies that die in the update of the run whose peak is taken, each in its way.

In JAX they do in a callback, so in the middle of a compiled step.
"""

import ctypes, os, signal, subprocess, sys, time
from dataclasses import replace
from pathlib import Path

from harness import Strategy, hookimpl


def memory_error():
    raise MemoryError("asked for too much")


def error():
    raise ValueError("wrong on purpose")


def impossible():
    """Ask for a PiB."""


def over_budget():
    """Ask for a GiB."""


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
    memory_error, error, impossible, over_budget, killed, crash, abort, hang, stubborn, grandchild, flood, broken,
    not_a_number,
)
NUMBERS = {impossible: 1 << 48, over_budget: 1 << 28}


def strategy(fault):
    def on_torch(parts):
        inner = parts.update

        def update(*args):
            if parts.shape.tokens == 96:
                import torch
                fault()
                torch.ones(NUMBERS.get(fault, 1), device=parts.place.device)
            return inner(*args)

        return replace(parts, update=update)

    def on_jax(parts):
        inner = parts.update

        def update(parts, state, grads):
            if parts.shape.tokens != 96:
                return inner(parts, state, grads)
            import jax
            from jax.experimental import io_callback

            def happen():
                fault()
                return jax.numpy.int32(1)

            one = io_callback(happen, jax.ShapeDtypeStruct((), "int32"))
            if fault in NUMBERS:  # sorted, so that they are needed all at once
                one += jax.lax.sort(jax.numpy.arange(NUMBERS[fault], dtype="float32") * one)[0].astype("int32")
            found = inner(parts, state, grads)
            return {**found, "steps": found["steps"] + one - 1}

        return replace(parts, update=update)

    on = {"torch": on_torch, "jax": on_jax}
    return Strategy("dies_" + fault.__name__, rewrites=("update",), on=on, about="Die.")


@hookimpl
def harness_strategies():
    return [strategy(fault) for fault in FAULTS]
'''
DUE = {
    "memory_error": "oom_budget",
    "error": "error",
    "impossible": "oom_budget",
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
places: [{{place}}]
corpus: zipf
tokenizer: bytes
shape: {{{{layers: 1, width: 32, heads: 2, vocabulary: 300, batch: 1, tokens: 96}}}}
budget_gib: 0.5
strategies: [{", ".join(f"dies_{name}" for name in DUE)}, checkpoint]
rounds: 0
timeout_seconds: {{deadline}}
"""


def left_over(cache: Path) -> list[str]:
    """The marks of processes that a harness with this folder for caches has started and not ended."""
    found = []
    for pid in orphans._processes():
        with suppress(OSError):
            if bytes(cache) in Path(f"/proc/{pid}/environ").read_bytes() and not orphans._over(pid):
                found.append(orphans._mark_of(pid) or "none")
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [
        "torch/cpu",
        "jax/cpu",
        pytest.param("torch/cuda", marks=pytest.mark.gpu),
        pytest.param("jax/cuda", marks=pytest.mark.gpu),
    ],
)
def test_every_way_to_die_is_a_row_and_the_run_goes_on(place: str, tmp_path: Path, cache: Path) -> None:
    (tmp_path / "faults.py").write_text(PLUGIN)
    deadline = DEADLINES[place.partition("/")[0]]
    (tmp_path / "faults.yaml").write_text(SUITE.format(place=place, deadline=deadline))
    command = [sys.executable, "-m", "harness", "run", "faults.yaml", "--plugin", "faults.py"]
    env = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    started = time.monotonic()
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started < 300
    (path,) = tmp_path.glob("results/faults/*/*.jsonl")
    found, problems = store.read(path)
    assert problems == []
    last = {r.case.label.removeprefix("dies_"): r for r in found if r.case and r.slot and r.slot.kind == "memory"}
    table = [
        (
            name,
            record.status,
            record.evidence.get("seconds", record.origin.worker_seconds),
            record.evidence.get("message", ""),
        )
        for name, record in last.items()
    ]
    print(
        *(f"{name:>14} {status:<15} {seconds or 0:5.1f} s  {message}" for name, status, seconds, message in table),
        sep="\n",
    )
    due = DUE | ({"memory_error": "oom_host"} if place.endswith("/cuda") else {})  # where the budget is of the device
    assert {name: status for name, status, *_ in table} == {"baseline": "ok", **due, "checkpoint": "ok"}
    assert all((seconds or 0) <= deadline + 6 for _, _, seconds, _ in table)
    messages = [record.evidence.get("message") for record in last.values() if record.status != "ok"]
    assert all(messages) and not any("Traceback" in message for message in messages)
    rows = [line for line in done.stdout.splitlines() if line.startswith("| `dies_")]
    assert len(rows) == len(DUE), "every fault is a row"
    assert left_over(cache) == []
    assert all(json.loads(line) for line in path.read_text().splitlines()), "the file stays readable"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A disk of its own of a size that may be changed; skips where none may be mounted."""
    at = tmp_path / "disk"
    at.mkdir()

    def sized(size: str) -> Path:
        again = ["-o", f"remount,size={size}"] if at.is_mount() else ["-t", "tmpfs", "-o", f"size={size}", "tmpfs"]
        if subprocess.run(["mount", *again, str(at)], capture_output=True).returncode:
            pytest.skip("no disk may be mounted here: that takes root")
        return at

    yield sized
    if at.is_mount():
        subprocess.run(["umount", "--lazy", str(at)], check=True)


@pytest.mark.parametrize("full", ["results", pytest.param("temporary files", marks=pytest.mark.slow)])
def test_a_full_disk_is_one_sentence_and_the_run_is_continued(
    full: str, disk, smallest: str, tmp_path: Path, cache: Path, made_up: Path
) -> None:
    (tmp_path / "small.yaml").write_text(smallest + "rounds: 0\n")
    command = [sys.executable, "-m", "harness", "run", "small.yaml", "--plugin", str(made_up), "--results"]
    results = {"results": "disk", "temporary files": "kept"}[full]
    env = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    if full == "temporary files":
        env["TMPDIR"] = str(tmp_path / "disk")

    def run(size: str) -> "subprocess.CompletedProcess[str]":
        disk(size)
        return subprocess.run([*command, results], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)

    failed = run({"results": "8k", "temporary files": "4k"}[full])
    assert failed.returncode == 2 and "Traceback" not in failed.stderr, failed.stderr
    assert "make room" in failed.stderr.splitlines()[-1]
    before = [record for path in (tmp_path / results).rglob("*.jsonl") for record in store.read(path)[0]]
    done = run("64m")
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / results).rglob("*.jsonl")
    found, problems = store.read(path)
    assert len(problems) <= 1, "at most the line for which there was no room"
    assert found[: len(before)] == before and {record.status for record in found} == {"ok"}
    slots = [record.slot for record in found if record.slot]
    assert len(slots) == len(set(slots)), "nothing is measured twice"
    assert left_over(cache) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise RuntimeError('at import')", "raises when loaded (RuntimeError: at import, bad.py:1)"),
        (
            "from harness import hookimpl\n@hookimpl\ndef harness_strategies():\n"
            "    raise RuntimeError('in the hook')\n",
            "raises in harness_strategies (RuntimeError: in the hook, bad.py:4)",
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
def test_a_plugin_that_raises_is_one_sentence(
    text: str, words: str, here: Callable[..., tuple[object, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "bad.py").write_text(text)
    status, _, errors = here(tmp_path, "list", "--plugin", "bad.py")
    assert status == 2 and words in errors and "Traceback" not in errors, errors
