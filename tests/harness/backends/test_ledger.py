"""A ledger tells what stood at a point of a run, by its makers, and the most that each kind took."""

import pytest

from harness.backends.ledger import Change, Ledger, Maker

DRAWN = Maker("init", "parameters", "empty")
SCORES = Maker("first_step/forward", "attend", "bmm")
SCRATCH = Maker("first_step/backward", "backward", "mm")


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger()
    weight, first, second = ledger.began(100, DRAWN), ledger.began(30, SCORES), ledger.began(50, SCORES)
    ledger.name(weight, "parameters")
    ledger.ended(first, 30)
    ledger.ended(ledger.began(7, SCRATCH), 7)
    ledger.ended(second, 50)
    return ledger


@pytest.mark.parametrize(
    ("changes", "standing"),
    [
        (0, []),
        (3, [("parameters", "empty", 100, 1), ("attend", "bmm", 80, 2)]),
        (4, [("parameters", "empty", 100, 1), ("attend", "bmm", 50, 1)]),
        (7, [("parameters", "empty", 100, 1)]),
    ],
)
def test_what_stands_is_told_by_maker_and_the_largest_first(
    ledger: Ledger, changes: int, standing: list[tuple[str, str, int, int]]
) -> None:
    assert list(ledger.standing(changes)) == standing


def test_what_stands_in_one_memory_is_told_apart_from_another(ledger: Ledger) -> None:
    ledger.began(40, Maker("init", "parameters", "empty", "pinned"))
    assert list(ledger.standing(len(ledger.changes), "pinned")) == [("parameters", "empty", 40, 1)]
    assert list(ledger.standing(len(ledger.changes))) == [("parameters", "empty", 100, 1)]


def test_the_most_of_a_kind_is_at_its_own_time_and_a_phase_names_what_nobody_named(ledger: Ledger) -> None:
    assert ledger.most() == {"parameters": 100, "activations": 80, "workspace": 7}
    assert ledger.changes[:2] == [Change(0, 100), Change(1, 30)]
    assert sum(change.size for change in ledger.changes) == 100
