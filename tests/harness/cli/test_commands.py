"""The verbs as a user types them: tables, refusals in one sentence, an interruption that loses nothing."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

import harness as harness_package
from harness import records
from harness.cli import commands, screen
from harness.cli.progress import Watcher
from harness.records import Case, Origin, Record, Slot, store
from harness.run import prepare_data, session
from harness.suite.bounds import SuiteError
from harness.suite.schema import Suite

Here = Callable[..., tuple[object, str, str]]
ROOT = Path(__file__).resolve().parents[3]
HARNESS = [sys.executable, "-m", "harness"]
PARENT_LIMIT = 80 << 10
"""KiB that the process which only plans, starts workers and reports may hold at its peak."""

SUITE = """
title: As small as it gets
workload: decoder
places: [torch/cpu]
corpus: zipf
tokenizer: bytes
shape: {layers: 1, width: 32, heads: 2, vocabulary: 300, batch: 1, tokens: 96}
strategies:
  - nothing
  - [checkpoint, {fused_loss: {chunk: 64}}]
rounds: 1
warmup: 1
steps: 3
"""
LABELS = ["baseline", "nothing", "checkpoint + fused_loss(chunk=64)"]

# Runs the command line as it is, and notes what this process itself held and loaded.
WATCHED = """
import json, re, sys
from pathlib import Path
from harness.cli.commands import main
note = Path(sys.argv.pop(1))
try:
    main()
finally:
    status = Path("/proc/self/status").read_text()
    heavy = sorted({"torch", "jax", "jaxlib", "numpy", "tokenizers"} & set(sys.modules))
    note.write_text(json.dumps([int(re.search(r"VmHWM:\\s*(\\d+) kB", status)[1]), heavy]))
"""

# A plugin whose object is finalized as it is imported; a signal comes in the middle of that.
FINALIZED = """
import os, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
class Finalized:
    def __del__(self):
        os.kill(os.getpid(), {number})
        time.sleep(0)
