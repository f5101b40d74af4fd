"""What is predicted and advised: limits, remedies, combinations, and the verbs as a user types them."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.backends.cards import CARDS
from harness.cli.inputs import Cases, Room
from harness.contract import plugins
from harness.contract.place import Place
from harness.machine import environment, facts, gpu, throughput
from harness.machine.gpu import Gpu
from harness.records import Applied, Case, Memory, Origin, Prediction, Record, Slot, Times, store
from harness.records.record import Verdict
from harness.records.roofline import Operations, Rates
from harness.refusal import Refusal
from harness.report.advise import text as advice_text
from harness.report.memory import explained
from harness.report.plan import BETWEEN_RANKS, NO_HOST, SEGMENTS, tables
from harness.report.table import markdown
from harness.report.words import titles_of
from harness.run import bench, prediction_cache, prepare_data, session
from harness.suite import reader
from harness.suite.bounds import SuiteError
from harness.suite.of_model import Model
from harness.suite.plan import Plan, selected
from harness.verbs import advise as advice_verb
from harness.verbs.advise import (
    Advice,
    advise,
    front,
    of_predictions,
    promising,
    saved,
)
from harness.verbs.combinations import Choice, combinations
from harness.verbs.machine import Machine, card_of, this_machine
from harness.verbs.plan import PlanRow, named, need, of_cases, of_plan, row_of, with_budget
from harness.verbs.remedies import leanest, remedies
from harness.verdicts.judge import Comparison, Row

LOADED = plugins.load()
Ran = Callable[..., Any]


def table(rows: Sequence[PlanRow], **options: Any) -> str:
    """Write the table of one comparison."""
    (text,) = tables([rows], **options)
    return text


SUITE = """
title: Small
workload: decoder
places: [torch/cpu]
corpus: zipf
shape: {layers: 4, width: 64, heads: 2, vocabulary: 4000, batch: 1, tokens: 512}
strategies:
  - checkpoint
  - fused_loss
  - bfloat16
rounds: 1
warmup: 1
steps: 3
"""


def test_comparisons_with_one_heading_say_in_what_they_differ() -> None:
    case = Case(workload="decoder", shape={"tokens": 64}, place="torch/cpu", corpus="zipf", tokenizer="bytes")
    cases = [case.model_copy(update={"shape": {"tokens": 64, "heads": heads}}) for heads in (2, 4)]
    headings = [text.split(";")[0] for text in tables([[PlanRow(each, 1, "", 1, 2, None)] for each in cases])]
    assert [each.rpartition(", ")[2] for each in headings] == ["heads 2", "heads 4"]
    explanations = explained([PlanRow(each, None, "", 1, 2, None) for each in cases], {})
    assert "heads 2" in explanations and "heads 4" in explanations
    tables_of_run = markdown([Comparison(cases[0], (Row(cases[0], "ok"),))], LOADED, title_of=titles_of(cases))
    assert re.search(r"^## .*, heads 2$", tables_of_run, re.MULTILINE), "the other comes later in a run"


@pytest.mark.parametrize(
    ("budget", "driver", "shown"),
    [
        (None, 700, "at most 600 B of the card"),
        (None, None, "at most 250 B reserved"),
        (400, 700, "at most 250 B reserved"),
    ],
)
def test_what_is_needed_is_called_by_what_bounds_it(budget: int | None, driver: int | None, shown: str) -> None:
    case = Case(
        workload="decoder", shape={"tokens": 64}, place="torch/cuda", corpus="x", tokenizer="bytes", budget_bytes=budget
    )
    forecast = Prediction(
        predicted_peak_bytes=200, at_most_bytes=100, predicted_reserved_bytes=350, predicted_driver_bytes=driver
    )
    assert need(PlanRow(case, 200, "", 1, 1000, None, prediction=forecast)) == shown


def test_one_budget_for_all_makes_one_comparison_of_those_that_differ_in_theirs(tmp_path: Path) -> None:
    suite = tmp_path / "two.yaml"
    suite.write_text(SUITE + "each: [{budget_gib: 0.5}, {budget_gib: 1}, {budget_gib: 1, tokens: 256}]\n")
    plan = reader.read(suite, LOADED)
    assert len(plan.comparisons) == 3
    budgeted = with_budget(plan, 8 << 30)
    assert [each.baseline.shape["tokens"] for each in budgeted.comparisons] == [512, 256]
    assert {case.budget_bytes for case in budgeted.cases} == {8 << 30}


@pytest.fixture(scope="module", autouse=True)
def one_cache(tmp_path_factory: pytest.TempPathFactory, rates_in: Callable[[Path], Path]) -> Iterator[None]:
    """Let all share what was predicted, and rates of this machine and times of operators that are made up."""

    def with_calls(rates: Rates, place: Place, work: Iterable[Operations], *rest: object) -> Rates:
        return replace(rates, calls={each.call: 1e-3 for each in work if each.call})

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(rates_in(tmp_path_factory.mktemp("cache"))))
        patch.setattr(throughput, "with_calls", with_calls)
        patch.chdir(tmp_path_factory.mktemp("here"))  # templates of workers differ by whether they import from there
        yield


@pytest.fixture
def by_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predict that each layer takes 1 MiB a token."""

    def predicted(cases: Sequence[Case], *rest: object, **more: object) -> Iterator[tuple[Case, Record]]:
        for each in cases:
            peak = each.shape["tokens"] * each.shape.get("layers", 6) << 20
            yield each, Record(prediction=Prediction(predicted_peak_bytes=peak))

    monkeypatch.setattr(prediction_cache, "of_cases", predicted)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "small.yaml").write_text(SUITE)
    return tmp_path / "small.yaml"


def test_a_card_that_is_not_there_is_supposed_with_its_memory(path: Path) -> None:
    places = reader.read(path, LOADED).places
    machine = Room(card="l4").machine(places)
    assert (machine.card, machine.device_bytes) == ("l4", CARDS["l4"].memory_bytes)
    assert Room(card="l4", gpu_memory="10GiB").machine(places).device_bytes == 10 << 30
    with pytest.raises(Refusal, match=r"--gpu: there is no card 'h1000'; did you mean 'h100'\?"):
        Room(card="h1000").machine(places)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("RTX 4090", "rtx4090"),
        ("4090", "rtx4090"),
        ("NVIDIA GeForce RTX 3090 Ti", "rtx3090-ti"),
        ("A100", "a100"),
        ("a100-80gb", "a100"),
        ("A100-SXM4-40GB", "a100-40gb"),
    ],
)
def test_a_card_is_known_by_all_its_names(name: str, key: str) -> None:
    assert card_of(name, "--gpu") == key


