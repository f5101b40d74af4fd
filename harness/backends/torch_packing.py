"""What Intel's library (MKL) keeps of products in float32 on Intel's processors: copies of both matrices, packed.

A product packs the weight of a layer [N, K] a block of K at a time, but whole in N. The buffers stay, and one that is
larger than all before is taken beside them. So each worker multiplies once at `WARMED`, which takes the largest that
there are on processors of others; on Intel's the logits of a large vocabulary take more.
"""

from typing import Any

import torch

from harness.backends import processor

PRODUCTS = {torch.ops.aten.mm: 0, torch.ops.aten.addmm: 1}
"""Operators, and where the first matrix stands among their arguments."""
WARMED = (1024, 8192, 384)
"""Rows, columns and depth of the product whose buffers lie in the base of what is measured."""
MOST_COLUMNS, MOST_ROWS = 10_000, 384
"""Columns of the second matrix, and rows of the first, that each thread packs at once; of fewer rows among all threads
nothing is packed whole."""
BLOCK = 384
"""The depth of a block; one of more than a block and of two at most is halved."""
DEEP = 16
"""The depth, in multiples of the smaller side, from which threads divide it: each has buffers and a result of its own.

All of these are empirical: of 39 products on one and two threads of a Xeon with AMX one takes 7.5 MiB less, and none of
the others is off by more than 1.3 MiB (`tests/benchmarks/packing_figures.py`).
"""
FLOAT = 4


def packs() -> bool:
    """Return whether products run on a processor where the library packs."""
    return torch.backends.mkl.is_available() and processor.vendor() == "GenuineIntel"


def packed(rows: int, columns: int, depth: int, threads: int) -> int:
    """Return the bytes that a product [rows, depth] by [depth, columns] packs."""
    if rows * threads < MOST_ROWS:
        return 0
    block = -(-depth // 2) if BLOCK < depth <= 2 * BLOCK else min(depth, BLOCK)
    both = (min(columns, MOST_COLUMNS * threads) + min(rows, MOST_ROWS * threads)) * block * FLOAT
    if threads > 1 and depth >= DEEP * min(rows, columns):
        return threads * both + (threads - 1) * rows * columns * FLOAT
    return both


class Packing:
    """The buffers that a run has left so far."""

    def __init__(self) -> None:
        self.active = packs()
        self.largest = packed(*WARMED, torch.get_num_threads())

    def added(self, func: Any, args: Any) -> int:
        """Return the bytes that stay from now on, after an operator that may be a product."""
        first = PRODUCTS.get(func._overloadpacket) if self.active else None
        if first is None or args[first].dtype != torch.float32:
            return 0
        (rows, depth), columns = args[first].shape, args[first + 1].shape[1]
        size = packed(rows, columns, depth, torch.get_num_threads())
        if size <= self.largest:
            return 0
        self.largest = size
        return size
