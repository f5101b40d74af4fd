"""Advice as markdown: one paragraph, one table, and the lines to paste into a suite."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import yaml
from tabulate import tabulate

from harness.contract.place import Place
from harness.contract.strategy import Strategy
from harness.contract.workload import Workload
from harness.records import Case, Record
from harness.records.case import CONTROL
from harness.records.record import OUT_OF_MEMORY
from harness.report import counterparts
from harness.report.answer import cost
from harness.report.plan import basis, grid
from harness.report.text import escaped, row_name, with_code, with_full_stop
from harness.report.words import AT_MOST, mib, titles, told_apart
from harness.suite.units import shown
from harness.verbs.advise import Advice, of_predictions, preference
from harness.verbs.machine import Machine
from harness.verbs.plan import PlanRow, need, row_of
from harness.verbs.remedies import leanest, none_fits, shortfall
from harness.verdicts.interval import Interval
from harness.verdicts.judge import Row

GIB = 1 << 30
ANYWHERE = Place("torch", "cpu")
"""Where a model stands that is told apart from others, whatever its places."""
FRONT = 8
"""How many rows of the front are shown."""


def text(answers: Sequence[Advice], strategies: Mapping[str, Strategy] = MappingProxyType({})) -> str:
    """Write what to use for each comparison, why, the lines of it for a suite, and the code for other libraries.

    `strategies` are those of the plugins, by name.
    """
    pieces = []
    title_of = titles({(advice.case.comparison_key, ""): advice.case for advice in answers})
    for advice in answers:
        pieces.append(f"## {escaped(title_of[advice.case.comparison_key, ''])}")
        pieces += [_sentence(advice), *_left_out(advice)]
        if advice.rows:
            pieces.append(_measured(advice.rows))
        else:
            rows = [advice.predicted[0], *(_shown(advice) or _leanest(advice))]
            pieces.append("\n\n".join(filter(None, [grid(rows), "\n".join(basis(rows))])))
        if advice.chosen is not None:
            if parts := _parts(advice.chosen, advice.predicted):
                pieces.append(parts)
            ranks = f"ranks: {advice.chosen.case.ranks}\n" if advice.chosen.case.ranks > 1 else ""
            pieces.append(f"```yaml\nstrategies:\n{_lines(advice.chosen)}{ranks}```")
            pieces += filter(None, [counterparts.of_choice(advice.chosen.case, strategies)])
    return "\n\n".join(pieces) + "\n"


def _left_out(advice: Advice) -> list[str]:
    """Say which strategies were not combined, and which have no prediction, and why."""
    lines = [f"- left out: {with_code(reason)}" for reason in advice.left_out]
    unknown: dict[str, list[str]] = {}
    for row in advice.predicted if any(each.peak_bytes is not None for each in advice.predicted) else ():
        if row.peak_bytes is None and len(row.case.strategies) < 2:
            unknown.setdefault(row.reason or "no reason is known", []).append(row.case.label)
    lines += [f"- no prediction of {escaped(', '.join(labels))}: {with_code(why)}" for why, labels in unknown.items()]
    return ["\n".join(lines)] if lines else []


class Grid(NamedTuple):
    """A table: a header for each column, and the cells of each row."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def for_memories(
    records: Sequence[Record], memories: Mapping[str, Sequence[int]], workloads: Mapping[str, Workload]
) -> Grid:
    """Return what to use for each model in each memory, from predictions that `harness advise --save` kept.

    `memories` are the bytes of machines by device: `cpu` for machines without a GPU, `cuda` for GPUs; budgets that the
    cases were predicted with do not count. `workloads` know the names of published models. Where there are several
    frameworks, each has a row.
    """
    models: dict[tuple[str, str], dict[str, list[tuple[Case, Record]]]] = {}
    names: dict[str, str] = {}
    plain: dict[str, Case] = {}
    for record in records:
        if record.case is not None and record.slot is not None and record.prediction.parameters:
            case = record.case.model_copy(update={"budget_bytes": None})
            anywhere = case.plain.model_copy(update={"place": ANYWHERE})
            key = anywhere.digest()
            names[key], plain[key] = _model(record, case, workloads), anywhere
            by_device = models.setdefault((key, case.place.backend), {})
            by_device.setdefault(case.place.device, []).append((case, record))
    names = told_apart(names, plain)
    several = len({backend for _, backend in models}) > 1
    columns = [(device, size) for device, sizes in memories.items() for size in sizes]
    kinds = {"cuda": "GPU", "cpu": "without a GPU"}
    headers = ("model", *(f"{size / GIB:.0f} GiB {kinds[device]}" for device, size in columns))
    rows = tuple(
        (
            escaped(f"{names[model]}, {backend}" if several else names[model]),
            *(_in_memory(by_device.get(device, []), size) for device, size in columns),
        )
        for (model, backend), by_device in models.items()
    )
    return Grid(headers, rows)


