"""The words of time are as rarely wrong, and effects as often found, as is claimed: on re-sampled committed residuals.

`tests/benchmarks/clock_figures.py` prints the same at length.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from harness.records import Record, Slot, store
from harness.verdicts import dunnett
from harness.verdicts.looks import LOOKS
from harness.verdicts.observed import of_steps

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "clock_figures.py"


@pytest.fixture(scope="module")
def clock():
    spec = importlib.util.spec_from_file_location("clock_figures", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["clock_figures"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["clock_figures"]


@pytest.fixture(scope="module")
def shape(clock):
    return clock.residuals(clock.times(clock.committed(), of_steps).values())


@pytest.fixture(scope="module")
def with_looks(clock, shape, once):
    def simulated(folder):
        return clock.simulate(clock.resampled(shape, [0.05]), LOOKS, 1000)  # of 100 groups a rate of 3 % may be 8 %

    return once("with_looks", simulated)


@pytest.mark.long
def test_words_are_rarely_false_and_intervals_cover(with_looks):
    assert with_looks.false_rows <= 0.02
    assert with_looks.false_groups <= 0.05
    assert with_looks.false_words <= 0.02
    assert with_looks.coverage >= 0.95
    assert with_looks.group_coverage >= 0.95


@pytest.mark.long
def test_words_are_as_rarely_false_where_the_time_is_spent_before_the_last_look(clock, shape):
    spent = clock.simulate(clock.resampled(shape, [0.031]), LOOKS, 1500, ends=(3, 9))  # of 400, 4 % showed as 5.5 %
    assert spent.false_groups <= 0.05
    assert spent.false_words <= 0.02
    assert spent.group_coverage >= 0.95
    assert spent.found[1.1] >= 0.9


@pytest.mark.long
def test_five_and_ten_percent_are_found_within_24_rounds_of_processes_that_scatter_by_5_percent(with_looks):
    assert with_looks.found[1.05] >= 0.7
    assert with_looks.found[1.1] >= 0.99
    assert with_looks.found[1.02] <= 0.3
    assert with_looks.equal >= 0.4


@pytest.mark.long
def test_large_effects_cost_few_rounds(with_looks):
    assert with_looks.rounds[1.2] < 4.5
    assert with_looks.rounds[1.1] < 9
    assert with_looks.rounds[1.05] < 20


def test_few_rounds_are_honest_and_eight_are_enough_where_processes_scatter_by_3_percent(clock, shape):
    three = clock.simulate(clock.resampled(shape, [0.05]), (3,), 100)
    assert three.false_rows <= 0.02
    assert three.coverage >= 0.95
    eight = clock.simulate(clock.resampled(shape, [0.031]), (8,), 60)
    assert eight.false_rows <= 0.02
    assert eight.coverage >= 0.95
    assert eight.half_width <= 0.04
    assert eight.found[1.05] >= 0.7
    assert eight.found[1.1] >= 0.99


def test_tails_heavier_than_any_seen_cost_no_coverage(clock):
    figures = clock.simulate(clock.fourfold(0.05), (4,), 100)
    assert figures.false_rows <= 0.02
    assert figures.coverage >= 0.95


@pytest.mark.parametrize(("rounds", "share"), [(3, 0.05), (6, 0.08)])
def test_equal_processes_of_which_some_are_much_slower_are_not_called_so(clock, rounds, share):
    figures = clock.simulate(clock.strays(0.02, share), (rounds,), 150)
    assert figures.false_groups <= 0.05
    assert figures.group_coverage >= 0.95
    assert figures.found[1.2] >= 0.7


def test_blocks_of_a_long_round_are_as_honest(clock, shape):
    figures = clock.simulate(clock.resampled(shape, [0.05]), LOOKS[:3], 50, cost=4.0)
    assert figures.false_rows <= 0.02
    assert figures.coverage >= 0.95
    assert figures.found[1.1] >= 0.8


def test_a_run_of_ones_own_decides_nothing_of_the_clock(clock, tmp_path):
    line = store.encoded(Record(slot=Slot(case="0", kind="memory")))
    old, new = (tmp_path / "results" / "suite" / "machine" / f"{year}.jsonl" for year in (2025, 2026))
    old.parent.mkdir(parents=True)
    old.write_bytes(line)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "results"], cwd=tmp_path, check=True)
    new.write_bytes(line + line)
    assert len(clock.committed(tmp_path)) == 1


@pytest.mark.parametrize("baselines", [("baseline", "nothing"), ("baseline",)])
def test_one_strategy_alone_is_judged_as_honestly(clock, shape, baselines):
    for looks, most in (((4,), 300), (LOOKS[:4], 200)):
        covered, false, found = clock.alone(clock.resampled(shape, [0.05]), looks, most, baselines)
        assert covered >= 0.95
        assert false <= 0.05
        assert found >= 0.3


def test_a_broken_quantile_would_be_seen(clock, shape, monkeypatch):
    monkeypatch.setattr(dunnett, "quantile", lambda *arguments: 1.0)
    figures = clock.simulate(clock.resampled(shape, [0.05]), (6,), 20)
    assert figures.false_rows > 0.05
    assert figures.coverage < 0.9
