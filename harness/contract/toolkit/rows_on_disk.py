"""Read the rows of a `.npy` file piece by piece, with nothing of it kept in memory."""

import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


class RowsOnDisk:
    """Rows [n, ...] of a `.npy` file, read when an array is asked for.

    Slices are views of the same file, which read nothing; `numpy.asarray` of one reads it (one `preadv`), and so does
    every function of numpy that is given one. `read_into` reads into an array that is there. Pages of the file stay in
    the kernel's cache and are not mapped into this process.

    Raises ValueError for a file that is not a whole C-ordered array.
    """

    def __init__(self, path: Path) -> None:
        import numpy as np

        self._path = Path(path).absolute()
        with self._path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            self.shape, fortran, self.dtype = header[version](file)
            self._offset = file.tell()
            present = os.fstat(file.fileno()).st_size - self._offset
            due = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
            if fortran or self.dtype.hasobject or present < due:
                raise ValueError(
                    f"{path} has {present} bytes of rows, not the {due} of a C-ordered array: write it anew"
                )
            self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)
        self._first = 0
        self._owner: RowsOnDisk | None = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def row_bytes(self) -> int:
        """The bytes of one row."""
        size = self.dtype.itemsize
        for length in self.shape[1:]:
            size *= length
        return size

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> "RowsOnDisk":
        if not isinstance(rows, slice) or rows.step not in (None, 1):
            raise TypeError("rows on disk are read in slices without a step: use a strategy that reads windows so")
        first, last, _ = rows.indices(len(self))
        view = object.__new__(RowsOnDisk)
        view.shape, view.dtype = (max(0, last - first), *self.shape[1:]), self.dtype
        view._offset, view._file, view._first = self._offset, self._file, self._first + first
        view._path = self._path
        view._owner = self._owner or self  # keeps the file open
        return view

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (self._path, self._first, len(self))  # another process has other descriptors

    def read_into(self, out: "np.ndarray") -> "np.ndarray":
        """Fill `out`, a contiguous array of this shape and dtype, and return it."""
        left = out.reshape(-1).view("uint8").data
        offset = self._offset + self._first * self.row_bytes
        while left:
            count = os.preadv(self._file, [left], offset)
            if not count:
                raise EOFError(f"the file ended {len(left)} bytes before its last row: it was cut while being read")
            left, offset = left[count:], offset + count
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> "np.ndarray":
        import numpy as np

        rows = self.read_into(np.empty(self.shape, self.dtype))
        return rows if dtype is None else rows.astype(dtype, copy=False)


def _opened(path: Path, first: int, count: int) -> RowsOnDisk:
    """Open so many rows of a file again, as those that were pickled."""
    return RowsOnDisk(path)[first : first + count]


def fill(out: "np.ndarray", rows: Any) -> None:
    """Fill an array with rows, on disk or in memory, without another copy."""
    if isinstance(rows, RowsOnDisk):
        rows.read_into(out)
    else:
        out[:] = rows


def on_disk(parts: Any, path: Path) -> RowsOnDisk:
    """Open the rows of a file without reading any: what to put in the place of the part `rows`."""
    return RowsOnDisk(path)


def in_pieces(rows: RowsOnDisk, size: int = 1 << 20) -> Any:
    """Yield (first row, array) for consecutive pieces of about `size` bytes."""
    import numpy as np

    step = max(1, size // max(1, rows.row_bytes))
    for first in range(0, len(rows), step):
        yield first, np.asarray(rows[first : first + step])
