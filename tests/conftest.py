"""One compute thread and quick compiling for what runs inside the tests themselves; workers set their own."""

import fcntl
import gc
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from harness.machine import facts, memory
from harness.machine.environment import cache_folder
from harness.run import runner, template, turns

worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
if worker.isdigit():
    # Side by side, each process keeps to one core: threads of several, which wait by spinning, would starve each other.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker) % len(cores)]})
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[name] = "1"
# What is compiled here runs for milliseconds: half of all tests' time would be XLA's compiler.
QUICK = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if version("jaxlib").startswith("0.10."):  # later ones end a process that names this flag
    QUICK += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", QUICK)
os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")
# Programs that an earlier run has compiled, by what they compute: with them the tests take a fraction of the time.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_folder() / "jax-programs" / "tests"))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as long what `long_in_jax` names, where a parameter is JAX: it compiles for seconds, and torch does not."""
    for item in items:
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if item.get_closest_marker("long_in_jax") and any(str(each).partition("/")[0] == "jax" for each in values):
            item.add_marker(pytest.mark.long)


def pytest_collection_finish() -> None:
    """Search what thousands of tests brought for garbage once, not with each search while they run."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def templates() -> Iterator[None]:
    """Fork the workers of all tests from the same few processes."""
    with template.forking():
        yield


LOOP_SECONDS = 0.04
"""How long a million rounds of a loop in Python take on a processor whose seconds the bounds of tests are: a choice."""


@pytest.fixture(scope="session")
def slowness() -> float:
    """Return how many times as long as that one this processor takes in Python, at least 1."""

    def once() -> float:
        start, total = time.thread_time(), 0
        for number in range(1_000_000):
            total += number & 7
        return time.thread_time() - start

    return max(1.0, min(once() for _ in range(3)) / LOOP_SECONDS)


@pytest.fixture
def stacked() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return what puts arrays of torch's layers on top of each other, as JAX has them."""
    import numpy as np

    def stacked(arrays: dict[str, Any]) -> dict[str, Any]:
        layers: dict[str, list[Any]] = {}
        for name, value in arrays.items():
            if name.startswith("layers."):
                layers.setdefault(f"layers.{name.split('.')[2]}", []).append(value)
        rest = {name: value for name, value in arrays.items() if not name.startswith("layers.")}
        return rest | {name: np.stack(values) for name, values in layers.items()}

    return stacked


