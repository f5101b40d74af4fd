"""Say in a few words what an error is, and where in the code of a plugin or of a strategy it came from."""

import sys
from pathlib import Path

OTHERS = frozenset({"harness", "torch", "jax", "jaxlib", "numpy", "pluggy", "transformers"})
"""Packages that are no plugins, though an error may pass through them; those of Python are none either."""
LONGEST = 400
"""Characters of what an error says that are shown."""


def raised(error: BaseException, first: str | None = None) -> str:
    """Return the kind of an error, the `first` line of what it says, and its line in the code of a plugin."""
    if first is None:
        first = next(iter(str(error).strip().splitlines()), "")[:LONGEST]
    line = line_of(error)
    return f"{type(error).__name__}{f': {first}' if first else ''}{f', {line}' if line else ''}"


def line_of(error: BaseException) -> str | None:
    """Return the last line in the code of a plugin that an error passed, as `name.py:12`; None where it passed none."""
    line, at = None, error.__traceback__
    while at is not None:
        owner = str(at.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        if owner not in OTHERS and owner not in sys.stdlib_module_names:
            line = f"{Path(at.tb_frame.f_code.co_filename).name}:{at.tb_lineno}"
        at = at.tb_next
    return line
