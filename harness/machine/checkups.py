"""What a checkup of this machine shows, and where it is stored."""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.machine import facts, whole_file
from harness.refusal import Refusal

MIB = 1 << 20
SIZE = 64 * MIB
TOLERANCE = max(MIB // 2, SIZE // 100)


@dataclass(frozen=True)
class Calibration:
    """What the meter saw of bytes that are known; `seen_bytes` is None, with a reason, where it could not be tried."""

    way: str
    true_bytes: int
    seen_bytes: int | None
    reason: str = ""

    @property
    def good(self) -> bool | None:
        """Whether the difference is within 0.5 MiB or 1 %; None where nothing was seen."""
        return None if self.seen_bytes is None else abs(self.seen_bytes - self.true_bytes) <= TOLERANCE


@dataclass(frozen=True)
class Noise:
    """Equal cases, timed in rounds: the ratio of one to others with its interval, and the word that it earned.

    `scatter` is that of a process around its case and round, as a fraction; None where it could not be inferred.
    `drift` is the scatter of rounds, `within` that of the steps of one process: both robust, as fractions.
    """

    rounds: int
    ratio: float
    low: float
    high: float
    word: str
    scatter: float | None
    drift: float | None = None
    within: float | None = None


@dataclass(frozen=True)
class Finding:
    """Something that would spoil figures, and what to do about it."""

    what: str
    remedy: str


@dataclass(frozen=True)
class Checkup:
    """All that the doctor found, for the records of later runs."""

    utc: str
    machine: str
    calibrations: tuple[Calibration, ...]
    noise: Noise | None
    findings: tuple[Finding, ...]


def keep(checkup: Checkup, cache: Path, with_noise: bool = True) -> Path:
    """Write a checkup where later runs find it; return the file. Raise Refusal where it cannot be written.

    One that was not `with_noise` leaves the noise that was measured before.
    """
    path = cache / f"doctor-{facts.name()}.json"
    figures = asdict(checkup)
    if not with_noise:
        with suppress(OSError, ValueError, LookupError, TypeError):  # there is none, or it is garbage
            figures["noise"] = json.loads(path.read_text(encoding="utf-8"))["noise"]
    try:
        write(path, figures)
    except OSError as error:
        remedy = "make room, or name another folder with XDG_CACHE_HOME"
        raise Refusal(f"these figures cannot be written to '{path}' ({error.strerror}): {remedy}") from None
    return path


def write(path: Path, figures: dict[str, Any]) -> None:
    """Write a file of figures whole, or not at all: another process may read it meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole_file.write(path, json.dumps(figures, indent=1))


def latest(cache: Path) -> dict[str, object]:
    """Return the figures of the last checkup of this machine for the records of a run; empty without one."""
    try:
        checkup = json.loads((cache / f"doctor-{facts.name()}.json").read_text(encoding="utf-8"))
        errors = [
            each["seen_bytes"] - each["true_bytes"]
            for each in checkup["calibrations"]
            if each["seen_bytes"] is not None
        ]
        noise = checkup["noise"]
        return {
            "doctor_utc": checkup["utc"],
            "calibration_error_bytes": max(errors, key=abs),
            "noise_low": noise["low"] if noise else None,
            "noise_high": noise["high"] if noise else None,
            "noise_scatter": noise.get("scatter") if noise else None,
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}
