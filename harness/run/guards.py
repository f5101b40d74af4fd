"""Refuse cases that would take the machine down, or would not end in the time that they have."""

from functools import cache
from pathlib import Path

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
    limit, allowed = options.max_bytes, "are allowed by --max-bytes"
    if (limit is None or need <= limit) and not tried:
        limit, allowed = facts.free_to_use() if case.place.device == "cpu" else gpu.free_to_use(), "may be used here"
    if limit is None or need <= limit:
        return None
    sizes = f"it needs about {need >> 20} MiB and {limit >> 20} MiB {allowed}"
    message = f"{sizes}: set a {'smaller ' if case.budget_bytes else ''}budget in the suite, or shorten it"
    return Record(status="skipped_guard", evidence={"message": message, "need_bytes": need, "limit_bytes": limit})


def over_time(case: Case, predicted: Summary | None, options: Options, suite: Suite) -> Record | None:
    """Return the record of a case whose steps for the memory would last longer than the suite allows; None for others.

    Of 16 bits alone, in which a CPU without instructions for them was 50 times as slow as in float32: so the rates of
    the machine, which it takes seconds to measure, are asked for few cases.
    """
    if predicted is None or case.place.device != "cpu":
        return None
    work = predicted.work_in_16_bits
    if suite.memory_steps * sum(each.flops for each in work) < suite.timeout_seconds * SLOWEST:
        return None
    rates = _rates(case.place, options.cache)
    step = estimate(work, rates) if rates is not None else None
    if step is None or not (reason := outlasting(step.seconds, suite, f" in {work[0].dtype} on this processor")):
        return None
    return Record(status="skipped_guard", evidence={"message": f"{reason}: --try-all runs it"})


def outlasting(seconds: float, suite: Suite, where: str = "") -> str:
    """Return in words that the steps for the memory, of so many seconds each, take longer than the suite allows.

    An empty text where they do not.
    """
    steps, allowed = suite.memory_steps, suite.timeout_seconds
    if steps * seconds <= allowed:
        return ""
    expected = f"{steps} steps{where} are expected to take {lasting(steps * seconds)}"
    return f"{expected}, and the suite's timeout_seconds are {allowed:,.0f}"


@cache
def _rates(place: Place, folder: Path) -> Rates | None:
    """Return the rates of a place; those of a busy machine are stored nowhere, and not measured again by this run."""
    return Rates.read(throughput.of_place(place, folder))
