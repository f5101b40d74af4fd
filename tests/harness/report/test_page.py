"""The page of results: offline, inert, quick, and looked at in a real browser."""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from html import escape, unescape
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode

import pytest

from harness.records import Applied, Case, Claim
from harness.report import page
from harness.report.words import mib
from harness.verdicts.claims import Answer
from harness.verdicts.judge import Comparison, Row
from harness.verdicts.remedies import JudgedRow, Remedy

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=alert(1)>"
Once = Callable[[str, Callable[[Path], Any]], Any]


@pytest.fixture(scope="module", autouse=True)
def bundled(once: Once, pictures: None) -> Iterator[None]:
    """Bundle the library of pictures once for all pages: that takes seconds, and it is the same in each."""
    import vl_convert

    library = once("library", lambda folder: vl_convert.javascript_bundle(page.BUNDLED))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vl_convert, "javascript_bundle", {page.BUNDLED: library}.__getitem__)
        yield


@pytest.fixture
def committed(reported: Any) -> Path:
    """The page of the committed results."""
    return Path(reported.page)


def row(**changes: Any) -> dict[str, Any]:
    given = {
        "suite": "mine", "comparison": "here", "workload": "decoder", "place": "torch/cpu", "strategy": "baseline",
        "status": "ok", "verdict": "baseline", "answer": "bit_exact", "answer_reason": "", "peak_bytes": 1 << 20,
        "peak_ratio": None, "peak_phase": "loss", "memory": None, "native_peak_ratio": None, "predicted_bytes": 1 << 20,
        "floor_bytes": 1, "host_bytes": None, "at_most_bytes": None, "at_most_coverage": None,
        "residual_bytes": None, "residual_ratio": None,
        "budget_bytes": None, "step_seconds": 1.0, "time_ratio": None, "time_ratio_low": None, "time_ratio_high": None,
        "rounds": None, "time": None, "composition": {}, "round_ratios": [], "ranks": 1, "rank_peaks": [],
        "flags": "", "notes": "", "reasons": "", "machine": "m", "commit": "c", "shape": {"tokens": 64},
        "corpus": "x", "tokenizer": "bytes", "seed": 0, "stand_in": False, "run_utc": "",
    }  # fmt: skip
    return given | changes


def query(asked: dict[str, Any]) -> str:
    return urlencode({name: "" if value is True else value for name, value in asked.items()})


def browser(path: Path, *options: str, **asked: Any) -> "subprocess.CompletedProcess[str]":
    """Open the page at these settings."""
    if BROWSER is None:
        pytest.skip("needs a browser: chromium")
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=6000",
        "--hide-scrollbars",
    ]
    command += ["--enable-logging=stderr", f"--user-data-dir={path.parent / f'profile-{os.getpid()}'}", *options]
    return subprocess.run([*command, f"{path.as_uri()}?{query(asked)}"], capture_output=True, text=True, timeout=120)


def faults(done: "subprocess.CompletedProcess[str]") -> list[str]:
    """Return what the console says is wrong."""
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return [line for line in said if re.search("Uncaught|Error|Refused|violates", line)]


def dom_of(path: Path, **asked: Any) -> str:
    """Return what a browser makes of the page."""
    done = browser(path, "--window-size=1280,1500", "--dump-dom", **asked)
    assert not faults(done), faults(done)
    return done.stdout


FRAME = '<iframe src="{src}" style="border:0;width:{width}px;height:900px"></iframe>'
"""A page in a frame of a width, since a window cannot be as narrow as a phone."""
COLLECT = """<pre id="said"></pre><script>
addEventListener("message", event => document.getElementById("said").append(JSON.stringify(event.data) + "\\n"));
</script>"""


def framed(folder: Path, sources: dict[str, int], *options: str) -> tuple[list[str], list[Any]]:
    """Open pages of a folder, each at its width, in one browser; return its faults, and what the pages' scripts say."""
    path = folder / "frames.html"
    frames = "".join(FRAME.format(src=escape(source), width=width) for source, width in sources.items())
    path.write_text(f"<!doctype html>{frames}{COLLECT}")
    done = browser(path, "--window-size=1400,1000", "--allow-file-access-from-files", "--dump-dom", *options)
    said = done.stdout.split('<pre id="said">')[1].split("</pre>")[0]
    return faults(done), [json.loads(line) for line in unescape(said).split("\n") if line]


