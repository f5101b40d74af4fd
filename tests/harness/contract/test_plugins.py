"""A plugin comes from a file or a module; one that cannot be used is named in one sentence."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.contract import plugins
from harness.contract.parts import PART_NAMES
from harness.contract.place import Place
from harness.contract.plugins import PluginError, nearest

HEAD = "from harness import Strategy, Workload, hookimpl\n\ndef same(parts, chunk: int = 8):\n    return parts\n\n"
USED = 'Strategy("mine", rewrites=("loss",), on={"torch": same}, about="Keep all, pay all.")'


def offering(item: str, more: str = "") -> str:
    return f"{HEAD}{more}\n@hookimpl\ndef harness_strategies():\n    return [{item}]\n"


@pytest.fixture
def file_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Write a plugin file; forget its module afterwards."""
    before = set(sys.modules)

    def write(text: str, name: str = "mine.py") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    monkeypatch.syspath_prepend(str(tmp_path))
    yield write
    for name in set(sys.modules) - before:
        if name in ("mine_module", "harness_plugin_mine", "harness_plugin_other"):
            del sys.modules[name]


def refusal(*names: str) -> str:
    with pytest.raises(PluginError) as caught:
        plugins.load(names)
    sentence = str(caught.value)
    assert sentence.isprintable(), "more than one line, or signs that a terminal obeys"
    return sentence


def test_the_project_itself_is_a_plugin() -> None:
    loaded = plugins.load()
    assert {"nothing", "checkpoint", "chunked_loss", "fused_loss"} <= set(loaded.strategies)
    assert list(loaded.strategies) == sorted(loaded.strategies)
    assert set(loaded.workloads) >= {"decoder"}
    assert loaded.versions.keys() == {"memory-strategy-harness"}
    assert all(name == strategy.name and strategy.summary for name, strategy in loaded.strategies.items())


def test_a_plugin_comes_from_a_file_or_a_module_of_any_name(file_of: Any) -> None:
    assert plugins.load((file_of(offering(USED)),)).strategies["mine"].knobs["chunk"].default == 8
    file_of(offering(USED.replace("mine", "yours")), "mine_module.py")
    assert "yours" in plugins.load(("mine_module",)).strategies
    both = plugins.load((file_of(offering(USED)), "mine_module"))
    assert {"mine", "yours", "nothing"} <= set(both.strategies)


def test_a_plugin_of_a_file_can_hold_dataclasses(file_of: Any) -> None:
    more = "from dataclasses import dataclass\n@dataclass\nclass Holding:\n    value: 'int' = 3\n"
    assert "mine" in plugins.load((file_of(offering(USED, more)),)).strategies