@pytest.fixture(scope="module", autouse=True)
def programs_end_with_their_module() -> Iterator[None]:
    """Drop what JAX has compiled for the tests of a file: it keeps that for good, several GiB in the end."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
        memory.trim()


ROOT = Path(__file__).resolve().parents[1]


class Ended(NamedTuple):
    """How a command ended, and what it printed."""

    returncode: object
    stdout: str
    stderr: str


Here = Callable[..., Ended]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Here]:
    """Run the command line in a folder, but within this process."""
    from harness.cli import commands

    def run(folder: Path, *arguments: "str | Path") -> Ended:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["harness", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            commands.main()
        return Ended(ended.value.code, *capfd.readouterr())

    handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    hook = sys.unraisablehook
    yield run
    sys.unraisablehook = hook
    for each, handler in handlers.items():
        signal.signal(each, handler)


@dataclass(frozen=True)
class Reported:
    """What `make tables` and the page make of the results that git tracks, in folders of their own.

    `root` has the documents and `pictures`, `results` is the copy that they show.
    """

    root: Path
    results: Path
    page: Path
    documents: tuple[str, ...]


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], Any]], Any]:
    """Make a thing by its name in one process of the tests for all of them; it is given a folder of its own."""
    base = tmp_path_factory.getbasetemp()

    def make(name: str, made_in: Callable[[Path], Any]) -> Any:
        shared = (base.parent if worker else base) / name
        shared.mkdir(exist_ok=True)
        with (shared / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            made = shared / "made.pickle"
            if not made.exists():
                made.write_bytes(pickle.dumps(made_in(shared)))
        return pickle.loads(made.read_bytes())

    return make


@pytest.fixture(scope="session")
def pictures() -> None:
    """Skip where what draws is not installed, as on a machine that has what `gpu/wheels.txt` names alone."""
    for package in ("altair", "jinja2", "vl_convert"):
        if find_spec(package) is None:
            pytest.skip(f"needs the package {package}")


@pytest.fixture(scope="session")
def reported(once: Callable[[str, Callable[[Path], Any]], Any], pictures: None) -> Reported:
    """Report on all committed results: it takes half a minute, so one process of the tests does it for all."""
    return once("reported", report_within)


def report_within(shared: Path) -> Reported:
    """Report on all committed results into this folder."""
    names = ["README.md", "docs/tables.md", "docs/in_your_code.md", "RESULTS.md"]
    names += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "results").glob("*/README.md"))
    made = Reported(shared / "made", shared / "tracked" / "results", shared / "page.html", tuple(names))
    report_on(made)
    return made


def report_on(made: Reported) -> None:
    """Copy the tracked results and the documents, and put tables, pictures and a page beside them."""
    subprocess.run([ROOT / ".ci" / "tracked_results", made.results.parent], cwd=ROOT, check=True)
    for name in made.documents:
        (made.root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, made.root / name)
    command = [sys.executable, "-m", "harness", "report", str(made.results), "--pictures", "pictures"]
    command += ["--documents", str(ROOT / "suites" / "claims.yaml"), "--page", str(made.page)]
    command += [word for name in made.documents for word in ("--into", str(made.root / name))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=made.root)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def rates_in() -> Callable[[Path], Path]:
    """Write rates of this machine into a new folder for caches: to measure them takes more than a small suite."""

    def write(folder: Path) -> Path:
        made_up = {"flops": {"float32": 1e11, "bfloat16": 1e11, "float16": 1e11}, "bandwidth": 1e10}
        rates = {
            f"{name}/cpu {version} {facts.threads()} threads": made_up
            for name, version in facts.versions().items()
            if name in ("torch", "jax")
        }
        (folder / "harness").mkdir(parents=True)
        (folder / "harness" / f"rates-{facts.name()}.json").write_text(json.dumps(rates))
        return folder

    return write


@pytest.fixture
def cache(rates_in: Callable[[Path], Path], tmp_path: Path) -> Path:
    """A folder for caches of one test alone."""
    return rates_in(tmp_path / "cache")


MADE_UP = '''
"""Figures that are made up: of memory in a worker that is forked as any other, all else without one."""

from pathlib import Path

from harness import hookimpl
from harness.records import Memory, Origin, Prediction, Record, Times
from harness.records.record import Verdict
from harness.run import runner, turns

FIGURES = {
    "predict": {"prediction": Prediction(predicted_peak_bytes=1 << 20, floor_bytes=1 << 19)},
    "numerics": {"numerics": Verdict("bit_exact", 1.0, None, None, None, (), "it is")},
    "memory": {"memory": Memory(peak_host_bytes=1 << 20, losses=(1.0, 0.9, 0.8), resolution_bytes=1 << 12)},
    "time": {"times": Times(step_seconds=(0.1, 0.1, 0.1))},
}
begin = getattr(runner.run, "real", runner.run)


def run(task, *rest):
    if task.kind == "memory":
        return begin(task, *rest)
    if task.kind == "reference":
        Path(task.reference).mkdir()
    return [Record(**FIGURES.get(task.kind, {}), origin=Origin(worker_seconds=0.1)) for case in task.cases]


def in_turns(tasks, threads, deadline, watch, order, starting):
    return [run(task)[0] for task in tasks]


run.real, runner.run, turns.run = begin, run, in_turns


@hookimpl(tryfirst=True)
def harness_measure(task):
    return Record(**FIGURES[task.kind])
'''


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plugin with which a run of any suite takes a few seconds."""
    monkeypatch.setattr(runner, "run", runner.run)  # which the plugin replaces wherever it is loaded: undone at the end
    monkeypatch.setattr(turns, "run", turns.run)
    path = tmp_path / "made_up.py"
    path.write_text(MADE_UP)
    return path


@pytest.fixture
def smallest() -> str:
    """The suite that runs in the least time, but for its rounds."""
    return """
title: As small as it gets
workload: decoder
places: [torch/cpu]
corpus: zipf
tokenizer: bytes
shape: {layers: 1, width: 32, heads: 2, vocabulary: 300, batch: 1, tokens: 96}
strategies: [checkpoint]
"""
