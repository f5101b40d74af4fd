"""A suite is named by its path, or by its name alone; a folder of that name is none."""

from pathlib import Path

import pytest

from harness.suite import shipped
from harness.suite.bounds import SuiteError

SMOKE = shipped.folder("suites") / "smoke.yaml"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_folder_does_not_hide_the_suite_of_its_name(here: Path) -> None:
    (here / "smoke").mkdir()
    assert shipped.suite(Path("smoke")) == SMOKE
    (here / "smokes").mkdir()
    assert shipped.suite(Path("smokes")) == Path("smokes"), "to read it says that it is a folder"


def test_a_file_is_taken_before_the_suite_of_its_name(here: Path) -> None:
    (here / "smoke").touch()
    assert shipped.suite(Path("smoke")) == Path("smoke")


def test_suites_here_are_taken_before_those_shipped(here: Path) -> None:
    (here / "suites").mkdir()
    (here / "suites" / "smoke.yaml").touch()
    assert shipped.suite(Path("smoke")) == Path("suites/smoke.yaml")


@pytest.mark.parametrize("path", ["mine.yaml", "some/smoke", "/smoke", "./some/smoke"])
def test_a_path_is_taken_as_it_is(path: str, here: Path) -> None:
    assert shipped.suite(Path(path)) == Path(path)
    (here / path).mkdir(parents=True, exist_ok=True) if not path.startswith("/") else None
    assert shipped.suite(Path(path)) == Path(path)


@pytest.mark.parametrize("path", ["smoke.yaml", "suites/smoke.yaml", "/nowhere/smoke.yaml"])
def test_where_a_file_is_not_the_suite_of_its_name_is_pointed_to(path: str) -> None:
    with pytest.raises(SuiteError, match=f"there is no file '{path}', but a suite 'smoke': give this name alone"):
        shipped.suite(Path(path))


def test_a_name_may_be_that_of_a_file_here(here: Path) -> None:
    (here / "tiny.yaml").touch()
    with pytest.raises(SuiteError, match=r"there is no suite 'tiny'; did you mean 'tiny\.yaml'\?"):
        shipped.suite(Path("tiny"))


def test_a_misspelt_name_may_be_that_of_a_suite_here(here: Path) -> None:
    (here / "suites").mkdir()
    for name in ("my_rows", "my_rows.2"):
        (here / "suites" / f"{name}.yaml").touch()
    with pytest.raises(SuiteError, match="there is no suite 'my_row'; did you mean 'my_rows'"):
        shipped.suite(Path("my_row"))
    assert shipped.suite(Path("my_rows.2.yaml")) == Path("my_rows.2.yaml"), "by that name alone it is not found"
