"""Answer claims: sentences with an expression over measured figures that decides them.

An expression is a comparison, or comparisons joined by `and`: of numbers, of figures of rows, and of sums, differences,
products and quotients of those. A figure is written `peak(fused_loss)`; what stands in the brackets is the label of a
row, as the tables have it, or the one row of that strategy. Keywords choose among comparisons:
`peak(streaming, corpus_tokens=5000000)`, and `ranks=2` among rows; so does `where`, for all figures of a claim. It is
parsed, never executed.

Every figure is an interval: a peak with the resolution of its meter, a time with the range of its rounds, a case that
exceeded its budget from there to infinity. A claim whose intervals do not decide it is inconclusive, and so is one on
times of fewer than three rounds: a process is often faster or slower by chance.
"""

import ast
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from harness.records import Claim, Record
from harness.records.case import VERDICT_ROUNDS
from harness.verdicts.judge import Row, Table

DEEPEST = 40
RANKS = "ranks"
"""The keyword that chooses among rows of one label, where they ran on several numbers of ranks."""
GIB = 1 << 30
Where = Mapping[str, Any]


class ClaimError(Exception):
    """An expression that says nothing, in one sentence."""


class Unknown(Exception):
    """A figure that was not measured, and why."""


class Interval(NamedTuple):
    """The values that a figure may have; `value` is the one to show. Its unit is `B`, `s`, or none."""

    low: float
    value: float
    high: float
    unit: str = ""


@dataclass(frozen=True)
class Answer:
    """A claim, its verdict (verified, refuted, inconclusive, untested), and in words what decided it."""

    claim: Claim
    verdict: str
    told: str
    rows: tuple[Row, ...] = ()


def answer(claim: Claim, tables: Sequence[Table]) -> Answer:
    """Decide one claim by all comparisons that fit its `where`; any refutation decides, then any doubt.

    Raises ClaimError for an expression that cannot be read.
    """
    tree = parsed(claim.that)
    found = [_Evaluation(tables, where).of(tree) for where in _settings(claim, tables)]
    if not found:
        return Answer(claim, "untested", "no comparison fits: " + _shown(claim.where))
    for verdict in ("refuted", "inconclusive", "verified", "untested"):
        deciding = [each for each in found if each.verdict == verdict]
        if deciding:
            told = deciding[0].told
            if len(found) > 1:
                told += f" ({len(deciding)} of {len(found)} comparisons)"
            rows = {id(row): row for each in deciding for row in each.rows}
            return Answer(claim, verdict, told, tuple(rows.values()))
    raise AssertionError("an evaluation has one of four verdicts")


def answered(found: Sequence[Record], tables: Sequence[Table]) -> list[Answer]:
    """Decide the claims that the newest run among records was made for."""
    claims = next((record.claims for record in reversed(found) if record.slot is None and record.claims), ())
    return [answer(claim, tables) for claim in claims]


class _Found(NamedTuple):
    verdict: str
    told: str
    rows: tuple[Row, ...]


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
        if node.func.id not in FIGURES:
            raise ClaimError(f"there is no figure '{node.func.id}': use one of {', '.join(FIGURES)}")
        if len(node.args) != 1 or any(key.arg is None for key in node.keywords):
            raise ClaimError(f"'{ast.unparse(node)}' names no row: write {node.func.id}(STRATEGY)")
        for key in node.keywords:
            if not isinstance(key.value, ast.Constant):
                raise ClaimError(f"'{ast.unparse(node)}': {key.arg} is a plain number or text in quotes")
        return
    raise ClaimError(f"'{ast.unparse(node)[:60]}' is no number and no figure: use one of {', '.join(FIGURES)}")


def _plus(a: Interval, b: Interval) -> Interval:
    return Interval(a.low + b.low, a.value + b.value, a.high + b.high, a.unit or b.unit)


def _minus(a: Interval, b: Interval) -> Interval:
    return Interval(a.low - b.high, a.value - b.value, a.high - b.low, a.unit or b.unit)


