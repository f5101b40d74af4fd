"""One offline page of results: the answer first, then every suite, with all that decided a verdict."""

import json
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.report import charts, first
from harness.report.charts.style import PARTS
from harness.report.export import Figures
from harness.report.fit import Limits
from harness.report.words import residual
from harness.verdicts.claims import Answer
from harness.verdicts.documents import Documents, Judgement
from harness.verdicts.remedies import Remedy

BUNDLED = "window.vegaEmbed = vegaEmbed;"
JOINT = re.compile(r"(?<=[_(])")
"""Where a long name may be broken."""
MOST_BYTES = 1 << 20
"""What the pictures of a page may take; those of later suites are left to `harness report --pictures`."""
WORDS = {
    "suite": "suite", "comparison": "comparison", "place": "place", "strategy": "strategy", "status": "status",
    "verdict": "verdict", "answer": "answer", "memory": "memory", "word": "time", "phase": "peak_phase",
    "notes": "notes", "reasons": "reasons", "why": "answer_reason", "flags": "flags", "machine": "machine",
    "commit": "commit",
}  # fmt: skip
"""Texts of a row by their name on the page, and in its figures."""
BYTES = {"peak": "peak_bytes", "host": "host_bytes", "predicted": "predicted_bytes", "atMost": "at_most_bytes",
         "floor": "floor_bytes"}  # fmt: skip
OWN = frozenset(["data", "specs", "words", "place", "against", "answer", "wins", "count", "all", "documents", "beside"])
"""Names that parts of the page have, beside its suites."""
RATIOS = {"ratio": "peak_ratio", "native": "native_peak_ratio", "time": "time_ratio", "low": "time_ratio_low",
          "high": "time_ratio_high", "coverage": "at_most_coverage", "residualRatio": "residual_ratio"}  # fmt: skip


@dataclass(frozen=True)
class About:
    """What stands around the rows: what to use, the answer of each comparison, what each strategy is against.

    `answers` are sentences by suite and comparison, `origins` and `titles` are by suite. `stale` are suites whose code
    has changed since. `advice` is what to use in which memory: rows of cells, the headers first, of `advice_origin`.
    `elsewhere` is the code that asks other libraries for a row, by place and strategy. `asked` are the words that a
    command line ran comparisons by, as `answers` has those; where they are not known the name of the suite stands for
    them.
    """

    use: Sequence[Remedy] = ()
    answers: Mapping[tuple[str, str], str] = field(default_factory=dict)
    against: Mapping[str, str] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    titles: Mapping[str, str] = field(default_factory=dict)
    origin: str = ""
    stale: Collection[str] = ()
    advice_origin: str = ""
    advice: Sequence[Sequence[str]] = ()
    elsewhere: Mapping[tuple[str, str], str] = field(default_factory=dict)
    asked: Mapping[tuple[str, str], str] = field(default_factory=dict)


def html(
    title: str,
    rows: Sequence[Figures],
    answers: dict[str, list[Answer]],
    limits: dict[str, list[Limits]] | None = None,
    documents: Documents | None = None,
    judgements: Sequence[Judgement] = (),
    about: About | None = None,
) -> str:
    """Write the page; `answers` are those to the claims of each suite, `limits` what `harness fit` found for it.

    Needs neither network nor server. Raises PicturesError where jinja2, altair or vl-convert is not installed.
    """
    charts.altair()
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup, escape
    except ImportError:
        raise charts.PicturesError("a page needs the package jinja2: install it, or the extra 'pictures'") from None
    import vl_convert

    about = about or About()
    others = [name for name, entries in (*answers.items(), *(limits or {}).items()) if entries]
    suites = list(dict.fromkeys([*(row["suite"] for row in rows), *others]))
    by_suite = {suite: [row for row in rows if row["suite"] == suite] for suite in suites}
    specs, left_out = _specs(by_suite)
    loader = PackageLoader("harness.report", "")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    environment.filters["breakable"] = lambda name: Markup(JOINT.sub("<wbr>", str(escape(name))))
    return environment.get_template("page.html.j2").render(
        title=title,
        origin=about.origin,
        suites=suites,
        anchors={suite: f"suite-{suite}" if suite in OWN else suite for suite in suites},
        counts={suite: len(members) for suite, members in by_suite.items()},
        titles={suite: about.titles.get(suite, "") for suite in suites},
        origins={suite: about.origins.get(suite, "") for suite in suites},
        use=[_used(remedy, about.stale) for remedy in about.use],
        advice=about.advice,
        advice_origin=about.advice_origin,
        use_headers=first.USE,
        pictures=_front(by_suite, specs),
        specs={suite: list(specs.get(suite, {})) for suite in suites},
        left_out=left_out,
        answers={suite: [_claim(each) for each in answers.get(suite, [])] for suite in suites},
        limits={suite: (limits or {}).get(suite, []) for suite in suites},
        documents=documents.documents if documents is not None else {},
        judgements=judgements,
        rows=_embedded(columns(rows, about)),
        charts=_embedded(specs),
        library=vl_convert.javascript_bundle(BUNDLED).replace("</script", "<\\/script"),
    )


