"""Evaluate by the loss of each batch and drop its logits; forgo metrics that need them all.

Peak: the forward pass of one batch, its loss computed in the way of the loss strategy, instead of the logits of all
batches and their copy when they are joined. (`prediction_loss_only` of Transformers' Trainer.)
"""

from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl


def on_torch(parts: Parts) -> Parts:
    inner = parts.evaluate

    def evaluate(parts: Parts, state: Any, batches: Any, keep: bool = True) -> Any:
        return inner(parts, state, batches, False)

    return replace(parts, evaluate=evaluate)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [Strategy("loss_only_evaluation", rewrites=("evaluate",), on={"torch": on_torch}, about=__doc__)]