def _times(a: Interval, b: Interval) -> Interval:
    corners = [0.0 if 0 in (x, y) else x * y for x in (a.low, a.high) for y in (b.low, b.high)]
    return Interval(min(corners), a.value * b.value, max(corners), a.unit or b.unit)


def _over(a: Interval, b: Interval) -> Interval:
    if b.low <= 0 <= b.high:
        raise Unknown("it divides by what may be zero")
    quotient = _times(a, Interval(1 / b.high, 1 / b.value, 1 / b.low))
    return quotient._replace(unit="" if a.unit == b.unit else a.unit)


OPERATIONS: dict[type[ast.operator], Callable[[Interval, Interval], Interval]] = {
    ast.Add: _plus,
    ast.Sub: _minus,
    ast.Mult: _times,
    ast.Div: _over,
}


def _less(a: Interval, b: Interval) -> bool | None:
    """Say whether a <= b: True, False, or None where the intervals overlap."""
    if a.high <= b.low:
        return True
    return False if a.low > b.high else None


COMPARISONS: dict[type[ast.cmpop], Callable[[Interval, Interval], bool | None]] = {
    ast.LtE: _less,
    ast.Lt: _less,
    ast.GtE: lambda a, b: _less(b, a),
    ast.Gt: lambda a, b: _less(b, a),
    ast.Eq: lambda a, b: None if a.low <= b.high and b.low <= a.high and a[:3] != b[:3] else a[:3] == b[:3],
}


def _memory(row: Row, phase: str | None, field: str) -> Interval:
    """Give a byte figure of one phase, or the peak of all."""
    if row.status == "oom_budget" and row.case.budget_bytes and phase is None:
        return Interval(row.case.budget_bytes, row.case.budget_bytes, math.inf, "B")
    if row.status != "ok" or not row.records:
        raise Unknown(f"{row.label}: {row.status}" + (f" ({row.reasons[0]})" if row.reasons else ""))
    resolution = row.records[0].resolution_bytes or 0
    if phase is None and field == "peak_bytes":
        value = row.peak_bytes
    else:
        names = [each for each in row.records[0].phases if phase in (None, each.name, each.name.rpartition("/")[2])]
        value = max((getattr(each, field) for each in names if getattr(each, field) is not None), default=None)
    if value is None:
        raise Unknown(f"{row.label} has no {field.replace('_', ' ')}" + (f" of the phase {phase}" if phase else ""))
    return Interval(max(0, value - resolution), value, value + resolution, "B")


def _exact(value: float | None, what: str, row: Row, unit: str = "") -> Interval:
    if not isinstance(value, int | float) or not math.isfinite(value):  # a size may be a word
        reason = f" ({row.reasons[0]})" if row.reasons else ""
        raise Unknown(f"{row.label} has no {what}{reason}")
    return Interval(value, value, value, unit)


def _rung(row: Row) -> str:
    """Give the rung of the ladder on which the answer of a row stands."""
    if row.answer is None:
        raise Unknown(f"{row.label} has no answer: {row.status}")
    return row.answer


def _all_ranks(row: Row) -> Interval:
    """Give what all ranks of a row hold together."""
    record = row.records[0] if row.records else Record()
    return _exact(record.all_ranks_bytes, "sum over ranks", row, "B")


def _predicted(row: Row, phase: str | None) -> Interval:
    """Give the predicted peak, or that of one phase."""
    if phase is None:
        return _exact(row.predicted_bytes, "prediction", row, "B")
    phases = row.prediction.predicted_phases if row.prediction else ()
    found = [each.peak_bytes for each in phases if phase in (each.name, each.name.rpartition("/")[2])]
    return _exact(max(found, default=None), f"predicted phase '{phase}'", row, "B")


def _medians(row: Row, field: str) -> list[float]:
    """Give the median of each round."""
    return [median(getattr(record, field)) for record in row.records if getattr(record, field)]


