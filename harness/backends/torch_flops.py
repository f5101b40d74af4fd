"""Count the work of a torch step: what each operator multiplies and moves, on fake tensors or real ones.

Products and attention are counted by the formulae of `torch.utils.flop_counter`, everything else by the bytes that it
reads and writes. A view moves nothing, nor does a question about a tensor, and a gather reads only what it takes.
"""

import math
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from harness.backends.torch_calls import text_of
from harness.records.roofline import Operations, gathered

aten = torch.ops.aten
GATHERS = {aten.embedding, aten.index, aten.gather, aten.index_select}
UNTOUCHED = {
    aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.empty_permuted, aten._unsafe_view,
}  # fmt: skip
VECTORS = {aten.mv: 0, aten.addmv: 1, aten.dot: 0, aten.vdot: 0, aten.addr: 0}
"""Products with a vector, and where the array stands of which each element is multiplied once."""
IN_PLACE = {aten.addmm_: aten.addmm, aten.baddbmm_: aten.baddbmm, aten.addmv_: aten.addmv}
ATTENTION = {
    getattr(aten, f"_scaled_dot_product_{kernel}{way}"): places
    for kernel in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    for way, places in (("", (0, 2)), ("_backward", (1, 5)))
}
"""Kernels that the registry lacks, or does not take with grouped heads or a causal mask: where the queries stand among
the arguments, and how many products are made."""


GROUPED = aten._grouped_mm
"""Products of groups of rows with a matrix each, or of groups of columns with as many rows."""
LSTM = {aten.mkldnn_rnn_layer: 1, aten.mkldnn_rnn_layer_backward: 2}
"""The LSTM of the CPU's library, and how many products each pass makes with each weight."""
CHUNKED_LOSS = "torch_nn._linear_cross_entropy_batch_chunked"
"""Torch's own chunked loss, which makes its gradients with it: logits, and both gradients."""


class Work(TorchDispatchMode):
    """Add up the operations of what runs within it."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operations] = []

    def taken(self) -> tuple[Operations, ...]:
        """Return what was counted since the last call."""
        operations, self.operations = self.operations, []
        return gathered(operations)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count(func, args, kwargs or {}, result)
        return result

    def count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Add the operations of one operator, called with these arguments."""
        packet = func._overloadpacket
        written = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)] or _changed(func, args)
        if func.is_view or packet in UNTOUCHED or not written:
            return
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        moved = _bytes(written) + (_bytes(written) if packet in GATHERS else _bytes(read))
        flops = 0.0
        if packet in ATTENTION:
            flops = _attention(func, args, kwargs)
        elif packet is GROUPED:
            flops = 2.0 * args[0].numel() * args[1].shape[-1]
        elif packet in LSTM:
            sequence, *weights = args[:3]
            flops = LSTM[packet] * 2.0 * sequence.shape[:-1].numel() * sum(weight.numel() for weight in weights)
        elif str(packet) == CHUNKED_LOSS:
            (n, D), V = args[0].shape, len(args[1])
            flops = 3 * 2.0 * n * V * D
        elif IN_PLACE.get(packet, packet) in VECTORS:
            flops = 2.0 * args[VECTORS[IN_PLACE.get(packet, packet)]].numel()
        elif packet is aten._trilinear:
            flops = 2.0 * sum(map(math.prod, trilinear(*args)[:2]))
        elif (formula := flop_registry.get(IN_PLACE.get(packet, packet))) is not None:
            flops = float(formula(*args, **kwargs, out_val=result))
        kind = str(read[0].dtype if read else "").removeprefix("torch.")
        self.operations.append(Operations(kind, flops, moved, text_of(func, args, kwargs)))


def _attention(func: Any, args: Any, kwargs: Any) -> float:
    """Count the products of attention [B, H, T, K] over S keys; under a causal mask half of them are left out."""
    first, products = ATTENTION[func._overloadpacket]
    query, key = args[first], args[first + 1]
    named = {**dict(zip((each.name for each in func._schema.arguments), args, strict=False)), **kwargs}
    B, H, T, K = query.shape
    return products * 2.0 * B * H * T * key.shape[2] * K / (2 if named.get("is_causal") else 1)


def trilinear(one: Any, two: Any, three: Any, *axes: Any) -> tuple[list[int], list[int], list[int]]:
    """Return the lengths of the axes of both products of a bilinear layer or its gradient, and of what is between them.

    The first three `axes` say where each array gets one of length 1, the fourth over which is summed: already by the
    first product where the third array has none.
    """
    shapes = []
    for array, inserted in zip((one, two, three), axes, strict=False):
        shape = list(array.shape)
        for axis in sorted(inserted):
            shape.insert(axis, 1)
        shapes.append(shape)
    first = [max(pair) for pair in zip(*shapes[:2], strict=True)]
    left = [1 if axis in axes[3] and shapes[2][axis] == 1 else size for axis, size in enumerate(first)]
    return first, list(map(max, left, shapes[2])), left


def _changed(func: Any, args: Any) -> list[torch.Tensor]:
    """Return the tensors that an operator without a result writes to, by its schema: also those of lists."""
    declared = zip(func._schema.arguments, args, strict=False)
    changed = [
        value for argument, value in declared if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [leaf for leaf in tree_leaves(changed) if isinstance(leaf, torch.Tensor)]


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
