"""Results of several machines or runs in one report: each comparison says which it is of; links to pictures."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.contract import plugins
from harness.records import Applied, Case, Heading, Memory, Origin, Prediction, Record, Slot, store
from harness.records.case import Claim
from harness.records.record import Fit, Trial, Verdict
from harness.report import charts, first, page, results
from harness.report.charts import PicturesError
from harness.report.insert import InsertError
from harness.report.report import Report
from harness.report.results import Results

Here = Callable[..., tuple[object, str, str]]
LOADED = plugins.load()
PLAIN = Case(workload="decoder", shape={"tokens": 64}, place="torch/cpu", corpus="x", tokenizer="bytes")
CASES = (PLAIN, PLAIN.model_copy(update={"strategies": (Applied(name="checkpoint"),)}))
SMALL = Claim(id="A1", says="it is small", that="peak(baseline) > 0")


def origin(machine: str, day: int = 1) -> Origin:
    return Origin(suite="mine", commit=f"c{day}", utc=f"2026-01-{day:02d}T12:00:00+00:00", machine={"name": machine})


def run(machine: str, day: int = 1) -> Results:
    """A run of one suite: a claim, and the peaks of two rows."""
    records = [Record(heading=Heading(claims=(SMALL,)), origin=origin(machine, day))]
    for case in CASES:
        memory = Memory(peak_host_bytes=100 << 20, losses=(1.0,), regime="glibc-pinned", resolution_bytes=4096)
        slot = Slot(case=case.digest(), kind="memory")
        records.append(Record(slot=slot, case=case, origin=origin(machine, day), memory=memory))
    return Results("mine", "mine", tuple(records))


def searched(machine: str) -> Results:
    limit = Fit(over="tokens", budget_bytes=1 << 30, predicted=64)
    return Results("mine_fit", "mine_fit", (Record(case=PLAIN, origin=origin(machine), limits=limit),))


def lines_below(text: str, heading: str) -> list[str]:
    """Return the first line below each heading that begins so."""
    lines = text.splitlines()
    return [lines[at + 2] for at, line in enumerate(lines) if line.startswith(heading)]


def test_tables_claims_and_limits_of_several_machines_say_which_is_theirs() -> None:
    whole = Report((run("m"), run("n"), searched("m"), searched("n")), LOADED)
    text = whole.markdown()
    assert lines_below(text, "## decoder") == ["Measured on m.", "Measured on n."]
    assert lines_below(text, "## longest tokens") == ["On m.", "On n."]
    assert [line for line in text.splitlines() if "Claims" in line] == [
        "## Claims, measured on m",
        "## Claims, measured on n",
    ]
    alone = Report((run("m"), searched("n")), LOADED).markdown()
    assert "on m" not in alone and "On n" not in alone, "one machine of a suite is no question"


@pytest.mark.parametrize("choice", ["", " tokens=64", " rows=baseline|checkpoint"])
def test_a_document_shows_which_machine_a_table_is_of(choice: str, tmp_path: Path) -> None:
    document = tmp_path / "document.md"
    document.write_text(f"<!-- generated: mine{choice} -->\n<!-- end: mine -->\n")
    Report((run("m"), run("n")), LOADED).put_into(document)
    assert lines_below(document.read_text(), "#### decoder") == ["Measured on m.", "Measured on n."]


def test_a_place_that_no_machine_has_says_which_tried() -> None:
    def untested(machine: str) -> Results:
        records = (
            each.model_copy(update={"status": "unsupported", "memory": Memory()}) for each in run(machine).records
        )
        return Results("mine", "mine", tuple(records))

    text = Report((untested("m"), untested("n")), LOADED).markdown()
    assert lines_below(text, "## decoder") == ["Tried on m.", "Tried on n."]


def test_two_runs_of_one_machine_have_titles_of_their_own() -> None:
    whole = Report((run("m", 1), run("m", 2), run("n", 1)), LOADED)
    of = "decoder on torch/cpu, 64 tokens, bytes of x, on"
    assert list(dict.fromkeys(row["comparison"] for row in whole.figures)) == [
        f"{of} m, 2026-01-01 12:00:00 at c1",
        f"{of} m, 2026-01-02 12:00:00 at c2",
        f"{of} n",
    ]
    assert [title for _, title in whole._about().answers] == [title for each in whole.titles for title in each.values()]
    assert {row["comparison"] for row in Report((run("m"),), LOADED).figures} == {of.removesuffix(", on")}


def test_two_runs_of_one_machine_are_told_apart_wherever_they_are_shown(tmp_path: Path) -> None:
    whole = Report((run("m", 1), run("m", 2), run("n", 1)), LOADED)
    first, second = "m, 2026-01-01 12:00:00 at c1", "m, 2026-01-02 12:00:00 at c2"
    measured = [f"Measured on {first}.", f"Measured on {second}.", "Measured on n."]
    assert lines_below(whole.markdown(), "## decoder") == measured
    document = tmp_path / "document.md"
    document.write_text("<!-- generated: mine tokens=64 -->\n<!-- end: mine -->\n")
    whole.put_into(document)
    assert lines_below(document.read_text(), "#### decoder") == measured
    assert len(set(re.findall(r"^## Claims, measured on .*$", whole.markdown(), re.MULTILINE))) == 3
    assert "Measured on" not in Report((run("m"),), LOADED).markdown()


def test_a_record_stands_unless_another_of_its_file_took_its_place() -> None:
    again = run("m")
    tried = replace(again, records=(*again.records[:2], again.records[1], *again.records[2:]))
    whole = Report((tried, run("n"), run("n", 2)), LOADED).records()
    assert list(whole.stands) == [False, True, True, True, True, True, True]


def test_limits_have_no_part_that_a_mark_chooses(tmp_path: Path) -> None:
    document = tmp_path / "document.md"
    document.write_text("<!-- generated: mine_fit place=torch/cpu -->\n<!-- end: mine_fit -->\n")
    with pytest.raises(InsertError, match="of the limits in 'mine_fit' no part can be chosen"):
        Report((searched("m"),), LOADED).put_into(document)


def test_a_folder_named_like_a_part_of_a_first_page_is_refused_where_a_document_has_the_mark(tmp_path: Path) -> None:
    document = tmp_path / "document.md"
    document.write_text(text := "<!-- generated: use -->\n<!-- end: use -->\n")
    named = replace(run("m"), suite="use", folder="use")
    with pytest.raises(InsertError, match="'use' is a part of a first page and a folder of results"):
        Report((named,), LOADED).put_into(document)
    assert document.read_text() == text
    document.write_text("<!-- generated: mine -->\n<!-- end: mine -->\n")
    Report((named, run("m")), LOADED).put_into(document)
    assert "| baseline" in document.read_text()


def test_all_marks_of_a_document_are_filled_or_none(tmp_path: Path) -> None:
    document = tmp_path / "document.md"
    place = "<!-- generated: {0} -->\n<!-- end: {0} -->\n"
    document.write_text(text := place.format("mine") + "<!-- generated: trust -->\n")
    with pytest.raises(InsertError, match="add the line '<!-- end: trust -->'"):
        Report((run("m"),), LOADED).put_into(document)
    assert document.read_text() == text
    document.write_text(place.format("mine") + place.format("theirs"))
    assert Report((run("m"),), LOADED).put_into(document) == ["theirs"]
    assert document.read_text().endswith(place.format("theirs")) and "| baseline" in document.read_text()


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_document_keeps_the_ends_of_its_lines(tmp_path: Path, end: str) -> None:
    document = tmp_path / "document.md"
    document.write_bytes(f"# A{end}<!-- generated: mine -->{end}<!-- end: mine -->{end}the rest{end}".encode())
    Report((run("m"),), LOADED).put_into(document)
    written = document.read_bytes().decode()
    assert "| baseline" in written and written.count(end) == written.count("\n") > 8
    assert ("\r" in written) == ("\r" in end)


def test_advice_that_was_kept_stands_below_what_was_measured() -> None:
    prediction = Prediction(predicted_peak_bytes=77 << 20, parameters=1000)
    stored_prediction = Record(
        slot=Slot(case="x", kind="predict"), case=PLAIN, origin=origin("m"), prediction=prediction
    )
    advice = Results("advice", "advice", (stored_prediction,))
    both = Report((run("m"), advice), LOADED).markdown()
    assert both.startswith(Report((run("m"),), LOADED).markdown())
    assert "\n# What to use in which memory\n" in both and "| 1,000, 1 x 64 tokens" in both


def test_a_page_says_of_which_machine_claims_and_limits_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shown: list[Any] = []

    def html(*arguments: Any) -> str:
        shown.append(arguments)
        return ""

    monkeypatch.setattr(page, "html", html)
    Report((run("m"), run("n"), searched("m"), searched("n")), LOADED).write_page(tmp_path / "page.html")
    ((_, _, answers, limits, *_),) = shown
    assert [answer.claim.says for answer in answers["mine"]] == ["it is small, on m", "it is small, on n"]
    assert [limit.title.rpartition(", ")[2] for limit in limits["mine_fit"]] == ["on m", "on n"]


def test_what_to_use_leads_to_the_suite_of_results_in_any_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(page, "html", lambda *arguments: shown.append(arguments) or "")
    heading, baseline, checkpoint = run("m").records
    memory = checkpoint.memory.model_copy(update={"peak_host_bytes": 50 << 20})
    answer = Verdict("bit_exact", 1.0, None, None, None, (), "it is")
    records = (
        heading,
        baseline,
        checkpoint.model_copy(update={"memory": memory, "probe": "p"}),
        Record(slot=Slot(case="p", kind="numerics"), case=CASES[1], origin=origin("m"), numerics=answer),
    )
    Report((Results("mine", "moved", records),), LOADED).write_page(tmp_path / "page.html")
    ((*_, about),) = shown
    assert [remedy.best.folder for remedy in about.use] == ["mine"], "under which its rows stand"


def test_a_suite_whose_limits_are_newer_is_stale_all_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(page, "html", lambda *arguments: shown.append(arguments) or "")
    monkeypatch.setattr(first, "since", lambda members, known: "the same" if members[0].searched else "stale: `a.py`")
    limits = Results("mine", "mine_fit", searched("m").records)
    Report((run("m"), limits), LOADED).write_page(tmp_path / "page.html")
    ((*_, about),) = shown
    assert about.origins["mine"].endswith("Since then: stale: a.py.")


def test_a_page_repeats_each_run_as_that_was_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(page, "html", lambda *arguments: shown.append(arguments) or "")
    runs = []
    for each, heading in zip((run("m"), run("n")), (Heading(asked="a.yaml --plugin b.py"), Heading()), strict=True):
        records = (each.records[0].model_copy(update={"heading": heading}), *each.records[1:])
        runs.append(Results("mine", "mine", records))
    Report(tuple(runs), LOADED).write_page(tmp_path / "page.html")
    ((_, rows, *_, about),) = shown
    words = {row["machine"]: about.asked.get((row["suite"], row["comparison"])) for row in rows}
    assert words == {"m": "a.yaml --plugin b.py", "n": None}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Charts of two names for any suite, which take no time: those that were drawn."""
    drawn: list[str] = []
    names = ("lengths-torch-cpu", "phases-1")
    monkeypatch.setattr(charts, "drawings", lambda rows: [(name, partial(drawn.append, name)) for name in names])
    monkeypatch.setattr(charts, "save", lambda chosen, folder, suite: [folder / f"{suite}-{each}" for each in chosen])
    return drawn


