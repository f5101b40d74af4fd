"""`harness check` finds every broken promise of a plugin, in words, and passes one that keeps its contract."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.contract import plugins
from harness.records import Applied, Case, Record, Task
from harness.report import check as report
from harness.verbs import check as verb
from harness.verdicts.numerics import Outcome
from harness.worker.contract_checks import Contract, _differences, measure

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "plugin"
HEAD = """
from dataclasses import replace
from itertools import islice
from harness import Holding, Strategy, Workload, hookimpl

def rewritten(part, wrap):
    def on_torch(parts, chunk: int = 8):
        return replace(parts, **{part: wrap(getattr(parts, part))})
    return on_torch

def same(inner):
    return lambda *args: inner(*args)

def of_data(part, wrap, **more):
    return offered(rewritten(part, wrap), (part,), holds=lambda extent: Holding(), **more)

def sized(parts, chunk: int = 8):
    loss = parts.loss
    return replace(parts, loss=lambda *args: loss(*args) * (1.0 if chunk == 2 else float("nan")))

def stuck(inner):
    def batches(parts, windows):
        known = []
        for x, y in inner(parts, windows):
            known.append((x, y))
            yield known[-1] if len(known) <= windows.source.count // windows.source.batch else known[0]
    return batches

def offered(on, rewrites=("loss",), about="Keep all, pay nothing.", **more):
    return Strategy("mine", rewrites=rewrites, on={"torch": on}, about=about, **more)
"""


def offering(item: str) -> str:
    return f"{HEAD}\n@hookimpl\ndef harness_strategies():\n    return [{item}]\n"


def faults(tmp_path: Path, item: str) -> list[str]:
    path = tmp_path / "mine.py"
    path.write_text(offering(item))
    case = Case(
        workload="decoder",
        shape={},
        place="torch/cpu",
        corpus="drawn",
        tokenizer="none",
        strategies=(Applied(name="mine"),),
    )
    task = Task(kind="contract", cases=(case,), run_id="", parent=0, folder="", plugins=(str(path),))
    return measure(task, plugins.load((str(path),)), None).extra["faults"]


def test_one_that_keeps_its_contract_has_no_faults(tmp_path: Path) -> None:
    assert faults(tmp_path, "offered(rewritten('loss', same))") == []


def test_knobs_that_decide_by_size_are_tried_as_answers_are_compared(tmp_path: Path) -> None:
    scaled = "scaled={'chunk': lambda value, shape, small: value // 4}"
    assert faults(tmp_path, f"offered(sized, {scaled})") == []
    assert "not finite" in faults(tmp_path, "offered(sized)")[0]


OF_RANKS = """
from dataclasses import replace
from harness import Strategy, hookimpl
from strategies import sharding

DDP = next(each for each in sharding.harness_strategies() if each.name == "ddp")

def divided(fault):
    def on_torch(parts):
        import torch.distributed as dist
        after, second = DDP.on["torch"](parts), dist.get_rank() == 1
        def reduce_gradients(parts, loss, grads):
            loss, grads = after.reduce_gradients(parts, loss, grads)
            if second and fault == "raises":
                raise ValueError("the second rank has no gradient")
            return loss * 1.01 if second and fault == "lies" else loss, grads
        def summed(parts, loss, grads):
            if not second:
                dist.all_reduce(loss)
            return loss, grads
        if fault == "is_silent":
            return replace(parts, reduce_gradients=summed)
        return replace(after, reduce_gradients=reduce_gradients)
    return on_torch

@hookimpl
def harness_strategies():
    return [Strategy(f"it_{fault}", DDP.rewrites, {"torch": divided(fault)}, "Divide.", calls=DDP.calls, ranks=True)
            for fault in ("raises", "lies", "works", "is_silent")]
