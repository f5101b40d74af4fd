"""What a peak is made of adds up to the peak."""

import pytest

from harness.records import Phase
from harness.report.composition import BEFORE, composition


def phase(name: str, entry: int, peak: int, exit: int) -> Phase:
    return Phase(name=name, entry_bytes=entry, peak_bytes=peak, exit_bytes=exit)


STEP = [
    phase("init", 0, 40, 30),
    phase("steady_step", 30, 100, 30),
    phase("steady_step/forward", 30, 55, 50),
    phase("steady_step/loss", 50, 90, 70),
    phase("steady_step/backward", 70, 100, 40),
    phase("steady_step/update", 40, 60, 30),
]


def test_each_phase_up_to_the_peak_has_what_it_added() -> None:
    parts = composition(STEP, "steady_step/backward")
    assert parts == {BEFORE: 30, "forward": 20, "loss": 20, "backward": 30}
    assert sum(parts.values()) == 100


@pytest.mark.parametrize("name", ["steady_step/forward", "steady_step/loss", "steady_step/update", "init"])
def test_they_add_up_wherever_the_peak_is(name: str) -> None:
    peak = next(each.peak_bytes for each in STEP if each.name == name)
    assert sum(composition(STEP, f"{name}, first_step/other").values()) == peak


def test_what_is_freed_is_taken_from_what_came_last() -> None:
    assert composition(STEP, "steady_step/update") == {BEFORE: 30, "forward": 10, "update": 20}


def test_child_processes_are_a_part_of_their_own() -> None:
    parts = composition(STEP, "steady_step/backward", children=7)
    assert parts == composition(STEP, "steady_step/backward") | {"child processes": 7}


def test_a_peak_of_an_unknown_phase_is_made_of_nothing() -> None:
    assert composition(STEP, None) == composition(STEP, "elsewhere") == composition([], "init") == {}
    assert composition(STEP, None, children=5) == {}, "a part alone is not the peak"
