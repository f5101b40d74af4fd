"""Advice as markdown: one paragraph, one table, and the lines to paste into a suite."""

from collections.abc import Sequence

import yaml
from tabulate import tabulate

from harness.report.plan import grid
from harness.report.table import escaped, heading, mib
from harness.suite.units import shown
from harness.verbs.advise import Advice
from harness.verbs.plan import Foreseen, shortfall
from harness.verdicts.judge import Row

FRONT = 8
"""How many rows of the front are shown."""


def text(found: Sequence[Advice]) -> str:
    """Write what to use for each group, why, and how to ask for it."""
    pieces = []
    for advice in found:
        pieces.append(f"## {escaped(heading(advice.case))}")
        pieces.append(_sentence(advice))
        pieces.append(_measured(advice.rows) if advice.rows else grid([advice.foreseen[0], *_shown(advice)]))
        if advice.choice is not None:
            pieces += [line for line in (_parts(advice),) if line]
            pieces.append(f"```yaml\nstrategies:\n{_lines(_chosen(advice))}```")
    return "\n\n".join(pieces) + "\n"


def _shown(advice: Advice) -> list[Foreseen]:
    """Give the front, with the choice on it, without the baseline."""
    return [row for row in advice.front if row.case.strategies][:FRONT]


def _chosen(advice: Advice) -> Foreseen:
    return next(row for row in advice.foreseen if row.case.label == advice.choice)


def _sentence(advice: Advice) -> str:
    count = len(advice.foreseen)
    limit = advice.foreseen[0].limit_bytes
    if advice.choice is None:
        if not any(row.fits for row in advice.foreseen) and limit is not None:
            return f"Of {count} combinations, {escaped(shortfall(advice.foreseen))}."
        return f"Of {count} combinations none that was measured gave a right answer within its budget."
    if advice.rows:
        return _measured_sentence(advice, count)
    row, plain = _chosen(advice), advice.foreseen[0]
    told = f"Use **{escaped(row.case.label)}**: of {count} combinations it is predicted to be the fastest that fits"
    told += f" {shown(limit)}" if limit is not None else ""
    told += f", with a peak of {shown(row.peak_bytes or 0)}"
    if row.case.strategies and plain.peak_bytes and row.seconds and plain.seconds:
        told += f", {(row.peak_bytes or 0) / plain.peak_bytes:.2f} x the baseline's"
        told += f", and {row.seconds / plain.seconds:.2f} x its time"
    return told + ". Nothing was measured."


def _measured_sentence(advice: Advice, count: int) -> str:
    done = sorted((row for row in advice.rows if row.step_seconds), key=lambda row: row.step_seconds or 0.0)
    row = next(row for row in done if row.label == advice.choice)
    plain = next((each for each in advice.rows if not each.case.strategies), None)
    told = f"Use **{escaped(row.label)}**: of {count} combinations it was the fastest that fits"
    if row.case.budget_bytes:
        told += f" {shown(row.case.budget_bytes)}"
    told += f", with a peak of {mib(row.peak_bytes)} MiB and {(row.step_seconds or 0.0) * 1e3:,.0f} ms a step"
    if plain is not None and row.case.strategies:
        if plain.peak_bytes and plain.status == "ok":
            told += f" ({row.peak_ratio:.2f} x the baseline's memory"
            told += f", {row.speed.ratio:.2f} x its time)" if row.speed is not None else ")"
        else:
            told += "; the baseline does not fit"
    told += f". Its answer is {escaped(row.answer)}." if row.answer else "."
    others = [each for each in done if each.label != advice.choice and each.case.strategies and each.label != "nothing"]
    if others:
        ratio = (others[0].step_seconds or 0.0) / (row.step_seconds or 1.0)
        told += f" Next best: {escaped(others[0].label)}, {ratio:.2f} x its time, {mib(others[0].peak_bytes)} MiB."
    return told


def _measured(rows: Sequence[Row]) -> str:
    cells = [
        (
            f"`{escaped(row.label)}`" if row.case.strategies else "baseline",
            mib(row.peak_bytes) if row.status == "ok" else row.status,
            mib(row.predicted_bytes),
            f"{row.step_seconds * 1e3:,.0f}" if row.step_seconds else "",
            escaped(row.answer or ""),
        )
        for row in rows
    ]
    headers = ("strategy", "peak MiB", "predicted", "ms a step", "answer")
    aligned = ("left", "right", "right", "right", "left")
    return tabulate(cells, headers, tablefmt="pipe", colalign=aligned, disable_numparse=True)


def _parts(advice: Advice) -> str:
    """Say what each member of the choice contributes: the predicted peak and time without it."""
    whole = _chosen(advice)
    if len(whole.case.strategies) < 2:
        return ""
    by_label = {row.case.label: row for row in advice.foreseen}
    told = []
    for at, member in enumerate(whole.case.strategies):
        rest = whole.case.strategies[:at] + whole.case.strategies[at + 1 :]
        other = by_label.get(" + ".join(map(str, rest)) or "baseline")
        if other is None or other.peak_bytes is None or whole.peak_bytes is None:
            continue
        time = f", {whole.seconds / other.seconds:.2f} x the time" if whole.seconds and other.seconds else ""
        more = other.peak_bytes - whole.peak_bytes
        told.append(f"{escaped(str(member))} saves {shown(more) if more > 0 else 'nothing'}{time}")
    return f"As predicted, {'; '.join(told)}." if told else ""


def _lines(row: Foreseen) -> str:
    """Write the choice as an entry of a suite's `strategies`."""
    entries = [{a.name: dict(a.knobs)} if a.knobs else a.name for a in row.case.strategies] or ["nothing"]
    entry = entries if len(entries) > 1 else entries[0]
    return "".join(
        f"  {line}\n" for line in yaml.safe_dump([entry], default_flow_style=None, sort_keys=False).splitlines()
    )