def with_script(text: str, script: str) -> str:
    """Return a page that runs a script when all of it is there."""
    head, _, tail = text.rpartition("</body>")
    return f"{head}<script>{script}</script></body>{tail}"


class Small(NamedTuple):
    """A small page, what a link to it asks for, and what reads something of it once it is opened."""

    rows: list[dict[str, Any]]
    about: page.About
    asked: dict[str, Any]
    script: str
    answers: dict[str, list[Answer]]


class Shown(NamedTuple):
    """What a browser makes of a small page, and what its script has read."""

    dom: str
    read: Any


SMALL: list[Small] = []


def small(
    rows: list[dict[str, Any]],
    script: str = "",
    about: page.About | None = None,
    answers: dict[str, list[Answer]] | None = None,
    **asked: Any,
) -> int:
    """Have a small page opened beside all others, and give it a number."""
    SMALL.append(Small(rows, about or page.About(), asked, script, answers or {}))
    return len(SMALL) - 1


SHOW = """
const read = (() => {{{script}}})();
setTimeout(() => {{
  document.querySelectorAll("script").forEach(each => each.remove());  // they are most of a page, and have run
  parent.postMessage([{number}, document.documentElement.outerHTML, read], "*");
}}, 2500);
"""


def opened(folder: Path) -> tuple[list[str], dict[int, Shown]]:
    """Open all small pages in one browser: to start it takes longer. Return its faults, and what it makes of them."""
    sources = {}
    for number, each in enumerate(SMALL):
        text = page.html("mine", each.rows, each.answers, about=each.about)
        text = with_script(text, SHOW.format(number=number, script=each.script))
        (folder / f"{number}.html").write_text(text, encoding="utf-8")
        sources[f"{number}.html?{query(each.asked)}"] = 1280
    try:
        wrong, said = framed(folder, sources)
    except subprocess.TimeoutExpired as hangs:
        return [str(hangs)], {}  # so that not every test waits for it
    return wrong, {number: Shown(dom, read) for number, dom, read in said}


@pytest.fixture
def shown(once: Once) -> dict[int, Shown]:
    """What a browser makes of each small page."""
    if BROWSER is None:
        pytest.skip("needs a browser: chromium")
    wrong, pages = once("small-pages", opened)
    assert not wrong, wrong
    return pages


def lines_of(dom: str) -> list[list[str]]:
    """Return the texts of the cells of each row that is shown."""
    rows = re.findall(r'<tr class="row"[^>]*>(.*?)</tr>', dom, re.S)
    return [
        [unescape(re.sub("<[^>]+>", "", cell)) for cell in re.findall(r"<td[^>]*>(.*?)</td>", line, re.S)]
        for line in rows
    ]


def names_of(dom: str) -> list[str]:
    return [line[0] for line in lines_of(dom)]


def written(folder: Path, rows: list[dict[str, Any]], **around: Any) -> Path:
    path = folder / "page.html"
    path.write_text(page.html("mine", rows, {}, **around), encoding="utf-8")
    return path


@pytest.mark.long
def test_the_page_of_the_committed_suites_is_small_and_asks_nobody(committed: Path) -> None:
    text = committed.read_text()
    assert len(text.encode()) < 5 << 20
    assert "default-src 'none'" in text
    assert "C8 16 GiB" in text, "claims about limits, which have no rows"
    assert "longest tokens in 16 GiB" in text, "the limits themselves"
    assert "What documents say" in text and "Python lists of overlapping windows blow" in text
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//""", text.split("<script>")[0])


def test_it_begins_with_the_answer_and_two_pictures(committed: Path) -> None:
    dom = dom_of(committed)
    body = dom.split("<main>")[1].split('id="all"')[0]
    assert body.index("What sets your peak") < body.index("What to use in which memory")
    assert body.index("What to use in which memory") < body.index("Memory against time")
    assert body.index("Memory against time") < body.index("What documents say")
    advice = body.partition("What to use in which memory")[2].partition("</table>")[0]
    assert "qwen3-4b (4.0B), 1 x 4,096 tokens" in advice and "80 GiB GPU" in advice and "Predicted 20" in advice
    assert "the logits of the loss" in body
    assert re.findall('data-chart="([a-z]+)', body) == ["tradeoff", "lengths"]
    assert body.count('class="marks"') == 2, "both are drawn"


