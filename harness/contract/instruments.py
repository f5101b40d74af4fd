"""Instruments are rewritings too: they wrap parts to watch them."""

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

from harness.contract.loop import Meter
from harness.contract.parts import ABSENT, PART_NAMES, Parts
from harness.contract.strategy import Strategy

WHOLE = frozenset({"evaluate", "save", "resume"})
"""Phases that are not resolved any further."""


def metered(parts: Parts, meter: Meter) -> Parts:
    """Resolve an eager step into the phases forward, loss, backward and update.

    Forward begins with the gradient, and again with each embedding (a micro-batch). Backward lasts from the end of
    the loss to the end of the gradient: what is recomputed there belongs to it.
    """

    def enter(name: str | None) -> None:
        step = (meter.current or "step").split("/")[0]
        if step in WHOLE:
            return
        meter.enter(f"{step}/{name}" if name else step)

    def watch(part: Callable[..., Any], name: str, *then: str | None) -> Callable[..., Any]:
        if part is ABSENT:
            return part

        @wraps(part)
        def watched(*args: Any, **kwargs: Any) -> Any:
            enter(name)
            result = part(*args, **kwargs)
            for following in then:
                enter(following)
            return result

        return watched

    return replace(
        parts,
        embed=watch(parts.embed, "forward"),
        loss=watch(parts.loss, "loss", "backward"),
        grad=watch(parts.grad, "forward"),
        update=watch(parts.update, "update", None),
    )


def located(parts: Parts, called: list[str]) -> Parts:
    """Keep the names of the parts that are being called in a list, the innermost last."""

    def watch(name: str, part: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(part)
        def watched(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            try:
                return part(*args, **kwargs)
            finally:
                called.pop()

        return watched

    present = {name: getattr(parts, name) for name in PART_NAMES}
    watching: dict[str, Any] = {name: watch(name, part) for name, part in present.items() if part is not ABSENT}
    return replace(parts, **watching)


def counted(parts: Parts, strategy: Strategy, calls: Counter[tuple[str, str]]) -> Parts:
    """Count the calls of every part that a strategy has just rewritten: proof that it was active."""

    def watch(name: str, part: Callable[..., Any]) -> Callable[..., Any]:
        calls[strategy.name, name] += 0

        @wraps(part)
        def called(*args: Any, **kwargs: Any) -> Any:
            calls[strategy.name, name] += 1
            return part(*args, **kwargs)

        return called

    watched: dict[str, Any] = {name: watch(name, getattr(parts, name)) for name in strategy.rewrites}
    return replace(parts, **watched)


def digested(parts: Parts, digests: list[str]) -> Parts:
    """Note a digest of each batch that the loop consumes, over values and shape, whatever array holds them."""
    inner = parts.batches

    def batches(parts: Parts, windows: Any) -> Any:
        for x, y in inner(parts, windows):
            digests.append(_digest(x, y))
            yield x, y
            del x, y  # or the run would be charged for two batches

    return replace(parts, batches=batches)


def _digest(*batch: Any) -> str:
    import numpy as np

    digest = hashlib.sha256()
    for array in batch:
        values = np.asarray(array.cpu() if hasattr(array, "cpu") else array)
        digest.update(str(values.shape).encode())
        wide = np.int64 if values.dtype.kind in "iu" else np.float64
        for row in values.reshape(len(values), -1):
            digest.update(row.astype(wide).tobytes())
    return digest.hexdigest()[:16]
