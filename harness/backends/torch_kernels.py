"""What the CPU's library keeps of products in bfloat16: for each size a kernel that it wrote for it.

oneDNN caches the kernels of the 1,024 sizes that were used last. Products of a fixed size add to that in the first
step alone. The groups of a grouped product, which the experts of a mixture take, have the sizes that routing gives
them: other ones in each step, so that a process grows step by step, until the cache is full at 0.6 GiB.
"""

import math
from collections import Counter
from typing import Any

import numpy as np
import torch

KERNEL = 9 << 16
"""Bytes that oneDNN keeps of each product in bfloat16 with sizes of its own: 0.56 MiB.

An empirical figure: the resident memory grows by 0.5 to 0.6 MiB at the first call of each size and stays.
"""
CAPACITY, VARIABLE = 1024, "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
"""Kernels that oneDNN keeps, and the variable that sets another number. torch keeps as many: LRU_CACHE_CAPACITY."""
PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm}
GROUPED = torch.ops.aten._grouped_mm


class Kernels:
    """The kernels that a run has needed so far, of which the library keeps `capacity`."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self._fixed: set[Any] = set()
        self._groups: Counter[Any] = Counter()
        self._of_groups = 0.0
        self.bytes = 0

    def added(self, func: Any, args: Any, result: torch.Tensor) -> int:
        """Return the bytes that the library keeps from now on, after an operator that may be a product."""
        grouped = func._overloadpacket is GROUPED
        if not (grouped or func._overloadpacket in PRODUCTS) or result.dtype != torch.bfloat16:
            return 0
        key = (func, *((leaf.shape, leaf.stride()) for leaf in args if isinstance(leaf, torch.Tensor)))
        if grouped:
            self._count_groups(key, args, result)
        else:
            self._fixed.add(key)
        before = self.bytes
        self.bytes = int(KERNEL * min(self.capacity, len(self._fixed) + self._of_groups))
        return self.bytes - before

    def _count_groups(self, key: Any, args: Any, result: torch.Tensor) -> None:
        """Count the sizes that the groups of one more product are expected to bring."""
        one, other = args[:2]
        groups = next(tensor.shape[0] for tensor in (one, other, result) if tensor.dim() == 3)
        rows = one.shape[1] if other.dim() == 2 else one.shape[0]
        before = different_sizes(self._groups[key], rows, groups)
        self._groups[key] += groups
        self._of_groups += different_sizes(self._groups[key], rows, groups) - before


def different_sizes(drawn: int, rows: int, groups: int) -> float:
    """Return how many sizes so many groups are expected to have, of rows that fall into one of `groups` at random.

    A size is binomial, taken as normal. Routers that prefer some experts spread more: at most to `drawn` sizes.
    """
    deviation = max(math.sqrt(rows * (groups - 1)) / groups, 0.1)
    sizes = np.arange(-math.ceil(6 * deviation), math.ceil(6 * deviation) + 1)
    chance = np.exp(-0.5 * (sizes / deviation) ** 2)
    return float((1 - (1 - chance / chance.sum()) ** drawn).sum())