@pytest.mark.parametrize("stale", [True, False])
def test_what_to_use_says_where_it_is_of_other_code_and_where_it_does_not_help(stale: bool) -> None:
    case = Case(workload="decoder", shape={"tokens": 64}, place="torch/cpu", corpus="x", tokenizer="bytes")
    own = case.model_copy(update={"strategies": (Applied(name="cut"),)})
    judged = [
        JudgedRow("mine", Comparison(case, ()), Row(own, status="ok", peak_ratio=0.5, answer="reassociated")),
        JudgedRow("other", Comparison(case, ()), Row(own, status="ok", peak_ratio=1.0, answer="reassociated")),
    ]
    about = page.About(
        [Remedy("the logits", "torch", judged[0], (judged[1],), 2, True)], stale={"mine"} if stale else ()
    )
    text = page.html("mine", [row(suite="mine")], {}, about=about)
    assert (">mine, 64 tokens, stale<" in text) == stale and (">mine, 64 tokens<" in text) != stale
    assert ">1 of 2; not in other, 64 tokens<" in text


def test_texts_of_suites_and_plugins_are_inert() -> None:
    claim = Answer(Claim(id=HOSTILE[:60], says=HOSTILE, that="peak(a) < 1"), "refuted", HOSTILE)
    about = page.About(answers={("mine", HOSTILE): HOSTILE}, origins={"mine": HOSTILE}, titles={"mine": HOSTILE})
    rows = [row(strategy=HOSTILE, notes=HOSTILE, comparison=HOSTILE)]
    text = page.html(HOSTILE, rows, {"mine": [claim]}, about=about)
    assert text.count("</script>") == 4, "two blocks of data, the library, the program"
    assert "<img src=x" not in text and "<script>document.title" not in text
    embedded = json.loads(text.split('id="data">')[1].split("</script>")[0])
    assert HOSTILE in embedded["texts"], "and none of it is lost"


HOSTILE_ROW = small([row(strategy=HOSTILE, verdict="wins")], open="0")


def test_hostile_text_does_nothing_in_a_browser(shown: dict[int, Shown]) -> None:
    dom = shown[HOSTILE_ROW].dom
    assert "<title>mine</title>" in dom and lines_of(dom)[0][0] == HOSTILE


ROWS = [
    row(strategy="a", verdict="baseline", native_peak_ratio=1.0),
    row(strategy="b", peak_bytes=30 << 20, verdict="wins", peak_ratio=0.5, memory="less", native_peak_ratio=0.9),
    row(strategy="c", peak_bytes=10 << 20, place="jax/cpu", answer="approximate", verdict="wins"),
    row(strategy="d", status="oom_budget", peak_bytes=None, suite="other", verdict="fails"),
]


FILTERS = [
    ({"filter": "wins torch/cpu"}, ["b"]),
    ({"place": "jax/cpu"}, ["c"]),
    ({"answer": "approximate"}, ["c"]),
    ({"wins": True}, ["b", "c"]),
    ({"filter": "oom_budget"}, ["d"]),
    ({"against": "the logits"}, ["b"]),
    ({"filter": "nothing of it"}, []),
    ({"open": "0", "sort": "peak_bytes"}, ["a", "c", "b", "d"]),
    ({"open": "0", "sort": "strategy", "down": True}, ["c", "b", "a", "d"]),
    ({"open": "0", "sort": "native_peak_ratio"}, ["b", "a", "c", "d"]),
    ({"open": "0", "place": "gone"}, ["a", "b", "c", "d"]),
]
FILTERED = [small(ROWS, about=page.About(against={"b": "the logits"}), **asked) for asked, _ in FILTERS]


