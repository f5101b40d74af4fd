"""Strategies are applied left to right, the later one outside, and are seen to have run."""

from collections import Counter

import pytest

from harness import Strategy
from harness.contract import plugins
from harness.contract.assembly import assemble, never_called, probe_of, rewritten, shape_of
from harness.records import Applied, Case
from harness.refusal import Refusal

TOY = '''
from dataclasses import replace
from functools import partial

from pydantic import BaseModel

from harness import Parts, Strategy, Workload, hookimpl


class Shape(BaseModel):
    size: int = 8
    trail: bool = True


def build(shape, place, corpus, seed=0):
    """Parts that say who was called: no framework is needed to compose functions."""
    def loss(parts, x):
        return [*x, "loss"]

    def block(parts, x):
        return [*x, "block"]

    def stack(parts, x):
        return parts.block(parts, parts.block(parts, x))

    def step(parts, x):
        return parts.loss(parts, parts.stack(parts, x))

    def draw(parts, name):
        return f"{name}/{shape.size}/{seed}/{corpus}"

    return Parts(shape, place, draw=draw, loss=loss, block=block, stack=stack, step=step)


def around(part, name, parts, mark: str = ""):
    inner = getattr(parts, part)
    said = mark or name
    return replace(parts, **{part: lambda parts, x: [*inner(parts, [*x, f"<{said}"]), f"{said}>"]})


def blunt(parts):
    """Replace what others may have rewritten, without calling it."""
    return replace(parts, loss=lambda parts, x: [*x, "blunt"])


def drawn(parts):
    inner = parts.draw
    return replace(parts, draw=lambda parts, name: inner(parts, name).upper())


def strategy(name, part):
    def on(parts, mark: str = "", chunk: int = 1024):
        return around(part, name, parts, mark)

    return Strategy(name, (part,), {"torch": on}, "Say so.", probe={"chunk": 3})


@hookimpl
def harness_strategies():
    return [
        strategy("a", "loss"),
        strategy("b", "loss"),
        strategy("c", "block"),
        Strategy("blunt", ("loss",), {"torch": blunt}, "Say so."),
        Strategy("drawn", ("draw",), {"torch": drawn}, "Say so."),
    ]


@hookimpl
def harness_workloads():
    return [
        Workload(
            name="toy",
            about="A toy.",
            shape=Shape,
            presets={},
            on={"torch": build},
            abstract_batch=lambda shape: (),
            tiny=lambda shape: shape,
            probe=lambda shape: shape.model_copy(update={"size": 2}),
            floor=lambda shape: 0,
            tokens_per_step=lambda shape: 1,
        )
    ]
'''


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    path = tmp_path_factory.mktemp("plugin") / "toy.py"
    path.write_text(TOY)
    return plugins.load((str(path),))


def case_of(*names, **changes):
    applied = tuple(name if isinstance(name, Applied) else Applied(name=name) for name in names)
    given = {"workload": "toy", "shape": {"size": 8}, "place": "torch/cpu", "corpus": "zipf", "tokenizer": "none"}
    return Case(**{**given, **changes}, strategies=applied)


def trail(parts):
    return " ".join(parts.step(parts, []))


@pytest.mark.parametrize(("returned", "words"), [(None, "returns nothing"), ({}, "returns a dict")])
def test_a_strategy_that_returns_no_parts_is_refused(loaded, returned, words):
    careless = Strategy("careless", rewrites=("loss",), on={"torch": lambda parts: returned}, about="Forget to return.")
    parts = assemble(loaded, case_of())
    with pytest.raises(Refusal, match=f"'careless' {words} for torch: return the parts"):
        rewritten(parts, careless, {})


def test_without_strategies_the_parts_are_the_workload_s_own(loaded):
    assert trail(assemble(loaded, case_of())) == "block block loss"


def test_the_later_strategy_of_a_part_is_outside(loaded):
    assert trail(assemble(loaded, case_of("a", "b"))) == "block block <b <a loss a> b>"
    assert trail(assemble(loaded, case_of("b", "a"))) == "block block <a <b loss b> a>"


def test_the_same_strategy_may_be_applied_twice(loaded):
    twice = case_of("a", Applied(name="a", knobs={"mark": "again"}))
    assert trail(assemble(loaded, twice)) == "block block <again <a loss a> again>"


