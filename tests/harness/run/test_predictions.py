"""Predictions side by side: the same as one after another, and nothing left when nobody waits for them."""

import ast
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import harness
from harness.contract import plugins
from harness.contract.place import Place
from harness.records import Applied, Case, Origin, Prediction, Record
from harness.run import prediction_cache, predictions, template

LOADED = plugins.load()
SHAPE = {"layers": 1, "width": 32, "heads": 2, "vocabulary": 300, "batch": 1}


def cases(count: int) -> list[Case]:
    """Cases of growing length, every second one with a strategy."""
    shape = LOADED.workloads["decoder"].shape
    return [
        Case(
            workload="decoder",
            shape=shape(**SHAPE, tokens=64 + 16 * at).model_dump(),
            place="torch/cpu",
            corpus="drawn",
            tokenizer="none",
            strategies=(Applied(name="checkpoint", knobs={"every": 1}),) if at % 2 else (),
        )
        for at in range(count)
    ]


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictions.facts, "threads", lambda: 2)


@pytest.mark.long
def test_side_by_side_gives_each_case_what_one_after_another_gives(two_cores, monkeypatch):
    given = cases(5)
    started = []
    run = predictions.runner.run
    monkeypatch.setattr(predictions.runner, "run", lambda task, *rest: started.append(task.cases) or run(task, *rest))
    together = list(predictions.of_cases(given, {}, LOADED))
    assert sorted(map(len, started)) == [2, 3], "two processes"
    monkeypatch.setattr(predictions.facts, "threads", lambda: 1)
    alone = list(predictions.of_cases(given, {}, LOADED))
    assert len(started) == 3, "a third"
    peaks = [
        {case.digest(): record.prediction.predicted_peak_bytes for case, record in found} for found in (together, alone)
    ]
    assert peaks[0] == peaks[1] and len(peaks[0]) == 5 and None not in peaks[0].values()


def test_what_no_machine_runs_is_not_predicted_for_a_device_that_is_absent():
    gpu = {"workload": "scoring", "shape": {}, "place": "torch/cuda", "corpus": "drawn", "tokenizer": "none"}
    reason = predictions.impossible(LOADED, Case(**gpu, strategies=(Applied(name="mapped_cache"),)))
    assert reason is not None and "mapped_cache" in reason
    assert predictions.impossible(LOADED, Case(**gpu, strategies=(Applied(name="int8_cache"),))) is None


def test_under_a_quota_there_are_fewer_processes_of_fewer_threads(two_cores, monkeypatch):
    started: list[int] = []

    def run(task, threads, *_):
        started.append(threads)
        return [Record(case=case, origin=Origin(worker_seconds=0.1)) for case in task.cases]

    monkeypatch.setattr(predictions.runner, "run", run)
    assert len(list(predictions.of_cases(cases(4), {}, LOADED))) == 4 and started == [2, 2]
    monkeypatch.setattr(predictions.facts, "threads", lambda: 1)
    assert len(list(predictions.of_cases(cases(4), {}, LOADED))) == 4 and started[2:] == [1]


def test_one_process_predicts_cases_of_as_many_ranks(two_cores, monkeypatch):
    """Ranks share the threads of the machine, so what one of two has would be too few for a case of one."""
    mixed = [case.model_copy(update={"ranks": 1 + at % 3 % 2}) for at, case in enumerate(cases(6))]
    started: list[tuple[Case, ...]] = []
    sent = {}

    def run(task, *_):
        started.append(task.cases)
        sent.update({case.digest(): case for case in task.cases})
        return [Record(case=case, origin=Origin(worker_seconds=0.1)) for case in task.cases]

    monkeypatch.setattr(predictions.runner, "run", run)
    list(predictions.of_cases(mixed, {}, LOADED))
    assert {len({case.ranks for case in piece}) for piece in started} == {1}
    assert sent.keys() == {case.digest() for case in mixed} and sum(map(len, started)) == 6


