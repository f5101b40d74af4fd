"""What the CPU's library keeps of products in 16 bits: for each size a kernel that it wrote for it.

oneDNN caches the kernels of the 1,024 sizes that were used last. Products of a fixed size add to that in the first
step alone. The groups of a grouped product, which the experts of a mixture take, have the sizes that routing gives
them: other ones in each step, so that a process grows step by step, until the cache is full at 0.6 GiB. Attention takes
products of its blocks: their sizes are those of torch's kernel (`cpu_flash_attention` in FlashAttentionKernel.cpp).
"""

import math
from collections import Counter
from typing import Any

import numpy as np
import torch

from harness.backends import processor

DTYPES = {torch.bfloat16, torch.float16} if processor.has_float16() else {torch.bfloat16}
"""Types of the products that oneDNN does: those in float16 where the processor does, by kernels of the same size.

Empirical: 12 products in float16 keep 0.54 to 0.57 MiB each on a Xeon with AMX, and a backward pass of attention 1.6 to
2.1 MiB, against 1.8 to 1.9 in bfloat16.
"""
NATIVE = processor.has_bfloat16()
"""Whether the processor multiplies bfloat16 by itself. Elsewhere oneDNN widens the factors, by smaller kernels."""
KERNEL = 9 << 16 if NATIVE else 11 << 12 if processor.is_wide() else 0
"""Bytes that oneDNN keeps of each product in bfloat16 with sizes of its own: 0.56 MiB, or 44 KiB of widened factors.

An empirical figure: the resident memory grows by 0.5 to 0.6 MiB at the first call of each size and stays, and by 43 to
46 KiB on a Xeon whose host hides the instructions for bfloat16. Without vectors of 512 bits oneDNN has no such product:
torch's own keeps nothing.
"""
BLOCK_KERNEL = 12 << 16 if NATIVE else KERNEL
"""Bytes that it keeps of each product of a block of attention, which adds to its result or scales it: 0.75 MiB.

Empirical: 0.6 to 0.9 MiB, on two processors that multiply bfloat16, 10 to 120 KiB on that Xeon, 0 without such vectors.
"""
CAPACITY, VARIABLE = 1024, "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
"""Kernels that oneDNN keeps, and the variable that sets another number. torch keeps as many: LRU_CACHE_CAPACITY."""
PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm}
GROUPED = torch.ops.aten._grouped_mm
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
KEYS_IN_BLOCK = 512
SCORE, FEATURE = 6, 12
"""Bytes that each thread keeps of a forward pass for each score, and for each feature of each query, of a block.

Empirical: what stays resident of 64 to 2,048 queries of 32 to 128 features lies up to 0.4 MiB above it, and of 512
queries of 128 features 0.7 MiB.
"""


SPREAD = 1.5
"""How much more the sizes of groups differ than if each token chose by lot: tokens alike go the same way.

Empirical: 8 experts in 4 layers keep 1.1 times the kernels in a first step, and 1.4 times after 24 steps of words.
"""
PROBED = 15
"""Sizes of each grouped product that the probe before a measurement brings: 24 groups of some 55 rows.

They lie in the base of what is measured, and give way to those of the run where the cache is full.
"""


COUNTED = {*PRODUCTS, GROUPED, ATTENTION, ATTENTION_BACKWARD}


