"""Simulate the caching allocator of torch on CUDA: the blocks that it hands out, and what it takes from the driver.

It counts bytes and holds none, so it needs neither torch nor a GPU. Fed with the requests of a run in their order, it
gives what `torch.cuda.memory_stats` would show: requested, allocated (rounded, with remainders too small to be split
off) and reserved bytes (whole segments). Rules and constants are those of c10/cuda/CUDACachingAllocator.cpp, with its
default settings or with `expandable_segments:True`.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from operator import attrgetter

BLOCK = 512
"""Requests are rounded up to this many bytes."""
SMALL = 1 << 20
"""The largest request that is served from the small pool."""
SMALL_SEGMENT = 2 << 20
"""What the small pool takes from the driver at a time."""
LARGE_SEGMENT = 20 << 20
"""What the large pool takes at a time for requests below `LARGE`."""
LARGE = 10 << 20
"""From here on a request gets a segment of its own size, rounded up to `ROUND`."""
ROUND = 2 << 20


class OutOfMemory(Exception):
    """A request that the driver cannot serve, after everything unused was given back."""

    def __init__(self, size: int, reserved: int, capacity: int) -> None:
        super().__init__(f"{size} bytes are asked for, {reserved} of {capacity} are taken")
        self.size = size


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment; `requested` is 0 while it is free."""

    address: int
    size: int
    small: bool
    requested: int = 0
    before: "Block | None" = None
    after: "Block | None" = None


_order = attrgetter("size", "address")


@dataclass
class Allocator:
    """Allocate and free as torch does, for one device and one stream.

    `capacity` bounds the reserved bytes; None for a device without end. Peaks are those since the last `reset_peaks`.
    """

    expandable: bool = False
    capacity: int | None = None
    allocated: int = 0
    requested: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    peak_requested: int = 0
    peak_reserved: int = 0
    _free: dict[bool, list[Block]] = field(default_factory=lambda: {True: [], False: []})
    _tails: dict[bool, Block] = field(default_factory=dict)
    _end: int = 0

    def allocate(self, size: int) -> Block:
        """Hand out a block for `size` bytes, at least one. Raises OutOfMemory."""
        rounded = max(BLOCK, -(-size // BLOCK) * BLOCK)
        small = rounded <= SMALL
        block = self._fitting(rounded, small) or self._from_driver(rounded, small)
        if self._worth_splitting(block.size - rounded, small):
            self._split(block, rounded)
        block.requested = size
        self.allocated += block.size
        self.requested += size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_requested = max(self.peak_requested, self.requested)
        return block

    def free(self, block: Block) -> None:
        """Take a block back and join it with free neighbours; the segment stays reserved."""
        if not block.requested:
            raise ValueError("the block is free already")
        self.allocated -= block.size
        self.requested -= block.requested
        block.requested = 0
        before, after = block.before, block.after
        if before is not None and not before.requested:
            self._drop(before)
            block.address, block.size, block.before = before.address, before.size + block.size, before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and not after.requested:
            self._drop(after)
            block.size, block.after = block.size + after.size, after.after
            if block.after is not None:
                block.after.before = block
            self._is_tail_of(block, after)
        self._keep(block)

    def empty_cache(self) -> None:
        """Give back to the driver what holds no block."""
        for blocks in self._free.values():
            whole = [each for each in blocks if each.before is None and each.after is None]
            for block in whole:
                blocks.remove(block)
                self.reserved -= block.size
                if self._tails.get(block.small) is block:
                    del self._tails[block.small]

    def reset_peaks(self) -> None:
        """Begin new peaks at what is taken now."""
        self.peak_allocated, self.peak_requested, self.peak_reserved = self.allocated, self.requested, self.reserved

    def _fitting(self, size: int, small: bool) -> Block | None:
        """Take the smallest free block that is large enough, the one of the lowest address among equals.

        With expandable segments the one at the end counts as large as it could grow, so it comes last.
        """
        blocks = self._free[small]
        at = bisect_left(blocks, (size, 0), key=_order)
        if at < len(blocks) and self.expandable and blocks[at] is self._tails.get(small):
            at += at + 1 < len(blocks)
        return blocks.pop(at) if at < len(blocks) else None

    def _from_driver(self, size: int, small: bool) -> Block:
        take = self._grown if self.expandable else self._segment
        try:
            return take(size, small)
        except OutOfMemory:
            self.empty_cache()
            return take(size, small)

    def _segment(self, size: int, small: bool) -> Block:
        wanted = SMALL_SEGMENT if small else LARGE_SEGMENT if size < LARGE else -(-size // ROUND) * ROUND
        self._reserve(wanted)
        block = Block(self._end, wanted, small)
        self._end += wanted
        return block

    def _grown(self, size: int, small: bool) -> Block:
        """Map more pages behind the one segment that each pool has; a free block at its end grows."""
        page = SMALL_SEGMENT if small else LARGE_SEGMENT
        tail = self._tails.get(small)
        present = tail.size if tail is not None and not tail.requested else 0
        more = -(-(size - present) // page) * page
        self._reserve(more)
        if tail is not None and not tail.requested:
            self._drop(tail)
            tail.size += more
            return tail
        address = tail.address + tail.size if tail is not None else (0 if small else 1 << 60)
        block = Block(address, more, small, before=tail)
        if tail is not None:
            tail.after = block
        self._tails[small] = block
        return block

    def _reserve(self, size: int) -> None:
        if self.capacity is not None and self.reserved + size > self.capacity:
            raise OutOfMemory(size, self.reserved, self.capacity)
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _worth_splitting(self, remainder: int, small: bool) -> bool:
        return remainder >= BLOCK if small or self.expandable else remainder > SMALL

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.address + size, block.size - size, block.small, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.size, block.after = size, rest
        self._is_tail_of(rest, block)
        self._keep(rest)

    def _is_tail_of(self, block: Block, old: Block) -> None:
        if self._tails.get(block.small) is old:
            self._tails[block.small] = block

    def _keep(self, block: Block) -> None:
        insort(self._free[block.small], block, key=_order)

    def _drop(self, block: Block) -> None:
        blocks = self._free[block.small]
        del blocks[bisect_left(blocks, _order(block), key=_order)]
