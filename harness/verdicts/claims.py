"""Answer claims: sentences with an expression over measured figures that decides them.

An expression is a comparison, or comparisons joined by `and`: of numbers, of figures of rows, and of sums, differences,
products and quotients of those. A figure is written `peak(fused_loss)`; what stands in the brackets is the label of a
row, as the tables have it, or the one row of that strategy. Keywords choose among comparisons:
`peak(streaming, corpus_tokens=5000000)`, and `ranks=2` among rows; so does `where`, for all figures of a claim. It is
parsed, never executed.

Every figure has an interval: a peak the resolution of its meter, a case that exceeded its budget everything from there
up, a prediction what residuals of its backend have shown. Times are those of `pooled`: ratios to the baselines of their
comparison with the interval that the claim needs, corrected over its comparisons (Holm). What the intervals do not
decide is inconclusive.
"""

import ast
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles, stdev
from typing import Any

from harness.records import Claim, Record
from harness.verdicts import dunnett
from harness.verdicts.comparisons import estimate_of
from harness.verdicts.judge import Comparison, Row
from harness.verdicts.observed import possible, step_time
from harness.verdicts.pooled import BASELINES, ERROR, SHORTEST_SECONDS, Pooled, pooled

DEEPEST = 40
RANKS = "ranks"
"""The keyword that chooses among rows of one label, where they ran on several numbers of ranks."""
GIB = 1 << 30
USUAL_RESIDUALS = (-0.12, 0.12)
"""Between these lie nine of ten residuals of predictions; used where too few rows were measured to say."""
LEAST_RESIDUALS = 20
Where = Mapping[str, Any]


class ClaimError(Exception):
    """An expression that says nothing, in one sentence."""


class Unknown(Exception):
    """A figure that was not measured, and why."""


class Open(Exception):
    """A figure with too few measurements for an interval, and what would give one."""


@dataclass(frozen=True)
class Figure:
    """A value, the interval that it lies in, and its unit: `B`, `s`, or none."""

    low: float
    value: float
    high: float
    unit: str = ""

    def __neg__(self) -> "Figure":
        return Figure(-self.high, -self.value, -self.low, self.unit)

    def __add__(self, other: "Figure") -> "Figure":
        return Figure(self.low + other.low, self.value + other.value, self.high + other.high, self.unit or other.unit)

    def __sub__(self, other: "Figure") -> "Figure":
        return self + -other

    def __mul__(self, other: "Figure") -> "Figure":
        corners = [0.0 if 0 in (x, y) else x * y for x in (self.low, self.high) for y in (other.low, other.high)]
        return Figure(min(corners), self.value * other.value, max(corners), self.unit or other.unit)

    def __truediv__(self, other: "Figure") -> "Figure":
        if other.low <= 0 <= other.high:
            raise Unknown("it divides by what may be zero")
        quotient = self * Figure(1 / other.high, 1 / other.value, 1 / other.low)
        return replace(quotient, unit="" if self.unit == other.unit else self.unit)


def exact(value: float, unit: str = "") -> Figure:
    """Return a figure without doubt."""
    return Figure(value, value, value, unit)


@dataclass(frozen=True)
class Answer:
    """A claim, its verdict (verified, refuted, in part, inconclusive, untested), and in words what decided it."""

    claim: Claim
    verdict: str
    reason: str
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True)
class _Outcome:
    verdict: str
    reason: str
    rows: tuple[Row, ...]


def answer(claim: Claim, tables: Sequence[Comparison]) -> Answer:
    """Decide one claim by all comparisons that fit its `where`.

    Raises ClaimError for an expression that cannot be read.
    """
    tree = parsed(claim.that)
    outcomes = _corrected(tree, tables, list(_settings(claim, tables)))
    if not outcomes:
        return Answer(claim, "untested", "no comparison fits: " + _shown(claim.where))
    count = {verdict: sum(each.verdict == verdict for each in outcomes) for verdict in VERDICTS}
    verdict = _overall(count)
    shown = "refuted" if verdict == "in part" else verdict
    deciding = [each for each in outcomes if each.verdict == shown]
    reason = deciding[0].reason
    if len(outcomes) > 1:
        reason += f" ({_counted(count)})"
    rows = {id(row): row for each in deciding for row in each.rows}
    return Answer(claim, verdict, reason, tuple(rows.values()))