@pytest.mark.long
def test_what_was_predicted_is_read_from_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    run = predictions.runner.run
    monkeypatch.setattr(
        predictions.runner, "run", lambda task, *rest: started.append(len(task.cases)) or run(task, *rest)
    )

    def peaks(count: int, **rest: object) -> dict[str, int | None]:
        predicted = prediction_cache.of_cases(cases(count), tmp_path, {}, LOADED, **rest)
        return {case.digest(): record.prediction.predicted_peak_bytes for case, record in predicted}

    first = peaks(2)
    assert peaks(2) == first and None not in first.values() and sum(started) == 2
    assert peaks(3).items() > first.items() and sum(started) == 3, "the third alone"
    assert peaks(2, calls=True) == first and sum(started) == 5, "call by call is another prediction"
    assert peaks(2, calls=True) == first and sum(started) == 5
    more = predictions.facts.threads() + 1
    with monkeypatch.context() as patch:
        patch.setattr(predictions.facts, "threads", lambda: more)
        assert peaks(1).items() <= first.items() and sum(started) == 6, "with more threads it may be another"
    for path in tmp_path.iterdir():
        path.write_text("{")
    assert peaks(2) == first and sum(started) == 8, "what cannot be read is predicted anew"


PARTIAL = """
from functools import partial

from harness import Strategy, hookimpl


def scaled(factor, parts):
    return parts


@hookimpl
def harness_strategies():
    return [Strategy("scaled", ("loss",), {"torch": partial(scaled, 2)}, "Scale; keep nothing.")]
"""
PLAIN = PARTIAL.replace("factor, ", "").replace("partial(scaled, 2)", "scaled")


def keyed(path: Path) -> str:
    """Return the name of the stored prediction of a plugin's strategy."""
    (case,) = cases(1)
    loaded = plugins.load((str(path),))
    return prediction_cache.key(case.model_copy(update={"strategies": (Applied(name="scaled"),)}), loaded, {})


def test_a_prediction_is_one_for_all_budgets() -> None:
    (case,) = cases(1)
    keys = {
        prediction_cache.key(case.model_copy(update={"budget_bytes": budget}), LOADED, {})
        for budget in (None, 1 << 30, 2 << 30)
    }
    assert len(keys) == 1
    assert prediction_cache.key(case.model_copy(update={"shape": case.shape | {"tokens": 7}}), LOADED, {}) not in keys


