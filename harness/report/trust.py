"""How far figures can be trusted, by what the same results show: equal things measured twice, predictions, bounds."""

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from statistics import median, quantiles

from tabulate import tabulate

from harness.records.record import Fit
from harness.verdicts.judge import Comparison, Row
from harness.verdicts.pooled import DECIDED, ERROR
from harness.verdicts.remarks import LEAST_FOR_PERCENT, unsure

COLUMNS = ("figure", "compared with", "cases", "outcome")
ALIGNED = ("left", "left", "right", "left")
LARGE = 100 << 20
"""Peaks from here on have smaller errors of predictions in percent: below, the base of a process is a part of them."""
FEWEST = 20
"""Cases of a framework from which on its errors are shown."""


def table(comparisons: Sequence[Comparison], searched: Iterable[Fit] = ()) -> str:
    """Write a row for each figure that the results themselves can check; `searched` are what `harness fit` gave."""
    rows = [*_memory(comparisons), *_predicted(comparisons), *_fits(searched), *_times(comparisons)]
    return tabulate(rows, COLUMNS, tablefmt="pipe", colalign=ALIGNED, disable_numparse=True)


def _memory(comparisons: Iterable[Comparison]) -> Iterator[tuple[str, ...]]:
    """Compare peaks of the baseline with those of the same code in other processes."""
    controls = [row for each in comparisons for row in each.rows if row.case.is_control and _sure(row)]
    apart = [
        abs(row.peak_ratio - 1) for row in controls if row.peak_ratio and (row.peak_bytes or 0) >= LEAST_FOR_PERCENT
    ]
    if apart:
        yield "peak", "that of `nothing`, the same code, for peaks of 32 MiB and more", _count(apart), _errors(apart)


def _predicted(comparisons: Iterable[Comparison]) -> Iterator[tuple[str, ...]]:
    """Compare predictions with the peaks of the runs, by framework, and with their bounds; some came after the runs."""
    rows = [row for each in comparisons for row in each.rows if _sure(row)]
    known = [row for row in rows if row.residual_ratio is not None]
    for backend in dict.fromkeys(row.case.place.backend for row in known):
        for sizes, least, limit in (("100 MiB and more", LARGE, inf), ("32 to 100 MiB", LEAST_FOR_PERCENT, LARGE)):
            sized = [
                row for row in known if least <= (row.peak_bytes or 0) < limit and row.case.place.backend == backend
            ]
            errors = [abs(row.residual_ratio or 0) for row in sized]
            if len(errors) >= FEWEST:
                what = f"the peak of the run, {backend}, for peaks of {sizes}"
                yield "predicted", what, _count(errors), _errors(errors) + _anew(sized)
    bounded = [row for row in rows if row.predicted_bytes and row.residual_bytes is not None and row.at_most_bytes]
    if bounded:
        over = sum((row.predicted_bytes or 0) + (row.residual_bytes or 0) > (row.at_most_bytes or 0) for row in bounded)
        share = f"{over} took more, {over / len(bounded):.1%}"
        yield "at most", "the peak of the run", _count(bounded), share + _anew(bounded)


def _anew(rows: Sequence[Row]) -> str:
    """Say of how many rows the prediction that stands was made after the run, by later code."""
    count = sum(map(_is_later, rows))
    return f"; {count:,} predicted after the run, by later code" if count else ""


def _is_later(row: Row) -> bool:
    runs = [record.origin.utc for record in row.records if record.slot is not None and record.slot.kind == "memory"]
    return bool(runs) and row.prediction is not None and row.prediction.origin.utc > max(runs)


def _fits(searched: Iterable[Fit]) -> Iterator[tuple[str, ...]]:
    """Count the sizes that were predicted to fit a budget and ran out of it; a machine with less decides nothing."""
    known = (fit for fit in searched if fit.predicted and (fit.passed or fit.how == "oom_budget"))
    tried = [fit for fit in known if fit.how == "oom_budget" or not _is_short(fit)]
    if not tried:
        return
    out = sum(_is_short(fit) for fit in tried)
    larger = [fit.passed / fit.predicted - 1 for fit in tried if fit.passed and fit.predicted]
    slack = f"; the longest that ran is {median(larger):.1%} longer (median)" if larger else ""
    yield "fit", "a run of the predicted size within its budget", _count(tried), f"{out} ran out{slack}"


def _is_short(fit: Fit) -> bool:
    """Check whether a size that was predicted to fit did not run."""
    return fit.failed is not None and fit.predicted is not None and fit.failed <= fit.predicted


def _times(comparisons: Sequence[Comparison]) -> Iterator[tuple[str, ...]]:
    """Count how often the same code was called slower or faster, and how often a row has a word at all."""
    controls = [each.control for each in comparisons if each.control and each.control.standard_error is not None]
    if controls:
        wrong = sum(each.word in ("slower", "faster") for each in controls)
        yield (
            "time",
            "that of `nothing`, the same code",
            _count(controls),
            f"{wrong} called slower or faster; at most about {ERROR * len(controls):.0f} would be by chance",
        )
    speeds = [
        row.speed
        for each in comparisons
        for row in each.rows
        if row.speed and row.speed.standard_error is not None and not (row.case.is_control or row.case.is_baseline)
    ]
    if speeds:
        decided = sum(speed.word in DECIDED for speed in speeds)
        width = median(speed.half_width for speed in speeds)
        share = f"{decided / len(speeds):.0%} decided; half an interval is {width:.0%} (median)"
        yield "time", "that of the baseline, in 2 rounds or more", _count(speeds), share


def _sure(row: Row) -> bool:
    """Check that a peak was measured and has no flag that withholds it."""
    return row.status == "ok" and not unsure(row.flags, row.case.place)


def _count(cases: Sequence[object]) -> str:
    return f"{len(cases):,}"


def _errors(errors: Sequence[float]) -> str:
    """Write the median, the 95th percentile and the largest of some shares."""
    high = quantiles(errors, n=20, method="inclusive")[-1] if len(errors) > 1 else errors[0]
    return f"{median(errors):.1%} apart (median), {high:.1%} (95th percentile), {max(errors):.1%} (largest)"
