"""Judge the committed step times again, and groups re-sampled from their residuals; print markdown tables.

    python tests/benchmarks/clock_figures.py [GROUPS]

The first tables compare today's rule (three rounds on one side, a control that withholds) with pooled intervals, and
statistics of a process. The others simulate groups of ten of known ratios: round drift, and the scatter of processes
drawn from the committed residuals, from normal errors of which 11 % scatter fourfold, or from normal errors with a
share of processes that are slower by 10 to 40 %. Rows are the mean over groups;
a word is false where the true ratio contradicts it. It exits with 1 when equal members get
`faster` or `slower` in more than 2 % of rows (in 5 % where a group has but one strategy) or, over all plans of one kind
of errors and within two standard errors, in more than 5 % of groups (one line of a few hundred groups strays too far by
chance), or when a line covers less than 95 %.
"""

import math
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory

from harness.contract import plugins
from harness.records import Record, store
from harness.verdicts import pooled as model
from harness.verdicts.blocks import blocks
from harness.verdicts.looks import LOOKS, Look, concluded, look
from harness.verdicts.observed import of_steps
from harness.verdicts.pooled import DECIDED, MARGIN, Pooled, Speed, pooled

ROOT = Path(__file__).resolve().parents[2]
MIXED = (1.0, 1.0, 1.02, 1.05, 1.05, 1.1, 1.1, 1.2)
EQUAL = (1.0,) * 8
DRIFT = 0.049
"""Robust standard deviation between rounds, of a trial of 36 rounds within 10 s each."""
ROUNDS = (2, 3, 4, 6, 8, 12, 16, 24)
DATA_PATH = {"source", "windows", "batches"}
Comparison = dict[str, dict[tuple[int, int], float]]
Noise = Callable[[random.Random], Callable[[], float]]
"""Draws the source of errors of one group."""


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 400
    records = committed()
    _judged_again(records)
    _statistics(records)
    groups = times(records, of_steps).values()
    shape = residuals(groups)
    every = [each.scatter for group in groups if (each := pooled(group)).scatter is not None]
    failed = False
    for name, noise in {
        "re-sampled, scatter of the median committed group (5.0 %)": resampled(shape, [0.050]),
        "re-sampled, scatter of a committed group drawn by chance": resampled(shape, every),
        "re-sampled, scatter of short rounds on a quiet machine (3.1 %)": resampled(shape, [0.031]),
        "re-sampled, scatter of processes that take turns (2.3 %)": resampled(shape, [0.023]),
        "normal with fourfold tails (5.0 %)": fourfold(0.050),
        "normal (2.0 %), and 8 % of the processes 10 to 40 % slower": strays(0.020, 0.08),
    }.items():
        print(f"\n**Errors {name}**, {count} groups of equal and {count} of mixed ratios\n\n{HEADER}")
        plans: dict[str, tuple[tuple[int, ...], float, tuple[int, int] | None]]
        plans = {str(rounds): ((rounds,), 0.0, None) for rounds in ROUNDS}
        plans |= {"looks, to 12": (LOOKS[:4], 0.0, None), "looks, to 24": (LOOKS, 0.0, None)}
        plans |= {"looks, the time spent after 3 to 9": (LOOKS, 0.0, (3, 9))}
        plans |= {"processes of 4 s in blocks of 20 s, looks, to 24": (LOOKS, 4.0, None)}
        false_groups = []
        for label, (looks, cost, ends) in plans.items():
            figures = simulate(noise, looks, count, cost, ends)
            print(figures.row(label), flush=True)
            false_groups.append(figures.false_groups)
            failed |= figures.false_rows > 0.02 or figures.coverage < 0.95
        print("\n| one strategy beside | rounds | covered | false words | +10 % found |\n|:--|:--|--:|--:|--:|")
        for baselines in (model.BASELINES, model.BASELINES[:1]):
            for label, looks in (("4", (4,)), ("8", (8,)), ("looks, to 24", LOOKS)):
                covered, false, found = alone(noise, looks, count, baselines)
                beside = " and ".join(baselines)
                print(f"| {beside} | {label} | {covered:.1%} | {false:.2%} | {found:.0%} |", flush=True)
                failed |= covered < 0.95 or false > 0.05
        failed |= fmean(false_groups) > 0.05 + 2 * math.sqrt(0.05 * 0.95 / (count * len(plans)))
    print("\nToo many false words, or too few intervals that cover." if failed else "")
    return int(failed)


# the committed records


def committed(root: Path = ROOT) -> list[Record]:
    """Return the records of the newest file of each folder of results that git tracks, without runs of one's own."""
    with TemporaryDirectory() as folder:
        subprocess.run([ROOT / ".ci" / "tracked_results", folder], cwd=root, check=True)
        return [record for path in store.newest(Path(folder) / "results") for record in store.read(path)[0]]


