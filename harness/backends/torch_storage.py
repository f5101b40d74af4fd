"""Follow the memory of a torch run by what its operators return: every storage while it lives, on tensors fake or not.

A storage is counted once, when an operator first returns it, and uncounted when it dies; parameters, gradients,
moments and what autograd saves are storages like any other. Beside them stand autograd's own graph, and what the
libraries of the CPU keep.
"""

import math
import sys
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from harness.backends import torch_convolutions, torch_lstm, torch_promotion, torch_reductions
from harness.backends.ledger import Change, Ledger, Maker
from harness.backends.torch_flops import trilinear
from harness.backends.torch_graph import Graph
from harness.backends.torch_kernels import CAPACITY, Kernels
from harness.backends.torch_packing import Packing
from harness.records.forecast import Standing

COPYING = ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_")
"""Collectives of which gloo, the CPU's library, makes a copy of the whole while they run."""
DEVICE = torch.ops.prim.device.default
ADD, ADD_IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
INDEX_PUT = torch.ops.aten.index_put.default
INTO_ZEROS = {
    torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default,
    torch.ops.aten.scatter.src: torch.ops.aten.scatter_.src,
    torch.ops.aten.scatter.value: torch.ops.aten.scatter_.value,
    torch.ops.aten.index_add.default: torch.ops.aten.index_add_.default,
    INDEX_PUT: torch.ops.aten.index_put_.default,
    torch.ops.aten.put.default: torch.ops.aten.put_.default,
}
"""How autograd writes the gradient of a gather, a sort, a selection, an index or a largest value into zeros: in place
where there is no mode."""
ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
BILINEAR = torch.ops.aten._trilinear.default
ENGINE = "_engine_run_backward"
"""The function of torch that calls autograd: operators whose caller it is are autograd's own."""
MAPPED = 1 << 16
"""Bytes from which an array has pages of its own, which it gives back. Smaller ones lie in a heap of which only the end
can be given back, and something that stays lies there: places of those that are gone serve small ones that come."""
HEAP = "free places of the heap"
SUPPOSED = {torch.bool: True, torch.float32: 1.0, torch.float64: 1.0, torch.int64: 1}
"""What a step gets where it asks for a number that a fake tensor does not have."""


class Piece(NamedTuple):
    """Memory that stands: the number and size of its block, and what gives it back."""

    block: int
    size: int
    taken: Any