@pytest.mark.parametrize("name", ["p100", "b100", "4060 Ti"])
def test_no_other_card_is_taken_for_one_that_nobody_knows(name: str) -> None:
    with pytest.raises(Refusal, match=f"no card '{name}'; there is h100, h200"):
        card_of(name, "--gpu")


@pytest.mark.parametrize("room", [{"memory": ""}, {"gpu_memory": ""}, {"card": ""}, {"budget": ""}])
def test_an_empty_text_as_of_a_variable_that_is_not_set_is_refused(path: Path, room: dict[str, str]) -> None:
    with pytest.raises(Refusal, match=r"'' is not a size|no card ''"):
        Cases(path).plan(LOADED, Room(**room).budget)
        Room(**room).machine(())


def test_cases_must_fit_the_container(path: Path, monkeypatch: pytest.MonkeyPatch, ran: Ran) -> None:
    monkeypatch.setattr(facts, "total_bytes", lambda: 4 << 30)
    assert Room().machine(reader.read(path, LOADED).places).host_bytes == 4 << 30


def plan(path: Path) -> Plan:
    return reader.read(path, LOADED)


@pytest.fixture
def ran(here: Ran, monkeypatch: pytest.MonkeyPatch) -> Ran:
    """Run the command line in a folder, as on a wide screen."""
    monkeypatch.setenv("COLUMNS", "200")
    return here


def case(*names: str, place: str = "torch/cpu", budget: int | None = None) -> Case:
    applied = tuple(Applied(name=name) for name in names)
    return Case(
        workload="decoder", shape={}, place=place, corpus="", tokenizer="", strategies=applied, budget_bytes=budget
    )


def seen(name: str, peak: int | None, seconds: float | None, limit: int | None = 100) -> PlanRow:
    return PlanRow(case(*name.split("+")) if name else case(), peak, "", None, limit, seconds)


def test_a_case_is_held_against_its_budget_or_a_share_of_the_machine() -> None:
    machine = Machine(1000, 2000)
    assert machine.limit(case()) == 800
    assert machine.limit(case(place="torch/cuda")) == 1900
    assert machine.limit(case(budget=5)) == 5
    on_ranks = {"ranks": 4}
    assert machine.limit(case().model_copy(update=on_ranks)) == 200, "ranks share the host"
    assert machine.limit(case(place="torch/cuda").model_copy(update=on_ranks)) == 1900, "and have a GPU each"
    assert machine.limit(case(budget=5).model_copy(update=on_ranks)) == 5
    assert Machine().limit(case()) is None
    assert seen("", 100, None).fits and seen("", 101, None).fits is False
    assert seen("", None, None).fits is None and seen("", 1, None, None).fits is None


def test_memory_that_is_named_bounds_a_case_beside_its_budget(path: Path) -> None:
    here = Machine(1000, 2000)
    assert here.supposing("100B").limit(case(budget=500)) == 80
    assert here.supposing("100B").limit(case(budget=5)) == 5
    assert here.supposing(gpu_memory="100B").limit(case(budget=5000)) == 5000, "nobody named that of the host"
    room = int(CARDS["l4"].memory_bytes * facts.DEVICE_SHARE)
    assert here.supposing(card="l4").limit(case(place="torch/cuda", budget=100 << 30)) == room
    assert Room(memory="256MiB").machine(reader.read(path, LOADED).places).limit(case(budget=768 << 20)) == 214748364
    assert Room(card="l4").machine(reader.read(path, LOADED).places).limit(case(budget=100 << 30)) == 100 << 30


def on_card(budget: int | None = None, **known: int) -> PlanRow:
    """Return a row on a card of which 95 bytes may be used, 70 of them predicted to be allocated."""
    figures = {"predicted_peak_bytes": 70, **{f"predicted_{name}_bytes": size for name, size in known.items()}}
    if "at_most" in known:
        figures["at_most_bytes"] = figures.pop("predicted_at_most_bytes")
    on_gpu = case(place="torch/cuda", budget=budget)
    return row_of(on_gpu, Record(prediction=Prediction.model_validate(figures)), Machine(device_bytes=100))


def test_what_fits_a_gpu_in_torch_is_judged_by_its_segments() -> None:
    assert on_card(reserved=95).fits and on_card(reserved=96).fits is False
    assert on_card(reserved=80, driver=96).fits is False, "the context lies on the card as well"
    assert on_card(95, reserved=100, base=5, driver=140).fits, "a budget is meant above the base and has no context"
    assert on_card(94, reserved=100, base=5).fits is False
    assert on_card(80, reserved=90, base=5, at_most=77).need_bytes == 92
    assert on_card(reserved=90, at_most=77).need_bytes == 97
    assert on_card().need_bytes == 70, "in JAX nothing else is predicted"


def test_of_a_budget_and_a_named_card_the_narrower_counts_and_is_said() -> None:
    figures = {"predicted_peak_bytes": 70, "predicted_reserved_bytes": 85, "predicted_driver_bytes": 96}
    record = Record(prediction=Prediction.model_validate(figures))
    within_90 = case(place="torch/cuda", budget=90)
    by_budget = row_of(within_90, record, Machine(device_bytes=100))
    assert (by_budget.limit_bytes, by_budget.need_bytes, by_budget.fits) == (90, 85, True)
    by_card = row_of(within_90, record, Machine(device_bytes=100, named=frozenset({"cuda"})))
    assert (by_card.limit_bytes, by_card.need_bytes, by_card.fits) == (95, 96, False), "its context does not fit"
    larger = row_of(within_90, record, Machine(device_bytes=200, named=frozenset({"cuda"})))
    assert larger == by_budget
    assert "; may use 90 B, by its budget\n" in table([by_budget])
    assert "; may use 95 B, by the memory that is named\n" in table([by_card])


L4 = Gpu("NVIDIA L4", CARDS["l4"].memory_bytes, 20 << 30, "580.1")
UNKNOWN = Gpu("NVIDIA RTX PRO 6000", 95 << 30, 95 << 30, "580.1")


