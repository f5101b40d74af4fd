"""The simulated allocator rounds, splits, joins and keeps what torch's own would."""

import random
from itertools import pairwise

import pytest

from harness.backends.cuda_allocator import Allocator, OutOfMemory

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("asked", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),  # the largest of the small pool
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (19 * MIB + 512, 20 * MIB, 20 * MIB),  # more than 10 MiB: a segment of its own, a multiple of 2 MiB
        (41 * MIB // 2, 41 * MIB // 2, 22 * MIB),  # the remainder of 1.5 MiB is split off
        (43 * MIB // 2, 22 * MIB, 22 * MIB),  # one of 0.5 MiB stays with its block
        (125 * MIB, 126 * MIB, 126 * MIB),
    ],
)
def test_a_request_is_rounded_and_served_from_its_pool(asked: int, allocated: int, reserved: int) -> None:
    memory = Allocator()
    memory.allocate(asked)
    assert (memory.requested, memory.allocated, memory.reserved) == (asked, allocated, reserved)


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    memory = Allocator()
    large, between, small, _ = (memory.allocate(size * MIB) for size in (6, 2, 4, 2))
    memory.free(large)
    memory.free(small)
    assert memory.allocate(4 * MIB).address == small.address
    assert memory.allocate(5 * MIB).address == large.address
    assert between.requested
    assert memory.reserved == 20 * MIB


def test_what_is_freed_joins_its_neighbours_and_serves_a_larger_request() -> None:
    memory = Allocator()
    blocks = [memory.allocate(6 * MIB) for _ in range(3)]
    for block in blocks:
        memory.free(block)
    memory.allocate(18 * MIB)
    assert memory.reserved == 20 * MIB


def test_pools_do_not_lend_to_each_other() -> None:
    memory = Allocator()
    memory.free(memory.allocate(8 * MIB))
    memory.allocate(100 * KIB)
    assert memory.reserved == 22 * MIB


def test_freed_segments_stay_reserved_until_the_cache_is_emptied() -> None:
    memory = Allocator()
    staying = memory.allocate(3 * MIB)
    memory.free(memory.allocate(100 * MIB))
    assert (memory.allocated, memory.reserved) == (3 * MIB, 120 * MIB)
    memory.empty_cache()
    assert memory.reserved == 20 * MIB  # the segment with a block in it stays
    memory.free(staying)
    memory.empty_cache()
    assert memory.reserved == 0


def test_a_full_device_gives_up_its_cache_first_and_then_refuses() -> None:
    memory = Allocator(capacity=100 * MIB)
    memory.free(memory.allocate(60 * MIB))
    memory.allocate(70 * MIB)
    assert (memory.reserved, memory.peak_reserved) == (70 * MIB, 70 * MIB)
    with pytest.raises(OutOfMemory) as refused:
        memory.allocate(31 * MIB)
    assert refused.value.size == 32 * MIB


def test_expandable_segments_grow_where_stock_ones_are_taken_anew() -> None:
    sizes = [12, 14, 16, 18]
    reserved = {}
    for expandable in (False, True):
        memory = Allocator(expandable=expandable)
        for size in sizes:
            memory.free(memory.allocate(size * MIB))
        reserved[expandable] = memory.reserved
    assert reserved == {False: sum(sizes) * MIB, True: 20 * MIB}


def test_expandable_segments_split_off_any_remainder() -> None:
    memory = Allocator(expandable=True)
    memory.allocate(43 * MIB // 2)
    assert (memory.allocated, memory.reserved) == (43 * MIB // 2, 40 * MIB)


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_blocks_never_overlap_and_every_byte_comes_back(expandable: bool, seed: int) -> None:
    chance = random.Random(seed)
    memory = Allocator(expandable=expandable)
    live = []
    for _ in range(600):
        if live and chance.random() < 0.5:
            memory.free(live.pop(chance.randrange(len(live))))
        else:
            live.append(memory.allocate(int(2 ** chance.uniform(0, 26))))
        ranges = sorted((block.small and expandable, block.address, block.address + block.size) for block in live)
        assert all(one[2] <= two[1] or one[0] != two[0] for one, two in pairwise(ranges))
        assert memory.allocated == sum(block.size for block in live)
        assert memory.requested == sum(block.requested for block in live)
        assert memory.allocated <= memory.reserved <= memory.peak_reserved
    for block in live:
        memory.free(block)
    memory.empty_cache()
    assert (memory.allocated, memory.requested, memory.reserved) == (0, 0, 0)


def test_a_block_is_freed_once() -> None:
    memory = Allocator()
    block = memory.allocate(1)
    memory.free(block)
    with pytest.raises(ValueError, match="free already"):
        memory.free(block)
