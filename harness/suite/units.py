"""Sizes and durations as people write them: `8GiB`, `512MiB`, `80GB`; 10 minutes."""

import re

from harness.contract.plugins import printable
from harness.refusal import Refusal

UNITS = {"": 1, "B": 1}
UNITS |= {f"{prefix}iB": 1 << 10 * power for power, prefix in enumerate("KMGT", 1)}
UNITS |= {f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", 1)} | {"KB": 1000}
BY_LETTERS = {name.lower(): size for name, size in UNITS.items()}
BY_LETTERS |= {name.removesuffix("b"): size for name, size in BY_LETTERS.items() if name.endswith("ib")}
LARGEST = 1 << 60
LEAST_BARE = 1 << 20
"""Bytes from which on a number without a unit is a size."""


class SizeError(Refusal):
    """A size that cannot be read, in one sentence."""


def size(text: str | int, of: str = "") -> int:
    """Read a size in bytes; raise SizeError for all but a number and a unit (ByteSize reads `8;GiB` as 8).

    The error says what it is the size `of`. From Python a size may be a number of bytes.
    Units are read in capitals and in small letters, and `Gi` as kubernetes writes it. `24G` is refused, since for some
    programs it is 24 GiB and for others 24 GB, and so are few bytes without a unit, as whoever left it out would mean.
    """
    text = str(text)
    named = f"{of}: " if of else ""
    match = re.fullmatch(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z]{0,3})\s*", text)
    unit = BY_LETTERS.get(match[2].lower()) if match else None
    if (
        match is not None
        and float(match[1])
        and (match[2].lower() in ("k", "m", "g", "t") or (not match[2] and float(match[1]) < LEAST_BARE))
    ):
        letter = match[2].upper() or "G"
        raise SizeError(
            f"{named}'{text.strip()}' has no unit that is clear: write {match[1]}{letter}iB or {match[1]}{letter}B"
        )
    if match is None or unit is None or not 1 <= float(match[1]) * unit <= LARGEST:
        raise SizeError(
            f"{named}'{printable(text)[:40]}' is not a size: "
            "write a number and a unit, from 1B on, such as 8GiB or 512MiB"
        )
    return round(float(match[1]) * unit)


def shown(size: int) -> str:
    """Write a size with three digits or so in the unit that suits it."""
    for name in ("TiB", "GiB", "MiB", "KiB"):
        if size >= UNITS[name]:
            value = size / UNITS[name]
            return f"{value:,.0f} {name}" if value >= 100 else f"{value:.3g} {name}"
    return f"{size} B"


def lasting(seconds: float) -> str:
    """Write a duration in the unit that suits it."""
    for name, size in (("days", 86_400.0), ("hours", 3_600.0), ("minutes", 60.0)):
        if seconds >= 3 * size:
            return f"{seconds / size:,.0f} {name}"
    return f"{seconds:,.0f} seconds"
