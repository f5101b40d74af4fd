"""The expressions of claims: what may be written, the figures they compute with, and how they are put in words."""

import ast
import math
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from harness.contract.plugins import nearest
from harness.records.record import LADDER
from harness.refusal import Refusal

DEEPEST = 40
LARGEST = sys.float_info.max


class ClaimError(Refusal):
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
        unit = "" if self.unit and other.unit else self.unit or other.unit
        return Figure(min(corners), self.value * other.value, max(corners), unit)

    def __truediv__(self, other: "Figure") -> "Figure":
        if other.low <= 0 <= other.high:
            reason = "it divides by what may be zero"
            raise Open(reason) if other.low < other.high else Unknown(reason)
        quotient = self * Figure(1 / other.high, 1 / other.value, 1 / other.low)
        return replace(quotient, unit="" if other.unit else self.unit)

    def __pow__(self, other: "Figure") -> "Figure":
        if self.low <= 0 or other.low != other.high:
            raise Unknown("a power is of a positive figure, by a plain number")
        try:
            ends = sorted((self.low**other.value, self.high**other.value))
        except OverflowError:
            raise Unknown("a power is beyond all numbers") from None
        return Figure(ends[0], self.value**other.value, ends[1], self.unit if other.value == 1 else "")


class Word(str):
    """A word that stands in an expression itself, and is not what a row earned."""


def exact(value: float, unit: str = "") -> Figure:
    """Return a figure without doubt."""
    return Figure(value, value, value, unit)


def parsed(expression: str) -> ast.expr:
    """Read an expression and refuse all but the grammar; raise ClaimError with one sentence."""
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ClaimError(f"'{expression}' is not an expression: write for example peak(x) <= 0.5 * peak(y)") from None
    comparisons = tree.values if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And) else [tree]
    for each in comparisons:
        if isinstance(each, ast.BoolOp) or (isinstance(each, ast.UnaryOp) and isinstance(each.op, ast.Not)):
            raise ClaimError(f"'{expression}': comparisons are joined by `and` alone, without brackets, `or` and `not`")
        if not isinstance(each, ast.Compare):
            raise ClaimError(f"'{expression}' compares nothing: write for example peak(x) <= 0.5 * peak(y)")
        if not all(isinstance(op, tuple(COMPARISONS)) for op in each.ops):
            raise ClaimError(f"'{expression}' compares in an unknown way: use <, <=, >, >= or ==")
        terms = (each.left, *each.comparators)
        for term in terms:
            _check(term, expression, 0)
        for op, left, right in zip(each.ops, terms, terms[1:], strict=False):
            if _is_word(left) != _is_word(right) or (_is_word(left) and not isinstance(op, ast.Eq)):
                sides = f"{ast.unparse(left)[:60]} and {ast.unparse(right)[:60]}"
                raise ClaimError(f"{sides} do not compare: words take == and numbers numbers")
            _check_word(left, right)
            _check_word(right, left)
            _common_unit(left, right)
    return tree


def calls(tree: ast.AST, figures: Collection[str]) -> list[ast.Call]:
    """Return what asks for one of some figures in an expression that was read."""
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [node for node in nodes if isinstance(node.func, ast.Name) and node.func.id in figures]


def joined(tree: ast.expr) -> list[ast.expr]:
    """Return the comparisons that `and` joins, or the one that there is."""
    return tree.values if isinstance(tree, ast.BoolOp) else [tree]


def keywords(call: ast.Call) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keywords of a figure: those that choose among comparisons, and those that say which part is meant."""
    given = {str(key.arg): key.value.value for key in call.keywords if isinstance(key.value, ast.Constant)}
    return {key: given[key] for key in given if key not in PARTS}, {key: given[key] for key in given if key in PARTS}


def _is_word(node: ast.expr) -> bool:
    """Check whether a side of a comparison is a word, and not a number."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in WORD_FIGURES
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _check_word(figure: ast.expr, word: ast.expr) -> None:
    """Raise ClaimError for a word that the figure which it is compared with never is."""
    if not (isinstance(figure, ast.Call) and isinstance(figure.func, ast.Name) and isinstance(word, ast.Constant)):
        return
    known = WORD_FIGURES.get(figure.func.id, ())
    if isinstance(word.value, str) and known and word.value not in known:
        raise ClaimError(f"{ast.unparse(figure)[:60]} is never '{word.value}'{nearest(word.value, known)}")