def test_a_thread_that_a_plugin_starts_and_never_ends_does_not_keep_a_command_from_ending(file_of) -> None:
    name = file_of(offering(USED, "import threading\nthreading.Thread(target=threading.Event().wait).start()\n"))
    command = [sys.executable, "-m", "harness", "show", "mine", "--plugin", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "Keep all, pay all." in done.stdout, done.stderr


def test_what_a_plugin_prints_is_not_among_what_a_command_answers(file_of, capsys) -> None:
    plugins.load((file_of(offering(USED, "print('loaded')\n")),))
    assert capsys.readouterr() == ("", "loaded\n")


def test_threads_are_as_they_were_once_plugins_are_loaded(file_of) -> None:
    start = threading.Thread.start
    plugins.load((file_of(offering(USED)),))
    with pytest.raises(PluginError):
        plugins.load((file_of("1 / 0\n", "other.py"),))
    assert threading.Thread.start is start


def test_a_former_name_means_the_strategy(file_of: Any) -> None:
    text = offering(USED.replace('."', '.", aliases=("older", "oldest")'))
    assert plugins.load((file_of(text),)).aliases.items() >= {("older", "mine"), ("oldest", "mine")}
    assert plugins.load().aliases["documents"] == "document_windows"


def test_a_plugin_that_offers_no_strategy_is_none_the_worse(file_of: Any) -> None:
    assert plugins.load((file_of("x = 1\n"),)).strategies.keys() == plugins.load().strategies.keys()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import no_such_package_at_all\n", ["ModuleNotFoundError", "no_such_package_at_all"]),
        ("def broken(:\n", ["SyntaxError"]),
        ("raise ValueError('two\\nlines \\x1b[31m')\n", ["ValueError", "two"]),
        (
            offering(USED).replace("return [", "raise KeyError('gone')\n    return ["),
            ["harness_strategies", "KeyError"],
        ),
        (
            offering(USED).replace("return [", "return None\n    return ["),
            ["returns nothing from harness_strategies: return a list of Strategy"],
        ),
        (
            offering(USED).replace("return [", "return Strategy and 3\n    return ["),
            ["returns a int from harness_strategies: return a list of Strategy"],
        ),
        ("def late():\n    assert False\n\n\nlate()\n", ["raises when loaded (AssertionError, mine.py:2): mend it"]),
        ("import sys\nsys.exit('bye')\n", ["raises when loaded (SystemExit: bye, mine.py:2)"]),
        (offering('"checkpoint"'), ["offers a str", "a Strategy is wanted"]),
        (offering(USED).replace("harness_strategies", "harness_workloads"), ["offers a Strategy", "a Workload"]),
        (offering(USED.replace('"mine"', '"my strategy"')), ["'my strategy'", "use letters"]),
        (offering(USED.replace('"mine"', '""')), ["''", "use letters"]),
        (offering(USED.replace('"mine"', '"-k"')), ["'-k'", "use letters"]),
        (offering(USED.replace('"mine"', '"a\\n"')), ["use letters"]),
        (offering(USED.replace('"mine"', "3")), ["3", "use letters"]),
        (offering(USED.replace('"mine"', '"' + "a" * 65 + '"')), ["use letters"]),
        (offering(f"{USED}, {USED}"), ["'mine'", "taken", "choose another"]),
        (
            offering(USED.replace('."', '.", aliases=("fused_loss",)')),
            ["offers 'fused_loss'", "taken", "choose another"],
        ),
        (offering(USED.replace('."', '.", aliases="old"')), ["'mine'", "`aliases`", "not a tuple of names"]),
        (offering(USED.replace('."', '.", aliases=("a b",)')), ["'mine'", "`aliases`", "not a tuple of names"]),
        (offering(USED.replace('"mine"', '"checkpoint"')), ["'checkpoint'", "taken", "choose another"]),
        (offering(USED.replace('("loss",)', '("los",)')), ["'mine'", "'los'", "did you mean 'loss'?"]),
        (offering(USED.replace('("loss",)', '"loss"')), ["'mine'", "`rewrites` is not a tuple of names"]),
        (offering(USED.replace('("loss",)', "None")), ["'mine'", "`rewrites` is not a tuple of names"]),
        (offering(USED.replace("Keep all, pay all.", "  ")), ["'mine'", "says nothing", "about"]),
        (offering(USED.replace('"Keep all, pay all."', "__doc__")), ["'mine'", "says nothing", "about"]),
        (offering(USED).replace("chunk: int = 8", "chunk: int"), ["'mine'", "knob 'chunk'", "default"]),
        (
            offering(USED).replace("chunk: int = 8", "chunk=8"),
            ["'mine'", "knob 'chunk'", "type, as in `every: int = 2`"],
        ),
        (offering(USED).replace("chunk: int = 8", "chunk: 'int | None' = 8"), ["'mine'", "knob 'chunk'", "type"]),
        (offering(USED).replace("chunk: int = 8", "**knobs: int"), ["'mine'", "knob 'knobs'", "default"]),
        (offering(USED.replace("same}", "3}")), ["'mine'", "not a callable"]),
        (offering(USED.replace('{"torch": same}', "same")), ["'mine'", "on"]),
        (offering(USED.replace('"torch"', '"pytorch"')), ["'mine'", "'pytorch'", "torch"]),
        (
            offering(USED).replace("harness_strategies()", "harness_strategies(wrong)"),
            ["cannot be registered", "wrong"],
        ),
    ],
)
def test_a_plugin_that_cannot_be_used_is_named_in_one_sentence(file_of: Any, text: str, words: "list[str]") -> None:
    path = file_of(text)
    sentence = refusal(path)
    for word in [path, *words]:
        assert word in sentence