def test_a_rewritten_part_is_seen_by_all_its_callers_in_either_order(loaded):
    due = "<c block c> <c block c> <a loss a>"
    assert trail(assemble(loaded, case_of("a", "c"))) == due
    assert trail(assemble(loaded, case_of("c", "a"))) == due


def test_knobs_are_handed_on(loaded):
    parts = assemble(loaded, case_of(Applied(name="c", knobs={"mark": "!"})))
    assert trail(parts) == "<! block !> <! block !> loss"


def test_shape_seed_and_corpus_reach_the_workload(loaded):
    parts = assemble(loaded, case_of(seed=7), corpus="tokens")
    assert parts.draw(parts, "embed") == "embed/8/7/tokens"
    assert shape_of(loaded, case_of()).size == parts.shape.size == 8
    assert str(parts.place) == "torch/cpu"
    other = shape_of(loaded, case_of(shape={"size": 5}))
    assert assemble(loaded, case_of(), shape=other).shape.size == 5


def test_a_wrapped_draw_lies_inside_the_strategies(loaded):
    def draw(inner):
        return lambda parts, name: f"wrapped {inner(parts, name)}"

    parts = assemble(loaded, case_of("drawn"), draw=draw)
    assert parts.draw(parts, "embed") == "WRAPPED EMBED/8/0/NONE"


def test_calls_are_counted_by_strategy_and_part(loaded):
    calls = Counter()
    parts = assemble(loaded, case_of("a", "c", "b"), calls=calls)
    assert calls == {("a", "loss"): 0, ("b", "loss"): 0, ("c", "block"): 0}
    assert set(calls) == {("a", "loss"), ("b", "loss"), ("c", "block")}
    assert trail(parts) == "<c block c> <c block c> <b <a loss a> b>", "counting changes nothing"
    trail(parts)
    assert calls == {("a", "loss"): 2, ("b", "loss"): 2, ("c", "block"): 4}
    assert never_called(calls) is None


def test_a_strategy_that_another_replaced_was_never_called(loaded):
    calls = Counter()
    parts = assemble(loaded, case_of("a", "blunt"), calls=calls)
    assert trail(parts) == "block block blunt"
    assert never_called(calls) == (
        "'a' rewrote 'loss', but it was never called: 'blunt' replaced it: name it after that, or leave one out"
    )
    calls = Counter()
    trail(assemble(loaded, case_of("blunt", "a"), calls=calls))
    assert "'blunt' rewrote 'loss'" not in str(never_called(calls)) and never_called(calls) is None


def test_a_part_that_nothing_uses_was_never_called(loaded):
    calls = Counter()
    trail(assemble(loaded, case_of("c", "drawn"), calls=calls))
    assert "'drawn' rewrote 'draw'" in never_called(calls)
    assert never_called(Counter()) is None


def test_the_probe_keeps_strategies_and_seed_and_shrinks_the_rest(loaded):
    knobs = {"mark": "m", "chunk": 4096}
    case = case_of(Applied(name="a", knobs=knobs), "blunt", seed=3, budget_bytes=1 << 30, tokenizer="bytes")
    probe = probe_of(loaded, case)
    assert probe.shape == {"size": 2, "trail": True}
    assert (probe.corpus, probe.tokenizer, probe.budget_bytes) == ("drawn", "none", None)
    assert probe.strategies == (Applied(name="a", knobs={"mark": "m", "chunk": 3}), Applied(name="blunt"))
    assert (str(probe.place), probe.seed, probe.workload) == ("torch/cpu", 3, "toy")
    assert case.strategies[0].knobs == knobs, "the case itself is as it was"
    assert probe_of(loaded, probe) == probe


def test_cases_that_differ_in_size_alone_share_their_probe(loaded):
    large = case_of(Applied(name="a", knobs={"chunk": 64}), shape={"size": 64}, budget_bytes=5)
    assert probe_of(loaded, large) == probe_of(loaded, case_of("a"))
    assert probe_of(loaded, large).digest() == probe_of(loaded, case_of("a")).digest()
    assert probe_of(loaded, case_of("b")) != probe_of(loaded, case_of("a"))
    assert (
        large.comparison_key
        == large.model_copy(update={"strategies": ()}).comparison_key
        != case_of("a").comparison_key
    )
