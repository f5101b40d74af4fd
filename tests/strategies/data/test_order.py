"""Every shuffle takes each window once an epoch, in an order that a seed and an epoch determine."""

import random
import tracemalloc

import numpy as np
import pytest

from harness import Extent, Parts, Place, Source
from harness.contract import plugins
from harness.workloads.data import rows
from harness.workloads.data.shuffle_quality import coverage, quality

SHUFFLES = {
    "global_shuffle": [{}],
    "bijective_shuffle": [{}, {"rounds": 2}, {"rounds": 8}],
    "chunked_shuffle": [{}, {"chunk": 1, "held": 1}, {"chunk": 3}, {"chunk": 7, "held": 3}, {"chunk": 5, "held": 1}],
    "buffered_shuffle": [{}, {"size": 1}, {"size": 4}],
}
CASES = [(name, knobs) for name, several in SHUFFLES.items() for knobs in several]
EVERY = [*CASES, ("random_crop", {})]
PLAIN = Parts(None, Place("torch", "cpu"), order=rows.order)
STRATEGIES = plugins.load().strategies
REFERENCE = 379_971


def source_of(count, seed=0):
    ids = np.zeros(count, np.uint8)
    return Source(ids, ids, 1, 1, batch=1, seed=seed)


def order_of(name, count, epoch=0, seed=0, knobs=None):
    parts = STRATEGIES[name].on["torch"](PLAIN, **(knobs or {}))
    return parts.order(parts, source_of(count, seed), epoch)


def whole(name, count, epoch=0, seed=0, knobs=None):
    return np.asarray(order_of(name, count, epoch, seed, knobs)(0, count))


@pytest.mark.parametrize(("name", "knobs"), CASES)
def test_every_epoch_is_a_permutation_for_every_count(name, knobs):
    for count in range(1, 41):
        for epoch in range(5):
            indices = whole(name, count, epoch, knobs=knobs)
            assert indices.dtype.kind in "iu"
            assert sorted(indices.tolist()) == list(range(count)), (count, epoch)


@pytest.mark.parametrize("name", SHUFFLES)
def test_an_epoch_of_the_reference_size_is_a_permutation(name):
    indices = whole(name, REFERENCE, epoch=1)
    assert np.array_equal(np.sort(indices), np.arange(REFERENCE))
    assert not np.array_equal(indices, np.arange(REFERENCE))


@pytest.mark.parametrize(("name", "knobs"), EVERY)
def test_epochs_and_seeds_differ_and_repeat(name, knobs):
    if knobs.get("size") == 1:
        assert np.array_equal(whole(name, 40, knobs=knobs), np.arange(40)), "a buffer of one cannot shuffle"
        return
    orders = {(seed, epoch): tuple(whole(name, 40, epoch, seed, knobs)) for seed in range(4) for epoch in range(4)}
    assert len(set(orders.values())) == len(orders)
    assert tuple(whole(name, 40, 2, 3, knobs)) == orders[3, 2]


@pytest.mark.parametrize(("name", "knobs"), EVERY)
@pytest.mark.parametrize("count", [1, 2, 37, 300])
def test_slices_may_be_asked_for_in_any_sequence(name, knobs, count):
    due = whole(name, count, knobs=knobs)
    dice = random.Random(count)
    at = order_of(name, count, knobs=knobs)
    for _ in range(60):
        start = dice.randrange(count)
        stop = dice.randrange(start, count + 3)
        indices = at(start, stop)
        assert np.array_equal(indices, due[start:stop]), (start, stop)
        assert indices.dtype.kind in "iu"
    assert len(at(count, count + 5)) == 0


def test_a_global_shuffle_is_what_a_source_that_asks_for_shuffling_gets():
    source = source_of(100, seed=5)
    asking = Source(source.inputs, source.targets, 1, 1, batch=1, seed=5, shuffle=True)
    assert np.array_equal(whole("global_shuffle", 100, 3, 5), rows.order(PLAIN, asking, 3)(0, 100))


