"""What is to be known of a judged row beside its figures: flags, notes in words, and why there is no verdict."""

from collections.abc import Iterable
from statistics import mode

from harness.contract.parts import BESIDE
from harness.contract.place import Place
from harness.records import Prediction, Record
from harness.records.record import OPEN_STATUSES, OUT_OF_MEMORY
from harness.verdicts.observed import Observed

MIB = 1 << 20
UNSTABLE = 0.01
LEAK_STEPS = 5
"""Steps of a run from which on growth is called so: in fewer, an allocator may still settle."""
LEAK_MARGIN = 0.01
SETTLING = 0.05
"""The share of its peak by which a baseline may grow with each step."""
PREDICTION_OFF = 0.10
REACHING = 0.05
"""Of savings above this share it is noted where less than half of them reaches a user of the usual allocator."""
LEAST_FOR_PERCENT = 32 * MIB
"""Peaks below this have their residual in bytes: the meter's own error is a large share of them."""
EXPLAINING = ("ValueError", "Refusal", "PluginError", "CutError", "CorpusError", "SizeError")
"""Errors whose message is a sentence for the user: of others, it may be no more than a key."""
FIRST = "a small step before the run"
"""The phase `prime`, in words."""
WITHHELD = {
    "unsettled": "its memory did not settle before the run: measure it again on a quiet machine",
    "no_reset": "its peak could not be reset: run `harness doctor`",
    "native_regime": "its allocator was not pinned: measure memory on a system with glibc",
    "lower_bound": "its worker died before the peak was read: measure it again",
    "child_processes": "what its child processes hold was not seen: measure it again",
}
"""Flags of a memory measurement that withhold its verdict, and what to do about each."""
OF_THE_HOST = WITHHELD.keys() - {"lower_bound"}
"""Those that say nothing of the memory of a device."""
VAGUE = (
    "repetitions of it or of the baseline differ, and not all of them give the same word: "
    "measure it again on a quiet machine"
)
HANGING = "whether it takes more hangs on what its child processes share, see their bounds"
"""Why peaks of which each is known give no word."""
AGAIN = "run the suite again, which goes on where it stopped"
ANEW = "mend that, and run the suite with --fresh"
OPEN_BASELINE = {
    "open": f"the baseline was not measured yet: {AGAIN}",
    "killed_unknown": f"the baseline was killed, nobody can say by what: {AGAIN}",
    "skipped_guard": "the baseline was not started: run the suite again with --try-all, and without --max-bytes",
}
"""Statuses of a baseline whose measurement a later run tries again, and what to do about each."""
DOUBTFUL = {"unstable", *WITHHELD}
"""Flags of a peak that is not to be compared as one number."""


def doubts(observed: Observed) -> list[str]:
    """Return the flags of a row's memory that withhold its verdict."""
    flagged = {flag for record in observed.memory for flag in record.flags}
    if observed.children is not None:
        flagged.discard("child_processes")
    if observed.case.place.device != "cpu":
        flagged -= OF_THE_HOST
    return [flag for flag in WITHHELD if flag in flagged]


def unsure(flags: Iterable[str], place: Place) -> set[str]:
    """Return those flags of a row for which its peak is not to be compared as one number."""
    return set(flags) & DOUBTFUL - (set() if place.device == "cpu" else OF_THE_HOST)


def _unstable(observed: Observed) -> bool:
    """Check whether repetitions differ by more than 1 % and the meter's resolution."""
    peaks = observed.peaks
    return len(peaks) > 1 and max(peaks) - min(peaks) > max(observed.resolution, UNSTABLE * max(peaks))


def flags(observed: Observed, growth: float | None) -> tuple[str, ...]:
    """Return the flags of a row: those of its records, and what only all of them show.

    What is doubtful about the memory of a timed process says nothing of the peak, which is of another.
    """
    flagged = [flag for record in observed.memory for flag in record.flags]
    flagged += [flag for record in observed.times.values() for flag in record.flags if flag not in WITHHELD]
    flagged += ["unstable"] if _unstable(observed) else []
    flagged += ["impossible_times"] if observed.impossible else []
    if observed.status == "ok" and observed.own_peak and observed.predict is not None:
        flagged += _against_prediction(observed.own_peak, observed.predict.prediction)
    flagged += ["growing"] if growth else []
    return tuple(dict.fromkeys(flagged))