"""


def test_what_goes_wrong_on_any_rank_is_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(OF_RANKS)
    place = {"workload": "decoder", "shape": {}, "place": "torch/cpu", "corpus": "drawn", "tokenizer": "none"}
    applied = {name: Applied(name=name) for name in ("it_works", "it_lies", "it_raises", "it_is_silent", "checkpoint")}
    rows = [("it_works",), ("it_works", "checkpoint"), ("it_lies",), ("it_raises",), ("it_is_silent",)]
    cases = tuple(Case(**place, ranks=2, strategies=tuple(applied[name] for name in row)) for row in rows)
    task = Task(kind="contract", cases=cases, run_id="", parent=os.getpid(), folder="", plugins=(str(path),))
    right, with_another, lying, raising, silent = verb.runner.run(task, 1, 120.0)
    assert right.extra["faults"] == with_another.extra["faults"] == []
    assert [fault[:40] for fault in lying.extra["faults"]] == ["on rank 1 of 2 its losses lie 1.0e-02 fr"]
    assert raising.status == "error" and "rank 1 of 2: the second rank has no gradient" in raising.evidence["message"]
    waits = "rank 0 of 2 waits for one that has ended well: let every rank call each collective"
    assert silent.evidence["message"] == waits


@pytest.mark.parametrize(("name", "seconds", "words"), [("ddp", 300, "a rank may wait"), ("fused_loss", 900, "")])
def test_a_rank_that_waits_for_ever_ends_at_a_deadline_and_the_trials_after_it_are_said_to_be_untested(
    monkeypatch: pytest.MonkeyPatch, name: str, seconds: float, words: str
) -> None:
    deadlines = set()

    def run(task: Task, threads: int, deadline: float) -> list[Record]:
        deadlines.add(deadline)
        return [Record(case=case, status="timeout", evidence={"message": "not finished"}) for case in task.cases]

    monkeypatch.setattr(verb.runner, "run", run)
    findings = list(verb._of_strategy(plugins.load(), name, (), str))
    faults = [fault for each in findings for fault in each.faults]
    places = len(plugins.load().strategies[name].on)
    assert deadlines == {seconds} and len(faults) == places
    untested = [each.where for each in findings if each.untested == "the trial before ended its worker"]
    assert len(untested) == places and len(findings) == 2 * places
    assert all(re.fullmatch(r"\d+ more trials? on (torch|jax)", where) for where in untested), untested
    assert all("ended with timeout: not finished" in fault and words in fault for fault in faults)


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("offered(rewritten('feed', same))", ["rewrites 'feed', which", "names 'loss', which it leaves"]),
        ("offered(rewritten('loss', lambda f: lambda *a: 1.001 * f(*a)))", ["losses lie 1.0e-03", "gradients lie"]),
        ("offered(rewritten('loss', lambda f: lambda *a: f(*a).detach()))", ["it raises RuntimeError: "]),
        ("offered(rewritten('loss', lambda f: lambda *a: f(*a) * float('nan')))", ["not finite"]),
        (
            "offered(rewritten('loss', lambda f: lambda *a: f(*a)[None]))",
            ["the loss of a step has the shape [1]: return one number"],
        ),
        (
            "offered(rewritten('evaluate', lambda f: lambda *a: f(*a) * float('nan')), ('evaluate',))",
            ["not finite: ", ", nan"],
        ),
        (
            "offered(rewritten('update', lambda f: lambda parts, state, grads: f(replace(parts, shape="
            "parts.shape.model_copy(update={'weight_decay': 0.0})), state, grads)), ('update',))",
            ["its losses lie "],
        ),
        (
            "offered(rewritten('batches', lambda f: lambda *a: ((x.flip(0), y.flip(0)) for x, y in f(*a))), "
            "('batches',))",
            ["does not say what it holds", "not those of the untouched"],
        ),
        ("offered(rewritten('loss', same), feeds='reordered')", ["rewrites no part of the data"]),
        (
            "of_data('order', lambda f: lambda *a: lambda start, stop: [n % 2 for n in range(start, stop)], "
            "feeds='reordered')",
            ["an epoch gives 2 of "],
        ),
        ("of_data('batches', lambda f: lambda *a: islice(f(*a), 4))", ["not those of the untouched"]),
        ("of_data('batches', stuck)", ["not those of the untouched"]),
        (
            "of_data('batches', lambda f: lambda *a: islice(f(*a), 2), feeds='other')",
            ["the batches ended after 2: give"],
        ),
        (
            "offered(lambda parts: replace(parts, loss=same(parts.loss), shape=parts.shape.model_copy("
            "update={'layers': 1})))",
            ["changes the sizes"],
        ),
    ],
)
def test_each_broken_promise_is_told(item: str, words: list[str], tmp_path: Path) -> None:
    told = " / ".join(faults(tmp_path, item))
    for each in words:
        assert each in told


@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        ({"trajectory": (1.0, float("nan"), 1.0)}, "its losses lie nan from"),
        ({"gradients": {"w": np.ones(2), "idle": None}}, "its gradient of 'w' has the shape (2,), and not (2, 2)"),
        ({}, None),
    ],
)
def test_what_differs_from_the_untouched_is_seen_whatever_it_is(own: dict[str, Any], sentence: "str | None") -> None:
    plain = Outcome(1.0, {"w": np.ones((2, 2)), "idle": None}, {}, {}, (1.0, 1.0, 1.0))
    faults = list(_differences(replace(plain, **own), plain, 1e-5))
    assert faults == [] if sentence is None else len(faults) == 1 and faults[0].startswith(sentence)


WORKLOAD = """
from dataclasses import replace
from harness import hookimpl
from harness.workloads import decoder

