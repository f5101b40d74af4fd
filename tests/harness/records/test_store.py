"""Records are appended whole, survive whatever happens to the file, and name their case the same everywhere."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from harness import Place
from harness.records import Applied, Case, Claim, Fit, Heading, Memory, Origin, Phase, Record, Slot, Task, Times, store
from harness.records.store import StoreError
from harness.records.task import TokenFile, id_type
from harness.report.results import read

ROOT = Path(__file__).resolve().parents[3]
CASE = Case(
    workload="decoder",
    shape={"tokens": 64, "feed": "swiglu", "ignored": 0.15, "kv_heads": None},
    place="torch/cpu",
    corpus="zipf",
    tokenizer="bytes",
    strategies=(Applied(name="checkpoint"), Applied(name="fused_loss", knobs={"chunk": 64, "exact": True, "r": 0.1})),
    seed=3,
    budget_bytes=1 << 30,
)
FULL = Record(
    slot=Slot(case="c", kind="memory", round=0, repeat=2),
    position=4,
    case=CASE,
    status="oom_budget",
    evidence={"message": 'it said "no"\nand then\u2028nothing', "phase": None, "n": 1},
    flags=("noisy", "unstable"),
    missing={"peak_host_bytes": "the kernel keeps the mark"},
    extra={"tool": [1, {"a": None}]},
    origin=Origin(run_id="run", suite="try", attempt=2, utc="2026-01-01T00:00:00+00:00"),
    memory=Memory(
        phases=(Phase(name="source", entry_bytes=0, peak_bytes=5, exit_bytes=-3),),
        peak_host_bytes=0,
        losses=(0.1 + 0.2, 5e-324, -0.0, 1e308),
    ),
)


def file_with(tmp_path: Path, *lines: bytes) -> Path:
    path = tmp_path / "results.jsonl"
    path.write_bytes(b"".join(lines))
    return path


def line_of(record: Record) -> bytes:
    return store.encoded(record)


# The file


def test_what_is_appended_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    written = [FULL, Record(), FULL.model_copy(update={"status": "ok", "position": 3})]
    for record in written:
        store.append(path, record)
    found, problems = store.read(path)
    assert (found, problems) == (written, [])
    assert str(found[0].memory.losses[2]) == "-0.0"
    assert path.read_bytes().count(b"\n") == 3, "one line each"


def test_former_names_of_strategies_are_read_as_the_present_ones(tmp_path: Path) -> None:
    claim = Claim(id="1", says="old and older hold less", that="peak(old) < 2 * peak('cold + old(chunk=4)')")
    path = file_with(tmp_path, line_of(Record(heading=Heading(claims=(claim,)))), line_of(FULL))
    (run, record), problems = store.read(path, {"old": "new", "checkpoint": "recompute"})
    assert run.heading.claims[0].that == "peak(new) < 2 * peak('cold + new(chunk=4)')"
    assert run.heading.claims[0].says == claim.says
    assert record.case is not None and record.slot == FULL.slot and not problems
    assert record.case.label == CASE.label.replace("checkpoint", "recompute")
    assert store.read(path)[0][1] == FULL, "as it was written"


@given(
    text=st.text(st.characters(exclude_categories=["Cs"])),
    losses=st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=3),
    number=st.none() | st.integers(0, 1 << 62),
)
def test_any_text_and_any_number_comes_back(text: str, losses: "list[float]", number: "int | None") -> None:
    record = Record(
        evidence={"message": text}, notes={text: text}, memory=Memory(losses=tuple(losses), peak_host_bytes=number)
    )
    assert store.parse(line_of(record)) == record


def test_a_torn_last_line_is_closed_before_the_next_record(tmp_path: Path) -> None:
    path = file_with(tmp_path, line_of(FULL), line_of(FULL)[:40])
    store.append(path, Record(origin=Origin(run_id="after")))
    found, problems = store.read(path)
    assert [record.origin.run_id for record in found] == ["run", "after"]
    assert len(problems) == 1
    assert problems[0].startswith(f"{path}:2: ")


@pytest.mark.parametrize("cut", [0, 1, 5, -2, -1])
def test_a_file_cut_anywhere_loses_one_record_at_most(tmp_path: Path, cut: int) -> None:
    path = file_with(tmp_path, line_of(FULL), line_of(FULL)[:cut] if cut else b"")
    store.append(path, Record(origin=Origin(run_id="after")))
    found, _ = store.read(path)
    assert found[0] == FULL
    assert found[-1].origin.run_id == "after"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"not json", "not a record"),
        (b"[1, 2]", "not a record"),
        (b"3", "not a record"),
        (b"null", "not a record"),
        (b'"text"', "not a record"),
        (b'{"status": "ok"', "not a record"),
        (b"\xff\xfe{}", "not a record"),
        (b"[" * 100_000, "not a record"),
        (b"\0\0\0\0", "not a record"),
        (b'{"schema_version": 3}', "newer than 2: update"),
        (b'{"schema_version": "1"}', "format '1'"),
        (b'{"schema_version": null}', "format None"),
        (b'{"status": "fine"}', "'status'"),
        (b'{"peak_host_byte": 3}', "'peak_host_byte'"),
        (b'{"peak_host_bytes": "3"}', "'memory.peak_host_bytes'"),
        (b'{"peak_host_bytes": 3.5}', "'memory.peak_host_bytes'"),
        (b'{"losses": [NaN]}', "not a record"),
        (b'{"schema_version": 2, "prediction": {"predicted_peak_bytes": -1}}', "'prediction.predicted_peak_bytes'"),
        (b'{"step_seconds": [1, Infinity]}', "not a record"),
        (b'{"schema_version": 2, "extra": {"x": -Infinity}}', "not a record"),
        (b'{"schema_version": 2, "extra": {"x": [1, 1.5e999]}}', "not a record"),
        (b'{"case": {"workload": "decoder"}}', "'case."),
        (b'{"slot": {"case": "c", "kind": "guess"}}', "'slot.kind'"),
    ],
)
def test_a_line_that_is_no_record_is_reported_and_left_out(tmp_path: Path, line: bytes, words: str) -> None:
    path = file_with(tmp_path, line_of(FULL), line + b"\n", b"\n", line_of(Record(origin=Origin(run_id="last"))))
    found, problems = store.read(path)
    assert [record.origin.run_id for record in found] == ["run", "last"]
    assert len(problems) == 1
    assert problems[0].startswith(f"{path}:2: ")
    assert words in problems[0]
    assert len(problems[0]) < len(str(path)) + 300


@pytest.mark.parametrize(
    "line", [b'{"a\\u001b[31m\\nb": 1}', b'{"schema_version": "\\u001b[31m"}', b'{"status": "\\u001b[31m\\n"}']
)
def test_a_problem_repeats_nothing_that_a_terminal_obeys(tmp_path: Path, line: bytes) -> None:
    _, problems = store.read(file_with(tmp_path, line))
    assert len(problems) == 1
    assert problems[0].isprintable()


@given(st.binary(max_size=60))
def test_any_bytes_are_records_or_problems(line: bytes) -> None:
    try:
        assert isinstance(store.parse(line), Record)
    except ValueError as error:
        assert type(error) is ValueError, "a sentence, not what a library raises"


def test_nan_is_refused_where_it_is_made_and_where_it_is_written(tmp_path: Path) -> None:
    nan = float("nan")
    with pytest.raises(ValidationError):
        Record(memory=Memory(losses=(nan,)))
    with pytest.raises(ValidationError):
        Record(memory=Memory(slope_bytes_per_step=float("inf")))
    path = tmp_path / "results.jsonl"
    # A copy is not validated: written as null, such a loss would make the whole record unreadable.
    memory = FULL.memory.model_copy(update={"losses": (1.0, nan)})
    for unchecked in ({"memory": memory}, {"evidence": {"loss": nan}}, {"extra": {"a": [float("-inf")]}}):
        with pytest.raises(ValueError, match="JSON compliant"):
            store.append(path, FULL.model_copy(update=unchecked))
    assert not path.exists() or path.read_bytes() == b"", "half a record was written"


def test_a_record_has_figures_of_one_kind() -> None:
    with pytest.raises(ValidationError, match="not of memory and times"):
        Record(memory=Memory(peak_host_bytes=1), times=Times(step_seconds=(1.0,)))


OLD = {
    "run_id": "r",
    "suite": "s",
    "machine": {"cpus": 2},
    "slot": {"case": "c", "kind": "time", "round": 1},
    "step_seconds": [0.5, 0.25],
    "base_rss_bytes": 7,
    "child_peak_bytes": 3,
    "pinned_host_bytes": None,
}


def test_a_record_of_the_first_format_is_read_into_its_rooms() -> None:
    record = store.parse(json.dumps(OLD))
    assert record.times == Times(step_seconds=(0.5, 0.25), base_rss_bytes=7)
    assert record.memory == Memory() and record.child_peak_bytes == 3
    assert (record.origin.run_id, record.origin.machine) == ("r", {"cpus": 2})
    title = store.parse(json.dumps({"title": "t", "claims": [{"id": "A", "says": "s", "that": "1 < 2"}]}))
    assert (title.heading.title, title.heading.claims[0].id) == ("t", "A")


def tracked() -> list[Path]:
    """Return the results that git tracks; without a checkout all that are there."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "results"], capture_output=True, text=True)
    files = [ROOT / line for line in listed.stdout.splitlines() if line.endswith(".jsonl")]
    return sorted(filter(Path.exists, files)) or sorted((ROOT / "results").glob("*/*/*.jsonl"))


