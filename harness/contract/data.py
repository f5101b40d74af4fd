"""Rows, the windows over them, and what a data strategy holds of both."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def windows_in(length: int, window: int, stride: int) -> int:
    """Count the windows in `length` rows: `(length - window) // stride + 1`, here and nowhere else.

    Raises ValueError when the window or the stride is not positive, or the window longer than the data.
    """
    if window < 1 or stride < 1:
        raise ValueError(f"window and stride must be at least 1, not {window} and {stride}")
    if window > length:
        raise ValueError(f"a window of {window} is longer than the {length} rows of the source")
    return (length - window) // stride + 1


@dataclass(frozen=True)
class Source:
    """Rows and what is to be predicted from them, of equal length, so that no window runs off the end.

    `inputs[n, ...]` and `targets[n, ...]` are aligned: the targets are already shifted. `start` is the number of
    batches that were consumed before, so that a run continues where another one ended.
    """

    inputs: Any
    targets: Any
    window: int
    stride: int
    batch: int
    seed: int = 0
    shuffle: bool = False
    vocabulary: int | None = None
    start: int = 0

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise ValueError(f"{len(self.inputs)} inputs but {len(self.targets)} targets: they must be aligned")
        windows_in(len(self.inputs), self.window, self.stride)

    @property
    def count(self) -> int:
        """The number of windows."""
        return windows_in(len(self.inputs), self.window, self.stride)

    def checked(self, indices_B: Any) -> Any:
        """Return window numbers in int64; raise IndexError for one that does not exist.

        Arrays count negative numbers from their end, slices beyond it are short, and JAX takes the nearest: none of
        them says a word.
        """
        import numpy as np

        indices_B = np.array(indices_B, np.int64, order="C")  # a reversed view is no tensor
        if indices_B.size and not 0 <= indices_B.min() <= indices_B.max() < self.count:
            wrong = indices_B.min() if indices_B.min() < 0 else indices_B.max()
            raise IndexError(f"window {wrong} is not among the {self.count} of the source")
        return indices_B

    def starts(self, indices_B: Any) -> Any:
        """Return the first row [B] of each window in int64; raise IndexError for one that does not exist."""
        return self.checked(indices_B) * self.stride

    @property
    def joined(self) -> Any:
        """The array [n + 1, ...] of which inputs and targets are views, one row apart; None where they are not."""
        import numpy as np

        x, y = self.inputs, self.targets
        if not (isinstance(x, np.ndarray) and isinstance(y, np.ndarray)):
            return None
        alike = (x.dtype, x.shape, x.strides) == (y.dtype, y.shape, y.strides)
        if not alike or y.ctypes.data - x.ctypes.data != x.strides[0]:
            return None
        return np.lib.stride_tricks.as_strided(x, (len(x) + 1, *x.shape[1:]), x.strides)

    @property
    def unused(self) -> int:
        """The number of rows that lie in no window: between them, or after the last."""
        return len(self.inputs) - self.count * min(self.stride, self.window) - max(0, self.window - self.stride)


@dataclass(frozen=True)
class Documents(Source):
    """Rows in whole documents, each a window of its own length and at most `window` rows.

    Document d has the `lengths_N[d]` rows from `firsts_N[d]` on; the stride says nothing.
    """

    firsts_N: Any = None
    lengths_N: Any = None

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise ValueError(f"{len(self.inputs)} inputs but {len(self.targets)} targets: they must be aligned")

    @property
    def count(self) -> int:
        """The number of documents."""
        return len(self.lengths_N)


@dataclass(frozen=True)
class Windows:
    """Random access to the windows of a source: `batch(indices_B) -> (x, y)` with B windows each.

    `lasts` is how many batches stay as they were handed out: the last so many, or with None all of them. Who keeps
    more than the newest must ask. `size(indices_B)` is the shape of the inputs of such a batch, where it depends on
    which windows they are; None: all batches are alike.
    """

    source: Source
    batch: Callable[[Any], tuple[Any, Any]]
    lasts: int | None = None
    size: Callable[[Any], tuple[int, ...]] | None = None

    def __len__(self) -> int:
        return self.source.count


IGNORED = -100
"""The target that carries no loss."""
SMALL_INTS = 257
"""CPython has each int from 0 to 256 once; every int above is an object of its own."""
DATA = ("tokens", "frames", "documents")
"""What a workload may read, and a strategy of data may be for."""
FEEDS = ("same", "arranged", "rounded", "reordered", "other")
"""How far the batches of a strategy may differ from the baseline's: not at all; in how the same tokens are laid out; in
the last bits of their values; in their order, each epoch being the same windows; or altogether."""


@dataclass(frozen=True)
class Extent:
    """The sizes of a source, known before any of it is read: what a prediction of host memory is made from.

    `rows` is n, the bytes are those of one row as stored (of the targets 0 where they are a view of the inputs),
    `steps` the batches that will be read, `values` how many values a token may have, 0 where that is not known, and
    `in_order` whether the windows are read one after the other. `small_ints` is the share of the tokens below
    SMALL_INTS, None where that is not known. `around` are the bytes of its file that one page fault maps, as was seen
    of it; 0 where there is no file yet. `processes` are those of a run, which share the memory of the machine.
    """

    rows: int
    input_bytes: int
    target_bytes: int
    window: int
    stride: int
    batch: int
    steps: int = 3
    backend: str = ""
    values: int = 0
    small_ints: float | None = None
    in_order: bool = True
    around: int = 0
    processes: int = 1

    @property
    def count(self) -> int:
        """The number of windows."""
        return windows_in(self.rows, self.window, self.stride)

    @property
    def base(self) -> int:
        """The bytes of all rows, each once."""
        return self.rows * (self.input_bytes + self.target_bytes)

    def read(self, windows: int) -> int:
        """The rows that so many windows read, those they share once where they follow one another."""
        each = windows * self.window
        return min(self.rows, each, (windows - 1) * self.stride + self.window) if self.in_order else each

    def touched(self, around: int) -> int:
        """The bytes of a mapped file of the rows that are resident, where a fault maps so many around it.

        Windows in no order fall anywhere, and leave out what none of so many random pieces covers.
        """
        windows, row_bytes = self.steps * self.batch, self.input_bytes + self.target_bytes
        if self.in_order:
            return min(self.base, self.read(windows) * row_bytes + 2 * around)
        piece = self.window * row_bytes + around
        return int(self.base * (1 - max(0.0, 1 - piece / self.base) ** windows))

    @property
    def row_bytes(self) -> int:
        """The bytes of one row of inputs and one of targets, where each is a copy."""
        return self.input_bytes + (self.target_bytes or self.input_bytes)

    @property
    def window_bytes(self) -> int:
        """The bytes of one window, inputs and targets."""
        return self.window * self.row_bytes

    @property
    def batch_bytes(self) -> int:
        """The bytes of one batch, inputs and targets."""
        return self.batch * self.window_bytes


@dataclass(frozen=True)
class Holding:
    """Bytes of host memory that a data strategy says it takes.

    `source` is what is held instead of the rows (None: the rows themselves), `windows` what is held beside it,
    `making` what is taken for a moment while the windows are made, `batches` what is held while batches flow, and
    `fetching` what is taken for a moment while one is fetched.
    `reclaimable` may be resident beside it, as the kernel likes: what a case takes at most has it. `rows`, `stride` and
    `input_bytes` are what the other strategies find in place of those of the extent (None: what it says).
    """

    source: int | None = None
    windows: int = 0
    making: int = 0
    batches: int = 0
    fetching: int = 0
    supposes: str = ""
    reclaimable: int = 0
    input_bytes: int | None = None
    rows: int | None = None
    stride: int | None = None