def _check(node: ast.expr, expression: str, depth: int) -> None:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and node.value > LARGEST:
        raise ClaimError(f"'{expression[:60]}...' has a number that is too large: write one below 1e308")
    if depth > DEEPEST:
        raise ClaimError(f"'{expression[:60]}...' is nested too deeply: write it in fewer brackets")
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, int | float | str)
        and not isinstance(node.value, bool)
    ):
        return
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return _check_numbers((node.left, node.right), expression, depth + 1)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _check_numbers((node.operand,), expression, depth + 1)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id not in NAMES:
            raise ClaimError(f"there is no figure '{node.func.id}': use one of {', '.join(NAMES)}")
        if len(node.args) != 1 or any(key.arg is None for key in node.keywords):
            raise ClaimError(f"'{ast.unparse(node)}' names no row: write {node.func.id}(STRATEGY)")
        for key in node.keywords:
            if not isinstance(key.value, ast.Constant):
                raise ClaimError(f"'{ast.unparse(node)}': {key.arg} is a plain number or text in quotes")
            if node.func.id not in PARTS.get(str(key.arg), (node.func.id,)):
                taken = [part for part, figures in PARTS.items() if node.func.id in figures]
                instead = f"write {taken[0]}" if taken else "leave it out"
                raise ClaimError(f"'{ast.unparse(node)}': {node.func.id} takes no {key.arg}: {instead}")
        names = {key.arg for key in node.keywords}
        if part := next((each for each in NEEDED if node.func.id in PARTS[each] and each not in names), None):
            raise ClaimError(f"'{ast.unparse(node)}' does not say which {node.func.id}: add {part}='...'")
        return
    raise ClaimError(f"'{ast.unparse(node)[:60]}' is no number and no figure: use one of {', '.join(NAMES)}")


def _check_numbers(nodes: Sequence[ast.expr], expression: str, depth: int) -> None:
    """Check what is computed with."""
    for node in nodes:
        _check(node, expression, depth)
        if _is_word(node):
            raise ClaimError(f"{ast.unparse(node)[:60]} is a word: only == compares it")


class Unit(NamedTuple):
    """The powers of bytes and of seconds in a figure."""

    bytes: float
    seconds: float


PLAIN = Unit(0.0, 0.0)


def unit_of(node: ast.expr) -> Unit:
    """Return the unit of an expression that was checked; a plain number, beside bytes, counts bytes."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return Unit(float(node.func.id in IN_BYTES), float(node.func.id in TIMES))
    if isinstance(node, ast.UnaryOp):
        return unit_of(node.operand)
    if not isinstance(node, ast.BinOp):
        return PLAIN
    if isinstance(node.op, ast.Add | ast.Sub):
        return _common_unit(node.left, node.right)
    left, right = unit_of(node.left), unit_of(node.right)
    if isinstance(node.op, ast.Pow):
        power = node.right.value if isinstance(node.right, ast.Constant) else 0
        return Unit(left.bytes * power, left.seconds * power) if isinstance(power, int | float) else PLAIN
    sign = 1 if isinstance(node.op, ast.Mult) else -1
    return Unit(left.bytes + sign * right.bytes, left.seconds + sign * right.seconds)


def _common_unit(left: ast.expr, right: ast.expr) -> Unit:
    """Return the unit of two sides that are added or compared; raise ClaimError where they have two."""
    units = dict.fromkeys(unit for unit in (unit_of(left), unit_of(right)) if unit != PLAIN)
    if len(units) > 1:
        sides = f"{ast.unparse(left)[:60]} and {ast.unparse(right)[:60]}"
        raise ClaimError(f"{sides} are of two units, as bytes and seconds are: they are neither added nor compared")
    return next(iter(units), PLAIN)


OPERATIONS: dict[type[ast.operator], Callable[[Figure, Figure], Figure]] = {
    ast.Add: Figure.__add__,
    ast.Sub: Figure.__sub__,
    ast.Mult: Figure.__mul__,
    ast.Div: Figure.__truediv__,
    ast.Pow: Figure.__pow__,
}


def _below(a: Figure, b: Figure) -> bool | None:
    """Check whether a < b: True, False, or None where the intervals overlap."""
    if a.high < b.low:
        return True
    return False if a.low >= b.high else None


def _at_most(a: Figure, b: Figure) -> bool | None:
    """Check whether a <= b, which is that b < a does not hold."""
    above = _below(b, a)
    return None if above is None else not above


def _equal(a: Figure, b: Figure) -> bool | None:
    if a.low > b.high or b.low > a.high:
        return False
    return True if a.low == a.high == b.low == b.high else None


COMPARISONS: dict[type[ast.cmpop], Callable[[Figure, Figure], bool | None]] = {
    ast.LtE: _at_most,
    ast.Lt: _below,
    ast.GtE: lambda a, b: _at_most(b, a),
    ast.Gt: lambda a, b: _below(b, a),
    ast.Eq: _equal,
}


TIMES = {"seconds": "step_seconds", "fetch_seconds": "fetch_seconds", "prepare_seconds": "prepare_seconds"}
WAITS = ("fetch_seconds", "prepare_seconds")
"""Those of them that no row is judged by: claims alone."""


PREDICTED = ("predicted", "predicted_reserved", "predicted_need", "predicted_stage", "predicted_kind", "foretold")
COUNTED = ("predicted_stage", "predicted_kind", "noted")
"""Figures that are exact where they are predicted: sums of the sizes of arrays, and choices."""


LIMITS = ("longest", "foretold")
"""Figures of what `harness fit` searched."""


PARTS = {
    "phase": ("peak", "held", "file_bytes", "anonymous_bytes", "predicted"),
    "of": ("stage", "kind", "predicted_stage", "predicted_kind", "size"),
    "figure": ("noted",),
}
"""Keywords that say which part of a row's figures is meant, each with the figures that take it."""
NEEDED = ("of", "figure")
"""Those of them without which nothing is meant."""


