"""The search for garbage is off within a block alone."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.records import store
from harness.records.garbage import uncollected


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if enabled else gc.disable)()


def test_blocks_within_blocks_end_with_the_outermost() -> None:
    with uncollected():
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_error_ends_the_block() -> None:
    with pytest.raises(KeyError), uncollected():
        raise KeyError
    assert gc.isenabled()


def test_what_somebody_else_turned_off_stays_off() -> None:
    gc.disable()
    with uncollected():
        pass
    assert not gc.isenabled()


def test_records_are_read_without_a_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    (tmp_path / "a.jsonl").write_text("no record\n")
    monkeypatch.setattr(store, "parse", lambda line: seen.append(gc.isenabled()) or store.Record())
    assert len(store.read(tmp_path / "a.jsonl")[0]) == 1
    assert seen == [False] and gc.isenabled()