@pytest.mark.parametrize(
    ("here", "room", "elsewhere"),
    [
        (L4, Room(), False),
        (L4, Room(memory="8TiB", budget="8TiB"), False),
        (L4, Room(card="l4"), False),
        (L4, Room(gpu_memory="20GiB"), False),
        (L4, Room(gpu_memory="23GiB"), False),  # a case may take 95 % of it
        (L4, Room(gpu_memory="24GiB"), True),
        (L4, Room(card="l4", gpu_memory="24GiB"), True),
        (L4, Room(card="h200"), True),
        (L4, Room(card="t4"), True),
        (replace(L4, mig=True), Room(gpu_memory="24GiB"), False),  # the memory of an instance is not known
        (UNKNOWN, Room(gpu_memory="95GiB"), False),
        (UNKNOWN, Room(card="h100"), True),
        (None, Room(card="h200"), False),
    ],
)
def test_no_rates_are_measured_for_another_gpu_than_the_one_here(
    path: Path, monkeypatch: pytest.MonkeyPatch, here: Gpu | None, room: Room, elsewhere: bool
) -> None:
    rates = {"bandwidth": 1e9, "flops": {"float32": 1e9}}
    measured: list[Place] = []
    monkeypatch.setattr(gpu, "detect", lambda: here)
    monkeypatch.setattr(gpu, "usable_bytes", lambda: here and here.usable_bytes)
    monkeypatch.setattr(throughput, "of_place", lambda place, cache: measured.append(place) or rates)
    on_host, on_gpu = Place("torch", "cpu"), Place("torch", "cuda")
    machine = room.machine((on_host, on_gpu))
    assert (machine.is_elsewhere(on_host), machine.is_elsewhere(on_gpu)) == (False, elsewhere)
    assert measured == list(machine.rates or {}) == ([on_host] if elsewhere else [on_host, on_gpu])


@pytest.mark.long
def test_a_plan_for_a_card_that_nobody_knows_says_which_was_supposed(path: Path) -> None:
    path.write_text(SUITE[: SUITE.index("strategies:")].replace("torch/cpu", "torch/cuda") + "strategies: [nothing]\n")
    note = "predicted for one NVIDIA H100 80GB HBM3, whichever runs it"
    unknown, known = (
        table(of_plan(plan(path), LOADED, (), Machine(device_bytes=8 << 30, card=card))[0])
        for card in (UNKNOWN.name, L4.name)
    )
    assert unknown.splitlines().count(f"- gpu: {note}") == 1 and "predicted for one" not in known
    on_gpu, record = case(place="torch/cuda"), Record(notes={"gpu": note})
    assert [row_of(on_gpu, record, Machine(card=card)).supposed for card in ("", "l4")] == [note, ""]


@pytest.mark.parametrize(("card", "said"), [("t4", True), ("l4", False)])
def test_a_card_without_fused_attention_in_bfloat16_is_named(card: str, said: bool) -> None:
    record = Record(
        prediction=Prediction(predicted_peak_bytes=1 << 20, predicted_phase="backward", floor_bytes=1 << 20)
    )
    rows = [
        row_of(each, record, Machine(device_bytes=8 << 30, card=card))
        for each in (case(place="torch/cuda"), case("bfloat16", place="torch/cuda"))
    ]
    remark = "- bfloat16: this card has no fused attention in bfloat16, so that all scores are kept"
    assert (remark in table(rows).splitlines()) == said


def test_what_names_a_memory_that_is_not_known_is_said_by_device() -> None:
    on_gpu = PlanRow(case(place="torch/cuda"), 100, "", None, None, None)
    assert "; its memory is not known: give --gpu, --gpu-memory or --budget\n" in table([on_gpu])
    assert "; its memory is not known: give --memory or --budget\n" in table([seen("", 100, None, None)])


def test_a_run_keeps_the_segments_of_a_case_free() -> None:
    segments = Prediction(predicted_peak_bytes=70, predicted_reserved_bytes=85, predicted_base_bytes=5, floor_bytes=60)
    assert segments.need_bytes == 85
    assert segments.model_copy(update={"predicted_driver_bytes": 88, "at_most_bytes": 72}).need_bytes == 90
    assert Prediction(predicted_peak_bytes=70, at_most_bytes=75, floor_bytes=60).need_bytes == 75
    assert Prediction(predicted_peak_bytes=40, floor_bytes=60).need_bytes == 40, "in 16 bits it is below the floor"
    assert (Prediction(floor_bytes=60).need_bytes, Prediction().need_bytes) == (60, None)


def test_a_plan_with_rows_on_a_gpu_in_torch_says_once_by_what_they_are_judged() -> None:
    rows = [on_card(reserved=85), on_card(reserved=97)]
    assert table(rows).count(SEGMENTS) == 1 and "| yes    |\n" in table(rows) and "| NO     |" in table(rows)
    assert advice_text([of_predictions(rows)]).count(SEGMENTS) == 1
    assert SEGMENTS not in table([seen("", 100, None)]) and SEGMENTS not in table([on_card()])


def test_a_row_on_a_gpu_that_takes_more_of_the_host_than_there_is_does_not_fit() -> None:
    def offloading(host: int, ranks: int = 1, **machine: Any) -> PlanRow:
        offloaded = case("offloaded_moments", place="torch/cuda").model_copy(update={"ranks": ranks})
        figures = Prediction(predicted_peak_bytes=70, predicted_reserved_bytes=85, predicted_host_bytes=host)
        return row_of(offloaded, Record(prediction=figures), Machine(1000 << 20, 100, **machine))

    by_name, here = {"named": frozenset({"cpu"})}, {"here": UNKNOWN}
    for known in (by_name, here):
        assert offloading(800 << 20, **known).fits and offloading((800 << 20) + 1, **known).fits is False
        assert offloading((400 << 20) + 1, ranks=2, **known).fits is False, "ranks share the host"
    assert offloading(1 << 40).fits, "how much the machine of the GPU has is not known"
    over, judged = offloading(1000 << 20, **by_name), offloading(7 << 20, **by_name)
    assert NO_HOST in table([offloading(7)]) and NO_HOST not in table([judged])
    sentence = "takes 1,000 MiB of the host and is 200 MiB over 800 MiB"
    assert f"- offloaded_moments: {sentence}\n" in table([over, judged])
    assert f"nothing fits: the leanest, offloaded_moments, {sentence}." in table([over])
    assert leanest([over, on_card(reserved=200)]) != over, "the host comes first"


