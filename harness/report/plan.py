"""A plan as markdown: what each case is predicted to take."""

from collections.abc import Mapping, Sequence

from tabulate import tabulate

from harness.report.memory import device_grid
from harness.report.text import escaped, row_name, with_code, with_full_stop
from harness.report.words import AT_MOST, PREDICTED, SEGMENTS, mib, phase_name, sureness, titles_of
from harness.suite.units import shown
from harness.verbs.advise import of_predictions
from harness.verbs.plan import TIMED, PlanRow, beyond_host, need
from harness.verbs.remedies import Remedy, all_too_large, shortfall

HEADERS = ("strategy", PREDICTED, AT_MOST, "peak in", "x floor", "of baseline", "step time", "answer", "fits")
ALIGNED = ("left", "right", "right", "left", "right", "right", "right", "left", "left")
UNTIMED = {
    "torch": "- step time: shown only where its operators were timed on this machine while nothing else ran; each plan "
    "times some more",
    "jax": "- step time: not known in JAX, which compiles a step whole, so that no operator is timed alone: `harness "
    "run` times steps",
}
"""Why rows have no time of a step, by backend."""
UNBOUNDED = (
    "- without a bound: too few cases of this kind were measured, or its data decide; "
    "what fits is judged by the prediction"
)
NOT_FUSED = "this card has no fused attention in bfloat16, so that all scores are kept"
NO_HOST = "; memory of the host is not judged: --memory names it"
BETWEEN_RANKS = "- several GPUs: what NCCL takes of each beside torch is not counted; others report 0.5 to 1.6 GB"
SEVERAL = 3
OPTIONS = {"cpu": "--memory or --budget", "cuda": "--gpu, --gpu-memory or --budget"}
"""What names the memory that a case on each device may use."""


def tables(comparisons: Sequence[Sequence[PlanRow]], named_by: Mapping[str, str] = OPTIONS) -> list[str]:
    """Write the table of each comparison, and below it that nothing fits where that is so.

    `named_by` are the options or arguments that name what a case on each device may use.
    """
    title_of = titles_of(rows[0].case for rows in comparisons)
    return [_table(rows, title_of[rows[0].case.comparison_key], named_by) for rows in comparisons]


def _table(rows: Sequence[PlanRow], title: str, named_by: Mapping[str, str]) -> str:
    limit = rows[0].limit_bytes
    unknown = f"its memory is not known: give {named_by[rows[0].case.place.device]}"
    pieces = [f"## {escaped(title)}{_parameters(rows)}; {unknown if limit is None else _room(rows[0])}"]
    if all(row.peak_bytes is None for row in rows):
        pieces.append(
            f"Not predicted: {with_full_stop(with_code('; '.join(dict.fromkeys(row.reason or '' for row in rows))))}"
        )
    else:
        pieces += [grid(rows), *device_grid(rows), *_remarks(rows)]
        if all_too_large(rows):
            pieces.append(f"{escaped(shortfall(rows))}.{_effects(rows)}")
        else:
            pieces += _change(rows)
    return "\n\n".join(pieces) + "\n"


def _parameters(rows: Sequence[PlanRow]) -> str:
    """Say how many parameters the model has, where that is known."""
    count = next((row.prediction.parameters for row in rows if row.prediction.parameters), None)
    return f", {count:,} parameters" if count else ""


def _room(row: PlanRow) -> str:
    """Say what a row may use; of one with a budget, whether that is it or the memory that was named."""
    room = f"may use {shown(row.limit_bytes or 0)}"
    if row.case.budget_bytes is None:
        return room
    return f"{room}, by the memory that is named" if row.by_memory else f"{room}, by its budget"


def _whose_room(row: PlanRow) -> str:
    """Say which row has a limit of its own; of one on ranks, that each of them has it."""
    if row.case.ranks == 1:
        return f"{escaped(row.case.label)}:"
    shared = "they share the host, so each" if row.case.place.device == "cpu" else "each"
    return f"on {row.case.ranks} ranks: {shared}"


def _change(rows: Sequence[PlanRow]) -> list[str]:
    """Return which row to take where the baseline does not fit and others do; nothing elsewhere."""
    best = of_predictions(rows)
    if best.chosen is None or best.chosen.case.is_baseline or rows[0].fits is not False:
        return []
    answer = best.chosen.prediction.declared_answer
    what = f"it takes {need(best.chosen)}" + (f", and its answer is {answer}" if answer else "")
    return [f"The baseline does not fit; the {best.word} that does is **{escaped(best.chosen.case.label)}**: {what}."]


