"""End what a harness leaves behind, however it ends: a small process that outlives it by a moment, and a sweep.

A worker dies with the thread that started it (`PR_SET_PDEATHSIG`), what it has started does not. So every worker
carries in its environment which harness it is of, and hands that on. The guard waits for the end of a pipe that its
harness holds, which the kernel closes, and kills all processes of that mark; `sweep` does the same for every harness
that is gone, should its guard be gone as well. Only processes of the same user are seen; none is killed by its name.
The temporary folders of a harness carry its mark in a file, and `sweep` removes those of this user.
"""

import os
import signal
import stat
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

VARIABLE = "HARNESS_OF"
PREFIX = "harness-"
"""How the names of temporary folders begin."""
OWNER = ".harness-of"
"""The file of a temporary folder that says which harness it is of."""
PATIENCE_SECONDS = 5.0
PAUSE_SECONDS = 0.02

_pipes: dict[int, int] = {}
"""The pipe of the guard of a process: of this one, not of one that it was forked from."""
_starting = threading.Lock()


def mark() -> str:
    """Return a name of this process that no other has while the machine runs: its number, beginning and namespace."""
    return f"{os.getpid()}:{_began(os.getpid())}:{_namespace()}"


def start() -> None:
    """Start the guard of this process, once, whichever threads ask for it."""
    with _starting:
        if os.getpid() not in _pipes:
            _pipes[os.getpid()] = _started()


def _started() -> int:
    """Start a guard and return the end of the pipe whose closing frees it."""
    end, hold = os.pipe()
    command = [sys.executable, "-I", "-S", __file__, mark()]
    silent = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_WRONLY, 0) for number in (1, 2)]
    pid = os.posix_spawn(
        sys.executable, command, {}, file_actions=[(os.POSIX_SPAWN_DUP2, end, 0), *silent], setsid=True
    )
    os.close(end)
    os.waitpid(pid, 0)  # it leaves a child of its own behind, which is nobody's
    return hold


def claim(folder: Path) -> None:
    """Write into a temporary folder that it is of this process."""
    (folder / OWNER).write_text(f"{mark()}:{_boot()}", encoding="ascii")


def sweep() -> list[int]:
    """Kill what harnesses that are gone have left, remove their temporary folders, and return the processes."""
    ended = _end({mark for mark in map(_mark_of, _processes()) if mark and _gone(mark)})
    _remove_folders()
    return ended


def _remove_folders() -> None:
    """Remove the temporary folders of this user's harnesses that are gone; another sweep may do so at the same time."""
    import shutil
    import tempfile  # not above: the guard starts in a moment without them

    with suppress(OSError):  # there may be none at all
        folder = Path(tempfile.gettempdir())
        for name in os.listdir(folder):
            if name.startswith(PREFIX) and _is_left(folder / name):
                shutil.rmtree(folder / name, ignore_errors=True)


def _is_left(folder: Path) -> bool:
    """Return whether a folder is of this user and says that it is of a harness that is gone.

    What is marked on another machine is left to the harnesses there: they may share the folder.
    """
    owner = folder / OWNER
    try:
        for path, is_kind in ((folder, stat.S_ISDIR), (owner, stat.S_ISREG)):  # no links
            about = os.lstat(path)
            if not is_kind(about.st_mode) or about.st_uid != os.geteuid():
                return False
        mark, _, boot = owner.read_text(encoding="ascii").rpartition(":")
        return boot != "" and boot == _boot() and _gone(mark)
    except (OSError, ValueError):
        return False


def _end(marks: set[str]) -> list[int]:
    """Kill all processes with these marks, and those that they start meanwhile, until none is left."""
    ended: list[int] = []
    until = time.monotonic() + PATIENCE_SECONDS
    while marks and time.monotonic() < until:
        left = [pid for pid in _processes() if _mark_of(pid) in marks and not _over(pid)]
        if not left:
            break
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        ended += left
        time.sleep(PAUSE_SECONDS)
    return list(dict.fromkeys(ended))


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _mark_of(pid: int) -> str | None:
    """Read the mark of the harness that a process is of; None for those of no harness, and of other users."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    wanted = f"{VARIABLE}=".encode()
    return next((each[len(wanted) :].decode("ascii", "replace") for each in variables if each.startswith(wanted)), None)


def _gone(mark: str) -> bool:
    """Return whether the harness of a mark has ended, and only another process, if any, has its number.

    A container counts its processes anew, so what is marked there is left to the harnesses there.
    """
    pid, began, namespace = (*mark.split(":"), "", "")[:3]
    known = pid.isdigit() and began != "" and namespace == _namespace()
    return known and _began(int(pid)) != began


def _namespace() -> str:
    """Return the name of the set of processes whose numbers this one shares."""
    return str(os.stat("/proc/self/ns/pid").st_ino)


def _boot() -> str:
    """Read the name that this machine has until it starts anew, which no other has; empty where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _began(pid: int) -> str:
    """Read when a process began, in ticks since the machine did; empty for one that is gone."""
    fields = _fields(pid)
    return fields[19] if len(fields) > 19 else ""


def _over(pid: int) -> bool:
    """Return whether a process has ended and only waits to be reaped."""
    return _fields(pid)[:1] in ([], ["Z"], ["X"])


def _fields(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def main() -> None:
    """Leave the harness, wait until it is gone, then end what it left."""
    if os.fork():
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    _end({sys.argv[1]})


if __name__ == "__main__":
    main()
