"""What the parts of a run wrote down, and what its batches are like: in words and in numbers."""

import math
from collections.abc import Mapping
from typing import Any

from harness.contract.assembly import shape_of
from harness.contract.data import Extent
from harness.contract.plugins import Plugins
from harness.records import Task
from harness.worker import batch_sizes
from harness.worker.failures import first_line

ORDER_LIMIT = 20_000_000
"""Windows of an epoch up to which its order is looked at: a few arrays of that length are made."""


def of_run(parts: Any, task: Task, plugins: Plugins, peak_step: int | None) -> tuple[dict[str, str], dict[str, Any]]:
    """Return what the parts wrote down, and of the batches how they differ in size, or how random their order is."""
    epoch = batch_sizes.of_epoch(plugins.workloads[task.case.workload], parts)
    words, numbers = by_kind(parts.notes)
    if epoch is not None:
        of_batches, sizes = batch_sizes.noted(epoch)
        at = {"peak": f"reached at step {peak_step}"} if peak_step else {}
        return words | of_batches | at, numbers | sizes
    if any("order" in plugins.strategies[applied.name].rewrites for applied in task.case.strategies):
        try:
            numbers |= _of_order(parts, _extent(task, plugins))
        except Exception as error:  # of a plugin, and the run is over
            words["order"] = f"cannot be looked at ({type(error).__name__}: {first_line(str(error))})"
    return words, numbers


def by_kind(noted: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, float]]:
    """Return the words and the numbers among notes; a number that is not finite, which no record holds, as a word."""
    words: dict[str, str] = {}
    numbers: dict[str, float] = {}
    for name, note in noted.items():
        plain = note.item() if getattr(note, "shape", None) == () else note  # a number of an array library
        if isinstance(plain, int | float) and math.isfinite(plain):
            numbers[name] = plain
        elif plain is not None:
            words[name] = str(plain)
    return words, numbers


def _extent(task: Task, plugins: Plugins) -> Extent | None:
    workload = plugins.workloads[task.case.workload]
    if workload.extent is None:
        return None
    return workload.extent(shape_of(plugins, task.case), task.corpus, task.steps)


def _of_order(parts: Any, extent: Extent | None) -> dict[str, float]:
    """Compute how random the order of an epoch is, and the share of its windows that it has; nothing for a long one."""
    if extent is None or extent.count > ORDER_LIMIT:
        return {}
    from harness.workloads.data import shuffle_quality

    epoch = parts.order(parts, parts.source(parts), 0)(0, extent.count)
    return {
        "shuffle_quality": shuffle_quality.quality(epoch),
        "epoch_coverage": shuffle_quality.coverage(epoch, extent.count),
    }