def _model(record: Record, case: Case, workloads: Mapping[str, Workload]) -> str:
    known = workloads[case.workload].preset_of(case.shape) if case.workload in workloads else None
    count = _count(record.prediction.parameters or 0)
    name = f"{known} ({count})" if known else count
    return f"{name}, {case.shape.get('batch', 1)} x {case.shape.get('tokens', 0):,} tokens"


def _count(parameters: int) -> str:
    """Write a number of parameters in billions, of small models in millions or whole: 0.6B, 12.3M, 9,216."""
    if parameters >= 5 * 10**7:
        return f"{parameters / 1e9:.1f}B"
    return f"{parameters / 1e6:.1f}M" if parameters >= 10**5 else f"{parameters:,}"


def _in_memory(predicted: Sequence[tuple[Case, Record]], size: int) -> str:
    """Write the choice for one memory and its peak, or what the leanest takes where nothing fits."""
    machine = Machine(host_bytes=size, device_bytes=size)
    rows = [row_of(case, record, machine) for case, record in predicted]
    if not rows:
        return ""
    advice = of_predictions(rows)
    if advice.chosen is not None:
        return f"{row_name(advice.chosen.case.label)}: {shown(advice.chosen.need_bytes or 0)}"
    row = leanest(rows)
    return "not known" if row is None else f"{none_fits(rows)}; {row_name(row.case.label)} takes {need(row)}"


def _shown(advice: Advice) -> list[PlanRow]:
    """Return the front without the baseline; where no times are known, what fits, the plainest first.

    The choice is always among it: where times are rough it is the plainest, which others may beat.
    """
    rows = advice.front or sorted((row for row in advice.predicted if row.fits), key=preference)
    shown = [row for row in rows if not row.case.is_baseline][:FRONT]
    chosen = advice.chosen
    if chosen is None or chosen.case.is_baseline or chosen in shown:
        return shown
    return [chosen, *shown[: FRONT - 1]]


def _leanest(advice: Advice) -> list[PlanRow]:
    """Return the row that is least too large, where nothing fits; none where that is the baseline."""
    row = leanest(advice.predicted)
    return [] if row is None or row.case.is_baseline else [row]


def _sentence(advice: Advice) -> str:
    count = f"{len(advice.predicted)} combinations{' that were tried' if advice.searched else ''}"
    limit = advice.predicted[0].limit_bytes
    if advice.chosen is None:
        return _why_none(advice, count)
    if advice.rows:
        return _measured_sentence(advice, count)
    row, plain = advice.chosen, advice.predicted[0]
    sentence = f"Use **{escaped(row.case.label)}**: of {count} it is predicted to be the {advice.word} that fits"
    sentence += f" {shown(limit)}" if limit is not None else ""
    sentence += f", with a peak of {shown(row.peak_bytes or 0)}"
    sentence += f" and of at most {shown(row.at_most_bytes)}" if row.at_most_bytes is not None else ""
    sentence += f" ({need(row)})" if row.need_bytes not in (row.at_most_bytes, row.peak_bytes) else ""
    if not row.case.is_baseline and plain.peak_bytes:
        sentence += f", {(row.peak_bytes or 0) / plain.peak_bytes:.2f} x the baseline's"
        sentence += f", and {ratio:.2f} x its time" if (ratio := row.time_ratio(plain)) else ""
    if on_host := row.prediction.predicted_host_bytes:
        sentence += f"; of the host it takes {shown(on_host)}"
    return sentence + ". Nothing was measured."


def _why_none(advice: Advice, count: str) -> str:
    if advice.rows:
        return f"Of {count} none that was measured gave a right answer within what it may use."
    plain = advice.predicted[0]
    if plain.limit_bytes is None:
        unknown = "the memory of the GPU is not known, so give --gpu or --gpu-memory"
        return f"Of {count} it is not known which fit: {unknown}."
    if all(row.need_bytes is None for row in advice.predicted):
        return f"None of {count} can be predicted: {with_full_stop(with_code(plain.reason or 'no reason is known'))}"
    return f"Of {count}, {escaped(shortfall(advice.predicted))}."


