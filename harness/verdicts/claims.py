"""Answer claims: sentences with an expression over measured figures that decides them.

An expression is a comparison, or comparisons joined by `and`: of numbers, of figures of rows, and of sums, differences,
products, quotients and powers of those. A figure is written `peak(fused_loss)`; what stands in the brackets is the
label of a row, as the tables have it, or the one row of that strategy. Keywords choose among comparisons:
`peak(streaming, corpus_tokens=5000000)`, and `ranks=2` among rows; so does `where`, for all figures of a claim. It is
parsed, never executed.

Every figure has an interval: a peak that of its repetitions and child processes, and the resolution of its meter beside
it, a case that ran out of its budget everything from there up (on a GPU from what it was seen to take), a prediction
what residuals of its backend have shown. Times of one table are ratios, those of `pooled`, with the interval that the
claim needs, corrected over its comparisons: Holm, A simple sequentially rejective multiple test procedure, Scandinavian
Journal of Statistics 6 (1979), 65-70. What the intervals do not decide is inconclusive.
"""

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.records import Case, Claim, Record
from harness.records.record import heading_of
from harness.verdicts import times
from harness.verdicts.expressions import (
    COUNTED,
    LIMITS,
    MEASURED_MEMORY,
    NAMES,
    OPERATIONS,
    TIMES,
    ClaimError,
    Figure,
    Open,
    Unknown,
    Word,
    calls,
    compared,
    exact,
    in_words,
    joined,
    keywords,
    listed,
    parsed,
    plain_label,
    unit_of,
)
from harness.verdicts.figures import FIGURES, OWN_RESIDUALS, rests_on_prediction, usual_residuals
from harness.verdicts.judge import Comparison, Row
from harness.verdicts.pooled import BASELINES, ERROR

RANKS = "ranks"
"""The keyword that chooses among rows of one label, where they ran on several numbers of ranks."""
BUDGET = "budget_gib"
OF_ANSWERS = ("answer", "verdict", "outcome", "noted")
"""Figures with which a claim looks at what a wrong answer is itself."""
ON_RANKS = re.compile(r"on\d+ranks$")
"""The end of the label of a row on several ranks, without blanks."""
GIB = 1 << 30
Where = Mapping[str, Any]


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
    outcomes = _corrected(tree, _Tables(tables), list(_settings(claim, tables)))
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
    wrong = dict.fromkeys(row.label for row in rows.values() if row.verdict == "wrong")
    if wrong and not calls(tree, OF_ANSWERS):
        reason += f"; wrong answers: {', '.join(wrong)}"
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


def _corrected(tree: ast.expr, tables: "_Tables", settings: Sequence[Where]) -> list[_Outcome]:
    """Evaluate an expression at each setting so that all of them together err no more often than one (Holm).

    What is joined by `and`, or has a bound on either side, may be refuted in so many ways and shares the error.
    """
    ways = max(1, sum(len(each.ops) for each in ast.walk(tree) if isinstance(each, ast.Compare) and calls(each, TIMES)))
    decided: dict[int, _Outcome] = {}
    while undecided := [place for place in range(len(settings)) if place not in decided]:
        error = ERROR / (len(undecided) * ways)
        tried = {place: _Evaluation(tables, settings[place], error).of(tree) for place in undecided}
        decided |= {at: each for at, each in tried.items() if each.verdict != "inconclusive"} or tried
    return [decided[place] for place in range(len(settings))]


def refuse(claims: Iterable[Claim], comparisons: Sequence[Sequence[Case]], suite: str) -> None:
    """Raise ClaimError for the first claim of a suite that no run of it can answer: it names what no comparison has."""
    sized = any(case.budget_bytes for cases in comparisons for case in cases)  # else a search brings its own budgets
    tables = [Comparison(cases[0], tuple(Row(case, "open") for case in cases)) for cases in comparisons]
    by_sizes = _Tables(tables)
    for claim in claims:
        where = {key: value for key, value in claim.where.items() if sized or key != BUDGET}
        settings = list(_settings(claim.model_copy(update={"where": where}), tables))
        if not settings:
            raise ClaimError(f"{suite}: claim '{claim.id}': no comparison has {_shown(where)}: mend its `where`")
        try:
            asked = calls(parsed(claim.that), NAMES)
        except ClaimError as fault:
            raise ClaimError(f"{suite}: claim '{claim.id}': {fault}") from None
        for call in asked:
            try:
                for setting in settings:
                    _Evaluation(by_sizes, setting, ERROR).row(ast.unparse(call.args[0]), keywords(call)[0])
            except Unknown as reason:
                raise ClaimError(f"{suite}: claim '{claim.id}': {reason}: mend it, or leave it out") from None


