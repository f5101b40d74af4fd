"""Predictions from earlier runs, kept by what they depend on: the case, the code that predicts it, the versions."""

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from pydantic import ValidationError

import harness
from harness.contract.plugins import Plugins
from harness.records import Case, Record

PREDICTING = ("worker/prediction.py", "worker/batch_sizes.py", "worker/tasks.py")
BOUNDS = ("verdicts/bound.py", "verdicts/residuals.json")
ROOMS = ("backends", "contract", "workloads", *PREDICTING, *BOUNDS, "records/roofline.py")
"""Files of the harness that a prediction depends on; of a folder its code."""


def key(case: Case, plugins: Plugins, versions: Mapping[str, str], *rest: object) -> str:
    """Return the name under which the prediction of a case is kept."""
    backend = case.place.backend
    forms = [plugins.workloads[case.workload].on.get(backend)]  # none where there is no form for this backend
    forms += [plugins.strategies[applied.name].on.get(backend) for applied in case.strategies]
    modules = {form.__module__ for form in forms if form is not None}
    code = [_harness(), *(_code(name) for name in sorted(modules))]
    text = json.dumps([case.digest(), code, dict(versions), *map(str, rest)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def read(folder: Path, name: str) -> Record | None:
    """Return a prediction that is kept; None where there is none that can be read."""
    try:
        record = Record.model_validate_json((folder / f"{name}.json").read_bytes())
    except (OSError, ValidationError):
        return None
    return record if record.status == "ok" else None


def write(folder: Path, name: str, record: Record) -> None:
    """Keep a prediction; a folder that cannot be written keeps nothing, and the next run predicts again."""
    if record.status != "ok" or record.prediction.predicted_peak_bytes is None:
        return
    entry = Record(prediction=record.prediction, notes=record.notes, extra=record.extra, missing=record.missing)
    path = folder / f"{name}.json"
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_text(entry.model_dump_json(exclude_defaults=True), encoding="utf-8")
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)


@cache
def _harness() -> str:
    root = Path(harness.__file__).parent
    return _digest(
        path for room in ROOMS for path in ((root / room).rglob("*.py") if (root / room).is_dir() else [root / room])
    )


@cache
def _code(module: str) -> str:
    """Return the digest of a module's code: of its file, and of its folder where that is a package of its own kind."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return ""
    path = Path(file)
    return _digest([path] if path.parent == Path.cwd() else path.parent.rglob("*.py"))


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
