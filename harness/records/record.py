"""What one attempt at one task showed: `Record`, and the rooms of figures that it has.

Bytes are integers above the settled base of a process, seconds are floats, ratios plain numbers. Unknown is None.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from harness.records.case import Case, Claim, Value
from harness.records.forecast import Standing
from harness.records.roofline import Operations
from harness.records.task import Kind

SCHEMA_VERSION = 2
Size = Annotated[int, Field(ge=0)]
"""A number of bytes, or of parameters, that a case is predicted to have."""
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
OUT_OF_MEMORY: frozenset[str] = frozenset({"oom_budget", "oom_host", "oom_device"})
"""Statuses of a run whose memory ran out: that of its budget, of the host or of the device."""
LADDER = ("bit_exact", "reassociated", "reordered", "lower_precision", "approximate", "diverged", "invalid")
"""The rungs of an answer, best first."""
EXACT = frozenset({"bit_exact", "reassociated", "reordered"})
"""Rungs of an answer that is the baseline's, but for rounding and the order of windows."""
WRONG = frozenset({"diverged", "invalid"})
"""Rungs of an answer that nobody may use."""


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
    """Memory of one process of a case on several ranks: its peak above its settled base, and in which phase."""

    peak_bytes: int | None = None
    peak_phase: str | None = None
    phases: tuple[Phase, ...] = ()


def refusal_of(over: str, value: int, why: str = "") -> str:
    """Say that a workload does not take a value of one of its sizes, and why, where that is known."""
    return f"the workload refuses {over} {value:,}{f': {why}' if why else ''}"


class Fit(Value):
    """The longest value of one size that fits a budget: as predicted, and as real runs showed it.

    `predicted` is the largest that is to fit even if it takes `at_most_bytes`, not the `predicted_peak_bytes`; on a GPU
    in torch with the segments that hold it, `predicted_reserved_bytes`, and within the `host_limit_bytes` where those
    are known.
    `passed` is the largest that ran, `failed` the smallest that did not and `how` the status it ended with; None where
    no run showed one. `reason` says why there is no more. It is `open` where nothing was predicted to be too large, so
    that more than `predicted` may fit.
    """

    over: str
    budget_bytes: int
    predicted: int | None = None
    predicted_peak_bytes: int | None = None
    predicted_reserved_bytes: int | None = None
    host_limit_bytes: int | None = None
    at_most_bytes: int | None = None
    passed: int | None = None
    failed: int | None = None
    how: str = ""
    runs: int = 0
    reason: str = ""
    open: bool = False

    @property
    def longest(self) -> int | None:
        """The largest value that ran, or where none was run the predicted one."""
        return self.passed if self.runs else self.predicted

    @property
    def is_of_workload(self) -> bool:
        """Whether the search ended since the workload takes no larger value than the longest."""
        if self.longest is None:
            return False
        refusal = refusal_of(self.over, self.longest + 1)
        return self.reason == refusal or self.reason.startswith(f"{refusal}: ")


class Trial(Value):
    """How a case ended that ran with its predicted peak as its budget, and with what it takes at most.

    None where it was not run so; `reason` says why. `peak_bytes` is what was measured in the wider limit in which it
    ended well.
    """

    predicted_peak_bytes: int | None = None
    predicted_phase: str | None = None
    at_most_bytes: int | None = None
    coverage: float | None = None
    at_point: Status | None = None
    at_most: Status | None = None
    peak_bytes: int | None = None
    reason: str = ""

    @property
    def slack(self) -> float | None:
        """The share of the measured peak by which it stayed below what it takes at most."""
        if not self.peak_bytes or self.at_most_bytes is None:
            return None
        return self.at_most_bytes / self.peak_bytes - 1


class Slot(Value):
    """The place of a record in the plan of a run."""

    case: str = Field(description="digest of the case and of the code that runs it")
    kind: Kind = Field(description="what the worker did")
    round: int = Field(0, description="number of the time round, from 0")
    repeat: int = Field(0, description="number of the repetition of a memory measurement, from 0")
    block: int = Field(0, description="number of the block within a time round, from 0")