def halved(remedies: Sequence[Remedy]) -> str:
    """Write what half of a size would bring; an empty text where there are no remedies."""
    sizes = [f"{each.change} takes {shown(each.need_bytes)}{' and fits' if each.fits else ''}" for each in remedies]
    return f"The leanest with half of a size: {', '.join(sizes)}.\n" if sizes else ""


def grid(rows: Sequence[PlanRow]) -> str:
    """Write one row for each case; ratios are to the baseline among them."""
    baseline = next((row for row in rows if row.case.is_baseline), None)
    cells = [_cells(row, baseline) for row in rows]
    return tabulate(cells, HEADERS, tablefmt="pipe", colalign=ALIGNED, disable_numparse=True)


def _cells(row: PlanRow, baseline: PlanRow | None) -> tuple[str, ...]:
    other = None if row.case.is_baseline else baseline
    peak, floor = row.peak_bytes, row.floor_bytes
    ratio = row.time_ratio(other) if other else None
    return (
        row_name(row.case.label),
        mib(peak),
        mib(row.at_most_bytes),
        escaped(phase_name(row.phase)),
        f"{peak / floor:.1f}" if peak and floor else "",
        f"{peak / other.peak_bytes:.2f} x" if peak and other and other.peak_bytes else "",
        f"{ratio:.2f} x" if ratio else "",
        row.prediction.declared_answer or "" if other else "",
        "" if row.fits is None else "yes" if row.fits else "NO",
    )


def _remarks(rows: Sequence[PlanRow]) -> list[str]:
    remarks = basis(rows)
    remarks += [f"- {escaped(row.case.label)}: {with_code(row.reason)}" for row in rows if row.reason]
    remarks += [f"- {escaped(row.case.label)}: {beyond_host(row)}" for row in rows if row.over_host_bytes]
    if any(row.seconds and row.timed < TIMED for row in rows):
        remarks.append(UNTIMED[rows[0].case.place.backend])
    return ["\n".join(remarks)] if remarks else []


def basis(rows: Sequence[PlanRow]) -> list[str]:
    """Say how sure the bounds of rows are, by what rows are judged, for which card, and among how many ranks."""
    unbounded = any(row.at_most_bytes is None and row.fits is not None for row in rows)
    remarks = [sureness(row.coverage for row in rows), UNBOUNDED if unbounded else "", _by_segments(rows)]
    remarks += [f"- gpu: {escaped(supposed)}" for supposed in dict.fromkeys(row.supposed for row in rows) if supposed]
    if wide := [escaped(row.case.label) for row in rows if row.without_fused_bfloat16]:
        remarks.append(f"- {', '.join(wide)}: {NOT_FUSED}")
    others = [row for row in rows if row.limit_bytes is not None and row.limit_bytes != rows[0].limit_bytes]
    remarks += dict.fromkeys(f"- {_whose_room(row)} {_room(row)}" for row in others)
    return [remark for remark in (*remarks, *_of_ranks(rows)) if remark]


def _of_ranks(rows: Sequence[PlanRow]) -> list[str]:
    """Say which of rows on several ranks are not divided, and what the others take beside their predictions."""
    if all(row.case.ranks == 1 for row in rows):
        return []
    whole = [escaped(row.case.label) for row in rows if row.case.ranks == 1]
    undivided = f"- not divided, but all of it on one rank: {', '.join(whole)}" if whole else ""
    return [undivided, "" if rows[0].case.place.device == "cpu" else BETWEEN_RANKS]


def _by_segments(rows: Sequence[PlanRow]) -> str:
    """Say by what rows on a GPU in torch are judged."""
    judged = [row for row in rows if row.fits is not None and row.prediction.predicted_reserved_bytes is not None]
    if not judged:
        return ""
    return SEGMENTS + ("" if all(row.host_limit_bytes is not None for row in judged) else NO_HOST)


def _effects(rows: Sequence[PlanRow]) -> str:
    """Write which strategies save most."""
    whole = next((row.peak_bytes for row in rows if row.case.is_baseline), None)
    saved = [(whole - row.peak_bytes, row.case.label) for row in rows if whole and row.peak_bytes]
    best = [(size, label) for size, label in sorted(saved, reverse=True) if size > 0][:SEVERAL]
    if not best:
        return ""
    return f" In order of effect: {', '.join(f'{escaped(label)} saves {shown(size)}' for size, label in best)}."