Finalized()
time.sleep(20)
"""


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "60"}


def harness(folder: Path, *arguments: "str | Path") -> "subprocess.CompletedProcess[str]":
    """Run the command line in a folder of its own."""
    command = [*HARNESS, *map(str, arguments)]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )


def suite_in(folder: Path, *changes: tuple[str, str]) -> Path:
    text = SUITE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = folder / "small.yaml"
    path.write_text(text)
    return path


# What is there


def test_list_names_every_strategy_by_its_part(tmp_path: Path) -> None:
    done = harness(tmp_path, "list")
    assert (done.returncode, done.stderr) == (0, "")
    parts = dict(re.findall(r"^(\S+)\n((?:  .*\n)+)", done.stdout, re.MULTILINE))
    assert "  checkpoint " in parts["stack"]
    assert "  fused_loss " in parts["loss"]
    assert "  nothing " in parts["(none)"]
    assert "  decoder " in parts["workloads"]
    assert "Keep only the input of every k-th layer" in done.stdout


def test_show_tells_what_a_strategy_keeps_and_its_knobs(tmp_path: Path) -> None:
    done = harness(tmp_path, "show", "checkpoint")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Keep only the input of every k-th layer" in done.stdout
    assert "rewrites: stack\n" in done.stdout
    assert "backends: torch, jax\n" in done.stdout
    assert "knob every: int, default 1\n" in done.stdout
    (code,) = re.findall(r"^code: (.*)$", done.stdout, re.MULTILINE)
    assert "def on_torch" in (tmp_path / code).read_text()
    clipping = harness(tmp_path, "show", "clip_gradients").stdout
    assert re.search(r"\nnot with [^:]*fsdp[^:]*: each rank", clipping) and "\nnot before accumulate: " in clipping
    (package,) = re.findall(r"^code: (.*)$", harness(tmp_path, "show", "fused_loss").stdout, re.MULTILINE)
    assert (tmp_path / package / "__init__.py").is_file(), "a package is named by its folder"


def test_show_says_once_why_several_strategies_do_not_go_with_one(here: Here, tmp_path: Path) -> None:
    _, shown, _ = here(tmp_path, "show", "int8_activations")
    assert "\nnot with float8_matmul, naive_product, tiled_product: that keeps what it multiplies by itself" in shown
    assert shown.count("that keeps what it multiplies by itself") == 1


def test_show_names_the_file_of_a_strategy_whose_form_is_an_object(tmp_path: Path) -> None:
    plugin = tmp_path / "kept.py"
    plugin.write_text(
        "from harness import Strategy, hookimpl\n"
        "class Same:\n"
        "    def __call__(self, parts):\n"
        "        return parts\n"
        "@hookimpl\n"
        "def harness_strategies():\n"
        "    return [Strategy('kept', rewrites=(), on={'torch': Same()}, about='Keep all.')]\n"
    )
    words = ["show", "kept", "--plugin", str(plugin), "--results", str(tmp_path)]
    done = CliRunner().invoke(commands.app, words)
    assert done.exit_code == 0 and f"\ncode: {plugin}\n" in done.stdout, done.output


def test_show_finds_results_under_a_former_name(tmp_path: Path) -> None:
    (file,) = store.newest(ROOT / "results" / "token_windows")
    folder = tmp_path / "token_windows" / "machine"
    folder.mkdir(parents=True)
    (folder / file.name).write_text(file.read_text().replace('"document_windows"', '"documents"'))
    former = harness(tmp_path, "show", "document_windows", "--results", str(tmp_path))
    current = harness(tmp_path, "show", "document_windows", "--results", str(file.parent.parent))
    assert "measured in torch: typically" in former.stdout and former.stdout == current.stdout


@pytest.mark.parametrize("words", [("decoder",), ("--schema", "suite")])
def test_results_of_what_has_none_are_refused(words: tuple[str, ...], here: Here, tmp_path: Path) -> None:
    status, shown, said = here(tmp_path, "show", *words, "--results", tmp_path)
    assert (status, shown) == (2, "") and said.startswith("harness: --results goes with a strategy")


def test_without_a_verb_there_is_the_help(here: Here, tmp_path: Path) -> None:
    status, shown, said = here(tmp_path)
    assert status == 2 and "\n  run " in shown + said and (shown + said).startswith("Usage:")


@pytest.mark.parametrize("words", [("list",), ("report", "r.jsonl", "--format", "json")])
def test_a_full_disk_under_what_is_printed_is_said_in_a_sentence(words: tuple[str, ...], tmp_path: Path) -> None:
    case = Case(workload="decoder", shape={"tokens": 64}, place="torch/cpu", corpus="x", tokenizer="bytes")
    store.append(tmp_path / "r.jsonl", Record(slot=Slot(case=case.digest(), kind="memory"), case=case))
    with open("/dev/full", "w") as full:
        done = subprocess.run([*HARNESS, *words], cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True)
    what = "a file, or what it prints, cannot be written (No space left on device)"
    assert (done.returncode, done.stderr) == (2, f"harness: {what}: free some space\n")


def test_show_tells_the_sizes_and_presets_of_a_workload(tmp_path: Path) -> None:
    done = harness(tmp_path, "show", "decoder")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\ntokens: default 512; tokens in a row" in done.stdout
    assert "\nfeed: swiglu, gelu; default swiglu\n" in done.stdout
    assert "\npreset tiny: layers=2, width=64" in done.stdout


@pytest.mark.parametrize("name", ["decoder", "causal_lm", "documents", "scoring", "temporal"])
def test_a_size_without_a_plain_default_is_shown_by_what_it_begins_with(name: str) -> None:
    done = CliRunner().invoke(commands.app, ["show", name])
    assert done.exit_code == 0 and "PydanticUndefined" not in done.output
    assert ("\nchanges: default {}; values in place" in done.output) == (name == "causal_lm")
    assert ("\nlayers: by default the configuration's" in done.output) == (name == "causal_lm")
    assert ("\ndocuments: default " in done.output) == (name == "documents"), "it was a strategy's name as well"
    assert ("\nevaluations: " in done.output) == (name in ("decoder", "causal_lm", "documents"))


def test_what_is_written_to_a_file_is_printed_as_well_where_a_format_is_asked_for(tmp_path: Path) -> None:
    document = tmp_path / "NOTES.md"
    document.write_text("<!-- generated: scans -->\n<!-- end: scans -->\n")
    words = ["report", str(ROOT / "results" / "scans"), "--into", str(document)]
    assert CliRunner().invoke(commands.app, words).stdout == ""
    assert "| baseline" in document.read_text()
    asked = CliRunner().invoke(commands.app, [*words, "--format", "csv"])
    alone = CliRunner().invoke(commands.app, [*words[:2], "--format", "csv"])
    assert asked.exit_code == 0 and asked.stdout == alone.stdout and asked.stdout.count("\n") > 3


def test_python_m_harness_is_harness_and_its_help_names_the_verbs(tmp_path: Path) -> None:
    assert HARNESS[1:] == ["-m", "harness"]
    done = harness(tmp_path, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: python -m harness [OPTIONS] COMMAND")
    named = re.findall(r"^  (\w+)  +\S", done.stdout.partition("Commands:")[2], re.MULTILINE)
    assert named == list(commands.VERBS)


@pytest.mark.parametrize(("name", "model"), [("suite", Suite), ("record", Record)])
def test_show_prints_the_schema_of_a_file(name: str, model: type[Suite] | type[Record], tmp_path: Path) -> None:
    done = harness(tmp_path, "show", "--schema", name)
    assert (done.returncode, done.stderr) == (0, "")
    schema = json.loads(done.stdout)
    assert schema["properties"].keys() == model.model_fields.keys()
    assert schema["additionalProperties"] is False, "an editor marks a misspelt key"
    assert all(field.get("description") for field in schema["properties"].values())
    assert schema.get("required", []) == [key for key, field in model.model_fields.items() if field.is_required()]


def test_a_schema_needs_no_plugin(here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("harness.contract.plugins.load")  # as where one of them is broken
    status, shown, said = here(tmp_path, "show", "--schema", "suite")
    assert (status, said) == (0, "") and "properties" in json.loads(shown)


# What a shell completes


@pytest.mark.parametrize(
    ("typed", "values"),
    [
        ("run long_context_g", ["long_context_gpu"]),
        ("run sma", ["small_windows", "small.yaml"]),
        ("run suites/lo", []),
        ("doctor --limits smo", ["smoke"]),
        ("bisect smo", ["smoke"]),
        ("plan --gpu h", ["h100", "h200"]),
        ("plan --model mixtral", ["mixtral-8x7b"]),
        ("fit --place jax/", ["jax/cpu", "jax/cuda"]),
        ("plan --with fused_l", ["fused_loss"]),
        ("plan --with chunked_loss(chunk=512),checkpo", ["chunked_loss(chunk=512),checkpoint"]),
        ("plan --with chunked_loss(chunk=512,fused_l", []),
        ("advise --allow ", ["reordered", "lower_precision", "approximate"]),
        ("show fused_l", ["fused_loss"]),
        ("show deco", ["decoder"]),
    ],
)
def test_a_shell_completes_values_without_a_framework(typed: str, values: list[str], tmp_path: Path) -> None:
    suite_in(tmp_path)
    asked = {"COMP_WORDS": f"harness {typed}", "COMP_CWORD": str(typed.count(" ") + 1)}
    asked["_HARNESS_COMPLETE"] = "complete_bash"
    program, note = tmp_path / "harness", tmp_path / "note"
    program.write_text(WATCHED)
    command = [sys.executable, str(program), str(note)]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **asked}, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.split() == values, done.stderr
    assert json.loads(note.read_text())[1] == []


# What is refused


def sentence(code: object, out: str, err: str) -> str:
    """Return the one sentence of what was refused."""
    assert code == 2, err
    assert "Traceback" not in err
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("harness: ")
    assert lines[0].isprintable()
    return lines[0]


@contextmanager
def unsignalled() -> Iterator[None]:
    """Put back afterwards what the command line does with signals."""
    handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    hook = sys.unraisablehook
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for each, handler in handlers.items():
            signal.signal(each, handler)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Here]:
    """Run the command line in a folder, but within this process: return its status, and what it printed."""

    def run(folder: Path, *arguments: str) -> tuple[object, str, str]:
        monkeypatch.chdir(folder)
        for name, value in environment(folder).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["harness", *arguments])
        with pytest.raises(SystemExit) as ended:
            commands.main()
        return ended.value.code, *capfd.readouterr()

    with unsignalled():
        yield run


def nothing(folder: Path) -> None:
    """Prepare nothing."""


def misspelt(folder: Path) -> None:
    suite_in(folder, ("- nothing", "- nothign"))


def file_in_the_place_of_results(folder: Path) -> None:
    suite_in(folder)
    (folder / "results").write_text("in its place")


def file_in_the_place_of_the_cache(folder: Path) -> None:
    suite_in(folder)
    (folder / "cache").write_text("in its place")


def short_corpus(folder: Path) -> None:
    suite_in(folder, ("corpus: zipf", "corpus: short.txt"))
    (folder / "short.txt").write_text("too short")


def results_of_nobody(folder: Path) -> None:
    (folder / "results").mkdir()


def fine_suite(folder: Path) -> None:
    suite_in(folder)


def document_without_marks(folder: Path) -> None:
    (folder / "r.jsonl").touch()
    (folder / "README.md").write_text("no marks")


def stored_advice(folder: Path) -> None:
    shutil.copytree(ROOT / "results" / "advice", folder / "advice")


def broken_plugin(folder: Path) -> None:
    suite_in(folder)
    (folder / "broken.py").write_text("raise ValueError('two\\nlines')\n")


REFUSALS: dict[str, tuple[Callable[[Path], None], str, list[str]]] = {
    "a misspelt name": (nothing, "show chekpoint", ["'chekpoint'", "did you mean 'checkpoint'?"]),
    "nothing to show": (nothing, "show", ["strategy", "--schema"]),
    "two things to show": (nothing, "show decoder --schema suite", ["strategy", "--schema"]),
    "a misspelt schema": (nothing, "show --schema suit", ["'suit'", "'record'"]),
    "a misspelt verb": (nothing, "rnu x.yaml", ["rnu"]),
    "a missing suite": (nothing, "run missing.yaml", ["missing.yaml", "cannot be read", "give the path"]),
    "no suite": (nothing, "run", ["SUITE"]),
    "a folder for a suite": (results_of_nobody, "run results", ["results", "give the path of a"]),
    "a bad option": (fine_suite, "run small.yaml --round 3", ["--round"]),
    "a bad value": (fine_suite, "run small.yaml --rounds many", ["--rounds", "whole number"]),
    "too many rounds": (fine_suite, "run small.yaml --rounds 101", ["--rounds", "100"]),
    "a misspelt strategy": (misspelt, "run small.yaml", ["small.yaml, line 9", "did you mean 'nothing'?"]),
    "another place": (fine_suite, "run small.yaml --place torch/cup", ["small.yaml", "did you mean 'torch/cpu'?"]),
    "no such row": (fine_suite, "run small.yaml -k offload", ["small.yaml", "'offload'", "harness list"]),
    "a file for results": (file_in_the_place_of_results, "run small.yaml", ["'results/small", "--results"]),
    "a cache that cannot be": (file_in_the_place_of_the_cache, "run small.yaml", ["folder with XDG_CACHE_HOME"]),
    "documents as csv": (document_without_marks, "report r.jsonl --documents c.yaml --format csv", ["--documents"]),
    "a short corpus": (short_corpus, "run small.yaml", ["short.txt", "9"]),
    "a missing plugin": (fine_suite, "run small.yaml --plugin gone.py", ["gone.py", "give the path"]),
    "a broken plugin": (broken_plugin, "list --plugin broken.py", ["broken.py", "ValueError", "mend it"]),
    "no results": (results_of_nobody, "report results", ["'results'", "run a suite first"]),
    "a name that no file can have": (nothing, f"plan {'x' * 300}", ["File name too long", "name another path"]),
    "a page of advice": (stored_advice, "report advice --page page.html", ["no room for", "as markdown"]),
    "results without a record": (document_without_marks, "report r.jsonl", ["no record in 'r.jsonl'"]),
    "a missing document": (document_without_marks, "report r.jsonl --into gone.md", ["gone.md"]),
    "nowhere": (nothing, "report nowhere", ["'nowhere'", "name a results file"]),
    "tokens without a model": (nothing, "plan --tokens 64", ["--tokens", "goes with --model"]),
    "a misspelt row of a model": (nothing, "plan --model gpt2 --with checkpointt", ["harness: --with: there is no "]),
    "a misspelt place of a model": (nothing, "plan --model gpt2 --place torch/gpu", ["harness: --place: there is no "]),
    "no such row of a model": (nothing, "plan --model gpt2 -k muon", ["harness: --model gpt2: no strategy's name "]),
    "undivided ranks": (nothing, "plan --model gpt2 --ranks 2 --with adam_8bit", ["harness: --ranks: no strategy "]),
    "no cases": (nothing, "plan", ["either a SUITE", "--model"]),
    "a suite and a model": (fine_suite, "plan small.yaml --model gpt2", ["either a SUITE", "--model"]),
    "charts of no pictures": (results_of_nobody, "report results -k loss", ["-k", "give --pictures FOLDER"]),
    "rows of no suite": (nothing, "doctor -k loss", ["-k", "goes with --limits SUITE"]),
    "commits of no repository": (fine_suite, "bisect small.yaml --good HEAD", ["no repository of git here"]),
    "a row that is nearly there": (fine_suite, "plan small.yaml -k nothign", ["contains 'nothign'", "mean 'nothing'?"]),
    "a strategy of a plugin": (
        misspelt,
        "plan small.yaml",
        ["did you mean 'nothing'? One of a plugin needs `--plugin"],
    ),
    "a misspelt size": (fine_suite, "fit small.yaml --over token", ["'token' is not a size", "did you mean 'tokens'?"]),
    "a misspelt card": (nothing, "plan --model gpt2 --gpu rtx409", ["no card 'rtx409'; did you mean 'rtx4090'?"]),
    "a misspelt budget": (nothing, "plan --model gpt2 --budget eight", ["budget: 'eight' is not a size"]),
    "a size with gaps": (fine_suite, "fit small.yaml --over width --predict-only", ["width", "takes 34 but not 33"]),
}


def test_the_version_is_printed(tmp_path: Path, here: Here) -> None:
    status, shown, _ = here(tmp_path, "--version")
    assert (status, shown) == (0, f"harness {harness_package.__version__}\n")


@pytest.mark.parametrize("name", REFUSALS)
def test_a_mistake_is_one_sentence_with_place_and_remedy(tmp_path: Path, name: str, here: Here) -> None:
    prepare, arguments, words = REFUSALS[name]
    prepare(tmp_path)
    told = sentence(*here(tmp_path, *arguments.split()))
    for word in words:
        assert word in told


def test_a_terminal_without_the_letters_of_a_suite_gets_their_numbers(tmp_path: Path) -> None:
    case = Case(workload="decoder", shape={"tokens": 64}, place="torch/cpu", corpus="x", tokenizer="bytes")
    slot = Slot(case=case.digest(), kind="memory")
    store.append(tmp_path / "r.jsonl", Record(slot=slot, case=case, status="error", origin=Origin(suite="Maß 模")))
    env = {**environment(tmp_path), "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([*HARNESS, "report", "r.jsonl"], cwd=tmp_path, env=env, capture_output=True, timeout=300)
    assert done.returncode == 0 and "# Maß \\u6a21\n".encode("latin-1") in done.stdout, (done.stdout, done.stderr)


def test_a_path_without_rights_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Here) -> None:
    exists = Path.exists

    def refused(path: Path) -> bool:
        if "closed" in path.parts:
            raise PermissionError(13, "Permission denied", str(path))
        return exists(path)

    with monkeypatch.context() as patch:  # root has all rights
        patch.setattr(Path, "exists", refused)
        code, out, err = here(tmp_path, "report", "closed/results")
    assert sentence(code, out, err) == "harness: 'closed/results' cannot be used (Permission denied): name another path"


@pytest.mark.parametrize("name", ["a misspelt name", "a bad value", "a misspelt strategy"])
def test_a_process_ends_with_that_sentence(tmp_path: Path, name: str) -> None:
    prepare, arguments, words = REFUSALS[name]
    prepare(tmp_path)
    done = harness(tmp_path, *arguments.split())
    assert words[-1] in sentence(done.returncode, done.stdout, done.stderr)


def test_lines_that_are_no_records_are_warned_of(tmp_path: Path) -> None:
    (tmp_path / "torn.jsonl").write_text('{"status": "o')
    done = harness(tmp_path, "report", "torn.jsonl")
    assert "torn.jsonl:1: this line is not a record" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_number_of_a_line_is_written_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    problem = "mine.jsonl:100: this line is not a record (:bug: [red])"
    screen.note(problem)
    screen.out.print(problem)
    assert capsys.readouterr() == (f"{problem}\n", f"{problem}\n")


def test_results_of_a_shape_that_is_no_longer_known_are_no_crash(tmp_path: Path) -> None:
    case = Case(workload="decoder", shape={"tokens": "many"}, place="torch/cpu", corpus="zipf", tokenizer="bytes")
    store.append(tmp_path / "r.jsonl", Record(slot=Slot(case=case.digest(), kind="memory"), case=case))
    done = harness(tmp_path, "report", "r.jsonl")
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 2)
    assert "baseline" in done.stdout or "tokens" in done.stderr


# One run, interrupted, resumed, reported, and begun again


@dataclass(frozen=True)
class Runs:
    """What a user sees when a run is interrupted, resumed to its end, reported, and started once more."""

    folder: Path
    interrupted: "subprocess.CompletedProcess[str]"
    kept: list[Record]
    leftover: list[int]
    resumed: "subprocess.CompletedProcess[str]"
    peak_kib: int
    heavy: list[str]
    reported: "subprocess.CompletedProcess[str]"
    again: "subprocess.CompletedProcess[str]"
    files: list[Path]


def results_in(folder: Path) -> list[Path]:
    return sorted((folder / "results").rglob("*.jsonl"))


def interrupt_when(folder: Path, happened: Callable[[], bool]) -> "subprocess.CompletedProcess[str]":
    """Start the run, press Ctrl-C as soon as something has happened, and wait for the end."""
    with open(folder / "out", "w+") as out, open(folder / "err", "w+") as err:
        # A shell starts what it puts in the background with SIGINT ignored, and children inherit that.
        listening = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
        command = [
            sys.executable,
            "-c",
            f"{listening}; from harness.cli.commands import main; main()",
            "run",
            "small.yaml",
        ]
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
        try:
            until = time.monotonic() + 120
            while not happened() and process.poll() is None and time.monotonic() < until:
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            code = process.wait(60)
        finally:
            process.kill()
    return subprocess.CompletedProcess(command, code, (folder / "out").read_text(), (folder / "err").read_text())


def carriers(run_id: str) -> list[int]:
    """Find the processes that still carry the id of a run."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("HARNESS_RUN") == run_id:
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, rates_in: Callable[[Path], Path]) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    rates_in(folder / "cache")
    suite_in(folder)
    interrupted = interrupt_when(folder, lambda: any('"memory"' in path.read_text() for path in results_in(folder)))
    kept = [record for path in results_in(folder) for record in store.read(path)[0]]
    # A worker that was starting at that very moment ends itself as soon as it misses its parent.
    until = time.monotonic() + 15
    while (leftover := carriers(kept[0].origin.run_id) if kept else []) and time.monotonic() < until:
        time.sleep(0.2)

    note, wrapper = folder / "note.json", folder / "watched.py"
    wrapper.write_text(WATCHED)
    command = [sys.executable, str(wrapper), str(note), "run", "small.yaml"]
    resumed = subprocess.run(
        command, cwd=folder, env=environment(folder), capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    peak_kib, heavy = json.loads(note.read_text())
    reported = harness(folder, "report", "results")
    before = results_in(folder)
    again = interrupt_when(folder, lambda: results_in(folder) != before)
    return Runs(folder, interrupted, kept, leftover, resumed, peak_kib, heavy, reported, again, results_in(folder))


def test_an_interruption_ends_with_130_and_keeps_what_was_measured(runs: Runs) -> None:
    assert runs.interrupted.returncode == 130, runs.interrupted.stderr
    assert runs.interrupted.stdout.startswith("# As small as it gets\n\n## decoder"), "what there is"
    assert "Traceback" not in runs.interrupted.stderr
    kinds = Counter(record.slot.kind for record in runs.kept if record.slot)
    assert (kinds["predict"], kinds["memory"], kinds["time"]) == (3, 1, 0)
    assert runs.leftover == [], "a worker outlived the run"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("where", [RuntimeError("release unlocked lock"), ValueError("Error calling function `str`")])
def test_a_signal_that_ends_as_an_error_of_what_it_came_in_ends_the_run(where, number, code, monkeypatch, capsys):
    def app(standalone_mode: bool) -> None:
        with suppress(BaseException):  # as compiled code does: the error that follows has no cause
            signal.raise_signal(number)
        raise where

    monkeypatch.setattr(commands, "app", app)
    with unsignalled(), pytest.raises(SystemExit) as ended:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for ignored in (signal.SIGTERM, signal.SIGHUP):  # who starts the tests may ignore them
            signal.signal(ignored, signal.SIG_DFL)
        commands.main()
    assert ended.value.code == code and "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_that_comes_while_an_object_is_finalized_ends_the_run(number, code, tmp_path) -> None:
    (tmp_path / "finalized.py").write_text(FINALIZED.format(number=int(number)))
    ended = harness(tmp_path, "list", "--plugin", "finalized")
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr and "ignored" not in ended.stderr


def test_an_interruption_says_that_the_same_command_resumes(runs: Runs) -> None:
    assert "the same command resumes" in runs.interrupted.stderr.splitlines()[-1]


def test_an_interruption_that_ends_as_an_error_of_what_it_came_in_shows_what_there_is(
    runs, here, tmp_path, monkeypatch
) -> None:
    def interrupted(*_: object) -> Path:
        (file,) = tmp_path.rglob("*.jsonl")
        store.append(file, Record())
        with suppress(KeyboardInterrupt):  # as the lock of a console that is being printed to
            signal.raise_signal(signal.SIGINT)
        raise RuntimeError("release unlocked lock")

    monkeypatch.setattr(session, "run", interrupted)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    suite_in(tmp_path)
    shutil.copytree(runs.files[0].parents[1], tmp_path / "results" / "small")
    for later in runs.files[1:]:
        (tmp_path / later.relative_to(runs.folder)).unlink()
    code, stdout, stderr = here(tmp_path, "run", "small.yaml")
    assert code == 130 and stdout.startswith("# As small as it gets\n\n## decoder")
    assert "Traceback" not in stderr and "the same command resumes" in stderr


def test_an_interruption_of_a_resumed_run_shows_that_run_though_another_was_begun_since(
    runs, here, tmp_path, monkeypatch
) -> None:
    folder = tmp_path / "results" / "small" / runs.files[0].parent.name
    folder.mkdir(parents=True)
    resumed, other = folder / "20200101T000000Z-a.jsonl", folder / "20200102T000000Z-b.jsonl"
    shutil.copy(runs.files[0], resumed)
    store.append(other, Record(origin=Origin(utc="2020-01-02T00:00:01+00:00")))

    touched = [resumed]

    def interrupted(*_: object) -> Path:
        if touched:
            store.append(touched.pop(), Record())
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "run", interrupted)
    suite_in(tmp_path)
    for shown in ("# As small as it gets\n\n## decoder", ""):
        code, stdout, _ = here(tmp_path, "run", "small.yaml")
        assert code == 130 and stdout[: len(shown) or None] == shown, "what it has not touched is of another run"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("plan --model gpt2 --tokens many", "--tokens: give a whole number"),
        ("plan --model gpt2 --tokens 0", "--tokens: give at least 1"),
        ("run smoke --rounds 101", "--rounds: give at most 100"),
        (
            "report results --format xml",
            "--format: 'xml' is not one of 'markdown', 'csv', 'json', 'bencher', 'benchmark_action'",
        ),
        ("report results --colour", "there is no option --colour"),
        ("doctor --limit", "there is no option --limit; did you mean --limits?"),
        ("compare old", "give NEW: --help says what it is"),
        ("fit smoke", "give --over: --help says what it is"),
        ("fit smoke --over", "--over needs a value"),
        ("new", "give kind: strategy"),
        ("list checkpoint loss", "there are words too many: checkpoint loss"),
        ("history results --by machine", "--by: 'machine' is not 'commit', the only choice"),
        ("measure smoke", "there is no verb 'measure': `harness --help` lists them"),
    ],
)
def test_a_word_that_no_option_takes_is_refused_in_our_words(here, tmp_path, words: str, said: str) -> None:
    code, _, stderr = here(tmp_path, *words.split())
    assert code == 2 and stderr == f"harness: {said}\n"


