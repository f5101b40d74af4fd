"""Refuse cases that would take the machine down, or would not end in the time that they have."""

from harness.contract.place import Place
from harness.machine import facts, gpu, throughput
from harness.records import Case, Record
from harness.records.roofline import Rates, estimate
from harness.run.bench import Options
from harness.run.schedule import Summary
from harness.suite.schema import Suite
from harness.suite.units import lasting

SLOWEST = 4e8
"""Operations on 16 bits in a second that any processor can do: one with no instructions for them took 0.6e9."""


def guarded(case: Case, predicted: Summary | None, options: Options, suite: Suite) -> Record | None:
    """Return the record of a case that is not begun; None for others.

    It needs more than `max_bytes`, or, unless all are to be tried, would take the machine down or not end in time.
    """
    refused = over_memory(case, predicted, options, tried=options.try_all)
    return refused if refused is not None or options.try_all else over_time(case, predicted, options, suite)


def over_memory(case: Case, predicted: Summary | None, options: Options, tried: bool = False) -> Record | None:
    """Return the record of a case that needs more than may be used, all ranks together; None for others.

    What the machine has does not count where that is to be `tried`.
    """
    if predicted is None:
        return None
    need = min(predicted.need_bytes, case.budget_bytes or predicted.need_bytes)
    if case.place.device == "cpu":
        need *= case.ranks  # each has a GPU of its own, but they share the host
    limit = options.max_bytes
    if (limit is None or need <= limit) and not tried:
        limit = facts.free_to_use() if case.place.device == "cpu" else gpu.free_to_use()
    if limit is None or need <= limit:
        return None
    message = f"it needs about {need >> 20} MiB and {limit >> 20} MiB may be used here: set a budget, or shorten it"
    return Record(status="skipped_guard", evidence={"message": message, "need_bytes": need, "limit_bytes": limit})


def over_time(case: Case, predicted: Summary | None, options: Options, suite: Suite) -> Record | None:
    """Return the record of a case whose steps for the memory would last longer than the suite allows; None for others.

    Of 16 bits alone, in which a CPU without instructions for them is 10 to 50 times as slow as in float32: so the rates
    of the machine, which it takes seconds to measure, are asked for few cases.
    """
    steps, allowed = suite.memory_steps, suite.timeout_seconds
    if predicted is None or case.place.device != "cpu":
        return None
    if steps * sum(each.flops for each in predicted.half_precision) < allowed * SLOWEST:
        return None
    rates = _rates(case.place, options)
    step = estimate(predicted.half_precision, rates) if rates is not None else None
    if step is None or steps * step.seconds <= allowed:
        return None
    dtype = predicted.half_precision[0].dtype
    message = (
        f"{steps} steps in {dtype} are expected to take {lasting(steps * step.seconds)} on this processor, and the "
        f"suite's timeout_seconds are {allowed:,.0f}: --try-all runs it"
    )
    return Record(status="skipped_guard", evidence={"message": message, "seconds": round(steps * step.seconds, 3)})


def _rates(place: Place, options: Options) -> Rates | None:
    return Rates.read(throughput.of_place(place, options.cache))