def test_no_picture_is_drawn_that_no_document_links_to(drawn: list[str], tmp_path: Path) -> None:
    document = tmp_path / "document.md"
    document.write_text("![a](pictures/mine-phases-1.svg)\n")
    assert list(Report((run("m"),), LOADED).pictures(tmp_path, "", [document])) == [tmp_path / "mine-phases-1"]
    assert drawn == ["phases-1"]


@pytest.mark.parametrize(
    ("only", "link", "refused"),
    [
        ("lengths", "phases-1", False),
        ("lengths", "tradeoff-9", False),
        ("lengths", "lengths-jax-cpu", True),
        ("", "phases-1", False),
        ("", "tradeoff-9", True),
    ],
)
def test_links_to_pictures_count_where_their_names_are_asked_for(
    drawn: list[str], only: str, link: str, refused: bool, tmp_path: Path
) -> None:
    document = tmp_path / "document.md"
    document.write_text(f"![a](pictures/mine-lengths-torch-cpu.svg) ![b](pictures/mine-{link}.svg)\n")
    pictures = Report((run("m"),), LOADED).pictures(tmp_path, only, [document])
    if refused:
        with pytest.raises(InsertError, match=f"there is no picture 'mine-{link}'"):
            list(pictures)
    else:
        assert [*pictures][:1] == [tmp_path / "mine-lengths-torch-cpu"]


