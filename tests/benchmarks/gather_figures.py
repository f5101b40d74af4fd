"""How fast each strategy feeds batches, beside a cold copy of as many bytes: run alone, on a quiet machine.

    python tests/benchmarks/gather_figures.py

Frames [380,000, 287] float32 in windows of 30, and 4 million uint16 tokens in windows of 128, both shuffled, in batches
of 256, in torch, on one thread and on two. Every figure is the median of five turns in random order; a turn reads other
windows than the one before it, so that they come from memory and not from a cache. The cold copy is one thread's
`numpy.copyto` of stretches as long as a batch, into as many arrays in turn as `reused_buffer` has. Peers that are not
installed are left out, with a word.
"""

import random
import time
from collections.abc import Iterator
from itertools import islice
from statistics import median
from typing import Any

import numpy as np
import torch
from tabulate import tabulate

from harness import Parts, Place, Source
from harness.contract import plugins
from harness.workloads.data import rows
from harness.workloads.data.frames import drawn

TURNS, BATCHES, BATCH, SLOTS = 5, 150, 256, 4
STRATEGIES = plugins.load().strategies
PEERS = {"torch_dataloader", "grain_loader"}


def loop_of(source: Source, name: str) -> Iterator[tuple[Any, Any]]:
    """Begin the batches of one strategy; the tensors of a batch share the memory of its arrays."""
    parts = Parts(
        None,
        Place("torch", "cpu"),
        rows=rows.read_rows,
        source=lambda parts: source,
        windows=rows.plain_windows,
        order=rows.order,
        batches=rows.batches,
        transfer=lambda parts, x, y: (torch.as_tensor(x), torch.as_tensor(y)),
    )
    if name != "plain":
        parts = STRATEGIES[name].on["torch"](parts)
    return iter(parts.batches(parts, parts.windows(parts, source)))


def cold_copies(source: Source) -> Iterator[tuple[Any, Any]]:
    """Copy stretches of as many rows as a batch has, from all over the source, into a few arrays in turn."""
    count = BATCH * source.window
    arrays = [(source.inputs[:count].copy(), source.targets[:count].copy()) for _ in range(SLOTS)]
    stretches = list(range(0, len(source.inputs) - count, count))
    while True:
        random.shuffle(stretches)
        for number, start in enumerate(stretches):
            x, y = arrays[number % SLOTS]
            np.copyto(x, source.inputs[start : start + count])
            np.copyto(y, source.targets[start : start + count])
            yield x, y


def figures(source: Source, names: list[str]) -> dict[str, float]:
    """Give the median batches per second of each, and of the cold copies."""
    loops: dict[str, Iterator[Any]] = {"cold copy": cold_copies(source)}
    for name in names:
        obstacle = STRATEGIES[name].obstacle(Place("torch", "cpu")) if name != "plain" else None
        if obstacle is None:
            loops[name] = loop_of(source, name)
        else:
            print(f"left out: {obstacle}")
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for loop in loops.values():
        _turn(loop, 10)
    for _ in range(TURNS):
        for name in random.sample(list(loops), len(loops)):
            seconds[name].append(_turn(loops[name], BATCHES))
    return {name: BATCHES / median(taken) for name, taken in seconds.items()}


def _turn(loop: Iterator[Any], count: int) -> float:
    started = time.perf_counter()
    for _ in islice(loop, count):
        pass
    return time.perf_counter() - started


def report(what: str, source: Source, names: list[str]) -> None:
    found = figures(source, names)
    x_bytes = BATCH * source.window * (source.inputs[0].nbytes + source.targets[0].nbytes)
    table = [
        (
            name,
            f"{rate:,.0f}",
            f"{rate * x_bytes / 1e9:.2f}",
            f"{rate / found['cold copy']:.2f}",
            *_against(rate, found),
        )
        for name, rate in sorted(found.items(), key=lambda item: -item[1])
    ]
    print(f"\n{what}")
    headers = ("", "batches/s", "GB/s", "of a cold copy", *(f"x {peer}" for peer in sorted(PEERS & found.keys())))
    print(tabulate(table, headers, tablefmt="pipe", disable_numparse=True))


def _against(rate: float, found: dict[str, float]) -> list[str]:
    return [f"{rate / found[peer]:.1f}" for peer in sorted(PEERS & found.keys())]


def main() -> None:
    names = ["plain", "strided_view", "reused_buffer", "torch_unfold", "torch_gather", *sorted(PEERS)]
    frames_NF, labels_N = drawn(380_000, 287, 32, 0)
    frames = Source(frames_NF, labels_N, 30, 1, BATCH, shuffle=True)
    ids_N = np.random.Generator(np.random.Philox(0)).integers(0, 50_000, 4_000_001).astype(np.uint16)
    tokens = Source(ids_N[:-1], ids_N[1:], 128, 1, BATCH, shuffle=True, vocabulary=50_000)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        report(f"frames, {threads} threads", frames, names)
        report(f"tokens, {threads} threads", tokens, [*names, "joint_gather"])


if __name__ == "__main__":
    main()
