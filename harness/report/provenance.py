"""Where figures are from, in one sentence: when, of which commit, with which versions, on which machine."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.records import Record
from harness.report.text import escaped

GIB = 1 << 30
SHOWN = ("torch", "jax", "python")
"""Packages whose versions a reader asks for first."""
UNKNOWN = "unknown"
FEW = 3
"""Commits of all suites that are named; of more than so many their number is, since each suite names its own."""


@dataclass(frozen=True)
class Provenance:
    """Days, commits, versions and machines of some records, each once and in order; `measured` where any was run."""

    days: tuple[str, ...]
    commits: tuple[str, ...]
    versions: tuple[str, ...]
    machines: tuple[str, ...]
    measured: bool

    @property
    def when(self) -> str:
        """The day, or the first and the last one."""
        days = self.days or (UNKNOWN,)
        return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def of_records(records: Sequence[Record]) -> Provenance:
    """Collect where records are from; what they do not say is left out."""
    origins = [record.origin for record in records if record.origin.commit or record.origin.utc]
    versions = (f"{name} {origin.versions[name]}" for name in SHOWN for origin in origins if name in origin.versions)
    return Provenance(
        tuple(sorted({origin.utc[:10] for origin in origins if origin.utc})),
        _once(origin.commit for origin in origins if origin.commit),
        _once(versions),
        _once(_machine(origin.machine) for origin in origins if origin.machine.get("name")),
        any(record.status == "ok" and (record.memory.peak_phase or record.times.step_seconds) for record in records)
        or any(record.limits is not None and record.limits.runs for record in records),
    )


def line(records: Sequence[Record], of_suites: bool = False) -> str:
    """Write the sentence; an empty text for records that say nothing of it.

    Where they are those of all suites, many commits are counted.
    """
    origin = of_records(records)
    if not origin.commits:
        return ""
    what = "Measured" if origin.measured else "Predicted"
    count = len(origin.commits)
    named = " and ".join(f"`{escaped(commit)}`" for commit in origin.commits)
    commits = f"commit {named}" if count <= FEW or not of_suites else f"{count} commits (each suite names its own)"
    pieces = [f"{what} {origin.when} at {commits}"]
    if origin.versions:
        pieces.append(f"with {escaped(', '.join(origin.versions))}")
    if origin.machines:
        pieces.append(f"on {escaped(' and '.join(origin.machines))}")
    return f"*{', '.join(pieces)}.*"


def _machine(machine: dict[str, object]) -> str:
    memory = machine.get("memory_bytes")
    size = f", {memory / GIB:.0f} GiB" if isinstance(memory, int | float) else ""
    gpu = f", {machine['gpu']}" if machine.get("gpu") else ""
    return f"{machine.get('cpus', UNKNOWN)} CPUs of {machine.get('cpu', UNKNOWN)}{size}{gpu} ({machine['name']})"


def _once(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))
