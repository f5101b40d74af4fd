"""Hold predictions against what was measured, by kind of case, and write the file that bounds come from.

    python tests/benchmarks/residual_figures.py RESULTS... [--predict]
        [--published tests/benchmarks/published/rows.jsonl] [--write harness/verdicts/residuals.json]

With `--predict` each measured case is predicted anew, by the code as it is: records of older commits have what an older
predictor said. With `--published` training runs on GPUs that others measured count as well (`of_published`). A peak of
our own counts only if it is to be believed and no trial (`measured`, `of_row`), and if what it is above means the same
as today (`SINCE`). The share above the bound and its slack are those of cases left out: each is bounded by the
residuals of all others of its kind.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePath
from statistics import fmean, median
from typing import NamedTuple, cast

from harness.contract import plugins
from harness.contract.plugins import Plugins
from harness.machine import facts, history
from harness.machine.environment import cache_folder
from harness.records import Case, Prediction, store
from harness.report.results import read
from harness.run import prediction_cache, prepare_data, template
from harness.verdicts.bound import Kind, Residual, at_most
from harness.verdicts.judge import Row
from harness.verdicts.remarks import DOUBTFUL
from harness.worker.prediction import GUESSED, is_bounded, kind_of

MIB = 1 << 20
LARGE = 100 * MIB
SINCE = {"torch/cpu": "ac4fee9", "jax/cpu": "a37d5e3"}
"""The commits from which on the base of a place is what it is today.

In torch it includes the packing buffers of the matrix library. Steps that were measured before have up to 14 MiB of
them, as the same cases showed when they were measured again: 6.7 and 14.0 too much before, 0.4 since. In JAX it no
longer includes what the compiler left: 3 to 9 MiB, by which peaks were too low. Both are left out, but for those on
several ranks, of which there are no others. Since 688870d it includes the programs that draw the state in JAX: by up
to 18 MiB peaks before were too high, and so are bounds in JAX until all its rows have been measured again.
"""
USUAL_STEPS = 3
TRAINING_RUNS = ("fitcheck", "canifinetune")
"""The sources of published rows that are whole training runs, with the bytes that torch's allocator counted."""


class Measured(NamedTuple):
    """A case with the peak of its run, in bytes, and what it was predicted to take; `processor` is what it ran on."""

    case: Case
    commit: str
    peak_bytes: int
    steps: int
    prediction: Prediction
    processor: tuple[object, ...] = ()


def main() -> int:
    parser = argparse.ArgumentParser(description="Hold predictions against what was measured.")
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--predict", action="store_true", help="predict all cases anew")
    parser.add_argument("--published", type=Path, help="rows of training runs that others measured")
    parser.add_argument("--write", type=Path, help="the file to write the residuals into")
    options = parser.parse_args()
    loaded = plugins.load()
    rows = with_residual(measured(options.results, loaded.aliases), loaded)
    if options.predict:
        rows = with_residual(predicted_anew([row for row, _ in rows], loaded), loaded)
    others = of_published(options.published) if options.published is not None else ()
    residuals = sorted({*(each for _, each in rows), *others})
    report(residuals)
    if options.write is not None:
        commits = sorted({row.commit for row, _ in rows})
        lines = (json.dumps([list(each.kind), each.predicted_bytes, each.measured_bytes]) for each in residuals)
        text = f'{{"commits": {json.dumps(commits)},\n"residuals": [\n' + ",\n".join(lines) + "\n]}\n"
        options.write.write_text(text, encoding="utf-8")
    return 0


def measured(folders: Sequence[Path], aliases: Mapping[str, str]) -> Iterator[Measured]:
    """Yield every case below some folders whose peak counts, of each suite in its newest file.

    Trials of `harness doctor --limits` do not count: what ran within its own prediction has a peak only where that was
    enough, so that the shortfalls which a bound is about never show in it.
    """
    files = [file for folder in folders for file in store.newest(folder)]
    for each in read(files, lambda problem: None, aliases):
        if not each.tried:
            rows = (row for table in each.tables for row in table.rows)
            yield from (case for row in rows if (case := of_row(row)) is not None)


def of_row(row: Row) -> Measured | None:
    """Return the case of a row; None where it has no peak beside a prediction, or one that is not to be believed.

    What withholds a verdict of memory is not to be believed, but for child processes: the peak is that of the process
    alone, as predictions and bounds are.
    """
    doubts = set(row.flags) & (DOUBTFUL - {"child_processes"})
    if doubts or row.prediction is None or row.predicted_bytes is None or row.residual_bytes is None:
        return None
    record = row.records[0]
    peak_bytes, steps = row.predicted_bytes + row.residual_bytes, len(record.memory.losses) or USUAL_STEPS
    processor = processor_of(record.origin.machine)
    return Measured(row.case, record.origin.commit, peak_bytes, steps, row.prediction.prediction, processor)


def processor_of(machine: Mapping[str, object]) -> tuple[object, ...]:
    """Return what predictions depend on of a processor: its model, and in which types of 16 bits it multiplies."""
    return machine.get("cpu"), *cast(Sequence[str], machine.get("half_precision") or ())


def counts(kind: Kind, commit: str) -> bool:
    """Check whether a peak of a kind that a commit measured means what it means today."""
    since = SINCE.get(kind.place)
    return since is None or kind.several or kind.data or is_since(since, commit)


@cache
def is_since(since: str, commit: str) -> bool:
    """Check whether a commit is another or comes after it; one that this repository does not have is not."""
    command = ["git", "merge-base", "--is-ancestor", since, commit.removesuffix("-dirty")]
    return subprocess.run(command, capture_output=True).returncode == 0


