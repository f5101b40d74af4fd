"""What this machine computes in a second at each place, and what operators take on it: measured once and stored."""

import json
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import backends
from harness.contract.place import Place
from harness.machine import checkups, environment, facts, gpu, interference
from harness.machine.child import AnswerError, answer_of
from harness.records.roofline import Operations, Rates, roofline

LONGEST, LARGEST = 2.0, 1 / 8
"""Seconds that a call takes, and the share of the memory that it moves, above which it is not timed."""
SLOWER = 10.0
"""How often the time of the roofline calls take at most, when it is asked whether timing them is of use."""
SPENT_SECONDS = 20.0
"""How long calls are timed at once, the shortest first, if nothing else is said; the next time the others are."""


def of_place(place: Place, cache: Path, anew: bool = False) -> dict[str, Any] | None:
    """Return the measured rates of a place as plain figures, from the cache if they are there; None without the place.

    Measuring takes a few seconds; figures of a time when something else ran are not stored.
    """
    if backends.absent(place.backend, place.device) is not None:
        return None
    path, key = cache / f"rates-{facts.name()}.json", _key(place)
    rates = _read(path)
    if anew or key not in rates:
        before = interference.snapshot()
        measured_rates = measured(place)
        if measured_rates is None:
            return None
        rates[key] = measured_rates
        if not interference.disturbances(before, interference.snapshot()):
            _write(path, rates)
    return rates[key]


def measured(place: Place) -> dict[str, Any] | None:
    """Measure in a process of its own; None where that fails."""
    try:
        return answer_of("harness.worker.throughput", place.backend, place.device, env=_environment(place))
    except AnswerError:
        return None


def with_calls(
    rates: Rates, place: Place, work: Iterable[Operations], cache: Path, spent_seconds: float | None = None
) -> Rates:
    """Add the seconds of the calls in some work; those that are not known yet are timed, for so long at most.

    Left out are calls that take long or move much, those that cannot be made alone, those beyond the time that may be
    spent, and all that were timed while something else ran.
    """
    path = cache / f"calls-{facts.name()}.json"
    stored = _read(path)
    known: dict[str, float | None] = stored.setdefault(_key(place), {})
    calls = {each.call: each for each in work if each.call}
    most = LARGEST * _memory(place)
    expected = {call: _seconds(each, rates, most) for call, each in calls.items() if call not in known}
    short = {call: seconds for call, seconds in expected.items() if seconds is not None}
    missing = sorted(short, key=short.__getitem__)
    before = interference.snapshot()
    if missing and not interference.disturbances(before, before):  # where others want to run now, nothing is of use
        timed = _timed(place, missing, SPENT_SECONDS if spent_seconds is None else spent_seconds)
        if not interference.disturbances(before, interference.snapshot()):
            known |= timed
            _write(path, stored)
    return replace(rates, calls={call: seconds for call in calls if (seconds := known.get(call)) is not None})


def may_be_timed(work: Iterable[Operations], share: float, place: Place, rates: Rates) -> bool:
    """Check whether calls that can be timed may make a share of a step's time, even `SLOWER` than the roofline says."""
    timed = left_out = 0.0
    most = LARGEST * _memory(place)
    for each in work:
        bound = roofline(each, rates)
        if bound is None:
            return False
        if not each.call or _seconds(each, rates, most) is None:
            left_out += bound
        else:
            timed += SLOWER * bound
    return timed >= share * (timed + left_out)


def _seconds(work: Operations, rates: Rates, most: float) -> float | None:
    """Return what the roofline says of one call in seconds; None for one that is too long to be timed, or too large.

    It may move `most` bytes.
    """
    seconds = roofline(work, rates)
    if seconds is None or seconds > LONGEST * work.times:
        return None
    return seconds / work.times if work.moved <= most * work.times else None


def _timed(place: Place, calls: list[str], spent_seconds: float) -> dict[str, Any]:
    try:
        with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
            json.dump(calls, file)
            file.flush()
            words = place.device, file.name, str(spent_seconds)
            return answer_of("harness.worker.operators", *words, env=_environment(place))
    except (AnswerError, OSError):  # a disk that is full, say: the next prediction times them
        return {}


def _environment(place: Place) -> dict[str, str]:
    return environment.variables("time", place, "rates", facts.threads(), None)


def _memory(place: Place) -> int:
    """Return the memory of a place in bytes: that of the GPU, or of the host where that of a GPU is not known."""
    of_gpu = gpu.usable_bytes() if place.device == "cuda" else None
    return facts.total_bytes() if of_gpu is None else of_gpu


def _key(place: Place) -> str:
    """Return the name under which figures of a place are stored: of a GPU they are those of one card."""
    card = gpu.detect() if place.device == "cuda" else None
    of_card = "" if card is None else f" {card.name}"
    return f"{place} {facts.versions().get(place.backend, '')} {facts.threads()} threads{of_card}"


def _read(path: Path) -> dict[str, Any]:
    try:
        rates = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return rates if isinstance(rates, dict) else {}


def _write(path: Path, figures: dict[str, Any]) -> None:
    with suppress(OSError):  # the next run measures again
        checkups.write(path, figures)
