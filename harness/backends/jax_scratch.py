"""What XLA's libraries for CPUs take beside the compiler's own plan, by the text of a compiled program."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.-]+) \(", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.-]+) = b?[fsu](\d+)\[([\d,]*)\]\S* ([\w-]+)\((.*)$", re.MULTILINE)
_CALLED = re.compile(r"calls=%([\w.-]+)")
_CONTRACTED = re.compile(r"(\w)hs_contracting_dims=\{([\d,]*)\}")
_OPERAND = re.compile(r"%([\w.-]+)")

LIBRARY = "ynn_fusion"
"""How an instruction begins that a library computes."""

ARRAYS = 4
"""How many arrays the library needs at once for each part of a batch that it works on, each as large as the result."""

COLUMNS = 128
"""How many columns of its right factor the library packs at once, each over its whole length."""


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


def scratch(program: str, threads: int) -> int:
    """Estimate what the libraries take at most beside the plan while a program runs on its threads, in bytes."""
    computations = _computations(program)
    return max(_of_sums(computations, threads), _of_products(computations))


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


def _in_library(computations: Computations) -> Iterator[tuple[_Instruction, list[_Instruction]]]:
    """Yield what the library computes, with the instructions of each."""
    for body in computations.values():
        for each in body:
            if each.name.startswith(LIBRARY) and (called := _CALLED.search(each.rest)):
                yield each, computations.get(called[1], [])


def _of_sums(computations: Computations, threads: int) -> int:
    """Estimate what sums over batches take: the largest, and a few arrays for each part that a thread works on.

    The derivative of a softmax over batches, of the scores [B, H, T, T] of dense attention above all, runs in a library
    that allocates for itself what it sums and needs again, and works on a batch part by part, each thread on one: on
    B, or on H where B is 1. Measured beyond the analysis, of scores of one size, on two threads: 3.0 times the scores
    for a batch of 4, 5.0 for 2, 2.1 for 8 heads of one row, 3 for 4, 4.9 for 2, 4.1 to 5.2 for one. Of two devices that
    share two threads each takes 2.0 times for a batch of 4, 3.0 for 2; of four 1.9, and 1.45 for 8 heads. Where the
    products are not made beside the sum, as in a loop over chunks, 5. Nothing where the library sums no such products:
    for a softmax alone (9 MiB for 62), nor for matrix products, however large.
    """
    results = [*_in_library(computations)]
    fused: dict[int, bool] = {}
    for _, body in results:
        names = [each.operation for each in body]
        before = body[: len(names) - names[::-1].index("reduce")] if "reduce" in names else []
        fused |= {
            each.elements: fused.get(each.elements, False) or "dot" in names
            for each in before
            if each.operation == "multiply"
        }
    largest = 0
    for result, body in results:
        batched = len(result.lengths) >= 4 or sum(length > 1 for length in result.lengths) >= 3
        if batched and any(each.operation == "reduce" for each in body) and result.elements in fused:
            size = result.elements * result.width
            parts = next((length for length in result.lengths[:-2] if length > 1), 1) if fused[result.elements] else 1
            largest = max(largest, size + ARRAYS * size * min(threads, parts) // parts)
    return largest


def _of_products(computations: Computations) -> int:
    """Estimate what the largest matrix product takes: the columns of its right factor that are packed at once.

    Measured beyond the analysis, in MiB: 15.5 for a right factor [32000, 256] and for [32000, 512], 7.9 for
    [16384, 256], 4 for any [8192, 128 or more], 2 for [8192, 64], transposed or not.
    """
    largest = 0
    for _, body in _in_library(computations):
        known = {each.name: each for each in body}
        for each in body:
            if each.operation == "dot" and (right := _right(each, known)) is not None:
                length = math.prod(right.lengths[at] for at in _contracted(each, "r"))
                columns = each.lengths[-1] if each.lengths else 1
                largest = max(largest, min(columns, COLUMNS) * length * right.width)
    return largest


def _right(product: _Instruction, known: Mapping[str, _Instruction]) -> _Instruction | None:
    """Return the right factor of a product."""
    operands = _OPERAND.findall(product.rest.partition(")")[0])
    return known.get(operands[1]) if len(operands) > 1 else None


def _contracted(product: _Instruction, side: str) -> list[int]:
    """Return the dimensions of a factor, of the left or the right side, that a product sums over."""
    dims = next((dims for of, dims in _CONTRACTED.findall(product.rest) if of == side), "")
    return [int(at) for at in filter(None, dims.split(","))]