class Origin(Value):
    """Where a record is from: the run, the machine, the code."""

    run_id: str = Field("", description="name of the run: when it began, in which process, and by chance")
    suite: str = Field("", description="name of the suite")
    plan: str = Field("", description="digest of what identifies the run, so that only the same one is resumed")
    attempt: int = Field(1, description="how often this slot was tried, from 1")
    utc: str = Field("", description="when the record was written, UTC")
    commit: str = Field("", description="commit of the harness; '-dirty' where the code differed from it")
    machine: dict[str, Any] = Field(default_factory=dict, description="what decides a figure on this machine")
    versions: dict[str, str] = Field(default_factory=dict, description="versions of Python and of the packages")
    start: str = Field("", description="'forked' from a template process, or 'fresh': how the worker began")
    worker_seconds: float | None = Field(None, description="since the worker's start or last record, seconds")


class Heading(Value):
    """What a suite says beside its cases; it stands in the first record of a run."""

    title: str = Field("", description="the suite's title")
    asked: str = Field("", description="the words of a command line that name the suite or the model, and plugins")
    claims: tuple[Claim, ...] = Field((), description="sentences, and the expressions that decide them")
    rounds: int = Field(0, description="time rounds at most; 0 where the format did not say")
    code: dict[str, str] = Field(default_factory=dict, description="digest of each module that decides a figure")


class Prediction(Value):
    """What a case is predicted to take, without running it."""

    predicted_peak_bytes: Size | None = Field(None, description="predicted peak of one rank, bytes")
    at_most_bytes: Size | None = Field(None, description="what one rank takes at most, by errors of its kind, bytes")
    at_most_coverage: float | None = Field(None, description="probability that it takes no more")
    declared_answer: str | None = Field(None, description="what the strategies declare of their answer, at worst")
    predicted_phase: str | None = Field(None, description="phase that is predicted to set the peak")
    predicted_phases: tuple[Phase, ...] = Field((), description="predicted peak of each phase, bytes")
    predicted_work: tuple[Operations, ...] = Field((), description="counted work of one steady step")
    predicted_stages: dict[str, int] = Field(default_factory=dict, description="held after each stage, bytes")
    predicted_kinds: dict[str, int] = Field(default_factory=dict, description="the most of each kind, bytes")
    predicted_reserved_bytes: Size | None = Field(None, description="predicted peak of a GPU's segments, base included")
    predicted_base_bytes: Size | None = Field(None, description="allocated on a GPU before the run, in no peak, bytes")
    predicted_driver_bytes: Size | None = Field(
        None, description="predicted segments and context of the process, bytes"
    )
    predicted_host_bytes: Size | None = Field(None, description="predicted memory of the host beside a GPU, bytes")
    predicted_standing: tuple[Standing, ...] = Field((), description="what stands at the predicted peak, by maker")
    error: str | None = Field(None, description="the error that its step, tried without data, ended with")
    floor_bytes: Size | None = Field(None, description="analytic floor of a step that has everything at once, bytes")
    parameters: Size | None = Field(None, description="number of parameters of the model")

    @property
    def need_bytes(self) -> int | None:
        """What to keep free for it: what it takes at most, or what is known of that.

        The floor is that of float32, above what a row in 16 bits may take: it counts where nothing is predicted.
        """
        known = [each for each in (self.at_most_bytes, self.predicted_peak_bytes) if each is not None]
        highest = max(known, default=self.floor_bytes)
        return None if highest is None else highest + self.beside_bytes(within_budget=False)

    def beside_bytes(self, within_budget: bool) -> int:
        """Return what is taken beside the peak of what is allocated: on a GPU in torch the rest of its segments.

        A budget bounds them above the base. The card bounds all of them, and the context where that is known.
        """
        peak, reserved = self.predicted_peak_bytes, self.predicted_reserved_bytes
        if peak is None or reserved is None:
            return 0
        if within_budget:
            return reserved - (self.predicted_base_bytes or 0) - peak
        return (self.predicted_driver_bytes or reserved) - peak


