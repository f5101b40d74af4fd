"""Whether advice is right: every combination of a small suite measured, beside the one that was advised.

    python tests/benchmarks/advise_figures.py

Run it alone, on a quiet machine; it takes some minutes. The figure is how much faster the fastest combination that fits
is than the advised one, both from one run; the goal is at most 5 %.
"""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from tabulate import tabulate

from harness.contract import plugins
from harness.records import store
from harness.run import bench, session
from harness.suite import reader
from harness.verbs.advise import advise
from harness.verbs.combinations import Choice
from harness.verbs.machine import this_machine
from harness.verbs.plan import with_budget
from harness.verdicts import judge

BUDGET = 120 << 20
SUITE = """
title: Small
workload: decoder
corpus: zipf
shape: {layers: 4, width: 128, heads: 4, vocabulary: 8192, batch: 1, tokens: 1024}
strategies: [checkpoint, fused_loss, cut_loss, chunked_loss, tiled_feed]
rounds: 3
warmup: 1
steps: 5
"""


def main() -> None:
    loaded = plugins.load()
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "small.yaml").write_text(SUITE)
        plan = with_budget(reader.read(folder / "small.yaml", loaded), BUDGET)
        options = bench.Options(folder / "results")
        machine = this_machine(plan.places, options.cache)
        found = advise(plan, loaded, options, machine, (), False, False, bench.Progress())[0]
        group = plan.comparisons[0]
        choice = Choice(loaded)
        every = choice.listed(group, choice.demanded(group, "small"))
        assert every is not None
        whole = replace(plan, name="whole", comparisons=(every,))
        (table,) = judge.judge(
            store.read(session.run(whole, loaded, replace(options, all_rounds=True), bench.Progress()))[0]
        )
    timed = {row.label: row.step_seconds for row in table.rows if row.status == "ok" and row.step_seconds}
    rows = [
        (label, f"{seconds * 1e3:.0f}", "advised" if label == found.choice else "")
        for label, seconds in sorted(timed.items(), key=lambda item: item[1])
    ]
    print(tabulate(rows, ("fits the budget", "ms a step", "")))
    if found.choice in timed:
        print(f"the fastest takes {min(timed.values()) / timed[found.choice]:.3f} x the time of the advised one")


if __name__ == "__main__":
    main()
