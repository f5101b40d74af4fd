"""What is known of the values of token ids before a run reads them."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from harness.contract.data import SMALL_INTS
from harness.workloads.data import rows


def corpus(folder: Path, ids_N: np.ndarray) -> SimpleNamespace:
    np.save(folder / "ids.npy", ids_N)
    return SimpleNamespace(path=folder / "ids.npy", tokens=len(ids_N), dtype="<u2")


@pytest.mark.parametrize("length", [1, rows.BLOCK + 7, 3 * rows.BLOCK])
def test_the_small_ids_of_a_short_file_are_counted(tmp_path: Path, length: int) -> None:
    ids_N = np.random.Generator(np.random.Philox(key=length)).integers(0, 1000, length).astype(np.uint16)
    share = rows.small_ints(SimpleNamespace(vocabulary=1000), corpus(tmp_path, ids_N))
    assert share == pytest.approx((ids_N < SMALL_INTS).mean())


def test_of_a_long_file_blocks_from_all_of_it_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "BLOCKS", 50)
    ids_N = np.arange(200 * rows.BLOCK) * 1000 // (200 * rows.BLOCK)  # small at the beginning alone
    share = rows.small_ints(SimpleNamespace(vocabulary=1000), corpus(tmp_path, ids_N.astype(np.uint16)))
    assert share == pytest.approx(SMALL_INTS / 1000, abs=0.02)


def test_of_ids_that_are_drawn_the_distribution_says_it() -> None:
    drawn = rows.drawn_ids(200_000, 20_000, seed=3)
    share = rows.small_ints(SimpleNamespace(vocabulary=20_000), None)
    assert share == pytest.approx((drawn < SMALL_INTS).mean(), abs=0.01)
    assert rows.small_ints(SimpleNamespace(vocabulary=200), None) == 1


def test_of_a_file_that_is_not_there_only_a_small_vocabulary_says_it(tmp_path: Path) -> None:
    absent = SimpleNamespace(path=tmp_path / "none.npy")
    assert rows.small_ints(SimpleNamespace(vocabulary=SMALL_INTS + 1), absent) is None
    assert rows.small_ints(SimpleNamespace(vocabulary=SMALL_INTS), absent) == 1
