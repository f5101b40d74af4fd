"""Evaluation, checkpoint and resumption: the same answers, whole files, and peaks that are predicted."""

import json
import struct
from dataclasses import replace
from functools import cache
from itertools import islice

import pytest
import torch

from harness import Place, backends, checkpoints, tree
from harness.contract import plugins
from harness.contract.assembly import assemble, shape_of
from harness.contract.loop import Ending, training
from harness.records import Applied, Case, Task
from harness.refusal import Refusal
from harness.run import runner

LOADED = plugins.load()
DECODER = LOADED.workloads["decoder"]
ALL = ("loss_only_evaluation", "streamed_save", "streamed_resume")
CUDA = Place("torch", "cuda")


def case_of(*names, shape=None):
    return Case(
        workload="decoder",
        shape=shape or DECODER.probe(DECODER.shape(evaluations=3)).model_dump(),
        place="torch/cpu",
        corpus="drawn",
        tokenizer="none",
        strategies=tuple(Applied(name=name, knobs=dict(LOADED.strategies[name].probe)) for name in names),
    )


def ended(path, *names):
    """The evaluation's loss, the state before the end and the one that was resumed."""
    module = backends.load("torch")
    module.start(Place("torch", "cpu"))
    parts = assemble(LOADED, case_of(*names))
    file = checkpoints.CheckpointFile(path, module.buffer)
    loop = training(parts, module.prepare(parts), finish=lambda outputs: outputs, ending=Ending(2, file))
    (_, _), (_, before) = next(loop), next(loop)
    copy = {name: leaf.clone() for name, leaf in checkpoints.tensors(before[0])}
    loss, (state, _) = next(loop)
    return float(loss), copy, state


@pytest.mark.parametrize("names", [(), ALL, ("sgd_momentum", *ALL), ("adam_8bit", "streamed_save")])
def test_a_run_goes_on_from_what_it_saved_bit_for_bit(tmp_path, names):
    _, before, state = ended(tmp_path / "run.safetensors", *names)
    after = dict(checkpoints.tensors(state))
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert state["steps"] == 2 and all(p.requires_grad for _, p in tree.leaves(state["params"]))


OF_STATE = {"draw", "init", "grad", "update", "step"}
"""What a strategy rewrites that changes the state of a run."""


def of_state():
    """Name every strategy of the state, and combinations whose states have an unusual structure."""
    alone = [
        (name,)
        for name, strategy in sorted(LOADED.strategies.items())
        if OF_STATE & set(strategy.rewrites) and name != "compiled_step"  # a minute, for a state like any other
        if strategy.obstacle(Place("torch", "cpu"), DECODER) is None
    ]
    others = [("lora", "badam"), ("lora", "sgd_momentum", "mapped_moments"), ("sgd_momentum", "offloaded_moments")]
    return [pytest.param(names, id="+".join(names) or "untouched") for names in [(), *alone, *others]]


class Run:
    """The parts of a run and its batches, as a new process has them; `losses` are those of its steps."""

    def __init__(self, *names):
        self.module = backends.load("torch")
        self.module.start(Place("torch", "cpu"))
        self.parts = assemble(LOADED, case_of(*names))
        self.source = self.parts.source(self.parts)
        self.batches = self.parts.batches(self.parts, self.parts.windows(self.parts, self.source))
        self.losses = []

    def begun(self):
        return self.parts.init(self.parts, self.source)

    def resumed(self, file, skipped):
        for _ in range(skipped):
            next(self.batches)
        return self.parts.resume(self.parts, self.source, file)

    def trained(self, state, steps):
        step = self.module.prepare(self.parts)
        for x, y in islice(self.batches, steps):
            state, loss = step(state, x, y)
            self.losses.append(float(loss))
        return state

    def saved(self, state, folder):
        file = checkpoints.CheckpointFile(folder / "run.safetensors", self.module.buffer)
        self.parts.save(self.parts, state, file)
        return file