def test_a_buffer_is_full_before_the_first_window_leaves_it():
    """Of a buffer of M the k-th window out is below M + k, and the first may be any of M."""
    firsts = set()
    for seed in range(200):
        indices = whole("buffered_shuffle", 40, seed=seed, knobs={"size": 8})
        assert (indices < 8 + np.arange(40)).all()
        firsts.add(int(indices[0]))
    assert firsts == set(range(8))


def test_chunks_stay_together_with_those_that_are_held_beside_them():
    indices = whole("chunked_shuffle", 40, knobs={"chunk": 5, "held": 2})
    groups = [set((indices[start : start + 10] // 5).tolist()) for start in range(0, 40, 10)]
    assert [len(group) for group in groups] == [2, 2, 2, 2]
    assert not set.intersection(*groups)


def test_random_crops_are_uniform_and_repeat():
    indices = np.concatenate([whole("random_crop", 50, epoch) for epoch in range(400)])
    assert indices.min() == 0 and indices.max() == 49
    share = np.bincount(indices, minlength=50) / len(indices)
    assert np.abs(share - 1 / 50).max() < 0.004
    assert coverage(whole("random_crop", 100_000), 100_000) == pytest.approx(1 - np.exp(-1), abs=0.01)


def test_shuffles_rank_by_how_far_they_mix():
    indices = {
        name: quality(whole(name, 100_000, knobs=knobs))
        for name, knobs in [
            ("buffered_shuffle", {"size": 1000}),
            ("chunked_shuffle", {"chunk": 8192}),
            ("bijective_shuffle", {}),
            ("global_shuffle", {}),
        ]
    }
    buffered, chunked, bijective, everything = indices.values()
    assert quality(rows.order(PLAIN, source_of(100_000), 0)(0, 100_000)) == 0
    assert 0.05 < buffered < chunked - 0.2 < 0.9
    assert chunked < 0.95
    assert bijective == pytest.approx(1, abs=0.005) and everything == pytest.approx(1, abs=0.005)


def test_a_bijection_does_not_remember_time():
    indices = whole("bijective_shuffle", REFERENCE)
    assert abs(np.corrcoef(indices, np.arange(REFERENCE))[0, 1]) < 0.01
    assert abs(np.corrcoef(indices[:-1], indices[1:])[0, 1]) < 0.01
    epochs = [whole("bijective_shuffle", REFERENCE, epoch) for epoch in range(2)]
    assert abs(np.corrcoef(*epochs)[0, 1]) < 0.01


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("bijective_shuffle", {"rounds": 1}, "set rounds"),
        ("chunked_shuffle", {"chunk": 0}, "chunk and held"),
        ("chunked_shuffle", {"held": 0}, "chunk and held"),
        ("buffered_shuffle", {"size": 0}, "set size"),
    ],
)
def test_knobs_that_mean_nothing_are_refused(name, knobs, message):
    with pytest.raises(ValueError, match=message):
        order_of(name, 4, knobs=knobs)


@pytest.mark.parametrize(("name", "knobs"), [*EVERY, ("chunked_shuffle", {"chunk": 4000, "held": 1})])
def test_what_an_order_keeps_is_what_it_says(name, knobs):
    count = 40_000
    parts, source = STRATEGIES[name].on["torch"](PLAIN, **knobs), source_of(count)
    says = STRATEGIES[name].holds(Extent(count, 1, 1, 1, 1, 8), **knobs)
    whole(name, 40, knobs=knobs)  # what is imported at first use is not charged
    tracemalloc.start()
    try:
        at = parts.order(parts, source, 0)
        for start in (count // 2, 0, 8):
            at(start, start + 8)
        size = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert size == pytest.approx(says.batches, rel=0.05, abs=8 << 10)
    assert (says.source, says.windows, says.making) == (None, 0, 0)


def test_they_say_how_far_their_batches_differ():
    assert {STRATEGIES[name].feeds for name in SHUFFLES} == {"reordered"}
    assert STRATEGIES["random_crop"].feeds == "other" and STRATEGIES["random_crop"].approximate