def test_results_in_which_nothing_was_measured_hide_none_of_those_that_come_with_the_harness(here, tmp_path) -> None:
    _, usual, _ = here(tmp_path, "show", "checkpoint")
    file = tmp_path / "results" / "mine_fit" / "machine" / "20260101T000000Z-a.jsonl"
    file.parent.mkdir(parents=True)
    store.append(file, Record(slot=Slot(case="a", kind="predict")))
    assert "measured in torch: typically" in usual and here(tmp_path, "show", "checkpoint")[1] == usual
    store.append(file, Record(slot=Slot(case="a", kind="memory")))
    assert "measured: never alone in 'results'" in here(tmp_path, "show", "checkpoint")[1]


def test_tables_of_an_open_vocabulary_have_titles_that_tell_them_apart(tmp_path, here, monkeypatch) -> None:
    """Their size is that of the corpus, which is known before anything runs."""
    (tmp_path / "words.txt").write_text("a few words again and again " * 400)
    suite = suite_in(
        tmp_path,
        ("corpus: zipf\ntokenizer: bytes", "corpus: words.txt\ntokenizer: words"),
        ("heads: 2", "heads: [1, 2]"),
    )
    suite.write_text(re.sub(r"vocabulary: \d+", "vocabulary: 0", suite.read_text()))
    titles, made, make = [], [], prepare_data.made

    def counted(data, spec):
        made.append(spec)
        return make(data, spec)

    def plan(watcher, measured):
        hear(watcher, measured)
        titles.extend(watcher.title_of[each.baseline.comparison_key] for each in measured.comparisons)
        raise SuiteError("enough")

    hear = Watcher.plan
    monkeypatch.setattr(prepare_data, "made", counted)
    monkeypatch.setattr(Watcher, "plan", plan)
    assert "enough" in here(tmp_path, "run", "small.yaml")[2]
    assert len(set(titles)) == 2 and all("heads" in title for title in titles)
    assert len(made) == 1, "a text is counted once, whatever reads it"