@pytest.mark.parametrize("at", range(len(FILTERS)), ids=lambda at: str(FILTERS[at][0]))
def test_a_browser_filters_and_sorts(at: int, shown: dict[int, Shown]) -> None:
    (asked, names), dom = FILTERS[at], shown[FILTERED[at]].dom
    assert names_of(dom) == names
    count = len(names) if "open" not in asked else 4
    assert f"{count} of 4 rows" in dom


DECIDED = small(
    [row(
        strategy="b + c", composition={"before the step": 1 << 20, "loss": 3 << 20}, round_ratios=[0.9, 1.0, 1.1],
        time_ratio=1.0, time_ratio_low=0.95, time_ratio_high=1.05, time="open", reasons="asked for 3 MiB more",
        host_bytes=1042 << 20, answer_reason="the gradient of embed holds NaN",
    )],
    about=page.About(elsewhere={("torch/cpu", "b + c"): "torch.b(x); torch.c(<x>)"}),
    open="0",
)  # fmt: skip


def test_a_row_opens_to_all_that_decided_it(shown: dict[int, Shown]) -> None:
    dom = shown[DECIDED].dom
    more = dom.split('<tr class="more">')[1].split("</table>")[0]
    assert "before the step 1.0 MiB" in more and "loss 3.0 MiB" in more
    assert re.findall(r"width: ?([0-9.]+)%", more) == ["25", "75"]
    assert more.count("<circle") == 3 and "3 rounds" in more
    assert "asked for 3 MiB more" in more and "<dt>host MiB</dt><dd>1,042</dd>" in more
    assert "<dt>answer</dt><dd>the gradient of embed holds NaN</dd>" in more
    assert "<dt>in your own code</dt><dd>torch.b(x); torch.c(&lt;x&gt;)</dd>" in more
    assert "harness run mine --place torch/cpu -k 'b + c' --results again" in unescape(more)


NEAR = {
    "peak_bytes": (381 << 19), "predicted_bytes": (383 << 19) - 100, "at_most_bytes": 317 << 18,
    "peak_ratio": 4.194996, "native_peak_ratio": 0.125, "memory": "more",
    "time_ratio": 1.104999, "time_ratio_low": 1.0649996, "time_ratio_high": 1234.125, "time": "slower", "rounds": 3,
}  # fmt: skip
ROUNDED = small([row(strategy="b", **NEAR)], open=True)


def test_figures_are_rounded_as_in_the_tables(shown: dict[int, Shown]) -> None:
    (cells,) = lines_of(shown[ROUNDED].dom)
    sizes = [mib(NEAR[name]) for name in ("peak_bytes", "predicted_bytes", "at_most_bytes")]
    assert sizes == ["190", "191", "79.2"]
    assert [cells[at] for at in (1, 4, 5)] == sizes
    assert cells[2] == f"{NEAR['peak_ratio']:.2f} x, more" == "4.19 x, more"
    assert cells[3] == f"{NEAR['native_peak_ratio']:.2f} x" == "0.12 x"
    assert cells[7] == "1.10 x (1.06-1234.12), slower"


QUOTED = small([row(suite="my suite; ls", strategy="b's")], open="0")


def test_a_command_is_one_whatever_a_suite_is_called(shown: dict[int, Shown]) -> None:
    (command,) = re.findall(r"Repeat it: <code>(.*?)</code>", shown[QUOTED].dom)
    assert unescape(command) == r"harness run 'my suite; ls' --place torch/cpu -k 'b'\''s' --results again"


ASKED = small(
    [row(suite="gpt2", strategy="b + c"), row(suite="gpt2", comparison="there")],
    about=page.About(asked={("gpt2", "here"): "--model gpt2 --tokens 512 --plugin b.py"}),
    script="""document.querySelectorAll("tr.row[aria-expanded=false]").forEach(each => each.click());
      return [...document.querySelectorAll("tr.more code")].map(each => each.textContent);""",
    open=True,
)


def test_a_command_names_what_was_asked_for_and_the_plugins(shown: dict[int, Shown]) -> None:
    assert sorted(set(shown[ASKED].read)) == [
        "harness run --model gpt2 --tokens 512 --plugin b.py --place torch/cpu -k 'b + c' --results again",
        "harness run gpt2 --place torch/cpu -k baseline --results again",  # nothing says more than its name
    ]