class Memory(Value):
    """Peaks of one run, by phase, and proof that the run trained."""

    regime: str | None = Field(None, description="'glibc-pinned' or 'native': how the allocator was set")
    resolution_bytes: int | None = Field(None, description="smallest difference that the meter resolves, bytes")
    base_rss_bytes: int | None = Field(None, description="resident set after priming, subtracted everywhere, bytes")
    peak_host_bytes: int | None = Field(None, description="largest high-water mark over all phases, bytes")
    peak_phase: str | None = Field(None, description="phase that set the peak")
    peak_step: int | None = Field(None, description="step in which the peak was reached, from 1")
    phases: tuple[Phase, ...] = Field((), description="memory of each phase, bytes")
    resident_bytes: int | None = Field(None, description="resident after the parameters were made, bytes")
    stages: dict[str, int] = Field(default_factory=dict, description="held after each stage of the first step, bytes")
    kinds: dict[str, int] = Field(default_factory=dict, description="bytes of each kind: parameters, moments, ...")
    compile_peak_bytes: int | None = Field(None, description="growth of the host while compiling, bytes; in no peak")
    compile_seconds: float | None = Field(None, description="compiling ahead of the first step, seconds")
    budget_bytes: int | None = Field(None, description="allowance over the base, bytes")
    within_budget: bool | None = Field(None, description="whether the measured peak stayed within the allowance")
    slope_bytes_per_step: float | None = Field(None, description="growth from step to step, bytes")
    ranks: tuple[Rank, ...] = Field((), description="memory of each rank; the peak is that of the largest")
    all_ranks_bytes: int | None = Field(None, description="sum of the peaks of all ranks, bytes")
    peak_device_bytes: int | None = Field(None, description="peak of the device's allocator, bytes")
    requested_device_bytes: int | None = Field(None, description="peak of the bytes asked for, unrounded (torch)")
    reserved_device_bytes: int | None = Field(None, description="peak of segments taken from the driver, bytes")
    driver_device_bytes: int | None = Field(None, description="driver's view of this process, sampled, bytes")
    context_device_bytes: int | None = Field(None, description="device memory beside the allocator's own, bytes")
    pinned_host_bytes: int | None = Field(None, description="peak of page-locked host memory (torch), bytes")
    allocation_retries: int | None = Field(None, description="allocations that torch had to try again")
    losses: tuple[float, ...] = Field((), description="loss of each step, and of an evaluation at the end")
    feeds: str = Field("same", description="how far the batches may differ from the baseline's, as declared")
    batches_digest: str | None = Field(None, description="digest of all batches that were trained on")
    batches_digests: tuple[str, ...] = Field((), description="digest of each batch")


class Times(Value):
    """Step times of one process."""

    regime: str | None = Field(None, description="'glibc-pinned' or 'native': how the allocator was set")
    base_rss_bytes: int | None = Field(None, description="resident set before the loop, bytes")
    native_peak_host_bytes: int | None = Field(None, description="peak with the allocator as it is, bytes")
    step_seconds: tuple[float, ...] = Field((), description="every timed step, seconds")
    uneven: bool = Field(False, description="whether batches differ in size: then whole epochs are timed")
    fetch_seconds: tuple[float, ...] = Field((), description="wait of each timed step for its batch, seconds")
    prepare_seconds: tuple[float, ...] = Field((), description="making the windows, seconds")
    first_step_seconds: float | None = Field(
        None, description="from the start of the run to the end of its first step, which is in no median, seconds"
    )
    warmup_steps: int | None = Field(None, description="steps between the first and the timed ones")
    turns: int = Field(1, description="turns of the timed steps, between which processes of other rows had theirs")
    rest_seconds: float = Field(0.0, description="time that the process was stopped between its turns, seconds")
    cpu_seconds: float | None = Field(None, description="processor time of the timed steps, all threads, seconds")
    minor_faults: int | None = Field(None, description="page faults without reading, during the timed steps")
    major_faults: int | None = Field(None, description="page faults that read a file, during the timed steps")
    switches: int | None = Field(None, description="involuntary context switches during the timed steps")


ROOMS = ("prediction", "numerics", "memory", "times", "limits", "trial")
"""Fields of a record that hold figures; a task fills one of them."""


