"""A plan shows what a device holds beside what it allocates, and names what stands at a peak."""

from dataclasses import replace

import pytest

from harness import Place
from harness.contract import plugins
from harness.records import Applied, Case, Prediction
from harness.records.forecast import SHOWN, Standing, largest
from harness.refusal import Refusal
from harness.report.memory import device_grid, explained
from harness.verbs.plan import PlanRow, named

MIB = 1 << 20
CASE = Case(workload="decoder", shape={"tokens": 8}, place=Place("torch", "cuda"), corpus="drawn", tokenizer="none")


def row(**prediction):
    figures = Prediction(**prediction)
    return PlanRow(CASE, figures.predicted_peak_bytes, "steady_step/backward", None, None, None, prediction=figures)


def test_a_device_has_figures_of_its_allocator_of_the_driver_and_of_the_host():
    offloaded = row(
        predicted_peak_bytes=300 * MIB,
        predicted_reserved_bytes=400 * MIB,
        predicted_driver_bytes=550 * MIB,
        predicted_host_bytes=64 * MIB,
    )
    (grid,) = device_grid([offloaded, row(predicted_peak_bytes=100 * MIB)])
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in grid.splitlines()]
    assert cells[2] == ["baseline", "300", "400", "550", "64.0"]
    assert cells[3] == ["baseline", "100", "", "", ""]
    assert device_grid([row(predicted_peak_bytes=100 * MIB)]) == []


def test_what_stands_at_a_peak_is_named_by_part_and_operator():
    kinds = [Standing("feed", f"mm{at}", (20 - at) * MIB, 2) for at in range(SHOWN + 3)]
    shown = explained([row(predicted_peak_bytes=200 * MIB, predicted_standing=largest(kinds))], {})
    assert "The peak of 200 MiB is in backward." in shown
    lines = [line for line in shown.splitlines() if line.startswith("| feed") or line.startswith("| the rest")]
    assert len(lines) == SHOWN + 1
    assert [cell.strip() for cell in lines[0].strip("|").split("|")] == ["feed", "mm0", "20.0", "11.0%", "2"]
    assert [cell.strip() for cell in lines[-1].strip("|").split("|")] == ["the rest", "", "27.0", "14.8%", "6"]


@pytest.mark.parametrize(
    ("strategies", "kind", "against"),
    [
        ((), "moments", "moments and gradients"),
        (("checkpoint",), "moments", "moments and gradients"),
        (("qlora", "checkpoint"), "moments, and what is frozen", "the width of all numbers"),
    ],
)
def test_what_is_frozen_beside_adapters_is_not_called_moments(strategies, kind, against):
    figures = row(
        predicted_peak_bytes=200 * MIB,
        predicted_standing=(Standing("parameters", "empty", 100 * MIB, 2),),
        predicted_kinds={"moments": 120 * MIB, "parameters": 1},
    )
    case = CASE.model_copy(update={"strategies": tuple(Applied(name=name) for name in strategies)})
    shown = explained([replace(figures, case=case)], plugins.load().strategies)
    assert [cell.strip() for cell in shown.splitlines()[-1].strip("|").split("|")] == [kind, "120", against]


def test_a_case_without_a_prediction_says_why():
    refused = PlanRow(CASE, None, None, None, None, None, reason="its sizes depend on values")
    assert "Not predicted: its sizes depend on values." in explained([refused], {})


def test_a_case_that_is_not_in_the_plan_is_refused():
    assert named([CASE], "baseline") == [CASE]
    with pytest.raises(Refusal, match=r"no case 'basline'.*baseline"):
        named([CASE], "basline")
