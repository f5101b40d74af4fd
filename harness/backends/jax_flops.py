"""Count the work of a JAX step from its program: what each operation multiplies and moves, loops as often as they run.

The compiler's own analysis counts the body of a loop once. Elementwise operations that only feed others are taken to
be fused with them: they move nothing.
"""

import math
from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from harness.records.roofline import Operations, gathered

VIEWS = {"reshape", "broadcast_in_dim", "squeeze", "expand_dims", "iota", "stop_gradient"}
GATHERS = {"gather", "dynamic_slice", "slice"}
UPDATES = {"scatter": 2, "scatter-add": 2, "scatter_add": 2, "dynamic_update_slice": 1}
"""Operations that change a part of an array in place, and the position of the part."""
MATERIALISED = {
    "dot_general", "conv_general_dilated", "gather", "scatter", "scatter-add", "scatter_add", "dynamic_update_slice",
    "concatenate", "sort", "cumsum", "reduce_sum", "reduce_max", "reduce_min", "argmax", "argmin", "transpose", "pad",
    "dynamic_slice", "slice", "top_k", "pallas_call",
}  # fmt: skip


def work(program: ClosedJaxpr) -> tuple[Operations, ...]:
    """Count the operations of a traced program."""
    return gathered(_of(program.jaxpr, 1))


def _of(program: Jaxpr, times: int) -> Iterator[Operations]:
    """Count the operations of a program that runs so many times."""
    needed = {id(v) for v in program.outvars if not isinstance(v, Literal)}
    for equation in program.eqns:
        if equation.primitive.name in MATERIALISED or any(_programs(equation)):
            needed |= {id(v) for v in equation.invars if not isinstance(v, Literal)}
    for equation in program.eqns:
        name = equation.primitive.name
        inner = list(_programs(equation))
        if inner:
            turns = times * (_counted(equation) if name == "while" else int(equation.params.get("length", 1)))
            if name == "cond":  # it takes one of its branches: the larger is counted
                inner = [max(inner, key=lambda one: sum(operations.flops for operations in _of(one, 1)))]
            for one in inner:
                yield from _of(one, turns)
            continue
        if name in VIEWS:
            continue
        written = [v for v in equation.outvars if name in MATERIALISED or id(v) in needed]
        moved = sum(map(_bytes, written))
        if name in UPDATES:
            moved = 2 * _bytes(equation.invars[UPDATES[name]])
        elif name in GATHERS:
            moved *= 2
        elif name in MATERIALISED:
            moved += sum(map(_bytes, equation.invars))
        first: Any = equation.invars[0].aval if equation.invars else None
        dtype = str(getattr(first, "dtype", ""))
        yield Operations(dtype, times * _flops(equation), times * moved)


def _counted(equation: Any) -> int:
    """Return how often a loop runs that counts by a known number up to another; 1 where other values decide."""
    condition, body = (equation.params[f"{part}_jaxpr"].jaxpr for part in ("cond", "body"))
    asked, body_at = (equation.params[f"{part}_nconsts"] for part in ("cond", "body"))
    if len(condition.eqns) != 1 or condition.eqns[0].primitive.name not in ("lt", "gt"):
        return 1
    compared = condition.eqns[0].invars
    counter, end = compared if condition.eqns[0].primitive.name == "lt" else reversed(compared)
    if isinstance(counter, Literal) or condition.invars.index(counter) < asked:
        return 1
    before, first = body.invars[body_at:], equation.invars[asked + body_at :]
    at = condition.invars.index(counter) - asked
    if not isinstance(end, Literal):
        place = condition.invars.index(end) - asked
        if place < 0:
            end = equation.invars[place + asked]
        elif body.outvars[place] is before[place]:
            end = first[place]
    added = [each.invars for each in body.eqns if each.primitive.name == "add" and body.outvars[at] in each.outvars]
    steps = [value for pair in added if before[at] in pair for value in pair if isinstance(value, Literal)]
    numbers = [int(each.val) for each in (first[at], end, *steps) if isinstance(each, Literal)]
    if len(numbers) != 3 or numbers[2] <= 0:
        return 1
    start, stop, step = numbers
    return max(0, -(-(stop - start) // step))


def _programs(equation: Any) -> Iterator[Jaxpr]:
    """Yield the programs that an operation runs: the body of a scan, the branches of a condition.

    None of a kernel: between what it reads and what it writes nothing moves. None of an update: its program says how
    two numbers become one.
    """
    if equation.primitive.name == "pallas_call" or equation.primitive.name in UPDATES:
        return
    for value in equation.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, ClosedJaxpr):
                yield each.jaxpr
            elif isinstance(each, Jaxpr):
                yield each


def _flops(equation: Any) -> float:
    """Count the products of an operation: of matrices, of groups of rows with a matrix each, of convolutions."""
    name, shapes = equation.primitive.name, [getattr(each.aval, "shape", ()) for each in equation.invars]
    made: tuple[int, ...] = equation.outvars[0].aval.shape if equation.outvars else ()
    if name == "conv_general_dilated":
        outputs = equation.params["dimension_numbers"].rhs_spec[0]
        return 2.0 * math.prod(made) * math.prod(shapes[1]) / shapes[1][outputs]
    if name == "ragged_dot_general":
        numbers = equation.params["ragged_dot_dimension_numbers"]
        (contracted, _), _ = numbers.dot_dimension_numbers
        within = set(numbers.lhs_ragged_dimensions) & set(contracted)  # groups of columns: together they are all
        every = math.prod(made) / (made[0] if within else 1)
        return 2.0 * every * math.prod(shapes[0][axis] for axis in contracted)
    if name != "dot_general":
        return 0.0
    (contracted, _), _ = equation.params["dimension_numbers"]
    return 2.0 * math.prod(made) * math.prod(shapes[0][axis] for axis in contracted)


def _bytes(variable: Any) -> int:
    aval: Any = variable.aval
    return math.prod(aval.shape) * aval.dtype.itemsize if hasattr(aval, "shape") else 0