def on_torch(shape, place, corpus, seed=0):
    parts = decoder.on_torch(shape, place, corpus, seed)
    {body}
    return parts

@hookimpl
def harness_workloads():
    made, _ = decoder.harness_workloads()
    return [replace(made, name="mine", on={{"torch": on_torch}}, {more})]
"""


@pytest.mark.parametrize(
    ("body", "more", "words"),
    [
        ("", "", ""),
        ("", "lacks=('recur', 'scan')", "the part 'cache' is None"),
        ("", "lacks=('recur', 'scan', 'cache', 'feed')", "`lacks` names 'feed', which is there"),
        ("", "floor=lambda shape: 0", "`floor` gives 0"),
        ("", "abstract_batch=lambda shape: (((1, 1), 'int32'),) * 2", "and `abstract_batch` says"),
        (
            "import torch; init = parts.init; parts = replace(parts, init=lambda *a: (lambda s: {**s, 'params': "
            "{**s['params'], 'norm': torch.ones(shape.width, requires_grad=True)}})(init(*a)))",
            "",
            "'norm' is not made by `parts.draw`",
        ),
        (
            "import torch; loss = parts.loss; parts = replace(parts, "
            "loss=lambda *a: loss(*a) * (1 + torch.rand(()).item()))",
            "",
            "from those of the first (at most 0e+00): leave dropout to modules",
        ),
        (
            "import torch; block = parts.block; parts = replace(parts, "
            "block=lambda *a: (lambda x: x @ torch.eye(x.shape[-1]))(block(*a)))",
            "",
            "it does not train in bfloat16",
        ),
    ],
)
def test_each_broken_promise_of_a_workload_is_told(body: str, more: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(WORKLOAD.format(body=body or "pass", more=more))
    told = " / ".join(Contract(plugins.load((str(path),))).of_workload("mine", "torch"))
    assert words in told if words else told == ""


def test_of_a_model_whose_loss_is_not_finite_nothing_else_is_said(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    body = "loss = parts.loss; parts = replace(parts, loss=lambda *a: loss(*a) * float('nan'))"
    path.write_text(WORKLOAD.format(body=body, more=""))
    (fault,) = Contract(plugins.load((str(path),))).of_workload("mine", "torch")
    assert fault.startswith("its losses are not finite: nan")


def test_where_a_model_changes_in_its_forward_the_strategy_is_not_blamed_alone(tmp_path: Path) -> None:
    body = "; ".join((
        "calls, block = [], parts.block",
        "changing = lambda *a: (calls.append(1), block(*a) * (1 + 0.01 * len(calls)))[1]",
        "parts = replace(parts, block=changing)",
    ))  # fmt: skip
    path = tmp_path / "mine.py"
    path.write_text(WORKLOAD.format(body=body, more=""))
    contract = Contract(plugins.load((str(path),)))
    faults = list(contract.of_composition(("checkpoint",), "mine", "torch"))
    assert faults and "or the model, if its `forward` changes buffers" in faults[0]


@pytest.mark.parametrize(
    ("conflicts", "orders"),
    [
        ({}, ["mine", "mine + checkpoint", "checkpoint + mine"]),
        ({"before checkpoint": "it would hide it"}, ["mine", "checkpoint + mine"]),
        ({"checkpoint": "both keep inputs"}, ["mine", "mine + fused_loss", "fused_loss + mine"]),
        ({"checkpoint": "no", "fused_loss": "no"}, ["mine"]),
    ],
)
def test_orders_that_a_strategy_excludes_itself_are_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conflicts: dict[str, str], orders: list[str]
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(offering(f"offered(rewritten('loss', same), conflicts={conflicts})"))
    tried: list[str] = []

    def run(task: Task, *rest: object) -> list[Record]:
        tried.extend(case.label for case in task.cases if case.workload == "decoder")
        return [Record() for case in task.cases]

    monkeypatch.setattr(verb.runner, "run", run)
    findings = verb.check(plugins.load((str(path),)), (str(path),), (str(path),))
    assert tried == orders and not any(finding.faults for finding in findings)


DIFFERENT = """Strategy("mine", rewrites=("loss",), about="Keep all.", on={
    "torch": rewritten("loss", same), "jax": lambda parts: parts})"""


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("offered(rewritten('loss', same))", ""),
        (
            "offered(rewritten('loss', same), precision='float8', excludes={'jax/cuda': 'no kernel'}, "
            "alone={'chunk': 8}, calls=('mix',), needs=('torch>=2',))",
            "",
        ),
        (DIFFERENT, "its knobs for torch and jax differ"),
        ("offered(rewritten('loss', same), precision='bf16')", "`precision` is 'bf16': use one of float64"),
        ("offered(rewritten('loss', same), excludes={'jax/gpu': 'no'})", "'jax/gpu', which is no place: use torch/cpu"),
        ("offered(rewritten('loss', same), alone={'cold': True})", "`alone` names 'cold', which is no knob"),
        ("offered(rewritten('loss', same), needs=('torch'))", "`needs` is a text: make it a tuple, ('torch',)"),
        ("offered(rewritten('loss', same), calls=('mix'))", "`calls` is a text: make it a tuple, ('mix',)"),
        ("offered(rewritten('loss', same), calls=None)", "`calls` is a NoneType: make it a tuple"),
        ("offered(rewritten('loss', same), needs=None)", "`needs` is a NoneType: make it a tuple"),
        ("offered(rewritten('loss', same), conflicts=('checkpoint',))", "`conflicts` is a tuple: make it a dict"),
        ("offered(rewritten('loss', same), probe=[8])", "`probe` is a list: make it a dict"),
    ],
)
def test_what_a_strategy_says_of_itself_is_read_before_it_is_tried(item: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(offering(item))
    said = list(verb.described(plugins.load((str(path),)).strategies["mine"]))
    assert len(said) == (1 if words else 0) and words in "".join(said)


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every trial of a plugin end well."""
    monkeypatch.setattr(verb.runner, "run", lambda task, *rest: [Record() for case in task.cases])