class LiveStorage(TorchDispatchMode):
    """Follow the bytes of all storages that operators return, and the peak within each phase."""

    room = ""
    """The memory whose peak is wanted; here there is one."""

    base = 0
    """Bytes that stood before the run, and are in no peak."""

    def __init__(self, source_bytes: int = 0, kernels: int = CAPACITY) -> None:
        super().__init__()
        self.live = source_bytes
        self._small = self._heap = 0
        self.run_operator: Callable[[Any, Any, Any], Any] = lambda func, args, kwargs: func(*args, **kwargs)
        self.current: str | None = None
        self.peaks: dict[str, int] = {}
        self.supposed = 0
        self.ledger = Ledger()
        self.called: list[str] = []
        self._operator = ""
        self._top, self._top_at, self._top_free = -1, 0, 0
        self._known: dict[int, tuple[weakref.ref[Any], Piece, int]] = {}
        self.kernels, self.graph, self.packing = Kernels(kernels), Graph(), Packing()
        self._alone = _holders_of_first_gradient()

    def enter(self, name: str | None) -> None:
        """Begin a phase; its peak starts at what is live now."""
        self.current = name
        self._raise_peak()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.enter(name)
        try:
            yield
        finally:
            self.enter(None)

    def _raise_peak(self) -> None:
        if self.current is not None:
            now = self.now()
            self.peaks[self.current] = max(self.peaks.get(self.current, 0), now)
            if now > self._top:
                self._top, self._top_at, self._top_free = now, len(self.ledger.changes), self._heap - self._small

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave `__torch_dispatch__` as it is: torch would wrap it in another call for the compiler's sake."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and type(args[0]) is FakeTensor:  # as often as all others together: autograd asks
            return args[0].fake_device
        called_by_autograd = (func is ADD or func in INTO_ZEROS) and sys._getframe(1).f_code.co_name == ENGINE
        with torch._C.DisableTorchFunction():  # each question about a tensor would go through the modes, in autograd
            if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype in SUPPOSED:
                return self._number_in(args[0])
            if called_by_autograd:
                if func is ADD and self._sums_in_place(*args, **kwargs or {}):
                    func = ADD_IN_PLACE
                elif func is not ADD and self._holds_alone(func, args[0]):
                    func = INTO_ZEROS[func]
            result = self.run_operator(func, args, kwargs or {})
            self._operator = func._overloadpacket.__name__
            self._returned(func, args, result)
        return result

    def _number_in(self, tensor: torch.Tensor) -> Any:
        """Return the number in a tensor: where nobody knows it, as a step computed it, one that is supposed."""
        known: torch.Tensor | None = tensor
        if isinstance(tensor, FakeTensor):
            known = tensor.constant if tensor._version == 0 else None
        if known is None or known.is_meta:
            self.supposed += 1
            return SUPPOSED[tensor.dtype]
        with _disable_current_modes():
            return known.item()

    def _sums_in_place(self, one: torch.Tensor, other: torch.Tensor, alpha: float = 1) -> bool:
        """Check whether autograd would add a second gradient of a tensor into the first: it alone holds that one.

        So it does without a mode; under one it always makes a third.
        """
        equal = one.shape == other.shape and one.dtype == other.dtype and alpha == 1 and not torch.is_grad_enabled()
        whole = one.numel() * one.element_size() == one.untyped_storage().nbytes()
        return self._alone is not None and equal and whole and _holders(one) == self._alone

    def _holds_alone(self, func: Any, zeros: torch.Tensor) -> bool:
        """Check whether autograd alone holds zeros; that of an index holds them by two names."""
        if self._alone is None:
            return False
        tensors, storages = self._alone
        return _holders(zeros) == (tensors + (func is INDEX_PUT), storages)

    def _returned(self, func: Any, args: Any, result: Any) -> None:
        """Count what an operator returned, and what the libraries of the CPU keep behind it."""
        self.live += self.kernels.added(func, args, result) + self.packing.added(func, args) + self.graph.added(args)
        if func._schema.name in COPYING:
            self._pass_through(max(leaf.untyped_storage().nbytes() for leaf in args[:2]))
        if func is torch_lstm.FORWARD and torch.is_grad_enabled():
            self._count(result[3], torch_lstm.kept(args))
        self._count_all(result)
        if func is torch_lstm.FORWARD or func is torch_lstm.BACKWARD:
            self._pass_through(torch_lstm.scratch(func, args))
        elif func is torch_convolutions.FORWARD or func is torch_convolutions.BACKWARD:
            self._pass_through(torch_convolutions.scratch(func, args, result))
        elif func is ATTENTION_BACKWARD and not _lies_by_token(args[0]):
            self._pass_through(args[0].nbytes)
        elif func is BILINEAR:  # one after the other along the second axis
            _, _, (rows, _, *others) = trilinear(*args)
            self._pass_through(rows * math.prod(others) * args[0].element_size())
        elif func._overloadpacket in torch_reductions.TAKING:
            self._pass_through(torch_reductions.scratch(func, args, result))
        elif torch_promotion.copies_types(func):
            self._pass_through(torch_promotion.scratch(func, args, result))

    def _count_all(self, result: Any) -> None:
        for leaf in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)

    def _count(self, tensor: torch.Tensor, hidden: int = 0) -> None:
        """Count a storage once while its size stays, with what the library keeps `hidden` behind it."""
        if tensor.layout is not torch.strided:
            for part in _dense_parts(tensor):
                self._count(part)
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        known = self._known.get(key)
        if known is not None:
            if known[2] == size:
                return
            self._forget(key, known[1])
        piece = self._begin(size + hidden, self._maker(self._room(tensor)))
        self._known[key] = weakref.ref(storage, lambda _: self._forget(key, piece)), piece, size

    def _forget(self, key: int, piece: "Piece") -> None:
        known = self._known.get(key)
        if known is not None and known[1] is piece:  # it ended before, where its storage was given another size
            del self._known[key]
            self._end(piece)

    def _begin(self, size: int, maker: Maker) -> "Piece":
        """Take memory, note who did, and raise the peak."""
        taken = self._take(maker.room, size)
        piece = Piece(self.ledger.began(size, maker), size, taken)
        self._raise_peak()
        return piece

    def _end(self, piece: "Piece") -> None:
        self._give(piece.taken)
        self.ledger.ended(piece.block, piece.size)

    def repeat(self, changes: Sequence[Change]) -> None:
        """Take and give back what was taken and given back before, in its order: whatever begins there ends there."""
        pieces: dict[int, Piece] = {}
        for block, size in changes:
            if block in pieces:
                self._end(pieces.pop(block))
            else:
                pieces[block] = self._begin(size, self.ledger.makers[block])

    def counters(self) -> Hashable:
        """Return what counts operators, and so is not what it was after one that ran before."""
        return self.graph.open, self.kernels.groups

    def _maker(self, room: str) -> Maker:
        return Maker(self.current or "", self.where(), self._operator, room)

    def where(self) -> str:
        """Return the part of the run that is going on."""
        part = self.called[-1] if self.called else self.current or ""
        if part == "draw":
            return "parameters"
        return "backward" if part == "grad" and torch._C._current_graph_task_id() != -1 else part

    def standing(self) -> tuple[Standing, ...]:
        """Return what stood at the highest peak, by who made it, the largest first."""
        standing = self.ledger.standing(self._top_at, self.room)
        free = (Standing(HEAP, "", self._top_free, 0),) if self._top_free else ()
        return tuple(sorted((*standing, *free), key=lambda each: each.bytes, reverse=True))

    def _room(self, tensor: torch.Tensor) -> str:
        """Return the name of the memory that a new storage lies in."""
        return self.room

    def _take(self, room: str, size: int) -> Any:
        """Take memory; what is returned gives it back."""
        self.live += size
        if size < MAPPED:
            self._small += size
            self._heap = max(self._heap, self._small)
        return size

    def _give(self, taken: Any) -> None:
        self.live -= taken
        if taken < MAPPED:
            self._small -= taken

    def now(self) -> int:
        """Return the bytes whose peak is wanted: those that live, and the places of small ones that do not."""
        return self.live + self._heap - self._small

    def name(self, members: Mapping[str, list[Any]]) -> None:
        """Say of which kind the storages of these tensors are."""
        for kind, tensors in members.items():
            for tensor in tensors:
                known = self._known.get(tensor.untyped_storage()._cdata) if isinstance(tensor, torch.Tensor) else None
                if known is not None:
                    self.ledger.name(known[1].block, kind)

    def _pass_through(self, size: int) -> None:
        """Count what an operator takes while it runs."""
        self._end(self._begin(size, self._maker(self.room)))


