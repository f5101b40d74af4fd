"""What is said to have disturbed a timed run, by the kernel's counters before and after it."""

import os

import pytest

from harness.machine.interference import Snapshot, disturbances


@pytest.mark.parametrize(
    ("allowed", "running", "flags"),
    [(8, 5, ()), (8, 6, ("crowded",)), (2, 6, ()), (2, 100, ())],
)
def test_tasks_on_cpus_that_a_run_may_not_use_crowd_it_not(
    allowed: int, running: int, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(allowed)))
    before = Snapshot(steal=0, total=0, running=running, throttled=0)
    assert disturbances(before, Snapshot(steal=0, total=1000, running=1, throttled=0)) == flags


def test_time_that_went_to_others_and_heat_disturb_wherever_a_run_may_be() -> None:
    before = Snapshot(steal=0, total=0, running=1, throttled=0)
    assert disturbances(before, Snapshot(steal=20, total=1000, running=1, throttled=1)) == ("stolen", "throttled")
