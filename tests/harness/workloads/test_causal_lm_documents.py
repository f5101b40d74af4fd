"""Published decoders on documents of all lengths: end to end they train as padded, or they are refused."""

from itertools import islice

import numpy as np
import pytest

from harness import backends
from harness.backends import cards
from harness.contract import plugins
from harness.contract.assembly import assemble
from harness.contract.loop import training
from harness.contract.place import Place
from harness.records import Applied, Case, Task
from harness.refusal import Refusal
from harness.worker import prediction
from harness.workloads.causal_lm.documents import Shape, probe, tiny

pytest.importorskip("transformers", reason="needs the package transformers")
LOADED = plugins.load()
FALCON = {"model_type": "falcon", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": False}


def case_of(config, *names, workload="causal_lm_documents", place="torch/cpu", **sizes):
    made = LOADED.workloads[workload]
    shape = made.probe(made.shape(config=config) if workload == "causal_lm_documents" else made.shape())
    return Case(
        workload=workload,
        shape=shape.model_dump() | sizes,
        place=place,
        corpus="drawn",
        tokenizer="none",
        strategies=tuple(Applied(name=name, knobs=dict(LOADED.strategies[name].probe)) for name in names),
    )


def first_step(case):
    """Return the loss of the first batch, and its gradients by name."""
    torch_ = backends.load("torch")
    torch_.start(Place("torch", "cpu"))
    parts = assemble(LOADED, case)
    source = parts.source(parts)
    x, y = next(parts.batches(parts, parts.windows(parts, source)))
    state = parts.init(parts, source)
    loss, grads = parts.grad(parts, state, *parts.transfer(parts, x, y))
    return float(loss), {name: array for name, (array, _) in torch_.arrays(grads).items()}


@pytest.mark.parametrize("config", ["smollm2-135m", "gpt2", "opt-125m", "gemma-2-2b", "gemma-3-1b", "qwen3-30b-a3b"])
def test_documents_end_to_end_have_the_loss_and_gradients_of_padded_ones(config):
    sizes = {"tokens": 48, "ignored": 0.0}
    padded, packed = (first_step(case_of(config, *names, **sizes)) for names in ((), ("packed",)))
    assert packed[0] == pytest.approx(padded[0], rel=1e-6)
    for name, expected in padded[1].items():
        assert abs(packed[1][name] - expected).max() <= 2e-5 * abs(expected).max() + 1e-8, name


def test_documents_of_more_tokens_than_a_window_are_told_apart_within_it():
    """The same documents alone and end to end, where the layers of a window see less than a document."""
    changes = case_of("gemma-3-1b").shape["changes"] | {"sliding_window": 16}
    parts = assemble(LOADED, case_of("gemma-3-1b", "packed", tokens=48, ignored=0.0, batch=2, changes=changes))
    source = parts.source(parts)
    windows = parts.windows(parts, source)
    two = np.argsort(source.lengths_N)[-2:]
    assert (source.lengths_N[two] > 16).all()
    state = parts.init(parts, source)

    def loss_of(indices):
        x, y = windows.batch(indices)
        return float(parts.grad(parts, state, *parts.transfer(parts, x, y))[0])

    lengths = source.lengths_N[two]
    alone = np.average([loss_of(two[:1]), loss_of(two[1:])], weights=lengths)
    assert loss_of(two) == pytest.approx(alone, rel=1e-6)


def test_an_architecture_that_does_not_tell_texts_apart_refuses_to_lay_them_end_to_end():
    first_step(case_of(FALCON))
    with pytest.raises(Refusal, match="texts cannot lie end to end in a row of this architecture"):
        first_step(case_of(FALCON, "packed"))


@pytest.mark.parametrize("workload", ["documents", "causal_lm_documents"])
@pytest.mark.parametrize("adapters", ["lora", "qlora"])
def test_adapters_train_alike_on_padded_and_packed_documents(workload, adapters):
    torch_ = backends.load("torch")

    def losses(*names):
        parts = assemble(LOADED, case_of("smollm2-135m", *names, workload=workload))
        return [float(loss) for loss, _ in islice(training(parts, torch_.prepare(parts), finish=torch_.wait), 3)]

    expected = losses(adapters)
    assert expected[0] != expected[2]
    assert losses("packed", adapters) == pytest.approx(expected, rel=1e-5)
    assert losses(adapters, "packed") == pytest.approx(expected, rel=1e-5)


def test_packed_documents_are_predicted_for_a_gpu(monkeypatch):
    monkeypatch.setenv(cards.VARIABLE, "a100")
    torch_ = backends.load("torch")

    def peak(*names):
        sizes = {"tokens": 256, "batch": 4, "vocabulary": 2048}
        case = case_of("smollm2-135m", *names, place=Place("torch", "cuda"), **sizes)
        task = Task(kind="predict", cases=(case,), run_id="", parent=0, folder="", steps=2)
        record = prediction.measure(task, LOADED, torch_)
        assert record.prediction.predicted_peak_bytes is not None, record.missing
        return record.prediction.predicted_peak_bytes

    assert peak("packed") < 0.9 * peak()
    assert peak("bucketed_lengths", "packed") > peak("packed"), "its largest batch has the longest documents together"


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"documents": 1, "batch": 2}, "1 documents fill no batch of 2: give more, or a smaller batch"),
        ({"longer": "cut"}, "Input should be 'refuse' or 'skip'"),
        ({"tokens": 4096}, "4,096 tokens are more than the 1,024 positions of gpt2"),
    ],
)
def test_bad_sizes_are_refused_in_a_sentence(sizes, sentence):
    with pytest.raises(ValueError, match=sentence):
        Shape(config="gpt2", **sizes)


def test_reduced_shapes_have_documents():
    assert probe(Shape(config="gpt2")).documents == 24
    assert tiny(Shape(config="gpt2")).documents == 8
