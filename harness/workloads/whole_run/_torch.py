"""What follows the steps of a run, in torch: it is evaluated, saved, and resumed from what was saved.

Untouched, each part does what is usual: logits of the whole evaluation are kept until its end, as for metrics; a state
is gathered before it is written; and a model is made before a checkpoint is read and copied into it.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from harness.contract.data import IGNORED, Source
from harness.contract.objective import Objective
from harness.contract.parts import Parts
from harness.contract.toolkit import checkpoints, trees
from harness.contract.toolkit.checkpoints import Checkpoint
from harness.workloads.decoder import both

Forward = Callable[..., torch.Tensor]


def with_ending(parts: Parts, forward: Forward) -> Parts:
    """Add the parts `evaluate`, `save` and `resume`; `forward(parts, params, x, y)` computes the loss of a batch."""
    return replace(parts, evaluate=partial(evaluate, forward), save=save, resume=resume)


@torch.no_grad()
def evaluate(
    forward: Forward, parts: Parts, state: Any, batches: Iterable[tuple[Any, Any]], keep: bool = True
) -> torch.Tensor:
    """Average the loss over all targets of some batches.

    With `keep` all logits are kept until the end, as for metrics of them; else each batch goes through `parts.loss`.
    """
    params = both.trained(state, state["params"])
    if not keep:
        sums, counts = [], []
        for x, y in batches:
            counts.append((y != IGNORED).sum())
            loss = forward(parts, params, x, y)
            sums.append(torch.where(counts[-1] > 0, loss * counts[-1], 0))  # the mean of no losses is no number
        return torch.stack(sums).sum() / torch.stack(counts).sum()
    logits, targets = [], []
    for x, y in batches:
        logits.append(forward(replace(parts, loss=_logits), params, x, y).flatten(0, 1))
        targets.append(y.flatten())
    return Objective.of(parts.shape).in_torch(torch.cat(logits), torch.cat(targets))


def _logits(parts: Parts, x_BTD: torch.Tensor, w_VD: torch.Tensor, y_BT: torch.Tensor) -> torch.Tensor:
    return x_BTD @ w_VD.T


def save(parts: Parts, state: Any, file: Checkpoint) -> None:
    """Gather the whole state, then write it."""
    gathered = {name: leaf.cpu().clone() for name, leaf in checkpoints.tensors(state)}
    file.begin(state)
    for name, leaf in gathered.items():
        file.put(name, leaf)


def resume(parts: Parts, source: Source, file: Checkpoint) -> Any:
    """Make the model, read the whole checkpoint, and copy the one into the other."""
    state = parts.init(parts, source)
    read = {name: checkpoints.read_one(file, name, parts.place.device) for name in file.described}
    made = dict(trees.leaves(state["params"]))
    del state
    for name, p in made.items():
        read[f"params.{name}"] = p.detach().copy_(read[f"params.{name}"])
    return checkpoints.restored(file, read)
