"""One offline page of results: the table, sortable and filterable, and the charts, with all that decided a verdict."""

import json
import shlex
from collections.abc import Sequence
from typing import Any

from harness.report import charts
from harness.report.export import Figures
from harness.report.fit import LIMITS, Limits
from harness.verdicts.claims import Answer
from harness.verdicts.documents import Documents, Sentence

BUNDLED = "window.vegaEmbed = vegaEmbed;"


def html(
    title: str,
    rows: Sequence[Figures],
    answers: dict[str, list[Answer]],
    limits: dict[str, list[Limits]] | None = None,
    documents: Documents | None = None,
    sentences: Sequence[Sentence] = (),
) -> str:
    """Write the page; `answers` are those to the claims of each suite, `limits` what `harness fit` found for it.

    With `documents`, the `sentences` of each stand first, with what was measured.

    Needs neither network nor server. Raises PicturesError where jinja2, altair or vl-convert is not installed.
    """
    charts.altair()
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError:
        raise charts.PicturesError("a page needs the package jinja2: pip install '.[pictures]'") from None
    import vl_convert

    others = [name for name, entries in (*answers.items(), *(limits or {}).items()) if entries]
    suites = list(dict.fromkeys([*(row["suite"] for row in rows), *others]))
    drawn = {suite: charts.of_rows([row for row in rows if row["suite"] == suite]) for suite in suites}
    specs = {suite: {name: chart.to_dict() for name, chart in each.items()} for suite, each in drawn.items()}
    loader = PackageLoader("harness.report", "")
    page = Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template("page.html.j2")
    return page.render(
        title=title,
        suites=suites,
        specs={suite: list(each) for suite, each in specs.items()},
        answers={suite: [_claim(each) for each in answers.get(suite, [])] for suite in suites},
        limits={suite: (limits or {}).get(suite, []) for suite in suites},
        limit_headers=LIMITS,
        documents=documents.documents if documents is not None else {},
        sentences=sentences,
        rows=_embedded([_shown(row) for row in rows]),
        charts=_embedded(specs),
        library=vl_convert.javascript_bundle(BUNDLED).replace("</script", "<\\/script"),
    )


def _embedded(value: Any) -> str:
    """Write JSON that may stand within a script element: no tag can begin in it."""
    text = json.dumps(value, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _claim(answer: Answer) -> dict[str, str]:
    claim = answer.claim
    return {"id": claim.id, "says": claim.says, "verdict": answer.verdict, "told": answer.reason, "that": claim.that}


def _shown(row: Figures) -> Figures:
    """Return what the table shows of a row, and the command that measures it again."""
    left_out = ("shape", "phases")
    only = "" if row["strategy"] == "baseline" else f" -k {shlex.quote(row['strategy'])}"
    again = f"harness run suites/{row['suite']}.yaml --place {row['place']}{only}"
    return {name: value for name, value in row.items() if name not in left_out} | {"again": again}
