"""The suites and results that come with the harness: found by name, in a checkout and from a wheel alone."""

from pathlib import Path

import harness
from harness.contract.plugins import nearest
from harness.suite.bounds import SuiteError

HOME = Path(harness.__file__).resolve().parent


def folder(name: str) -> Path:
    """Return the folder `suites` or `results` that came with the harness."""
    packaged = HOME / "shipped" / name
    return packaged if packaged.is_dir() else HOME.parent / name


def folders() -> tuple[Path, ...]:
    """Return where suites lie that have a name: here, then with the harness."""
    return Path("suites"), folder("suites")


def names() -> list[str]:
    """List the suites that are here, and those that come with the harness; a name with a dot is read as a path."""
    files = (file for place in folders() for file in place.glob("*.yaml"))
    return sorted({file.stem for file in files if file.stem != "claims" and "." not in file.stem})


def suite(path: Path) -> Path:
    """Return the file of a suite: the path itself, or by its name that of `suites/` here or of those shipped.

    Raises SuiteError for a name that nothing has, and for a file that is not there where a suite has its name.
    """
    if path.suffix == ".yaml" and path.stem in names() and not path.exists():
        raise SuiteError(f"there is no file '{path}', but a suite '{path.stem}': give this name alone")
    if path.is_file() or path.suffix or len(path.parts) > 1:
        return path
    for place in folders():
        if (file := place / f"{path}.yaml").is_file():
            return file
    if path.is_dir():
        return path  # to read it says what it is
    beside = path.with_suffix(".yaml")
    hint = f"; did you mean '{beside}'?" if beside.is_file() else nearest(str(path), names())
    raise SuiteError(f"there is no suite '{path}'{hint}")
