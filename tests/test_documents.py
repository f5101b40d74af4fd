"""What the documents show works: each code block, command line and link."""

import importlib.util
import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import yaml

from harness.cli import pytest_plugin
from harness.cli.commands import app
from harness.contract import plugins
from harness.contract.assembly import assemble
from harness.contract.parts import PART_NAMES, Parts
from harness.contract.plugins import Plugins
from harness.contract.strategy import Strategy
from harness.records import Case
from harness.report import fit, limits
from harness.report.plan import HEADERS
from harness.suite import reader
from harness.suite.plan import Plan
from harness.suite.schema import Suite
from harness.verdicts.expressions import NAMES
from harness.verdicts.remarks import DOUBTFUL

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "RESULTS.md", "examples/plugin/README.md")
] + [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "results").glob("*/README.md"))]
TABLES = ["README.md", "docs/tables.md"]
TABLES += [str(path.relative_to(ROOT)) for path in DOCUMENTS if path.parents[1] == ROOT / "results"]
PROGRAM: Any = typer.main.get_command(app)
VERBS = {name: PROGRAM.get_command(None, name) for name in PROGRAM.list_commands(None)}
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


class Block(NamedTuple):
    """A piece of a document, and where it begins."""

    document: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def blocks(language: str) -> list[Block]:
    """List the code blocks of a language in all documents."""
    found = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            found.append(Block(document, text.count("\n", 0, match.start()) + 1, match[1]))
    return found


def command_lines() -> list[Block]:
    """List the command lines of `sh` blocks."""
    lines = [
        Block(block.document, number, line)
        for block in blocks("sh")
        for number, line in enumerate(block.text.splitlines(), block.line + 1)
    ]
    return [line for line in lines if shlex.split(line.text, comments=True)]


def mentions() -> list[Block]:
    """List the commands that stand within a sentence."""
    return [
        Block(document, number, text)
        for document in DOCUMENTS
        for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), 1)
        for text in re.findall(r"`((?:harness|make) [^`]+)`", line)
    ]


def table(document: str, head: str) -> list[str]:
    """List the names in the first column of the table with this head, without their marks."""
    text = (ROOT / document).read_text(encoding="utf-8")
    rows = re.split(rf"^\| {head} \|.*\n\|[-|]+\n", text, flags=re.MULTILINE)[1].split("\n\n")[0]
    return [name for row in rows.splitlines() for name in re.findall(r"`(.*?)`", row.split("|")[1])]


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_a_python_block_runs(block: Block, tmp_path: Path) -> None:
    code = compile(block.text, str(block), "exec")
    for package in re.findall(r"^(?:from|import) (\w+)", block.text, re.MULTILINE):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs the package {package}")
    if block.text.startswith("import harness\n"):
        pytest.importorskip("pandas", reason="needs the package pandas")
        exec(code, {})
        return
    if "@hookimpl" not in block.text:
        names: dict[str, Any] = {}
        exec(code, names)
        names["train"](plain_parts(plugins.load(), "torch"), 2)
        return
    path = tmp_path / f"block_{block.line}.py"
    path.write_text(block.text, encoding="utf-8")
    before, loaded = plugins.load(), plugins.load((str(path),))
    strategies = set(loaded.strategies) - set(before.strategies)
    workloads = set(loaded.workloads) - set(before.workloads)
    for name in strategies:
        rewritten(loaded, loaded.strategies[name])
    for name in workloads:
        if "transformers" in block.text:
            pytest.importorskip("transformers", reason="needs the package transformers")
        workload = loaded.workloads[name]
        assert workload.floor(workload.tiny(workload.shape())) > 16 * 512 * 64, "its parameters can be counted"
    measures = loaded.manager.hook.harness_measure.get_hookimpls()
    assert strategies or workloads or str(path) in {each.plugin_name for each in measures}


def plain_parts(loaded: Plugins, backend: str) -> Parts:
    """Return the untouched parts of a decoder that costs nothing."""
    decoder = loaded.workloads["decoder"]
    shape = decoder.tiny(decoder.shape()).model_dump()
    case = Case(workload="decoder", shape=shape, place=f"{backend}/cpu", corpus="drawn", tokenizer="none")
    return assemble(loaded, case)