def test_a_name_that_no_picture_has_is_refused(drawn: list[str], tmp_path: Path) -> None:
    pictures = Report((run("m"),), LOADED).pictures
    assert [*pictures(tmp_path, "phases")] == [tmp_path / "mine-phases-1"]
    with pytest.raises(PicturesError, match=r"^no picture's name contains 'mine-phases': leave it out"):
        list(pictures(tmp_path, "mine-phases"))


def test_the_name_of_a_suite_is_the_same_in_every_form(tmp_path: Path) -> None:
    """A page reads a return in an attribute as a new line, and a terminal obeys an escape."""
    path = tmp_path / "x.jsonl"
    path.write_bytes(store.encoded(Record(origin=Origin(suite="a\r\x1bb"))))
    (named,) = results.read([path], print)
    assert named.suite == "a  b"


def test_a_page_says_what_is_to_be_known_of_all_rows_of_a_comparison() -> None:
    heading, baseline, checkpoint = run("m").records
    case = PLAIN.model_copy(update={"strategies": (Applied(name="nothing"),)})
    memory = baseline.memory.model_copy(update={"peak_host_bytes": 110 << 20})
    slot = Slot(case=case.digest(), kind="memory")
    control = baseline.model_copy(update={"slot": slot, "case": case, "memory": memory})
    whole = Report((Results("mine", "mine", (heading, baseline, control, checkpoint)),), LOADED)
    (answer,) = whole._about().answers.values()
    assert (
        "The control nothing differs from the baseline by 10.0 MiB: a difference counts here from twice that." in answer
    )