MEASURED_MEMORY = ("peak", "held", "reserved", "stage", "kind", "file_bytes", "anonymous_bytes", "all_ranks")


IN_BYTES = frozenset({*MEASURED_MEMORY, "floor", *(name for name in PREDICTED if name != "foretold")})
"""Figures that are bytes."""


UNTIMED: dict[str, tuple[str, ...]] = {
    "saves": ("wins", "trades"),
    "same memory": ("same", "wins", "loses"),
    "costs": ("loses", "trades"),
    "saves, time open": ("saves", "wins", "trades"),
    "same, time open": ("same", "same memory", "wins", "loses"),
    "costs, time open": ("costs", "loses", "trades"),
}
"""Verdicts of rows that were timed in too few rounds, and what more of them may make of each."""
ENDED = ("ok", "error")
"""The two ways in which a row may have ended that say something of its code."""
WORD_FIGURES = {
    "answer": LADDER,
    "verdict": (
        *("wins", "trades", "same", "loses", "enables", "fails", "wrong", "control", "baseline"),
        *UNTIMED,
    ),
    "outcome": ENDED,
}
"""Figures that are words, and the words that each may be; all others are numbers."""


NAMES = (
    *MEASURED_MEMORY,
    *PREDICTED,
    *TIMES,
    *("residual", "floor", "parameters", "longest", "noted", "size", "loss"),
    *WORD_FIGURES,
)
"""What may be asked of a row."""


def plain_label(label: str) -> str:
    """Return a label without blanks and quotation marks, in lower case."""
    return label.replace(" ", "").replace("'", "").replace('"', "").lower()


def compared(op: ast.cmpop, left: Figure | str, right: Figure | str) -> bool | None:
    """Check whether a comparison that `parsed` let through holds.

    None where the intervals of its sides overlap, or the verdict of a row may yet become the other side.
    """
    if isinstance(left, str) or isinstance(right, str):
        is_open = not (isinstance(left, Word) or isinstance(right, Word)) and left in UNTIMED
        if left == right and not is_open:
            return True
        return None if _may_be(left) & _may_be(right) else False
    return COMPARISONS[type(op)](left, right)


def _may_be(side: Figure | str) -> set[str]:
    """Return what a side that is a word may be once more rounds are timed; one of the expression itself stays."""
    return {str(side)} if isinstance(side, Word) else {str(side), *UNTIMED.get(str(side), ())}


WORDS: dict[type[ast.cmpop], str] = {
    ast.LtE: "at most",
    ast.Lt: "below",
    ast.GtE: "at least",
    ast.Gt: "above",
    ast.Eq: "equal to",
}


_UP, _DOWN = (ast.LtE, ast.Lt), (ast.GtE, ast.Gt)
_BETWEEN = {True: "within", False: "outside", None: "against"}
_BOUND = {True: "", False: "not ", None: "to be "}
"""The words for what holds, does not, and is not decided."""
_OF_EQUALS = (ast.LtE, ast.GtE, ast.Eq)
"""The comparisons that hold between equal numbers."""
DIGITS, MOST_DIGITS = 3, 9
"""How many digits a figure has usually, and at most."""


