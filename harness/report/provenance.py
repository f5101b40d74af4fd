"""Where figures are from, in one sentence: when, of which commit, with which versions, on which machine."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.records import Record
from harness.report.text import code, escaped

GIB = 1 << 30
SHOWN = ("torch", "jax", "python")
"""Packages whose versions a reader asks for first."""
UNKNOWN = "unknown"
FEW = 3
"""Commits of all suites that are named; of more than so many their number is, since each suite names its own."""


@dataclass(frozen=True)
class Provenance:
    """Days, commits, versions and machines of some records, each once and in order.

    Where any was `measured` they are those of what was, and `predicted` has the other commits: of predictions alone.
    """

    days: tuple[str, ...]
    commits: tuple[str, ...]
    versions: tuple[str, ...]
    machines: tuple[str, ...]
    measured: bool
    predicted: tuple[str, ...] = ()

    @property
    def when(self) -> str:
        """The day, or the first and the last one."""
        days = self.days or (UNKNOWN,)
        return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def of_records(records: Sequence[Record]) -> Provenance:
    """Collect where records are from; what they do not say is left out."""
    records = [record for record in records if record.origin.commit or record.origin.utc]
    measured = any(map(_is_measured, records))
    commits = _once(record.origin.commit for record in records if record.origin.commit)
    origins = [record.origin for record in records if _is_run(record) or not measured]
    own = _once(origin.commit for origin in origins if origin.commit)
    versions = (f"{name} {origin.versions[name]}" for name in SHOWN for origin in origins if name in origin.versions)
    return Provenance(
        tuple(sorted({origin.utc[:10] for origin in origins if origin.utc})),
        own,
        _once(versions),
        _once(_machine(origin.machine) for origin in origins if origin.machine.get("name")),
        measured,
        tuple(commit for commit in commits if commit not in own),
    )


def _is_measured(record: Record) -> bool:
    """Check whether a record has a figure of a run."""
    seen = record.status == "ok" and bool(record.memory.peak_phase or record.times.step_seconds)
    return seen or (record.limits is not None and bool(record.limits.runs))


def _is_run(record: Record) -> bool:
    """Check whether a record is of a run, however it ended, and of no prediction."""
    return _is_measured(record) or (record.slot is not None and record.slot.kind != "predict")


def line(records: Sequence[Record], of_suites: bool = False) -> str:
    """Write the sentence; an empty text for records that say nothing of it.

    Where they are those of all suites, many commits are counted.
    """
    origin = of_records(records)
    if not origin.commits:
        return ""
    what = "Measured" if origin.measured else "Predicted"
    pieces = [f"{what} {origin.when} at {_commits(origin.commits, of_suites)}"]
    if origin.versions:
        pieces.append(f"with {escaped(', '.join(origin.versions))}")
    if origin.machines:
        pieces.append(f"on {escaped(' and '.join(origin.machines))}")
    later = f"; some predictions at {_commits(origin.predicted, of_suites)}" if origin.predicted else ""
    return f"*{', '.join(pieces)}{later}.*"


def _commits(commits: Sequence[str], of_suites: bool) -> str:
    """Name commits; where they are those of all suites, count many."""
    if of_suites and len(commits) > FEW:
        return f"{len(commits)} commits (each suite names its own)"
    return f"commit {' and '.join(map(code, commits))}"


def _machine(machine: dict[str, object]) -> str:
    memory = machine.get("memory_bytes")
    size = f", {memory / GIB:.0f} GiB" if isinstance(memory, int | float) else ""
    gpu = f", {machine['gpu']}" if machine.get("gpu") else ""
    return f"{machine.get('cpus', UNKNOWN)} CPUs of {machine.get('cpu', UNKNOWN)}{size}{gpu} ({machine['name']})"


def _once(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))
