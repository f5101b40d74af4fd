"""The device of a published run, with nothing on it: its card, and its version of torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from harness.backends.cards import CARDS, Card, key_of
from harness.backends.cuda_allocator import Allocator
from harness.backends.torch_cuda_operators import pretended
from harness.backends.torch_cuda_storage import DeviceStorage


class Refused(Exception):
    """Why a row cannot be rebuilt, in one sentence."""


def card_of(row: dict[str, Any]) -> Card:
    """Return the card that a row names, with the memory that the row gives. Raises Refused."""
    name = str(row["gpu"])
    key = key_of(name)
    if key is None:
        raise Refused(f"the card '{name}' is not known: add it to harness.backends.cards")
    card = CARDS[key]
    return card._replace(memory_bytes=row.get("gpu_total") or card.memory_bytes)


def torch_of(row: dict[str, Any]) -> tuple[int, int]:
    """Return the version of torch that a row names; that of early 2025 where it names none."""
    text = (row.get("stack") or {}).get("torch")
    major, minor = str(text or "2.5").split(".")[:2]
    return int(major), int(minor)


@contextmanager
def device_of(row: dict[str, Any]) -> Iterator[DeviceStorage]:
    """Let tensors of the meta device be counted as those of the row's card."""
    card = card_of(row)
    capacity = card.memory_bytes - (card.context_bytes or 0)
    device = DeviceStorage(card, torch_version=torch_of(row), allocator=Allocator(capacity=capacity))
    with device, pretended(device):
        yield device
