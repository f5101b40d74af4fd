"""Sizes as people write them: `8GiB`, `512MiB`, `80GB`."""

from pydantic import ByteSize, TypeAdapter, ValidationError

from harness.contract.plugins import printable

LARGEST = 1 << 60
UNITS = {"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}
_SIZE = TypeAdapter(ByteSize)


class SizeError(Exception):
    """A size that cannot be read, in one sentence."""


def size(text: str) -> int:
    """Read a size in bytes, units as pydantic knows them; raise SizeError for all but a number above 0 and a unit."""
    try:
        value = int(_SIZE.validate_python(text))
    except ValidationError:
        value = 0
    if not 0 < value <= LARGEST:
        raise SizeError(
            f"'{printable(text)[:40]}' is not a size: write a number and a unit, such as 8GiB, 512MiB or 80GB"
        )
    return value


def shown(size: int) -> str:
    """Write a size with three digits or so in the unit that suits it."""
    for name, unit in UNITS.items():
        if size >= unit:
            value = size / unit
            return f"{value:,.0f} {name}" if value >= 100 else f"{value:.3g} {name}"
    return f"{size} B"
