"""What a run measures with: its name is later than those of the runs that it goes on with."""

from datetime import UTC, datetime

from harness.records import Slot, store
from harness.run.bench import new_id
from harness.run.schedule import Summary


def test_a_run_is_named_after_those_that_it_goes_on_with_though_the_clock_was_set_back() -> None:
    ids = ("29990101T000000Z-99999-ffffff", "29990101T000001Z-99999-ffffff", "1", "")
    latest = {Slot(case=run_id, kind="memory"): Summary("ok", run_id=run_id) for run_id in ids}
    assert new_id(latest) > max(ids)
    assert new_id(latest).startswith("29990101T000002Z-")


def test_a_run_that_follows_within_a_second_is_named_after_it() -> None:
    """The number of its process may be smaller."""
    before = f"{datetime.now(UTC):{store.STAMP}}-99999999-ffffff"
    assert new_id({Slot(case="a", kind="memory"): Summary("ok", run_id=before)}) > before
    assert new_id() < f"{datetime.now(UTC):{store.STAMP}}-99999999-ffffff"