def _dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors of which a sparse one is made."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    places = (tensor.crow_indices(), tensor.col_indices()) if rows else (tensor.ccol_indices(), tensor.row_indices())
    return *places, tensor.values()


def _lies_by_token(gradient_BHTK: torch.Tensor) -> bool:
    """Return whether a gradient of attention lies [B, T, H, K] in memory: in another order it is copied."""
    _, H, T, K = gradient_BHTK.shape
    return gradient_BHTK.stride() == (T * H * K, K, H * K, 1)


def _holders(tensor: torch.Tensor) -> tuple[int, int]:
    """Count who holds a tensor and its storage, those through whom a mode sees it included."""
    tensors: int = tensor._use_count()  # type: ignore[attr-defined]
    return tensors, torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@cache
def _holders_of_first_gradient() -> tuple[int, int] | None:
    """Return what `_holders` counts of a gradient that autograd alone holds, when it adds another to it.

    None where this torch does not count holders, or makes such a sum by another operator.
    """
    seen: list[tuple[int, int]] = []
    if not hasattr(torch.Tensor, "_use_count"):
        return None

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is ADD:
                seen.append(_holders(args[0]))
            return func(*args, **kwargs or {})

    with FakeTensorMode(), Watching(), torch.enable_grad():
        x = torch.empty(2, requires_grad=True)
        torch.autograd.grad((x.sin() * x.exp()).sum(), x)
    return seen[0] if seen else None
