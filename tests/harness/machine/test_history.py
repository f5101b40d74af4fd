"""Which code has changed since a commit: by what it does, not by how it is written."""

import ast
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path, PurePath

import pytest

from harness.contract import plugins
from harness.contract.place import Place
from harness.machine import history
from harness.records import Case, Kind, Origin, Record, Slot

TORCH, JAX = Place.parse("torch/cpu"), Place.parse("jax/cpu")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one file that decides figures, and one commit."""
    file = tmp_path / "harness" / "worker" / "memory.py"
    file.parent.mkdir(parents=True)
    file.write_text('"""Says something."""\nPEAK = 1\nmade(PEAK)\nclass A:\n    one: int = 1\n')
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    monkeypatch.setattr(history, "ROOT", tmp_path)
    history.changed.cache_clear()
    return tmp_path


def git(root: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(root: Path) -> str:
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "a change")
    return git(root, "rev-parse", "HEAD")


def test_what_a_file_says_of_itself_or_states_for_predictions_changes_nothing(project: Path) -> None:
    before = git(project, "rev-parse", "HEAD")
    file = project / "harness" / "worker" / "memory.py"
    stated = "class A:\n    one: int = 1\n    conflicts: dict = {}\n\ndef holds(extent):\n    return 2\n"
    called = "made(PEAK, conflicts={'one': 'it is so'})\n"
    file.write_text(f'"""Says something else, with a comment."""\n\n# why\nPEAK   =  1\n{called}\n{stated}')
    (project / "harness" / "report").mkdir()
    (project / "harness" / "report" / "table.py").write_text("ROWS = 2\n")
    assert history.changed(before, ()) == ()


def test_refusing_a_value_changes_nothing_that_was_measured(project: Path) -> None:
    file = project / "harness" / "worker" / "memory.py"
    file.write_text("from harness import Parts\ndef on(every):\n    return every\n")
    before = commit(project)
    refusing = "    if every < 0:\n        raise ValueError('it is negative')\n    knobs.above_0('on', every=every)\n"
    file.write_text(f"from harness import Parts, knobs\ndef on(every):\n{refusing}    return every\n")
    assert history.changed(before, ()) == ()
    for doing in ("    if every < 0:\n        every = 0\n", "    other.above_0('on', every=every)\n"):
        history.changed.cache_clear()
        file.write_text(f"from harness import Parts\ndef on(every):\n{doing}    return every\n")
        assert history.changed(before, ()) == ("harness/worker/memory.py",), doing


def test_what_reads_children_counts_for_results_that_have_some(project: Path) -> None:
    file = project / "harness" / "worker" / "memory.py"
    file.write_text("def _read_children(worker):\n    return worker\n")
    before = commit(project)
    file.write_text("def _read_children(worker):\n    return 2 * worker\n")
    case = Case(workload="decoder", shape={}, place=Place("torch", "cpu"), corpus="zipf", tokenizer="none")
    alone = Record(case=case, slot=Slot(case="x", kind="memory"), origin=Origin(commit=before))
    assert history.since([alone], {}) == history.Roles((), (), ())
    with_some = alone.model_copy(update={"child_peak_bytes": 0})
    assert history.since([alone, with_some], {}) == history.Roles((), ("harness/worker/memory.py",), ())
    predicted = with_some.model_copy(update={"slot": Slot(case="x", kind="predict")})
    assert history.since([alone, predicted], {}) == history.Roles((), (), ()), "no table shows those of a prediction"
    history.changed.cache_clear()
    file.write_text("def _read_child(worker):\n    return worker\n")
    assert history.since([alone], {}) == history.Roles((), ("harness/worker/memory.py",), ()), "any other function"


def test_what_looks_at_batches_of_documents_counts_for_results_on_documents(project: Path) -> None:
    file = project / "harness" / "worker" / "memory.py"
    file.write_text("def _sizes_of(parts):\n    return parts\n")
    before = commit(project)
    file.write_text("def _sizes_of(parts):\n    return 2 * parts\n")
    for workload, measuring in (("decoder", ()), ("documents", ("harness/worker/memory.py",))):
        case = Case(workload=workload, shape={}, place=Place("torch", "cpu"), corpus="zipf", tokenizer="none")
        record = Record(case=case, slot=Slot(case="x", kind="memory"), origin=Origin(commit=before))
        assert history.since([record], {}) == history.Roles((), measuring, ())


def test_how_gradients_of_a_users_own_model_are_taken_counts_for_own_models_alone(project: Path) -> None:
    file = project / "harness" / "workloads" / "settings.py"
    file.parent.mkdir()
    file.write_text("def _apart(grads):\n    return grads\n")
    before = commit(project)
    file.write_text("def _apart(grads):\n    return list(grads)\n")
    for workload, run in (("decoder", ()), ("mine", ("harness/workloads/settings.py",))):
        case = Case(workload=workload, shape={}, place=Place("torch", "cpu"), corpus="zipf", tokenizer="none")
        record = Record(case=case, slot=Slot(case="x", kind="memory"), origin=Origin(commit=before))
        assert history.since([record], {}) == history.Roles(run, (), ())


@pytest.mark.parametrize(
    ("names", "places"),
    [
        (history.OF_CHILDREN, ("run/runner.py", "machine/memory.py")),
        (history.OF_DOCUMENTS, ("worker/batch_sizes.py",)),
        (history.OF_USER_MODELS, ("workloads/decoder/_torch.py",)),
    ],
)
def test_the_functions_that_decide_figures_of_some_results_alone_are_there_and_nowhere_else(names, places) -> None:
    def defined(paths: Iterable[Path]) -> list[str]:
        trees = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
        return [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]

    rooms = [history.ROOT / "harness" / name for name in places]
    others = [path for path in (history.ROOT / "harness").rglob("*.py") if path not in rooms]
    assert names <= set(defined(rooms)) and names.isdisjoint(defined(others))


def test_the_workloads_of_documents_are_those_whose_data_are_documents() -> None:
    workloads = plugins.load().workloads
    assert {*history.DOCUMENTED} == {name for name, each in workloads.items() if each.data == "documents"}


def test_what_a_file_does_is_a_change_committed_or_not(project: Path) -> None:
    before = git(project, "rev-parse", "HEAD")
    (project / "harness" / "worker" / "memory.py").write_text("PEAK = 2\n")
    assert history.changed(before, ()) == ("harness/worker/memory.py",)
    history.changed.cache_clear()
    after = commit(project)
    assert history.changed(before, ()) == ("harness/worker/memory.py",)
    assert history.changed(after, ()) == ()
    (project / "harness" / "worker" / "memory.py").unlink()
    history.changed.cache_clear()
    assert history.changed(after, ()) == ("harness/worker/memory.py",)


def test_a_file_that_is_half_written_is_a_change(project: Path) -> None:
    before = git(project, "rev-parse", "HEAD")
    (project / "harness" / "worker" / "memory.py").write_text("def peak(\n")
    assert history.changed(before, ()) == ("harness/worker/memory.py",)


def test_files_of_strategies_are_asked_for_by_name(project: Path) -> None:
    before = git(project, "rev-parse", "HEAD")
    for name in ("mine.py", "other.py"):
        (project / name).write_text("SAVES = 1\n")
    after = commit(project)
    assert history.changed(before, ("mine.py",)) == ("mine.py",)
    assert history.changed(after, ("mine.py", "other.py")) == ()


def test_what_cannot_be_known_is_none(project: Path) -> None:
    head = git(project, "rev-parse", "HEAD")
    assert history.changed("0" * 12, ()) is None, "a commit that this history lacks"
    assert history.changed(f"{head[:12]}-dirty", ()) is None, "code that was never committed"
    assert history.changed("unversioned", ()) is None
    assert history.changed("a\0b", ()) is None, "what no commit is called"
    assert history.changed("\ud800", ()) is None


def test_digests_tell_what_changed_where_the_commit_is_gone(project: Path) -> None:
    (project / "mine.py").write_text("SAVES = 1\n")
    written = history.digests(["mine.py"])
    assert list(written) == ["harness/worker/memory.py", "mine.py"] and history.differing(written) == ()
    (project / "mine.py").write_text("SAVES = 2\n")
    (project / "harness" / "worker" / "time.py").write_text("STEPS = 4\n")
    assert history.differing(written) == ("harness/worker/time.py", "mine.py")
    (project / "mine.py").unlink()
    assert "mine.py" in history.differing(written)


def test_a_strategy_is_its_file_or_its_folder_and_what_its_group_shares() -> None:
    strategies = plugins.load().strategies
    assert "strategies/loss/chunked_loss.py" in history.files_of([strategies["chunked_loss"]])
    assert "strategies/loss/fused_loss" in history.files_of([strategies["fused_loss"]])
    assert "strategies/sharding/_torch.py" in history.files_of([strategies["fsdp"]])


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("fsdp", "strategies/sharding/shares.py"),
        ("nested_checkpoint", "strategies/activations/checkpoint.py"),
        ("automatic_loss", "strategies/loss/fused_loss/_torch.py"),
        ("adam_8bit", "strategies/optimizers/adam_8bit.py"),
        ("adam_8bit", "strategies/optimizers/_coded"),
    ],
)
def test_what_a_strategy_imports_and_what_sets_it_count_as_well(name: str, file: str) -> None:
    assert (history.ROOT / file).exists()
    files = history.files_of([plugins.load().strategies[name]])
    assert file in files
    assert "strategies/sharding/__init__.py" not in files and "strategies/optimizers/muon.py" not in files


def test_each_file_that_decides_has_one_role_and_counts_only_where_it_runs() -> None:
    names = [
        "strategies/loss/cut_loss/_jax.py",
        "harness/workloads/decoder/_torch.py",
        "harness/workloads/scoring/_torch.py",
        "harness/workloads/halves.py",
        "harness/worker/memory.py",
        "harness/worker/prediction.py",
        "harness/backends/jax.py",
        "harness/backends/torch_memory.py",
        "harness/worker/calibration.py",
    ]
    torch = history.roles(names, ["decoder"], [TORCH])
    assert torch.run == ("harness/workloads/decoder/_torch.py", "harness/workloads/halves.py")
    assert torch.measuring == ("harness/worker/memory.py",)
    assert torch.predicting == ("harness/worker/prediction.py", "harness/backends/torch_memory.py")
    jax = history.roles(names, ["scoring"], [JAX])
    assert jax.run == ("strategies/loss/cut_loss/_jax.py", "harness/workloads/halves.py"), "no part of torch"
    assert "harness/backends/jax.py" in jax.measuring
    assert "harness/workloads/scoring/_torch.py" in history.roles(names, ["scoring"], [TORCH]).run
    assert "harness/workloads/decoder/_torch.py" in history.roles(names, ["scoring"], [TORCH]).run, "it is a decoder"


@pytest.mark.parametrize("name", ["_rows", "_kernel", "_pallas"])
def test_what_only_a_gpu_runs_counts_for_places_with_one(name: str) -> None:
    kernel = f"strategies/loss/fused_loss/{name}.py"
    assert (history.ROOT / kernel).is_file()
    assert history.roles([kernel], ["decoder"], [TORCH, JAX]).run == ()
    assert history.roles([kernel], ["decoder"], [TORCH, Place.parse("torch/cuda")]).run == (kernel,)
    assert history.roles(["strategies/loss/fused_loss/_torch.py"], ["decoder"], [TORCH]).run


USERS = {"user_model": {"causal_lm"}, "whole_run": {"causal_lm", "decoder"}}
"""Which rooms name one that stands apart; all others do not."""


@pytest.mark.parametrize("name", history.APART)
def test_no_other_workload_uses_one_that_is_apart(name: str) -> None:
    root = history.ROOT / "harness" / "workloads"
    others = [path for path in root.rglob("*.py") if name not in path.relative_to(root).parts]
    assert len(others) > 20
    users = {
        path.relative_to(root).parts[0] for path in others if f"harness.workloads.{name}" in path.read_text("utf-8")
    }
    assert users == USERS.get(name, set())


def test_rooms_that_are_apart_count_where_cases_need_them() -> None:
    plain = Case(workload="decoder", shape={}, place="torch/cpu", corpus="drawn", tokenizer="none")
    assert history.rooms([plain]) == {"decoder"}
    assert history.rooms([plain.model_copy(update={"shape": {"evaluations": 2}})]) == {"decoder", "whole_run"}
    for workload, room in (("causal_lm", "causal_lm"), ("causal_lm_documents", "causal_lm"), ("mine", "user_model")):
        assert history.rooms([plain.model_copy(update={"workload": workload})]) == {room}
    assert {*history.SHIPPED, *history.ROOM} == set(plugins.load().workloads)
    shared = "harness/workloads/user_model/kinds.py"
    names = ["harness/workloads/user_model/_torch.py", shared, "harness/workloads/whole_run/_torch.py"]
    assert history.roles(names, history.rooms([plain]), [TORCH]).run == ()
    assert history.roles(names, {"user_model"}, [TORCH]).run == (names[0], shared)
    assert history.roles(names, {"causal_lm"}, [TORCH]).run == (shared,), "published decoders use that file of it"


def test_what_a_room_uses_of_another_is_said() -> None:
    text = "".join(path.read_text("utf-8") for path in (history.ROOT / "harness/workloads/causal_lm").glob("*.py"))
    files = {f"{name.replace('.', '/')}.py" for name in re.findall(r"harness\.workloads\.(user_model\.\w+)", text)}
    assert files == set(history.SHARED)


@pytest.mark.parametrize("name", ["memory", "timing", "numerics", "process", "ranks"])
def test_what_measures_uses_nothing_that_is_said_to_predict(name: str) -> None:
    tree = ast.parse((history.ROOT / "harness" / "worker" / f"{name}.py").read_text(encoding="utf-8"))
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    modules = {
        each for node in froms for each in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
    }
    assert "harness.records" in {module[:15] for module in modules}, "imports were read"
    files = [f"{module.replace('.', '/')}.py" for module in modules]
    assert not history.roles(files, history.APART, [TORCH, JAX]).predicting


@pytest.mark.parametrize(("tool", "user"), [*zip(history.TOOLS, ["mapped_cache", "muon"], strict=True)])
def test_a_tool_of_strategies_counts_where_one_of_theirs_names_it(tool: str, user: str) -> None:
    assert (history.ROOT / tool).is_file()
    stem = PurePath(tool).stem
    rooms = [path for room in history.DECIDING for path in history._modules(history.ROOT / "harness" / room)]
    assert len(rooms) > 50
    assert not [path for path in rooms if stem in path.read_text(encoding="utf-8")], "the harness runs it"
    strategies = plugins.load().strategies
    with_it, without = (history.files_of([strategies[name]]) for name in (user, "checkpoint"))
    assert tool in with_it and tool in history.digests(with_it)
    assert tool not in without and tool not in history.digests(without)
    older = history.digests(with_it) | {tool: "0" * 10}
    assert history.differing(older, without) == () and history.differing(older, with_it) == (tool,)
    assert history.roles([tool], ["decoder"], [TORCH]).run == (tool,)


def test_every_file_that_is_said_to_predict_or_to_check_is_there() -> None:
    for pattern in (*history.PREDICTING, *history.CHECKING):
        assert list(history.ROOT.glob(pattern)), pattern


def test_nothing_that_runs_asks_what_is_stated() -> None:
    functions = {
        (path.name, function.name, node.attr)
        for path in (history.ROOT / "strategies").rglob("*.py")
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and node.attr in history.STATED
    }
    assert ("automatic.py", "holds", "holds") in functions, "calls were read"
    runs = {name for _, name, _ in functions} - {"holds"}
    assert runs <= {"harness_strategies"}, "it is asked where a strategy runs"
    assert {asked for _, name, asked in functions if name in runs} <= {"conflicts"}, "it is stated there, not asked"


def test_a_later_prediction_is_held_against_its_own_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    predictor, meter = "harness/backends/torch_kernels.py", "harness/worker/memory.py"
    changes: dict[str, tuple[str, ...] | None] = {"old": (predictor,), "new": (), "older": (predictor, meter)}
    monkeypatch.setattr(history, "changed", lambda commit, files, aside: changes.get(commit))
    case = Case(workload="decoder", shape={}, place=Place("torch", "cpu"), corpus="zipf", tokenizer="none")

    def record(kind: Kind, commit: str) -> Record:
        return Record(case=case, slot=Slot(case="x", kind=kind), origin=Origin(commit=commit))

    def since(*records: Record) -> history.Roles | None:
        return history.since([Record(origin=Origin(commit=records[0].origin.commit)), *records], {})

    first, measured, again = record("predict", "old"), record("memory", "old"), record("predict", "new")
    assert since(first, measured) == history.Roles((), (), (predictor,))
    assert since(first, measured, again) == history.Roles((), (), ()), "it takes the place of the first"
    assert since(record("predict", "older"), record("memory", "older"), again) == history.Roles((), (meter,), ())
    assert since(again, record("memory", "gone")) is None, "of a commit that nobody knows"
    searched = Record(case=case, origin=Origin(commit="old"))
    assert since(searched) == history.Roles((), (), (predictor,)), "limits rest on predictions"