def test_an_edit_of_a_strategy_that_is_a_partial_makes_new_predictions(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(PARTIAL)
    before = keyed(path)
    assert keyed(path) == before
    path.write_text(PARTIAL.replace("return parts", "return parts  # another"))
    assert keyed(path) != before, "in the same process, as in a notebook"


OWN = """
from harness import hookimpl, of_torch


def make(shape):
    raise NotImplementedError


@hookimpl
def harness_workloads():
    return [of_torch("mine", make)]
"""


def test_an_edit_of_a_model_of_ones_own_makes_new_predictions(tmp_path: Path) -> None:
    """The function that builds its parts is written in the harness."""
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    (case,) = cases(1)

    def own() -> str:
        return prediction_cache.key(case.model_copy(update={"workload": "mine"}), plugins.load((str(path),)), {})

    before = own()
    assert own() == before
    path.write_text(OWN.replace("raise NotImplementedError", "return None"))
    assert own() != before


INSTRUMENT = """
from harness import hookimpl


@hookimpl(wrapper=True)
def harness_measure(task):
    record = yield
    return record.model_copy(update={"extra": {"counted": 1}})
"""


def test_with_another_instrument_predictions_are_made_anew(tmp_path: Path) -> None:
    """What it notes of a prediction is stored with it."""
    path = tmp_path / "mine.py"
    (case,) = cases(1)
    keys = [prediction_cache.key(case, LOADED, {})]
    for text in (INSTRUMENT, INSTRUMENT.replace("1}", "2}")):
        path.write_text(text)
        loaded = plugins.load((str(path),))
        keys.append(prediction_cache.key(case, loaded, {}))
        assert prediction_cache.key(case, loaded, {}) == keys[-1]
    assert len(set(keys)) == 3


def test_a_strategy_from_elsewhere_depends_on_the_file_that_registers_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    text = PARTIAL.replace("partial(scaled, 2)", "partial(checkpoint.on_torch, every=2)")
    path.write_text(f"from strategies.activations import checkpoint\n{text}")
    before = keyed(path)
    path.write_text(path.read_text().replace("every=2", "every=4"))
    assert keyed(path) != before


def test_of_two_plugin_files_of_one_name_the_own_one_is_read(tmp_path: Path) -> None:
    paths = [tmp_path / folder / "mine.py" for folder in ("one", "two")]
    for path, text in zip(paths, (PLAIN, OWN), strict=True):
        path.parent.mkdir()
        path.write_text(text)
    (case,) = cases(1)
    case = case.model_copy(update={"strategies": (Applied(name="scaled"),)})
    before = prediction_cache.key(case, plugins.load(tuple(map(str, paths))), {})
    paths[0].write_text(PLAIN + "# another")
    assert prediction_cache.key(case, plugins.load(tuple(map(str, paths))), {}) != before


WALKING = """
from harness import hookimpl
from walking.fast import kernel


@hookimpl
def harness_strategies():
    return kernel.harness_strategies()
"""


def test_a_strategy_that_is_a_package_depends_on_its_group_and_on_no_other(tmp_path: Path, monkeypatch) -> None:
    files = {"__init__": WALKING, "fast/__init__": "", "fast/_shared": "", "fast/kernel/__init__": PLAIN, "slow": ""}
    for name, text in files.items():
        (tmp_path / "walking" / f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "walking" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    before = keyed(Path("walking"))
    (tmp_path / "walking" / "slow.py").write_text("another = 1")
    assert keyed(Path("walking")) == before
    (tmp_path / "walking" / "fast" / "_shared.py").write_text("another = 1")
    assert keyed(Path("walking")) != before


GROUPS = {"fsdp": "sharding", "fused_loss": "loss", "checkpoint": "activations"}


@pytest.mark.parametrize(("name", "group"), GROUPS.items())
def test_the_strategies_of_the_harness_depend_on_their_group_alone(name: str, group: str) -> None:
    read: list[str] = []
    (case,) = cases(1)
    case = case.model_copy(update={"strategies": (Applied(name=name),)})
    prediction_cache.key(case, LOADED, {}, code=lambda module: read.append(module.__name__) or "")
    assert sorted(read) == ["harness.workloads", f"strategies.{group}"]


def test_what_the_predictor_imports_of_the_harness_is_what_a_prediction_depends_on() -> None:
    root = Path(harness.__file__).parent
    predictor = ast.parse((root / "worker" / "prediction.py").read_text(encoding="utf-8"))
    imported: set[Path] = set()
    for node in ast.walk(predictor):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("harness."):
            base = root.joinpath(*str(node.module).split(".")[1:])
            for each in node.names:
                ways = (base / f"{each.name}.py", base.with_suffix(".py"), base / "__init__.py")
                imported.add(next(filter(Path.is_file, ways)))
    imported.remove(root / "records" / "__init__.py")  # types of what is written
    rooms = [root / room for room in prediction_cache.ROOMS]
    assert len(imported) > 10 and all(room.exists() for room in rooms)
    assert [path for path in imported if not any(path.is_relative_to(room) for room in rooms)] == []


def test_on_a_processor_of_another_maker_or_other_types_cases_are_predicted_anew(tmp_path: Path, monkeypatch) -> None:
    predicted: list[int] = []

    def of_cases(open_, *rest, **options):
        predicted.append(len(open_))
        return ((case, Record(prediction=Prediction(predicted_peak_bytes=1))) for case in open_)

    monkeypatch.setattr(predictions, "of_cases", of_cases)
    intel, amd = ("GenuineIntel", "Xeon"), ("AuthenticAMD", "EPYC")
    narrow = amd[0], "EPYC without AVX-512"
    for (vendor, cpu), types in (
        (intel, []),
        (intel, []),
        (amd, []),
        (narrow, []),
        (intel, []),
        (intel, ["avx512_bf16"]),
    ):
        monkeypatch.setattr(prediction_cache.processor, "vendor", lambda vendor=vendor: vendor)
        known = {"cpu": cpu, "half_precision": types}
        monkeypatch.setattr(prediction_cache.facts, "facts", lambda known=known: known)
        list(prediction_cache.of_cases(cases(2), tmp_path, {}, LOADED))
    assert predicted == [2, 0, 2, 2, 0, 2]


@pytest.mark.parametrize(("place", "made"), [("torch/cpu", [1, 0]), ("torch/cuda", [1, 1])])
def test_the_card_decides_a_prediction_on_a_gpu_alone(
    place: str, made: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predicted: list[int] = []
    known = Record(prediction=Prediction(predicted_peak_bytes=7))

    def of_cases(cases: list[Case], *rest: object, **options: object) -> Iterator[tuple[Case, Record]]:
        predicted.append(len(cases))
        return iter([(case, known) for case in cases])

    monkeypatch.setattr(predictions, "of_cases", of_cases)
    case = cases(1)[0].model_copy(update={"place": Place.parse(place)})
    for card in ("h100", "l4"):
        list(prediction_cache.of_cases([case], tmp_path, {}, LOADED, card=card))
    assert predicted == made


def test_code_is_read_once_for_all_cases_of_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []
    of_module = prediction_cache.digests.of_module
    monkeypatch.setattr(prediction_cache.digests, "of_module", lambda module: read.append(module) or of_module(module))
    monkeypatch.setattr(predictions, "of_cases", lambda cases, *rest, **options: iter(()))
    list(prediction_cache.of_cases(cases(6), tmp_path, {}, LOADED))
    assert len(read) == len(set(read)) == 2, "of the workload, and of a strategy"


def test_a_plugin_file_depends_on_what_it_imports_of_code_that_is_worked_on(tmp_path: Path, monkeypatch) -> None:
    """As a model of one's own, in a package that is installed to be edited; nothing of it is imported for that."""
    files = {
        "scaling_by_hand.py": "import scaling_kit.deep, numpy\n",
        "scaling_kit/__init__.py": "",
        "scaling_kit/deep.py": "raise NotImplementedError\n",
        "scaling_folder/deep.py": "",
        "scaling_alone.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    imports = "    import scaling_folder.deep\n    from scaling_by_hand import kernel\n"
    path = tmp_path / "mine.py"
    path.write_text(PLAIN.replace("def scaled(parts):\n", f"def scaled(parts):\n{imports}"))
    for name in files:
        before = keyed(path)
        assert keyed(path) == before
        (tmp_path / name).write_text("another = 1")
        assert (keyed(path) != before) == (name != "scaling_alone.py"), name
        (tmp_path / name).write_text(files[name])


def test_what_lies_beside_a_plugin_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(PLAIN)
    before = keyed(path)
    (tmp_path / "other.py").write_text("anything")
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere.py")
    assert keyed(path) == before


def test_what_lies_beside_a_module_that_is_in_no_package_is_not_read(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "scaling_alone.py"
    path.write_text(PLAIN)
    monkeypatch.syspath_prepend(tmp_path)
    before = keyed(Path("scaling_alone"))
    (tmp_path / "other.py").write_text("anything")
    assert keyed(Path("scaling_alone")) == before
    path.write_text(PLAIN + "# another")
    assert keyed(Path("scaling_alone")) != before


def test_a_link_that_leads_nowhere_in_a_package_is_passed_over(tmp_path: Path, monkeypatch) -> None:
    package = tmp_path / "scaling"
    package.mkdir()
    (package / "__init__.py").write_text(PLAIN)
    (package / "gone.py").symlink_to(tmp_path / "nowhere.py")
    monkeypatch.syspath_prepend(tmp_path)
    assert keyed(Path("scaling"))


def test_what_was_predicted_before_an_interruption_is_kept(two_cores, tmp_path, monkeypatch):
    begun = []

    def run(task, *rest):
        begun.append(task)
        later = len(begun) > 2
        time.sleep(0.1)
        if later and any(tmp_path.iterdir()):
            raise KeyboardInterrupt
        record = Record(prediction=Prediction(predicted_peak_bytes=1), origin=Origin(worker_seconds=0.1))
        return [record] * len(task.cases)

    monkeypatch.setattr(predictions.runner, "run", run)
    with pytest.raises(KeyboardInterrupt):
        list(prediction_cache.of_cases(cases(60), tmp_path, {}, LOADED))
    assert 0 < len(list(tmp_path.glob("*.json"))) < 60


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)} - template.processes()


def test_when_the_reader_stops_all_workers_end(two_cores):
    seen, before = [], children()

    def stop(phase: str) -> None:
        seen.append(phase)

    found = predictions.of_cases(cases(40), {}, LOADED, watch=stop)
    started = time.monotonic()
    first = next(found)
    found.close()
    assert first[1].prediction.predicted_peak_bytes and seen
    assert children() <= before
    assert time.monotonic() - started < 60


def test_an_interruption_ends_all_workers(two_cores):
    def interrupt(phase: str) -> None:
        raise KeyboardInterrupt

    before = children()
    with pytest.raises(KeyboardInterrupt):
        list(predictions.of_cases(cases(4), {}, LOADED, watch=interrupt))
    assert children() <= before


def test_a_prediction_that_cannot_be_stored_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a mount that is for reading alone, to remove a file fails as well."""

    def refuse(*names: object, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    record = Record(prediction=Prediction(predicted_peak_bytes=1))
    for call in ("write_text", "unlink"):
        monkeypatch.setattr(Path, call, refuse)
    prediction_cache.write(tmp_path / "mine.json", record)
    assert list(tmp_path.iterdir()) == []
