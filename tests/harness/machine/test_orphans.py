"""Nothing outlives the harness: not when it is killed, not what its workers started, and not what nobody could end."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from harness.machine import orphans
from harness.records import Record, store
from harness.run import temporary
from harness.verdicts import judge

PARENT = """
import os, signal, subprocess, sys, time
from harness.machine import orphans
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # who starts the tests may ignore it
orphans.start()
child = subprocess.Popen(["sleep", "300"], env={**os.environ, orphans.VARIABLE: orphans.mark()}, start_new_session=True)
print(child.pid, flush=True)
time.sleep(float(sys.argv[1]))
"""
OWNING = """
import time
from harness.run import temporary
with temporary.folder("harness-") as folder:
    print(folder, flush=True)
    time.sleep(300)
"""
ROUNDS = "rounds: 1\nwarmup: 1\nsteps: 3\n"
PATIENCE = 20.0
"""Seconds in which all has ended that is ended at all: beside other tests a keeper may start late."""
KILLS = int(os.environ.get("HARNESS_KILLS", "2"))
"""How often the harness is killed in all; `HARNESS_KILLS=50` for the whole proof."""
RESUMES = 5
"""How often a run is killed before it may finish."""


def alive(pid: int) -> bool:
    return bool(orphans._began(pid)) and not orphans._over(pid)


def within(seconds: float, happened) -> bool:
    until = time.monotonic() + seconds
    while not happened() and time.monotonic() < until:
        time.sleep(0.01)
    return happened()


@pytest.mark.alone  # to the second, which neighbours would take
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, None], ids=str)
def test_what_a_worker_started_in_a_session_of_its_own_ends_with_the_harness(ending) -> None:
    command = [sys.executable, "-c", PARENT, "300" if ending else "0.2"]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert alive(child)
    if ending is not None:
        parent.send_signal(ending)
    parent.wait(10)
    parent.stdout.close()
    assert within(1.0, lambda: not alive(child))


def test_threads_that_start_it_at_once_start_one() -> None:
    program = """
import pathlib, threading
from harness.machine import orphans
at_once = threading.Barrier(8)
threads = [threading.Thread(target=lambda: (at_once.wait(), orphans.start())) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
def words(path):
    try:
        return path.read_bytes().split(bytes(1))
    except OSError:  # it has ended in between
        return []
print(sum(orphans.mark().encode() in words(path) for path in pathlib.Path("/proc").glob("[0-9]*/cmdline")))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


# A run in another process of the tests would sweep what is left here for this one to find.
@pytest.mark.alone
def test_a_sweep_ends_what_is_of_no_living_harness_and_nothing_else() -> None:
    def sleeper(mark: str) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(["sleep", "300"], env={**os.environ, orphans.VARIABLE: mark})

    here = orphans.mark().rpartition(":")[2]
    marks = (orphans.mark(), f"4194305:17:{here}", f"{os.getpid()}:1:{here}", "4194305:17:1", "no number at all")
    mine, gone, reused, elsewhere, odd = map(sleeper, marks)
    other = subprocess.Popen(["sleep", "300"], env={k: v for k, v in os.environ.items() if k != orphans.VARIABLE})
    try:
        time.sleep(0.05)
        assert set(orphans.sweep()) == {gone.pid, reused.pid}
        left = {"mine": mine, "of a container": elsewhere, "not a mark": odd, "without one": other}
        assert [name for name, process in left.items() if process.poll() is not None] == []
    finally:
        for process in (mine, gone, reused, elsewhere, odd, other):
            process.kill()
            process.wait()


@pytest.fixture
def swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder for temporary files of its own, of which all that is left is removed; no process is ended."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(orphans, "_processes", list)
    return tmp_path


def test_temporary_folders_of_a_harness_that_was_killed_are_removed_and_those_of_a_living_one_stay(swept: Path) -> None:
    command, env = [sys.executable, "-c", OWNING], {**os.environ, "TMPDIR": str(swept)}
    living, killed = (subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2))
    try:
        assert living.stdout is not None and killed.stdout is not None
        alive, left = (Path(process.stdout.readline().strip()) for process in (living, killed))
        with temporary.folder("harness-") as own:
            orphans.sweep()
            assert set(swept.iterdir()) == {alive, left, own}
            killed.kill()
            killed.wait()
            orphans.sweep()
            assert set(swept.iterdir()) == {alive, own}
    finally:
        for process in (living, killed):
            process.kill()
            process.communicate()


def owned(folder: Path, owner: str) -> Path:
    """Make a folder that is not empty, with this in the file of its owner."""
    (folder / "more").mkdir(parents=True)
    (folder / "more" / "file").touch()
    (folder / orphans.OWNER).write_text(owner)
    return folder


