"""What each part of a run is called with and what it returns: one protocol for each field of `Parts`.

Every part takes the whole `parts` first. Arrays are those of the framework, in which there is no common type: `Array`.
Their shapes stand in the names, in the letters of `harness.contract.parts`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from harness.contract import data
from harness.contract.toolkit.checkpoints import Checkpoint

if TYPE_CHECKING:
    from harness.contract.parts import Parts

Array: TypeAlias = Any
"""An array of torch, JAX or numpy."""
Tree: TypeAlias = Any
"""Nested dicts and lists of arrays, see `harness.tree`."""
State: TypeAlias = dict[str, Any]
"""What a run carries from step to step, by name. In JAX each value is a tree of arrays, in torch also plain numbers,
and texts, which are not saved: they are of the process alone.

params         parameters by name; those of the layers under `layers`, in torch a list of dicts, in JAX stacked in one
steps          how many updates there were
frozen         parameters that are not trained, in the structure of `params`, which then has only those that are
moments        in torch: of each parameter a list of the optimizer's tensors; None before the first update makes them
first, second  in JAX: the optimizer's two moments, in the structure of the parameters or as the optimizer will
observed       of a workload without gradients: what is compared in their place
kept           of a workload with a cache: the keys and values so far

A strategy may add names of its own (`scale`), and passes on those that it does not know: `{**state, "scale": scale}`.
"""
Layer: TypeAlias = Mapping[str, Array]
"""The parameters of one layer by their short names."""


class RowsPart(Protocol):
    def __call__(self, parts: "Parts", path: Path, /) -> Array: ...


class SourcePart(Protocol):
    def __call__(self, parts: "Parts", /) -> data.Source: ...


class WindowsPart(Protocol):
    def __call__(self, parts: "Parts", source: data.Source, /) -> data.Windows: ...


class OrderPart(Protocol):
    def __call__(self, parts: "Parts", source: data.Source, epoch: int, /) -> Callable[[int, int], Array]: ...


class BatchesPart(Protocol):
    def __call__(self, parts: "Parts", windows: data.Windows, /) -> Iterator[tuple[Array, Array]]: ...


class TransferPart(Protocol):
    def __call__(self, parts: "Parts", x: Array, y: Array, /) -> tuple[Array, Array]: ...


class DrawPart(Protocol):
    def __call__(self, parts: "Parts", name: str, shape: tuple[int, ...], deviation: float, /) -> Array: ...


class InitPart(Protocol):
    def __call__(self, parts: "Parts", source: data.Source | None = None, /) -> State: ...


class EmbedPart(Protocol):
    def __call__(self, parts: "Parts", params: Tree, x_BT: Array, /) -> Array: ...


class AddPositionsPart(Protocol):
    def __call__(self, parts: "Parts", params: Tree, x_BTD: Array, /) -> Array: ...


class LinearPart(Protocol):
    def __call__(self, parts: "Parts", p: Any, name: str, x: Array, /) -> Array: ...


class RotaryPart(Protocol):
    def __call__(self, parts: "Parts", positions: tuple[slice, ...], like: Array, /) -> tuple[Array, Array]: ...


class LayerPart(Protocol):
    """Of `mix`, `feed` and `block`: hidden states in, hidden states out, with the parameters of one layer."""

    def __call__(self, parts: "Parts", p: Any, x_BTD: Array, /) -> Array: ...


class AttendPart(Protocol):
    def __call__(self, parts: "Parts", q_BTHK: Array, k_BTGK: Array, v_BTGK: Array, /) -> Array: ...


class RecurPart(Protocol):
    def __call__(self, parts: "Parts", p: Any, x_BTD: Array, carried: Any, /) -> tuple[Array, Any]: ...


class ScanPart(Protocol):
    def __call__(
        self, parts: "Parts", x_BTE: Array, delta_BTE: Array, a_ES: Array, b_BTS: Array, c_BTS: Array, /
    ) -> Array: ...


class StackPart(Protocol):
    def __call__(self, parts: "Parts", ps: Any, x_BTD: Array, /) -> Array: ...


class LossPart(Protocol):
    def __call__(self, parts: "Parts", x_BTD: Array, w_VD: Array, y_BT: Array, /) -> Array: ...


class ShardBatchPart(Protocol):
    def __call__(self, parts: "Parts", x: Array, y: Array, /) -> tuple[Array, Array, Array | None]: ...


class GradPart(Protocol):
    def __call__(self, parts: "Parts", state: State, x: Array, y: Array, /) -> tuple[Array, Tree]: ...


class ReduceGradientsPart(Protocol):
    def __call__(self, parts: "Parts", loss: Array, grads: Tree, /) -> tuple[Array, Tree]: ...


class GatherParametersPart(Protocol):
    def __call__(self, parts: "Parts", params: Tree, /) -> Tree: ...


class PositionsPart(Protocol):
    def __call__(self, parts: "Parts", tokens: int, /) -> tuple[slice, ...] | Array: ...


class UpdatePart(Protocol):
    def __call__(self, parts: "Parts", state: State, grads: Tree, /) -> State: ...


class StepPart(Protocol):
    def __call__(self, parts: "Parts", state: State, x: Array, y: Array, /) -> tuple[State, Array]: ...


class EvaluatePart(Protocol):
    def __call__(
        self, parts: "Parts", state: State, batches: Iterable[tuple[Array, Array]], keep: bool = True, /
    ) -> Array: ...


class SavePart(Protocol):
    def __call__(self, parts: "Parts", state: State, file: Checkpoint, /) -> None: ...


class ResumePart(Protocol):
    def __call__(self, parts: "Parts", source: data.Source, file: Checkpoint, /) -> State: ...


Empty: TypeAlias = Callable[[], Any]
"""Return a cache that holds nothing."""


class Append(Protocol):
    """Put T tokens into a cache at `position`, or begin anew at 0; return it, and what they attend to.

    `seen_TS` says which of the S tokens each new one sees; None: all, in causal order.
    """

    def __call__(
        self, cached: Any, layer: Any, position: Any, k_BTGK: Array, v_BTGK: Array, /
    ) -> tuple[Any, Array, Array, Array | None]: ...


class CachePart(Protocol):
    def __call__(self, parts: "Parts", batch: int, tokens: int, like: Array, /) -> tuple[Empty, Append]: ...