def predicted_anew(rows: Sequence[Measured], loaded: Plugins) -> list[Measured]:
    """Predict every case by the code as it is; begun again, go on where it was.

    A case that opens a file of rows has the prediction of its run: what a page fault maps is asked of the file itself,
    and that may be gone. So has one whose strategies do something else today than when it was measured, and one of
    another processor, where libraries take other scratch.
    """
    here = processor_of(facts.facts())
    corpora = {row.case.comparison_key: prepare_data.described(row.case, loaded, row.steps) for row in rows}
    cases = {(row.steps, row.case.digest()): row.case for row in rows}
    stored = prediction_cache.folder(cache_folder())
    again = {}
    with template.forking():
        for steps in sorted({row.steps for row in rows}):
            share = [case for (each, _), case in cases.items() if each == steps]
            for case, record in prediction_cache.of_cases(share, stored, corpora, loaded, steps=steps):
                if record.notes.get("prediction", GUESSED) == GUESSED:
                    again[steps, case.digest()] = record.prediction
    return [
        row
        if row.processor != here or opens_a_file(row.case, loaded) or has_changed(row, loaded)
        else row._replace(prediction=again.get((row.steps, row.case.digest()), row.prediction))
        for row in rows
    ]


def has_changed(row: Measured, loaded: Plugins) -> bool:
    """Check whether the code of a case's strategies is another than when it was measured, or may be."""
    files = history.files_of(loaded.strategies[applied.name] for applied in row.case.strategies)
    changed = history.changed(row.commit, files)
    return changed is None or any(PurePath(each).is_relative_to(file) for each in changed for file in files)


def opens_a_file(case: Case, loaded: Plugins) -> bool:
    """Check whether a strategy of a case opens the file of its rows."""
    strategies = (loaded.strategies.get(applied.name) for applied in case.strategies)
    return any("rows" in each.rewrites for each in strategies if each is not None)


def with_residual(rows: Iterable[Measured], loaded: Plugins) -> list[tuple[Measured, Residual]]:
    """Return the rows that have a residual, each with it."""
    return [(row, each) for row in rows if (each := residual(row, loaded)) is not None]


def residual(row: Measured, loaded: Plugins) -> Residual | None:
    """Return the residual of a case; None where it cannot be predicted or bounded, or its peak means something else."""
    prediction = row.prediction
    if any(applied.name not in loaded.strategies for applied in row.case.strategies):
        return None
    if not is_bounded(loaded, row.case):
        return None
    if prediction.predicted_peak_bytes is None or prediction.predicted_phase is None:
        return None
    kind = kind_of(loaded, row.case, prediction.predicted_phase)
    return Residual(kind, prediction.predicted_peak_bytes, row.peak_bytes) if counts(kind, row.commit) else None


def of_published(path: Path) -> Iterator[Residual]:
    """Yield the residuals of published training runs, in allocated bytes, as predictions of torch on a GPU are.

    Their attention is that of the framework. A run that cannot be rebuilt has none.
    """
    from published import training  # with it come torch and transformers, which nothing else here needs
    from published.machine import Refused

    from harness.backends.cuda_allocator import OutOfMemory

    for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        if row["family"] in TRAINING_RUNS:
            lower = not row["param_dtype"].startswith("float32") or row["autocast"] is not None
            kind = Kind("torch/cuda", several=False, data=False, lower=lower, attention=False)
            with suppress(Refused, OutOfMemory):
                predicted_bytes = training.predicted(row)["allocated_bytes"]
                yield Residual(kind, predicted_bytes, row["measured"]["max_memory_allocated"])


def report(residuals: Sequence[Residual]) -> None:
    """Print errors of predictions by kind and of all, and how often cases stay within the bound that others give."""
    print("| kind | cases | of 100 MiB | median | 95th percentile | largest | above the bound | mean slack |")
    print("|:--|--:|--:|--:|--:|--:|--:|--:|")
    by_kind: dict[str, list[Residual]] = {}
    for each in residuals:
        by_kind.setdefault(name(each.kind), []).append(each)
    for kind, members in [*sorted(by_kind.items()), ("all", list(residuals))]:
        print(f"| {kind} | {len(members)} | {' | '.join(figures(members, residuals))} |")


def name(kind: Kind) -> str:
    """Write a kind in words."""
    words = (
        ("on several ranks", kind.several),
        ("data", kind.data),
        ("lower precision", kind.lower),
        ("own attention", kind.attention),
    )
    return ", ".join([kind.place, *(word for word, is_so in words if is_so)])


def figures(members: Sequence[Residual], residuals: Sequence[Residual]) -> Iterator[str]:
    """Yield the cells of some cases: errors and slack of those of 100 MiB or more."""
    large = [each for each in members if each.measured_bytes >= LARGE]
    errors = sorted(abs(each.measured_bytes / each.predicted_bytes - 1) for each in large)
    bounds = {each: left_out(each, residuals) for each in members}
    over = [limit < each.measured_bytes for each, limit in bounds.items() if limit is not None]
    slacks = [limit / each.measured_bytes - 1 for each in large if (limit := bounds[each]) is not None]
    yield str(len(large))
    chosen = (median(errors), errors[int(0.95 * len(errors))], errors[-1]) if errors else ()
    yield from (f"{each:.1%}" for each in chosen) if chosen else [""] * 3
    yield f"{sum(over)} of {len(over)}" if over else ""
    yield f"{fmean(slacks):.1%}" if slacks else ""


def left_out(one: Residual, residuals: Sequence[Residual]) -> int | None:
    """Return the bound of one case from all others."""
    limit = at_most(one.kind, one.predicted_bytes, [each for each in residuals if each is not one])
    return limit.peak_bytes if limit is not None else None


if __name__ == "__main__":
    sys.exit(main())
