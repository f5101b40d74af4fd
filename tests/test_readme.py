"""The tables and the picture of the documents are those of the results that git tracks."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def tracked_results(root: Path, folder: Path) -> Path:
    """Copy the results of a project that its documents show; return where they are."""
    subprocess.run([ROOT / ".ci" / "tracked_results", folder], cwd=root, check=True)
    return folder / "results"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tracked_results(ROOT, tmp_path_factory.mktemp("tracked"))


@pytest.mark.parametrize("document", ["README.md", "docs/tables.md", "RESULTS.md"])
def test_the_tables_are_those_of_the_results(document: str, results: Path, tmp_path: Path) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    copy = tmp_path / "document.md"
    copy.write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "harness", "report", str(results), "--into", str(copy)]
    command += ["--documents", str(ROOT / "suites" / "claims.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "| baseline" in text
    assert document != "RESULTS.md" or "| refuted" in text
    assert copy.read_text(encoding="utf-8") == text, "stale: run `make tables`"
    for name in set(re.findall("generated: ([a-z0-9_]+)", text)) - {"documents"}:
        assert (ROOT / "suites" / f"{name.removesuffix('_fit')}.yaml").is_file() and (results / name).is_dir()


def test_the_picture_is_that_of_the_results(results: Path, tmp_path: Path) -> None:
    """Its marks and their figures; where letters stand is up to the fonts of a machine."""
    (name,) = re.findall(r"\]\(results/pictures/(.*?)\.svg\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    suite_name, _, chart = name.partition("-")
    command = [sys.executable, "-m", "harness", "report", str(results / suite_name)]
    done = subprocess.run([*command, "--pictures", str(tmp_path), "-k", chart], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown, drawn = (
        re.findall('aria-label="([^"]*)"', (folder / f"{name}.svg").read_text(encoding="utf-8"))
        for folder in (ROOT / "results" / "pictures", tmp_path)
    )
    assert len(shown) > 10
    assert shown == drawn, "stale: run `make tables`"


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
    words: str, end: str, refusal: str, results: Path, tmp_path: Path
) -> None:
    document = tmp_path / "document.md"
    document.write_text(text := f"<!-- generated: losses{words} -->\n{end}\n", encoding="utf-8")
    command = [sys.executable, "-m", "harness", "report", str(results / "losses"), "--into", str(document)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and refusal in done.stderr
    assert document.read_text(encoding="utf-8") == text


def test_a_mark_chooses_tables_and_rows(results: Path, tmp_path: Path) -> None:
    document = tmp_path / "document.md"
    place = "<!-- generated: long_context{} -->\nold\n<!-- end: long_context -->\n"
    document.write_text(
        place.format(" place=torch/cpu tokens=2560") + place.format(" place=torch/cpu rows=checkpoint+fused_loss"),
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "harness", "report", str(results / "long_context"), "--into", str(document)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second = document.read_text(encoding="utf-8").split("<!-- end: long_context -->\n")[:2]
    assert "old" not in first + second
    assert (
        first.count("#### decoder on torch/cpu, 2,560 tokens") == first.count("#### ") == first.count("| baseline") == 1
    )
    rows = [line for line in second.splitlines() if line.startswith("| `")]
    assert len(rows) == second.count("#### decoder on torch/cpu") == second.count("#### ") == 2
    assert all(row.startswith("| `checkpoint + fused_loss`") for row in rows)