EXAMPLE = re.findall(r"<code>\?(.*?)</code>", Path(page.__file__).with_name("page.html.j2").read_text(encoding="utf-8"))
LINKED: dict[str, Any] = dict(parse_qsl(unescape(EXAMPLE[0]), keep_blank_values=True))
BY_LINK = small(
    [
        row(strategy="fused_loss", peak_ratio=0.5),
        row(strategy="checkpoint + fused_loss", peak_ratio=0.6),
        row(strategy="checkpoint", peak_ratio=0.9),
        row(strategy="fused_loss", place="jax/cpu", peak_ratio=0.7),
    ],
    **LINKED,
)


def test_a_link_shows_what_the_page_says_of_it(shown: dict[int, Shown]) -> None:
    dom = shown[BY_LINK].dom
    assert names_of(dom) == ["checkpoint + fused_loss", "fused_loss"]
    assert re.findall(r'<tr class="row"[^>]* aria-expanded="(\w+)"', dom) == ["true", "false"]


BOUND = small(
    [
        row(strategy="a", peak_bytes=66 << 20, predicted_bytes=60 << 20, residual_bytes=6 << 20, residual_ratio=0.1,
            at_most_bytes=72 << 20, at_most_coverage=395 / 396),
        row(strategy="b", peak_bytes=3 << 20, predicted_bytes=2 << 20, residual_bytes=1 << 20, residual_ratio=0.5),
    ],
    sort="residual_ratio", down=True, open="1",
)  # fmt: skip


def test_the_bound_and_the_residual_stand_beside_the_prediction(shown: dict[int, Shown]) -> None:
    """As in the tables: the residual of a peak below 32 MiB is in bytes."""
    dom = shown[BOUND].dom
    names = [unescape(name) for name in re.findall(r'<th scope="col"[^>]*><button>(.*?)</button>', dom)]
    cells = [dict(zip(names, line, strict=True)) for line in lines_of(dom)]
    shown_cells = [[line[name] for name in ("strategy", "predicted", "at most", "residual")] for line in cells]
    assert shown_cells == [["b", "2.0", "", "+1.0 MiB"], ["a", "60.0", "72.0", "+10.0%"]]
    assert "72.0 MiB, with a probability of 99.7 %" in dom


BESIDE = small(ROWS, beside="0,1")


def test_two_rows_lie_beside_each_other(shown: dict[int, Shown]) -> None:
    dom = shown[BESIDE].dom
    panel = dom.split('id="beside"')[1].split("</aside>")[0]
    assert "a - here" in panel and "b - here" in panel and "0.50 x, less" in panel
    assert "hidden" not in panel.split(">")[0]


SEVERAL = row(strategy="c", time_ratio=1.19, rounds=2, time="open", round_ratios=[1.1, 1.28])
TIMED = small(
    [
        row(strategy="b", time_ratio=1.19, rounds=1, time="open", round_ratios=[1.19]),
        SEVERAL,
        SEVERAL | {"strategy": "d", "time_ratio_low": 1.1, "time_ratio_high": 1.3, "time": "slower"},
    ],
    open="0",
)


def test_a_time_of_one_round_has_no_interval(shown: dict[int, Shown]) -> None:
    """As in the tables."""
    dom = shown[TIMED].dom
    times = [line[7] for line in lines_of(dom)]
    assert times == ["1.19 x, 1 round: open", "1.19 x, 2 rounds: open", "1.19 x (1.10-1.30), slower"]
    more = dom.split('<tr class="more">')[1].split("</table>")[0]
    assert "Step times of 1 round<" in more and more.count("<line") == 1, "the baseline's line, and no interval"


DIVIDED = {
    strategy: small([row(strategy=strategy, round_ratios=[0.9, 1.1])], open="0") for strategy in ("b", "nothing")
}


@pytest.mark.parametrize(("strategy", "partner"), [("b", "mean of baseline and control"), ("nothing", "baseline")])
def test_rounds_say_what_they_are_divided_by(strategy: str, partner: str, shown: dict[int, Shown]) -> None:
    dom = shown[DIVIDED[strategy]].dom
    assert f"each divided by the {partner} of its round" in dom and f">{partner}</text>" in dom
    assert "times are step times divided by the mean of baseline and control" in dom


