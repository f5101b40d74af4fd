"""The tables and the pictures of the documents are those of the results that git tracks."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.machine import history

ROOT = Path(__file__).resolve().parents[1]
Here = Callable[..., tuple[object, str, str]]
PLACES = {"use", "advice", "sentences", "suites", "documents", "trust", "counterparts"}
"""Marks that are no folders of results."""
DOCUMENTS = ["README.md", "docs/tables.md", "docs/in_your_code.md", "RESULTS.md"]
DOCUMENTS += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "results").glob("*/README.md"))


def tracked_results(root: Path, folder: Path) -> Path:
    """Copy the results of a project that its documents show; return where they are."""
    subprocess.run([ROOT / ".ci" / "tracked_results", folder], cwd=root, check=True)
    return folder / "results"


@pytest.fixture
def made(reported: Any) -> Path:
    """All documents and pictures, generated anew from the results in a folder of their own."""
    return Path(reported.root)


@pytest.fixture
def results(reported: Any) -> Path:
    return Path(reported.results)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_tables_are_those_of_the_results(name: str, made: Path, results: Path) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    generated = re.findall("<!-- generated: ([a-z0-9_]+)", text)
    assert generated, "every document here has tables"
    assert without_since((made / name).read_text(encoding="utf-8")) == without_since(text), "stale: run `make tables`"
    for folder in set(generated) - PLACES:
        assert (ROOT / "suites" / f"{folder.removesuffix('_fit')}.yaml").is_file() and (results / folder).is_dir()


def test_every_suite_with_results_has_its_tables_beside_them(results: Path) -> None:
    for folder in results.iterdir():
        if any(folder.rglob("*.jsonl")) and folder.name != "advice":
            text = (ROOT / "results" / folder.name / "README.md").read_text(encoding="utf-8")
            assert f"<!-- generated: {folder.name} -->" in text


def test_the_first_page_is_two_screens_and_answers_first() -> None:
    text = (ROOT / "RESULTS.md").read_text(encoding="utf-8")
    folded = re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL)
    assert len(folded.splitlines()) <= 120
    heads = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert heads[0] == "What sets your peak, and what to use"
    assert "| **the logits of the loss** | `" in re.sub(" +", " ", text)
    assert "| refuted" in text and "predicted" in text.lower()


def since_of(text: str) -> dict[str, bool]:
    """Read of the first page which suites it calls stale."""
    rows = re.findall(r"^\| \[([a-z0-9_]+)\]\(results/.*\|([^|]*)\|$", text, re.MULTILINE)
    return {name: "**stale**" in since for name, since in rows}


def without_since(text: str) -> str:
    """Leave out what a page says of the code, and the blanks and dashes that align a table."""
    text = re.sub(r"^(\| \[[a-z0-9_]+\]\(results/.*)\|[^|]*\|$", r"\1|", text, flags=re.MULTILINE)
    return re.sub(r"^\| suite .*\n\|[:|-]*$", "", text, flags=re.MULTILINE)


def test_the_first_page_was_right_about_the_code_when_it_was_written(made: Path) -> None:
    """What it calls stale is so; what is stale and not called so has become it by code that changed after the page.

    So a change of the code blocks no commit, and no page can be committed that is wrong on the day.
    """
    if not (ROOT / ".git").exists() or (git("rev-parse", "--is-shallow-repository") == "true"):
        pytest.skip("needs the history")
    said = since_of((ROOT / "RESULTS.md").read_text(encoding="utf-8"))
    now = since_of((made / "RESULTS.md").read_text(encoding="utf-8"))
    assert said.keys() == now.keys() and len(said) > 20
    wrong = [name for name in said if said[name] and not now[name]]
    assert not wrong, f"{wrong[0]} is not stale: run `make tables`"
    written = git("log", "-1", "--format=%H", "--", "RESULTS.md")
    edited = bool(git("status", "--porcelain", "--", "RESULTS.md"))
    later = () if edited else history.changed(written, ("strategies",))
    missed = [name for name in said if now[name] and not said[name]]
    assert not missed or later, f"{missed[0]} is stale: run `make tables`"


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def test_the_pictures_are_those_of_the_results(made: Path) -> None:
    """Their marks and their figures; where letters stand is up to the fonts of a machine."""
    drawn = sorted((made / "pictures").glob("*.svg"))
    assert len(drawn) >= 5
    assert {path.name for path in drawn} == {path.name for path in (ROOT / "results" / "pictures").glob("*.svg")}
    for path in drawn:
        marks = [re.findall('aria-label="([^"]*)"', (folder / path.name).read_text(encoding="utf-8"))
                 for folder in (ROOT / "results" / "pictures", made / "pictures")]  # fmt: skip
        assert len(marks[0]) > 5
        assert marks[0] == marks[1], f"{path.name} is stale: run `make tables`"


def test_a_run_of_ones_own_makes_no_table_stale(tmp_path: Path) -> None:
    root = tmp_path / "project"
    old, new = (Path("results", "suite", "machine", f"{year}.jsonl") for year in (2025, 2026))
    (root / old).parent.mkdir(parents=True)
    (root / old).write_text("old")

    def shown(name: str) -> list[str]:
        return sorted(path.name for path in tracked_results(root, tmp_path / name).rglob("*.jsonl"))

    assert shown("without git") == [old.name]
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    assert shown("nothing tracked") == [old.name]
    subprocess.run(["git", "add", "results"], cwd=root, check=True)
    (root / new).write_text("new")
    assert shown("after a run") == [old.name]
    subprocess.run(["git", "add", "results"], cwd=root, check=True)
    assert shown("published") == [old.name, new.name]
    (root / old).unlink()
    assert shown("replaced") == [new.name]


@pytest.mark.parametrize(
    ("words", "end", "refusal"),
    [
        (" place=torch/tpu", "<!-- end: losses -->", "no table of 'losses' is 'place=torch/tpu'"),
        (" rows=baseline|nobody", "<!-- end: losses -->", "no table of 'losses' is 'rows=baseline|nobody'"),
        ("", "", "add the line '<!-- end: losses -->'"),
    ],
    ids=["no such place", "no such row", "no end"],
)
def test_a_mark_that_chooses_nothing_or_has_no_end_is_refused(
    words: str, end: str, refusal: str, here: Here, results: Path, tmp_path: Path
) -> None:
    document = tmp_path / "document.md"
    document.write_text(text := f"<!-- generated: losses{words} -->\n{end}\n", encoding="utf-8")
    status, _, errors = here(tmp_path, "report", results / "losses", "--into", document)
    assert status == 2 and refusal in errors
    assert document.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("<!-- generated: losses rows=a | b -->\n<!-- end: losses -->\n", "cannot be read: write NAME"),
        ("<!-- generated: looses -->\n<!-- end: looses -->\n", "has no mark for these results"),
        ("no mark\n", "has no mark for these results"),
    ],
)
def test_a_document_into_which_nothing_goes_is_refused(
    text: str, refusal: str, here: Here, results: Path, tmp_path: Path
) -> None:
    document = tmp_path / "document.md"
    document.write_text(text, encoding="utf-8")
    status, _, errors = here(tmp_path, "report", results / "losses", "--into", document)
    assert status == 2 and refusal in errors and document.read_text(encoding="utf-8") == text


def test_a_mark_of_other_results_is_named_and_stays(here: Here, results: Path, tmp_path: Path) -> None:
    document = tmp_path / "document.md"
    other = "<!-- generated: looses -->\nold\n<!-- end: looses -->\n"
    document.write_text(f"<!-- generated: losses -->\n<!-- end: losses -->\n{other}", encoding="utf-8")
    status, _, errors = here(tmp_path, "report", results / "losses", "--into", document)
    text = document.read_text(encoding="utf-8")
    assert status == 0 and "| baseline" in text and text.endswith(other)
    assert errors == "note: 'document.md': nothing here is named 'looses'; what stands there stays\n".replace(
        "document.md", str(document)
    )


def test_results_are_named_by_their_folder_from_inside_it_as_well(here: Here, results: Path, tmp_path: Path) -> None:
    document = tmp_path / "document.md"
    document.write_text("<!-- generated: losses -->\n<!-- end: losses -->\n", encoding="utf-8")
    status, _, errors = here(results / "losses", "report", ".", "--into", document)
    assert status == 0 and "| baseline" in document.read_text(encoding="utf-8"), errors


def test_limits_have_no_rows_to_export(here: Here, results: Path, tmp_path: Path) -> None:
    status, shown, errors = here(tmp_path, "report", results / "long_context_fit", "--format", "csv")
    assert status == 2 and not shown and "print them as markdown" in errors


def test_a_mark_chooses_tables_and_rows(here: Here, results: Path, tmp_path: Path) -> None:
    document = tmp_path / "document.md"
    place = "<!-- generated: long_context{} -->\nold\n<!-- end: long_context -->\n"
    document.write_text(
        place.format(" place=torch/cpu tokens=2560") + place.format(" place=torch/cpu rows=checkpoint+fused_loss"),
        encoding="utf-8",
    )
    status, _, errors = here(tmp_path, "report", results / "long_context", "--into", document)
    assert status == 0, errors
    first, second = document.read_text(encoding="utf-8").split("<!-- end: long_context -->\n")[:2]
    assert "old" not in first + second
    assert (
        first.count("#### decoder on torch/cpu, 2,560 tokens") == first.count("#### ") == first.count("| baseline") == 1
    )
    rows = [line for line in second.splitlines() if line.startswith("| `")]
    assert len(rows) == second.count("#### decoder on torch/cpu") == second.count("#### ") == 2
    assert all(row.startswith("| `checkpoint + fused_loss`") for row in rows)
