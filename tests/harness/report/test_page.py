"""The page of results: offline, inert, and in a real browser sorted and filtered."""

import json
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path
from urllib.parse import urlencode

import pytest

from harness.records import Claim
from harness.report import page
from harness.verdicts.claims import Answer

ROOT = Path(__file__).resolve().parents[3]
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
    """The page of the committed results."""
    path = tmp_path_factory.mktemp("page") / "page.html"
    command = [sys.executable, "-m", "harness", "report", str(ROOT / "results"), "--page", str(path)]
    command += ["--documents", str(ROOT / "suites" / "claims.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return path


def row(**changes):
    given = {
        "suite": "mine", "comparison": "here", "workload": "decoder", "place": "torch/cpu", "strategy": "baseline",
        "status": "ok", "verdict": "baseline", "answer": "bit_exact", "peak_bytes": 1 << 20, "peak_ratio": None,
        "peak_phase": "loss", "predicted_bytes": 1 << 20, "residual_ratio": 0.0, "floor_bytes": 1, "floor_ratio": 1.0,
        "budget_bytes": None, "step_seconds": 1.0, "first_step_seconds": None, "fetch_seconds": None,
        "tokens_per_second": 1.0, "time_ratio": None, "time_ratio_low": None, "time_ratio_high": None, "rounds": None,
        "speed": None, "phases": {}, "flags": "", "notes": "", "reasons": "",
        "corpus": "x", "tokenizer": "bytes", "machine": "m", "commit": "c", "shape": {"tokens": 64},
    }  # fmt: skip
    return given | changes


def shown(path, **asked):
    """What a browser makes of the page at these settings."""
    if BROWSER is None:
        pytest.skip("needs a browser: chromium")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--enable-logging=stderr"]
    options += ["--window-size=1280,1500", f"--user-data-dir={path.parent / 'profile'}"]
    command = [BROWSER, *options, "--dump-dom", f"{path.as_uri()}?{urlencode(asked)}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    told = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    faults = [line for line in told if re.search("Uncaught|Error|Refused|violates", line)]
    assert not faults, faults
    return done.stdout


def lines_of(dom):
    """The texts of the cells of each row of the large table."""
    body = dom.split('<table id="rows">')[1].split("</table>")[0].split("<tbody>")[1]
    found = re.findall(r"<tr[^>]*>(.*?)</tr>", body, re.S)
    return [
        [unescape(re.sub("<[^>]+>", "", cell)) for cell in re.findall(r"<td[^>]*>(.*?)</td>", line, re.S)]
        for line in found
    ]


def test_the_page_of_the_committed_suites_is_small_and_asks_nobody(committed):
    text = committed.read_text()
    assert len(text.encode()) < 5 << 20
    assert "default-src 'none'" in text
    assert "C8 16 GiB" in text, "claims about limits, which have no rows"
    assert "longest tokens in 16 GiB" in text, "the limits themselves"
    assert "What documents say" in text and "Python lists of overlapping windows blow" in text
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//""", text.split("<script>")[0])


def test_texts_of_suites_and_plugins_are_inert():
    claim = Answer(Claim(id=HOSTILE[:60], says=HOSTILE, that="peak(a) < 1"), "refuted", HOSTILE)
    text = page.html(HOSTILE, [row(strategy=HOSTILE, notes=HOSTILE, suite="mine")], {"mine": [claim]})
    assert text.count("</script>") == 4, "two blocks of data, the library, the program"
    assert "<img src=x" not in text and "<script>document.title" not in text
    embedded = json.loads(text.split('id="data">')[1].split("</script>")[0])
    assert embedded[0]["strategy"] == HOSTILE, "and none of it is lost"


def test_hostile_text_does_nothing_in_a_browser(tmp_path):
    path = tmp_path / "page.html"
    path.write_text(page.html("mine", [row(strategy=HOSTILE, verdict="wins")], {}))
    dom = shown(path)
    assert "<title>mine</title>" in dom and lines_of(dom)[0][0] == HOSTILE


def test_a_browser_sorts_and_filters(tmp_path):
    path = tmp_path / "page.html"
    rows = [row(strategy=name, peak_bytes=peak << 20, place=place) for name, peak, place in
            (("b", 30, "torch/cpu"), ("a", 20, "jax/cpu"), ("c", 10, "torch/cpu"), ("d", 5, "torch/cpu"))]  # fmt: skip
    rows[3] |= {"status": "oom_budget", "peak_bytes": None}
    path.write_text(page.html("mine", rows, {}))
    assert [line[0] for line in lines_of(shown(path))] == ["b", "a", "c", "d"]
    assert [line[0] for line in lines_of(shown(path, sort="peak_bytes"))] == ["c", "a", "b", "d"], "unknown ones last"
    assert [line[0] for line in lines_of(shown(path, sort="strategy", down=""))] == ["d", "c", "b", "a"]
    dom = shown(path, place="torch/cpu", filter="oom_budget")
    assert lines_of(dom) == [] and "0 of 4 rows" in dom
    dom = shown(path, place="torch/cpu", sort="peak_bytes")
    assert [line[0] for line in lines_of(dom)] == ["c", "b", "d"] and "3 of 4 rows" in dom
    assert lines_of(dom)[2][1] == "oom_budget" and lines_of(dom)[0][1] == "10.0"


def test_a_browser_draws_the_committed_results(committed):
    dom = shown(committed, filter="long_context fused")
    found = lines_of(dom)
    assert found and all("fused" in line[0] for line in found)
    assert dom.count('class="marks"') >= 2, "the first charts are drawn"