WITHOUT_PHASES = small([row(place="torch/cuda")], open="0", beside="0")


def test_a_row_without_phases_opens_without_a_bar(shown: dict[int, Shown]) -> None:
    main = shown[WITHOUT_PHASES].dom.split("<main>")[1].split("</aside>")[0]
    assert '<tr class="more">' in main and "What the peak is made of" not in main and 'class="bar"' not in main


SORTED = small(
    [*ROWS[:3], row(strategy="e", comparison="there")],
    """
      const headers = () => [...document.querySelectorAll(".rows th button")];
      const at = headers().findLastIndex(each => each.textContent === "peak MiB");
      headers()[at].focus();
      headers()[at].click();
      return [at, headers().indexOf(document.activeElement), document.activeElement.parentElement.ariaSort];
    """,
    open=True,
)


def test_the_header_that_sorts_keeps_the_focus(shown: dict[int, Shown]) -> None:
    assert shown[SORTED].read == [11, 11, "ascending"], "in the second table"


HIDDEN = small(
    [row(), row(suite="other")],
    """
      const section = document.getElementById("mine"), before = section.hidden;
      location.hash = "mine";
      dispatchEvent(new Event("hashchange"));
      const controls = ["words", "place", "against", "answer"].map(name => document.getElementById(name).value);
      return [before, section.hidden, section.open, controls.join(""), document.getElementById("count").textContent];
    """,
    filter="other",
    place="torch/cpu",
    wins=True,
)


def test_a_link_leads_to_a_suite_that_the_filters_hide(shown: dict[int, Shown]) -> None:
    assert shown[HIDDEN].read == [True, False, True, "", "2 of 2 rows"]


LAID = """
  const panel = document.getElementById("beside");
  const names = [...panel.querySelectorAll("tr:first-child th")].map(each => each.textContent.split(" - ")[0]);
  return panel.hidden ? [] : names.slice(1);
"""
ESCAPES = small(
    ROWS,
    """
  const panel = document.getElementById("beside"), button = document.querySelector("button[data-row]");
  button.click();
  const shown = !panel.hidden;
  document.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape"}));
  return [shown, panel.hidden, document.activeElement === button];
""",
    open="0",
)


def test_escape_closes_the_panel_and_gives_the_focus_back(shown: dict[int, Shown]) -> None:
    assert shown[ESCAPES].read == [True, True, True]


STALE = {"0,9999": ["a"], "9999": [], "x,-1,1.5,,1,0": ["b", "a"], "1,1": ["b"]}
STALE_LINKS = {asked: small(ROWS, LAID, beside=asked) for asked in STALE}


@pytest.mark.parametrize("asked", STALE)
def test_a_stale_link_lays_beside_what_is_there(asked: str, shown: dict[int, Shown]) -> None:
    assert shown[STALE_LINKS[asked]].read == STALE[asked]


SELECTED = small(
    ROWS,
    """
      const selects = ["place", "against", "answer"].map(name => document.getElementById(name));
      return [selects.map(each => each.selectedIndex >= 0 ? each.value : "nothing selected"),
        document.getElementById("count").textContent];
    """,
    place="gone",
    against="gone",
    answer="approximate",
)


def test_no_suite_has_the_name_of_a_part_of_the_page() -> None:
    names = ("data", "beside", "mine")
    text = page.html("t", [row | {"suite": name} for name in names for row in ROWS[:1]], {})
    assert {f'id="{name}"' for name in ("suite-data", "suite-beside", "mine")} <= set(re.findall(r'id="[^"]+"', text))
    ids = re.findall(r'\bid="([^"]+)"', text.partition("<script>")[0])
    assert len(ids) == len(set(ids))


def test_a_select_shows_what_filters(shown: dict[int, Shown]) -> None:
    assert shown[SELECTED].read == [["", "", "approximate"], "1 of 4 rows"]


BUTTONS = small(
    ROWS[:3],
    """
      document.querySelectorAll("tr.row[aria-expanded=false]").forEach(each => each.click());
      const buttons = [...document.querySelectorAll("button[data-row]")];
      const words = () => buttons.map(each => each.textContent.startsWith("Take away"));
      buttons.slice(0, 3).forEach(each => each.click());
      const three = words();
      document.querySelector("#beside button").click();
      return [three, words()];
    """,
    open=True,
)


