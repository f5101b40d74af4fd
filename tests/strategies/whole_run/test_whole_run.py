"""Evaluation, checkpoint and resumption: the same answers, whole files, and peaks that are predicted."""

import json
import struct

import pytest
import torch

from harness import Place, backends, checkpoints, tree
from harness.contract import plugins
from harness.contract.assembly import assemble
from harness.contract.loop import Ending, training
from harness.records import Applied, Case, Task
from harness.run import runner

LOADED = plugins.load()
DECODER = LOADED.workloads["decoder"]
ALL = ("loss_only_evaluation", "streamed_save", "streamed_resume")
MIB = 1 << 20


def case_of(*names, shape=None):
    return Case(
        workload="decoder",
        shape=shape or DECODER.probe(DECODER.shape(evaluations=3)).model_dump(),
        place="torch/cpu",
        corpus="drawn",
        tokenizer="none",
        strategies=tuple(Applied(name=name) for name in names),
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


def test_both_ways_to_save_write_the_same_file_of_safetensors(tmp_path):
    for name in ("plain", "streamed"):
        ended(tmp_path / name, *(ALL if name == "streamed" else ()))
    content = (tmp_path / "plain").read_bytes()
    assert content == (tmp_path / "streamed").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    assert header["params.embed"]["dtype"] == "F32" and header["params.embed"]["shape"] == [67, 48]
    assert 8 + length + max(entry["data_offsets"][1] for entry in header.values()) == len(content)


@pytest.mark.parametrize("names", [("loss_only_evaluation",), ("fused_loss", "loss_only_evaluation")])
def test_an_evaluation_is_the_same_batch_by_batch(tmp_path, names):
    own, whole = (ended(tmp_path / str(len(each)), *each)[0] for each in (names, ()))
    assert own == pytest.approx(whole, rel=1e-5)


SHAPE = {"layers": 2, "width": 256, "heads": 4, "vocabulary": 8192, "tokens": 256, "evaluations": 4}


@pytest.mark.parametrize("names", [(), ALL], ids=["usual", "streamed"])
def test_phases_take_what_was_predicted(names):
    records = {}
    for kind in ("predict", "memory"):
        task = Task(kind=kind, cases=(case_of(*names, shape=SHAPE),), run_id="whole", parent=0, folder="", steps=3)
        (records[kind],) = runner.run(task, 1, 240.0)
    predicted = {phase.name: phase.peak_bytes for phase in records["predict"].prediction.predicted_phases}
    measured = {phase.name: phase.peak_bytes for phase in records["memory"].memory.phases}
    for phase in ("evaluate", "save", "resume"):
        assert measured[phase] == pytest.approx(predicted[phase], rel=0.03, abs=2 * MIB)
    assert (records["memory"].memory.peak_phase == "evaluate") == (names == ())
