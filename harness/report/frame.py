"""Figures as pandas data frames: one row a strategy, one a record, one a prediction."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from harness.records import Memory, Prediction, Record, Times
from harness.records.garbage import uncollected
from harness.records.store import StoreError
from harness.refusal import Refusal
from harness.report.export import Figures
from harness.verbs.plan import PlanRow

if TYPE_CHECKING:
    from pandas import DataFrame

NAMED = ("commit", "utc", "run_id", "attempt", "start", "worker_seconds")
"""What a frame of records says of the origin of each, beside its suite, machine and versions."""
EMPTY = (Prediction(), Memory(), Times())
"""Rooms of a record that has no figures in them."""


class FrameError(Refusal):
    """A frame that cannot be made, in one sentence."""


def of_rows(rows: Sequence[Figures]) -> "DataFrame":
    """Return one row a strategy; what is nested has a column each, such as `shape.tokens` or `phases.init`."""
    return _frame([_flat(row) for row in rows])


def of_records(*files: Sequence[Record]) -> "DataFrame":
    """Return one row a record: its case, its slot, where it is from, and every figure under the name it has in files.

    Lists stay lists (`step_seconds`), with their median beside them; phases have a column each for their peak. Of a
    slot that was tried several times in one of the `files` the last record `stands`.
    """
    with uncollected():
        return _frame([row for records in files for row in _of_file(records)])


def _of_file(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the rows of the records of one file."""
    shown = [record for record in records if record.slot or record.case]
    standing = set({record.slot or at: at for at, record in enumerate(shown)}.values())
    return [{**_of_record(record), "stands": at in standing} for at, record in enumerate(shown)]


def of_predictions(comparisons: Sequence[Sequence[PlanRow]]) -> "DataFrame":
    """Return one row a predicted case: `peak_bytes`, `need_bytes`, `seconds`, whether it fits, why one is not known.

    On a GPU in torch `reserved_bytes`, `driver_bytes` and `host_bytes` are what the allocator, the driver and the host
    hold; `gpu` says for which card it is predicted where none was named.
    """
    return _frame(
        [
            {
                **_of_case(row.case.model_dump(mode="json"), row.case.label),
                "peak_bytes": row.peak_bytes,
                "at_most_bytes": row.at_most_bytes,
                "need_bytes": row.need_bytes,
                "reserved_bytes": row.prediction.predicted_reserved_bytes,
                "driver_bytes": row.prediction.predicted_driver_bytes,
                "host_bytes": row.prediction.predicted_host_bytes,
                "phase": row.phase,
                "floor_bytes": row.floor_bytes,
                "parameters": row.prediction.parameters,
                "limit_bytes": row.limit_bytes,
                "host_limit_bytes": row.host_limit_bytes,
                "fits": row.fits,
                "gpu": row.supposed or None,
                "seconds": row.seconds,
                "timed": row.timed,
                "reason": row.reason,
            }
            for rows in comparisons
            for row in rows
        ]
    )


def write_parquet(rows: Sequence[Figures], path: Path) -> None:
    """Write one row a strategy as parquet; what is nested deeper than a column is JSON, and what is empty missing.

    Raises FrameError without pandas or pyarrow, or where a column has values of several kinds, or a number beyond 64
    bits; StoreError where the file cannot be written.
    """
    frame = _frame([{name: _stored(value) for name, value in _flat(row).items()} for row in rows])
    try:
        import pyarrow  # type: ignore[import-untyped]
    except ImportError:
        raise FrameError("parquet needs the package pyarrow: install it, or the extra 'frame'") from None
    try:
        Path(path).write_bytes(frame.to_parquet(engine="pyarrow"))
    except (pyarrow.ArrowException, OverflowError) as error:
        reason = "; ".join(str(each) for each in error.args)
        raise FrameError(f"parquet cannot hold these rows ({reason}): write them as csv or json") from None
    except OSError as error:
        raise StoreError(f"'{path}' cannot be written ({error.strerror}): name another file") from None


def _stored(value: Any) -> Any:
    """Return a value that a column can hold beside those of other rows."""
    if isinstance(value, Mapping | list | tuple) and not value:
        return None
    nested = isinstance(value, Mapping) or (
        isinstance(value, list | tuple) and any(isinstance(each, Mapping) for each in value)
    )
    return json.dumps(value) if nested else value


def _frame(rows: Sequence[Mapping[str, Any]]) -> "DataFrame":
    try:
        import pandas
    except ImportError:
        raise FrameError("a frame needs the package pandas: install it, or the extra 'frame'") from None
    return pandas.DataFrame(rows)


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{inner}": each for inner, each in value.items()}
        else:
            flat[name] = value
    return flat


def _of_case(case: Mapping[str, Any], label: str) -> dict[str, Any]:
    left_out = ("shape", "strategies")
    plain = {name: value for name, value in case.items() if name not in left_out}
    return {"strategy": label, **plain, **{f"shape.{name}": value for name, value in case.get("shape", {}).items()}}


def _of_record(record: Record) -> dict[str, Any]:
    origin, slot, case = record.origin, record.slot, record.case
    row: dict[str, Any] = {"suite": origin.suite, "machine": origin.machine.get("name")}
    row |= {name: getattr(origin, name) for name in NAMED}
    row |= {f"versions.{name}": version for name, version in origin.versions.items()}
    if slot is not None:
        row |= {"kind": slot.kind, "round": slot.round, "repeat": slot.repeat, "block": slot.block}
    if case is not None:
        fields = {name: getattr(case, name) for name in type(case).model_fields if name not in ("place", "strategies")}
        row |= _of_case({**fields, "place": str(case.place)}, case.label)
    row |= {"position": record.position, "probe": record.probe}
    row |= {name: getattr(record, name) for name in ("child_peak_bytes", "child_peak_bound_bytes")}
    row |= {"status": record.status, "message": record.evidence.get("message"), "flags": ", ".join(record.flags)}
    row |= {f"extra.{name}": value for name, value in record.extra.items()}
    return _with_figures(row, record)


def _with_figures(row: dict[str, Any], record: Record) -> dict[str, Any]:
    """Return a row with the figures of a record's room, each under its own name; what is empty replaces nothing."""
    for room in (record.prediction, record.memory, record.times, record.numerics, record.limits, record.trial):
        if room is None or room in EMPTY:
            continue
        for name, value in vars(room).items():
            if name in ("phases", "predicted_phases"):
                row |= {f"{name}.{phase.name}": phase.peak_bytes for phase in value}
            elif name == "ranks":
                row["rank_peaks"] = [rank.peak_bytes for rank in value] or None
            elif name not in ("predicted_work", "batches_digests"):
                known = None if value in ((), {}) else list(value) if isinstance(value, tuple) else value
                row[name] = row.get(name) if known is None else known
    if record.times.step_seconds:
        row["median_step_seconds"] = median(record.times.step_seconds)
    return row