def test_every_button_says_whether_its_row_lies_beside(shown: dict[int, Shown]) -> None:
    assert shown[BUTTONS].read == [[False, True, True], [False, False, False]]


LONG = small(
    [row(strategy=f"s{at}", comparison=f"comparison {at // 150}") for at in range(450)]
    + [row(suite="other", strategy=f"s{at}") for at in range(401)],
    """
      const count = () => document.querySelectorAll("#mine tr.row").length;
      const named = words => [...document.querySelectorAll("#mine button")].find(each => each.textContent === words);
      const click = words => named(words).click();
      const counts = [count()];
      click("strategy");
      counts.push(count());
      click("Show all 450 rows");
      counts.push(count());
      click("strategy");
      return [...counts, count(), document.querySelectorAll("#other tr.row").length];
    """,
    open=True,
)


def test_a_long_section_is_cut_between_comparisons_until_all_of_it_is_wanted(shown: dict[int, Shown]) -> None:
    assert shown[LONG].read == [300, 300, 450, 450, 401]


def test_only_pictures_that_there_would_be_are_counted_as_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MOST_BYTES", 1)
    suites = {suite: [row(suite=suite, composition={"loss": 1 << 20})] for suite in ("first", "second", "third")}
    suites["third"] += [row(suite="third", strategy="b", peak_ratio=0.9, time_ratio=1.1)]
    text = page.html("mine", [each for rows in suites.values() for each in rows], {})
    specs = json.loads(text.split('id="specs">')[1].split("</script>")[0])
    assert {suite: list(each) for suite, each in specs.items()} == {"first": ["phases-1"]}
    assert re.findall(r"([0-9]+ more pictures?):", text) == ["1 more picture", "2 more pictures"]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_no_cell_is_cut_off_at_any_width(dark: bool, committed: Path, tmp_path: Path) -> None:
    """The page measures itself: nothing is wider than the window, no cell hides what it holds, letters can be read."""
    (tmp_path / "measured.html").write_text(with_script(committed.read_text(), MEASURE))
    sources = {f"measured.html?filter=long_context&open=1&width={width}": width for width in WIDTHS}
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    wrong, said = framed(tmp_path, sources, scheme)
    assert not wrong, wrong
    measured = {sizes["window"]: sizes for sizes in said}
    assert set(measured) == set(WIDTHS)
    for width, sizes in measured.items():
        assert sizes["rows"] > 10
        assert sizes["wide"] <= width, f"{sizes['what']} is wider than {width} pixels"
        assert sizes["cut"] == []
        assert sizes["claims"] >= 100, f"the formula of a claim is squeezed at {width} pixels"
        assert sizes["broken"] == [], f"words are broken in two at {width} pixels"
        assert sizes["drawn"] and not sizes["beyond"], f"letters of a picture are cut off at {width} pixels"
        assert sizes["unseen"] == 0, f"a table cannot be sorted at {width} pixels"
        assert sizes["covered"] <= 0, f"the filters lie over what a link leads to at {width} pixels"
        assert not sizes["scrolls"] or width < 600, f"pictures are cut off at {width} pixels"
        ground, ink = (sum(map(int, re.findall(r"[0-9]+", sizes[name])[:3])) for name in ("ground", "ink"))
        assert (ground < 150 and ink > 600) if dark else (ground > 700 and ink < 150)