def _against_prediction(peak: int, prediction: Prediction) -> list[str]:
    predicted, at_most = prediction.predicted_peak_bytes, prediction.at_most_bytes
    flagged = []
    if predicted and max(peak, predicted) >= LEAST_FOR_PERCENT and abs(peak - predicted) > PREDICTION_OFF * predicted:
        flagged.append("prediction_off")
    if at_most and peak > at_most:
        flagged.append("above_bound")
    return flagged


def growth(observed: Observed, baseline: Observed | None) -> float | None:
    """Return the bytes by which a run grew with each step, where that is more than the baseline's did: a leak.

    What settles slowly over the few steps of a run grows in the baseline as well, which has nothing to be compared with
    and must grow by more; pages of a file are the kernel's to take back.
    """
    record = observed.memory[0] if observed.memory else None
    if record is None or record.memory.slope_bytes_per_step is None or "file_backed" in record.flags:
        return None
    if len(record.memory.losses) < LEAK_STEPS:
        return None
    other = baseline.memory[0] if baseline is not None and observed is not baseline and baseline.memory else None
    settling = max(0.0, other.memory.slope_bytes_per_step or 0.0) if other is not None else 0.0
    more = record.memory.slope_bytes_per_step - settling
    margin = LEAK_MARGIN if other is not None else SETTLING
    least = max(record.memory.resolution_bytes or 0, margin * (record.memory.peak_host_bytes or 0))
    return record.memory.slope_bytes_per_step if more > least else None


def notes(observed: Observed, growth: float | None) -> tuple[str, ...]:
    """Collect what is to be known of a row, in words: what its parts noted, file pages among the peak, growth."""
    if not observed.memory:
        return ()
    record = observed.memory[0]
    noted = {**(observed.predict.notes if observed.predict else {}), **record.notes}
    texts = [f"{name.replace('_', ' ')}: {note}" for name, note in noted.items()]
    numbers = {name: value for name, value in record.extra.items() if _is_number(value) and name != BESIDE}
    texts += [f"{name.replace('_', ' ')} {_number(value)}" for name, value in numbers.items()]
    pages = max((phase.file_bytes or 0 for phase in record.memory.phases), default=0)
    if "file_backed" in record.flags:
        texts.append(f"{pages / MIB:,.0f} MiB are pages of a file, which the kernel can take back")
    if record.memory.all_ranks_bytes:
        peaks = [rank.peak_bytes / MIB for rank in record.memory.ranks if rank.peak_bytes is not None]
        ranks, together = observed.case.ranks, f"{record.memory.all_ranks_bytes / MIB:,.0f} MiB"
        texts.append(
            f"each of {ranks} ranks holds {_span(peaks)} MiB, together {together}"
            if peaks
            else f"the {ranks} ranks are devices of one process, which holds {together} for all of them"
        )
    if record.child_peak_bound_bytes:
        low, high = (record.child_peak_bytes or 0) / MIB, record.child_peak_bound_bytes / MIB
        whose = "it" if observed.case.place.device == "cpu" else "the host's memory"
        bound = ", and at most and residual are without them" if observed.case.place.device == "cpu" else ""
        texts.append(f"its child processes take {_span((min(low, high), high), digits=0)} MiB of {whose}{bound}")
    if growth:
        whose = "it" if observed.case.place.device == "cpu" else "the host's memory"
        texts.append(f"{whose} grew by {growth / MIB:,.1f} MiB with each step")
    if observed.impossible:
        processes = "process" if observed.impossible == 1 else "processes"
        texts.append(f"{observed.impossible} timed {processes} left out: their clock gave times that no step can take")
    if text := unfinished(observed.times.values()):
        texts.append(text)
    return tuple(texts)


def unfinished(records: Iterable[Record]) -> str:
    """Return how many timed processes did not finish, and the most frequent reason; an empty text where all did."""
    timed = [record for record in records if record.slot and record.slot.kind == "time"]
    failures = [failure(record) for record in timed if record.status != "ok"]
    if not failures:
        return ""
    return f"{len(failures)} of {len(timed)} timed processes did not finish: {mode(failures)}"


