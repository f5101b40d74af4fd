"""What each member of a combination takes away, one after the other, from the baseline's peak to the whole's."""

import itertools
import re
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from harness.report.charts.style import GREEN, GREY, MIB, RED, altair, titled, tooltip
from harness.report.export import Figures

BAR = 28
ON_RANKS = re.compile(r" on \d+ ranks$")
Members = tuple[str, ...]


def contributions(rows: Sequence[Figures]) -> Any:
    """Draw the largest combination as a waterfall; None where a row between the baseline and it is missing."""
    path = stepwise(rows)
    if not path:
        return None
    steps = list(path)
    whole = steps[-1]
    peaks = {members: row["peak_bytes"] for members, row in path.items()}
    alt = altair()
    values = [_bar("baseline", 0, peaks[()], "whole")]
    for before, after in itertools.pairwise(steps):
        (member,) = (Counter(after) - Counter(before)).elements()
        name = f"+ {member}" + " again" * before.count(member)
        kind = "less" if peaks[after] <= peaks[before] else "more"
        values.append(_bar(name, peaks[before], peaks[after], kind))
    ranks = path[whole]["ranks"]
    together = f"all together on {ranks} ranks" if ranks > 1 else "all together"
    values.append(_bar(together, 0, peaks[whole], "whole"))
    order = [value["step"] for value in values]
    y = alt.Y("step:N", sort=order, title=None)
    colors = alt.Scale(domain=["whole", "less", "more"], range=[GREY, GREEN, RED])
    bars = alt.Chart(alt.Data(values=values)).mark_bar(height=BAR - 8).encode(
        y=y, x=alt.X("low:Q", title="peak MiB"), x2=alt.X2("high:Q"),
        color=alt.Color("kind:N", legend=None, scale=colors), tooltip=tooltip("step:N", "text:N"),
    )  # fmt: skip
    texts = alt.Chart(alt.Data(values=values)).mark_text(align="left", dx=4, fontSize=11)
    return titled(
        alt.layer(bars, texts.encode(y=y, x=alt.X("high:Q"), text=alt.Text("text:N"))), rows, height=alt.Step(BAR)
    )


def stepwise(rows: Sequence[Figures]) -> dict[Members, Figures]:
    """Return the rows from the baseline to the largest combination, each with one member more; or none.

    Rows on several ranks are those of one number of them, the smallest that has the largest combination.
    """
    numbers = sorted({row["ranks"] for row in rows if row["ranks"] > 1}) or [1]
    return max((_stepwise([row for row in rows if row["ranks"] in (1, number)]) for number in numbers), key=len)


def _stepwise(rows: Sequence[Figures]) -> dict[Members, Figures]:
    usable = [row for row in rows if row["status"] == "ok" and row["peak_bytes"]]
    known = {_members(row["strategy"]): row for row in sorted(usable, key=lambda row: int(row["ranks"]))}
    if () not in known:
        return {}
    largest = max(map(len, known))
    ways = (chain(members, known) for members in known if len(members) == largest > 1)
    return {members: known[members] for members in next(filter(None, ways), ())}


def chain(whole: Members, known: Collection[Members]) -> list[Members] | None:
    """Return rows from the baseline to the whole, each with one member more; None where there is no such way.

    Members join in the order in which they are applied wherever the rows allow it.
    """
    if not whole:
        return [()]
    for at in reversed(range(len(whole))):
        rest = (*whole[:at], *whole[at + 1 :])
        if rest in known and (before := chain(rest, known)) is not None:
            return [*before, whole]
    return None


def _members(label: str) -> Members:
    """Return what is applied in a row; on how many ranks it ran is no part of that."""
    return () if label == "baseline" else tuple(ON_RANKS.sub("", label).split(" + "))


def _bar(step: str, before: int, after: int, kind: str) -> Figures:
    low, high = sorted((before / MIB, after / MIB))
    text = f"{after / MIB:,.0f}" if kind == "whole" else f"{(after - before) / MIB:+,.0f}"
    return {"step": step, "low": low, "high": high, "kind": kind, "text": text}
