"""Where a case runs, as plugins know it."""

from harness.records.place import DEVICES, NAMES, Place

__all__ = ["DEVICES", "NAMES", "Place"]