def test_a_row_on_ranks_says_what_each_may_use_and_the_leanest_is_nearest_to_its_own_limit() -> None:
    divided = replace(seen("ddp", 60, None, 50), case=case("ddp").model_copy(update={"ranks": 2}))
    shown = table([seen("", 104, None), divided])
    assert "may use 100 B\n" in shown and shown.count("- on 2 ranks: they share the host, so each may use 50 B") == 1
    assert "nothing fits: the leanest, baseline, takes 104 B and is 4 B over 100 B" in shown
    assert "they share" not in table([seen("", 104, None), seen("checkpoint", 60, None)])
    whole, two = seen("", 60, None), replace(divided, case=case("ddp", place="torch/cuda"))
    shown = table([replace(whole, case=case(place="torch/cuda")), two])
    assert "- ddp: may use 50 B\n" in shown and "ranks" not in shown, "it is not divided"


def test_a_plan_for_several_gpus_says_that_their_exchange_takes_memory_too() -> None:
    one = on_card(reserved=7)
    two = replace(one, case=one.case.model_copy(update={"ranks": 2}))
    assert BETWEEN_RANKS in table([one, two]) and BETWEEN_RANKS not in table([one])
    assert BETWEEN_RANKS not in table([replace(seen("", 60, None), case=case("ddp").model_copy(update={"ranks": 2}))])


def test_the_front_holds_what_nothing_beats_in_both() -> None:
    rows = [seen("", 90, 1.0), seen("a", 50, 2.0), seen("b", 60, 3.0), seen("c", 10, 4.0), seen("d", None, 1.0)]
    assert [row.case.label for row in front(rows)] == ["baseline", "a", "c"]


def test_the_promising_fit_and_are_nearly_the_fastest() -> None:
    rows = [seen("", 200, 1.0), seen("a", 90, 2.0), seen("b", 80, 2.4), seen("c", 70, 2.6), seen("d", 100, 2.0)]
    assert [row.case.label for row in promising(rows)] == ["a", "d", "b"]
    assert promising([seen("", 200, 1.0)]) == []
    assert [row.case.label for row in promising([seen("a", 1, None), seen("b", 1, None)])] == ["a", "b"]


def test_combinations_never_rewrite_a_part_twice() -> None:
    names = ("checkpoint", "nested_checkpoint", "fused_loss", "cut_loss", "bfloat16")
    found = list(combinations([Applied(name=name) for name in names], LOADED))
    labels = [" + ".join(map(str, row)) for row in found]
    assert len(labels) == len(set(labels)) == 3 * 3 * 2
    assert "checkpoint + fused_loss + bfloat16" in labels and "checkpoint + nested_checkpoint" not in labels
    assert labels[0] == ""


def test_a_part_that_is_wrapped_goes_on_top_of_a_rewritten_one_and_not_beneath_it() -> None:
    def labels(*names: str) -> set[str]:
        return {" + ".join(map(str, row)) for row in combinations([Applied(name=name) for name in names], LOADED)}

    assert labels("bfloat16", "qlora") == {"", "bfloat16", "qlora", "bfloat16 + qlora"}
    assert labels("tied", "vocabulary_parallel_loss") == {"", "tied", "vocabulary_parallel_loss"}, "a wrong loss"
    assert labels("qlora", "bfloat16") == {"", "bfloat16", "qlora", "bfloat16 + qlora"}, "in the order that works"
    assert "fused_loss + drop_ignored" in labels("drop_ignored", "fused_loss")
    assert "checkpoint + lion + offloaded_moments" in labels("offloaded_moments", "checkpoint", "lion")
    assert "qlora + adam_8bit" in labels("qlora", "adam_8bit")
    twice = [Applied(name="mapped_moments", knobs={"elements": size}) for size in (1000, 2000)]
    assert len(list(combinations(twice, LOADED))) == 3, "no strategy beside itself"
    assert "qlora + bfloat16_stochastic" not in labels("qlora", "bfloat16_stochastic"), "it would cast what is packed"


def test_only_exact_answers_are_combined_unless_others_are_allowed(path: Path) -> None:
    group = plan(path).comparisons[0]
    assert [str(each) for each in Choice(LOADED).members(group)] == ["checkpoint", "fused_loss"]
    assert "bfloat16" in [str(each) for each in Choice(LOADED, ("lower_precision",)).members(group)]
    everything = [each.name for each in Choice(LOADED, everything=True).members(group)]
    assert {"checkpoint", "cut_loss", "accumulate"} <= set(everything)
    assert not {"bfloat16", "window_attention", "strided_view", "nothing"} & set(everything)


def test_what_divides_a_run_among_ranks_is_not_combined(path: Path) -> None:
    (group,) = reader.read(path, LOADED).comparisons
    assert not [
        each.name for each in Choice(LOADED, everything=True).members(group) if LOADED.strategies[each.name].ranks
    ]


def test_plan_shows_what_fits_without_running_it(path: Path, tmp_path: Path, ran: Ran) -> None:
    done = ran(tmp_path, "plan", str(path), "--budget", "46MiB")
    assert done.returncode == 0, done.stderr
    rows = {line.split("|")[1].strip(" `"): line for line in done.stdout.splitlines() if line.startswith("|")}
    assert rows["baseline"].rstrip(" |").endswith("NO")
    assert rows["fused_loss"].rstrip(" |").endswith("yes")
    assert "may use 46 MiB" in done.stdout
    assert len(re.findall(r"\d\.\d\d x", rows["checkpoint"])) == 2, "ratios of memory and of step times"
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(("memory", "named"), [("4MiB", True), ("8GiB", False)])
def test_advice_names_the_search_among_all_strategies_only_if_nothing_fits(path, tmp_path, memory, named, ran) -> None:
    done = ran(tmp_path, "advise", str(path), "--memory", memory, "--predict-only")
    assert done.returncode == 0, done.stderr
    assert ("What fits, among all strategies, which takes minutes: `harness advise" in done.stdout) is named


def test_plan_says_what_to_change_when_nothing_fits(path: Path, tmp_path: Path, ran: Ran) -> None:
    done = ran(tmp_path, "plan", str(path), "--memory", "4MiB")
    assert done.returncode == 0, done.stderr
    said = done.stdout[done.stdout.index("nothing fits") :]
    assert "the leanest, fused_loss, takes at most" in said and "over 3.2 MiB" in said
    assert said.index("saves") < said.index("tokens 256 takes")
    assert said.rstrip().endswith(
        f"`harness advise {path} --memory 4MiB --all --allow lower_precision --allow approximate --predict-only`"
    )


