"""What every strategy promises, held against the whole registry: a new plugin is tested by being installed."""

import subprocess
import sys
from functools import cache
from itertools import islice

import numpy as np
import pytest

from harness import Place, backends, plugins
from harness.assembly import assemble, feeds_of
from harness.instruments import digested
from harness.records import Applied, Case
from harness.types import FEEDS, PART_NAMES
from harness.worker import answers
from harness.worker.predict import DATA_PARTS

LOADED = plugins.load()
UPDATES = 4
EXACT, LOWER = 1e-5, 2e-2
CHEAP, EVERY_PART = "lstm", "jamba"
"""Networks of the temporal workload: the one that costs least, and the one in which every part is called."""
IN_LAYERS = {"mix", "attend", "scan", "feed", "block", "stack"}
COMPILED = {"compiled_block", "compiled_budget", "compiled_step"}
"""Each compiles for minutes on every workload; `test_compile.py` holds them to the decoder's answers at all times."""


def obstacle(name, workload, backend):
    made = LOADED.workloads[workload]
    if backend not in made.on:
        return f"'{workload}' has nothing for {backend}"
    return LOADED.strategies[name].obstacle(Place(backend, "cpu"), made)


def everywhere():
    """Every strategy on every workload and backend that takes it.

    Slow are those that compile long: torch's compiler, and XLA for all of the hybrid network, unless for its scan.
    """
    for name in sorted(LOADED.strategies):
        rewrites = set(LOADED.strategies[name].rewrites)
        for workload in LOADED.workloads:
            for backend in backends.NAMES:
                hybrid = (workload, backend) == ("temporal", "jax") and rewrites & IN_LAYERS and "scan" not in rewrites
                marks = [pytest.mark.slow] if name in COMPILED or hybrid else []
                if obstacle(name, workload, backend) is None:
                    yield pytest.param(name, workload, backend, marks=marks, id=f"{name}-{workload}-{backend}")


def at_probe(workload, backend, *names, network=CHEAP):
    """The case in which strategies are held to their promise: the probe of a workload, their own probe knobs."""
    made = LOADED.workloads[workload]
    settings = {"network": network} if "network" in made.shape.model_fields else {}
    applied = tuple(Applied(name=name, knobs=dict(LOADED.strategies[name].probe)) for name in names)
    return Case(
        workload=workload,
        shape=made.probe(made.shape(**settings)).model_dump(),
        place=f"{backend}/cpu",
        corpus="drawn",
        tokenizer="none",
        strategies=applied,
    )


