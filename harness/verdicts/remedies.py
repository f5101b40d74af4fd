"""What helps where: for each thing that sets a peak the strategy that takes most of it away, and where it does not."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from harness.contract.parts import ENDING_PARTS
from harness.contract.strategy import Strategy
from harness.records.record import EXACT, WRONG
from harness.verdicts.choice import NEAR, as_good, cheap, preference, reaches_users, stands_in
from harness.verdicts.judge import Comparison, Row

LAYERS = "what layers keep for the backward pass"
LOGITS, MOMENTS, CACHE = "the logits of the loss", "moments and gradients", "keys and values of a cache"
NARROW = "the width of all numbers"
DATA = "rows, windows, batches and words of the data"
SETS: tuple[tuple[str, frozenset[str]], ...] = (
    ("an evaluation, a checkpoint that is saved or read", frozenset(ENDING_PARTS)),
    (LOGITS, frozenset({"loss"})),
    (LAYERS, frozenset({"stack", "block", "feed", "mix"})),
    ("the scores of attention", frozenset({"attend"})),
    ("the states of a scan", frozenset({"scan"})),
    (MOMENTS, frozenset({"update", "init", "step"})),
    (CACHE, frozenset({"cache"})),
    (DATA, frozenset({"rows", "source", "windows", "order", "batches", "transfer"})),
)
"""What sets a peak, by the parts that a strategy rewrites against it; the first that fits is taken.

One that rewrites the gradient and none of these is against what layers keep.
"""
OF_KIND = {
    "parameters": NARROW,
    "gradients": MOMENTS,
    "moments": MOMENTS,
    "cache": CACHE,
    "batch": DATA,
    "activations": LAYERS,
    "logits": LOGITS,
}
"""What of these is against a kind of memory of `harness.contract.kinds`; nothing is against all the rest."""
DIVIDED = "one process for all of it"
LEAST = 0.95
"""What a remedy leaves of a peak at most."""
WORTH = 0.9
"""What a dearer remedy leaves of what the one before does, at most: for less nobody gives up time, or an answer."""


@dataclass(frozen=True)
class JudgedRow:
    """One judged row: the folder of its suite, the comparison that it is of, and the row."""

    folder: str
    table: Comparison
    row: Row

    @property
    def peak_ratio(self) -> float:
        """The share of the baseline's peak that it takes; 1 where that is not known."""
        return 1.0 if self.row.peak_ratio is None else self.row.peak_ratio


@dataclass(frozen=True)
class Remedy:
    """The row in which a strategy takes most away of what sets a peak, on one backend.

    `backend` says "on a GPU" of those that ran there. `idle` are measured rows of that strategy with the same settings
    that saved nothing, of `count` in all; `exact` says whether its answer is the baseline's.
    """

    sets: str
    backend: str
    best: JudgedRow
    idle: tuple[JudgedRow, ...]
    count: int
    exact: bool


@dataclass(frozen=True)
class Typical:
    """What a strategy does alone, over all rows in which it was measured on one backend: medians and ranges.

    `time_ratio` is that of the rows `timed` in enough rounds, None where none was; `less` counts the rows that
    saved memory. Where they ran on several ranks (`on_ranks`), the memory is that of each.
    """

    backend: str
    count: int
    less: int
    peak_ratio: float
    lowest: float
    highest: float
    time_ratio: float | None
    timed: int
    on_ranks: bool


def sets(strategy: Strategy) -> str | None:
    """Return what a strategy is against; None for one that rewrites nothing."""
    parts = set(strategy.rewrites)
    if strategy.ranks:
        return DIVIDED
    if strategy.precision and parts & {"draw", "grad"}:
        return NARROW
    others = LAYERS if "grad" in parts else NARROW if "draw" in parts else None
    return next((what for what, rewritten in SETS if parts & rewritten), others)


def alone(results: Iterable[tuple[str, Sequence[Comparison]]]) -> dict[tuple[str, str], list[JudgedRow]]:
    """Collect the measured rows of single strategies by name and where they ran; `results` are comparisons by folder.

    Left out are rows whose answer is wrong or whose peak does not compare with the baseline's.
    """
    rows: dict[tuple[str, str], list[JudgedRow]] = {}
    for folder, tables in results:
        for table in tables:
            for row in table.rows:
                if len(row.case.strategies) == 1 and not row.case.is_control and _counts(row):
                    name = row.case.strategies[0].name
                    rows.setdefault((name, _on(row)), []).append(JudgedRow(folder, table, row))
    return rows