def test_a_suite_of_many_commits_names_them_on_the_page() -> None:
    about = Report(tuple(run("m", day) for day in range(1, 6)), LOADED)._about()
    assert "at commit c1 and c2 and c3 and c4 and c5, on" in about.origins["mine"]
    assert "at 5 commits (each suite names its own), on" in about.origin


def test_a_page_says_at_a_suite_what_has_changed_since(monkeypatch: pytest.MonkeyPatch) -> None:
    for change, shown in (("**stale**: `checkpoint`", " Since then: stale: checkpoint."), ("the same", "")):
        monkeypatch.setattr(first, "since", lambda *_, change=change: change)
        origin = Report((run("m"),), LOADED)._about().origins["mine"]
        assert origin.endswith(f".{shown}") and ("Since" in origin) == bool(shown)


def stored(folder: Path, *records: Record) -> str:
    """Write records into a results file; return its name."""
    for each in records:
        store.append(folder / "r.jsonl", each)
    return "r.jsonl"


def test_where_there_is_nothing_to_draw_it_is_said(here: Here, tmp_path: Path) -> None:
    file = stored(tmp_path, *run("m").records)
    status, text, errors = here(tmp_path, "report", file, "--pictures", "pictures")
    assert (status, text) == (0, "") and "nothing to draw: a picture needs two timed rows" in errors


def test_a_page_of_tried_limits_alone_is_refused(here: Here, tmp_path: Path) -> None:
    trial = Trial(predicted_peak_bytes=1 << 20, at_point="ok", peak_bytes=1 << 20)
    file = stored(tmp_path, Record(case=PLAIN, origin=origin("m"), trial=trial))
    status, _, errors = here(tmp_path, "report", file, "--page", "page.html")
    assert status == 2 and "a page has no room for advice and tried limits: print" in errors
    assert not (tmp_path / "page.html").exists()


def test_a_run_that_was_interrupted_before_it_measured_is_no_advice() -> None:
    begun = Record(
        slot=Slot(case=PLAIN.digest(), kind="predict"),
        case=PLAIN,
        origin=origin("m").model_copy(update={"plan": "p", "run_id": "r"}),
        prediction=Prediction(predicted_peak_bytes=77 << 20),
    )
    text = Report((Results("mine", "mine", (begun,)),), LOADED).markdown()
    assert "Untested: its cases were not run yet." in text and "77.0" in text


def test_claims_of_a_suite_as_it_stands_now_may_use_a_former_name(tmp_path: Path) -> None:
    suites, file = tmp_path / "suites", tmp_path / "results" / "mine" / "m" / "20260101T000000Z-a.jsonl"
    suites.mkdir()
    (suites / "mine.yaml").write_text(
        "title: t\nworkload: decoder\nstrategies: [nothing]\n"
        "claims:\n  - {id: a, says: so, that: peak(documents) > 0 and peak(baseline) > 0}\n"
    )
    file.parent.mkdir(parents=True)
    store.append(file, run("m").records[1])
    (read,) = results.read([file], lambda problem: None, LOADED.aliases, suites)
    assert read.asked is not None
    assert [claim.that for claim in read.asked] == ["peak(document_windows) > 0 and peak(baseline) > 0"]


def test_a_page_has_what_other_libraries_have_by_place_and_row() -> None:
    (label,) = {record.case.label for record in run("m").records if record.case and record.case.strategies}
    assert Report((run("m"),), LOADED)._about().elsewhere == {
        ("torch/cpu", label): "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False); "
        "TrainingArguments(folder, gradient_checkpointing=True)"
    }
