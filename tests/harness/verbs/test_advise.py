"""Which strategies advice combines: those that -k lets through, at each place that has some."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness import backends
from harness.cli import commands
from harness.contract import plugins
from harness.machine import gpu, throughput
from harness.machine.gpu import Gpu
from harness.records import Applied, Case
from harness.report.advise import text
from harness.run import bench, session
from harness.suite import reader
from harness.suite.bounds import SuiteError
from harness.suite.plan import Comparison, Plan, selected
from harness.verbs import advise as verb
from harness.verbs.advise import Advice, advise
from harness.verbs.combinations import Choice, combinations
from harness.verbs.machine import Machine
from harness.verbs.plan import PlanRow

LOADED = plugins.load()
SUITE = """
title: Small
workload: decoder
places: [torch/cpu, jax/cpu]
corpus: zipf
shape: {layers: 1, width: 32, heads: 2, vocabulary: 300, batch: 1, tokens: 96}
strategies: [offload_activations]
"""
"""Its only strategy is for torch alone."""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A suite whose cases are all predicted to take the same."""

    def predicted(plan: Plan, *rest: object) -> list[list[PlanRow]]:
        return [[PlanRow(case, 40, "", None, 240, None) for case in group.cases] for group in plan.comparisons]

    monkeypatch.setattr(verb, "of_plan", predicted)
    (tmp_path / "small.yaml").write_text(SUITE)
    return tmp_path / "small.yaml"


def advised(
    path: Path, notes: list[str], allowed: Sequence[str] = (), predict_only: bool = True, only: str | None = None
) -> list[Advice]:
    options = bench.Options(path.parent / "results", cache=path.parent / "cache")
    plan, note = reader.read(path, LOADED), notes.append
    return advise(
        plan, LOADED, options, Machine(), allowed, False, predict_only, bench.Progress(), only=only, on_note=note
    )  # fmt: skip


def test_a_place_without_a_strategy_to_combine_is_left_out_with_a_note(path: Path) -> None:
    notes: list[str] = []
    (advice,) = advised(path, notes)
    assert (str(advice.case.place), len(advice.predicted)) == ("torch/cpu", 2)
    assert notes == [f"{path}: no strategy of it may be combined on jax/cpu: it is left out"]


def test_strategies_that_are_left_out_for_their_answers_are_named(path: Path) -> None:
    path.write_text(SUITE.replace("offload_activations", "offload_activations, bfloat16, int8_activations"))
    notes: list[str] = []
    said = "\n- left out: answers are not exact: bfloat16, int8_activations; --allow lower_precision allows them\n"
    assert said in text(advised(path, notes, ("approximate",)))
    assert "not exact" not in text(advised(path, notes, ("approximate", "lower_precision")))


def test_strategies_that_need_several_ranks_are_named_and_left_out(path: Path) -> None:
    path.write_text(SUITE.replace("offload_activations", "offload_activations, ddp"))
    notes: list[str] = []
    advice = advised(path, notes)
    said = "left out: what divides the run, as the suite names no single number of `ranks`: ddp"
    assert said in text(advice)
    assert all(row.case.ranks == 1 for each in advice for row in each.predicted)


def test_on_several_ranks_each_combination_divides_the_run_and_nothing_is_measured(path: Path) -> None:
    strategies = "offload_activations, checkpoint, ddp, fsdp"
    path.write_text(SUITE.replace("offload_activations", strategies).replace("batch: 1", "batch: 4") + "ranks: 4\n")
    notes: list[str] = []
    advice = advised(path, notes, predict_only=False)
    of_torch = next(each for each in advice if str(each.case.place) == "torch/cpu")
    plain, *others = [row.case for row in of_torch.predicted]
    assert plain.is_baseline and plain.ranks == 1 and {case.ranks for case in others} == {4}
    assert [case.label for case in others] == list(dict.fromkeys(case.label for case in others)), "each once"
    assert {"ddp on 4 ranks", "checkpoint + fsdp on 4 ranks"} <= {case.label for case in others}
    assert all({"ddp", "fsdp"} & {each.name for each in case.strategies} for case in others)
    written = text([of_torch])
    assert of_torch.choice == "ddp on 4 ranks" and "Use **ddp on 4 ranks**" in written
    assert "- not divided, but all of it on one rank: baseline\n" in written
    assert written.endswith("```yaml\nstrategies:\n  - ddp\nranks: 4\n```\n")
    assert any("nothing is measured on 4 ranks" in note for note in notes), notes
    assert "left out" not in written