@pytest.fixture(scope="module")
def one_rank():
    """A group of one process, in which what divides a run divides it by one."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@cache
def uninterrupted(names):
    """The losses of three steps, and what the state holds and names after them."""
    run = Run(*names)
    state = run.trained(run.begun(), 3)
    return run.losses, dict(contents(state)), tree.names(state)


@pytest.mark.parametrize("others", [(), ("streamed_save", "streamed_resume")], ids=["usual", "streamed"])
@pytest.mark.parametrize("names", of_state())
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, one_rank, names, others):
    """What is lost of the moments is in the parameters after one update, in the loss after two.

    Some moments are made anew every second or third step: they are saved before that.
    """
    first, then = Run(*names, *others), Run(*names, *others)
    file = first.saved(first.trained(first.begun(), 1), tmp_path)
    state = then.trained(then.resumed(file, 1), 2)
    losses, held, named = uninterrupted(names)
    assert then.losses == losses[1:]
    assert dict(contents(state)) == held
    assert tree.names(state) == named


def contents(state):
    """Yield the leaves of a state, tensors as their type, sizes and bytes."""
    for name, leaf in tree.leaves(state):
        if isinstance(leaf, torch.Tensor):
            yield name, (leaf.dtype, leaf.shape, leaf.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            yield name, leaf


@pytest.mark.parametrize("names", [("mapped_moments",), ("sgd_momentum", "mapped_moments")], ids="+".join)
def test_moments_of_files_are_mapped_again(tmp_path, names):
    first, then = Run(*names), Run(*names)
    file = first.saved(first.trained(first.begun(), 1), tmp_path)
    state = then.trained(then.resumed(file, 1), 1)
    files = [moment.untyped_storage().filename for _, moment in tree.leaves(state["moments"])]
    assert files and None not in files


@pytest.mark.parametrize(
    "names", [(), ("qlora",), ("adam_8bit",), ("badam",), ("lisa",), ("mapped_moments",)], ids="+".join
)
def test_the_library_of_safetensors_reads_what_was_saved(tmp_path, names):
    library = pytest.importorskip("safetensors.torch")
    run = Run(*names)
    state = run.trained(run.begun(), 1)
    read = library.load_file(run.saved(state, tmp_path).path)
    tensors = {name: leaf for name, leaf in tree.leaves(state) if isinstance(leaf, torch.Tensor)}
    assert dict(contents(read)) == dict(contents(tensors))


def test_every_type_of_the_format_is_read_as_it_was_saved(tmp_path):
    library = pytest.importorskip("safetensors.torch")
    drawn = torch.randint(0, 2, (3, 16), dtype=torch.uint8)
    state = {"params": {}, **{name: drawn.view(getattr(torch, name)) for name in checkpoints.DTYPES}}
    file = Run().saved(state, tmp_path)
    read = {name: checkpoints.read_one(file, name, "cpu") for name in file.described}
    for each in (read, checkpoints.restored(file, read), {"params": {}, **library.load_file(file.path)}):
        assert dict(contents(each)) == dict(contents(state))
    with pytest.raises(Refusal, match="'wide' is of complex128"):
        Run().saved({"params": {}, "wide": torch.zeros(1, dtype=torch.complex128)}, tmp_path)


def test_numbers_are_resumed_as_they_are(tmp_path):
    state = {"params": {"w": torch.ones(2)}, "steps": 3, "scale": 0.1, "moments": None, "none": {"w": []}, "is": True}
    file = Run().saved({**state, "folder": "/tmp"}, tmp_path)
    resumed = checkpoints.restored(file, {"params.w": state["params"]["w"]})
    assert resumed == state and isinstance(resumed["scale"], float) and resumed["is"] is True


def test_both_ways_to_save_write_the_same_file_of_safetensors(tmp_path):
    for name in ("plain", "streamed"):
        ended(tmp_path / name, *(ALL if name == "streamed" else ()))
    content = (tmp_path / "plain").read_bytes()
    assert content == (tmp_path / "streamed").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    assert json.loads(header.pop("__metadata__")["state"])["steps"] == 2
    assert header["params.embed"]["dtype"] == "F32" and header["params.embed"]["shape"] == [67, 48]
    assert 8 + length + max(entry["data_offsets"][1] for entry in header.values()) == len(content)


@pytest.mark.parametrize("names", [("loss_only_evaluation",), ("fused_loss", "loss_only_evaluation")])
def test_an_evaluation_is_the_same_batch_by_batch(tmp_path, names):
    own, whole = (ended(tmp_path / str(len(each)), *each)[0] for each in (names, ()))
    assert own == pytest.approx(whole, rel=1e-5)


SHAPE = {"layers": 2, "width": 256, "heads": 4, "vocabulary": 8192, "tokens": 256, "evaluations": 4}
LARGER = SHAPE | {"vocabulary": 16384}
"""Phases of 115 MiB and more: of 70, what two readings of one process differ by is half of 3 %."""


@pytest.mark.long
@pytest.mark.parametrize("names", [(), ALL], ids=["usual", "streamed"])
def test_phases_take_what_was_predicted(names):
    records = {}
    for kind in ("predict", "memory"):
        task = Task(kind=kind, cases=(case_of(*names, shape=LARGER),), run_id="whole", parent=0, folder="", steps=3)
        (records[kind],) = runner.run(task, 1, 240.0)
    predicted = {phase.name: phase.peak_bytes for phase in records["predict"].prediction.predicted_phases}
    measured = {phase.name: phase.peak_bytes for phase in records["memory"].memory.phases}
    for phase in ("evaluate", "save", "resume"):
        assert measured[phase] == pytest.approx(predicted[phase], rel=0.03)
    assert (records["memory"].memory.peak_phase == "evaluate") == (names == ())


def forecast(*names):
    """What is predicted of a run on a GPU, and the bytes of its parameters."""
    torch_backend, case = backends.load("torch"), case_of(*names, shape=SHAPE).model_copy(update={"place": CUDA})
    build = lambda: assemble(LOADED, case, draw=lambda inner: torch_backend.abstract_draw)  # noqa: E731
    shown = torch_backend.predict(build, CUDA, DECODER.abstract_batch(shape_of(LOADED, case)), 0, 3)
    return shown, sum(each.bytes for each in shown.standing if each.where == "parameters")


def test_moments_of_the_host_are_resumed_there():
    (plain, parameters), (moments, _) = forecast(*ALL), forecast("offloaded_moments", *ALL)
    assert plain.peaks["resume"] >= 3 * parameters
    assert moments.peaks["resume"] == pytest.approx(parameters, rel=0.1)
    assert moments.host_bytes < 3.2 * parameters  # resumed into the page-locked blocks of those before


@pytest.mark.parametrize("ending", [(), ("loss_only_evaluation",)], ids=["usual", "loss_only"])
@pytest.mark.parametrize("names", [(), ("lora",), ("qlora",), ("badam",), ("lisa",), ("foreach_adamw",)], ids="+".join)
def test_what_is_evaluated_is_the_model_that_was_trained(names, ending):
    """Training goes on where the evaluation was: the loss of its first step is that of the evaluation's batch."""
    run = Run(*names, *ending)
    state = run.trained(run.begun(), 3)
    x, y = next(run.batches)
    loss = float(run.parts.evaluate(run.parts, state, [(x, y)]))
    assert float(run.parts.step(run.parts, state, x, y)[1]) == pytest.approx(loss, rel=1e-6)
    assert abs(loss - run.losses[0]) > 1e-4, "the model was evaluated as it was drawn"


def test_a_run_on_several_ranks_is_refused_an_ending(tmp_path):
    run = Run()
    loop = training(replace(run.parts, ranks=2), lambda state, x, y: (state, 0.0), ending=Ending(1, tmp_path / "none"))
    next(loop)
    with pytest.raises(Refusal, match="several ranks ends with its steps: leave out `evaluations`"):
        next(loop)


def test_a_run_in_jax_refuses_to_be_saved():
    pytest.importorskip("jax")
    parts = assemble(LOADED, case_of().model_copy(update={"place": Place("jax", "cpu")}))
    for call, what in [(parts.evaluate, "evaluated"), (parts.save, "saved"), (parts.resume, "resumed")]:
        with pytest.raises(Refusal, match=f"in JAX is not {what} here: leave out `evaluations`"):
            call(parts, None, None)