def _measured_sentence(advice: Advice, count: str) -> str:
    row, *others = advice.usable
    plain = next((each for each in advice.rows if each.case.is_baseline), None)
    tried = sum(not each.case.is_control for each in advice.rows)
    fastest = all(_faster(row, each) for each in others)
    timed = _interval(row) is not None
    untimed = "one that fits (so few rounds do not say which is the fastest)"
    best = "the fastest that fits" if fastest else "among the fastest that fit" if timed else untimed
    sentence = f"Use **{escaped(row.label)}**: of the {tried} that were measured of {count} it was {best}"
    if row.case.budget_bytes and advice.chosen is not None:
        sentence += f" {shown(advice.chosen.limit_bytes or row.case.budget_bytes)}"
    sentence += f", with a peak of {mib(row.peak_bytes)} MiB and {_milliseconds(row.step_seconds or 0.0)} ms a step"
    if plain is not None and row is not plain:
        sentence += f"; against the baseline {cost(row)}" if plain.status == "ok" else f"; the baseline {_ended(plain)}"
    sentence += f". Its answer is {escaped(row.answer)}." if row.answer else "."
    second = next((each for each in others if not each.case.is_baseline), None)
    return sentence + (f" Next best: {escaped(second.label)}, {cost(second)}." if second is not None and timed else "")


def _ended(plain: Row) -> str:
    """Say how the baseline ended, where it has no figures to compare with."""
    return "does not fit" if plain.status in (*OUT_OF_MEMORY, "skipped_guard") else f"did not finish: {plain.status}"


def _faster(row: Row, other: Row) -> bool:
    """Check whether the intervals of two times, both as multiples of the baseline's, tell that a row is faster."""
    own, its = _interval(row), _interval(other)
    return own is not None and its is not None and own < its


def _interval(row: Row) -> Interval | None:
    """Return where the time of a row lies; None where too little was timed to tell."""
    if row.case.is_baseline:
        return Interval(1.0, 1.0)
    return row.speed.inferred if row.speed is not None else None


def _milliseconds(seconds: float) -> str:
    """Write a time in milliseconds, with three digits where it is short."""
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"


def _measured(rows: Sequence[Row]) -> str:
    cells = [
        (
            row_name(row.label),
            mib(row.peak_bytes) if row.status == "ok" else row.status,
            mib(row.predicted_bytes),
            mib(row.at_most_bytes),
            _milliseconds(row.step_seconds) if row.step_seconds else "",
            escaped(row.answer or ""),
        )
        for row in rows
    ]
    headers = ("strategy", "peak MiB", "predicted", AT_MOST, "ms a step", "answer")
    aligned = ("left", "right", "right", "right", "right", "left")
    return tabulate(cells, headers, tablefmt="pipe", colalign=aligned, disable_numparse=True)


def _parts(whole: PlanRow, predicted: Sequence[PlanRow]) -> str:
    """Write what each member of the choice contributes: the predicted peak and time without it."""
    if len(whole.case.strategies) < 2:
        return ""
    by_label = {row.case.label: row for row in predicted}
    contributions = []
    for at, member in enumerate(whole.case.strategies):
        rest = whole.case.strategies[:at] + whole.case.strategies[at + 1 :]
        other = by_label.get(" + ".join(map(str, rest)) or "baseline")
        if other is None or other.peak_bytes is None or whole.peak_bytes is None:
            continue
        ratio = whole.time_ratio(other)
        time = f", {ratio:.2f} x the time" if ratio else ""
        more = other.peak_bytes - whole.peak_bytes
        contributions.append(f"{escaped(str(member))} saves {shown(more) if more > 0 else 'nothing'}{time}")
    return f"As predicted, {'; '.join(contributions)}." if contributions else ""


def _lines(row: PlanRow) -> str:
    """Write the choice as an entry of a suite's `strategies`."""
    entries = [{each.name: dict(each.knobs)} if each.knobs else each.name for each in row.case.strategies]
    entries = entries or [CONTROL]
    entry = entries if len(entries) > 1 else entries[0]
    if isinstance(entry, str):
        return f"  - {entry}\n"  # of a list of names the library makes one line, which goes below no other entry
    return "".join(
        f"  {line}\n" for line in yaml.safe_dump([entry], default_flow_style=None, sort_keys=False).splitlines()
    )