class Record(Value):
    """What one attempt at one task showed: where it is from, how it ended, and one room of figures.

    `missing` gives the reason for a None that a reader would ask about. Of child processes there is a sampled sum of
    proportional sizes, a lower bound, and the sum of each one's own high-water mark, an upper one. Ranks that are
    devices of one process are measured together, and the peak is their share.
    """

    schema_version: int = Field(SCHEMA_VERSION, description="format of this line")
    origin: Origin = Field(default_factory=Origin, description="run, machine and code")
    heading: Heading = Field(default_factory=Heading, description="title and claims, in the first record of a run")
    slot: Slot | None = Field(None, description="place in the plan of the run")
    position: int = Field(0, description="row of the case in the tables, from 0")
    case: Case | None = Field(None, description="what was run")
    probe: str | None = Field(None, description="slot in which the answer of this case was compared")
    status: Status = Field("ok", description="how the attempt ended")
    evidence: dict[str, Any] = Field(default_factory=dict, description="what shows that it ended so")
    flags: tuple[str, ...] = Field((), description="doubts about the figures, known without looking at them")
    missing: dict[str, str] = Field(default_factory=dict, description="reasons for figures that are not there")
    notes: dict[str, str] = Field(default_factory=dict, description="what parts of the run wrote down, in words")
    extra: dict[str, Any] = Field(default_factory=dict, description="numbers of parts and of instruments")
    child_peak_bytes: int | None = Field(None, description="children: sampled sum of proportional sets, bytes")
    child_peak_bound_bytes: int | None = Field(
        None, description="children that may have been there at once: sum of high-water marks, bytes"
    )
    prediction: Prediction = Field(default_factory=Prediction, description="figures of a prediction")
    numerics: Verdict | None = Field(None, description="the answer's rung, of a comparison of answers")
    memory: Memory = Field(default_factory=Memory, description="figures of a memory measurement")
    times: Times = Field(default_factory=Times, description="figures of a time measurement")
    limits: Fit | None = Field(None, description="figures of a search for the longest value that fits")
    trial: Trial | None = Field(None, description="figures of a prediction that was tried as a limit")

    @property
    def step_losses(self) -> tuple[float, ...]:
        """The loss of each step of the measured run, without that of an evaluation at its end."""
        evaluated = self.case is not None and self.case.shape.get("evaluations")
        return self.memory.losses[:-1] if evaluated else self.memory.losses

    @property
    def peak_bytes(self) -> int | None:
        """The measured peak, of the host or the device, whichever the place of its case is about; in bytes."""
        on_host = self.case is None or self.case.place.device == "cpu"
        return self.memory.peak_host_bytes if on_host else self.memory.peak_device_bytes

    @model_validator(mode="after")
    def _has_one_room(self) -> Self:
        rooms = [name for name in ROOMS if getattr(self, name) not in (None, *_EMPTY)]
        if len(rooms) > 1:
            raise ValueError(f"a record has figures of one kind, not of {' and '.join(rooms)}")
        return self


_EMPTY: tuple[Value, ...] = (Prediction(), Memory(), Times())


def heading_of(records: Sequence[Record]) -> Heading:
    """Return what a suite said beside its cases when the newest run among its records began; empty where none did."""
    headings = (record.heading for record in reversed(records) if record.slot is None)
    return next((each for each in headings if each.title or each.claims or each.asked), Heading())


def upgraded(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a record of format 1, which had all of its fields side by side, in the rooms of this format.

    Raises ValueError for one that has a room already.
    """
    slot = fields.get("slot")
    kind = str(slot.get("kind")) if isinstance(slot, dict) else ""
    if foreign := [name for name in fields if name in ("origin", "heading", *_FIGURES)]:
        raise ValueError(f"this record has a wrong '{foreign[0]}' (not of its format); it is left out")
    room = {"predict": "prediction", "time": "times", "pilot": "times"}.get(kind, "memory")
    new: dict[str, Any] = {"schema_version": SCHEMA_VERSION}
    for name, value in fields.items():
        if name == "schema_version" or name in _DROPPED or (name == "compile_seconds" and room == "times"):
            continue
        elif name in ("answer", "fit"):
            new[{"answer": "numerics", "fit": "limits"}[name]] = value
        elif name in ("title", "claims"):
            new.setdefault("heading", {})[name] = value
        elif name in Origin.model_fields:
            new.setdefault("origin", {})[name] = value
        elif name in Record.model_fields:
            new[name] = value
        else:
            home = next((home for home in (room, *_FIGURES) if name in _FIGURES.get(home, {})), None)
            if home is None:
                new[name] = value  # refused, and named, by the model
            else:
                new.setdefault(home, {})[name] = value
    return new


_DROPPED = ("pinned_host_bytes", "context_device_bytes")
"""Fields of format 1 that no code ever set."""
_FIGURES = {"prediction": Prediction.model_fields, "memory": Memory.model_fields, "times": Times.model_fields}
