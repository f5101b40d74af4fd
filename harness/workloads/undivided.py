"""The parts of a run that nobody divides: one process has all of the batch, of the gradients and of each parameter."""

from typing import Any

from harness.contract.parts import Parts


def shard_batch(parts: Parts, x: Any, y: Any) -> tuple[Any, Any, None]:
    """Take all of a batch."""
    return x, y, None


def reduce_gradients(parts: Parts, loss: Any, grads: Any) -> tuple[Any, Any]:
    """Return loss and gradients as they are: they are those of the whole batch."""
    return loss, grads


def gather_parameters(parts: Parts, params: Any) -> Any:
    """Return parameters as they are: each is whole."""
    return params


def positions(parts: Parts, tokens: int) -> tuple[slice, ...]:
    """Count the tokens from the first on."""
    return (slice(0, tokens),)
