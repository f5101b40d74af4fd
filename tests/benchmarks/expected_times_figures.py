"""Hold the step times that plans expect against those that were measured.

    python tests/benchmarks/expected_times_figures.py SUITE.yaml [SUITE.yaml ...] [--results results]

The cases of each suite are predicted as `harness plan` does it, their operators timed on this machine, and the ratios
to the baseline compared with the measured ones of the committed results whose intervals end at most a fifth above where
they begin: a row of too few rounds to infer an interval from is left out. Run it on the machine of the results, with
nothing beside it. "No change" is the error of someone who expects every ratio to be 1.
"""

import argparse
import math
import sys
from pathlib import Path
from statistics import median

from harness.contract import plugins
from harness.machine.environment import cache_folder
from harness.records import store
from harness.report.results import read
from harness.suite import reader
from harness.verbs.machine import this_machine
from harness.verbs.plan import of_plan

WIDE = 1.2
DIFFERENT = math.log(1.05)


def main() -> int:
    parser = argparse.ArgumentParser(description="Hold expected step times against measured ones.")
    parser.add_argument("suites", nargs="+", type=Path)
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--all", action="store_true", help="print every row")
    options = parser.parse_args()
    loaded = plugins.load()
    pairs: dict[str, list[tuple[float, float]]] = {}
    for suite in options.suites:
        plan = reader.read(suite, loaded)
        files = store.newest(options.results / plan.name)
        measured = {
            (table.case.comparison_key, row.case.label): row.speed
            for results in read(files, print, loaded.aliases)
            for table in results.tables
            for row in table.rows
            if row.speed is not None and (seen := row.speed.inferred) is not None and seen.high / seen.low <= WIDE
        }
        machine = this_machine(plan.places, cache_folder())
        for rows in of_plan(plan, loaded, (), machine):
            baseline = next((row for row in rows if row.case.is_baseline), None)
            if baseline is None or not baseline.seconds:
                continue
            for row in rows:
                speed = measured.get((row.case.comparison_key, row.case.label))
                if speed is None or row.case.is_baseline or row.case.is_control or not row.seconds:
                    continue
                expected = row.seconds / baseline.seconds
                kind = f"{row.case.place}, {'timed' if min(row.timed, baseline.timed) >= 0.9 else 'by rates'}"
                pairs.setdefault(kind, []).append((math.log(expected), math.log(speed.ratio)))
                if options.all:
                    ratios = f"{expected:.2f} x expected, {speed.ratio:.2f} x measured"
                    print(f"{suite.stem} {row.case.place} {row.case.label}: {ratios}")
    report(pairs)
    return 0


def report(pairs: dict[str, list[tuple[float, float]]]) -> None:
    """Print errors of expected ratios, and how often their sign is right where both differ from 1."""
    print("| kind | rows | median error | 90th percentile | no change: median | 90th | right sign |")
    print("|:--|--:|--:|--:|--:|--:|--:|")
    for kind, each in sorted(pairs.items()):
        errors = sorted(math.expm1(abs(expected - measured)) for expected, measured in each)
        nothing = sorted(math.expm1(abs(measured)) for _, measured in each)
        both = [(a > 0) == (b > 0) for a, b in each if abs(a) > DIFFERENT and abs(b) > DIFFERENT]
        figures = (median(errors), errors[int(0.9 * len(errors))], median(nothing), nothing[int(0.9 * len(nothing))])
        right = f"{sum(both)} of {len(both)}"
        print(f"| {kind} | {len(each)} | {' | '.join(f'{figure:.1%}' for figure in figures)} | {right} |")


if __name__ == "__main__":
    sys.exit(main())
