"""A suite is read whole before anything runs; a mistake is named with its line and the nearest right word."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.contract import plugins
from harness.suite import reader
from harness.suite.bounds import SuiteError
from harness.suite.plan import Plan, selected
from harness.suite.reader import read
from harness.suite.schema import Suite

ROOT = Path(__file__).resolve().parents[3]
SUITES = sorted(path for path in (ROOT / "suites").glob("*.yaml") if path.name != "claims.yaml")

PLUGIN = """
from harness import Strategy, hookimpl

def untouched(parts, slots: int = 4, decay: float = 0.5, exact: bool = True, kind: str = "plain"):
    return parts

@hookimpl
def harness_strategies():
    return [
        Strategy("paged", rewrites=("cache",), on={"torch": untouched}, about="Page the cache."),
        Strategy("knobby", rewrites=("loss",), on={"torch": untouched}, about="Have knobs.", aliases=("turnable",)),
    ]
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> plugins.Plugins:
    file = tmp_path_factory.mktemp("plugin") / "paged.py"
    file.write_text(PLUGIN)
    return plugins.load((str(file),))


@pytest.fixture
def plan_of(tmp_path: Path, loaded: plugins.Plugins) -> Any:
    """Read lines of YAML; the keys that a suite cannot do without are added where they are missing."""

    def plan(text: str) -> Plan:
        file = tmp_path / "try.yaml"
        lines = text.strip("\n").splitlines()
        keys = {line.partition(":")[0] for line in lines}
        needed = {
            "title": "title: Try",
            "workload": "workload: decoder",
            "corpus": "corpus: zipf",
            "strategies": "strategies: [nothing]",
        }
        file.write_text("\n".join([*lines, *(line for key, line in needed.items() if key not in keys)]) + "\n")
        return read(file, loaded)

    return plan


@pytest.fixture
def refusal_of(plan_of: Any, tmp_path: Path) -> Any:
    """Read a suite that must be refused; return the sentence without the file it begins with."""

    def refusal(text: str) -> str:
        with pytest.raises(SuiteError) as caught:
            plan_of(text)
        sentence = str(caught.value)
        assert sentence.startswith(f"{tmp_path / 'try.yaml'}")
        assert sentence.isprintable(), "more than one line, or signs that a terminal obeys"
        return sentence.removeprefix(f"{tmp_path / 'try.yaml'}")

    return refusal


def labels(plan: Plan) -> list[list[str]]:
    return [[case.label for case in group.cases] for group in plan.comparisons]


# What a suite means


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_every_suite_of_the_project_is_valid(path: Path) -> None:
    plan = read(path, plugins.load())
    assert plan.name == path.stem
    for group in plan.comparisons:
        assert group.baseline.strategies == ()
        assert len({case.digest() for case in group.cases}) == len(group.cases) > 1
        assert {case.comparison_key for case in group.cases} == {group.baseline.comparison_key}
    assert len({group.baseline.comparison_key for group in plan.comparisons}) == len(plan.comparisons)


def test_there_are_suites() -> None:
    assert SUITES


def test_the_schema_names_every_workload_that_ships() -> None:
    described = Suite.model_fields["workload"].description or ""
    assert [name for name in plugins.load().workloads if name not in described] == []


def test_lists_in_shape_mean_each_value_in_turn(plan_of: Any) -> None:
    plan = plan_of("shape: {tokens: [64, 128], width: 32, batch: [1, 2]}")
    sizes = [
        (g.baseline.shape["tokens"], g.baseline.shape["batch"], g.baseline.shape["width"]) for g in plan.comparisons
    ]
    assert sizes == [(64, 1, 32), (64, 2, 32), (128, 1, 32), (128, 2, 32)]
    assert plan.comparisons[0].baseline.shape["heads"] == 4, "a default that the suite leaves out belongs to the case"