def answered(records: Sequence[Record], tables: Sequence[Comparison]) -> list[Answer]:
    """Decide the claims that the newest run among records was made for: none, where it had none."""
    return [answer(claim, tables) for claim in answerable(heading_of(records).claims, records)]


def answerable(claims: Iterable[Claim], records: Iterable[Record]) -> list[Claim]:
    """Return the claims that records are about: of limits that were searched those that ask for limits, else all."""
    searched = any(record.limits is not None for record in records)
    return [claim for claim in claims if not searched or calls(parsed(claim.that), LIMITS)]


def asked(claims: Iterable[Claim], case: Case, figures: Collection[str]) -> set[str]:
    """Return the labels, without blanks and ranks, of rows that claims ask for in a comparison, given by one case."""
    return {
        ON_RANKS.sub("", plain_label(ast.unparse(call.args[0])))
        for claim in claims
        for call in calls(parsed(claim.that), figures)
        if fits(case, {**claim.where, **keywords(call)[0]})
    }


def near(claims: Iterable[Claim], tables: Sequence[Comparison], doubt: float) -> list[Row]:
    """Return the rows whose memory a claim rests on that another measurement might decide otherwise.

    That is where the claim is open once that share of every peak is added to it and taken from it, or one on residuals
    is as they are. What lies in comparisons that were not measured is left to them.
    """
    by_sizes = _Tables(tables)
    rows = {
        id(row): row
        for claim in claims
        for part in joined(parsed(claim.that))
        if calls(part, (*MEASURED_MEMORY, "residual"))
        for where in _settings(claim, tables)
        if (outcome := _Evaluation(by_sizes, where, ERROR, doubt).of(part)).verdict == "inconclusive"
        for row in outcome.rows
    }
    return list(rows.values())


def _settings(claim: Claim, tables: Sequence[Comparison]) -> Iterator[Where]:
    """Yield one setting for each comparison that fits the claim; figures with keywords may then look at others."""
    for table in tables:
        if fits(table.case, claim.where):
            yield {**_sizes(table.case), **claim.where}


def _sizes(case: Case) -> dict[str, Any]:
    budget = {} if case.budget_bytes is None else {BUDGET: round(case.budget_bytes / GIB, 8)}
    return {**case.shape, **budget, "place": str(case.place), "corpus": case.corpus, "tokenizer": case.tokenizer}


def fits(case: Case, where: Where) -> bool:
    """Check whether a comparison, given by one of its cases, has the sizes, place and corpus that are asked for."""
    sizes = _sizes(case)
    return all(sizes.get(key) == value for key, value in _asked(where).items())


def _asked(where: Where) -> dict[str, Any]:
    """Return what comparisons are chosen by, a budget as exactly as bytes can have it: 0.1 GiB are no whole bytes."""
    sizes = {key: value for key, value in where.items() if key != RANKS}
    return {**sizes, BUDGET: round(sizes[BUDGET], 8)} if isinstance(sizes.get(BUDGET), float) else sizes


class _Tables:
    """Comparisons by their sizes: those that fit are there without a look at each."""

    def __init__(self, tables: Sequence[Comparison]) -> None:
        self.all = tables
        self.by_place: dict[tuple[Any, bool], tuple[float, float]] = {}
        sizes = [_sizes(table.case) for table in tables]
        self.names = {name for each in sizes for name in each}
        self.having: dict[tuple[str, Any], set[int]] = {}
        for at, each in enumerate(sizes):
            for name in self.names:
                self.having.setdefault((name, _hashable(each.get(name))), set()).add(at)

    def fitting(self, where: Where) -> list[Comparison]:
        """Return those that fit what is asked for, as `fits` says of one."""
        having = [
            self.having.get((key, _hashable(value)), set())
            for key, value in _asked(where).items()
            if key in self.names or value is not None
        ]
        places = set.intersection(*sorted(having, key=len)) if having else range(len(self.all))
        return [self.all[at] for at in sorted(places)]

    def residuals(self, case: Case) -> tuple[float, float]:
        """Return between which shares of a prediction nine of ten measured rows at a case's place lie beside theirs."""
        key = case.place, case.ranks == 1
        if key not in self.by_place:
            self.by_place[key] = usual_residuals((row for table in self.all for row in table.rows), case)
        return self.by_place[key]


def _hashable(value: Any) -> Any:
    return repr(value) if isinstance(value, dict | list) else value


