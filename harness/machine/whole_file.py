"""Write a file whole, or leave it as it was: the disk may be full, and another process may read it meanwhile."""

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path


def write(path: Path, text: str, newline: str | None = None) -> None:
    """Write a text to a file, or to the one that a link leads to, and leave its rights as they were.

    `newline` ends the lines, as in `open`. Raises OSError where it cannot be written.
    """
    path = path.resolve()
    partial = path.with_name(f"{path.stem}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        partial.write_text(text, encoding="utf-8", newline=newline)
        with suppress(FileNotFoundError):
            shutil.copymode(path, partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
