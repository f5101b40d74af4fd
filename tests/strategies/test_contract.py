"""What every strategy promises, held against the whole registry: a new plugin is tested by being installed."""

import subprocess
import sys

import pytest

from harness import Place
from harness.contract import place, plugins
from harness.contract.assembly import assemble
from harness.records import Applied, Case
from harness.verbs import check
from harness.worker.contract_checks import Contract

LOADED = plugins.load()
KEPT = Contract(LOADED)
SECOND = "temporal", "jax"
THE_SAME = {"documents", "causal_lm_documents"}
"""Workloads that train the parts of another: what is not for documents is tried there when there is time."""
OF_THE_DECODER = {"causal_lm", "scoring"}
"""Workloads whose data are the decoder's: strategies of data are tried there when there is time, on it always."""
OF_DATA = {"rows", "source", "windows", "order", "batches", "transfer"}
COMPILED = {"compiled_block", "compiled_budget", "compiled_step"}
"""Each compiles for minutes on every workload. `test_compile.py` holds `compiled_block` to the decoder's answers in
`make test-long`, and all three where slow tests run: in `make test-all` alone."""


def obstacle(name, workload, backend):
    made = LOADED.workloads[workload]
    if backend not in made.on:
        return f"'{workload}' has nothing for {backend}"
    return LOADED.strategies[name].obstacle(Place(backend, "cpu"), made)


def everywhere():
    """Every strategy on every workload and backend that takes it.

    Slow are those that compile long: torch's compiler, and XLA for the second workload of what is no strategy of data,
    unless of its scan. All else that trains in JAX is long. Nor do strategies of data ask what is done with a batch:
    where the data are the decoder's they are slow too.
    """
    for name in sorted(LOADED.strategies):
        rewrites = set(LOADED.strategies[name].rewrites)
        for workload in LOADED.workloads:
            for backend in place.NAMES:
                trains = not rewrites <= OF_DATA | {"scan"}
                again = workload in THE_SAME and LOADED.strategies[name].data != "documents"
                again = again or (not trains and workload in OF_THE_DECODER)
                again = again or (name == "compiled_loss" and workload != "decoder")  # torch's compiler, a minute each
                slow = name in COMPILED or again or (trains and (workload, backend) == SECOND)
                long = (trains and backend == "jax") or name == "compiled_loss"
                marks = [pytest.mark.slow] if slow else [pytest.mark.long] if long else []
                if obstacle(name, workload, backend) is None:
                    yield pytest.param(name, workload, backend, marks=marks, id=f"{name}-{workload}-{backend}")


@pytest.mark.parametrize("name", sorted(LOADED.strategies))
def test_describes_itself_and_runs_somewhere(name):
    assert not list(check.described(LOADED.strategies[name]))
    obstacles = [obstacle(name, workload, backend) for workload in LOADED.workloads for backend in place.NAMES]
    if None not in obstacles:
        elsewhere = [reason for reason in obstacles if "needs the package" in reason or "does not run on" in reason]
        assert elsewhere, f"skipped everywhere: {obstacles}"
        pytest.skip(elsewhere[0])


@pytest.fixture
def one_rank():
    """A group of one process, in which what divides a run divides it by one; `test_sharding.py` takes more."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("name", "workload", "backend"), list(everywhere()))
def test_keeps_its_contract(name, workload, backend, request):
    if LOADED.strategies[name].ranks and backend == "torch":
        request.getfixturevalue("one_rank")
    assert not list(KEPT.of_strategy(name, workload, backend))


@pytest.mark.parametrize("backend", place.NAMES)
@pytest.mark.parametrize("order", [("checkpoint", "fused_loss"), ("fused_loss", "checkpoint")], ids="+".join)
def test_a_composition_equals_the_baseline_in_either_order(order, backend):
    assert not list(KEPT.of_composition(order, "decoder", backend))


@pytest.mark.long
def test_rounded_updates_of_wide_adapters_keep_their_contract():
    assert not list(KEPT.of_composition(("bfloat16_stochastic", "qlora"), "decoder", "jax"))


DRAWING = [
    name
    for name, strategy in sorted(LOADED.strategies.items())
    if "init" in strategy.rewrites and obstacle(name, "decoder", "jax") is None
]


@pytest.mark.parametrize("name", DRAWING)
def test_a_state_that_is_drawn_again_compiles_nothing(name):
    """Programs count as part of a run's base where it was drawn once before: what compiles anew counts as its own."""
    import jax

    compiled = []

    def listen(event, seconds, **described):
        compiled.append(event)

    made = LOADED.workloads["decoder"]
    shape = made.probe(made.shape())
    case = Case(
        workload="decoder",
        shape=shape.model_dump(),
        place="jax/cpu",
        corpus="drawn",
        tokenizer="none",
        strategies=(Applied(name=name, knobs=dict(LOADED.strategies[name].probe)),),
    )
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for _ in range(2):
            compiled.clear()
            parts = assemble(LOADED, case)
            jax.block_until_ready(parts.init(parts, None))
        again = sum("backend_compile" in event for event in compiled)
        jax.jit(lambda: 0).lower().compile()
        heard = sum("backend_compile" in event for event in compiled)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert (again, heard) == (0, 1), "the last is a program that is compiled in any case"


def workloads():
    """Every workload on each backend that it is for; XLA compiles long for the second one."""
    for name, made in sorted(LOADED.workloads.items()):
        marks = [pytest.mark.slow] if name == SECOND[0] else []
        yield from (pytest.param(name, backend, marks=marks) for backend in place.NAMES if backend in made.on)


@pytest.mark.parametrize(("workload", "backend"), list(workloads()))
def test_a_workload_keeps_its_contract(workload, backend):
    if workload == "causal_lm":
        pytest.importorskip("transformers", reason="needs the package transformers")
    assert not list(Contract(LOADED).of_workload(workload, backend))


def test_no_plugin_imports_a_framework_until_it_is_used():
    program = (
        "import sys\n"
        "from harness import plugins\n"
        "for strategy in plugins.load().strategies.values(): strategy.summary, strategy.knobs\n"
        "print(sorted({'torch', 'jax', 'jaxlib', 'numpy', 'triton'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