class _Evaluation:
    """Evaluate one expression at one comparison.

    Intervals of times err with the chance `error`; measured memory is doubted by a share of it.
    """

    def __init__(self, tables: _Tables, where: Where, error: float, doubt: float = 0.0) -> None:
        self.tables, self.where, self.error, self.doubt = tables, where, error, doubt
        self.rows: list[Row] = []
        self.anchor: str | None = None
        self.predicted = False

    def of(self, tree: ast.expr) -> _Outcome:
        """Return what the parts come to: one that does not hold refutes them all, whatever nobody knows of others."""
        holds: list[bool | None] = []
        words: list[str] = []
        unknown: list[str] = []
        for each in joined(tree):
            assert isinstance(each, ast.Compare)
            try:
                terms = self.terms(each)
            except Unknown as reason:
                unknown.append(str(reason))
                continue
            except Open as reason:
                holds.append(None)
                words.append(str(reason))
                continue
            links = list(zip(each.ops, terms, terms[1:], strict=False))
            outcomes = [compared(*link) for link in links]
            holds += outcomes
            words.append(in_words(links, outcomes))
        if unknown and False not in holds:
            return _Outcome("untested", unknown[0], tuple(self.rows))
        words += unknown
        verdict = "refuted" if False in holds else "inconclusive" if None in holds else "verified"
        prefix = "predicted: " if self.predicted else ""
        return _Outcome(verdict, prefix + listed(words), tuple(self.rows))

    def terms(self, comparison: ast.Compare) -> "list[Figure | str]":
        """Evaluate the sides of a comparison.

        Times of one kind and table that are held against each other are ratios to one of them: to the baseline where it
        is asked for, else to the one in the middle. Against a plain number, or of several tables, each is by itself.
        """
        sides = (comparison.left, *comparison.comparators)
        timed = calls(comparison, TIMES)
        rows = [self.row(ast.unparse(call.args[0]), keywords(call)[0]) for call in timed]
        labels = [row.label for _, row in rows]
        self.anchor = None
        of_one = len({(ast.unparse(call.func), id(table)) for call, (table, _) in zip(timed, rows, strict=True)}) == 1
        if of_one and len({unit_of(side).seconds for side in sides}) == 1:
            self.anchor = BASELINES[0] if BASELINES[0] in labels else labels[len(labels) // 2]
        return [self.value(side) for side in sides]

    def value(self, node: ast.expr) -> Figure | str:
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                return Word(node.value)
            return exact(float(node.value))  # type: ignore[arg-type]
        if isinstance(node, ast.UnaryOp):
            return -self.number(node.operand)
        if isinstance(node, ast.BinOp):
            return OPERATIONS[type(node.op)](self.number(node.left), self.number(node.right))
        assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        name, (where, own) = node.func.id, keywords(node)
        table, row = self.row(ast.unparse(node.args[0]), where)
        self.rows.append(row)
        if name in TIMES:
            times.check(row, TIMES[name])
            if self.anchor is None:
                return times.by_itself(row, table, TIMES[name], self.error)
            return times.beside(row, table, TIMES[name], self.error, self.anchor)
        value = FIGURES[name](row, own)
        if self.doubt and name in MEASURED_MEMORY and isinstance(value, Figure):
            value = replace(value, low=(1 - self.doubt) * value.low, high=(1 + self.doubt) * value.high)
        if not rests_on_prediction(name, row, keywords(node)[1]):
            return value
        self.predicted = True
        if isinstance(value, str) or name in COUNTED:
            return value
        low, high = OWN_RESIDUALS.get(name) or self.tables.residuals(row.case)
        return replace(value, low=value.low * (1 + low), high=value.high * (1 + high))

    def number(self, node: ast.expr) -> Figure:
        value = self.value(node)
        assert isinstance(value, Figure)
        return value

    def row(self, label: str, keywords: Where) -> tuple[Comparison, Row]:
        """Find the row of a label in the comparison meant; raise Unknown where there is none or more than one."""
        where = {**self.where, **keywords}
        ranks = where.get(RANKS)
        tables = self.tables.fitting(where)
        if len(tables) != 1:
            raise Unknown(f"{len(tables)} comparisons have {_shown(keywords)}")
        wanted = plain_label(label)
        asked = [row for row in tables[0].rows if ranks is None or row.case.ranks in (1, ranks)]
        rows = [row for row in asked if wanted in map(plain_label, (row.case.strategies_label, row.label))] or [
            row for row in asked if plain_label("+".join(each.name for each in row.case.strategies)) == wanted
        ]
        if len(rows) != 1:
            name, counts = label.strip("'"), {row.case.ranks for row in rows}
            how = f" (ranks={max(counts)} chooses among them)" if len(counts) > 1 else ""
            raise Unknown(f"{len(rows)} rows are '{name}'{how}" if rows else f"there is no row '{name}'")
        return tables[0], rows[0]


def _shown(where: Where) -> str:
    return ", ".join(f"{key} {value}" for key, value in where.items()) or "these sizes"
