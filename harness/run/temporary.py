"""Temporary folders, for what the processes of a run pass to each other; each is removed after its use.

Those of a harness that was killed are removed by the next `orphans.sweep`.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.machine import orphans
from harness.records.store import StoreError

ROOM_BYTES = 4 << 20
"""What must be left on the disk: a task, its results and its output, but for large answers."""


@contextmanager
def folder(prefix: str) -> Iterator[Path]:
    """Make a folder and remove it in the end; raise StoreError where none can be made or nothing written into it."""
    with refusing():
        directory = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
    with directory as name:
        if (left := shutil.disk_usage(name).free) < ROOM_BYTES:
            raise _unwritable(f"{left >> 10} KiB are left in '{Path(name).parent}'")
        with refusing():
            orphans.claim(Path(name))
        yield Path(name)


@contextmanager
def refusing() -> Iterator[None]:
    """Raise StoreError instead of the OSError of a write that failed here."""
    try:
        yield
    except OSError as error:
        raise _unwritable(str(error.strerror)) from None


def _unwritable(reason: str) -> StoreError:
    return StoreError(
        f"temporary files cannot be written ({reason}): make room, or name another folder for them with TMPDIR"
    )