def test_on_several_ranks_there_is_no_advice_without_a_strategy_that_divides_the_run(path: Path) -> None:
    path.write_text(
        SUITE.replace("offload_activations", "checkpoint, ddp").replace("batch: 1", "batch: 2") + "ranks: 2\n"
    )
    with pytest.raises(
        SuiteError, match=r"no strategy of it whose name contains 'check' divides the run among 2 ranks"
    ):
        advised(path, [], only="check")


def test_a_strategy_that_cannot_be_combined_is_named_with_the_reason(path: Path) -> None:
    path.write_text(SUITE.replace("[offload_activations]", "[checkpoint, streamed_save]"))
    notes: list[str] = []
    shown = text(advised(path, notes))
    assert "left out: 'streamed_save' is for what follows the steps: give `evaluations`" in shown
    path.write_text(SUITE.replace("[offload_activations]", "[streamed_save, ddp]"))
    with pytest.raises(SuiteError, match=r"combined: what divides the run, as .*: ddp; 'streamed_save' is for what "):
        advised(path, notes)


def test_of_all_strategies_those_of_an_allocator_count_on_a_gpu() -> None:
    def chosen(place: str) -> list[str]:
        case = Case(workload="decoder", shape={}, place=place, corpus="x", tokenizer="bytes")
        return [applied.name for applied in Choice(LOADED, everything=True).candidates(Comparison((case,)))]

    assert "expandable_segments" in chosen("torch/cuda")
    assert "pinned_allocator" not in chosen("torch/cpu"), "it is pinned for all"


def test_where_no_place_has_a_strategy_to_combine_advice_is_refused(path: Path) -> None:
    path.write_text(SUITE.replace("offload_activations", "bfloat16"))
    notes: list[str] = []
    with pytest.raises(
        SuiteError,
        match="may be combined: answers are not exact: bfloat16; --allow lower_precision allows",
    ):
        advised(path, notes)
    assert notes == []
    assert len(advised(path, notes, ("lower_precision",))) == 2 and notes == []


@pytest.mark.parametrize(
    ("card", "words", "measures"), [("h200", (), False), ("h200", ("--predict-only",), False), ("l4", (), True)]
)
def test_on_another_gpu_than_the_one_here_nothing_is_measured(
    path: Path, monkeypatch: pytest.MonkeyPatch, card: str, words: Sequence[str], measures: bool
) -> None:
    def run(*rest: object) -> Path:
        raise SuiteError("it is measured")

    here = Gpu("NVIDIA L4", 22 << 30, 22 << 30, "580.1")
    monkeypatch.setattr(gpu, "detect", lambda: here)
    monkeypatch.setattr(gpu, "usable_bytes", lambda: here.usable_bytes)
    monkeypatch.setattr(throughput, "of_place", lambda place, cache: None)
    monkeypatch.setattr(backends, "absent", lambda *place: None)
    monkeypatch.setattr(session, "run", run)
    path.write_text(SUITE.replace("[torch/cpu, jax/cpu]", "[torch/cuda]"))
    done = CliRunner().invoke(commands.app, ["advise", str(path), "--gpu", card, *words])
    assert ("it is measured" in str(done.exception)) == measures
    assert ("Use **baseline**" in done.output and "Nothing was measured." in done.output) != measures
    said = f"{path}: nothing is measured on torch/cuda: another GPU is asked for than the one here"
    assert (said in done.output.replace("\n", "")) == (not measures and not words)