def in_words(links: "list[tuple[ast.cmpop, Figure | str, Figure | str]]", holds: list[bool | None]) -> str:
    """Put a comparison in words, all sides in the unit of any: a plain number is meant in that of the figure.

    The figure between two bounds comes first. What is equal stands alone. What is not decided gets its reason.
    There are as many digits as it takes to see what was decided: 1.996 is outside 2 to 3, and 2.00 is not.
    """
    sides = [links[0][1], *(right for _, _, right in links)]
    unit = next((side.unit for side in sides if isinstance(side, Figure) and side.unit), "")
    digits = next((each for each in range(DIGITS, MOST_DIGITS) if _is_seen(links, holds, unit, each)), MOST_DIGITS)
    shown = [_shown_in(unit, side, digits) for side in sides]
    ops = [op for op, _, _ in links]
    outcome = False if False in holds else None if None in holds else True
    if len(ops) == 2 and any(all(isinstance(op, way) for op in ops) for way in (_UP, _DOWN)):
        low, figure, high = shown if isinstance(ops[0], _UP) else shown[::-1]
        text = f"{figure}, {_BETWEEN[outcome]} {low} to {high}"
    elif len(ops) > 1:
        return listed([in_words([link], [hold]) for link, hold in zip(links, holds, strict=True)])
    elif isinstance(ops[0], ast.Eq) and outcome:
        text = shown[0]
    else:
        bound = shown[1]
        if isinstance(right := links[0][2], Figure) and math.isinf(right.high - right.low):
            bound = f"what is {bound}"
        text = f"{shown[0]}, {_BOUND[outcome]}{WORDS[type(ops[0])]} {bound}"
    if outcome is not None:
        return text
    if any(isinstance(side, str) for side in sides):
        return f"{text}: undecided, its time was not measured in enough rounds"
    endless = any(isinstance(side, Figure) and math.isinf(side.high - side.low) for side in sides)
    above = any(isinstance(side, Figure) and math.isinf(side.high) for side in sides)
    beyond = (
        "one of them ran out of its budget"
        if unit == "B"
        else f"one of them has no {'upper' if above else 'lower'} bound"
    )
    reason = beyond if endless else _spans(unit, sides)
    return f"{text}: undecided, {reason}"


def listed(words: Sequence[str]) -> str:
    """Join what several comparisons say: figures each, a word that several say once."""
    return "; ".join(word for at, word in enumerate(words) if word not in words[:at] or any(map(str.isdigit, word)))


def _spans(unit: str, sides: "Sequence[Figure | str]") -> str:
    """Name the widest interval among the sides of a comparison, and the next where that one holds no other side."""
    figures = [side for side in sides if isinstance(side, Figure)]
    widest, *rest = sorted(figures, key=lambda side: (side.high - side.low) / max(abs(side.value), 1e-12), reverse=True)
    alone = not rest or any(widest.low <= side.value <= widest.high for side in rest)
    named = [widest] if alone else [widest, rest[0]]
    return " and ".join(
        f"{_figure(side.value, unit)} may be {_figure(side.low, unit)} to {_figure(side.high, unit)}" for side in named
    )


def _is_seen(
    links: "list[tuple[ast.cmpop, Figure | str, Figure | str]]", holds: list[bool | None], unit: str, digits: int
) -> bool:
    """Check that of sides which so many digits show as equal, none came out as only unequal ones do."""
    return all(
        hold in (None, isinstance(op, _OF_EQUALS)) or _shown_in(unit, left, digits) != _shown_in(unit, right, digits)
        for (op, left, right), hold in zip(links, holds, strict=True)
    )


def _shown_in(unit: str, side: Figure | str, digits: int) -> str:
    if isinstance(side, str):
        return side.replace("_", " ")
    if math.isinf(side.high):
        low = _figure(side.low, unit, digits)
        return f"more than {low}" if unit == "B" else f"{low} or more"
    if math.isinf(side.low):
        return f"{_figure(side.high, unit, digits)} or less"
    return _figure(side.value, unit, digits)


def _figure(value: float, unit: str, digits: int = DIGITS) -> str:
    """Show bytes in MiB, seconds down to microseconds, all else as a number."""
    if unit == "B":
        return f"{_number(value / (1 << 20), digits)} MiB"
    if unit == "s":
        factor, name = next((pair for pair in ((1, "s"), (1e3, "ms")) if abs(value) * pair[0] >= 1), (1e6, "us"))
        return f"{_number(value * factor, digits)} {name}"
    return _number(value, digits)


def _number(value: float, digits: int) -> str:
    """Write a number with so many digits, or with all that it has before its point."""
    return f"{value:,.0f}" if 10**digits - 0.5 <= abs(value) < 1e15 else f"{value:,.{digits}g}"