def times(records: Iterable[Record], statistic: Callable[[Sequence[float]], float]) -> dict[str, Comparison]:
    """Return one figure of each timed process, by group, member and round, in seconds."""
    groups: dict[str, Comparison] = {}
    for record in records:
        if (
            record.slot
            and record.case
            and record.slot.kind == "time"
            and record.status == "ok"
            and record.times.step_seconds
        ):
            group = groups.setdefault(record.case.comparison_key, {})
            block = record.slot.round, record.slot.block
            group.setdefault(record.case.label, {})[block] = statistic(record.times.step_seconds)
    return groups


def residuals(groups: Iterable[Comparison]) -> list[float]:
    """Return what is left of each process after its member and round, over the groups' own standard deviations."""
    shape: list[float] = []
    for group in groups:
        fit = model._fit(group)
        if fit is None:
            continue
        left = {(m, r): math.log(s) - fit.means[m] for m, each in group.items() for r, s in each.items()}
        for number in {number for _, number in left}:
            level = median(value for (_, r), value in left.items() if r == number)
            left |= {(m, r): value - level for (m, r), value in left.items() if r == number}
        deviation = math.sqrt(fmean(value**2 for value in left.values()))
        shape += [max(-8.0, min(8.0, value / deviation)) for value in left.values()]
    return shape


def null_rows(records: Iterable[Record]) -> set[tuple[str, str]]:
    """Return group and label of rows that change the data path alone, and the wait by less than 1 % of a step."""
    known = plugins.load().strategies
    waits: dict[tuple[str, str], list[float]] = {}
    steps: dict[tuple[str, str], list[float]] = {}
    harmless: dict[tuple[str, str], bool] = {}
    for record in records:
        if record.slot and record.case and record.slot.kind == "time" and record.status == "ok":
            key = record.case.comparison_key, record.case.label
            waits.setdefault(key, []).extend(record.times.fetch_seconds)
            steps.setdefault(key, []).extend(record.times.step_seconds)
            names = [applied.name for applied in record.case.strategies]
            harmless[key] = record.memory.feeds == "same" and all(
                name in known and set(known[name].rewrites) <= DATA_PATH for name in names
            )
    return {
        (group, label)
        for (group, label), fits in harmless.items()
        if fits
        and label not in model.BASELINES
        and waits[group, label]
        and waits.get((group, "baseline"))
        and abs(median(waits[group, label]) - median(waits[group, "baseline"]))
        < 0.01 * median(steps[group, "baseline"])
    }


def three_rounds(group: Comparison) -> dict[str, Speed]:
    """Judge as before: every round on one side of a margin that the control widens, or withholds for all."""
    pairs = {
        name: [each[r] / group["baseline"][r] for r in each if r in group["baseline"]] for name, each in group.items()
    }
    control = pairs.get("nothing", [])
    gate = 1.02 if not control else max(1.02, median(control), 1 / median(control))
    words = {}
    for name, ratios in pairs.items():
        if name in model.BASELINES or not ratios:
            continue
        word = "open"
        if len(ratios) >= 3 and control and min(control) <= 1.02 and max(control) >= 1 / 1.02:
            word = "slower" if min(ratios) > gate else "faster" if max(ratios) < 1 / gate else "open"
        words[name] = Speed(median(ratios), model.Interval(min(ratios), max(ratios)), word, len(ratios))
    return words


def _judged_again(records: list[Record]) -> None:
    groups = {name: g for name, g in times(records, of_steps).items() if "baseline" in g and _rounds(g) >= 3}
    nulls = null_rows(records)
    before = {name: three_rounds(group) for name, group in groups.items()}
    start = time.perf_counter()
    after = {name: pooled(group) for name, group in groups.items()}
    seconds = time.perf_counter() - start
    single = {name: pooled(group, ("baseline",)) for name, group in groups.items()}
    words = ("slower", "faster", "within 5 %", "at most 5 % slower", "at most 5 % faster", "open")
    print(f"{len(groups)} groups of three rounds or more, judged in {seconds:.2f} s\n")
    print("| rule | rows | " + " | ".join(words) + " | half-width (or range) | false on null rows |")
    print("|:--|--:|" + "--:|" * (len(words) + 2))
    for rule, judged in (
        ("three rounds", before),
        ("pooled, two baselines", {name: each.speeds for name, each in after.items()}),
        ("pooled, own baseline", {name: each.speeds for name, each in single.items()}),
    ):
        rows = {(name, label): s for name, each in judged.items() for label, s in each.items() if label != "nothing"}
        counts = Counter(speed.word for speed in rows.values())
        null = [speed for key, speed in rows.items() if key in nulls]
        wrong = sum(speed.word in ("faster", "slower") for speed in null)
        width = median(speed.half_width for speed in rows.values())
        cells = " | ".join(str(counts[word]) for word in words)
        print(f"| {rule} | {len(rows)} | {cells} | {width:.1%} | {wrong} of {len(null)} |")
    controls = [each.control for each in after.values() if each.control]
    off = sum(1 not in each.interval for each in controls)
    print(f"\nThe control's plain 95 % interval misses 1 in {off} of {len(controls)} groups.")