def test_what_is_chosen_by_name_is_chosen_of_all_strategies_too(path: Path) -> None:
    (group, _) = reader.read(path, LOADED).comparisons
    whole = Choice(LOADED, everything=True)
    part = replace(whole, only="checkpoint")
    everything, few = ([each.name for each in choice.members(group)] for choice in (whole, part))
    assert "checkpoint" in few and few == [name for name in everything if "checkpoint" in name]
    assert whole.listed(group, whole.demanded(group, "small.yaml")) is None, "too many"
    every = part.listed(group, part.demanded(group, "small.yaml"))
    assert every is not None and len(every.cases) > len(few)
    with pytest.raises(SuiteError, match="no strategy of it whose name contains 'nobody' may be combined"):
        replace(whole, only="nobody").demanded(group, "small.yaml")


def test_among_too_many_combinations_one_is_looked_for_and_the_answer_says_so(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def predicted(cases: Sequence[Case], *rest: object, seconds: float) -> list[PlanRow]:
        return [PlanRow(case, 400 - 10 * len(case.strategies), "", None, 395, None) for case in cases]

    monkeypatch.setattr(verb, "of_cases", predicted)
    notes: list[str] = []
    options = bench.Options(path.parent / "results", cache=path.parent / "cache")
    plan = selected(reader.read(path, LOADED), ["torch/cpu"], None)
    (advice,) = advise(plan, LOADED, options, Machine(), (), True, True, bench.Progress(), on_note=notes.append)
    assert any("strategies give more than 2000 combinations on torch/cpu" in note for note in notes), notes
    assert advice.searched and len(advice.predicted) < 100 and len(advice.chosen.case.strategies) == 1
    assert f"of {len(advice.predicted)} combinations that were tried it is predicted" in text([advice])


def test_the_command_chooses_of_all_strategies_those_that_the_suite_lacks(
    path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    words = ["advise", str(path), "--all", "-k", "cut_loss", "--predict-only", "--place", "torch/cpu"]
    done = CliRunner().invoke(commands.app, words)
    assert done.exit_code == 0, done.output
    assert "of 2 combinations" in done.output


def test_advice_that_is_saved_is_told_again_by_a_report(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    (tmp_path / "small.yaml").write_text(SUITE)
    words = ["advise", "small.yaml", "--predict-only", "--place", "torch/cpu", "--save"]
    done = CliRunner().invoke(commands.app, words)
    assert done.exit_code == 0, done.output
    (file,) = tmp_path.glob("results/small/*/*.jsonl")
    assert f"records: {file.relative_to(tmp_path)}" in done.output
    again = CliRunner().invoke(commands.app, ["report", "results"])
    assert again.exit_code == 0 and "Predicted 2" in again.output and "16 GiB" in again.output, again.output


@pytest.mark.parametrize(
    ("names", "order"),
    [
        (("sequence_windows", "checkpoint"), ("checkpoint", "sequence_windows")),
        (("selective_checkpoint", "int8_activations"), ("int8_activations", "selective_checkpoint")),
        (("offload_boundary", "int8_activations"), ("int8_activations", "offload_boundary")),
        (("tf32", "update_in_backward"), ("update_in_backward", "tf32")),
        (("feed_checkpoint", "tiled_feed"), ("tiled_feed", "feed_checkpoint")),
        (("sequence_windows", "automatic_windows"), None),
    ],
    ids=lambda value: "+".join(value) if value else "none",
)
def test_what_wraps_a_part_is_combined_with_what_replaces_it(
    names: tuple[str, ...], order: "tuple[str, ...] | None"
) -> None:
    made = combinations([Applied(name=name) for name in names], LOADED)
    assert [tuple(each.name for each in members) for members in made if len(members) == 2] == ([order] if order else [])