def said_of(path: Path) -> str:
    """Return the faults that a check finds in a plugin's file."""
    name = str(path)
    return " / ".join(fault for each in verb.check(plugins.load((name,)), (name,), (name,)) for fault in each.faults)


MARKED = offering("offered(rewritten('loss', same))")
RENAMED = MARKED.replace("@hookimpl\ndef harness_strategies", "@hookimpl(specname='harness_strategies')\ndef mine")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (MARKED, ""),
        (RENAMED, ""),
        (MARKED.replace("@hookimpl\n", ""), "nothing calls its function 'harness_strategies': decorate it"),
        (MARKED + "\ndef harness_workloads():\n    return []\n", "nothing calls its function 'harness_workloads'"),
        (MARKED.replace("def harness_strategies", "def harness_strategy"), "did you mean 'harness_strategies'?"),
        (offering("offered(rewritten('loss', same), conflicts=('checkpoint',))"), "make it a dict"),
        (offering("offered(rewritten('loss', same), conflicts={'chekpoint': 'no'})"), "did you mean 'checkpoint'?"),
        (offering("offered(rewritten('loss', same), conflicts={'of_another_plugin': 'no'})"), ""),
        (offering("offered(rewritten('loss', same), conflicts={'befor checkpoint': 'no'})"), "write 'NAME' or 'before"),
        ("from harness import hookimpl\n@hookimpl\ndef harness_strategies():\n    return []\n", "it offers nothing"),
    ],
    ids=[
        "a hook",
        "under another name",
        "not marked",
        "one of two not marked",
        "misspelt",
        "no dict",
        "misspelt name",
        "of another plugin",
        "no order",
        "nothing",
    ],
)
def test_a_function_that_would_be_a_hook_and_is_not_called_is_named(
    text: str, words: str, tmp_path: Path, untried: None
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    assert words in said_of(path) if words else said_of(path) == ""


OWN_MODEL = """
from harness import Sizes, hookimpl, of_torch

class MySizes(Sizes):
    width: int{default}

@hookimpl
def harness_workloads():
    return [of_torch("mine", lambda shape: None, MySizes, small={small})]
"""


@pytest.mark.parametrize(
    ("default", "small", "words"),
    [
        (" = 64", "{'width': 32}", ""),
        (" = 64", "{'widht': 32}", "its small sizes name 'widht', which is no size; did you mean 'width'?"),
        ("", "{'width': 32}", "its size 'width' has no default"),
    ],
)
def test_sizes_at_which_a_model_cannot_be_tried_are_named(
    default: str, small: str, words: str, tmp_path: Path, untried: None
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(OWN_MODEL.format(default=default, small=small))
    assert words in said_of(path) if words else said_of(path) == ""


def test_a_workload_without_a_model_of_its_sizes_is_said(tmp_path: Path, untried: None) -> None:
    path = tmp_path / "mine.py"
    path.write_text(WORKLOAD.format(body="pass", more="shape=dict"))
    assert "`shape` is no pydantic model" in said_of(path)


@pytest.mark.parametrize(("count", "words"), [(1, "; 1 trial\n"), (2, "; 2 trials\n")])
def test_the_trials_are_counted(count: int, words: str) -> None:
    assert report.text([verb.Finding("instrument")] * count).endswith(f"the contract is kept{words}")


def check(*names: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "harness", "check", *names]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=500)


@pytest.mark.long
def test_the_example_is_installed_found_and_keeps_its_contract(tmp_path: Path, made_up: Path) -> None:
    """The package as a third party would have it: built, installed, known by its entry points alone."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-build-isolation", "--target", str(tmp_path / "site"), str(EXAMPLE)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    done = check("harness-example", PYTHONPATH=str(tmp_path / "site"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kept       strategy 'checkpoint_mix' (decoder on torch)" in done.stdout
    assert "kept       strategy 'checkpoint_mix' (temporal on jax)" in done.stdout
    assert "decoder on torch, checkpoint_mix + checkpoint" in done.stdout
    assert "kept       instrument (torch)" in done.stdout
    assert "the contract is kept" in done.stdout
    suite = tmp_path / "small.yaml"
    suite.write_text(
        "title: x\nworkload: decoder\nplaces: [torch/cpu]\ncorpus: zipf\ntokenizer: bytes\n"
        "shape: {preset: tiny, vocabulary: 256}\nstrategies: [checkpoint_mix]\nrounds: 0\n"
    )
    command = [sys.executable, "-m", "harness", "run", str(suite), "--results", str(tmp_path / "results")]
    command += ["--plugin", str(made_up)]  # instruments see it as any other measurement
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    ran = subprocess.run(command, capture_output=True, text=True, env=env)
    assert "| `checkpoint_mix`" in ran.stdout, ran.stderr
    assert "minor faults" in ran.stdout, "what the instrument counted is shown"


@pytest.mark.long
def test_instruments_are_held_to_what_they_add_and_cost(tmp_path: Path) -> None:
    (tmp_path / "heavy.py").write_text(
        "from harness import hookimpl\nkept = []\n"
        "@hookimpl(wrapper=True)\ndef harness_measure(task):\n"
        "    import threading, time\n"
        "    def grow():\n"
        "        while len(kept) < 1500:\n"
        "            time.sleep(0.015)\n"  # so that it still grows when a busy machine has started the run
        "            kept.append(bytearray(b'x' * (1 << 20)))\n"
        "    threading.Thread(target=grow, daemon=True).start()\n"
        "    return (yield)\n"
    )
    (tmp_path / "taker.py").write_text(
        "from harness import hookimpl\n@hookimpl\ndef harness_measure(task):\n    return None\n"
    )
    done = check(str(tmp_path / "taker.py"))
    assert done.returncode == 1 and "takes the measuring over" in done.stdout
    done = check(str(tmp_path / "heavy.py"))
    assert done.returncode == 1 and "it adds nothing to `extra`" in done.stdout
    assert "MiB to the peak that it watches" in done.stdout


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("import torch\n" + offering("offered(rewritten('loss', same))"), 1, "it imports torch when it is loaded"),
        ("x = 1\n", 1, "it implements no hook"),
        ("raise ValueError('no')\n", 2, "raises when loaded"),
        (offering("offered(rewritten('loss', same), about='Keep. Pay. All')"), 1, "not one sentence"),
    ],
)
def test_what_cannot_be_used_is_said_in_words(text: str, code: int, words: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    done = check(str(path))
    assert done.returncode == code, done.stdout + done.stderr
    assert words in done.stdout + done.stderr and "Traceback" not in done.stderr


def test_a_plugin_that_is_not_there_is_refused() -> None:
    done = check("no_such_plugin")
    assert done.returncode == 2 and done.stderr.startswith("harness: plugin 'no_such_plugin' cannot be imported")