MEASURE = """
const lines = (text, from, to) => {
  const range = document.createRange();
  range.setStart(text, from);
  range.setEnd(text, to);
  return new Set([...range.getClientRects()].map(each => Math.round(each.top))).size;
};
const broken = cell => {
  const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT), words = [];
  for (let text = walker.nextNode(); text; text = walker.nextNode())
    for (const word of text.parentElement.closest("code") ? [] : text.textContent.matchAll(/[^\\s\\/-]+/g))
      if (word[0].length < 20 && lines(text, word.index, word.index + word[0].length) > 1) words.push(word[0]);
  return words;
};
setTimeout(() => {
  const all = [...document.querySelectorAll("body *")].filter(each => each.offsetParent && !each.closest("figure *"));
  const widest = all.reduce((a, b) => a.getBoundingClientRect().right > b.getBoundingClientRect().right ? a : b);
  const cells = [...document.querySelectorAll("td, th")].filter(each => each.offsetParent);
  const cut = cells.filter(each => each.scrollWidth > each.clientWidth + 1);
  const sorts = [...document.querySelectorAll(".rows th button")];
  const letters = [...document.querySelectorAll("figure svg text")].filter(each => each.getBoundingClientRect().width);
  const right = each => each.getBoundingClientRect().right;
  const style = getComputedStyle(document.body);
  const sizes = {window: innerWidth, wide: Math.floor(widest.getBoundingClientRect().right),
    what: widest.tagName + "." + widest.className,
    cut: cut.slice(0, 3).map(each => each.textContent), broken: cells.flatMap(broken).slice(0, 9),
    claims: Math.min(...cells.flatMap(each => [...each.querySelectorAll("code")])
      .filter(each => each.textContent.length > 60).map(each => each.getBoundingClientRect().width)),
    rows: document.querySelectorAll("tr.row").length,
    beyond: letters.filter(each => right(each) > right(each.closest("figure > *")) + 1).map(each => each.textContent),
    drawn: letters.length,
    unseen: sorts.filter(each => each.getBoundingClientRect().left < 0).length,
    scrolls: [...document.querySelectorAll("figure")].filter(each => each.scrollWidth > each.clientWidth + 1).length,
    ground: style.backgroundColor, ink: style.color};
  const suite = [...document.querySelectorAll("details.suite")].filter(each => each.offsetParent)[0];
  suite.scrollIntoView();
  const bar = document.querySelector(".controls").getBoundingClientRect();
  sizes.covered = bar.top < 1 ? bar.bottom - suite.getBoundingClientRect().top : 0;
  parent.postMessage(sizes, "*");
}, 2500);
"""
WIDTHS = (390, 820, 1280, 1600)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A page of 10,000 rows in 50 suites."""
    rows = [
        row(suite=f"suite {at // 200}", comparison=f"decoder on torch/cpu, {64 << (at // 20 % 10)} tokens",
            shape={"tokens": 64 << (at // 20 % 10)}, strategy=f"strategy {at % 20}" if at % 20 else "baseline",
            peak_bytes=(at + 1) << 12, peak_ratio=0.5 + at / 20000, time_ratio=1.0, time_ratio_low=0.9,
            time_ratio_high=1.1, time="open", verdict="wins", memory="less", round_ratios=[0.9, 1.0, 1.1],
            composition={"before the step": at << 10, "forward": at << 10, "loss": at << 10, "backward": at << 10},
            notes=f"a note of row {at % 700}")
        for at in range(10_000)
    ]  # fmt: skip
    yield written(tmp_path_factory.mktemp("large"), rows)


@pytest.mark.long
def test_a_page_of_10_000_rows_is_under_5_mb(large: Path) -> None:
    assert large.stat().st_size < 5 << 20
    assert "10000 of 10000 rows" in dom_of(large)


@pytest.mark.alone
@pytest.mark.slow
def test_a_page_of_10_000_rows_opens_in_two_seconds(large: Path) -> None:
    small = large.with_name("small.html")
    small.write_text("<!doctype html><p>nothing</p>")

    def seconds(path: Path) -> float:
        begun = time.perf_counter()
        done = browser(path, "--dump-dom", "--virtual-time-budget=1")
        seconds = time.perf_counter() - begun
        assert not faults(done), faults(done)
        return seconds

    seconds(small)
    assert seconds(large) - seconds(small) < 2.0


PRINTED = small(
    [row()],
    """
      dispatchEvent(new Event("beforeprint"));
      return [...document.querySelectorAll("details.suite")].map(each => [each.id, each.open]);
    """,
    answers={"other": [Answer(Claim(id="A1", says="it is small", that="peak(baseline) > 0"), "verified", "1 MiB")]},
)


def test_suites_of_claims_and_limits_alone_are_printed_as_well(shown: dict[int, Shown]) -> None:
    assert shown[PRINTED].read == [["mine", True], ["other", True]]
