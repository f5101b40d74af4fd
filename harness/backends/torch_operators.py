"""Run operators on fake tensors, each only once for tensors of the same kind: a step repeats the same few thousand.

What an operator returns follows from what it is given: types, sizes, strides and plain values. So the second time its
results are made from a description of the first, in place of asking torch again, which takes five times as long.
Whatever cannot be described so is run each time.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch._library.utils import is_builtin
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from harness.backends.torch_flops import Work
from harness.records.roofline import Operations

PLAIN = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
)
"""Types of arguments that say all about a value."""
FROM_FILE = torch.ops.aten.from_file.default
GROUPED = torch.ops.aten._grouped_mm.default
"""Products of groups of rows with a matrix each: fake ones take bfloat16 alone, and real ones float32 as well."""
FROM_THE_START = {torch.ops.aten.as_strided.default, torch.ops.aten.view.dtype}
"""Views whose place is counted from the start of the storage, and not from that of the tensor that is viewed."""
CHANGES_A_VIEW = torch.Tag.inplace_view
"""Marks operators that change the sizes or the storage of a tensor in place."""


class Undescribed(Exception):
    """An argument that is more than its description."""


class Same(NamedTuple):
    """An output that is an argument itself: its position, or its name."""

    at: int | str


class New(NamedTuple):
    """An output in a storage of its own, or in that of the argument `of` and `offset` elements behind its first.

    `like` are the fields of the fake tensor.
    """

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    like: dict[str, Any]
    of: int | None


class Outcome(NamedTuple):
    """What an operator returned: its outputs, the type of a sequence of them (None for a single one), and the work."""

    outputs: tuple[Same | New | None, ...]
    sequence: type | None
    work: tuple[Operations, ...]


class Operators:
    """Run operators for a fake mode, and count their work."""

    def __init__(self, fake: FakeTensorMode, work: Work) -> None:
        self._work = work
        lenient = fake._allow_unsafe_data_ptr_access
        self._guard = (
            torch._C._set_warn_deprecated_on_mutable_data_ptr if lenient else torch._C._set_throw_on_mutable_data_ptr
        )
        self._known: dict[Any, Outcome | None] = {}

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what the operator returns for these arguments."""
        if func is FROM_FILE:  # a fake tensor maps no file; the pages that are touched count
            result = torch.empty(args[2] if len(args) > 2 else kwargs["size"], dtype=kwargs["dtype"])
            self._work.count(func, args, kwargs, result)
            return result
        if func is GROUPED:
            result = grouped(*args, **kwargs)
            self._work.count(func, args, kwargs, result)
            return result
        try:
            key = described(func, args, kwargs)
        except Undescribed:
            result = func(*args, **kwargs)
            self._work.count(func, args, kwargs, result)
            return result
        outcome = self._known.get(key)
        if outcome is not None:
            self._work.operations += outcome.work
            return self._made(outcome, args, kwargs)
        before = len(self._work.operations)
        result = func(*args, **kwargs)
        self._work.count(func, args, kwargs, result)
        if key not in self._known:
            alike = _is_still(key, func, args, kwargs)
            work = tuple(self._work.operations[before:])
            self._known[key] = outcome_of(func, args, kwargs, result, work) if alike else None
        return result

    def _made(self, outcome: Outcome, args: Any, kwargs: Any) -> Any:
        if outcome.sequence is None:
            return self._output(outcome.outputs[0], args, kwargs)
        return outcome.sequence(self._output(each, args, kwargs) for each in outcome.outputs)

    def _output(self, output: Same | New | None, args: Any, kwargs: Any) -> Any:
        if output is None:
            return None
        if isinstance(output, Same):
            return kwargs[output.at] if isinstance(output.at, str) else args[output.at]
        size, stride, offset, dtype, device, like, of = output
        with torch._C._DisableTorchDispatch():
            if of is None:
                inner = torch.empty_strided(size, stride, dtype=dtype, device="meta")
            else:
                inner = torch.empty(0, dtype=dtype, device="meta")
                inner.set_(args[of].untyped_storage(), args[of].storage_offset() + offset, size, stride)
            asks = device != inner.device  # a mode is asked for the device as often as for all operators together
            made = torch.Tensor._make_subclass(
                FakeTensor, inner, False, dispatch_device=asks, device_for_backend_keys=device
            )
        self._guard(made)
        made.__dict__.update(like)
        return made


