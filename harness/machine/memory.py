"""Host memory of this process as the kernel counts it: the high-water mark, phase by phase.

The peak is `VmHWM`: the kernel raises it whenever the resident set is about to fall, so no spike is too short.
Writing 5 to /proc/self/clear_refs sets it back to the resident set (proc(5)), which is what makes phases possible.
"""

import ctypes
import gc
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

KIB = 1024
SETTLE_TOLERANCE_BYTES = 64 * KIB


@dataclass(frozen=True)
class Reading:
    """One read of /proc/self/status, in bytes."""

    rss: int
    peak: int
    anon: int
    file: int
    shmem: int
    data: int


_FIELDS = {
    b"VmRSS": "rss",
    b"VmHWM": "peak",
    b"RssAnon": "anon",
    b"RssFile": "file",
    b"RssShmem": "shmem",
    b"VmData": "data",
}


def read(pid: int | str = "self") -> Reading:
    """Read the memory of a process; raise OSError when it is gone."""
    with open(f"/proc/{pid}/status", "rb", buffering=0) as status:
        text = status.read(8192)
    values = dict.fromkeys(_FIELDS.values(), 0)
    for line in text.splitlines():
        key, _, rest = line.partition(b":")
        if key in _FIELDS:
            values[_FIELDS[key]] = int(rest.split()[0]) * KIB
    return Reading(**values)


def reset_peak() -> None:
    """Reset the high-water mark to the resident set; raise OSError where the kernel forbids it."""
    with open("/proc/self/clear_refs", "wb", buffering=0) as clear:
        clear.write(b"5")


def mark_is_low() -> bool:
    """Check whether the high-water mark is where a reset puts it; some sandboxes have none, or never lower it."""
    now = read()
    return 0 < now.peak <= now.rss + resolution_bytes()


def kernel_kills(root: str = "/") -> int:
    """Count the processes that the kernel killed in this control group for want of memory; 0 where unknown.

    In a container the group may look like the root, whose own file counts; version 1 has another one.
    """
    own = os.path.join(_own_group(root), "memory.events")
    for path in (own, "memory.events", "memory/memory.oom_control"):
        with suppress(OSError, ValueError), open(os.path.join(root, "sys/fs/cgroup", path)) as events:
            lines = (line.split() for line in events)
            return sum(int(line[1]) for line in lines if line[0] == "oom_kill")
    return 0


def _own_group(root: str) -> str:
    """Return the control group (version 2) of this process, below /sys/fs/cgroup; empty for the root or unknown."""
    with suppress(OSError), open(os.path.join(root, "proc/self/cgroup")) as groups:
        for line in groups:
            if line.startswith("0::/"):
                return line.removeprefix("0::/").rstrip("\n")
    return ""


def children(pid: int | str = "self") -> list[int]:
    """List the processes that a process has started, from any of its threads, and that still live."""
    pids: list[int] = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
            pids += [int(child) for child in file.read().split()]
    return pids


def descendants(pid: int) -> list[int]:
    """List the children of a process, theirs, and so on."""
    pids: list[int] = []
    parents = [pid]
    while parents:
        with suppress(OSError):
            born = children(parents.pop())
            pids += born
            parents += born
    return pids


def proportional(pid: int) -> int:
    """Read the proportional set size of a process: pages shared by k processes count 1 / k in each (PSS)."""
    with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
        line = next((line for line in file if line.startswith(b"Pss:")), b"Pss: 0 kB")
    return int(line.split()[1]) * KIB


def same_program(pid: int, other: int) -> bool:
    """Say whether two processes execute the same file; raise OSError when one is gone."""
    return os.readlink(f"/proc/{pid}/exe") == os.readlink(f"/proc/{other}/exe")


def resolution_bytes() -> int:
    """The slack of the kernel's per-CPU counters: differences below it mean nothing (768 KiB on 2 CPUs)."""
    online = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0))
    return 3 * max(32, 2 * online) * allowed * resource.getpagesize()


def settle(seconds: float = 3.0) -> bool:
    """Collect garbage and return free heap pages until the resident set stands still; return whether it did.

    Still means three consecutive readings, 20 ms apart, within 64 KiB. What survives the first collection, mostly the
    frameworks' own modules, is set aside: going through it again would cost a tenth of a second each time.
    """
    gc.collect()
    gc.freeze()
    trim()
    deadline = time.monotonic() + seconds
    last: list[int] = []
    while time.monotonic() < deadline:
        gc.collect()
        last = [*last[-2:], read().rss]
        if len(last) == 3 and max(last) - min(last) <= SETTLE_TOLERANCE_BYTES:
            return True
        time.sleep(0.02)
    return False