def test_a_plugin_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "there is no plugin file" in refusal(str(tmp_path / "nowhere.py"))
    assert "'no_such_module' cannot be imported" in refusal("no_such_module")
    (tmp_path / "plugin").write_text("")
    assert "is a file whose name does not end in .py" in refusal(str(tmp_path / "plugin"))
    assert "is a folder: give a .py file" in refusal(str(tmp_path))
    (tmp_path / "folder.py").mkdir()
    assert "there is no plugin file" in refusal(str(tmp_path / "folder.py"))


def test_two_files_of_one_name_do_not_mix(file_of: Any, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    here = file_of(offering(USED))
    there = file_of(offering(USED.replace("mine", "yours")), "there/mine.py")
    assert {"mine", "yours"} <= set(plugins.load((here, there)).strategies)


def test_the_same_plugin_named_twice_is_refused(file_of: Any) -> None:
    path = file_of(offering(USED))
    assert path in refusal(path, path)


@pytest.mark.parametrize("name", ["", "strategies..", ".relative", "a b", "../x"])
def test_a_strange_name_of_a_plugin_is_refused(name: str) -> None:
    assert f"'{name}'" in refusal(name)


def test_obstacles_are_said_in_one_sentence(file_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = offering(USED[:-1] + ', needs=("no_such_package",))')
    strategy = plugins.load((file_of(text),)).strategies["mine"]
    torch = Place("torch", "cpu")
    assert "it is written for torch" in str(strategy.obstacle(Place("jax", "cpu")))
    assert "needs the package no_such_package: install it" in str(strategy.obstacle(torch))
    named_otherwise = replace(strategy, needs=("yaml>=3", "no_such_package.part"))
    assert "needs the package no_such_package.part" in str(named_otherwise.obstacle(torch))
    assert "yaml 99 or newer, and 6" in str(replace(strategy, needs=("yaml>=99",)).obstacle(torch))
    monkeypatch.setattr("harness.contract.strategy.packages_distributions", lambda: {})
    assert "and 6" in str(replace(strategy, needs=("yaml>=99",)).obstacle(torch)), "looked at once: it takes long"
    useless = replace(strategy, needs=(), excludes={"torch/cpu": "a CPU has one memory"})
    assert useless.obstacle(torch) == "'mine' does not run on torch/cpu: a CPU has one memory"
    assert useless.obstacle(Place("torch", "cuda")) is None
    nothing = plugins.load().strategies["nothing"]
    assert nothing.obstacle(torch) is None
    loss = plugins.load().strategies["fused_loss"]
    decoder = plugins.load().workloads["decoder"]
    assert loss.obstacle(torch, decoder) is None
    assert "rewrites 'loss'" in str(loss.obstacle(torch, replace(decoder, lacks=("loss",))))
    frames = plugins.load().strategies["int8_rows"]
    assert "is for frames" in str(frames.obstacle(torch, decoder))


def test_the_nearest_right_name() -> None:
    assert nearest("los", PART_NAMES) == "; did you mean 'loss'?"
    assert nearest("zzz", ["a", "b"]) == "; there is a, b"
    assert nearest("gradient_checkpointing", ["budget_checkpoint", "checkpoint"]) == "; did you mean 'checkpoint'?"
    assert nearest("autocast", ["automatic", "bfloat16_autocast"]) == "; did you mean 'bfloat16_autocast'?"
    assert nearest("v100", ["h100", "l4"], 0.8) == "; there is h100, l4"


def test_a_plugin_that_is_installed_already_is_refused() -> None:
    module = "harness.workloads.decoder"
    assert f"'{module}' is installed already: leave it out" in refusal(module)
