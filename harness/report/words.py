"""How bytes, phases and comparisons are written."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from harness.records import Case
from harness.verdicts.judge import Comparison, Row
from harness.verdicts.observed import machine_of
from harness.verdicts.remarks import LEAST_FOR_PERCENT
from harness.workloads.data.frames import GENERATED

MIB = 1 << 20
HEAD = re.compile(r"[0-9a-f]{7,40}")
"""How git names a commit."""
COUNTED = ("corpus_tokens", "tokens", "frames", "features")
PREDICTED, AT_MOST = "predicted MiB", "at most"
"""Columns of several tables."""
SIZES = ("window", "stride", "layers", "width", "vocabulary", "batch")
Key = tuple[str, str]
"""What a comparison is told apart by: its comparison key and its machine, empty where that does not matter."""
K = TypeVar("K")
RESERVED = "reserved MiB"
SEGMENTS = (
    "- fits: by reserved bytes; a budget bounds those above what was there before the run, a card all of them, "
    "with the context where that is known"
)
"""By what is judged what a run takes of a GPU in torch."""


def heading(case: Case) -> str:
    """Return what a comparison is of in words: its workload, place, sizes, corpus and budget."""
    shape = case.shape
    network = f" ({name})" if (name := _model(shape)) else ""
    words = [f"{case.workload}{network} on {case.place}"]
    words += [f"{_grouped(shape[name])} {name.replace('_', ' ')}" for name in COUNTED if shape.get(name)]
    words += [f"{name} {_grouped(shape[name])}" for name in SIZES if shape.get(name)]
    if case.corpus not in ("standard_library", GENERATED) or (case.tokenizer != "bpe" and "vocabulary" in shape):
        words.append(case.corpus if case.corpus == "zipf" else f"{case.tokenizer} of {case.corpus}")
    if case.budget_bytes:
        words.append(f"budget {case.budget_bytes / MIB:,.0f} MiB")
    return ", ".join(words)


def key_of(table: Comparison) -> Key:
    """Return what a comparison is told apart by; of one without a measurement the machines are those that tried."""
    records = (record for row in table.rows for record in (*row.records, *([row.prediction] if row.prediction else [])))
    machines = table.machines or filter(None, dict.fromkeys(map(machine_of, records)))
    return table.case.comparison_key, " and ".join(machines)


def titles(keys: Mapping[Key, Case]) -> dict[Key, str]:
    """Return the heading of each comparison, given by one of its cases: no two are equal.

    Where the headings of two are, the sizes in which they differ follow, and then the machine.
    """
    answers = told_apart({key: heading(case) for key, case in keys.items()}, keys)
    for alike in _alike(answers):
        for key in alike:
            answers[key] += f", on {key[1]}" if key[1] else ""
    return answers


def told_apart(labels: Mapping[K, str], cases: Mapping[K, Case]) -> dict[K, str]:
    """Return the labels of some cases; to equal ones the sizes in which their cases differ are added."""
    answers = dict(labels)
    for alike in _alike(answers):
        sizes = {key: dict(_sizes(cases[key].plain.model_dump())) for key in alike}
        names = dict.fromkeys(name for each in sizes.values() for name in each)
        varying = [name for name in names if len({repr(each.get(name)) for each in sizes.values()}) > 1]
        for key in alike:
            words = (f", {name} {_grouped(value)}" for name in varying if (value := sizes[key].get(name)) is not None)
            answers[key] += "".join(words)
    return answers


def titles_of(cases: Iterable[Case]) -> dict[str, str]:
    """Return the heading of each comparison, given by one of its cases, by its key; the machines stand elsewhere."""
    answers = titles({(case.comparison_key, ""): case for case in cases})
    return {key: title for (key, _), title in answers.items()}


def _alike(headings: Mapping[K, str]) -> list[list[K]]:
    """Return the keys that share a heading with others, by heading."""
    keys: dict[str, list[K]] = {}
    for key, text in headings.items():
        keys.setdefault(text, []).append(key)
    return [alike for alike in keys.values() if len(alike) > 1]


def _sizes(values: Mapping[str, Any], within: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    """Yield every size of a case by its name in words; those of a network under the name of that."""
    for name, value in values.items():
        place = (*within, name.replace("_", " "))
        if isinstance(value, dict):
            yield from _sizes(value, () if place == ("shape",) else place)
        else:
            yield " ".join(place), value


def _model(shape: dict[str, Any]) -> str:
    """Return the name of the network or configuration, of one without a name its architecture."""
    config = shape.get("config", shape.get("network", ""))
    return str(config.get("model_type", "")) if isinstance(config, dict) else str(config)


def _grouped(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def each_rank(row: Row) -> str:
    """Return that a peak is of each rank, where there are several; else an empty text."""
    return " on each rank" if row.case.ranks > 1 else ""


def short(commit: str) -> str:
    """Return a commit by its first seven digits, with `-dirty`; what is no commit of git stays whole."""
    digits, dash, rest = commit.partition("-")
    return (digits[:7] if HEAD.fullmatch(digits) else digits) + dash + rest


def mib(value: int | None) -> str:
    """Show bytes in MiB, without the unit; an empty text for None."""
    return "" if value is None else f"{value / MIB:,.0f}" if value >= 100 * MIB else f"{value / MIB:,.1f}"


def residual(size: int | None, ratio: float | None, *peaks: int | None) -> str:
    """Show how far a peak lies from its prediction; in MiB where both are so small that percents mean nothing."""
    if size is None or ratio is None:
        return ""
    if max(peak or 0 for peak in peaks) < LEAST_FOR_PERCENT:
        return f"{size / MIB:+.1f} MiB"
    return f"{ratio:+.1%}"


def phase_name(name: str | None) -> str:
    """Show the phase that sets the peak, and how many tie with it."""
    if not name:
        return ""
    first, *others = [phase.removeprefix("steady_step/").removeprefix("first_step/") for phase in name.split(", ")]
    more = len(dict.fromkeys(other for other in others if other != first))
    return first + (f" (+{more})" if more else "")


def sureness(coverages: Iterable[float | None]) -> str:
    """Say with what probability bounds hold; an empty text where there is none."""
    shares = sorted({each for each in coverages if each is not None})
    if not shares:
        return ""
    ends = (f"{100 * share:.1f}".removesuffix(".0") for share in (shares[0], shares[-1]))  # no 99.5 that reads as 100
    span = " to ".join(f"{end} %" for end in dict.fromkeys(ends))
    return f"- at most: with a probability of {span} it takes no more, by the errors of predictions of its kind"