def trim() -> None:
    """Return free heap pages to the system: a compiler leaves many, and what fills them would be free."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def calm(seconds: float = 0.2) -> None:
    """Wait until the resident set stands still: a runtime that frees in the background would charge the next phase.

    Free pages inside the heap go back first: what a compiler left in one phase would hide the next one's use.
    """
    trim()
    deadline = time.monotonic() + seconds
    last: list[int] = []
    while time.monotonic() < deadline:
        last = [*last[-2:], read().rss]
        if len(last) == 3 and max(last) - min(last) <= SETTLE_TOLERANCE_BYTES:
            return
        time.sleep(0.003)


@contextmanager
def budget(bytes_above_base: int | None) -> Iterator[int | None]:
    """Bound the private writable memory to what is in use now plus the budget (RLIMIT_DATA); yield the limit.

    A request beyond it fails cleanly: torch RuntimeError, JAX RESOURCE_EXHAUSTED, NumPy MemoryError. Raises ValueError
    where the shell allows less.
    """
    if bytes_above_base is None:
        yield None
        return
    limit = read().data + bytes_above_base
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if limit > hard != resource.RLIM_INFINITY:
        raise ValueError(
            f"to hold a budget a process must be allowed {limit >> 20} MiB of data, and `ulimit -Hd` allows "
            f"{hard >> 20}: raise it, or lower the budget"
        )
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield limit
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@dataclass
class PhaseMeter:
    """Cut the time since `start` into named phases and keep the peak of each.

    `on_change` is called with the phases so far and the name of the one now running, so that a watcher outside
    knows how far a killed process came.
    """

    on_change: Callable[["PhaseMeter"], None] = lambda meter: None
    base: Reading = field(default_factory=read)
    phases: dict[str, "PhasePeak"] = field(default_factory=dict)
    current: str | None = None
    last: str | None = None
    readings: dict[str, list[int]] = field(default_factory=dict)
    _entry: Reading | None = None

    def start(self) -> None:
        """Read the base: everything is counted above it."""
        self.base = read()
        with suppress(OSError):  # a sandbox may lack the file, see `mark_is_low`
            reset_peak()

    def enter(self, name: str | None) -> None:
        """End the running phase, if any, and begin the next (None begins none)."""
        now = read()
        if self.current is not None and self._entry is not None:
            self._close(self.current, self._entry, now)
        self.current, self._entry = name, now
        self.last = name or self.last
        self.on_change(self)
        with suppress(OSError):
            reset_peak()

    def _close(self, name: str, entry: Reading, now: Reading) -> None:
        phase = PhasePeak(
            name,
            entry.rss - self.base.rss,
            max(now.peak, now.rss) - self.base.rss,
            now.rss - self.base.rss,
            now.anon - self.base.anon,
            now.file - self.base.file,
            now.shmem - self.base.shmem,
        )
        self.readings.setdefault(name, []).append(phase.exit_bytes)
        before = self.phases.get(name)
        self.phases[name] = phase if before is None else before.widened(phase)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a block of code as one phase, returning to none."""
        self.enter(name)
        try:
            yield
        finally:
            self.enter(None)

    @property
    def peak_bytes(self) -> int:
        """The largest peak of any phase, above the base."""
        return max((phase.peak_bytes for phase in self.phases.values()), default=0)

    @property
    def peak_phase(self) -> str:
        """The phases whose peak is the run's, within the resolution, joined by commas."""
        top = self.peak_bytes - resolution_bytes()
        highest_first = sorted(self.phases.values(), key=lambda phase: -phase.peak_bytes)
        return ", ".join(phase.name for phase in highest_first if phase.peak_bytes >= top)


@dataclass(frozen=True)
class PhasePeak:
    """The peak of one phase in bytes above the base, and how the memory at its end divides."""

    name: str
    entry_bytes: int
    peak_bytes: int
    exit_bytes: int
    anon_bytes: int
    file_bytes: int
    shmem_bytes: int

    def widened(self, other: "PhasePeak") -> "PhasePeak":
        """Keep the larger of two occurrences, whole, with the largest file and shared growth of both."""
        larger = self if self.peak_bytes >= other.peak_bytes else other
        return replace(
            larger,
            file_bytes=max(self.file_bytes, other.file_bytes),
            shmem_bytes=max(self.shmem_bytes, other.shmem_bytes),
        )
