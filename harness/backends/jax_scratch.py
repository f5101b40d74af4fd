"""What XLA's libraries for CPUs take beside the compiler's own plan, by the text of a compiled program."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from harness.backends import processor

_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.-]+) \(", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.-]+) = b?[fsu](\d+)\[([\d,]*)\]\S* ([\w-]+)\((.*)$", re.MULTILINE)
_CALLED = re.compile(r"calls=%([\w.-]+)")
_CONTRACTED = re.compile(r"(\w)hs_contracting_dims=\{([\d,]*)\}")
_OPERAND = re.compile(r"%([\w.-]+)")

LIBRARY = "ynn_fusion"
"""How an instruction begins that a library computes."""

ARRAYS = 4
"""How many arrays a sum takes at once beside its operands, each as large as the result; none with narrow vectors."""

TILE_BYTES = 6 * (128 << 10)
"""What a thread of the library takes for the part of a sum that it works on: six arrays of 128 KiB at most."""

COLUMNS = 128
"""How many columns of its right factor the library packs at once, each over its whole length.

With narrow vectors it packs half as many of a product of `MANY_ROWS` or more.
"""

MANY_ROWS = 128


class _Instruction(NamedTuple):
    name: str
    width: int
    lengths: tuple[int, ...]
    operation: str
    rest: str

    @property
    def elements(self) -> int:
        return math.prod(self.lengths)


Computations = Mapping[str, list[_Instruction]]


class _Call(NamedTuple):
    """A call of the library, by its result, and the instructions that it computes."""

    result: _Instruction
    body: list[_Instruction]


def scratch(program: str, threads: int, is_wide: bool | None = None) -> int:
    """Estimate what the libraries take at most beside the plan while a program runs on its threads, in bytes.

    How large the allocations are, and how many at once, was seen by counting the calls of `malloc` of one step. With
    vectors of 512 bits, which this processor has if `is_wide` does not say, the library lays more arrays aside.
    """
    is_wide = processor.is_wide() if is_wide is None else is_wide
    computations = _computations(program)
    sums = [each for each in _in_library(computations) if "reduce" in _operations(each.body)]
    tiles = TILE_BYTES * threads if sums else 0
    return max(_of_sums(sums, threads, ARRAYS if is_wide else 0), _of_products(computations, is_wide)) + tiles


def _operations(body: list[_Instruction]) -> list[str]:
    return [each.operation for each in body]


def _computations(program: str) -> Computations:
    """Read the instructions of each computation, in their order."""
    starts = [*_COMPUTATION.finditer(program)]
    ends = [*(each.start() for each in starts[1:]), len(program)]
    return {start[1]: [*_instructions(program[start.end() : end])] for start, end in zip(starts, ends, strict=True)}


def _instructions(body: str) -> Iterator[_Instruction]:
    for name, bits, lengths, operation, rest in _INSTRUCTION.findall(body):
        yield _Instruction(
            name, max(int(bits) // 8, 1), tuple(map(int, filter(None, lengths.split(",")))), operation, rest
        )


def _in_library(computations: Computations) -> Iterator[_Call]:
    """Yield what the library computes."""
    for body in computations.values():
        for each in body:
            if each.name.startswith(LIBRARY) and (called := _CALLED.search(each.rest)):
                yield _Call(each, computations.get(called[1], []))


def _of_sums(sums: list[_Call], threads: int, arrays: int) -> int:
    """Estimate what the largest sum takes of those that are spread over their operands again, in bytes.

    The derivatives of a softmax and of a norm are such sums, of products with the gradient.
    """
    beside: dict[int, bool] = {}
    for call in sums:
        operations = _operations(call.body)
        last = len(operations) - operations[::-1].index("reduce")
        for each in call.body[:last]:
            if each.operation == "multiply":
                beside[each.elements] = beside.get(each.elements, False) or "dot" in operations
    spread = [call for call in sums if call.result.elements in beside and len(call.result.lengths) >= 3]
    return max((_of_sum(call, beside[call.result.elements], threads, arrays) for call in spread), default=0)


def _of_sum(call: _Call, beside_products: bool, threads: int, arrays: int) -> int:
    """Estimate what one sum takes: one array of its size, and others of it or of each part of a batch of a thread.

    Beside matrix products, as in dense attention of one row or more, a batch is worked on part by part: B, or the heads
    where B is 1. Measured beyond the analysis, of scores of one size, on two threads: 3.0 times the scores for a batch
    of 4, 5.0 for 2, 2.1 for 8 heads of one row, 3 for 4, 4.9 for 2, 4.1 to 5.2 for one. Of two devices that share two
    threads each takes 2.0 times for a batch of 4, 3.0 for 2; of four 1.9, and 1.45 for 8 heads. The logits [1, T, V] of
    one row are no batch, and take nothing.

    Elsewhere it is worked on whole if a dimension before the last two has the length 1: 5 times the scores [1, H, T, T]
    or [B, 1, T, T], as in a loop over chunks; 6 times a norm's operand [1, T, W], whose products are made there as
    well. Otherwise tiles do: for [B, T, W], [T, W] and [B, H, T, T]. So they do for a softmax alone.

    All that is with vectors of 512 bits. With those of 256 bits, 0.75 to 1.13 times the scores of any batch and heads,
    2.0 times a norm's operand [1, T, W], and nothing of [B, T, W].
    """
    batch, size = call.result.lengths[:-2], call.result.elements * call.result.width
    if beside_products:
        parts = next((length for length in batch if length > 1), 1)
        return 0 if batch == (1,) else size + arrays * size * min(threads, parts) // parts
    if 1 not in batch:
        return 0
    operations = _operations(call.body)
    makes_products = "multiply" in operations[: operations.index("reduce")]
    return (1 + makes_products + arrays) * size


def _of_products(computations: Computations, is_wide: bool) -> int:
    """Estimate what the largest matrix product takes: the columns of its right factor that are packed at once.

    Measured beyond the analysis, in MiB: 15.5 for a right factor [32000, 256] and for [32000, 512], 7.9 for
    [16384, 256], 4 for any [8192, 128 or more], 2 for [8192, 64], transposed or not. With vectors of 256 bits, and
    128 to 1,024 rows: 7.6 for [32000, 256], 7.8 for [32000, 512], 3.8 for [16384, 256], 1.9 to 2.0 for
    [8192, 64 to 256]; of 64 rows 15.6 for [32000, 256].
    """
    largest = 0
    for _, body in _in_library(computations):
        known = {each.name: each for each in body}
        for each in body:
            if each.operation == "dot" and (right := _right(each, known)) is not None:
                length = math.prod(right.lengths[at] for at in _contracted(each, "r"))
                rows, columns = (1, 1, *each.lengths)[-2:]
                packed = COLUMNS if is_wide or rows < MANY_ROWS else COLUMNS // 2
                largest = max(largest, min(columns, packed) * length * right.width)
    return largest


def _right(product: _Instruction, known: Mapping[str, _Instruction]) -> _Instruction | None:
    """Return the right factor of a product."""
    operands = _OPERAND.findall(product.rest.partition(")")[0])
    return known.get(operands[1]) if len(operands) > 1 else None


def _contracted(product: _Instruction, side: str) -> list[int]:
    """Return the dimensions of a factor, of the left or the right side, that a product sums over."""
    dims = next((dims for of, dims in _CONTRACTED.findall(product.rest) if of == side), "")
    return [int(at) for at in filter(None, dims.split(","))]
