"""What the parts of a run wrote down, and what its batches are like: in words and in numbers."""

from typing import Any

from harness.contract.assembly import shape_of
from harness.contract.data import Extent, Source
from harness.contract.plugins import Plugins
from harness.records import Task
from harness.worker import batch_sizes

ORDER_LIMIT = 20_000_000
"""Windows of an epoch up to which its order is looked at: a few arrays of that length are made."""


def of_run(parts: Any, task: Task, plugins: Plugins, peak_step: int | None) -> tuple[dict[str, str], dict[str, Any]]:
    """Return what the parts wrote down, and of the batches how they differ in size, or how random their order is."""
    epoch = batch_sizes.of_epoch(plugins.workloads[task.case.workload], parts)
    words = {name: note for name, note in parts.notes.items() if isinstance(note, str)}
    numbers = {name: note for name, note in parts.notes.items() if not isinstance(note, str)}
    if epoch is not None:
        of_batches, sizes = batch_sizes.noted(epoch)
        at = {"peak": f"reached at step {peak_step}"} if peak_step else {}
        return words | of_batches | at, numbers | sizes
    if any("order" in plugins.strategies[applied.name].rewrites for applied in task.case.strategies):
        numbers |= _of_order(parts, _extent(task, plugins), task.case.seed)
    return words, numbers


def _extent(task: Task, plugins: Plugins) -> Extent | None:
    workload = plugins.workloads[task.case.workload]
    if workload.extent is None:
        return None
    return workload.extent(shape_of(plugins, task.case), task.corpus, task.steps)


def _of_order(parts: Any, extent: Extent | None, seed: int) -> dict[str, float]:
    """Compute how random the order of an epoch is, and the share of its windows that it has; nothing for a long one."""
    if extent is None or extent.count > ORDER_LIMIT:
        return {}
    import numpy as np

    from harness.workloads.data import shuffle_quality

    rows = np.broadcast_to(np.zeros(1, np.uint8), extent.rows)
    shuffle = bool(getattr(parts.shape, "shuffle", False))
    source = Source(rows, rows, extent.window, extent.stride, extent.batch, seed, shuffle)
    epoch = parts.order(parts, source, 0)(0, extent.count)
    return {
        "shuffle_quality": shuffle_quality.quality(epoch),
        "epoch_coverage": shuffle_quality.coverage(epoch, extent.count),
    }
