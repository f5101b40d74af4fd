"""What a strategy does alone, in one line."""

from harness.verdicts.remedies import Typical


def line(typical: Typical) -> str:
    """Write the median ratios of memory and time, the range of memory, and in how many rows memory was less."""
    timed = f"{typical.timed} row{'s' if typical.timed > 1 else ''} timed"
    time = f" at {typical.time_ratio:.2f} x the time ({timed})" if typical.time_ratio is not None else ""
    span = f" ({typical.lowest:.2f}-{typical.highest:.2f})" if typical.count > 1 else ""
    each = " on each rank" if typical.on_ranks else ""
    rows = f"{typical.count} row{'s' if typical.count > 1 else ''}"
    return (
        f"measured in {typical.backend}: typically {typical.peak_ratio:.2f} x the memory{each}{span}{time}; "
        f"less in {typical.less} of {rows}"
    )
