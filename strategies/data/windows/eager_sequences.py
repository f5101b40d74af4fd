"""Copy every window into an array of its own, in a list; pay the overlap and some 120 bytes per window.

Peak: the source plus N W elements for inputs and for targets, in the types of the source, plus 2 N (112 + 8) bytes
for the objects. Sequences of frames are often prepared so: 380,000 tensors [30, 287] from 380,000 frames.
"""

from harness import Extent, Holding, Parts, Strategy, hookimpl
from strategies.data.windows import list_of_views


def on_any(parts: Parts) -> Parts:
    return list_of_views.listed(parts, lambda view: view.copy())


def holds(extent: Extent) -> Holding:
    """Count the copies and the list of array objects."""
    return Holding(windows=extent.count * extent.window_bytes + list_of_views.holds(extent).windows)


@hookimpl
def harness_strategies() -> list[Strategy]:
    on = {"torch": on_any, "jax": on_any}
    return [Strategy("eager_sequences", rewrites=("windows",), on=on, about=__doc__, holds=holds)]