def planning(folder: Path, architecture: str) -> Sequence[str]:
    """Write the sizes of a small model into a folder; return the words that plan it for a GPU."""
    pytest.importorskip("transformers", reason="needs the package transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
    values = sizes | {"model_type": architecture, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(values))
    return ("plan", "--model", "config.json", "--tokens", "32", "--gpu", "a100")


def test_a_plan_of_which_nothing_can_be_predicted_ends_with_a_status(tmp_path: Path, ran: Ran) -> None:
    """A file whose architecture cannot be cut, so that no row of its plan has a figure."""
    done = ran(tmp_path, *planning(tmp_path, "bert"))
    assert done.returncode == 1
    assert "Not predicted: the architecture 'bert' cannot be cut: its tied head has a bias." in done.stdout, done.stderr
    assert "Traceback" not in done.stderr


def test_a_knob_that_a_strategy_refuses_ends_a_plan_with_a_status_and_its_own_words(tmp_path: Path, ran: Ran) -> None:
    done = ran(tmp_path, *planning(tmp_path, "gpt_neox"), "--with", "lora(rank=0)")
    assert done.returncode == 1, done.stderr
    assert "\n- lora(rank=0): lora: rank is 0: set rank above 0\n" in done.stdout


@pytest.mark.long
def test_a_model_is_planned_by_its_name_and_so_is_the_suite_that_is_shown(tmp_path: Path, ran: Ran) -> None:
    pytest.importorskip("transformers", reason="needs the package transformers")
    words = ("--model", "gpt2", "--tokens", "64", "--batch", "2", "--with", "checkpoint", "--gpu-memory", "80GiB")
    done = ran(tmp_path, "plan", *words)
    assert done.returncode == 0, done.stderr
    shown, _, planned = done.stdout.removeprefix("```yaml\n").partition("```\n\n")
    suite = yaml.safe_load(shown)
    assert (suite["places"], suite["strategies"]) == (["torch/cuda"], ["checkpoint"])
    assert suite["shape"] == {"preset": "gpt2", "tokens": 64, "batch": 2}
    assert "on torch/cuda" in planned and "may use 76 GiB" in planned
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in planned.splitlines() if line[:1] == "|"]
    assert [(row[0], row[-1]) for row in rows if row[-1] == "yes"] == [("baseline", "yes"), ("checkpoint", "yes")]
    (tmp_path / "gpt2.yaml").write_text(shown)
    again = ran(tmp_path, "plan", "gpt2.yaml", "--gpu-memory", "80GiB")
    assert (again.returncode, again.stdout) == (0, planned), again.stderr


def test_plan_explains_what_stands_at_a_peak(path: Path, tmp_path: Path, ran: Ran) -> None:
    done = ran(tmp_path, "plan", str(path), "--explain", "baseline")
    assert done.returncode == 0, done.stderr
    peak = re.search(r"^The peak of ([\d.,]+) MiB is in ", done.stdout, re.MULTILINE)
    standing, _, kinds = done.stdout.partition("By kind, at any time:")
    rows = [line.split("|")[1:-1] for line in standing.splitlines() if line.startswith("|")][2:]
    assert done.stdout.count("## ") == 1 and done.stdout.startswith("## baseline: ") and peak
    assert sum(float(row[2].replace(",", "")) for row in rows) == pytest.approx(float(peak[1]), rel=0.01)
    assert sum(float(row[3].strip(" %")) for row in rows) == pytest.approx(100, abs=1)
    against = [[cell.strip() for cell in line.split("|")[1:-1]] for line in kinds.splitlines() if line[:1] == "|"][2:]
    assert ("logits", "the logits of the loss") in [(row[0], row[2]) for row in against]
    with pytest.raises(Refusal, match=r"--explain: there is no case 'baselin' in this plan; did you mean 'baseline'\?"):
        named(plan(path).cases, "baselin")


@pytest.mark.long
def test_fit_predicts_the_longest_context(path: Path, tmp_path: Path, ran: Ran) -> None:
    done = ran(tmp_path, "fit", str(path), "--over", "tokens", "--budget", "256MiB", "--predict-only")
    assert done.returncode == 0, done.stderr
    found = {
        cells[1].strip(" `"): int(cells[2].replace(",", ""))
        for line in done.stdout.splitlines()
        if len(cells := line.split("|")) > 3 and cells[2].strip().replace(",", "").isdigit()
    }
    assert 512 < found["baseline"] < found["bfloat16"] < found["checkpoint"] < found["fused_loss"]
    again = ran(tmp_path, "report", "results")
    assert again.returncode == 0, again.stderr
    assert done.stdout.splitlines()[2:] == again.stdout.splitlines()[2:] and "longest tokens in 256 MiB" in again.stdout


@pytest.mark.parametrize("budget", ["1MiB", "eight"])
def test_fit_refuses_or_explains_a_budget_that_cannot_be_met(path: Path, tmp_path: Path, budget: str, ran: Ran) -> None:
    done = ran(tmp_path, "fit", str(path), "--over", "tokens", "--budget", budget, "--predict-only")
    assert "Traceback" not in done.stderr
    if budget == "eight":
        assert done.returncode == 2 and "'eight' is not a size" in done.stderr
    else:
        assert done.returncode == 0 and "tokens 512 is predicted to take up to" in done.stdout


@pytest.mark.long
def test_advice_from_predictions_alone_ends_with_lines_to_paste(path: Path, tmp_path: Path, ran: Ran) -> None:
    done = ran(tmp_path, "advise", str(path), "--predict-only", "--budget", "24MiB", "--allow", "lower_precision")
    assert done.returncode == 0, done.stderr
    assert "Use **" in done.stdout and "Nothing was measured" in done.stdout
    pasted = yaml.safe_load(done.stdout.split("```yaml\n")[1].split("```")[0])
    path.write_text(SUITE[: SUITE.index("strategies:")] + yaml.safe_dump(pasted) + "rounds: 0\n")
    again = plan(path)
    chosen = re.search(r"Use \*\*(.+?)\*\*", done.stdout)
    assert chosen and [case.label for case in again.comparisons[0].cases] == ["baseline", chosen[1]]