VERDICTS = ("verified", "refuted", "inconclusive", "untested")


def _overall(count: Mapping[str, int]) -> str:
    """Return what several comparisons come to: in part, where some hold and some do not; doubt before agreement."""
    if count["verified"] and count["refuted"]:
        return "in part"
    return next(name for name in ("refuted", "inconclusive", "verified", "untested") if count[name])


def _counted(count: Mapping[str, int]) -> str:
    """Return how many comparisons came out which way: "3 of 6 comparisons verified, 1 refuted, 2 untested"."""
    others = (f", {many} {name}" for name, many in count.items() if many and name != "verified")
    return f"{count['verified']} of {sum(count.values())} comparisons verified{''.join(others)}"


def _corrected(tree: ast.expr, tables: Sequence[Comparison], settings: Sequence[Where]) -> list[_Outcome]:
    """Evaluate an expression at each setting so that all of them together err no more often than one (Holm 1979).

    What is joined by `and`, or has a bound on either side, may be refuted in so many ways and shares the error.
    """
    ways = max(1, sum(len(each.ops) for each in ast.walk(tree) if isinstance(each, ast.Compare) and _timed(each)))
    decided: dict[int, _Outcome] = {}
    while undecided := [place for place in range(len(settings)) if place not in decided]:
        error = ERROR / (len(undecided) * ways)
        tried = {place: _Evaluation(tables, settings[place], error).of(tree) for place in undecided}
        decided |= {at: each for at, each in tried.items() if each.verdict != "inconclusive"} or tried
    return [decided[place] for place in range(len(settings))]


def answered(records: Sequence[Record], tables: Sequence[Comparison]) -> list[Answer]:
    """Decide the claims that the newest run among records was made for."""
    claims: tuple[Claim, ...] = next(
        (record.heading.claims for record in reversed(records) if record.slot is None and record.heading.claims), ()
    )
    return [answer(claim, tables) for claim in claims]


def parsed(expression: str) -> ast.expr:
    """Read an expression and refuse all but the grammar; raise ClaimError with one sentence."""
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ClaimError(f"'{expression}' is not an expression: write for example peak(x) <= 0.5 * peak(y)") from None
    comparisons = tree.values if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And) else [tree]
    for each in comparisons:
        if not isinstance(each, ast.Compare):
            raise ClaimError(f"'{expression}' compares nothing: write for example peak(x) <= 0.5 * peak(y)")
        if not all(isinstance(op, tuple(COMPARISONS)) for op in each.ops):
            raise ClaimError(f"'{expression}' compares in an unknown way: use <, <=, >, >= or ==")
        for term in (each.left, *each.comparators):
            _check(term, expression, 0)
    return tree


def memory_rows(expression: str) -> set[str]:
    """Return the labels, without blanks, of the rows whose measured memory an expression asks for."""
    calls = (node for node in ast.walk(parsed(expression)) if isinstance(node, ast.Call))
    asked = (node for node in calls if isinstance(node.func, ast.Name) and node.func.id in MEASURED_MEMORY)
    return {plain_label(ast.unparse(node.args[0])) for node in asked}


def _check(node: ast.expr, expression: str, depth: int) -> None:
    if depth > DEEPEST:
        raise ClaimError(f"'{expression[:60]}...' is nested too deeply: write it in fewer brackets")
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, int | float | str)
        and not isinstance(node.value, bool)
    ):
        return
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        _check(node.left, expression, depth + 1)
        _check(node.right, expression, depth + 1)
        return
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _check(node.operand, expression, depth + 1)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id not in NAMES:
            raise ClaimError(f"there is no figure '{node.func.id}': use one of {', '.join(NAMES)}")
        if len(node.args) != 1 or any(key.arg is None for key in node.keywords):
            raise ClaimError(f"'{ast.unparse(node)}' names no row: write {node.func.id}(STRATEGY)")
        for key in node.keywords:
            if not isinstance(key.value, ast.Constant):
                raise ClaimError(f"'{ast.unparse(node)}': {key.arg} is a plain number or text in quotes")
        return
    raise ClaimError(f"'{ast.unparse(node)[:60]}' is no number and no figure: use one of {', '.join(NAMES)}")


OPERATIONS: dict[type[ast.operator], Callable[[Figure, Figure], Figure]] = {
    ast.Add: Figure.__add__,
    ast.Sub: Figure.__sub__,
    ast.Mult: Figure.__mul__,
    ast.Div: Figure.__truediv__,
}