def _on(row: Row) -> str:
    """Return where a row was measured: its framework, and that it was on a GPU, which trades time otherwise."""
    backend, device = row.case.place
    return backend if device == "cpu" else f"{backend} on a GPU"


def remedies(results: Iterable[tuple[str, Sequence[Comparison]]], strategies: Mapping[str, Strategy]) -> list[Remedy]:
    """Return what to use for each thing that sets a peak, on each backend.

    That is the best exact remedy; where it costs little, the one that saves more for more time; and a leaner inexact
    one.
    """
    rows = alone(results)
    against: dict[tuple[str, str], list[JudgedRow]] = {}
    for (name, backend), members in rows.items():
        if name in strategies and (what := sets(strategies[name])) is not None:
            against.setdefault((what, backend), []).extend(members)
    order = [*(what for what, _ in SETS), NARROW, DIVIDED]
    answers = []
    for what, backend in sorted(against, key=lambda key: (order.index(key[0]), key[1] != "torch", key[1])):
        lean = [each for each in against[what, backend] if _saves(each)]
        exact = [each for each in lean if each.row.answer in EXACT]
        inexact = [each for each in lean if each.row.answer not in EXACT]
        limit = 1.0
        for choices, near in ((exact, NEAR), (exact, 1 / WORTH), (inexact, NEAR)):
            best = _best([each for each in choices if each.peak_ratio < limit], near, strategies)
            if best is not None:
                limit = WORTH * best.peak_ratio
                answers.append(_remedy(what, backend, best, rows))
    return answers


def typical(name: str, results: Iterable[tuple[str, Sequence[Comparison]]]) -> list[Typical]:
    """Return what a strategy did alone, backend by backend; empty where it was never measured."""
    answers = []
    for (member, backend), rows in sorted(alone(results).items(), key=lambda item: item[0][1] != "torch"):
        if member == name:
            ratios = [each.peak_ratio for each in rows]
            speeds = [speed for each in rows if (speed := each.row.speed) is not None]
            times = [speed.ratio for speed in speeds if speed.standard_error is not None]
            less = sum(each.row.memory == "less" for each in rows)
            middle = median(times) if times else None
            on_ranks = any(each.row.case.ranks > 1 for each in rows)
            span = min(ratios), max(ratios)
            answers.append(Typical(backend, len(rows), less, median(ratios), *span, middle, len(times), on_ranks))
    return answers


def _saves(judged: JudgedRow) -> bool:
    """Check whether a row saves enough to be named, on this machine, and with the usual allocator some of it."""
    return judged.peak_ratio < LEAST and not stands_in(judged.row) and reaches_users(judged.row)


def _counts(row: Row) -> bool:
    measured = row.status == "ok" and row.peak_ratio is not None and row.memory is not None
    return measured and row.answer is not None and row.answer not in WRONG


def _best(rows: Sequence[JudgedRow], near: float, strategies: Mapping[str, Strategy]) -> JudgedRow | None:
    """Return the row with the largest saving among those that surely cost little time, or else among all.

    Of rows whose peak is within a factor of `near` of that, and that `as_good` leaves, it is the first by `preference`.
    """
    preferred = [each for each in rows if cheap(each.row)] or rows
    leanest = min(preferred, key=lambda each: each.peak_ratio, default=None)
    if leanest is None:
        return None
    least, most = leanest.peak_ratio / near, leanest.peak_ratio * near
    equal = as_good([each for each in rows if least <= each.peak_ratio <= most], lambda each: each.row)
    return min(equal, key=lambda each: (*preference(each.row, strategies), each.peak_ratio))


def _remedy(what: str, backend: str, best: JudgedRow, rows: Mapping[tuple[str, str], Sequence[JudgedRow]]) -> Remedy:
    applied = best.row.case.strategies[0]
    same = [each for each in rows[applied.name, backend] if each.row.case.strategies[0] == applied]
    idle = tuple(each for each in same if each.row.memory != "less")
    return Remedy(what, backend, best, idle, len(same), best.row.answer in EXACT)