def columns(rows: Sequence[Figures], about: About) -> dict[str, Any]:
    """Return what the page shows of rows, column by column, every text once; ratios to nine digits."""
    texts: dict[str, int] = {"": 0}

    def number_of(text: str | None) -> int:
        return texts.setdefault(text or "", len(texts))

    words = {name: [number_of(row[figure]) for row in rows] for name, figure in WORDS.items()}
    words["against"] = [number_of(_against(row["strategy"], about.against)) for row in rows]
    words["elsewhere"] = [number_of(about.elsewhere.get((row["place"], row["strategy"]))) for row in rows]
    words["asked"] = [
        number_of(about.asked.get((row["suite"], row["comparison"])) or shlex.quote(row["suite"])) for row in rows
    ]
    words["residual"] = [number_of(_residual(row)) for row in rows]
    numbers: dict[str, list[float | None]] = {name: [row[figure] for row in rows] for name, figure in BYTES.items()}
    numbers |= {name: [_rounded(row[figure]) for row in rows] for name, figure in RATIOS.items()}
    numbers["rounds"] = [row["rounds"] for row in rows]
    return {
        "count": len(rows),
        "words": words,
        "numbers": numbers,
        "composition": [[[number_of(phase), size] for phase, size in row["composition"].items()] for row in rows],
        "rounds": [[_rounded(ratio) for ratio in row["round_ratios"]] for row in rows],
        "answers": {f"{suite}\n{comparison}": text for (suite, comparison), text in about.answers.items()},
        "texts": list(texts),
        "colours": dict(PARTS),
    }


def _residual(row: Figures) -> str:
    return residual(row["residual_bytes"], row["residual_ratio"], row["peak_bytes"], row["predicted_bytes"])


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.9g}")


def _against(label: str, against: Mapping[str, str]) -> str:
    """Return what the strategies of a row are against, each once."""
    names = (member.partition("(")[0] for member in label.partition(" on ")[0].split(" + "))
    return "; ".join(dict.fromkeys(against[name] for name in names if name in against))


def _specs(by_suite: Mapping[str, Sequence[Figures]]) -> tuple[dict[str, dict[str, Any]], dict[str, int]]:
    """Return the charts of each suite as far as they fit into the page, and how many of each are left out."""
    specs: dict[str, dict[str, Any]] = {}
    left_out = dict.fromkeys(by_suite, 0)
    size = 0
    for suite, rows in by_suite.items():
        for name, draw in charts.drawings(rows):
            if size >= MOST_BYTES:
                left_out[suite] += 1
                continue
            spec = charts.spec(draw)
            size += len(json.dumps(spec))
            specs.setdefault(suite, {})[name] = spec
    return specs, left_out


def _front(by_suite: Mapping[str, Sequence[Figures]], specs: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Choose the two pictures that the page begins with: memory against time, and growth with length.

    Of several, those of the suite with the most time rounds, which is the one that its owner cares for most.
    """
    chosen = []
    for kind in ("tradeoff", "lengths"):
        drawn = [(suite, name) for suite, each in specs.items() for name in each if name.startswith(kind)]
        best = max(drawn, key=lambda each: max(row["rounds"] or 0 for row in by_suite[each[0]]), default=None)
        chosen += [best] if best is not None else []
    return chosen


def _used(remedy: Remedy, stale: Collection[str]) -> dict[str, Any]:
    """Return the cells of what to use, as the first page has them, and which one leads to a suite."""
    suite = remedy.best.folder
    cells = [
        remedy.sets,
        remedy.best.row.label,
        *first.effect(remedy),
        f"{suite}{first.length(remedy.best)}{', stale' * (suite in stale)}",
        first.helps(remedy, lambda judged: f"{judged.folder}{first.length(judged)}"),
    ]
    return {"cells": cells, "link": first.USE.index("measured in"), "suite": suite}


def _embedded(value: Any) -> str:
    """Write JSON that may stand within a script element: no tag can begin in it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _claim(answer: Answer) -> dict[str, str]:
    claim = answer.claim
    return {"id": claim.id, "says": claim.says, "verdict": answer.verdict, "reason": answer.reason, "that": claim.that}