@pytest.mark.parametrize("path", tracked(), ids=lambda path: path.parts[-3])
def test_committed_results_are_read_whole(path: Path) -> None:
    records, problems = store.read(path)
    assert records and not problems
    assert any(record.memory.peak_host_bytes or record.limits or record.prediction.floor_bytes for record in records)


def test_a_record_refuses_unknown_keys_and_other_types() -> None:
    with pytest.raises(ValidationError):
        Record.model_validate({"peak_bytes": 3})
    with pytest.raises(ValidationError):
        Record.model_validate({"memory": {"peak_host_bytes": True}})


def test_a_file_that_cannot_be_written_or_read(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"cannot be written to '.*folder' \(Is a directory\)"):
        (tmp_path / "folder").mkdir()
        store.append(tmp_path / "folder", FULL)
    with pytest.raises(StoreError, match="cannot be written"):
        store.append(tmp_path / "nowhere" / "results.jsonl", FULL)
    with pytest.raises(StoreError, match="cannot be read"):
        store.read(tmp_path / "nowhere.jsonl")


def test_a_full_disk_is_said() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    with pytest.raises(StoreError, match=r"No space left on device.*make room"):
        store.append(full, FULL)


# Finding results


def test_a_run_is_named_after_all_that_are_there_even_where_the_clock_was_set_back(tmp_path: Path) -> None:
    first = store.next_file(tmp_path, "abc")
    assert re.fullmatch(r"20\d{6}T\d{6}Z-abc\.jsonl", first.name)
    first.touch()
    second = store.next_file(tmp_path, "abc")
    assert second.name > first.name
    (tmp_path / "29991231T235959Z-abc.jsonl").touch()
    (tmp_path / "mine.jsonl").touch()
    assert store.next_file(tmp_path, "aaa").name == "30000101T000000Z-aaa.jsonl"


