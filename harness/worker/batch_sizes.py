"""The batches of an epoch whose sizes differ: known from their windows before any is read.

What a step takes follows its batch, so a run's peak is that of its largest batch: a step is predicted on that one, and
compiled for it.
"""

from typing import Any, NamedTuple

from harness.backends import Sizes
from harness.contract.data import Documents, Windows
from harness.contract.parts import Parts
from harness.contract.workload import Workload


class Epoch(NamedTuple):
    """The batches of the first epoch: the shape of the inputs of each, and how many tokens of it are no padding."""

    shapes: tuple[tuple[int, ...], ...]
    tokens: tuple[int, ...]

    @property
    def slots(self) -> list[int]:
        """The tokens of each batch, padding included."""
        return [rows * tokens for rows, tokens, *_ in self.shapes]

    @property
    def largest(self) -> int:
        """The number of the largest batch, from 0: the first of those with the most tokens, padding included."""
        return max(range(len(self.shapes)), key=self.slots.__getitem__)


def of_epoch(workload: Workload, parts: Parts) -> Epoch | None:
    """Compute the sizes of the batches of the first epoch; None where all are alike."""
    return _sizes_of(parts, _windows(parts)) if workload.data == "documents" else None


def sizes(workload: Workload, parts: Parts) -> Sizes:
    """Return the shape and dtype of x and y, of the largest batch where they differ."""
    if workload.data != "documents":
        return workload.abstract_batch(parts.shape)
    x, y = largest(parts)
    return (x.shape, str(x.dtype)), (y.shape, str(y.dtype))


def largest(parts: Parts) -> tuple[Any, Any]:
    """Read the largest batch of the first epoch, on the host."""
    windows = _windows(parts)
    return windows.batch(_indices(parts, windows, _sizes_of(parts, windows).largest))


def noted(epoch: Epoch) -> tuple[dict[str, str], dict[str, Any]]:
    """Say which batch of an epoch is the largest, and count its real tokens: in words and in numbers."""
    at, steps = epoch.largest, len(epoch.shapes)
    rows, tokens, *_ = epoch.shapes[at]
    padding = 1 - sum(epoch.tokens) / sum(epoch.slots)
    words = {
        "largest batch": f"{rows} x {tokens:,} tokens, step {at + 1} of the {steps} of an epoch",
        "padding": f"{padding:.0%} of the tokens of an epoch",
    }
    figures = {
        "largest_batch_tokens": epoch.slots[at],
        "largest_batch_step": at + 1,
        "epoch_steps": steps,
        "padding_share": padding,
        "tokens_per_step": sum(epoch.tokens) / steps,
    }
    return words, figures


def _windows(parts: Parts) -> Windows:
    return parts.windows(parts, parts.source(parts))


def _sizes_of(parts: Parts, windows: Windows) -> Epoch:
    source = windows.source
    assert windows.size is not None and isinstance(source, Documents)
    order, batch = parts.order(parts, source, 0), source.batch  # asked for once: it may put the whole epoch in order
    numbers = [order(at, at + batch) for at in range(0, source.count // batch * batch, batch)]
    shapes = tuple(windows.size(indices_B) for indices_B in numbers)
    return Epoch(shapes, tuple(int(source.lengths_N[indices_B].sum()) for indices_B in numbers))


def _indices(parts: Parts, windows: Windows, at: int) -> Any:
    source = windows.source
    return parts.order(parts, source, 0)(at * source.batch, (at + 1) * source.batch)
