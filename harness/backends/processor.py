"""What the system says of the first processor: its libraries take other memory with other instructions."""

from functools import cache
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


@cache
def of_processor(name: str) -> str:
    """Return what the system says of the first processor under a name; an empty text where it does not say."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    values = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in values if key.strip() == name), "")


def vendor() -> str:
    """Return who made it."""
    return of_processor("vendor_id")


def flags() -> frozenset[str]:
    """Return the instructions that it has beyond the oldest, as Linux lists those of Intel and AMD."""
    return frozenset(of_processor("flags").split())


def is_wide() -> bool:
    """Return whether its vectors have 512 bits."""
    return "avx512f" in flags()


def has_float16() -> bool:
    """Return whether it multiplies float16 by itself."""
    return not flags().isdisjoint({"avx512_fp16", "amx_fp16"})


def has_bfloat16() -> bool:
    """Return whether it multiplies bfloat16 by itself."""
    return not flags().isdisjoint({"avx512_bf16", "amx_bf16"})