def test_lists_in_knobs_and_rows_expand_and_the_baseline_comes_first(plan_of: Any) -> None:
    plan = plan_of("""
strategies:
  - nothing
  - chunked_loss: {chunk: [64, 128], recompute: [true, false]}
  - [checkpoint, {fused_loss: {chunk: [16, 32]}}]
  - [{fused_loss: {chunk: 16}}, checkpoint]
""")
    assert labels(plan) == [
        [
            "baseline",
            "nothing",
            "chunked_loss(chunk=64, recompute=true)",
            "chunked_loss(chunk=64, recompute=false)",
            "chunked_loss(chunk=128, recompute=true)",
            "chunked_loss(chunk=128, recompute=false)",
            "checkpoint + fused_loss(chunk=16)",
            "checkpoint + fused_loss(chunk=32)",
            "fused_loss(chunk=16) + checkpoint",
        ]
    ]


def test_places_and_shapes_make_groups_whose_cases_share_all_but_the_strategies(plan_of: Any) -> None:
    plan = plan_of("places: [torch/cpu, jax/cpu]\nshape: {tokens: [64, 128]}\nseed: 7\nbudget_gib: 0.5")
    assert [(str(g.baseline.place), g.baseline.shape["tokens"]) for g in plan.comparisons] == [
        ("torch/cpu", 64),
        ("torch/cpu", 128),
        ("jax/cpu", 64),
        ("jax/cpu", 128),
    ]
    for case in plan.cases:
        assert (case.workload, case.corpus, case.seed, case.budget_bytes) == ("decoder", "zipf", 7, 1 << 29)
    assert len({case.comparison_key for case in plan.cases}) == 4


def test_at_adds_to_the_shape_or_replaces_it_by_a_preset(plan_of: Any) -> None:
    plan = plan_of("""
places: [torch/cpu, torch/cuda, jax/cuda]
shape: {layers: 3, tokens: [64, 128]}
budget_gib: 1
at:
  "torch/cuda": {width: 512, budget_gib: 8}
  "jax/*": {preset: qwen3-4b, tokens: 4096}
""")
    cpu, cuda, jax = (
        [g.baseline for g in plan.comparisons if str(g.baseline.place) == p]
        for p in ("torch/cpu", "torch/cuda", "jax/cuda")
    )
    assert [(c.shape["layers"], c.shape["tokens"], c.shape["width"]) for c in cpu] == [(3, 64, 256), (3, 128, 256)]
    assert [(c.shape["layers"], c.shape["tokens"], c.shape["width"]) for c in cuda] == [(3, 64, 512), (3, 128, 512)]
    assert [(c.shape["layers"], c.shape["tokens"], c.shape["width"]) for c in jax] == [(36, 4096, 2560)]
    assert {c.budget_bytes for c in cpu} == {1 << 30} == {c.budget_bytes for c in jax}
    assert {c.budget_bytes for c in cuda} == {8 << 30}


def test_a_preset_is_filled_in_and_overridden(plan_of: Any) -> None:
    shape = plan_of("shape: {preset: pythia-70m, tokens: 96}").comparisons[0].baseline.shape
    assert (shape["layers"], shape["feed"], shape["vocabulary"], shape["tokens"]) == (6, "gelu", 50_304, 96)


def test_the_smallest_budget(plan_of: Any) -> None:
    assert plan_of("budget_gib: 0.015625").cases[0].budget_bytes == 1 << 24


@pytest.mark.parametrize("workload", ["scoring", "temporal"])
def test_an_evaluation_of_what_ends_with_its_steps_is_refused(refusal_of: Any, workload: str) -> None:
    sentence = refusal_of(f"workload: {workload}\nshape: {{evaluations: 2}}\nstrategies: [nothing]")
    known = "the workload 'scoring' ends with its steps: leave out 'evaluations'"
    assert (known if workload == "scoring" else "there is no such key") in sentence


def test_an_int_is_taken_for_a_float_knob_and_kept_as_a_float(plan_of: Any) -> None:
    (applied,) = plan_of("strategies: [{knobby: {decay: 1}}]").cases[-1].strategies
    assert applied.knobs == {"decay": 1.0}
    assert type(applied.knobs["decay"]) is float


def test_a_former_name_stands_for_the_strategy(plan_of: Any, refusal_of: Any) -> None:
    plan = plan_of("places: [torch/cpu]\nstrategies:\n  - turnable\n  - turnable: {decay: 2}")
    assert [case.label for case in plan.cases][-2:] == ["knobby", "knobby(decay=2.0)"]
    assert "'knobby' is listed twice" in refusal_of("places: [torch/cpu]\nstrategies: [knobby, turnable]")
    turned = "[chunked_loss: {chunk: 16, recompute: true}, chunked_loss: {recompute: true, chunk: 16}]"
    assert "is listed twice" in refusal_of(f"places: [torch/cpu]\nstrategies: {turned}")
    claims = plan_of('strategies: [turnable]\nclaims: [{id: A, says: s, that: "loss(turnable) > 1"}]').suite.claims
    assert [claim.that for claim in claims] == ["loss(knobby) > 1"]


