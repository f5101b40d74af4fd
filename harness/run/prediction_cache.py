"""Predict cases, but for those that were predicted before by the same code of the same versions."""

import hashlib
import json
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError

import harness
from harness.backends import processor
from harness.contract.plugins import Plugins
from harness.machine import facts
from harness.records import Case, Record
from harness.run import digests, predictions

PREDICTING = (
    *("run/predictions.py", "worker/prediction.py", "worker/batch_sizes.py", "worker/ranks.py"),
    *("worker/failures.py", "worker/notes.py"),
    *("machine/environment.py", "machine/page_faults.py"),
)
BOUNDS = ("verdicts/bound.py", "verdicts/residuals.json")
RECORDS = ("records/forecast.py", "records/roofline.py")
ROOMS = ("backends", "contract", "workloads", *PREDICTING, *BOUNDS, *RECORDS, "refusal.py")
"""Files of the harness that a prediction depends on; of a folder its code."""


def folder(cache: Path) -> Path:
    """Return the folder of predictions within that of all that is worth storing."""
    return cache / "predictions"


def of_cases(
    cases: Sequence[Case],
    within: Path | None,
    corpora: Mapping[str, Any],
    plugins: Plugins,
    names: tuple[str, ...] = (),
    card: str = "",
    calls: bool = False,
    steps: int = predictions.STEPS,
    **rest: Any,
) -> Generator[tuple[Case, Record], None, None]:
    """Yield each case with its prediction, in no order: from a folder, or as `predictions.of_cases` makes it.

    What is made is stored in the folder; None predicts every case.
    """
    stored: dict[str, Path] = {}
    open_: Sequence[Case] = cases
    if within is not None:
        versions = facts.versions() | dict(plugins.versions)
        # what a library takes within a call follows the threads and the processor
        here = (facts.threads(), processor.vendor(), *(facts.facts()[name] for name in ("cpu", "half_precision")))
        open_ = []
        code = cache(digests.of_module)  # read anew by each call: a notebook may have edited it
        for case in cases:
            on = card if case.place.device == "cuda" else ""
            depends = (corpora.get(case.comparison_key), on, *here, steps, *(["calls"] if calls else []))
            path = stored[case.digest()] = within / f"{key(case, plugins, versions, *depends, code=code)}.json"
            if (record := read(path)) is not None:
                yield case, record
            else:
                open_.append(case)
    for case, record in predictions.of_cases(
        open_, corpora, plugins, names, card=card, calls=calls, steps=steps, **rest
    ):
        if case.digest() in stored:
            write(stored[case.digest()], record)
        yield case, record


def key(
    case: Case,
    plugins: Plugins,
    versions: Mapping[str, str],
    *rest: object,
    code: Callable[[ModuleType | None], str] = digests.of_module,
) -> str:
    """Return the name under which the prediction of a case is stored, which is one for all budgets.

    `code` gives the digest of a module's code.
    """
    backend = case.place.backend
    workload = plugins.workloads[case.workload]
    strategies = [plugins.strategies[applied.name] for applied in case.strategies]
    modules: set[Any] = {
        module
        for hook, items in ((digests.WORKLOADS, [workload]), (digests.STRATEGIES, strategies))
        for item in items
        if (form := item.on.get(backend)) is not None  # none where there is no form for this backend
        for module in digests.deciding(plugins, hook, item.name, form)
    }
    instruments = plugins.manager.hook.harness_measure.get_hookimpls()  # they see predictions as any other task
    modules |= {each.plugin for each in instruments}
    written = [_harness(), *sorted(map(code, modules))]
    of = case.model_copy(update={"budget_bytes": None}).digest()
    text = json.dumps([of, written, dict(versions), *map(str, rest)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def read(path: Path) -> Record | None:
    """Return a stored prediction; None where there is none that can be read."""
    try:
        record = Record.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
    return record if record.status == "ok" else None


def write(path: Path, record: Record) -> None:
    """Store a prediction; in a folder that cannot be written nothing is, and the next run predicts again."""
    if record.status != "ok" or record.prediction.predicted_peak_bytes is None:
        return
    entry = Record(prediction=record.prediction, notes=record.notes, extra=record.extra, missing=record.missing)
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(entry.model_dump_json(exclude_defaults=True), encoding="utf-8")
        os.replace(partial, path)
    except OSError:
        with suppress(OSError):
            partial.unlink()


@cache
def _harness() -> str:
    root = Path(harness.__file__).parent
    return digests.of_files(
        path for room in ROOMS for path in ((root / room).rglob("*.py") if (root / room).is_dir() else [root / room])
    )
