"""What is predicted to lie where: on a device and beside it, and what stands in memory at the peak."""

from collections.abc import Mapping, Sequence

from tabulate import tabulate

from harness.contract.strategy import Strategy
from harness.report.text import escaped, row_name, with_code, with_full_stop
from harness.report.words import RESERVED, mib, phase_name, titles_of
from harness.verbs.plan import PlanRow
from harness.verdicts.remedies import OF_KIND

DEVICE = ("strategy", "allocated MiB", RESERVED, "driver MiB", "host MiB")
LEAST_SHARE = 0.01
"""Of the peak: a kind that takes less is left out."""
KINDS = ("kind", "most MiB", "against it, in RESULTS.md")
FROZEN = "moments, and what is frozen"
"""What beside parameters that are trained, and a cache, stays from step to step where adapters are trained."""
STANDING = ("made in", "by operator", "MiB", "of the peak", "tensors")


def device_grid(rows: Sequence[PlanRow]) -> list[str]:
    """Write what the allocator, the driver and the host hold for each case; nothing where no device is predicted so."""
    if all(row.prediction.predicted_reserved_bytes is None for row in rows):
        return []
    cells = [
        (
            row_name(row.case.label),
            mib(row.prediction.predicted_peak_bytes),
            mib(row.prediction.predicted_reserved_bytes),
            mib(row.prediction.predicted_driver_bytes),
            mib(row.prediction.predicted_host_bytes),
        )
        for row in rows
    ]
    aligned = ("left", "right", "right", "right", "right")
    return [tabulate(cells, DEVICE, tablefmt="pipe", colalign=aligned, disable_numparse=True)]


def explained(rows: Sequence[PlanRow], strategies: Mapping[str, Strategy]) -> str:
    """Write for each case what stands in memory at its predicted peak: who made it, bytes, number of tensors."""
    title_of = titles_of(row.case for row in rows)
    return "\n\n".join(_explained(row, title_of[row.case.comparison_key], strategies) for row in rows) + "\n"


def _explained(row: PlanRow, title: str, strategies: Mapping[str, Strategy]) -> str:
    title = f"## {escaped(row.case.label)}: {escaped(title)}"
    if row.peak_bytes is None:
        return f"{title}\n\nNot predicted: {with_full_stop(with_code(row.reason or ''))}"
    peak = f"The peak of {mib(row.peak_bytes)} MiB is in {escaped(phase_name(row.phase))}."
    standing = row.prediction.predicted_standing
    if not standing:
        return f"{title}\n\n{peak} What stands in it is not known for {row.case.place}."
    whole = sum(each.bytes for each in standing)
    cells = [
        (escaped(each.where), escaped(each.operator), mib(each.bytes), f"{each.bytes / whole:.1%}", f"{each.tensors:,}")
        for each in standing
    ]
    aligned = ("left", "left", "right", "right", "right")
    table = tabulate(cells, STANDING, tablefmt="pipe", colalign=aligned, disable_numparse=True)
    return f"{title}\n\n{peak}\n\n{table}{_kinds(row, strategies)}"


def _kinds(row: PlanRow, strategies: Mapping[str, Strategy]) -> str:
    """Write the most that each kind of memory takes at any time, the largest first, and what is against it."""
    most = sorted(row.prediction.predicted_kinds.items(), key=lambda each: each[1], reverse=True)
    least = LEAST_SHARE * (row.peak_bytes or 0)
    adapters = any(strategies[each.name].own_baseline for each in row.case.strategies)
    names = {"moments": FROZEN} if adapters else {}
    against = OF_KIND | ({"moments": OF_KIND["parameters"]} if adapters else {})
    cells = [(names.get(kind, kind), mib(size), against.get(kind, "")) for kind, size in most if size >= least]
    table = tabulate(cells, KINDS, tablefmt="pipe", colalign=("left", "right", "left"), disable_numparse=True)
    return f"\n\nBy kind, at any time:\n\n{table}" if cells else ""
