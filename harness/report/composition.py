"""What a peak is made of: what was there when the step began, and what each phase up to the peak added to it."""

from collections.abc import Sequence

from harness.records import Phase

BEFORE = "before the step"
"""What a step finds: parameters and moments, the rows and the batch."""
CHILDREN = "child processes"
"""What child processes may take beside it."""


def composition(phases: Sequence[Phase], peak_phase: str | None, children: int = 0) -> dict[str, int]:
    """Return the bytes that each phase up to the peak had added by then, and those of children: their sum is the peak.

    What a later phase frees is taken from what was added last. Empty where the phase of the peak is not known.
    """
    name = (peak_phase or "").partition(",")[0]
    outer = name.rpartition("/")[0]
    within = [phase for phase in phases if outer and phase.name.rpartition("/")[0] == outer]
    members = within or [phase for phase in phases if phase.name == name]
    at = next((at for at, phase in enumerate(members) if phase.name == name), None)
    if at is None:
        return {}
    layers = [(BEFORE, members[0].entry_bytes)]
    level = members[0].entry_bytes
    for phase in members[:at]:
        _change(layers, _short(phase), phase.exit_bytes - level)
        level = phase.exit_bytes
    _change(layers, _short(members[at]), members[at].peak_bytes - level)
    sums: dict[str, int] = {}
    for layer, size in (*layers, (CHILDREN, children)):
        sums[layer] = sums.get(layer, 0) + size
    return {layer: size for layer, size in sums.items() if size > 0}


def _short(phase: Phase) -> str:
    return phase.name.rpartition("/")[2]


def _change(layers: list[tuple[str, int]], name: str, size: int) -> None:
    """Add a layer, or take from the last ones what was freed."""
    if size >= 0:
        layers.append((name, size))
        return
    while size < 0 and layers:
        last, height = layers.pop()
        size += height
        if size > 0:
            layers.append((last, size))
