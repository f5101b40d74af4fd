"""What travels between processes and is kept: `Case`, `Task`, `Record`, and the JSONL file they end in."""

import hashlib
import json
import math
import os
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.frames import FrameFile
from harness.numerics import Verdict
from harness.tokens import TokenFile
from harness.work import Operations

SCHEMA_VERSION = 1
STAMP = "%Y%m%dT%H%M%SZ"
"""How the time is written in the name of a file."""

Status = Literal[
    "ok",
    "oom_budget",
    "oom_host",
    "oom_device",
    "timeout",
    "crash",
    "error",
    "killed_unknown",
    "unsupported",
    "invalid_output",
    "skipped_guard",
]
Kind = Literal["predict", "reference", "numerics", "memory", "pilot", "time", "contract"]

OPEN_STATUSES: frozenset[str] = frozenset({"killed_unknown", "unsupported", "skipped_guard"})
"""Statuses that a later run tries again; every other one is a result."""


class Value(BaseModel):
    """A frozen value that refuses unknown keys and coerced types."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, ser_json_inf_nan="constants"
    )


class Applied(Value):
    """A strategy with the knobs it was given; the knobs left out keep their defaults."""

    name: str
    knobs: dict[str, bool | int | float | str] = Field(default_factory=dict)

    def __str__(self) -> str:
        knobs = ", ".join(f"{key}={_knob_text(value)}" for key, value in self.knobs.items())
        return f"{self.name}({knobs})" if knobs else self.name


def _knob_text(value: bool | int | float | str) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class Claim(Value):
    """A sentence that somebody believes, and an expression over measured figures that decides it (`harness.claims`)."""

    id: str = Field(min_length=1, max_length=64)
    says: str = Field(min_length=1, max_length=1000)
    that: str = Field(min_length=1, max_length=1000)
    where: dict[str, bool | int | float | str] = Field(default_factory=dict)


class Case(Value):
    """One row of a comparison: a workload at a shape, in a place, with strategies applied left to right.

    `ranks` are the processes (in JAX: the devices of one process) among which the strategies divide the run; the budget
    is that of each.
    """

    workload: str
    shape: dict[str, Any]
    place: str
    corpus: str
    tokenizer: str
    strategies: tuple[Applied, ...] = ()
    seed: int = 0
    budget_bytes: int | None = None
    ranks: int = Field(1, ge=1, le=1024)

    @property
    def label(self) -> str:
        """The name of the row: the strategies joined by ` + `, or `baseline`; and on how many ranks, if several."""
        return self.strategies_label + (f" on {self.ranks} ranks" if self.ranks > 1 else "")

    @property
    def strategies_label(self) -> str:
        """The strategies joined by ` + `, or `baseline`."""
        return " + ".join(map(str, self.strategies)) or "baseline"

    @property
    def plain(self) -> "Case":
        """The case that this one is compared to: without strategies, in one process."""
        return self.model_copy(update={"strategies": (), "ranks": 1})

    @property
    def group(self) -> str:
        """A key that a case shares with those it is compared to: all but the strategies and their ranks."""
        return self.plain.digest()

    def digest(self, *versions: str) -> str:
        """Hash the case with the versions of the code that runs it (SHA-256 of canonical JSON)."""
        text = json.dumps([self.model_dump(mode="json"), *versions], sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:24]


class Task(Value):
    """All that a worker is told. `cases` holds one case, but for the predictor, which takes many.

    `corpora` are the rows that each group of cases reads, None where the workload draws its own.
    """

    kind: Kind
    cases: tuple[Case, ...]
    run_id: str
    parent: int
    folder: str
    corpora: dict[str, TokenFile | FrameFile | None] = Field(default_factory=dict)
    plugins: tuple[str, ...] = ()
    round: int = 0
    repeat: int = 0
    steps: int = 3
    warmup: int = 1
    reference: str | None = None

    @property
    def case(self) -> Case:
        return self.cases[0]

    @property
    def corpus(self) -> TokenFile | FrameFile | None:
        """The rows of the first case."""
        return self.corpora.get(self.case.group)


class Phase(Value):
    """Memory of one phase, in bytes above the settled base; the largest one where a phase came several times."""

    name: str
    entry_bytes: int
    peak_bytes: int
    exit_bytes: int
    anon_bytes: int | None = None
    file_bytes: int | None = None
    shmem_bytes: int | None = None


class Rank(Value):
    """What one process of a case on several ranks held: its peak in bytes above its settled base, and where it was."""

    peak_bytes: int | None = None
    peak_phase: str | None = None
    phases: tuple[Phase, ...] = ()


class Fit(Value):
    """The longest value of one size that fits a budget: as predicted, and as real runs found it.

    `passed` is the largest that ran, `failed` the smallest that did not and `how` the status it ended with; None where
    no run showed one. `reason` says why there is no more.
    """

    over: str
    budget_bytes: int
    predicted: int | None = None
    passed: int | None = None
    failed: int | None = None
    how: str = ""
    runs: int = 0
    reason: str = ""

    @property
    def longest(self) -> int | None:
        """The largest value that ran, or where none was run the predicted one."""
        return self.passed if self.runs else self.predicted


class Slot(Value):
    """The place of a record in the plan of a run."""

    case: str
    kind: Kind
    round: int = 0
    repeat: int = 0


class Record(Value):
    """What one attempt at one task showed. Bytes are integers above the base, seconds floats; unknown is None.

    A record without a slot begins a run: it keeps the title and the `claims` of the suite.
    `plan` is a digest of all slots of the run, so that only the same run is resumed.
    `feeds` is what the strategies declare of their batches, and `fetch_seconds` the part of each step that was spent
    on getting its batch.
    `missing` gives the reason for a None that a reader would ask about; `probe` is the slot in which the answer of
    this case was compared. Of child processes there is a sampled sum of proportional sizes, a lower bound, and the sum
    of each one's own high-water mark, an upper one.
    Of a case on several ranks the peaks are those of the rank that held most, `ranks` has each, and `all_ranks_bytes`
    is their sum. Where they are devices of one process, the sum is measured and the peak its share.
    """

    schema_version: int = SCHEMA_VERSION
    run_id: str = ""
    suite: str = ""
    plan: str = ""
    slot: Slot | None = None
    attempt: int = 1
    utc: str = ""
    title: str = ""
    claims: tuple[Claim, ...] = ()
    position: int = 0
    case: Case | None = None
    probe: str | None = None
    status: Status = "ok"
    evidence: dict[str, Any] = Field(default_factory=dict)
    flags: tuple[str, ...] = ()
    missing: dict[str, str] = Field(default_factory=dict)

    regime: str | None = None
    resolution_bytes: int | None = None
    base_rss_bytes: int | None = None
    peak_host_bytes: int | None = None
    peak_phase: str | None = None
    phases: tuple[Phase, ...] = ()
    resident_bytes: int | None = None
    compile_peak_bytes: int | None = None
    native_peak_host_bytes: int | None = None
    budget_bytes: int | None = None
    within_budget: bool | None = None
    slope_bytes_per_step: float | None = None
    ranks: tuple[Rank, ...] = ()
    all_ranks_bytes: int | None = None
    child_peak_bytes: int | None = None
    child_peak_bound_bytes: int | None = None

    peak_device_bytes: int | None = None
    requested_device_bytes: int | None = None
    reserved_device_bytes: int | None = None
    pinned_host_bytes: int | None = None
    driver_device_bytes: int | None = None
    context_device_bytes: int | None = None
    allocation_retries: int | None = None

    predicted_peak_bytes: int | None = None
    predicted_phase: str | None = None
    predicted_phases: tuple[Phase, ...] = ()
    predicted_work: tuple[Operations, ...] = ()
    floor_bytes: int | None = None
    parameters: int | None = None

    losses: tuple[float, ...] = ()
    feeds: str = "same"
    batches_digest: str | None = None
    batches_digests: tuple[str, ...] = ()
    step_seconds: tuple[float, ...] = ()
    fetch_seconds: tuple[float, ...] = ()
    first_step_seconds: float | None = None
    compile_seconds: float | None = None
    warmup_steps: int | None = None

    answer: Verdict | None = None
    fit: Fit | None = None
    notes: dict[str, str] = Field(default_factory=dict)
    worker_seconds: float | None = None
    machine: dict[str, Any] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    commit: str = ""
    extra: dict[str, Any] = Field(default_factory=dict)


class StoreError(Exception):
    """A results file or folder that cannot be used, in one sentence."""


def encoded(record: Record) -> bytes:
    """Write a record as one line of JSON; raise ValueError for a figure that is not finite."""
    return (json.dumps(record.model_dump(mode="json", exclude_defaults=True), allow_nan=False) + "\n").encode()


def append(path: Path, record: Record) -> None:
    """Write one record as one line, whole and synced; call it only under `locks.measuring`.

    A torn last line of an earlier run is closed first, so that it cannot swallow this one.
    """
    data = encoded(record)
    try:
        new = not path.exists()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                os.write(descriptor, b"\n")
            written = os.write(descriptor, data)
            if written != len(data):
                raise StoreError(f"only {written} of {len(data)} bytes of a record fit into '{path}': make room")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if new:
            _sync_folder(path.parent)
    except OSError as error:
        raise StoreError(
            f"a record cannot be written to '{path}' ({error.strerror}): make room or give rights"
        ) from None


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path) -> tuple[list[Record], list[str]]:
    """Read the records of a file, and one sentence for each line that is not one."""
    records: list[Record] = []
    problems: list[str] = []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise StoreError(f"results cannot be read from '{path}' ({error.strerror})") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = parse(line)
        except ValueError as error:
            problems.append(f"{path}:{number}: {error}")
        else:
            records.append(record)
    return records, problems


def next_file(folder: Path, commit: str) -> Path:
    """Name the results of a run that begins now: by the time and the commit, and after all that are there.

    So the newest file is the last one begun, even where the clock was set back.
    """
    now = datetime.now(UTC).replace(microsecond=0)
    for file in folder.glob("*.jsonl"):
        with suppress(ValueError):
            now = max(now, datetime.strptime(file.name.split("-")[0], STAMP).replace(tzinfo=UTC) + timedelta(seconds=1))
    return folder / f"{now:{STAMP}}-{commit}.jsonl"


def newest(path: Path) -> list[Path]:
    """Find the results below a path: the file itself, or the newest file of each folder."""
    if not path.exists():
        raise StoreError(f"there is no '{path}': name a results file or folder")
    if path.is_file():
        return [path]
    by_folder = {file.parent: file for file in sorted(path.rglob("*.jsonl"))}
    return [by_folder[folder] for folder in sorted(by_folder)]


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not finite")
    return number


def parse(line: bytes | str) -> Record:
    """Read one record; raise ValueError with one sentence for anything else."""
    try:
        version = json.loads(line, parse_constant=_finite, parse_float=_finite).get("schema_version", SCHEMA_VERSION)
    except (ValueError, AttributeError, RecursionError):
        raise ValueError("this line is not a record (torn or edited); it is left out") from None
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise ValueError(f"this record has format {version!r}, newer than {SCHEMA_VERSION}: update the harness")
    try:
        return Record.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        shown = where.encode("unicode_escape").decode()[:100]
        raise ValueError(f"this record has a wrong '{shown}' ({first['msg']}); it is left out") from None