@pytest.mark.slow
def test_advice_is_measured_and_right(path: Path, tmp_path: Path, ran: Ran) -> None:
    done = ran(tmp_path, "advise", str(path), "--budget", "24MiB")
    assert done.returncode == 0, done.stderr
    best = r"(the fastest that fits|among the fastest that fit) 24 MiB"
    said = rf"Use \*\*.*fused_loss.*\*\*: of the \d that were measured of 4 combinations it was {best}"
    assert re.search(said, done.stdout)
    assert "Its answer is" in done.stdout and "ms a step" in done.stdout


def test_an_answer_that_does_not_exist_is_refused(path: Path, tmp_path: Path, ran: Ran) -> None:
    done = ran(tmp_path, "advise", str(path), "--allow", "lower_precison")
    assert done.returncode == 2 and "did you mean 'lower_precision'" in done.stderr


def test_remedies_halve_what_can_be_halved(path: Path) -> None:
    whole = plan(path)
    machine = Machine(host_bytes=4 << 20, cache=environment.cache_folder())
    rows = of_plan(whole, LOADED, (), machine)[0]
    halves = remedies(rows, whole, LOADED, (), machine)
    assert [each.change.split()[0] for each in halves] == ["layers", "tokens"]
    assert all(each.need_bytes < min(row.need_bytes or 0 for row in rows) for each in halves)


def test_the_layers_of_a_published_model_are_not_halved(tmp_path: Path, by_sizes: None) -> None:
    path = tmp_path / "suite.yaml"
    path.write_text(Model("pythia-70m", tokens=1024, rows=["checkpoint"]).suite(["torch/cpu"]))
    whole, machine = plan(path), Machine(host_bytes=4 << 20)
    (rows,) = of_plan(whole, LOADED, (), machine)
    assert [each.change for each in remedies(rows, whole, LOADED, (), machine)] == ["tokens 512"]