def test_newest_is_the_last_file_of_each_folder(tmp_path: Path) -> None:
    for name in ("a/m/20260101T000000Z-x.jsonl", "a/m/20260301T000000Z-x.jsonl", "a/m/20260201T000000Z-y.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "20250101T000000Z-x.jsonl").touch()
    (tmp_path / "b" / "table.md").touch()
    assert [str(path.relative_to(tmp_path)) for path in store.newest(tmp_path)] == [
        "a/m/20260301T000000Z-x.jsonl",
        "b/20250101T000000Z-x.jsonl",
    ]
    assert store.newest(tmp_path / "b" / "table.md") == [tmp_path / "b" / "table.md"]
    (tmp_path / "empty").mkdir()
    assert store.newest(tmp_path / "empty") == []
    with pytest.raises(StoreError, match=r"there is no '.*nowhere'"):
        store.newest(tmp_path / "nowhere")


def recorded(path: Path, utc: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    store.append(path, Record(origin=Origin(utc=utc)))
    return path


def test_newest_is_the_file_that_was_written_to_last_though_another_was_begun_since(tmp_path: Path) -> None:
    whole = recorded(tmp_path / "20260101T000000Z-x.jsonl", "2026-01-01T00:00:05+00:00")  # interrupted
    part = recorded(tmp_path / "20260101T000100Z-x.jsonl", "2026-01-01T00:01:10+00:00")  # with -k
    assert store.newest(tmp_path) == [part]
    recorded(whole, "2026-01-01T00:02:00+00:00")  # resumed
    assert store.newest(tmp_path) == [whole]
    recorded(part, "2026-01-01T00:02:00+00:00")
    assert store.newest(tmp_path) == [part], "of the same second the last one begun"
    recorded(whole, "no time")
    assert store.newest(tmp_path) == [part]


def test_results_of_several_suites_and_machines_in_one_folder_are_all_there(tmp_path: Path) -> None:
    for at, (suite, machine) in enumerate([("a", "m"), ("b", "m"), ("a", "n"), ("a", "m")]):
        path = tmp_path / f"2026010{at + 1}T000000Z-x.jsonl"
        store.append(path, Record(origin=Origin(suite=suite, machine={"name": machine})))
    assert [path.name[:8] for path in store.newest(tmp_path)] == ["20260102", "20260103", "20260104"]


def test_links_are_followed_and_a_circle_of_them_ends(tmp_path: Path) -> None:
    file = recorded(tmp_path / "elsewhere" / "data" / "m" / "20260101T000000Z-x.jsonl", "2026-01-01T00:00:00+00:00")
    results = tmp_path / "results"
    results.mkdir()
    (results / "mine").symlink_to(file.parents[1])
    (results / "round").symlink_to(results)
    assert store.newest(results) == [results / "mine" / "m" / file.name]
    assert [each.folder for each in read(store.newest(results), print)] == ["mine"]


def test_a_file_that_leads_nowhere_hides_no_other(tmp_path: Path) -> None:
    (tmp_path / "20250101T000000Z-x.jsonl").symlink_to(tmp_path / "gone.jsonl")
    file = recorded(tmp_path / "20260101T000000Z-x.jsonl", "2026-01-01T00:00:00+00:00")
    assert store.larger_before(file) is None and store.notes_of_parts(tmp_path) == []


def test_a_part_that_was_begun_before_the_whole_and_ended_after_it_is_seen_as_one(tmp_path: Path) -> None:
    def measured(name: str, utc: str, *tokens: int) -> Path:
        path = tmp_path / f"{name}.jsonl"
        for each in tokens:
            case = Case(workload="decoder", shape={"tokens": each}, place="torch/cpu", corpus="x", tokenizer="bytes")
            slot = Slot(case=f"{each} by {name}", kind="memory")
            store.append(path, Record(slot=slot, case=case, origin=Origin(utc=utc)))
        return path

    part = measured("20260101T000000Z-x", "2026-03-01T00:00:00+00:00", 64)
    whole = measured("20260201T000000Z-x", "2026-02-01T00:01:00+00:00", 64, 128)
    assert store.newest(tmp_path) == [part] and store.larger_before(part) == whole


def test_a_part_of_a_suite_that_was_run_after_the_whole_is_seen_as_one(tmp_path: Path) -> None:
    def run(name: str, *tokens: int) -> Path:
        path = tmp_path / f"{name}.jsonl"
        for each in tokens:
            case = Case(workload="decoder", shape={"tokens": each}, place="torch/cpu", corpus="x", tokenizer="bytes")
            store.append(path, Record(slot=Slot(case=f"{each} by {name}", kind="memory"), case=case))
        return path

    whole, part = run("20260101T000000Z-x", 64, 128), run("20260102T000000Z-x", 128)
    assert store.larger_before(part) == whole and store.larger_before(whole) is None
    assert store.larger_before(run("20260103T000000Z-x", 64, 128)) is None, "it has more than the one before"
    assert store.larger_before(run("20260104T000000Z-x", 256)) is None, "another suite by now"
    second = run("20260105T000000Z-x", 64)
    assert store.larger_before(second).name == "20260103T000000Z-x.jsonl", "whatever lies between"
    (sentence,) = store.notes_of_parts(tmp_path)
    assert "20260105T000000Z-x.jsonl has only a part of the rows of '20260103T000000Z-x.jsonl' beside it" in sentence
    assert store.notes_of_parts(second) == [], "who names a file wants that one"


def test_a_search_for_limits_that_was_stopped_is_seen_as_a_part(tmp_path: Path) -> None:
    def search(name: str, *budgets: int) -> Path:
        path = tmp_path / f"{name}.jsonl"
        store.append(path, Record(heading=Heading(title="limits")))
        for each in budgets:
            of = {"place": "torch/cpu", "corpus": "x", "tokenizer": "bytes"}
            case = Case(workload="decoder", shape={"tokens": 64}, budget_bytes=each, **of)
            store.append(path, Record(case=case, limits=Fit(over="tokens", budget_bytes=each)))
        return path

    whole, stopped = search("20260101T000000Z-x", 1 << 30, 2 << 30), search("20260102T000000Z-x", 1 << 30)
    assert store.larger_before(stopped) == whole
    assert store.larger_before(search("20260103T000000Z-x", 1 << 30, 2 << 30)) is None


def test_a_run_is_named_after_the_last_record_that_is_there(tmp_path: Path) -> None:
    earlier = recorded(tmp_path / "30000101T000000Z-x.jsonl", "3000-01-01T05:00:00+00:00")
    later = store.next_file(tmp_path, "aaa")
    assert later.name == "30000101T050001Z-aaa.jsonl"
    recorded(later, "2026-01-01T00:00:00+00:00")  # by a clock that was set back
    assert store.newest(tmp_path) == [later] != [earlier]


# What a case is

DIGEST = """
import sys
from harness.records import Case
case = Case.model_validate_json(sys.stdin.read())
print(case.digest("commit"), case.comparison_key)
"""


@pytest.mark.parametrize("seed", ["0", "1", "4711"])
def test_a_case_has_the_same_digest_in_every_process(seed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DIGEST],
        input=CASE.model_dump_json(),
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [CASE.digest("commit"), CASE.comparison_key]


def test_a_digest_does_not_depend_on_the_order_of_the_sizes() -> None:
    turned = CASE.model_copy(update={"shape": dict(reversed(CASE.shape.items()))})
    assert turned.digest() == CASE.digest()


@pytest.mark.parametrize(
    "change",
    [
        {"workload": "other"},
        {"shape": {**CASE.shape, "tokens": 65}},
        {"place": Place("torch", "cuda")},
        {"corpus": "standard_library"},
        {"tokenizer": "bpe"},
        {"seed": 4},
        {"budget_bytes": None},
    ],
    ids=lambda change: next(iter(change)),
)
def test_everything_but_the_strategies_makes_another_group(change: "dict[str, object]") -> None:
    other = CASE.model_copy(update=change)
    assert other.digest() != CASE.digest()
    assert other.comparison_key != CASE.comparison_key


@pytest.mark.parametrize(
    "strategies",
    [
        (),
        CASE.strategies[:1],
        CASE.strategies[::-1],
        (CASE.strategies[0], Applied(name="fused_loss", knobs={"chunk": 65})),
    ],
)
def test_the_strategies_make_another_case_of_the_same_group(strategies: "tuple[Applied, ...]") -> None:
    other = CASE.model_copy(update={"strategies": strategies})
    assert other.digest() != CASE.digest()
    assert other.comparison_key == CASE.comparison_key


def test_the_versions_make_another_digest() -> None:
    assert len({CASE.digest(), CASE.digest("a"), CASE.digest("b"), CASE.digest("a", "b")}) == 4


def test_a_label_shows_order_and_knobs() -> None:
    assert CASE.label == "checkpoint + fused_loss(chunk=64, exact=true, r=0.1)"
    assert CASE.model_copy(update={"strategies": ()}).label == "baseline"


def test_a_case_refuses_what_json_would_change() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        CASE.model_copy(update={"shape": {"tokens": float("nan")}}).digest()
    with pytest.raises(ValidationError):
        Applied(name="a", knobs={"chunk": None})  # type: ignore[dict-item]
    with pytest.raises(ValidationError):
        CASE.seed = 4  # type: ignore[misc]


def test_a_task_travels_to_a_worker_whole(tmp_path: Path) -> None:
    corpus = TokenFile(tmp_path / "ids.npy", 100, 300, "uint16", "ab")
    task = Task(
        kind="time",
        cases=(CASE,),
        run_id="r",
        parent=1,
        folder="f",
        corpora={CASE.comparison_key: corpus},
        plugins=("p.py",),
    )
    assert Task.model_validate_json(task.model_dump_json()) == task


def test_what_an_editor_of_another_system_adds_loses_no_record(tmp_path: Path) -> None:
    crlf = line_of(FULL).replace(b"\n", b"\r\n")
    path = file_with(tmp_path, b"\xef\xbb\xbf", crlf, crlf)
    assert store.read(path) == ([FULL, FULL], [])


@pytest.mark.parametrize(("vocabulary", "dtype"), [(1 << 16, "uint16"), ((1 << 16) + 1, "uint32")])
def test_ids_have_the_narrowest_type_that_holds_all_of_a_vocabulary(vocabulary: int, dtype: str) -> None:
    assert id_type(vocabulary) == dtype


def test_a_record_is_written_where_folders_cannot_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", fsync)
    path = tmp_path / "results.jsonl"
    store.append(path, FULL)
    assert store.read(path) == ([FULL], [])


def test_a_size_or_a_word_of_a_claim_that_is_called_as_a_strategy_was_keeps_its_name(tmp_path: Path) -> None:
    that = "peak({0}, documents=64) <= size('{0} + a(of=documents)', of='documents') and answer({0})=='documents'"
    claim = Claim(id="1", says="two things have one name", that=that.format("documents"))
    path = file_with(tmp_path, line_of(Record(heading=Heading(claims=(claim,)))))
    (run,), _ = store.read(path, {"documents": "document_windows"})
    assert run.heading.claims[0].that == that.format("document_windows")