@cache
def outcome(workload, backend, *names, network=CHEAP):
    """Losses of four steps and the gradients that the first update got."""
    module = backends.load(backend)
    module.start(Place(backend, "cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "UPDATES", UPDATES)
        case = at_probe(workload, backend, *names, network=network)
        return answers.observer(LOADED, case, module, reorders=feeds_of(LOADED, case) == "reordered")(0)


@cache
def consumed(workload, backend, *names):
    """Digests of the first batches of the loop."""
    digests = []
    parts = digested(assemble(LOADED, at_probe(workload, backend, *names)), digests)
    windows = parts.windows(parts, parts.source(parts))
    for _ in islice(parts.batches(parts, windows), UPDATES):
        pass
    return tuple(digests)


def away(mine, its):
    """The norm of the difference of two sets of gradients, relative to that of the second."""
    assert mine.keys() == its.keys()
    off = sum(float(np.sum((mine[name].astype(np.float64) - its[name]) ** 2)) for name in its)
    return (off / sum(float(np.sum(its[name].astype(np.float64) ** 2)) for name in its)) ** 0.5


def assert_equal_to_the_baseline(workload, backend, names, bound, network=CHEAP):
    mine, its = outcome(workload, backend, *names, network=network), outcome(workload, backend, network=network)
    assert len(its.trajectory) == UPDATES
    assert mine.trajectory == pytest.approx(its.trajectory, rel=bound), "losses"
    assert away(mine.gradients, its.gradients) <= bound, "gradients"
    if feeds_of(LOADED, at_probe(workload, backend, *names)) == "same":
        assert consumed(workload, backend, *names) == consumed(workload, backend), "batches"


def assert_rewrites_what_it_says(strategy, workload, backend):
    before = assemble(LOADED, at_probe(workload, backend, network=EVERY_PART))
    after = strategy.on[backend](before, **strategy.probe)
    changed = {name for name in PART_NAMES if getattr(before, name) is not getattr(after, name)}
    assert changed == set(strategy.rewrites)
    assert (after.place, after.corpus, after.notes) == (before.place, before.corpus, before.notes)
    assert after.shape == before.shape or strategy.approximate, "only another model may have other sizes"
    if changed & DATA_PARTS:
        assert strategy.holds is not None, "a strategy of data says what it holds"
        extent = LOADED.workloads[workload].extent(before.shape, None, 3)
        assert all(isinstance(size, int | None) for size in vars(strategy.holds(extent, **strategy.probe)).values())
    else:
        assert strategy.feeds == "same" and strategy.data is None


def assert_describes_itself(strategy):
    summary = strategy.summary
    assert len(summary) <= 120, f"{len(summary)} characters"
    assert summary.endswith(".") and ". " not in summary, "not one sentence"
    for knob in strategy.knobs.values():
        assert knob.type in (bool, int, float, str), knob.name
        assert type(knob.default) is knob.type, f"the default of {knob.name} is no {knob.type.__name__}"
    assert strategy.feeds in FEEDS and strategy.data in (None, "tokens", "frames")
    assert strategy.feeds != "other" or strategy.approximate, "other batches give another answer"
    assert strategy.feeds != "rounded" or strategy.precision, "rounded batches are of lower precision"
    assert strategy.probe.keys() <= strategy.knobs.keys()
    for name, value in strategy.probe.items():
        assert type(value) is strategy.knobs[name].type, f"the probe value of {name}"


@pytest.mark.parametrize("name", sorted(LOADED.strategies))
def test_describes_itself_and_runs_somewhere(name):
    assert_describes_itself(LOADED.strategies[name])
    obstacles = [obstacle(name, workload, backend) for workload in LOADED.workloads for backend in backends.NAMES]
    if None not in obstacles:
        elsewhere = [reason for reason in obstacles if "needs the package" in reason or "does not run on" in reason]
        assert elsewhere, f"skipped everywhere: {obstacles}"
        pytest.skip(elsewhere[0])


@pytest.mark.parametrize(("name", "workload", "backend"), list(everywhere()))
def test_keeps_its_contract(name, workload, backend):
    strategy = LOADED.strategies[name]
    assert_rewrites_what_it_says(strategy, workload, backend)
    of_data = bool(strategy.rewrites) and set(strategy.rewrites) <= DATA_PARTS
    if of_data and strategy.feeds == "same":
        assert consumed(workload, backend, name) == consumed(workload, backend), "batches"
        return  # the same batches train the same
    one_for_all = backend != "torch" and strategy.on[backend] is strategy.on.get("torch")
    if of_data and one_for_all and strategy.feeds != "rounded":
        assert consumed(workload, backend, name) == consumed(workload, "torch", name), "batches"
        return  # the same function gave the same batches as in torch, where they are trained on
    network = EVERY_PART if IN_LAYERS & set(strategy.rewrites) else CHEAP
    if not strategy.approximate:
        bound = LOWER if strategy.precision else EXACT
        assert_equal_to_the_baseline(workload, backend, (name,), bound, network)
    assert all(np.isfinite(outcome(workload, backend, name, network=network).trajectory))


@pytest.mark.parametrize("backend", backends.NAMES)
@pytest.mark.parametrize("order", [("checkpoint", "fused_loss"), ("fused_loss", "checkpoint")], ids="+".join)
def test_a_composition_equals_the_baseline_in_either_order(order, backend):
    assert_equal_to_the_baseline("decoder", backend, order, EXACT)


def test_no_plugin_imports_a_framework_until_it_is_used():
    program = (
        "import sys\n"
        "from harness import plugins\n"
        "for strategy in plugins.load().strategies.values(): strategy.summary, strategy.knobs\n"
        "print(sorted({'torch', 'jax', 'jaxlib', 'numpy', 'triton'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