def _less(a: Figure, b: Figure) -> bool | None:
    """Check whether a <= b: True, False, or None where the intervals overlap."""
    if a.high <= b.low:
        return True
    return False if a.low > b.high else None


def _equal(a: Figure, b: Figure) -> bool | None:
    if a.low > b.high or b.low > a.high:
        return False
    return True if a.low == a.high == b.low == b.high else None


COMPARISONS: dict[type[ast.cmpop], Callable[[Figure, Figure], bool | None]] = {
    ast.LtE: _less,
    ast.Lt: _less,
    ast.GtE: lambda a, b: _less(b, a),
    ast.Gt: lambda a, b: _less(b, a),
    ast.Eq: lambda a, b: _equal(a, b),
}


def _memory(row: Row, phase: str | None, field: str) -> Figure:
    """Return a byte figure of one phase, or the peak of all."""
    if row.status == "oom_budget" and row.case.budget_bytes and phase is None:
        return Figure(row.case.budget_bytes, row.case.budget_bytes, math.inf, "B")
    if row.status != "ok" or not row.records:
        raise Unknown(f"{row.label}: {row.status}" + (f" ({row.reasons[0]})" if row.reasons else ""))
    resolution = row.records[0].memory.resolution_bytes or 0
    if phase is None and field == "peak_bytes":
        value = row.peak_bytes
    else:
        names = [
            each for each in row.records[0].memory.phases if phase in (None, each.name, each.name.rpartition("/")[2])
        ]
        value = max((getattr(each, field) for each in names if getattr(each, field) is not None), default=None)
    if value is None:
        raise Unknown(f"{row.label} has no {field.replace('_', ' ')}" + (f" of the phase {phase}" if phase else ""))
    return Figure(max(0, value - resolution), value, value + resolution, "B")


def _known(value: float | None, what: str, row: Row, unit: str = "") -> Figure:
    if not isinstance(value, int | float) or not math.isfinite(value):  # a size may be a word
        reason = f" ({row.reasons[0]})" if row.reasons else ""
        raise Unknown(f"{row.label} has no {what}{reason}")
    return exact(value, unit)


def _rung(row: Row) -> str:
    """Return the rung of the ladder on which the answer of a row stands."""
    if row.answer is None:
        raise Unknown(f"{row.label} has no answer: {row.status}")
    return row.answer


def _all_ranks(row: Row) -> Figure:
    """Return what all ranks of a row hold together."""
    record = row.records[0] if row.records else Record()
    return _known(record.memory.all_ranks_bytes, "sum over ranks", row, "B")


def _predicted(row: Row, phase: str | None) -> Figure:
    """Return the predicted peak, or that of one phase."""
    if phase is None:
        return _known(row.predicted_bytes, "prediction", row, "B")
    phases = row.prediction.prediction.predicted_phases if row.prediction else ()
    peaks = [each.peak_bytes for each in phases if phase in (each.name, each.name.rpartition("/")[2])]
    return _known(max(peaks, default=None), f"predicted phase '{phase}'", row, "B")


def pooled_times(table: Comparison, field: str = "step_seconds") -> tuple[dict[str, dict[Any, float]], Pooled]:
    """Return the median of each process of a comparison, by row, round and block, and what they say together."""
    times: dict[str, dict[Any, float]] = {}
    for row in table.rows:
        for record in row.records:
            values = getattr(record.times, field)
            if record.slot and record.slot.kind == "time" and step_time(record) is not None and values:
                seconds = max(median(values), SHORTEST_SECONDS)  # a batch that is there already takes no time
                if possible(seconds):
                    times.setdefault(row.label, {})[record.slot.round, record.slot.block] = seconds
    return times, pooled(times)


def _seconds(row: Row, table: Comparison, field: str, error: float, paired: bool) -> Figure:
    """Return a time: the baseline's, times the row's ratio to it.

    Where all times of a comparison are of one table, the baseline's own doubt cancels and is left out.
    """
    times, group = pooled_times(table, field)
    if row.label not in times:
        raise Unknown(f"{row.label} was not timed")
    anchor = BASELINES[0] if BASELINES[0] in times else row.label
    reference = exact(median(times[anchor].values()), "s")
    if not paired:
        reference = _absolute(times[anchor], error, row.label)
    if row.label == anchor:
        return reference
    speed = group.control if row.case.is_control else group.speeds.get(row.label)
    estimate = estimate_of(speed) if speed is not None else None
    if speed is None or estimate is None:
        rounds = len(times[row.label])
        raise Open(f"{row.label} was timed in {rounds} round{'s' if rounds > 1 else ''} beside too few others")
    interval = estimate.interval(error)
    return Figure(interval.low, speed.ratio, interval.high) * reference