def test_the_control_joins_where_there_can_be_speed_verdicts(plan_of: Any) -> None:
    labels = {
        rounds: [case.label for case in plan_of(f"strategies: [checkpoint]\nrounds: {rounds}").cases]
        for rounds in (1, 2)
    }
    assert labels == {1: ["baseline", "checkpoint"], 2: ["baseline", "nothing", "checkpoint"]}


def test_the_control_joins_by_the_rounds_that_will_run(tmp_path: Path, loaded: plugins.Plugins) -> None:
    path = tmp_path / "try.yaml"
    path.write_text("title: Try\nworkload: decoder\ncorpus: zipf\nstrategies: [checkpoint]\nrounds: 0\n")
    labels = [[case.label for case in read(path, loaded, rounds=rounds).cases] for rounds in (None, 0, 1, 8)]
    assert labels == [["baseline", "checkpoint"]] * 3 + [["baseline", "nothing", "checkpoint"]]


def test_values_that_begin_alike_are_two(plan_of: Any, tmp_path: Path) -> None:
    begin = "a" * 100
    plan = plan_of(f"strategies:\n- knobby: {{kind: [{begin}1, {begin}2]}}")
    assert [case.strategies[0].knobs["kind"][-1] for case in plan.cases if "knobby" in case.label] == ["1", "2"]


# What a suite may not say: (YAML, line or None, words of the sentence)