def test_every_name_that_a_package_offers_can_be_imported() -> None:
    for package in (harness_package, records):
        assert all(hasattr(package, name) for name in package.__all__)


def test_to_begin_anew_and_to_measure_only_what_is_missing_is_refused(here, tmp_path) -> None:
    suite_in(tmp_path)
    code, _, stderr = here(tmp_path, "run", "small.yaml", "--fresh", "--once")
    assert code != 0 and "--fresh begins anew, and --once keeps what is there: give one of the two" in stderr
    assert not list(tmp_path.rglob("*.jsonl"))


def test_the_same_command_resumes_and_measures_nothing_twice(runs: Runs) -> None:
    assert runs.resumed.returncode == 0, runs.resumed.stderr
    done = sum(record.slot is not None for record in runs.kept)
    assert re.search(rf"^resuming: {done} of about 12 results", runs.resumed.stderr, re.MULTILINE)
    found, problems = store.read(runs.files[0])
    assert problems == []
    assert found[: len(runs.kept)] == runs.kept, "what was there stays as it was"
    assert [record.heading.title for record in found if record.slot is None] == ["As small as it gets"] * 2, (
        "each run says what it runs"
    )
    slots = Counter(record.slot for record in found if record.slot)
    assert len([slot for slot in slots if slot.repeat == 0]) == 12, "more only where memory had to be measured again"
    assert {slot.kind for slot in slots if slot.repeat} <= {"memory"}
    assert set(slots.values()) == {1}
    assert all(r.times.rest_seconds > 0 for r in found if r.slot and r.slot.kind == "time"), "they took turns"
    assert {record.status for record in found} == {"ok"}, [record.evidence for record in found]
    assert len({record.origin.run_id for record in found}) == 2