def grouped(a: Any, b: Any, offs: Any = None, *others: Any) -> Any:
    """Multiply rows [M, K] by a matrix [K, N] for each group of rows, or make [G, M, N] where groups divide K."""
    groups = (len(offs),) if b.dim() == 2 else ()
    return a.new_empty((*groups, a.shape[-2], b.shape[-1]))


def described(func: Any, args: Any, kwargs: Any) -> Any:
    """Describe a call, such that equal descriptions mean equal results; raises Undescribed."""
    if torch.is_inference_mode_enabled():
        raise Undescribed
    key: list[Any] = [func, torch.get_default_dtype()]
    _describe(key, args)
    if func in FROM_THE_START:
        key.append(args[0].storage_offset())
    if kwargs:
        key.extend(kwargs)
        _describe(key, kwargs.values())
    return tuple(key)


def _is_still(key: Any, func: Any, args: Any, kwargs: Any) -> bool:
    """Check whether a call has left the sizes of its arguments: `out=` and `resize_` may give one another."""
    try:
        return bool(described(func, args, kwargs) == key)
    except Undescribed:
        return False


def _describe(key: list[Any], values: Iterable[Any]) -> None:
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.layout is not torch.strided or value.is_complex() or value.is_neg():
                raise Undescribed
            key += (value.dtype, value.shape, value.stride(), value.fake_device, value.requires_grad)
        elif kind in PLAIN:
            key += (kind, value)  # 1 and 1.0 are equal, and give different types
        elif kind is list or kind is tuple:
            key += (kind, len(value))
            _describe(key, value)
        else:
            raise Undescribed


def outcome_of(func: Any, args: Any, kwargs: Any, result: Any, work: tuple[Operations, ...]) -> Outcome | None:
    """Describe what an operator returned; None where it must be run each time."""
    if not isinstance(func, torch._ops.OpOverload) or CHANGES_A_VIEW in func.tags or not is_builtin(func):
        return None
    sequence = type(result) if isinstance(result, list | tuple) else None
    if sequence not in (None, list, tuple):
        return None
    try:
        outputs = tuple(_described_output(each, args, kwargs) for each in _flat(result))
    except Undescribed:
        return None
    fresh = [each.untyped_storage()._cdata for each, out in zip(_flat(result), outputs, strict=True) if _is_fresh(out)]
    return Outcome(outputs, sequence, work) if len(fresh) == len(set(fresh)) else None


def _flat(result: Any) -> Any:
    return result if isinstance(result, list | tuple) else (result,)


def _is_fresh(output: Same | New | None) -> bool:
    return isinstance(output, New) and output.of is None


def _described_output(output: Any, args: Any, kwargs: Any) -> Same | New | None:
    if output is None:
        return None
    for at, value in (*enumerate(args), *kwargs.items()):
        if value is output:
            return Same(at)
    if type(output) is not FakeTensor or output.constant is not None or output.requires_grad:
        raise Undescribed
    if output.layout is not torch.strided or output.is_complex() or output.is_neg():
        raise Undescribed
    storage = output.untyped_storage()
    within = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    sharing = [leaf for leaf in within if leaf.untyped_storage()._cdata == storage._cdata]
    of = next((at for at, value in enumerate(args) if any(value is leaf for leaf in sharing)), None)
    if len(sharing) > 1 or (sharing and of is None):
        raise Undescribed  # whose storage it is cannot be known from here
    least = output.storage_offset() + 1 + sum((n - 1) * s for n, s in zip(output.shape, output.stride(), strict=True))
    if of is None and (storage.nbytes() != (least * output.element_size() if output.numel() else 0)):
        raise Undescribed  # a part of a storage of its own
    return New(
        output.shape,
        output.stride(),
        int(output.storage_offset()) - (0 if of is None else int(args[of].storage_offset())),
        output.dtype,
        output.fake_device,
        dict(output.__dict__),
        of,
    )
