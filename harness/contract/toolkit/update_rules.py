"""An optimizer from two functions: what its rule keeps of one tensor, and how it moves that tensor."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import FunctionType
from typing import Any, NamedTuple

from harness.contract.parts import Parts
from harness.contract.toolkit import optimizers, trees


class Turn(NamedTuple):
    """What a rule gets beside a tensor and its gradient: the number of this update, from 1, and the rates."""

    steps: Any
    rate: float
    decay: float

    def shrink(self) -> float:
        """Return by what the weights are multiplied at each step: decoupled weight decay (arXiv:1711.05101)."""
        return 1 - self.rate * self.decay


def is_hidden(name: str, dimensions: int) -> bool:
    """Return whether a tensor, by its whole name and its dimensions in one layer, is a matrix of a layer.

    Embeddings, positions and the classifier stand outside of the layers of a state; taps of a convolution and decays of
    a scan mix no features.
    """
    table = name.rpartition(".")[2].lower() in ("conv", "a_log")
    return dimensions == 2 and optimizers.of_layers(name) and not table


def in_torch(
    parts: Parts, begin: Callable[[str, Any], list[Any]], move: Callable[[Turn, Any, Any, list[Any]], None]
) -> Parts:
    """Rewrite `init` and `update` for a rule: `begin(name, p)` lists what it keeps, `move(turn, p, g, moments)` moves.

    Both work in place, without gradients. Tensors are moved one after the other, so the scratch is that of one.
    """
    inner = parts.init

    def init(parts: Parts, source: Any = None) -> Any:
        import torch

        state = inner(parts, source)
        with torch.no_grad():
            names = trees.names(state["params"])
            moments = trees.mapped(lambda name, p: begin(name, p.detach()), names, state["params"])
        return {**state, "moments": moments}

    def update(parts: Parts, state: Any, grads: Any) -> Any:
        import torch

        turn = Turn(state["steps"] + 1, parts.shape.learning_rate, parts.shape.weight_decay)
        with torch.no_grad():
            trees.mapped(partial(move, turn), state["params"], grads, state["moments"])
        return {**state, "steps": state["steps"] + 1}

    return replace(parts, init=init, update=update)


def in_jax(
    parts: Parts, begin: Callable[[str, Any], Any], move: Callable[[Turn, Any, Any, Any], tuple[Any, Any]]
) -> Parts:
    """Rewrite `init` and `update` for a rule: `begin(name, p)` is what is kept of a tensor, or of that of one layer.

    It is any tree of arrays, and lies in the state as `first`. `move(turn, p, g, moments)` returns the new tensor and
    what is kept of it, of the same types.
    """
    inner = parts.init

    def init(parts: Parts, source: Any = None) -> Any:
        state = inner(replace(parts, moments=frozenset()), source)
        # As one program, since each stays in memory; operator by operator what ranks divide stays divided.
        make = _program() if parts.ranks == 1 else _first
        return {**state, "first": make(_Beginning.of(begin), state["params"])}

    def update(parts: Parts, state: Any, grads: Any) -> Any:
        turn = Turn(state["steps"] + 1, parts.shape.learning_rate, parts.shape.weight_decay)
        return optimizers.moved(state, grads, ("first",), partial(move, turn))

    return replace(parts, init=init, update=update)


@dataclass(frozen=True)
class _Beginning:
    """What is kept of a tensor at first: `begin`, which equals another of the same code that encloses the same."""

    identity: Hashable
    begin: Callable[[str, Any], Any] = field(compare=False)

    @classmethod
    def of(cls, begin: Callable[[str, Any], Any]) -> "_Beginning":
        """Describe a function; one that encloses what has no hash equals no other, and is compiled each time."""
        identity = _identity(begin)
        try:
            hash(identity)
        except TypeError:
            identity = begin
        return cls(identity, begin)


def _identity(value: Any) -> Any:
    """Return a value, or of a function what it does: its code, its defaults, and what it encloses."""
    if isinstance(value, tuple):
        return tuple(map(_identity, value))
    if not isinstance(value, FunctionType):
        return value
    encloses = tuple(_identity(cell.cell_contents) for cell in value.__closure__ or ())
    return value.__code__, value.__defaults__, encloses


@cache
def _program() -> Callable[[_Beginning, Any], Any]:
    """Return `_first` as a program, which JAX compiles once in a process for a rule and the shapes of a model."""
    import jax

    return jax.jit(_first, static_argnums=0)


def _first(beginning: _Beginning, params: Any) -> Any:
    """Return what a rule keeps of all parameters before its first update; layers are stacked, as they are there."""
    import jax
    import jax.numpy as jnp

    def moments_of(p: Any, name: str) -> Any:
        if not optimizers.of_layers(name):
            return beginning.begin(name, p)
        of_layer = beginning.begin(name, p[0])
        return jax.tree.map(lambda leaf: jnp.repeat(leaf[None], len(p), 0), of_layer)

    return trees.mapped(moments_of, params, trees.names(params))