def _absolute(rounds: Mapping[Any, float], error: float, label: str) -> Figure:
    """Return the time of a baseline by itself, whose rounds differ by the machine's drift as well."""
    logs = [math.log(seconds) for seconds in rounds.values()]
    if len(logs) < 3:
        raise Open(f"the baseline of {label} was timed in {len(logs)} rounds, and times apart need 3")
    width = dunnett.quantile(1, 0.0, len(logs) - 1, error) * stdev(logs) / math.sqrt(len(logs))
    middle = sum(logs) / len(logs)
    return Figure(math.exp(middle - width), math.exp(middle), math.exp(middle + width), "s")


def _with_residuals(figure: Figure, row: Row, tables: Sequence[Comparison]) -> Figure:
    """Widen a prediction by what nine of ten measured rows of its backend were beside theirs."""
    backend = row.case.place.backend
    rows = (each for table in tables for each in table.rows if each.case.place.backend == backend)
    residuals = [each.residual_ratio for each in rows if each.residual_ratio is not None]
    low, high = USUAL_RESIDUALS
    if len(residuals) >= LEAST_RESIDUALS:
        cuts = quantiles(residuals, n=20, method="inclusive")
        low, high = min(0.0, cuts[0]), max(0.0, cuts[-1])
    return Figure(figure.low * (1 + low), figure.value, figure.high * (1 + high), figure.unit)


def _noted(row: Row, name: str | None) -> Figure:
    values = [record.extra[name] for record in row.records if name in record.extra]
    return _known(values[0] if values else None, f"figure '{name}'", row)


def _longest(row: Row, field: str) -> Figure:
    """Return the longest value that `harness fit` found: at least what passed, and less than what failed."""
    fit = row.records[0].limits if row.records else None
    if fit is None:
        raise Unknown(f"{row.label}: no limit was searched: run `harness fit`")
    value = getattr(fit, field)
    known = _known(value, f"{field} limit of {fit.over}", row)
    return replace(known, high=fit.failed or known.value) if field == "longest" and fit.runs else known


def _rests_on_prediction(name: str, row: Row) -> bool:
    """Check whether a figure was predicted and not measured."""
    limits = row.records[0].limits if row.records else None
    return name in PREDICTED or (name == "longest" and limits is not None and not limits.runs)


TIMES = {"seconds": "step_seconds", "fetch_seconds": "fetch_seconds"}
PREDICTED = ("predicted", "foretold")
MEASURED_MEMORY = ("peak", "held", "file_bytes", "anonymous_bytes", "all_ranks")
FIGURES: dict[str, Callable[[Row, dict[str, Any]], Figure | str]] = {
    "peak": lambda row, own: _memory(row, own.pop("phase", None), "peak_bytes"),
    "held": lambda row, own: _memory(row, own.pop("phase", None), "exit_bytes"),
    "file_bytes": lambda row, own: _memory(row, own.pop("phase", None), "file_bytes"),
    "anonymous_bytes": lambda row, own: _memory(row, own.pop("phase", None), "anon_bytes"),
    "all_ranks": lambda row, own: _all_ranks(row),
    "predicted": lambda row, own: _predicted(row, own.pop("phase", None)),
    "floor": lambda row, own: _known(row.floor_bytes, "floor", row, "B"),
    "parameters": lambda row, own: _known(
        row.prediction.prediction.parameters if row.prediction else None, "count of parameters", row
    ),
    "longest": lambda row, own: _longest(row, "longest"),
    "foretold": lambda row, own: _longest(row, "predicted"),
    "noted": lambda row, own: _noted(row, own.pop("figure", None)),
    "size": lambda row, own: _known(row.case.shape.get(str(own.pop("of", ""))), "such size", row),
    "answer": lambda row, own: _rung(row),
    "verdict": lambda row, own: row.verdict,
}
NAMES = (*FIGURES, *TIMES)