class Kernels:
    """The kernels that a run has needed so far, of which the library keeps `capacity`, those of a probe among them."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self._fixed: set[Any] = set()
        self._of_blocks: set[Any] = set()
        self._groups: Counter[Any] = Counter()
        self._of_groups = 0.0
        self._block_bytes = 0
        self.bytes = 0

    @property
    def groups(self) -> int:
        """Return how many groups have been multiplied."""
        return self._groups.total()

    def added(self, func: Any, args: Any, result: torch.Tensor) -> int:
        """Return the bytes that the library keeps from now on, after an operator that may be a product."""
        operator = func._overloadpacket
        if operator not in COUNTED or args[0].dtype not in DTYPES:
            return 0
        if operator is ATTENTION:
            self._block_bytes = max(self._block_bytes, of_blocks(*args[:2]))
        elif operator is ATTENTION_BACKWARD:
            self._of_blocks |= products_of_blocks(*args[:4])
        else:
            tensors = [leaf for leaf in args if isinstance(leaf, torch.Tensor)]
            key = (func, args[0].dtype, *((leaf.shape, leaf.stride()) for leaf in tensors))
            if operator is GROUPED:
                self._count_groups(key, args, result)
            else:
                self._fixed.add(key)
        before = self.bytes
        room = max(0, self.capacity - PROBED * len(self._groups))
        of_attention = min(room, len(self._of_blocks))
        others = min(room - of_attention, len(self._fixed) + self._of_groups)
        self.bytes = int(KERNEL * others) + BLOCK_KERNEL * of_attention + self._block_bytes
        return self.bytes - before

    def _count_groups(self, key: Any, args: Any, result: torch.Tensor) -> None:
        """Count the sizes that the groups of one more product are expected to bring."""
        one, other = args[:2]
        groups = next(tensor.shape[0] for tensor in (one, other, result) if tensor.dim() == 3)
        rows = one.shape[1] if other.dim() == 2 else one.shape[0]
        before = different_sizes(self._groups[key], rows, groups, SPREAD)
        self._groups[key] += groups
        self._of_groups += different_sizes(self._groups[key], rows, groups, SPREAD) - before


def of_blocks(q_BHTK: torch.Tensor, k_BHSK: torch.Tensor) -> int:
    """Return the bytes that the threads keep of one block of attention each, after its forward pass."""
    queries, keys = _queries_in_block(q_BHTK.shape[2]), min(k_BHSK.shape[2], KEYS_IN_BLOCK)
    return torch.get_num_threads() * queries * (SCORE * keys + FEATURE * q_BHTK.shape[3])


def products_of_blocks(
    gradient_BHTK: torch.Tensor, q_BHTK: torch.Tensor, k_BHSK: torch.Tensor, v_BHSK: torch.Tensor
) -> set[Any]:
    """Return what tells the products of a backward pass of attention apart: five for each size of block, some alike."""
    steps = [each.stride(2) for each in (gradient_BHTK, q_BHTK, k_BHSK, v_BHSK)]
    of_gradient, of_q, of_k, of_v = steps
    length, features = q_BHTK.shape[2:]
    products: set[Any] = set()
    for queries in _sizes(length, _queries_in_block(length)):
        for keys in _sizes(k_BHSK.shape[2], KEYS_IN_BLOCK):
            products |= {
                ("scores", queries, keys, features, of_q, of_k),
                ("scores", queries, keys, features, of_gradient, of_v),
                ("transposed", keys, features, queries, of_gradient),
                ("transposed", keys, features, queries, of_q),
                ("plain", queries, features, keys, of_k),
            }
    return products


def _queries_in_block(length: int) -> int:
    return 256 if length >= 768 else 64 if length >= 192 else 32


def _sizes(length: int, block: int) -> set[int]:
    """Return the sizes of the blocks that a length falls into: whole ones, and what is left."""
    return {min(length, block), length % block or min(length, block)}


def different_sizes(drawn: int, rows: int, groups: int, spread: float = 1.0) -> float:
    """Return how many sizes so many groups are expected to have, of rows that fall into one of `groups` at random.

    A size is binomial, taken as normal with `spread` times its deviation.
    """
    deviation = max(spread * math.sqrt(rows * (groups - 1)) / groups, 0.1)
    sizes = np.arange(-math.ceil(6 * deviation), math.ceil(6 * deviation) + 1)
    chance = np.exp(-0.5 * (sizes / deviation) ** 2)
    return float((1 - (1 - chance / chance.sum()) ** drawn).sum())