def test_operators_are_timed_only_where_a_step_fits(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = plan(path)
    timed: list[Place] = []
    monkeypatch.setattr(throughput, "with_calls", lambda rates, place, *_: timed.append(place) or rates)
    here = this_machine(whole.places, environment.cache_folder())
    of_plan(whole, LOADED, (), replace(here, host_bytes=4 << 20))
    assert timed == []
    of_plan(whole, LOADED, (), here)
    assert timed == [Place("torch", "cpu")]


def test_a_plan_times_no_operators_of_steps_that_get_no_ratio(
    path: Path, tmp_path: Path, rates_in: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = plan(path)
    timed: list[int] = []
    monkeypatch.setattr(throughput, "with_calls", lambda rates, place, work, *_: timed.append(len(work)) or rates)
    here = this_machine(whole.places, rates_in(tmp_path) / "harness")
    of_plan(whole, LOADED, (), replace(here, timing_seconds=4.0))
    monkeypatch.setattr(throughput, "LONGEST", 0.0)
    of_plan(whole, LOADED, (), replace(here, timing_seconds=4.0))
    of_plan(whole, LOADED, (), here)
    assert timed[0] == timed[2] > 0 == timed[1], "advice ranks rows by what it knows of them"


@pytest.mark.slow
def test_advice_times_all_rounds_where_the_baseline_does_not_fit(path: Path, tmp_path: Path, ran: Ran) -> None:
    text = SUITE.replace("rounds: 1", "rounds: 2").replace("  - bfloat16\n", "").replace("  - fused_loss\n", "")
    path.write_text(text.replace("- checkpoint", "- fused_loss"))
    done = ran(tmp_path, "advise", str(path), "--budget", "34MiB")
    assert done.returncode == 0 and "the baseline does not fit" in done.stdout, done.stdout + done.stderr
    (kept,) = tmp_path.glob("results/*advice/*/*.jsonl")
    rounds = {(record.case.label, record.slot.round) for record in store.read(kept)[0] if record.times.step_seconds}
    assert {("fused_loss", 0), ("fused_loss", 1)} <= rounds


def open_ended(path: Path) -> Path:
    """Write a suite that asks for all words of a corpus, which are 3,000 and the unknown one."""
    (path.parent / "words.txt").write_text(" ".join(f"word{number}" for number in range(3000)) + " again" * 6000)
    text = SUITE.replace("corpus: zipf", "corpus: words.txt\ntokenizer: words").replace(
        "vocabulary: 4000", "vocabulary: 0"
    )
    path.write_text(text)
    return path


def test_a_vocabulary_of_all_words_is_predicted_as_it_is_measured(path: Path, tmp_path: Path) -> None:
    open_ended(path).write_text(path.read_text().replace("  - checkpoint\n  - fused_loss\n", ""))
    whole = plan(path)
    (rows,) = of_plan(whole, LOADED, (), Machine())
    (measured,) = prepare_data.prepare(whole, LOADED, tmp_path, lambda case: True)[0].comparisons
    assert [row.case for row in rows] == list(measured.cases), "or advice would look its results up under other keys"
    assert rows[0].case.shape["vocabulary"] == 3002
    path.write_text(path.read_text().replace("vocabulary: 0", "vocabulary: 3002"))
    assert [row.peak_bytes for row in of_plan(plan(path), LOADED, (), Machine())[0]] == [row.peak_bytes for row in rows]


def test_without_its_corpus_a_vocabulary_of_all_words_has_no_prediction_and_says_why(
    path: Path, tmp_path: Path
) -> None:
    whole = plan(open_ended(path))
    (tmp_path / "words.txt").unlink()
    counted: list[Case] = []
    (rows,) = of_plan(whole, LOADED, (), Machine(1 << 40), counted.append)
    assert {(row.peak_bytes, row.fits) for row in rows} == {(None, None)} and len(counted) == len(rows)
    assert all("words.txt" in (row.reason or "") for row in rows)


@pytest.mark.parametrize(
    ("corpus", "sizes"),
    [("standard_library", {}), ("standard_library", {"corpus_tokens": 5000}), ("zipf", {})],
)
def test_a_plan_supposes_as_many_tokens_as_a_run_reads(corpus, sizes, tmp_path):
    text = f"title: x\nworkload: decoder\ncorpus: {corpus}\ntokenizer: bytes\nshape: {{tokens: 64, vocabulary: 256}}\n"
    (tmp_path / "read.yaml").write_text(f"{text}strategies: [checkpoint]\n")
    read = plan(tmp_path / "read.yaml")
    case = read.cases[0].model_copy(update={"shape": read.cases[0].shape | sizes})
    supposed = prepare_data.supposed(read, case, LOADED)
    made = prepare_data.of_case(read, case, LOADED, tmp_path)
    assert supposed is not None and made is not None
    assert supposed.dtype == made.dtype and supposed.tokens - made.tokens in (0, 1), "a character may have two bytes"


def test_rows_whose_documents_cannot_be_made_say_why_beside_those_that_can(
    path: Path, by_sizes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents are made for a prediction, since a peak follows their lengths."""
    supposed = prepare_data.supposed

    def made(plan: Plan, case: Case, *rest: object) -> object:
        if case.shape["tokens"] == 256:
            raise SuiteError("corpus 'texts': document 3 has 300 tokens")
        return supposed(plan, case, LOADED)

    monkeypatch.setattr(prepare_data, "supposed", made)
    path.write_text(SUITE.replace("tokens: 512", "tokens: [256, 512]"))
    refused, predicted = of_plan(plan(path), LOADED, (), Machine(1 << 40))
    assert {(row.peak_bytes, row.reason) for row in refused} == {(None, "corpus 'texts': document 3 has 300 tokens")}
    assert "Not predicted: corpus 'texts': document 3 has 300 tokens." in table(refused)
    assert all(row.fits for row in predicted)
    lean = [replace(row, limit_bytes=0) for row in predicted]
    halves = remedies(lean, plan(path), LOADED, (), Machine(1 << 40))
    assert [each.change.split()[0] for each in halves] == ["layers"], "half of the tokens cannot be made"


def test_what_a_comparison_reads_is_described_once(path: Path, by_sizes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    described: list[Case] = []
    supposed = prepare_data.supposed
    monkeypatch.setattr(
        prepare_data, "supposed", lambda plan, case, *rest: described.append(case) or supposed(plan, case, *rest)
    )
    of_cases(plan(path).cases, plan(path), LOADED, (), Machine())
    assert [case.label for case in described] == ["baseline"]


def test_sizes_that_the_workload_refuses_are_no_remedy(path: Path, by_sizes: None) -> None:
    sizes = "vocabulary: 4000, batch: 1, tokens: 160, prompt: 100}"
    text = SUITE.replace("decoder", "scoring").replace("vocabulary: 4000, batch: 1, tokens: 512}", sizes)
    path.write_text(text[: text.index("strategies:")] + "strategies: [nothing]\nrounds: 0\n")
    whole, machine = plan(path), Machine(host_bytes=1 << 20)
    (rows,) = of_plan(whole, LOADED, (), machine)
    assert [each.change.split()[0] for each in remedies(rows, whole, LOADED, (), machine)] == ["layers"]


def test_a_plan_is_of_the_places_that_were_chosen(path: Path) -> None:
    path.write_text(SUITE.replace("[torch/cpu]", "[torch/cpu, torch/cuda]"))
    assert [str(place) for place in selected(plan(path), ["torch/cuda"], None).places] == ["torch/cuda"]
    assert [str(place) for place in plan(path).places] == ["torch/cpu", "torch/cuda"]


def advised(path: Path, folder: Path, host_bytes: int, predict_only: bool = False) -> list[Advice]:
    options = bench.Options(folder, cache=folder / "cache")
    machine = Machine(host_bytes=host_bytes, cache=environment.cache_folder())
    return advise(plan(path), LOADED, options, machine, (), False, predict_only, bench.Progress())


def test_what_was_measured_above_the_limit_is_not_advised(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of a machine is no budget: no process was held to it."""

    def run(plan: Plan, *rest: object) -> Path:
        for case in plan.cases:
            peak, step = (200 << 20, 0.1) if case.is_baseline else (40 << 20, 0.2)
            digest = case.digest()
            memory = Record(slot=Slot(case=digest, kind="memory"), probe=digest, memory=Memory(peak_host_bytes=peak))
            exact = Verdict("bit_exact", 1.0, None, None, None, (), "equal")
            for record in (
                memory,
                Record(slot=Slot(case=digest, kind="numerics"), numerics=exact),
                *(
                    Record(slot=Slot(case=digest, kind="time", round=at), times=Times(step_seconds=(step, step)))
                    for at in range(4)
                ),
            ):
                store.append(tmp_path / "made.jsonl", record.model_copy(update={"case": case}))
        return tmp_path / "made.jsonl"

    path.write_text(SUITE.replace("  - fused_loss\n  - bfloat16\n", ""))
    monkeypatch.setattr(session, "run", run)
    (advice,) = advised(path, tmp_path, 125 << 20)
    assert {row.label: row.peak_bytes for row in advice.rows}["baseline"] == 200 << 20
    assert advice.predicted[0].fits, "as it was predicted"
    assert advice.choice == "checkpoint"
    (tmp_path / "made.jsonl").unlink()
    (advice,) = advised(path, tmp_path, 300 << 20)
    assert advice.choice == "baseline", "within the limit the fastest"


@pytest.mark.parametrize(("rounds", "timed"), [(0, {0, 1, 2}), (1, {0})])
def test_advice_is_timed_in_the_rounds_of_the_suite_or_where_it_has_none_in_some(
    path: Path,
    tmp_path: Path,
    smallest: str,
    made_up: Path,
    rounds: int,
    timed: set[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path.write_text(f"{smallest}rounds: {rounds}\n")
    names = (str(made_up),)
    loaded = plugins.load(names)
    module = loaded.manager.get_plugin(str(made_up))
    memory = Record(**module.FIGURES["memory"], origin=Origin(worker_seconds=0.1))
    monkeypatch.setattr(module, "begin", lambda task, *rest: [memory])
    options = bench.Options(tmp_path / "results", names, cache=tmp_path / "cache")
    machine = Machine(host_bytes=1 << 40)
    small = reader.read(path, loaded)
    (advice,) = advise(small, loaded, options, machine, (), False, False, bench.Progress())
    (file,) = tmp_path.glob("results/*-advice/*/*.jsonl")
    records = store.read(file)[0]
    assert {record.slot.round for record in records if record.slot and record.times.step_seconds} == timed
    assert {row.label for row in advice.usable} == {"baseline", "checkpoint"}
    assert "of the 2 that were measured of 2 combinations it was among the fastest that fit" in advice_text([advice])


@pytest.mark.parametrize(
    ("verdict", "peak", "named"),
    [("bit_exact", 40, True), ("diverged", 40, False), ("lower_precision", 40, False), ("bit_exact", 400, False)],
)
def test_next_best_is_what_may_be_used_too(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdict: str, peak: int, named: bool
) -> None:
    figures = {
        "baseline": (100, 0.3, "bit_exact"),
        "nothing": (100, 0.3, "bit_exact"),
        "checkpoint": (40, 0.1, "bit_exact"),
        "fused_loss": (peak, 0.2, verdict),
        "checkpoint + fused_loss": (40, 0.02, "diverged"),
    }

    def run(plan: Plan, *rest: object) -> Path:
        for case in plan.cases:
            peak, step, rung = figures[case.label]
            digest = case.digest()
            memory = Memory(peak_host_bytes=peak << 20)
            answer = Verdict(rung, 1.0, None, None, None, (), "as it is")  # type: ignore[arg-type]
            for record in (
                Record(slot=Slot(case=digest, kind="memory"), probe=digest, memory=memory),
                Record(slot=Slot(case=digest, kind="numerics"), numerics=answer),
                *(
                    Record(slot=Slot(case=digest, kind="time", round=at), times=Times(step_seconds=(step, step)))
                    for at in range(4)
                ),
            ):
                store.append(tmp_path / "made.jsonl", record.model_copy(update={"case": case}))
        return tmp_path / "made.jsonl"

    def predicted(plan: Plan, *rest: object) -> list[list[PlanRow]]:
        (group,) = plan.comparisons
        return [[PlanRow(case, 40 << 20, "", None, 240 << 20, None) for case in group.cases]]

    path.write_text(SUITE.replace("  - bfloat16\n", ""))
    monkeypatch.setattr(session, "run", run)
    monkeypatch.setattr(advice_verb, "of_plan", predicted)
    (advice,) = advised(path, tmp_path, 0)
    assert advice.choice == "checkpoint"
    sentence = advice_text([advice]).splitlines()[2]
    assert sentence.startswith("Use **checkpoint**") and ("Next best: " in sentence) == named
    assert "Next best: fused_loss, 0.40 x the memory at 0.67 to 0.67 x the time" in sentence or not named


def test_predictions_that_are_kept_hide_no_results(path: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    advice = advised(path, tmp_path, 1 << 40, predict_only=True)
    assert saved(advice, plan(path), LOADED, results).parent == results / "small" / facts.name()
    assert saved(advice, plan(path), LOADED, results).parent == results / "small" / facts.name(), "nor does advice"
    measured = results / "small" / facts.name() / "20990101T000000Z-a.jsonl"
    store.append(measured, Record(slot=Slot(case="c", kind="memory"), case=advice[0].case))
    assert saved(advice, plan(path), LOADED, results).parent == results / "small_advice" / facts.name()
    assert measured in store.newest(results)


def test_saved_advice_says_for_which_card_it_was_predicted(path: Path, tmp_path: Path) -> None:
    (case, *_) = plan(path).cases
    rows = tuple(PlanRow(case, 1, "", None, None, None, supposed=note) for note in ("predicted for one GPU", ""))
    records = store.read(saved([Advice(case, rows, (), (), None)], plan(path), LOADED, tmp_path))[0]
    assert [record.notes for record in records[1:]] == [{"gpu": "predicted for one GPU"}, {}]


def test_ratios_of_a_plan_are_to_its_baseline_and_what_saves_most_comes_first() -> None:
    def row(name: str, peak_mib: int, seconds: float, limit_mib: int) -> PlanRow:
        limit = limit_mib << 20
        return PlanRow(case(*filter(None, [name])), peak_mib << 20, "", 50 << 20, limit, seconds, timed=1.0)

    def rows(limit_mib: int) -> list[PlanRow]:
        sizes = (("", 200, 2.0), ("fused_loss", 150, 1.8), ("checkpoint", 100, 2.5), ("adam_mini", 210, 2.0))
        return [row(*each, limit_mib) for each in sizes]

    lines = [line for line in table(rows(205)).splitlines() if line.startswith("|")]
    _, _, *cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells == [
        ["baseline", "200", "", "", "4.0", "", "", "", "yes"],
        ["`fused_loss`", "150", "", "", "3.0", "0.75 x", "0.90 x", "", "yes"],
        ["`checkpoint`", "100", "", "", "2.0", "0.50 x", "1.25 x", "", "yes"],
        ["`adam_mini`", "210", "", "", "4.2", "1.05 x", "1.00 x", "", "NO"],
    ]
    effects = "In order of effect: checkpoint saves 100 MiB, fused_loss saves 50 MiB."
    assert effects in table(rows(90)) and "In order of effect" not in table(rows(205))


def declaring(name: str, peak: int, answer: str) -> PlanRow:
    """Return a row for a card that is not here, so that it has no time, whose strategies declare an answer."""
    return replace(seen(name, peak, None), prediction=Prediction(declared_answer=answer))


def test_a_plan_says_of_each_row_what_is_declared_of_its_answer() -> None:
    rows = [
        declaring("", 90, "exact"),
        declaring("checkpoint", 60, "exact"),
        declaring("bfloat16", 50, "lower_precision"),
    ]
    cells = [line.split("|")[-3].strip() for line in table(rows).splitlines() if line.startswith("| ")]
    assert cells == ["answer", "", "exact", "lower_precision"]


def test_a_plan_whose_baseline_is_too_large_names_the_plainest_row_that_fits_without_any_times() -> None:
    rows = [
        declaring("", 300, "exact"),
        declaring("bfloat16", 40, "lower_precision"),
        declaring("checkpoint+fused_loss", 60, "exact"),
        declaring("checkpoint", 120, "exact"),
    ]
    shown = "the plainest that does is **checkpoint + fused_loss**: it takes 60 B, and its answer is exact."
    assert f"The baseline does not fit; {shown}" in table(rows)
    assert "The baseline does not fit" not in table([declaring("", 90, "exact"), *rows[1:]])
    assert "The baseline does not fit" not in table([rows[0], rows[3]]), "nothing fits, which another sentence says"


@pytest.mark.parametrize(
    ("place", "shown"), [("torch/cpu", "each plan times some more"), ("jax/cpu", "not known in JAX")]
)
def test_a_plan_without_times_says_why_by_its_framework(place: str, shown: str) -> None:
    (line,) = [
        each for each in table([PlanRow(case(place=place), 1, "", 1, 2, 1.0)]).splitlines() if "step time:" in each
    ]
    assert shown in line and ("times some more" in line) is (place == "torch/cpu")
