"""What one attempt at one task showed: `Record`, and the values it is made of."""

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from harness.records.case import Case, Claim, Value
from harness.records.roofline import Operations
from harness.records.task import Kind

SCHEMA_VERSION = 1
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
OPEN_STATUSES: frozenset[str] = frozenset({"killed_unknown", "unsupported", "skipped_guard"})
"""Statuses that a later run tries again; every other one is a result."""
LADDER = ("bit_exact", "reassociated", "reordered", "lower_precision", "approximate", "diverged", "invalid")


@dataclass(frozen=True)
class Verdict:
    """A rung of the `LADDER` and what put the strategy there.

    `grad_error_ratio` is the strategy's error over the baseline's, `bias_ratio` the part of its error that
    is a common scale, and `worst_ratio` the error ratio of `worst_tensor`, the one furthest into its bound.
    They are None where nothing could be measured, or where the baseline makes no error to divide by.
    """

    verdict: str
    grad_error_ratio: float | None
    bias_ratio: float | None
    worst_tensor: str | None
    worst_ratio: float | None
    warnings: tuple[str, ...]
    reason: str


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