def rewritten(loaded: Plugins, strategy: Strategy) -> None:
    """Check that a strategy rewrites the parts that it declares, for each of its frameworks."""
    for backend in strategy.on:
        plain = plain_parts(loaded, backend)
        parts = strategy.on[backend](plain)
        changed = {name for name in PART_NAMES if getattr(parts, name) is not getattr(plain, name)}
        assert changed == set(strategy.rewrites)


def planned(block: Block, folder: Path) -> Plan:
    """Read a block as a suite; what a part of a suite leaves out is put in."""
    (folder / "my_text").mkdir()
    (folder / "my_text" / "a.txt").write_text("text", encoding="utf-8")
    text = block.text
    if (model := re.search(r"^workload: (my_\w+)", text, re.MULTILINE)) is not None:
        assert f'"{model[1]}"' in block.document.read_text(encoding="utf-8"), "its plugin stands in the same document"
        text = text.replace(model[0], "workload: decoder")
    rest = {"title": "A part", "workload": "decoder", "strategies": ["fused_loss"]}
    absent = {key: value for key, value in rest.items() if key not in yaml.safe_load(text)}
    (folder / "block.yaml").write_text(text + (yaml.safe_dump(absent) if absent else ""), encoding="utf-8")
    return reader.read(folder / "block.yaml", plugins.load())


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_a_yaml_block_is_a_suite_or_a_part_of_one(block: Block, tmp_path: Path) -> None:
    plan = planned(block, tmp_path)
    assert len(plan.cases) > 1


def test_the_suite_means_what_its_comments_say(tmp_path: Path) -> None:
    (block,) = (block for block in blocks("yaml") if "title: Does it fit" in block.text)
    plan = planned(block, tmp_path)
    assert len(plan.comparisons) == 2, "one for each number of tokens"
    assert [case.label for case in plan.comparisons[0].cases] == [
        "baseline",
        "nothing",
        "checkpoint(every=1)",
        "checkpoint(every=2)",
        "checkpoint + fused_loss",
    ]


@pytest.mark.parametrize("line", command_lines(), ids=str)
def test_a_command_line_is_understood(line: Block) -> None:
    program, *words = shlex.split(line.text, comments=True)
    if program == "harness":
        VERBS[words[0]].make_context(words[0], words[1:]).close()
        files = [word for word in words if word.startswith(("suites/", "examples/")) and "mine" not in word]
        assert all((ROOT / file).exists() for file in files)
    elif program == "make":
        assert set(words) <= TARGETS
    elif program == "pytest":
        known = set(re.findall(r'"(--harness-[a-z-]+)"', Path(pytest_plugin.__file__).read_text(encoding="utf-8")))
        options = {word.partition("=")[0] for word in words if word.startswith("--harness")}
        assert options and options <= known
    elif program == "python":
        assert (ROOT / words[0]).is_file()
    else:
        assert (program, words[0]) in {("pip", "install"), ("dask", "worker")}, "a command that no test knows"


@pytest.mark.parametrize("mention", mentions(), ids=str)
def test_a_command_in_a_sentence_exists(mention: Block) -> None:
    program, verb, *words = shlex.split(mention.text)
    if program == "make":
        assert verb in TARGETS
        return
    options = {option for parameter in VERBS[verb].params for option in parameter.opts}
    assert {word for word in words if word.startswith("-")} <= options


def test_every_extra_that_is_installed_exists() -> None:
    text = "\n".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    asked = re.findall(r"pip install (?:-e )?'?(?:\.|memory-strategy-harness)\[([\w,-]+)\]", text)
    assert asked and {extra for each in asked for extra in each.split(",")} <= set(extras)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_an_extra_is_added_to_the_install_that_make_made(document: Path) -> None:
    if document.name != "CHANGELOG.md":
        assert not re.findall(r"pip install '?\.\[", document.read_text(encoding="utf-8")), "say: pip install -e"