def test_the_records_hold_what_was_measured(runs: Runs) -> None:
    found, _ = store.read(runs.files[0])
    of_kind = {kind: [r for r in found if r.slot and r.slot.kind == kind] for kind in ("memory", "time", "numerics")}
    measured = [record.case.label for record in of_kind["memory"] if record.case]
    assert list(dict.fromkeys(measured)) == LABELS  # what lies near a bound is measured three times
    assert all(r.memory.peak_host_bytes is not None and len(r.memory.losses) == 3 for r in of_kind["memory"])
    assert len({record.memory.batches_digest for record in of_kind["memory"]} - {None}) == 1
    assert all(len(record.times.step_seconds) >= 2 and min(record.times.step_seconds) > 0 for record in of_kind["time"])
    assert [record.numerics.verdict for record in of_kind["numerics"] if record.numerics][:2] == [
        "bit_exact",
        "bit_exact",
    ]
    assert all(record.origin.suite == "small" and record.origin.machine and record.origin.versions for record in found)


def rows_of(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_a_run_prints_a_table_with_verdicts(runs: Runs) -> None:
    assert runs.resumed.stdout.startswith("# As small as it gets\n\n## decoder on torch/cpu, 96 tokens")
    header, _, *rows = rows_of(runs.resumed.stdout)
    assert (header[0], header[-1]) == ("strategy", "verdict")
    assert [row[0].strip("`") for row in rows] == LABELS
    assert rows[0][-1] == "baseline"
    verdicts = {row[0].strip("`"): row[-1] for row in rows[1:]}
    for label, verdict in verdicts.items():
        due = {"control"} if label == "nothing" else {"saves", "same memory", "costs"}  # one round says nothing of time
        withheld = f"\n- {label}: no verdict: " in runs.resumed.stdout  # where a noisy machine gave several words
        assert verdict == "withheld" if withheld else verdict in due
    assert [row[-2] for row in rows[:2]] == ["bit_exact", "bit_exact"]
    assert rows[2][-2] in ("bit_exact", "reassociated")


def test_a_report_prints_the_same_table(runs: Runs) -> None:
    assert (runs.reported.returncode, runs.reported.stderr) == (0, "")
    tables = runs.reported.stdout.partition("\n## ")[2].strip()
    shown = runs.resumed.stdout.partition("\n## ")[2]
    assert tables and shown.startswith(tables)
    answers = shown.removeprefix(tables).split("\n")
    (verdict,) = (row[-1] for row in rows_of(tables) if row[0].strip("`") == LABELS[-1])
    if verdict == "withheld":  # on a noisy machine: of the one row that could be chosen nothing is said
        assert answers == [""] * len(answers)
    else:
        (last,) = filter(None, answers)
        assert last.startswith("- decoder on torch/cpu"), "the last line is the answer"


def test_a_complete_run_is_followed_by_a_new_file(runs: Runs) -> None:
    assert "resuming" not in runs.again.stderr
    assert runs.again.returncode == 130, runs.again.stderr
    assert len(runs.files) == 2
    assert len({path.parent for path in runs.files}) == 1
    assert runs.files[0].parent.parent == runs.folder / "results" / "small"
    complete, started = ({record.origin.run_id for record in store.read(path)[0]} for path in runs.files)
    assert not complete & started, "the complete file was written to"


def test_the_parent_process_stays_small(runs: Runs) -> None:
    assert runs.heavy == []
    assert runs.peak_kib < PARENT_LIMIT


@pytest.mark.long
def test_what_would_exceed_the_memory_is_said_before_anything_runs_and_skipped_or_tried(
    tmp_path: Path, cache: Path, made_up: Path
) -> None:
    suite_in(tmp_path)
    words = ("run", "small.yaml", "--rounds", "0", "--plugin", made_up)
    skipped = harness(tmp_path, *words, "--max-bytes", "1B")
    assert skipped.returncode == 0, skipped.stderr
    told = skipped.stderr.splitlines()
    (at,) = (number for number, line in enumerate(told) if line.startswith("warning: 3 of 3 cases are predicted"))
    assert "skipped: baseline, nothing, checkpoint + fused_loss(chunk=64)" in told[at], "--try-all runs them no more"
    assert not any(line.startswith("[") for line in told[:at]), "something ran before"
    assert skipped.stdout.count("skipped_guard") == 3 and "0 MiB are allowed by --max-bytes: set a" in skipped.stdout
    bounded = harness(tmp_path, *words, "--max-bytes", "1B", "--try-all")
    assert bounded.stdout.count("skipped_guard") == 3 and "tried all the same" not in bounded.stderr
    made_up.write_text(made_up.read_text() + "\nfrom harness.machine import facts\nfacts.free_to_use = lambda: 1\n")
    small = harness(tmp_path, *words)
    assert "skipped (--try-all runs them): baseline, nothing, checkpoint + fused_loss(chunk=64)" in small.stderr
    assert small.stdout.count("skipped_guard") == 3
    tried = harness(tmp_path, *words, "--try-all")
    assert "tried all the same" in tried.stderr and tried.stderr.startswith("resuming")
    assert "skipped_guard" not in tried.stdout and "| bit_exact" in tried.stdout


@pytest.mark.parametrize(("options", "command"), [([], "command"), (["--fresh"], "command without --fresh")])
def test_an_interruption_names_a_command_that_resumes(
    options: list[str], command: str, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "run", interrupted)
    suite_in(tmp_path)
    code, _, stderr = here(tmp_path, "run", "small.yaml", *options)
    last = f"interrupted: what is measured is kept; the same {command} resumes"
    assert code == 130 and stderr.splitlines()[-1] == last
