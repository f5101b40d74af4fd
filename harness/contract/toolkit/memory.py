"""The memory that a strategy may count on when it chooses by it."""

GIB = 1 << 30


def available_bytes(available_gib: float) -> int:
    """Return the memory that a knob sets, in GiB; where it is 0, what this machine has available now."""
    import psutil

    return int(available_gib * GIB) or psutil.virtual_memory().available
