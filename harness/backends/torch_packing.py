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
DEEP, OF_DEEP, NARROW = 8, 3 << 20, 256
"""The depth, in multiples of the smaller side, from which threads divide it; what they pack then, in bytes, beside the
buffers that are there; and the smaller side up to which each thread but one has a result of its own.

All of these are empirical, from a Xeon with AMX (`tests/benchmarks/packing_figures.py`). Of 39 products on one and two
threads in new processes one takes 4.8 MiB more, and the others are off by at most 2.1 MiB. Of 18 deep ones after a
larger one two take 4.1 and 18.8 MiB more, and the others are off by at most 3.1 MiB.
"""
FLOAT = 4


def packs() -> bool:
    """Return whether products run on a processor where the library packs."""
    return torch.backends.mkl.is_available() and processor.vendor() == "GenuineIntel"


def packed(rows: int, columns: int, depth: int, threads: int) -> int:
    """Return the bytes that a product [rows, depth] by [depth, columns] packs, with the results of its threads."""
    if rows * threads < MOST_ROWS:
        return 0
    if is_deep(rows, columns, depth, threads):
        return OF_DEEP + (threads - 1) * rows * columns * FLOAT * (min(rows, columns) <= NARROW)
    block = -(-depth // 2) if BLOCK < depth <= 2 * BLOCK else min(depth, BLOCK)
    return (min(columns, MOST_COLUMNS * threads) + min(rows, MOST_ROWS * threads)) * block * FLOAT


def is_deep(rows: int, columns: int, depth: int, threads: int) -> bool:
    """Return whether threads divide the depth of a product."""
    side = min(rows, columns)
    return threads > 1 and side * threads >= MOST_ROWS and depth >= DEEP * side


class Packing:
    """The buffers that a run has left so far; `largest` is the size of those of deep products (True), and of others."""

    def __init__(self) -> None:
        self.active = packs()
        self.largest = {False: packed(*WARMED, torch.get_num_threads()), True: 0}

    def added(self, func: Any, args: Any) -> int:
        """Return the bytes that stay from now on, after an operator that may be a product."""
        first = PRODUCTS.get(func._overloadpacket) if self.active else None
        if first is None or args[first].dtype != torch.float32:
            return 0
        (rows, depth), columns = args[first].shape, args[first + 1].shape[1]
        threads = torch.get_num_threads()
        deep = is_deep(rows, columns, depth, threads)
        size = packed(rows, columns, depth, threads)
        if size <= self.largest[deep]:
            return 0
        self.largest[deep] = size
        return size
