"""No search for garbage while many records are made: it looks at all that is alive, again and again, and finds none."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Put off the search for garbage in cycles until the end of the block; nested, until that of the outermost."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
