"""What a checkup of this machine shows, and where it is stored."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from harness.machine import facts

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


def keep(checkup: Checkup, cache: Path) -> Path:
    """Write a checkup where later runs find it; return the file."""
    cache.mkdir(parents=True, exist_ok=True)
    path = cache / f"doctor-{facts.name()}.json"
    path.write_text(json.dumps(asdict(checkup), indent=1), encoding="utf-8")
    return path


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
