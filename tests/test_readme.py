"""What README shows is true: its tables come from `results/`, its examples work."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.contract import plugins
from harness.suite import reader

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(language: str, word: str) -> str:
    """The one code block of a language that holds a word."""
    (found,) = (text for text in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if word in text)
    return found


@pytest.mark.parametrize("document", ["README.md", "RESULTS.md"])
def test_the_tables_are_those_of_the_results(document: str, tmp_path: Path) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    copy = tmp_path / document
    copy.write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "harness", "report", str(ROOT / "results"), "--into", str(copy)]
    command += ["--documents", str(ROOT / "suites" / "claims.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "| baseline" in text
    assert document == "README.md" or "| refuted" in text
    assert copy.read_text(encoding="utf-8") == text, "stale: run `make tables`"
    for name in set(re.findall("generated: ([a-z0-9_]+)", text)) - {"documents"}:
        assert (ROOT / "suites" / f"{name.removesuffix('_fit')}.yaml").is_file() and (ROOT / "results" / name).is_dir()


def test_the_picture_is_that_of_the_results(tmp_path: Path) -> None:
    """Its marks and their figures; where letters stand is up to the fonts of a machine."""
    (name,) = re.findall(r"\]\(results/pictures/(.*?)\.svg\)", README)
    suite_name, _, chart = name.partition("-")
    command = [sys.executable, "-m", "harness", "report", str(ROOT / "results" / suite_name)]
    done = subprocess.run([*command, "--pictures", str(tmp_path), "-k", chart], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown, drawn = (
        re.findall('aria-label="([^"]*)"', (folder / f"{name}.svg").read_text(encoding="utf-8"))
        for folder in (ROOT / "results" / "pictures", tmp_path)
    )
    assert len(shown) > 10
    assert shown == drawn, "stale: run `make tables`"


def test_the_plugin_works_as_shown(tmp_path: Path) -> None:
    path = tmp_path / "my_strategy.py"
    path.write_text(block("python", "hookimpl"), encoding="utf-8")
    loaded = plugins.load((str(path),))
    assert loaded.strategies["checkpoint_feed"].rewrites == ("feed",)


def test_the_suite_is_valid_as_shown(tmp_path: Path) -> None:
    folder = tmp_path / "suites"
    folder.mkdir()
    text = block("yaml", "title:")
    (folder / "try.yaml").write_text(text, encoding="utf-8")
    (folder / "my_text").mkdir()
    (folder / "my_text" / "a.txt").write_text("text", encoding="utf-8")
    plan = reader.read(folder / "try.yaml", plugins.load())
    assert [case.label for case in plan.groups[0].cases] == [
        "baseline",
        "nothing",
        "checkpoint(every=1)",
        "checkpoint(every=2)",
        "checkpoint + fused_loss",
    ]
    assert len(plan.groups) == 2


@pytest.mark.parametrize("command", re.findall(r"^harness (\w+)", README, re.MULTILINE))
def test_the_verbs_are_there(command: str) -> None:
    done = subprocess.run([sys.executable, "-m", "harness", command, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