def _statistics(records: list[Record]) -> None:
    print("\n| a process is its | scatter, p10 / median / p90 of groups | beyond 10 % | kurtosis |\n|:--|--:|--:|--:|")
    statistics: dict[str, Callable[[Sequence[float]], float]] = {
        "median": median,
        "minimum": min,
        "mean": fmean,
        "mean of the faster half": of_steps,
        "mean of the middle half": lambda steps: fmean(sorted(steps)[len(steps) // 4 : len(steps) - len(steps) // 4]),
    }
    for name, statistic in statistics.items():
        groups = times(records, statistic)
        scatters = sorted(each.scatter for group in groups.values() if (each := pooled(group)).scatter is not None)
        shape = residuals(groups.values())
        absolute = [
            abs(value) * scatter
            for group in groups.values()
            if (scatter := pooled(group).scatter) is not None
            for value in residuals([group])
        ]
        tails = sum(value > 0.1 for value in absolute) / len(absolute)
        kurtosis = fmean(v**4 for v in shape) / fmean(v**2 for v in shape) ** 2
        places = " / ".join(f"{scatters[int(share * len(scatters))]:.1%}" for share in (0.1, 0.5, 0.9))
        print(f"| {name} | {places} | {tails:.1%} | {kurtosis:.1f} |")


def _rounds(group: Comparison) -> int:
    return max(map(len, group.values()))


# simulated groups


def resampled(shape: Sequence[float], scatters: Sequence[float]) -> Noise:
    """Return errors with the shape of the committed residuals, each group with one of the standard deviations."""

    def group(rng: random.Random) -> Callable[[], float]:
        scatter = rng.choice(scatters)
        return lambda: scatter * rng.choice(shape)

    return group


def fourfold(scatter: float) -> Noise:
    """Return errors that are normal, 11 % of them with four times the spread."""
    core = scatter / math.sqrt(0.89 + 0.11 * 16)
    return lambda rng: lambda: rng.gauss(0, core * (4 if rng.random() < 0.11 else 1))


def strays(scatter: float, share: float) -> Noise:
    """Return errors that are normal, but for a share of processes that take 10 to 40 % longer."""

    def error(rng: random.Random) -> float:
        slower = math.log1p(rng.uniform(0.1, 0.4)) if rng.random() < share else 0.0
        return rng.gauss(0, scatter) + slower

    return lambda rng: lambda: error(rng)


@dataclass(frozen=True)
class Played:
    """One simulated group: how it was judged in the end, its true ratios, and the rounds that each member took."""

    judged: Pooled
    truths: Mapping[str, float]
    rounds: Mapping[str, int]


def play(
    rng: random.Random,
    truths: Sequence[float],
    noise: Noise,
    looks: Sequence[int],
    cost: float = 0.0,
    ends: tuple[int, int] | None = None,
    baselines: Sequence[str] = model.BASELINES,
) -> Played:
    """Time a group of rows of known ratios and its baselines, and stop rows at the looks as they are decided.

    `cost` is what a process takes in seconds; a round that is long by it is cut into blocks, each with its own drift.
    Between the two rounds of `ends`, wherever chance wants it, the time for all rounds is spent.
    """
    ratios = {**dict.fromkeys(baselines, 1.0), **{f"row {i}": truth for i, truth in enumerate(truths)}}
    seconds: Comparison = {name: {} for name in ratios}
    remaining: Sequence[str] = tuple(ratios)
    latest: Look | None = None
    error = noise(rng)
    for number in range(looks[-1] if ends is None else rng.randint(*ends)):
        for place, members in enumerate(blocks(remaining, dict.fromkeys(ratios, cost), "", number)):
            level = 0.3 * math.exp(rng.gauss(0, DRIFT))
            for name in members:
                seconds[name][number, place] = level * ratios[name] * math.exp(error())
        if number + 1 in looks:
            latest = look(seconds, number + 1, looks, before=latest)
            remaining = latest.remaining
            if latest.finished:
                break
    return Played(concluded(seconds, looks), ratios, {name: len(each) for name, each in seconds.items()})


def false_word(word: str, truth: float) -> bool:
    """Return whether a true ratio contradicts a word; one at the margin counts as beyond it."""
    return {
        "slower": truth <= 1,
        "faster": truth >= 1,
        "within 5 %": not 1 / MARGIN < truth < MARGIN,
        "at most 5 % slower": truth >= MARGIN,
        "at most 5 % faster": truth <= 1 / MARGIN,
        "open": False,
    }[word]


@dataclass(frozen=True)
class Figures:
    """What simulated groups came to, as shares of rows unless said otherwise."""

    false_rows: float
    """Of equal rows in groups where all are equal: `faster` or `slower`."""
    false_groups: float
    """Of groups where all are equal: at least one row `faster` or `slower`."""
    false_words: float
    """Of all rows: a word that the true ratio contradicts."""
    coverage: float
    group_coverage: float
    half_width: float
    found: Mapping[float, float]
    """By true ratio: `slower`."""
    equal: float
    """Of rows with ratio 1: `within 5 %`."""
    rounds: Mapping[float, float]
    """By true ratio: the mean rounds taken."""

    def row(self, label: str) -> str:
        found = " | ".join(f"{self.found[truth]:.0%}" for truth in (1.02, 1.05, 1.1, 1.2))
        rounds = ", ".join(f"{self.rounds[truth]:.1f}" for truth in (1.0, 1.05, 1.1, 1.2))
        return (
            f"| {label} | {self.half_width:.1%} | {self.false_rows:.2%} | {self.false_groups:.1%} | "
            f"{self.false_words:.2%} | {self.coverage:.1%} | {self.group_coverage:.1%} | {found} | {self.equal:.0%} | "
            f"{rounds} |"
        )


HEADER = (
    "| rounds | half-width | equal: false rows | false groups | all: false words | rows covered | groups covered | "
    "+2 % found | +5 % | +10 % | +20 % | equal: decided | mean rounds at 1, 1.05, 1.1, 1.2 |\n|:--" + "|--:" * 12 + "|"
)


def simulate(
    noise: Noise, looks: Sequence[int], count: int, cost: float = 0.0, ends: tuple[int, int] | None = None
) -> Figures:
    """Play `count` groups of equal rows and as many of mixed ratios, and count."""
    rng = random.Random(1)
    alike = [play(rng, EQUAL, noise, looks, cost, ends) for _ in range(count)]
    mixed = [play(rng, MIXED, noise, looks, cost, ends) for _ in range(count)]
    claims = [[speed.word in ("faster", "slower") for speed in each.judged.speeds.values()] for each in alike]
    rows = [
        (each.truths[name], speed, each.rounds[name])
        for each in (*alike, *mixed)
        for name, speed in each.judged.speeds.items()
    ]
    covered = [
        all(each.truths[name] in speed.interval for name, speed in each.judged.speeds.items())
        for each in (*alike, *mixed)
    ]
    by_truth = {truth: [(s, r) for t, s, r in rows if t == truth] for truth in sorted(set(MIXED))}
    return Figures(
        false_rows=fmean(claim for group in claims for claim in group),
        false_groups=fmean(any(group) for group in claims),
        false_words=fmean(false_word(speed.word, truth) for truth, speed, _ in rows),
        coverage=fmean(truth in speed.interval for truth, speed, _ in rows),
        group_coverage=fmean(covered),
        half_width=fmean(speed.half_width for _, speed, _ in rows),
        found={truth: fmean(s.word == "slower" for s, _ in each) for truth, each in by_truth.items()},
        equal=fmean(s.word in DECIDED for s, _ in by_truth[1.0]),
        rounds={truth: fmean(r for _, r in each) for truth, each in by_truth.items()},
    )


def alone(noise: Noise, looks: Sequence[int], count: int, baselines: Sequence[str]) -> tuple[float, float, float]:
    """Play `count` groups of one strategy for each of three ratios, beside these baselines.

    Return the share of intervals that cover, of words that are false, and of those 10 % slower that are found.
    """
    rng = random.Random(1)
    played = [(truth, play(rng, (truth,), noise, looks, baselines=baselines)) for truth in (1.0, 1.05, 1.1) * count]
    rows = [(truth, each.judged.speeds["row 0"]) for truth, each in played]
    covered = fmean(truth in speed.interval for truth, speed in rows)
    false = fmean(false_word(speed.word, truth) for truth, speed in rows)
    return covered, false, fmean(speed.word == "slower" for truth, speed in rows if truth == 1.1)


if __name__ == "__main__":
    sys.exit(main())