MISTAKES = {
    "misspelt key": ("titel: x", 1, "titel", "did you mean 'title'?"),
    "misspelt strategy": ("strategies:\n  - nothing\n  - chekpoint", 3, "'chekpoint'", "did you mean 'checkpoint'?"),
    "misspelt within a row": ("strategies:\n- [checkpoint, fused_los]", 2, "'fused_los'", "did you mean 'fused_loss'?"),
    "misspelt knob": ("strategies:\n- chunked_loss: {chunks: 4}", 2, "'chunks'", "did you mean 'chunk'?"),
    "knob of one that has none": ("strategies:\n- nothing: {chunk: 4}", 2, "'chunk'", "it has none"),
    "misspelt workload": ("title: x\nworkload: decodr", 2, "'decodr'", "did you mean 'decoder'?"),
    "misspelt preset": ("shape: {preset: qwen3-4}", 1, "'qwen3-4'", "did you mean 'qwen3-4b'?"),
    "misspelt preset in at": ('at:\n  "torch/*": {preset: tyni}', 2, "'tyni'", "did you mean 'tiny'?"),
    "sizes that presets replace": (
        "shape: {tokens: 64}\neach:\n- {preset: tiny}\n- {preset: small}",
        1,
        "`each`",
        "put these sizes into the entries",
    ),
    "sizes at a place that presets replace": (
        'at:\n  "torch/*": {budget_gib: 1}\n  "*/cpu": {tokens: 64, budget_gib: 1}\neach:\n- {preset: tiny}',
        3,
        "at.*/cpu",
        "put these sizes into the entries",
    ),
    "misspelt place": ("places:\n- torch/cpu\n- torch/cdua", 3, "'torch/cdua'", "did you mean 'torch/cuda'?"),
    "a place for which a workload has no form": (
        "workload: causal_lm\nplaces: [torch/cpu, jax/cpu]",
        2,
        "'causal_lm' has no form for jax",
        "write torch/cpu or torch/cuda",
    ),
    "misspelt place in at": ('at: {"*/cdua": {tokens: 64}}', 1, "*/cdua", "place"),
    "no place at all": ("places: [cpu]", 1, "'cpu'", "write backend/device"),
    "a place that the suite does not have": (
        'places: [torch/cpu]\nat:\n  "*/cpu": {tokens: 64}\n  "jax/*": {toknes: 64}',
        4,
        "'jax/*'",
        "none of `places` matches",
    ),
    "a tokenizer of frames": (
        "workload: temporal\ncorpus: generated\ntokenizer: bytes",
        3,
        "'temporal' reads frames",
        "no tokenizer: leave it out",
    ),
    "a tokenizer of frames in turn": (
        "workload: temporal\ncorpus: generated\neach:\n- {tokenizer: bytes}\n- {tokenizer: words}",
        4,
        "each.0.tokenizer",
        "no tokenizer: leave it out",
    ),
    "no places": ("places: []", 1, "places", "it is empty", "at least one"),
    "misspelt size": ("shape: {tokens: 64, widht: 3}", 1, "widht", "did you mean 'width'?"),
    "misspelt size in at": ('shape: {tokens: 64}\nat:\n  "*/cpu": {widht: 3}', 3, "widht", "did you mean 'width'?"),
    "misspelt tokenizer": ("tokenizer: byte", 1, "'bytes'", "'byte'"),
    "misspelt word in a size": ("shape: {feed: gleu}", 1, "'gelu'", "'gleu'"),
    "text for a number": ("title: x\nrounds: three", 2, "rounds", "'three'"),
    "a number for text": ("title: 3", 1, "title", "string"),
    "a bool for a number": ("rounds: true", 1, "rounds", "True"),
    "a float for an int": ("shape: {tokens: 64.0}", 1, "tokens", "integer"),
    "a list for a mapping": ("shape: [64]", 1, "shape", "[64]"),
    "text for a list": ("strategies: nothing", 1, "strategies", "list"),
    "a number for a strategy": ("strategies:\n- nothing\n- 3", 3, "3 is not a strategy", "NAME"),
    "two strategies in one mapping": ("strategies:\n- {nothing: {}, checkpoint: {}}", 2, "not a strategy", "NAME"),
    "text for knobs": ("strategies:\n- checkpoint: every", 2, "not a strategy", "{knob: value}"),
    "a float for an int knob": ("strategies:\n- knobby: {slots: 1.5}", 2, "'slots'", "takes int, not 1.5"),
    "a bool for an int knob": ("strategies:\n- knobby: {slots: true}", 2, "'slots'", "takes int, not True"),
    "an int for a bool knob": ("strategies:\n- knobby: {exact: 1}", 2, "'exact'", "takes bool, not 1"),
    "a number for a text knob": ("strategies:\n- knobby: {kind: 1}", 2, "'kind'", "takes str, not 1"),
    "nothing for a knob": ("strategies:\n- knobby: {slots:}", 2, "'slots'", "takes int, not None"),
    "a mapping for a knob": ("strategies:\n- knobby: {slots: {a: 1}}", 2, "'slots'", "takes int"),
    "no strategies": ("strategies: []", 1, "strategies", "it is empty", "at least one"),
    "an empty row": ("strategies:\n- nothing\n- []", 3, "empty list", "name at least one"),
    "an empty list of sizes": ("shape:\n  tokens: []", 2, "tokens", "empty"),
    "an empty list of knobs": ("strategies:\n- checkpoint: {every: []}", 2, "every", "empty"),
    "stride 0": ("shape: {stride: 0}", 1, "stride", "greater than or equal to 1"),
    "no tokens": ("shape: {tokens: 0}", 1, "tokens", "greater than or equal to 1"),
    "heads that do not fit": ("shape: {width: 30, heads: 4}", 1, "width 30 is not a multiple of heads 4", "head_width"),
    "negative budget": ("budget_gib: -8", 1, "budget_gib", "-8"),
    "budget of nothing": ("budget_gib: 0", 1, "budget_gib", "0"),
    "budget below 1/64 GiB": ("budget_gib: 0.0156", 1, "budget_gib", "0.0156"),
    "negative budget in at": ('at:\n  "*/cpu": {budget_gib: -1}', 2, "budget_gib", "from 1/64"),
    "small budget in at": ('at:\n  "*/cpu": {budget_gib: 0.0156}', 2, "budget_gib", "from 1/64"),
    "text for a budget in at": ('at:\n  "*/cpu": {budget_gib: 8GiB}', 2, "'8GiB'", "from 1/64"),
    "a bool for a budget in at": ('at:\n  "*/cpu": {budget_gib: true}', 2, "True", "from 1/64"),
    "no time": ("timeout_seconds: 0", 1, "timeout_seconds", "greater than 0"),
    "too few steps": ("steps: 1", 1, "steps", "greater than or equal to 2"),
    "a strategy twice": ("strategies:\n- nothing\n- checkpoint\n- checkpoint", 4, "'checkpoint'", "twice"),
    "a strategy twice in a row": (
        "strategies:\n- [lora, checkpoint, lora: {rank: 3}]",
        2,
        "'lora'",
        "twice in one row",
    ),
    "a knob's value twice": ("strategies:\n- checkpoint: {every: [2, 2]}", 2, "every: 2 is listed", "twice"),
    "a row twice": (
        "strategies:\n- [checkpoint, nothing]\n- [checkpoint, nothing]",
        3,
        "'checkpoint + nothing'",
        "twice",
    ),
    "a comparison twice": ("shape: {tokens: 64}\neach:\n- {}\n- {tokens: 64}", 4, "in the suite already", "remove one"),
    "a place twice": ("places: [torch/cpu, jax/cpu, torch/cpu]", 1, "'torch/cpu'", "twice"),
    "a size twice": ("shape:\n  tokens: [64, 64]", 2, "64", "twice"),
    "a key twice": ("title: x\ntitle: y", 2, "'title'", "keep one"),
    "a missing corpus": ("corpus: no/such.txt", 1, "no/such.txt", "corpus"),
    "a corpus outside": ("corpus: ../outside.txt", 1, "../outside.txt", "name a path inside"),
    "an absolute corpus": ("corpus: /etc/hostname", 1, "/etc/hostname", "name a path inside"),
    "a part that is missing": ("strategies:\n- nothing\n- paged", 3, "'cache'", "'decoder' does not have"),
    "no YAML": ("title: [x", None, "line", "not YAML"),
    "two claims of one name": (
        "claims:\n- {id: A, says: a, that: 1 < 2}\n- {id: B, says: b, that: 1 < 2}\n- {id: A, says: c, that: 1 < 2}",
        4,
        "claims.2.id: 'A'",
        "give another",
    ),
    "a claim without words": ("claims:\n- {id: A, that: 1 < 2}", 2, "'says'", "add it"),
    "a misspelt key of a claim": ("claims:\n- {id: A, says: a, that: b, were: {}}", 2, "were", "did you mean 'where'?"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_with_its_line_and_the_remedy(refusal_of: Any, tmp_path: Path, name: str) -> None:
    (tmp_path.parent / "outside.txt").write_text("outside")
    text, line, *words = MISTAKES[name]
    sentence = refusal_of(text)
    if line is not None:
        assert sentence.startswith((f", line {line}: ", f", line {line}, column "))
    for word in words:
        assert word in sentence


@pytest.mark.parametrize("key", ["title", "workload", "strategies"])
def test_a_missing_key_is_named(loaded: plugins.Plugins, tmp_path: Path, key: str) -> None:
    lines = {"title": "title: x", "workload": "workload: decoder", "strategies": "strategies: [nothing]"}
    file = tmp_path / "short.yaml"
    file.write_text("\n".join(line for name, line in lines.items() if name != key))
    with pytest.raises(SuiteError, match=f"short.yaml.*the key '{key}' is missing: add it"):
        read(file, loaded)


def test_a_missing_file_is_named(loaded: plugins.Plugins, tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match=r"nowhere\.yaml: cannot be read"):
        read(tmp_path / "nowhere.yaml", loaded)


def test_a_corpus_that_a_link_leads_out_is_refused(refusal_of: Any, tmp_path: Path) -> None:
    (tmp_path / "link.txt").symlink_to(tmp_path.parent / "secret.txt")
    (tmp_path.parent / "secret.txt").write_text("secret")
    assert "link.txt" in refusal_of("corpus: link.txt")


def test_a_corpus_beside_the_suite_is_found(plan_of: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("some text")
    assert plan_of("corpus: mine.txt").cases[0].corpus == "mine.txt"


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    "text",
    [
        f"shape: {{tokens: [{', '.join(map(str, range(64, 5100)))}]}}",
        "shape: {" + ", ".join(f"{k}: {list(range(2, 62, 2))}" for k in ("layers", "batch", "tokens", "hidden")) + "}",
        "strategies: [{knobby: {"
        + ", ".join(f"{k}: {list(range(100))}" for k in ("slots", "decay"))
        + ", exact: [true, false]}}]",
    ],
    ids=["a long list", "a product of shapes", "a product of knobs"],
)
def test_too_many_cases_are_refused_before_they_are_made(refusal_of: Any, text: str) -> None:
    assert "more than 10000" in refusal_of(text).replace("_", "").replace(",", "")


@pytest.mark.parametrize("entry", ["[{}]", "{{contributions: [{}]}}"], ids=["a row", "contributions"])
def test_a_row_of_thousands_is_refused_at_once(refusal_of: Any, entry: str, slowness: float) -> None:
    text = f"strategies: [{entry.format(', '.join(['nothing'] * 19_000))}]"
    seconds = []
    for _ in range(3):  # a neighbour on the other thread of the core slows one of them
        started = time.thread_time()
        assert refusal_of(text) == ", line 1: strategies.0: 19000 strategies are more than 64: name fewer"
        seconds.append(time.thread_time() - started)
    assert min(seconds) < slowness


def test_a_row_has_64_strategies_at_most(plan_of: Any, refusal_of: Any, loaded: plugins.Plugins) -> None:
    fitting = (name for name, each in loaded.strategies.items() if each.misfit(loaded.workloads["decoder"]) is None)
    names = [name for name in fitting if name != "nothing"][:65]
    assert len(plan_of(f"strategies: [[{', '.join(names[:64])}]]\nrounds: 0").cases[-1].strategies) == 64
    assert "65 strategies are more than 64" in refusal_of(f"strategies: [[{', '.join(names)}]]")


def test_a_misspelt_key_in_place_of_one_that_must_be_there_is_named(tmp_path: Path, loaded: plugins.Plugins) -> None:
    (tmp_path / "try.yaml").write_text("title: x\nworkload: decoder\nstrategeis: [checkpoint]\n")
    with pytest.raises(SuiteError, match=r"line 3: strategeis: there is no such key.*did you mean 'strategies'"):
        reader.read(tmp_path / "try.yaml", loaded)


def test_rows_of_contributions_are_counted_before_they_are_made(
    refusal_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "contributions", lambda row: pytest.fail("a row was made"))
    members = ["nothing"] * 40 + [f"{{chunked_loss: {{chunk: {list(range(1, 201))}}}}}"]
    sentence = f"{1 + 200 * (2 * 41 + 1)} cases are more than 10000"
    assert sentence in refusal_of(f"strategies: [{{contributions: [{', '.join(members)}]}}]")


def test_knobs_of_a_row_are_counted_member_by_member(refusal_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(reader, "Applied", lambda **words: made.append(words))
    member = f"{{knobby: {{slots: {list(range(60))}, decay: {list(range(60))}}}}}"
    assert "12960001 cases are more than 10000" in refusal_of(f"strategies: [[{', '.join([member] * 64)}]]")
    assert len(made) == 2 * 3600, "of two members, not of 64"


def test_the_cases_of_all_comparisons_are_counted_before_any_is_made(
    refusal_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(**anything: object) -> None:
        pytest.fail("a case was made")

    monkeypatch.setattr(reader, "Case", made)
    sizes, rows = list(range(64, 104)), list(range(1, 101))
    text = f"places: [torch/cpu, jax/cpu]\nshape: {{tokens: {sizes}, batch: {sizes}}}\nrounds: 0\n"
    text += f"strategies: [{{chunked_loss: {{chunk: {rows}}}}}]"
    assert "323200 cases are more than 10000" in refusal_of(text)


@pytest.mark.parametrize("text", ['"tit\\x1b[31mle": x', 'workload: "a\\nb"', 'strategies: ["\\x1b]0;x\\x07"]'])
def test_a_refusal_repeats_nothing_that_a_terminal_obeys(refusal_of: Any, text: str) -> None:
    assert refusal_of(text)  # the fixture looks at every sign


# Choosing


CHOICE = """
places: [torch/cpu, jax/cpu]
strategies: [nothing, checkpoint, {chunked_loss: {chunk: 8}}, [checkpoint, {fused_loss: {chunk: 8}}]]
"""


def test_selecting_keeps_baseline_and_control(plan_of: Any) -> None:
    plan = plan_of(CHOICE)
    assert selected(plan, None, None).comparisons == plan.comparisons
    assert labels(selected(plan, None, "fused")) == 2 * [["baseline", "nothing", "checkpoint + fused_loss(chunk=8)"]]
    only = selected(plan, ["jax/cpu"], "checkpoint")
    assert {str(case.place) for case in only.cases} == {"jax/cpu"}
    assert labels(only) == [["baseline", "nothing", "checkpoint", "checkpoint + fused_loss(chunk=8)"]]


@pytest.mark.parametrize(
    ("places", "only", "words"),
    [
        (["torch/cup"], None, "did you mean 'torch/cpu'?"),
        (["torch/cuda"], None, "it has no place 'torch/cuda': add it to `places`"),
        (None, "chekpoint", "no strategy's name contains 'chekpoint'"),
    ],
)
def test_selecting_what_is_not_there_is_refused(plan_of: Any, places: Any, only: Any, words: str) -> None:
    with pytest.raises(SuiteError) as caught:
        selected(plan_of(CHOICE), places, only)
    assert words in str(caught.value)


# Anything at all

KEYS = ["title", "workload", "places", "corpus", "tokenizer", "shape", "at", "budget_gib", "strategies", "rounds",
        "steps", "seed", "claims", "tokens", "preset", "stride", "width", "heads", "chunk", "nothing", "checkpoint",
        "fused_loss", "*/cpu", "torch/cpu", "decoder", "zipf", "bytes", "tiny", "id", "says", "that"]  # fmt: skip
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.floats(allow_nan=False, allow_infinity=False, width=16),
    st.sampled_from(KEYS),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=8,
)
ANY_MAPPING = st.dictionaries(st.sampled_from(KEYS) | st.text("abc<\x00\x1b", max_size=3), VALUES, max_size=6)
GOOD = {"title": "t", "workload": "decoder", "corpus": "zipf", "strategies": ["nothing"], "shape": {"preset": "tiny"}}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ANY_MAPPING, st.sets(st.sampled_from(sorted(GOOD))))
def test_any_mapping_is_a_plan_or_is_refused(
    loaded: plugins.Plugins, tmp_path: Path, mapping: "dict[str, Any]", kept: "set[str]"
) -> None:
    file = tmp_path / "any.yaml"
    file.write_text(json.dumps(mapping | {key: GOOD[key] for key in kept}))
    try:
        plan = read(file, loaded)
    except SuiteError as refused:
        assert str(file) in str(refused)
        return
    assert plan.comparisons, "a plan without anything to run"
    for group in plan.comparisons:
        assert group.baseline.label == "baseline"
        assert all(case.budget_bytes is None or math.isfinite(case.budget_bytes) for case in group.cases)
        assert len({case.digest() for case in group.cases}) == len(group.cases) > 1


def test_each_takes_settings_in_turn_with_a_corpus_and_a_tokenizer_of_their_own(plan_of):
    plan = plan_of(
        "corpus: standard_library\nshape: {tokens: [64, 128]}\neach:\n"
        "  - {vocabulary: 300, tokenizer: bytes}\n"
        "  - {vocabulary: 5000, corpus: zipf, budget_gib: 2}\n"
    )
    told = [
        (case.shape["vocabulary"], case.shape["tokens"], case.corpus, case.tokenizer, case.budget_bytes)
        for case in (group.baseline for group in plan.comparisons)
    ]
    assert told == [
        (300, 64, "standard_library", "bytes", None),
        (300, 128, "standard_library", "bytes", None),
        (5000, 64, "zipf", "bpe", 2 << 30),
        (5000, 128, "zipf", "bpe", 2 << 30),
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{tokenizer: byte}", "each.0.tokenizer: there is no tokenizer 'byte'; did you mean 'bytes'?"),
        ("{corpus: 7}", "each.0.corpus: 7 is not the name of a corpus"),
        ("{corpus: ../x}", "each.0.corpus"),
        ("{budget_gib: true}", "each.0.budget_gib: True is not a budget"),
        ("{budget_gib: 1.0e+9}", "is not a budget in GiB (from 1/64 to 65,536)"),
        ("{tokns: 7}", "each.0.tokns: there is no such key"),
        ("{tokens: 0}", "each.0.tokens"),
    ],
)
def test_a_bad_setting_is_refused_with_its_place(refusal_of, text, told):
    assert told in refusal_of(f"each: [{text}]\n")


def test_the_baseline_is_no_row_to_name(refusal_of):
    text = refusal_of("strategies: [baseline, checkpoint]\n")
    assert "strategies.0: the baseline is a row of every comparison by itself: leave it out" in text


@pytest.mark.parametrize("ranks", ["null", "{}", "two"])
def test_ranks_that_are_no_numbers_are_refused_under_their_own_key(refusal_of, ranks):
    text = refusal_of(f"ranks: {ranks}\n")
    assert "ranks: input should be a valid integer" in text and "ranks.int" not in text


ORIGINS = """
title: Try
shape:
  tokens: 64
  {shape}
at:
  "*/cpu":
    batch: 1
    {at}
each:
- heads: 4
  {each}
"""


@pytest.mark.parametrize(
    ("mistakes", "sentence"),
    [
        ({"shape": "layerz: 4"}, ", line 4: shape.layerz: there is no such key; did you mean 'layers'?"),
        ({"at": "layerz: 4"}, ", line 8: at.*/cpu.layerz: there is no such key; did you mean 'layers'?"),
        ({"each": "layerz: 4"}, ", line 11: each.0.layerz: there is no such key; did you mean 'layers'?"),
        ({"shape": "layers: 0"}, ", line 4: shape.layers: input should be greater than or equal to 1, not 0"),
        ({"at": "layers: 0"}, ", line 8: at.*/cpu.layers: input should be greater than or equal to 1, not 0"),
        ({"shape": "layers: 0", "each": "layers: -1"}, ", line 11: each.0.layers: input should be greater"),
        ({"shape": "layers: []"}, ", line 4: shape.layers: an empty list"),
        ({"at": "layers: [2, 2]"}, ", line 8: at.*/cpu.layers: 2 is listed twice"),
        ({"shape": "preset: tyni"}, ", line 4: shape.preset: there is no preset 'tyni'"),
        ({"shape": "width: 30"}, ", line 10: each.0: width 30 is not a multiple of heads 4"),
    ],
)
def test_a_mistake_in_a_shape_is_named_where_it_stands(
    refusal_of: Any, mistakes: "dict[str, str]", sentence: str
) -> None:
    text = ORIGINS.format(**{key: mistakes.get(key, "# nothing") for key in ("shape", "at", "each")})
    assert refusal_of(text).startswith(sentence)


def test_a_mistake_that_a_preset_replaces_is_none(plan_of: Any) -> None:
    assert plan_of("shape: {layerz: 4}\nat: {'*/cpu': {preset: tiny}}").comparisons


def test_contributions_ask_for_each_alone_the_whole_without_each_and_the_whole(plan_of):
    plan = plan_of("strategies: [checkpoint, {contributions: [checkpoint, fused_loss, bfloat16]}]\nrounds: 0")
    assert labels(plan)[0] == [
        "baseline",
        "checkpoint",
        "fused_loss",
        "bfloat16",
        "fused_loss + bfloat16",
        "checkpoint + bfloat16",
        "checkpoint + fused_loss",
        "checkpoint + fused_loss + bfloat16",
    ]


def test_a_key_beside_contributions_is_refused(refusal_of):
    text = "strategies:\n  - nothing\n  - {contributions: [checkpoint, fused_loss], rounds: 3}"
    sentence = ", line 3: strategies.1.rounds: 'contributions' is alone in its entry: move 'rounds' out"
    assert refusal_of(text) == sentence


@pytest.mark.parametrize("text", ["{contributions: checkpoint}", "{contributions: []}", "{contributions: [x]}"])
def test_contributions_of_nothing_are_refused(refusal_of, text):
    assert "strategies.0" in refusal_of(f"strategies: [{text}]")


@pytest.mark.parametrize("given", ["checkpoint", "{checkpoint: {every: 2}}", "null", "3"])
def test_contributions_of_what_is_no_list_are_refused_as_that(refusal_of, given):
    sentence = refusal_of(f"strategies: [{{contributions: {given}}}]")
    assert "strategies.0: 'contributions' needs a list of strategies, not " in sentence and "empty" not in sentence