def test_only_folders_that_say_whose_they_are_are_removed(swept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, boot = orphans.mark().rpartition(":")[2], orphans._boot()
    gone = f"4194305:17:{here}:{boot}"
    left = [owned(swept / "harness-gone", gone), owned(swept / "harness-reused", f"{os.getpid()}:1:{here}:{boot}")]
    stays = {
        "harness-mine": f"{orphans.mark()}:{boot}",
        "harness-of-a-container": f"4194305:17:1:{boot}",
        "harness-of-another-machine": f"4194305:17:{here}:4bd1f9ae-0000-4000-8000-000000000000",
        "harness-of-no-machine": f"4194305:17:{here}:",
        "harness-without-the-machine": f"4194305:17:{here}",
        "harness-cut": "41943",
        "harness-empty": "",
        "harness-odd": "no number:at:all:\xe9",
        "another-name": gone,
    }
    for name, owner in stays.items():
        owned(swept / name, owner)
    (swept / "harness-without").mkdir()
    (swept / "harness-file").write_text(gone)
    (swept / "harness-link").symlink_to(owned(swept / "elsewhere", gone))
    owned(swept / "harness-linked-owner", gone)
    (swept / "harness-linked-owner" / orphans.OWNER).unlink()
    (swept / "harness-linked-owner" / orphans.OWNER).symlink_to(swept / "elsewhere" / orphans.OWNER)
    owned(swept / "harness-pipe", gone)
    (swept / "harness-pipe" / orphans.OWNER).unlink()
    os.mkfifo(swept / "harness-pipe" / orphans.OWNER)
    before = set(swept.rglob("*"))

    with monkeypatch.context() as other:
        other.setattr(os, "geteuid", lambda: os.getuid() + 1)
        orphans.sweep()
        assert set(swept.rglob("*")) == before, "they are another user's"
    with monkeypatch.context() as other:
        other.setattr(orphans, "_boot", str)
        orphans.sweep()
        assert set(swept.rglob("*")) == before, "this machine has no name"
    orphans.sweep()
    removed = {path for path in before if any(path.is_relative_to(folder) for folder in left)}
    assert set(swept.rglob("*")) == before - removed


def test_sweeps_at_the_same_time_do_no_harm(swept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = f"4194305:17:{orphans.mark().rpartition(':')[2]}:{orphans._boot()}"
    at_once, ended = threading.Barrier(4), []
    for number in range(40):
        owned(swept / f"harness-{number}", gone)
    threads = [threading.Thread(target=lambda: (at_once.wait(), ended.append(orphans.sweep()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ended == [[]] * 4 and not list(swept.iterdir())

    def is_left(folder: Path) -> bool:
        left = really(folder)
        if not taken:  # another sweep is faster at the first one
            taken.append(folder)
            shutil.rmtree(folder)
        return left

    really, taken = orphans._is_left, []
    monkeypatch.setattr(orphans, "_is_left", is_left)
    owned(swept / "harness-0", gone)
    owned(swept / "harness-1", gone)
    orphans.sweep()
    assert taken and not list(swept.iterdir())


def test_pressing_ctrl_c_twice_ends_at_once_without_a_traceback(smallest: str, tmp_path: Path, cache: Path) -> None:
    (tmp_path / "small.yaml").write_text(smallest + ROUNDS)
    listening = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = [sys.executable, "-c", f"{listening}; from harness.cli.commands import main; main()", "run", "small.yaml"]
    env = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    for pause in (0.0, 0.02, 0.3):
        process = subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
        assert within(60, lambda process=process: bool(carriers(process.pid)))
        process.send_signal(signal.SIGINT)
        time.sleep(pause)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=100)
        assert process.returncode == 130 and "Traceback" not in told, told
        assert within(PATIENCE, lambda process=process: not carriers(process.pid))


def carriers(harness: int) -> list[int]:
    """Every process that the harness of this number started."""
    marks = {pid: orphans._mark_of(pid) or "" for pid in orphans._processes()}
    return [pid for pid, mark in marks.items() if mark.startswith(f"{harness}:") and not orphans._over(pid)]


@pytest.mark.long
def test_a_harness_that_is_killed_at_any_moment_leaves_nobody_and_loses_nothing(
    smallest: str, tmp_path: Path, cache: Path
) -> None:
    (tmp_path / "small.yaml").write_text(smallest + ROUNDS)
    env = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-m", "harness", "run", "small.yaml", "--results"]
    chance = random.Random(7)

    def killed_after(seconds: float, results: str) -> int | None:
        """Give the number of the run that was killed; None where it had ended before."""
        process = subprocess.Popen(
            [*command, results], cwd=tmp_path, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return process.pid
        return None

    def lines(results: str) -> tuple[list[Record], list[str]]:
        (file,) = (tmp_path / results).rglob("*.jsonl")  # one run, however often it is continued
        return store.read(file)

    def kept(results: str) -> int:
        begun = any((tmp_path / results).rglob("*.jsonl"))
        return sum(record.slot is not None for record in lines(results)[0]) if begun else 0

    def told(found: list[Record]) -> list[list[tuple[str, str, str | None]]]:
        return [[(row.label, row.status, row.answer) for row in table.rows] for table in judge.judge(found)]

    subprocess.run([*command, "whole"], cwd=tmp_path, env=env, check=True, capture_output=True)
    plain = told(lines("whole")[0])
    kills, runs, moments = 0, 0, []
    while kills < KILLS:
        results, before, now = f"killed-{runs}", 0, 0
        while (
            now < RESUMES and kills < KILLS and (killed := killed_after(moment := chance.uniform(0.05, 6.0), results))
        ):
            kills, now, moments = kills + 1, now + 1, [*moments, moment]
            assert within(PATIENCE, lambda killed=killed: not carriers(killed)), (
                f"kill {kills}: somebody outlived the harness"
            )
            assert kept(results) >= before, "a finished case was lost"
            before = kept(results)
        subprocess.run([*command, results], cwd=tmp_path, env=env, check=True, capture_output=True)
        found, problems = lines(results)
        assert len(problems) <= now, "at most the line that was being written"
        good = Counter(record.slot for record in found if record.slot and record.status == "ok" and not record.flags)
        assert all(count == 1 for count in good.values()), "measured twice"
        assert told(found) == plain
        runs += 1
    print(f"{kills} kills in {runs} runs, after {min(moments):.1f} to {max(moments):.1f} s")


def test_a_sweep_where_no_temporary_file_can_be_written_is_no_error(
    swept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gettempdir() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", gettempdir)
    assert orphans.sweep() == [] and swept.is_dir()