def _settings(claim: Claim, tables: Sequence[Comparison]) -> Iterator[Where]:
    """Yield one setting for each comparison that fits the claim; figures with keywords may then look at others."""
    for table in tables:
        if fits(table, claim.where):
            yield {**_sizes(table), **claim.where}


def _sizes(table: Comparison) -> dict[str, Any]:
    case = table.case
    budget = {} if case.budget_bytes is None else {"budget_gib": case.budget_bytes / GIB}
    return {**case.shape, **budget, "place": str(case.place), "corpus": case.corpus, "tokenizer": case.tokenizer}


def fits(table: Comparison, where: Where) -> bool:
    """Check whether a comparison has the sizes, place and corpus that are asked for."""
    sizes = _sizes(table)
    return all(sizes.get(key) == value for key, value in where.items() if key != RANKS)


class _Evaluation:
    """Evaluate one expression at one comparison; intervals of times err with the chance `error`."""

    def __init__(self, tables: Sequence[Comparison], where: Where, error: float) -> None:
        self.tables, self.where, self.error = tables, where, error
        self.rows: list[Row] = []
        self.paired = True
        self.predicted = False

    def of(self, tree: ast.expr) -> _Outcome:
        comparisons = tree.values if isinstance(tree, ast.BoolOp) else [tree]
        holds: list[bool | None] = []
        words: list[str] = []
        try:
            for each in comparisons:
                assert isinstance(each, ast.Compare)
                try:
                    terms = self.terms(each)
                except Open as reason:
                    holds.append(None)
                    words.append(str(reason))
                    continue
                links = list(zip(each.ops, terms, terms[1:], strict=False))
                outcomes = [_compared(*link) for link in links]
                holds += outcomes
                words.append(_in_words(links, outcomes))
        except Unknown as reason:
            return _Outcome("untested", str(reason), tuple(self.rows))
        verdict = "refuted" if False in holds else "inconclusive" if None in holds else "verified"
        prefix = "predicted: " if self.predicted else ""
        return _Outcome(verdict, prefix + " and ".join(words), tuple(self.rows))

    def terms(self, comparison: ast.Compare) -> "list[Figure | str]":
        """Evaluate the sides of a comparison; the baseline's own doubt is left out where it cancels.

        It does where times of one table are held against each other, and not where they are against a plain number.
        """
        sides = (comparison.left, *comparison.comparators)
        asked = (self.row(ast.unparse(node.args[0]), _keywords(node)) for node in _timed(comparison))
        self.paired = len({id(table) for table, _ in asked}) <= 1
        terms = [self.value(side) for side in sides]
        units = {term.unit for term in terms if isinstance(term, Figure)}
        if self.paired and "s" in units and len(units) > 1:
            self.paired = False
            terms = [self.value(side) for side in sides]
        return terms

    def value(self, node: ast.expr) -> Figure | str:
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else exact(float(node.value))  # type: ignore[arg-type]
        if isinstance(node, ast.UnaryOp):
            return -self.number(node.operand)
        if isinstance(node, ast.BinOp):
            return OPERATIONS[type(node.op)](self.number(node.left), self.number(node.right))
        assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        name, where = node.func.id, _keywords(node)
        own: dict[str, Any] = {key: where.pop(key) for key in ("phase", "figure", "of") if key in where}
        table, row = self.row(ast.unparse(node.args[0]), where)
        self.rows.append(row)
        if name in TIMES:
            return _seconds(row, table, TIMES[name], self.error, self.paired)
        value = FIGURES[name](row, own)
        if isinstance(value, Figure) and _rests_on_prediction(name, row):
            self.predicted = True
            return _with_residuals(value, row, self.tables)
        return value

    def number(self, node: ast.expr) -> Figure:
        value = self.value(node)
        if isinstance(value, str):
            raise ClaimError(f"'{ast.unparse(node)}' is a word: only == compares it")
        return value

    def row(self, label: str, keywords: Where) -> tuple[Comparison, Row]:
        """Find the row of a label in the comparison meant; raise Unknown where there is none or more than one."""
        where = {**self.where, **keywords}
        ranks = where.get(RANKS)
        tables = [table for table in self.tables if fits(table, where)]
        if len(tables) != 1:
            raise Unknown(f"{len(tables)} comparisons have {_shown(keywords)}")
        wanted = plain_label(label)
        asked = [row for row in tables[0].rows if ranks is None or row.case.ranks in (1, ranks)]
        rows = [row for row in asked if plain_label(row.case.strategies_label) == wanted] or [
            row for row in asked if [applied.name for applied in row.case.strategies] == wanted.split("+")
        ]
        if len(rows) != 1:
            raise Unknown(f"{len(rows)} rows are '{label}'")
        return tables[0], rows[0]


