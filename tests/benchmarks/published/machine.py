"""The device of a published run, with nothing on it: its card, and its version of torch."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from harness.backends.cards import CARDS, Card, key_of
from harness.backends.cuda_allocator import Allocator
from harness.backends.torch_cuda_operators import pretended
from harness.backends.torch_cuda_storage import DeviceStorage

OF_NVL = 95_830 << 20
"""The memory of an H100 NVL."""
CONTEXT = 120_000_000
"""What a process has of a card before its first tensor, where nobody measured it: of an RTX 3060 and an RTX 4060 the
fullest published processes left 148 and 122 MB."""
USUAL_TORCH = (2, 5)
"""That of early 2025."""


class Refused(Exception):
    """Why a row cannot be rebuilt, in one sentence."""


def card_of(row: dict[str, Any]) -> Card:
    """Return the card that a row names, with the memory that the row gives. Raises Refused."""
    name = str(row["gpu"])
    key = key_of(name)
    if key is None:
        raise Refused(f"the card '{name}' is not known: add it to harness.backends.cards")
    card = CARDS[key]
    own = OF_NVL if "nvl" in name.lower() else card.memory_bytes
    return card._replace(memory_bytes=row["gpu_total"] if row.get("gpu_total") is not None else own)


def capacity_of(row: dict[str, Any]) -> int:
    """Return what torch's allocator can have of the card of a row: all but the context, in bytes. Raises Refused."""
    card = card_of(row)
    return int(card.memory_bytes) - (CONTEXT if card.context_bytes is None else card.context_bytes)


def torch_of(row: dict[str, Any]) -> tuple[int, int]:
    """Return the version of torch that a row names, the usual one where it names none."""
    named = re.match(r"v?(\d+)\.(\d+)", str((row.get("stack") or {}).get("torch")))
    return (int(named[1]), int(named[2])) if named else USUAL_TORCH


@contextmanager
def device_of(row: dict[str, Any]) -> Iterator[DeviceStorage]:
    """Let tensors of the meta device be counted as those of the row's card."""
    allocator = Allocator(capacity=capacity_of(row))
    device = DeviceStorage(card_of(row), torch_version=torch_of(row), allocator=allocator)
    with device, pretended(device):
        yield device
