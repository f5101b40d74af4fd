"""What operators of the CPU copy while they run: what is not of the type that they compute in, in that type.

A pointwise operator copies an operand of another type, as large as it is before it is repeated, and computes an output
of another type as such a copy. So does ATen's `TensorIterator` (`promote_inputs_to_common_dtype`,
`cast_common_dtype_to_outputs`). On a GPU kernels convert each element where they read it.
"""

from collections.abc import Iterable, Sequence
from functools import cache, reduce
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten
WIDENED = {
    *(aten.gather, aten.scatter, aten.scatter_add, aten.scatter_reduce),
    *(aten.scatter_, aten.scatter_add_, aten.scatter_reduce_),
}
"""Operators that work in 32 bits where their result has 16: all of it is copied (`create_acc_buffer`)."""
PRODUCTS = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}
"""Operators, and where the first matrix stands among their arguments."""
HAS_ONEDNN = torch.backends.mkldnn.is_available()
MULTIPLIED = {
    torch.bfloat16: HAS_ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    torch.float16: HAS_ONEDNN and torch.ops.mkldnn._is_mkldnn_fp16_supported(),
}
"""Whether oneDNN multiplies in a type of 16 bits. Where it does not, a product whose first matrix lies by columns, as
in the gradient of a weight, is computed in 32, one matrix at a time: so eight products were measured on a processor
without AVX-512, and none of fourteen that lie otherwise took more."""
UNPROMOTED = {aten.where: 1, aten.masked_fill: 2, aten.clone: 1}
"""Pointwise operators, and how many arguments they take in the types that those have."""


class Elements(NamedTuple):
    """An array, by the number and the type of its elements."""

    number: int
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.number * self.dtype.itemsize


@cache
def copies_types(func: Any) -> bool:
    """Return whether an operator copies what is of another type than it computes in."""
    return torch.Tag.pointwise in func.tags or func._overloadpacket in WIDENED or func._overloadpacket in PRODUCTS


def scratch(func: Any, args: Sequence[Any], result: Any) -> int:
    """Return the bytes of the copies that such an operator of the CPU, which returned `result`, made."""
    if not isinstance(result, torch.Tensor) or result.is_complex():
        return 0
    if (first := PRODUCTS.get(func._overloadpacket)) is not None:
        return _of_product(args[first], args[first + 1], result)
    if func._overloadpacket in WIDENED:
        narrow = result.dtype.is_floating_point and result.dtype.itemsize < torch.float32.itemsize
        return copies([elements(result)], torch.float32) if narrow else 0
    operands = [each for each in args[UNPROMOTED.get(func._overloadpacket, 0) :] if isinstance(each, torch.Tensor)]
    if (all(each.dtype == result.dtype for each in operands) and result.dtype is not torch.bool) or not operands:
        return 0
    if func._schema.is_mutable:
        operands.append(result)
    elif result.dtype is not torch.bool:
        return copies(map(elements, operands), result.dtype)
    return copies(map(elements, operands), _common(args))


def _of_product(one: torch.Tensor, other: torch.Tensor, result: torch.Tensor) -> int:
    if MULTIPLIED.get(result.dtype, True):
        return 0
    if one.stride(-2) != 1 or one.stride(-1) == 1 or other.stride(-1) != 1:
        return 0
    return result.shape[-2] * result.shape[-1] * torch.float32.itemsize


def elements(tensor: torch.Tensor) -> Elements:
    """Return what a tensor shows, repetitions included."""
    return Elements(tensor.numel(), tensor.dtype)


def copies(operands: Iterable[Elements], common: torch.dtype) -> int:
    """Return the bytes of operands in another type, where that is not theirs."""
    return sum(each.number for each in operands if each.dtype != common) * common.itemsize


def in_place(output: Elements, *operands: Elements) -> int:
    """Return the bytes of the copies that an operator makes whose output is its first operand."""
    return copies([output, output, *operands], reduce(promoted, (each.dtype for each in operands), output.dtype))


@cache
def promoted(one: torch.dtype, other: torch.dtype | type[float]) -> torch.dtype:
    """Return the type that arrays of two types are computed in, or one of a type and a number of Python."""
    with _disable_current_modes():
        if isinstance(other, torch.dtype):
            return torch.promote_types(one, other)
        return torch.result_type(torch.empty(0, dtype=one), other(1))


def _common(args: Sequence[Any]) -> torch.dtype:
    """Return the type that arrays and numbers are promoted to: one number decides less than an array of them."""
    arrays = [each.dtype for each in args if isinstance(each, torch.Tensor) and each.dim()]
    single = [each.dtype for each in args if isinstance(each, torch.Tensor) and not each.dim()]
    if not arrays:
        return reduce(promoted, single)
    numbers = [float if each.is_floating_point else bool if each is torch.bool else int for each in single]
    numbers += [type(each) for each in args if isinstance(each, (bool, int, float))]
    return reduce(promoted, numbers, reduce(promoted, arrays))