def saving_note(ratio: float | None, native_ratio: float | None) -> tuple[str, ...]:
    """Return a note where a saving hardly reaches a user, whose allocator keeps what is freed: less than half of it."""
    if ratio is None or native_ratio is None or ratio >= 1 - REACHING or 1 - native_ratio >= (1 - ratio) / 2:
        return ()
    reached = f"only {1 - native_ratio:.0%}" if native_ratio < 0.995 else "nothing"
    return (f"it saves {1 - ratio:.0%} of the peak, but {reached} with the usual allocator",)


def warnings(observed: Observed, answer: str | None) -> tuple[str, ...]:
    """Return what the comparison of its answer warned of; none of an approximate one, which is not judged."""
    verdict = observed.answer.numerics if observed.answer else None
    return verdict.warnings if verdict is not None and answer != "approximate" else ()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _span(sizes: Iterable[float], digits: int = 1) -> str:
    """Write the smallest and the largest size, or the one that they are."""
    sizes = list(sizes)
    return " to ".join(dict.fromkeys(f"{size:,.{digits}f}" for size in (min(sizes), max(sizes))))


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def reasons(observed: Observed) -> tuple[str, ...]:
    """Return why a row did not end well, and why it has no prediction."""
    ended = [record for record in observed.memory if record.status != "ok"]
    why = [failure(record) for record in ended]
    if not why and observed.status == "oom_budget":
        over = (observed.own_peak or 0) + (observed.children or (0, 0))[0] - (observed.case.budget_bytes or 0)
        why = [f"with its child processes it took at least {over / MIB:,.1f} MiB more than its budget"]
    if observed.status != "unsupported" and observed.predict is not None:
        missing = observed.predict.missing.get("predicted_peak_bytes")
        again = missing and any(missing.startswith(message(record)) for record in ended)  # for the same error
        why += [f"no prediction: {missing}"] if missing and not again else []
    return tuple(dict.fromkeys(why))


def failure(record: Record) -> str:
    """Return in a few words why a run ended: what was asked for and where, or the message of the error."""
    evidence, where = record.evidence, record.evidence.get("phase")
    if record.status in OUT_OF_MEMORY and _is_number(evidence.get("request_bytes")):
        size = evidence["request_bytes"] / MIB
        reason = f"asked for {size:,.0f} MiB more" if size >= 1 else f"asked for {size:.2g} MiB more"
        return f"{reason} in {where}" if where else reason
    phase = f"in {FIRST if where == 'prime' else where}" if where else None
    at = ", ".join(map(str, filter(None, (evidence.get("line"), phase))))
    return f"{message(record)} ({at})" if at else message(record)


def message(record: Record) -> str:
    """Return what an error said, with its kind unless it is one that speaks in sentences; or else the status."""
    said, kind = record.evidence.get("message"), record.evidence.get("exception")
    if kind is None or kind in EXPLAINING or record.status != "error":
        return str(record.status if said is None else said)
    return f"{kind}: {said}" if said else str(kind)


def withheld(observed: Observed, baseline: Observed | None, compared: str | None) -> list[str]:
    """Return why the verdict of a row that ran is withheld, each with what to do about it.

    `compared` is the word for its memory, where there is one.
    """
    if baseline is None:
        return ["no verdict: its baseline is not among these records: run the whole suite"]
    if baseline.status in OPEN_BASELINE:
        return [f"no verdict: {OPEN_BASELINE[baseline.status]}"]
    enabled = baseline.status in OUT_OF_MEMORY
    if baseline.status != "ok" and not enabled:
        return [f"no verdict: the baseline ended with {baseline.status}: {ANEW}"]
    remedies = [f"no verdict: {WITHHELD[flag]}" for flag in doubts(observed)]
    if not enabled:
        remedies += [f"no verdict: of the baseline, {WITHHELD[flag]}" for flag in doubts(baseline)]
    if not remedies and not (observed.usable and (enabled or baseline.usable)):
        remedies.append("no verdict: a peak is missing: run `harness doctor`")
    if not remedies and not enabled and compared is None:
        remedies.append(f"no verdict: {VAGUE if observed.children is None else HANGING}")
    if observed.answer is None:
        remedies.append(f"no verdict: its answer was not compared: {AGAIN}")
    elif observed.answer.numerics is None:
        how = AGAIN if observed.answer.status in OPEN_STATUSES else ANEW
        remedies.append(f"no verdict: its answer could not be compared: {how}")
    return remedies