def _seconds(row: Row, field: str) -> Interval:
    medians = _medians(row, field)
    if not medians:
        raise Unknown(f"{row.label} was not timed")
    return Interval(min(medians), median(medians), max(medians), "s")


def _noted(row: Row, name: str | None) -> Interval:
    values = [record.extra[name] for record in row.records if name in record.extra]
    return _exact(values[0] if values else None, f"figure '{name}'", row)


def _longest(row: Row, field: str) -> Interval:
    """Give the longest value that `harness fit` found: at least what passed, and less than what failed."""
    fit = row.records[0].fit if row.records else None
    if fit is None:
        raise Unknown(f"{row.label}: no limit was searched: run `harness fit`")
    value = getattr(fit, field)
    known = _exact(value, f"{field} limit of {fit.over}", row)
    return known._replace(high=fit.failed or value) if field == "longest" and fit.runs else known


TIMES = {"seconds": "step_seconds", "fetch_seconds": "fetch_seconds"}
FIGURES: dict[str, Callable[[Row, dict[str, Any]], Interval | str]] = {
    "peak": lambda row, given: _memory(row, given.pop("phase", None), "peak_bytes"),
    "held": lambda row, given: _memory(row, given.pop("phase", None), "exit_bytes"),
    "file_bytes": lambda row, given: _memory(row, given.pop("phase", None), "file_bytes"),
    "anonymous_bytes": lambda row, given: _memory(row, given.pop("phase", None), "anon_bytes"),
    "all_ranks": lambda row, given: _all_ranks(row),
    "predicted": lambda row, given: _predicted(row, given.pop("phase", None)),
    "floor": lambda row, given: _exact(row.floor_bytes, "floor", row, "B"),
    "parameters": lambda row, given: _exact(
        row.prediction.parameters if row.prediction else None, "count of parameters", row
    ),
    "seconds": lambda row, given: _seconds(row, TIMES["seconds"]),
    "fetch_seconds": lambda row, given: _seconds(row, TIMES["fetch_seconds"]),
    "longest": lambda row, given: _longest(row, "longest"),
    "foretold": lambda row, given: _longest(row, "predicted"),
    "noted": lambda row, given: _noted(row, given.pop("figure", None)),
    "size": lambda row, given: _exact(row.case.shape.get(str(given.pop("of", ""))), "such size", row),
    "answer": lambda row, given: _rung(row),
    "verdict": lambda row, given: row.verdict,
}


def _settings(claim: Claim, tables: Sequence[Table]) -> Iterator[Where]:
    """Give one setting for each comparison that fits the claim; figures with keywords may then look at others."""
    for table in tables:
        if fits(table, claim.where):
            yield {**_sizes(table), **claim.where}


def _sizes(table: Table) -> dict[str, Any]:
    case = table.case
    budget = {} if case.budget_bytes is None else {"budget_gib": case.budget_bytes / GIB}
    return {**case.shape, **budget, "place": str(case.place), "corpus": case.corpus, "tokenizer": case.tokenizer}


def fits(table: Table, where: Where) -> bool:
    """Say whether a comparison has the sizes, place and corpus that are asked for."""
    sizes = _sizes(table)
    return all(sizes.get(key) == value for key, value in where.items() if key != RANKS)


