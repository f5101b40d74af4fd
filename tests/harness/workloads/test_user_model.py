"""Models of one's own: the examples train, strategies of the parts they name apply, the others are refused."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

from harness import Place, backends
from harness.contract import plugins
from harness.contract.assembly import assemble
from harness.contract.loop import training
from harness.records import Applied, Case, Task
from harness.worker import numerics, prediction
from harness.workloads.user_model import Sizes, of_torch

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
LOADED = plugins.load((str(EXAMPLES / "own_torch_model.py"), str(EXAMPLES / "own_jax_model.py")))
MODELS = {"gated_convolutions": "torch", "running_means": "jax"}


def case(name, *strategies, **sizes):
    workload = LOADED.workloads[name]
    return Case(
        workload=name,
        shape=workload.probe(workload.shape(**sizes)).model_dump(),
        place=f"{MODELS[name]}/cpu",
        corpus="drawn",
        tokenizer="none",
        strategies=tuple(Applied(name=each) for each in strategies),
    )


def outcome(name, *strategies, draw=None):
    backend = backends.load(MODELS[name])
    backend.start(Place(MODELS[name], "cpu"))
    return numerics.observer(LOADED, case(name, *strategies), backend, draw, updates=4)(0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("strategies", [("checkpoint",), ("fused_loss",), ("checkpoint", "cut_loss")], ids="+".join)
def test_strategies_of_its_parts_leave_its_answer_as_it_is(name, strategies):
    answer, baseline = outcome(name, *strategies), outcome(name)
    assert answer.trajectory == pytest.approx(baseline.trajectory, rel=1e-5)
    assert baseline.trajectory[-1] < baseline.trajectory[0], "it learns"
    assert answer.gradients.keys() == baseline.gradients.keys()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("strategy", ["window_attention", "tiled_feed", "sequential_scan"])
def test_strategies_of_parts_it_does_not_name_are_refused(name, strategy):
    sentence = LOADED.strategies[strategy].misfit(LOADED.workloads[name])
    assert sentence is not None and f"a part that the workload '{name}' does not have" in sentence


@pytest.mark.parametrize("name", MODELS)
def test_it_is_predicted_and_its_floor_counts_every_parameter(name):
    record = prediction.measure(
        Task(kind="predict", cases=(case(name),), run_id="", parent=0, folder="", steps=2),
        LOADED,
        backends.load(MODELS[name]),
    )
    assert record.prediction.predicted_peak_bytes is not None, record.missing
    parts = assemble(LOADED, case(name))
    state = parts.init(parts, None)
    parameters = sum(array.size for array, _ in backends.load(MODELS[name]).arrays(state["params"]).values())
    figures = record.prediction
    assert figures.floor_bytes is not None
    assert figures.predicted_peak_bytes >= figures.floor_bytes >= 16 * parameters


def embedding_as_head(shape):
    embed = nn.Embedding(shape.vocabulary, 16)
    return (
        embed,
        [nn.Linear(16, 16) for _ in range(shape.layers)],
        nn.Identity(),
        embed.weight,
        lambda block, x: x + block(x),
    )


def test_a_tied_head_is_one_parameter_and_its_gradient_the_sum_of_both_uses():
    workload = of_torch("tied", embedding_as_head)
    shape = Sizes(layers=1, vocabulary=11, batch=2, tokens=5)
    parts = workload.on["torch"](shape, Place("torch", "cpu"), None, 0)
    state = parts.init(parts, None)
    assert "head" not in state["params"]
    assert workload.floor(shape) == 16 * (11 * 16 + 16 * 16 + 16) + 2 * 2 * 5 * 8
    x, y = torch.randint(0, 11, (2, 5)), torch.randint(0, 11, (2, 5))
    _, grads = parts.grad(parts, state, x, y)
    weight, layer = state["params"]["embed"]["weight"], state["params"]["layers"][0]
    hidden = nn.functional.embedding(x, weight)
    hidden = hidden + nn.functional.linear(hidden, layer["weight"], layer["bias"])
    loss = nn.functional.cross_entropy((hidden @ weight.T).flatten(0, 1), y.flatten())
    assert torch.allclose(torch.autograd.grad(loss, weight)[0], grads["embed"]["weight"], atol=1e-6)


def test_the_modules_keep_no_second_copy_of_the_parameters():
    workload = LOADED.workloads["gated_convolutions"]
    shape = workload.tiny(workload.shape())
    parts = workload.on["torch"](shape, Place("torch", "cpu"), None, 0)
    one, two = parts.init(parts, None), parts.init(parts, None)
    for a, b in zip(*(backends.load("torch").arrays(each["params"]).values() for each in (one, two)), strict=True):
        assert (a[0] == b[0]).all(), "the first values are always the same"
    step = backends.load("torch").prepare(parts)
    losses = [float(loss) for loss, _ in itertools.islice(training(parts, step), 2)]
    assert losses[1] != losses[0]


def test_a_hugging_face_decoder_is_a_workload():
    transformers = pytest.importorskip("transformers", reason="needs the package transformers")

    def make(shape):
        config = transformers.LlamaConfig(
            vocab_size=shape.vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=shape.layers,
            num_attention_heads=2, num_key_value_heads=1,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
        rotary = model.model.rotary_emb

        def call(layer, x):
            positions = torch.arange(x.shape[1])[None]
            return layer(x, position_embeddings=rotary(x, positions), position_ids=positions)

        return model.model.embed_tokens, model.model.layers, model.model.norm, model.lm_head.weight, call

    workload = of_torch("llama", make)
    parts = workload.on["torch"](Sizes(layers=2, vocabulary=50, batch=2, tokens=8), Place("torch", "cpu"), None, 0)
    step = backends.load("torch").prepare(parts)
    losses = [float(loss) for loss, _ in itertools.islice(training(parts, step), 4)]
    assert losses[-1] < losses[0]
