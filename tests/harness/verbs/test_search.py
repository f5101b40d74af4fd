"""A combination is looked for among more than can be predicted: what is tried, and in which order."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

from harness.contract import plugins
from harness.records import Applied, Case, Prediction
from harness.records.record import Phase
from harness.verbs.advise import preference
from harness.verbs.plan import PlanRow
from harness.verbs.search import AT_ONCE, SECONDS, Patient, search

LOADED = plugins.load()
MIB = 1 << 20
BASELINE = Case(
    workload="decoder", shape={"tokens": 64}, place="torch/cpu", corpus="zipf", tokenizer="bpe"
)  # fmt: skip
STATE, LAYERS, LOGITS = 400, 500, 600
"""What parameters with moments, layers, and logits take, in MiB: each strategy below makes one of them less."""
LEFT: Mapping[str, Mapping[str, float]] = {
    "checkpoint": {"layers": 0.2},
    "selective_checkpoint": {"layers": 0.6},
    "fused_loss": {"logits": 0.1},
    "chunked_loss": {"logits": 0.3},
    "tied": {},
    "bfloat16": {"state": 0.5, "layers": 0.5, "logits": 0.5},
    "adam_8bit": {"state": 0.6},
    "galore": {"state": 0.4},
}
Predict = Callable[[Sequence[Case]], list[PlanRow]]


def predicting(
    limit: int, asked: list[str], left: Mapping[str, Mapping[str, float]] = LEFT, host_limit: int | None = None
) -> Predict:
    """Predict that the parts lie beside each other in the backward, for a limit in MiB; collect what is asked.

    What activations are offloaded takes of the host lies beside it, and may be limited as well.
    """

    def row(case: Case) -> PlanRow:
        parts = {"state": STATE, "layers": LAYERS, "logits": LOGITS}
        for applied in case.strategies:
            parts |= {part: int(parts[part] * share) for part, share in left[applied.name].items()}
        peak = sum(parts.values()) * MIB
        offloaded = any(applied.name == "offload_activations" for applied in case.strategies)
        phases = (Phase(name="backward", entry_bytes=0, peak_bytes=peak, exit_bytes=0),)
        on_host = LAYERS * MIB if offloaded else 0
        prediction = Prediction(predicted_phases=phases, predicted_host_bytes=on_host)
        host_limit_bytes = None if host_limit is None else host_limit * MIB
        return PlanRow(
            case,
            peak,
            "backward",
            None,
            limit * MIB,
            None,
            prediction=prediction,
            host_limit_bytes=host_limit_bytes,
        )

    def predict(cases: Sequence[Case]) -> list[PlanRow]:
        asked.extend(case.label for case in cases)
        return [row(case) for case in cases]

    return predict


def fitting(limit: int, names: Sequence[str] = tuple(LEFT)) -> list[str]:
    rows = search(BASELINE, [Applied(name=name) for name in names], LOADED, predicting(limit, []))
    assert rows[0].case.is_baseline
    return [row.case.label for row in rows if row.fits]


@pytest.mark.parametrize(("took", "waits"), [(0.1, SECONDS), (60.0, 120.0)])
def test_a_slow_processor_is_waited_for(took: float, waits: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, allowed = [0.0], []

    def predict(cases: Sequence[Case], seconds: float) -> list[PlanRow]:
        clock[0] += took
        allowed.append(seconds)
        return predicting(1000, [])(cases)

    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    patient = Patient(predict)
    search(BASELINE, [Applied(name=name) for name in LEFT], LOADED, patient)
    assert allowed[0] > 60 and set(allowed[1:]) == {patient.seconds} == {waits}


def test_what_fits_alone_ends_the_search() -> None:
    asked: list[str] = []
    search(BASELINE, [Applied(name=name) for name in LEFT], LOADED, predicting(1000, asked))
    assert not any("+" in label for label in asked)
    assert set(asked) == {"baseline", *LEFT}


def test_a_baseline_that_fits_is_all_that_is_tried_where_no_times_are_known() -> None:
    asked: list[str] = []
    search(BASELINE, [Applied(name=name) for name in LEFT], LOADED, predicting(2000, asked))
    assert set(asked) == {"baseline"}


def test_strategies_are_added_until_one_combination_fits() -> None:
    exact = [name for name in LEFT if LOADED.strategies[name].declares == "exact"]
    assert fitting(600, exact) == ["checkpoint + fused_loss"]


@pytest.mark.parametrize(
    ("limit", "fitted"),
    [
        (2000, ["ddp on 4 ranks", "fsdp on 4 ranks"]),
        (1250, ["fsdp on 4 ranks"]),
        (700, ["fsdp + fused_loss on 4 ranks"]),
        (300, ["fsdp + checkpoint + fused_loss on 4 ranks"]),
    ],
)
def test_on_several_ranks_it_begins_with_what_divides_the_run(limit: int, fitted: list[str]) -> None:
    left = {**LEFT, "ddp": {}, "fsdp": {"state": 0.25}}
    members = [Applied(name=name) for name in ("ddp", "fsdp", "checkpoint", "fused_loss", "tied", "bfloat16")]
    rows = search(BASELINE, members, LOADED, predicting(limit, [], left), ranks=4)
    plain, *others = rows
    assert plain.case.is_baseline and plain.case.ranks == 1 and {row.case.ranks for row in others} == {4}
    assert [row.case.label for row in others if row.fits] == fitted


def test_answers_as_before_come_first_and_then_the_nearest() -> None:
    assert fitting(600) == ["checkpoint + fused_loss"], "though bfloat16 with either would be less"
    (leaner, *others) = fitting(300)
    assert "bfloat16" in leaner and not any("galore" in each for each in (leaner, *others))


def test_another_answer_that_fits_alone_does_not_end_the_search_for_one_as_before() -> None:
    assert set(fitting(760)) >= {"bfloat16", "checkpoint + fused_loss"}
    assert set(fitting(760, ["bfloat16", "checkpoint"])) == {"bfloat16"}


def test_a_search_in_which_nothing_fits_ends() -> None:
    asked: list[str] = []
    rows = search(BASELINE, [Applied(name=name) for name in LEFT], LOADED, predicting(1, asked))
    assert not any(row.fits for row in rows)
    least = min(rows, key=lambda row: row.peak_bytes or 0)
    assert {"checkpoint", "fused_loss", "bfloat16"} < {each.name for each in least.case.strategies}
    assert "galore" in least.case.label or "adam_8bit" in least.case.label


@pytest.mark.parametrize("limit", [300, 600, 1])
def test_nothing_is_asked_for_twice_on_the_way(limit: int) -> None:
    asked: list[str] = []
    rows = search(BASELINE, [Applied(name=name) for name in LEFT], LOADED, predicting(limit, asked))
    assert sorted(asked) == sorted(2 * [row.case.label for row in rows]), "once on the way and once at the end"


def test_what_saves_nothing_alone_is_combined_with_nothing() -> None:
    asked: list[str] = []
    search(BASELINE, [Applied(name=name) for name in LEFT], LOADED, predicting(1, asked))
    assert not any("tied" in label for label in asked if "+" in label)


def test_what_a_combination_fits_without_is_taken_out_again() -> None:
    left = {
        "nested_checkpoint": {"state": 0.5, "layers": 0.5, "logits": 0.5},
        "fused_loss": {"logits": 0.0},
        "offload_activations": {"layers": 0.0},
    }
    members = [Applied(name=name) for name in left]
    asked: list[str] = []
    rows = search(BASELINE, members, LOADED, predicting(420, asked, left, host_limit=1000))
    fitting = [row.case.label for row in rows if row.fits]
    assert fitting == ["nested_checkpoint + fused_loss + offload_activations", "fused_loss + offload_activations"]


def test_what_saves_less_than_was_saved_already_is_not_tried_again() -> None:
    """Many that make the same part less: of these one is added, and each other is tried once on top of it."""
    same = ("checkpoint", "nested_checkpoint", "selective_checkpoint", "feed_checkpoint", "offload_activations")
    left = {
        **{name: {"layers": 0.0} for name in same},
        "fused_loss": {"logits": 0.5},
        "tied": {"state": 0.9},
        "update_in_backward": {"state": 0.8},
    }
    asked: list[str] = []
    search(BASELINE, [Applied(name=name) for name in left], LOADED, predicting(1, asked, left))
    on_the_way = [label.split(" + ") for label in dict.fromkeys(asked)]
    pairs = [frozenset(names) & set(same) for names in on_the_way if len(set(names) & set(same)) > 1]
    assert pairs and len(pairs) == len(set(pairs)), "each is tried once on top of the one that was added"
    assert max(map(len, on_the_way)) == 4, "one that makes layers less, and all others that save"


def test_a_strategy_without_a_prediction_is_combined_with_nothing() -> None:
    asked: list[str] = []
    predict = predicting(1, asked)

    def some(cases: Sequence[Case]) -> list[PlanRow]:
        rows = predict(cases)
        return [replace(row, peak_bytes=None) if "checkpoint" in row.case.label else row for row in rows]

    rows = search(BASELINE, [Applied(name=name) for name in LEFT], LOADED, some)
    assert not any("checkpoint" in label for label in asked if "+" in label)
    assert any(row.case.label == "checkpoint" and row.peak_bytes is None for row in rows)


def test_without_a_limit_nothing_is_looked_for() -> None:
    asked: list[str] = []
    predict = predicting(1, asked)

    def unlimited(cases: Sequence[Case]) -> list[PlanRow]:
        return [replace(row, limit_bytes=None) for row in predict(cases)]

    (row,) = search(BASELINE, [Applied(name=name) for name in LEFT], LOADED, unlimited)
    assert row.case.is_baseline and asked == ["baseline"]


@pytest.mark.parametrize(
    ("limit", "way"),
    [
        (1215, ["mapped_moments", "foreach_adamw", "foreach_adamw + sparse_embedding_gradient"]),
        (800, ["mapped_moments"]),
    ],
    ids=["near", "far"],
)
def test_where_what_was_added_keeps_out_others_another_way_is_tried_unless_the_limit_is_far(limit, way) -> None:
    """One saves most alone, and two that do not go with it save more together."""
    left = {
        "mapped_moments": {"state": 0.35},
        "foreach_adamw": {"state": 0.45},
        "sparse_embedding_gradient": {"state": 0.5},
        "tied": {},
    }
    members = [Applied(name=name) for name in left]
    steps: list[str] = []
    rows = search(BASELINE, members, LOADED, predicting(limit, [], left), lambda row: steps.append(row.case.label))
    assert steps == way, "each is said once, though answers less exact begin the same way"
    assert [row.case.label for row in rows if row.fits] == way[2:]


@pytest.mark.parametrize(
    "host_limit, fits", [(None, "offload_activations"), (1000, "offload_activations"), (100, "checkpoint")]
)
def test_what_is_moved_to_the_host_saves_unless_the_host_is_known_to_lack_the_room(host_limit, fits) -> None:
    left = {
        "offload_activations": {"layers": 0.0},
        "checkpoint": {"layers": 0.1},
        "fused_loss": {"logits": 0.1},
        "tied": {"state": 0.5},
    }
    members = [Applied(name=name) for name in left]
    rows = search(BASELINE, members, LOADED, predicting(400, [], left, host_limit))
    best = min((row for row in rows if row.fits), key=preference)
    assert {applied.name for applied in best.case.strategies} == {fits, "fused_loss", "tied"}


def test_what_alone_saves_less_than_the_best_of_a_step_is_not_tried_in_it() -> None:
    little = ("accumulate", "drop_ignored", "tied", "recomputed_activation", "naive_product", "tiled_feed")
    little += ("feed_checkpoint", "update_in_backward", "offloaded_moments", "foreach_adamw", "expandable_segments")
    left = {"checkpoint": {"layers": 0.1}, "fused_loss": {"logits": 0.1}, **{name: {"state": 0.99} for name in little}}
    asked: list[str] = []
    search(BASELINE, [Applied(name=name) for name in left], LOADED, predicting(600, asked, left))
    pairs = {label for label in asked if label.count(" + ") == 1 and "fused_loss" in label.split(" + ")}
    assert any("checkpoint" in label for label in pairs) and len(pairs) <= AT_ONCE < len(little)
