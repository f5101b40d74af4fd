"""What strategies may read of the sizes of a workload, `parts.shape`; the workload's own model offers more.

The terms of a loss come through `harness.Objective`, which takes what a shape does not name for off.
"""

from typing import Any, Protocol, Self, runtime_checkable


@runtime_checkable
class Shape(Protocol):
    """The sizes that every workload has; a pydantic model, so `model_copy(update={...})` makes another one."""

    @property
    def batch(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    def model_copy(self, *, update: Any = None, deep: bool = False) -> Self: ...


@runtime_checkable
class TextShape(Shape, Protocol):
    """The sizes of a workload whose `data` are tokens; where the classifier is the embedding it also says `tied`."""

    @property
    def vocabulary(self) -> int: ...
    @property
    def tokens(self) -> int: ...


@runtime_checkable
class LayeredShape(Shape, Protocol):
    """The sizes of a workload whose heads are known: one with a cache, or whose rows of tokens ranks divide.

    `head` is the width of a head, `key_heads` how many there are of keys and values. `parameter_shapes()`, which
    every workload has that ranks divide, gives the shape of each parameter and the deviation it is drawn with: those of
    the layers once, under `layers.`, or once for each kind of layer.
    """

    @property
    def heads(self) -> int: ...
    @property
    def key_heads(self) -> int: ...
    @property
    def head(self) -> int: ...
    def parameter_shapes(self) -> dict[str, tuple[tuple[int, ...], float]]: ...


@runtime_checkable
class RotaryShape(Protocol):
    """The sizes of a workload with rotary positions: of each head the first `rotated` numbers are turned.

    Pair k of these, k from 0 on, turns by rotary_base ** (-2 k / rotated) from one token to the next.
    """

    @property
    def rotated(self) -> int: ...
    @property
    def rotary_base(self) -> float: ...
