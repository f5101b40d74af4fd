"""What follows the steps of a run is there in torch alone: in JAX its parts say so."""

from dataclasses import replace
from typing import Any

from harness.contract.parts import Parts
from harness.refusal import Refusal


def with_ending(parts: Parts) -> Parts:
    """Add the parts `evaluate`, `save` and `resume`, which refuse."""
    return replace(parts, evaluate=evaluate, save=save, resume=resume)


def evaluate(parts: Parts, state: Any, batches: Any, keep: bool = True) -> Any:
    """Refuse."""
    raise Refusal(_reason("evaluated"))


def save(parts: Parts, state: Any, file: Any) -> None:
    """Refuse."""
    raise Refusal(_reason("saved"))


def resume(parts: Parts, source: Any, file: Any) -> Any:
    """Refuse."""
    raise Refusal(_reason("resumed"))


def _reason(what: str) -> str:
    return f"a run in JAX is not {what} here: leave out `evaluations`, or name torch places alone"