def _timed(comparison: ast.Compare) -> list[ast.Call]:
    """Return the times that a comparison asks for."""
    calls = (node for node in ast.walk(comparison) if isinstance(node, ast.Call))
    return [node for node in calls if isinstance(node.func, ast.Name) and node.func.id in TIMES]


def _keywords(node: ast.Call) -> dict[str, Any]:
    return {str(key.arg): key.value.value for key in node.keywords if isinstance(key.value, ast.Constant)}


def plain_label(label: str) -> str:
    """Return a label without blanks and quotation marks, in lower case."""
    return label.replace(" ", "").replace("'", "").replace('"', "").lower()


def _compared(op: ast.cmpop, left: Figure | str, right: Figure | str) -> bool | None:
    if isinstance(left, str) or isinstance(right, str):
        if type(left) is not type(right) or not isinstance(op, ast.Eq):
            raise ClaimError(f"{left!r} and {right!r} do not compare: words take == and numbers numbers")
        return left == right
    return COMPARISONS[type(op)](left, right)


WORDS: dict[type[ast.cmpop], str] = {
    ast.LtE: "at most",
    ast.Lt: "below",
    ast.GtE: "at least",
    ast.Gt: "above",
    ast.Eq: "equal to",
}
TURNED = {
    "at most": "at least",
    "below": "above",
    "at least": "at most",
    "above": "below",
    "equal to": "equal to",
}
"""The words of a comparison, read from its right side."""


def _in_words(links: "list[tuple[ast.cmpop, Figure | str, Figure | str]]", holds: list[bool | None]) -> str:
    """Put a comparison in words, all sides in the unit of any: a plain number is meant in that of the figure.

    The figure between two bounds comes first. What is not decided gets its reason.
    """
    sides = [links[0][1], *(right for _, _, right in links)]
    unit = next((side.unit for side in sides if isinstance(side, Figure) and side.unit), "")
    shown = [_shown_in(unit, side) for side in sides]
    words = [("not " if hold is False else "") + WORDS[type(op)] for (op, _, _), hold in zip(links, holds, strict=True)]
    if len(links) == 2:
        turned = ("not " if holds[0] is False else "") + TURNED[WORDS[type(links[0][0])]]
        text = f"{shown[1]}, {turned} {shown[0]} and {words[1]} {shown[2]}"
    else:
        text = f"{shown[0]}, {', '.join(f'{word} {side}' for word, side in zip(words, shown[1:], strict=True))}"
    if None not in holds:
        return text
    endless = any(isinstance(side, Figure) and math.isinf(side.high) for side in sides)
    reason = "one of them ran out of its budget" if endless else _span(unit, sides)
    return f"{text}: undecided, {reason}"


def _span(unit: str, sides: "Sequence[Figure | str]") -> str:
    """Name the widest interval among the sides of a comparison."""
    figures = [side for side in sides if isinstance(side, Figure)]
    widest = max(figures, key=lambda side: (side.high - side.low) / max(abs(side.value), 1e-12))
    return f"{_figure(widest.value, unit)} may be {_figure(widest.low, unit)} to {_figure(widest.high, unit)}"


def _shown_in(unit: str, side: Figure | str) -> str:
    if isinstance(side, str):
        return side
    return f"more than {_figure(side.low, unit)}" if math.isinf(side.high) else _figure(side.value, unit)


def _figure(value: float, unit: str) -> str:
    """Show bytes in MiB, seconds down to microseconds, all else as a number."""
    if unit == "B":
        size = value / (1 << 20)
        return f"{size:,.0f} MiB" if abs(size) >= 1000 else f"{size:.3g} MiB"
    if unit == "s":
        factor, name = next((pair for pair in ((1, "s"), (1e3, "ms")) if abs(value) * pair[0] >= 1), (1e6, "us"))
        return f"{value * factor:.3g} {name}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _shown(where: Where) -> str:
    return ", ".join(f"{key} {value}" for key, value in where.items()) or "these sizes"