class _Evaluation:
    """Evaluate one expression at one comparison; `rounds` is the least of any time in what is being compared."""

    def __init__(self, tables: Sequence[Table], where: Where) -> None:
        self.tables, self.where = tables, where
        self.rounds = VERDICT_ROUNDS
        self.rows: list[Row] = []
        self.told: list[str] = []

    def of(self, tree: ast.expr) -> _Found:
        comparisons = tree.values if isinstance(tree, ast.BoolOp) else [tree]
        held: list[bool | None] = []
        try:
            for each in comparisons:
                assert isinstance(each, ast.Compare)
                self.rounds = VERDICT_ROUNDS
                terms = [self.value(term) for term in (each.left, *each.comparators)]
                links = list(zip(each.ops, terms, terms[1:], strict=False))
                few = self.rounds < VERDICT_ROUNDS
                found = [None if few else _compared(*link) for link in links]
                held += found
                self.told.append(_told(links, found) + few * f" (rounds: {self.rounds}, and {VERDICT_ROUNDS} decide)")
        except Unknown as reason:
            return _Found("untested", str(reason), tuple(self.rows))
        verdict = "refuted" if False in held else "inconclusive" if None in held else "verified"
        return _Found(verdict, " and ".join(self.told), tuple(self.rows))

    def value(self, node: ast.expr) -> Interval | str:
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else Interval(*[float(node.value)] * 3)  # type: ignore[arg-type]
        if isinstance(node, ast.UnaryOp):
            return _minus(Interval(0, 0, 0), self.number(node.operand))
        if isinstance(node, ast.BinOp):
            return OPERATIONS[type(node.op)](self.number(node.left), self.number(node.right))
        assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        given: dict[str, Any] = {
            str(key.arg): key.value.value for key in node.keywords if isinstance(key.value, ast.Constant)
        }
        own: dict[str, Any] = {key: given.pop(key) for key in ("phase", "figure", "of") if key in given}
        row = self.row(ast.unparse(node.args[0]), given)
        self.rows.append(row)
        if (field := TIMES.get(node.func.id)) and row.records:
            self.rounds = min(self.rounds, len(_medians(row, field)))
        return FIGURES[node.func.id](row, own)

    def number(self, node: ast.expr) -> Interval:
        found = self.value(node)
        if isinstance(found, str):
            raise ClaimError(f"'{ast.unparse(node)}' is a word: only == compares it")
        return found

    def row(self, label: str, given: Where) -> Row:
        """Find the row of a label in the comparison meant; raise Unknown where there is none or more than one."""
        where = {**self.where, **given}
        ranks = where.get(RANKS)
        tables = [table for table in self.tables if fits(table, where)]
        if len(tables) != 1:
            raise Unknown(f"{len(tables)} comparisons have {_shown(given)}")
        wanted = _plain(label)
        asked = [row for row in tables[0].rows if ranks is None or row.case.ranks in (1, ranks)]
        rows = [row for row in asked if _plain(row.case.strategies_label) == wanted] or [
            row for row in asked if [applied.name for applied in row.case.strategies] == wanted.split("+")
        ]
        if len(rows) != 1:
            raise Unknown(f"{len(rows)} rows are '{label}'")
        return rows[0]


def _plain(label: str) -> str:
    return label.replace(" ", "").replace("'", "").replace('"', "").lower()


def _compared(op: ast.cmpop, left: Interval | str, right: Interval | str) -> bool | None:
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


def _told(links: "list[tuple[ast.cmpop, Interval | str, Interval | str]]", found: list[bool | None]) -> str:
    """Put a comparison in words, all sides in the unit of any: a plain number is meant in that of the figure.

    The figure between two bounds comes first.
    """
    sides = [links[0][1], *(right for _, _, right in links)]
    unit = next((side.unit for side in sides if isinstance(side, Interval) and side.unit), "")
    shown = [_shown_in(unit, side) for side in sides]
    hedged = [{True: "", False: "not ", None: "perhaps "}[each] for each in found]
    words = [WORDS[type(op)] for op, _, _ in links]
    if len(links) == 2:
        return f"{shown[1]}, {hedged[0]}{TURNED[words[0]]} {shown[0]} and {hedged[1]}{words[1]} {shown[2]}"
    told = [f"{hedge}{word} {side}" for hedge, word, side in zip(hedged, words, shown[1:], strict=True)]
    return f"{shown[0]}, {', '.join(told)}"


def _shown_in(unit: str, found: Interval | str) -> str:
    if isinstance(found, str):
        return found
    return f"more than {_figure(found.low, unit)}" if math.isinf(found.high) else _figure(found.value, unit)


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
