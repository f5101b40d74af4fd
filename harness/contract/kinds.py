"""What the memory of a step is for: its kinds, and which arrays of a run are of which."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from harness.contract.toolkit import trees

KINDS = ("parameters", "gradients", "moments", "cache", "batch", "activations", "logits", "workspace")
"""What a step holds, the kinds that stay from step to step first.

`parameters` are trained or frozen. `moments` is all that a state keeps beside them and a cache: an optimizer's moments,
master copies. `activations` is made before the loss, `logits` is what the loss makes, `workspace` all else: what the
backward pass and the update make and drop again, recomputed activations among it.
"""
OF_STATE = {"params": "parameters", "frozen": "parameters", "kept": "cache"}
OBSERVED = "observed"


def of_state(state: Any) -> dict[str, list[Any]]:
    """Return the arrays of a state by kind."""
    kinds: dict[str, list[Any]] = {}
    for name, value in state.items() if isinstance(state, dict) else ():
        if name != OBSERVED:
            kinds.setdefault(OF_STATE.get(name, "moments"), []).extend(arrays(value))
    return kinds


def arrays(tree: Any) -> list[Any]:
    """Return the arrays among the leaves of a tree, in its order, without single numbers."""
    return [leaf for _, leaf in trees.leaves(tree) if hasattr(leaf, "nbytes") and getattr(leaf, "shape", None)]


def sizes(kinds: Mapping[str, list[Any]]) -> dict[str, int]:
    """Return the bytes of each kind."""
    return {kind: sum(map(_bytes, members)) for kind, members in kinds.items()}


def _bytes(array: Any) -> int:
    """Return the bytes of an array; zeros for what is not trained are one number, expanded."""
    size = int(array.nbytes)
    return min(size, array.untyped_storage().nbytes()) if hasattr(array, "untyped_storage") else size


def counts(state: Any) -> dict[str, float]:
    """Return the single numbers that a state counts beside its steps: a loss scale, skipped steps."""
    numbers: dict[str, float] = {}
    for name, value in state.items() if isinstance(state, dict) else ():
        single = isinstance(value, int | float) or getattr(value, "shape", None) == ()
        if single and name != "steps" and not isinstance(value, bool):
            with suppress(TypeError, ValueError):  # the key of a generator is no number
                numbers[name] = float(value)
    return numbers