def test_versions_in_commands_are_those_of_the_locks() -> None:
    locks = [(ROOT / name).read_text(encoding="utf-8") for name in ("requirements.lock", "requirements-gpu.lock")]
    named = [word for line in command_lines() for word in shlex.split(line.text, comments=True) if "==" in word]
    assert named and set(named) <= set("\n".join(locks).splitlines())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_every_link_leads_somewhere(document: Path) -> None:
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, heading = target.partition("#")
        path = document.parent / name.partition("?")[0] if name else document
        assert path.exists(), f"there is no {target}"
        if heading:
            heads = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def test_every_document_is_linked_from_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"(docs/{path.name})" in text for path in (ROOT / "docs").glob("*.md"))
    assert len(text.splitlines()) <= 100, "two screens"


def test_the_lists_are_whole() -> None:
    assert table("docs/plugins.md", "part") == list(PART_NAMES)
    assert set(table("docs/suites.md", "key")) == set(Suite.model_fields)
    assert set(table("docs/suites.md", "figure")) >= set(NAMES)
    shown = set(table("docs/plugins.md", "field"))
    assert shown == set(Strategy.__dataclass_fields__) - {"name", "on", "about"}


@pytest.mark.parametrize("document", TABLES)
def test_every_word_of_a_table_is_explained(document: str) -> None:
    explained = {name for head in ("word", "status") for name in words_of(head)}
    text = (ROOT / document).read_text(encoding="utf-8")
    judged, shown = 0, set()
    for head, rows in re.findall(r"^(\| strategy .*)\n\|[:|-]+\n((?:\|.*\n)+)", text, re.MULTILINE):
        columns = [cell.strip() for cell in head.strip("|").split("|")]
        judged += "verdict" in columns
        for row in rows.splitlines():
            cells = dict(zip(columns, (cell.strip() for cell in row.strip("|").split("|")), strict=True))
            inferred = cells.get("time", "").partition("), ")[2].partition(":")[0]
            time = inferred or cells.get("time", "").partition(": ")[2]
            memory = cells.get("memory", "").partition(" x, ")[2]
            shown |= {cells.get("answer", ""), cells.get("verdict", ""), time, memory}
    assert judged == len(re.findall(r"\| verdict +\|$", text, re.MULTILINE)), "a table that is not read"
    assert shown - {""} or not judged
    assert shown - {""} <= explained


@pytest.mark.parametrize("document", TABLES)
def test_every_column_of_a_table_is_explained(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    heads = re.findall(r"^\| (strategy .*)\|\n\|[:|-]+\n", text, re.MULTILINE)
    shown = {name.strip() for head in heads for name in head.split("|")}
    assert shown | {*fit.COLUMNS, *limits.COLUMNS, *HEADERS} <= columns()


def columns() -> set[str]:
    """Collect the columns that `docs/tables.md` explains; a row may explain several."""
    text = (ROOT / "docs" / "tables.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| column \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    return {name.strip() for rows in tables for row in rows.splitlines() for name in row.split("|")[1].split(",")}


def test_every_flag_is_explained(tmp_path: Path) -> None:
    subprocess.run([ROOT / ".ci" / "tracked_results", tmp_path], cwd=ROOT, check=True)
    flags = set(DOUBTFUL)
    for path in (tmp_path / "results").rglob("*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            flags |= set(json.loads(line).get("flags", ()))
    assert len(flags) > len(DOUBTFUL) and flags <= words_of("flag")


def words_of(head: str) -> set[str]:
    """Collect what all tables of `docs/tables.md` with this head explain."""
    text = (ROOT / "docs" / "tables.md").read_text(encoding="utf-8")
    tables = re.findall(rf"^\| {head} \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    return {name for rows in tables for name in re.findall(r"`(.*?)`", rows)}


def test_contributors_read_of_every_group_of_strategies() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall("`([a-z_]+)`", text.partition("A folder is a group:")[2].partition(".")[0])
    assert named == sorted(path.parent.name for path in (ROOT / "strategies").glob("*/__init__.py"))
