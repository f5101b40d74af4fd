"""Models of one's own: the examples train, strategies of the parts they name apply, the others are refused."""

import itertools
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from pydantic import Field
from torch import nn
from torch._subclasses import FakeTensorMode

from harness import Place, backends, tree
from harness.backends.torch_storage import LiveStorage
from harness.contract import plugins
from harness.contract.assembly import assemble
from harness.contract.loop import training
from harness.records import Applied, Case, Task
from harness.refusal import Refusal
from harness.worker import numerics, prediction
from harness.workloads.user_model import Sizes, of_jax, of_torch
from harness.workloads.user_model._torch import emptied
from harness.workloads.user_model.shared import of_a_kind

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


@cache
def outcome(name, *strategies):
    """What four updates gave; each is run once for all tests."""
    backend = backends.load(MODELS[name])
    backend.start(Place(MODELS[name], "cpu"))
    return numerics.observer(LOADED, case(name, *strategies), backend, updates=4)(0)


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


@pytest.mark.parametrize("name", [name for name, backend in MODELS.items() if backend == "torch"])
def test_what_divides_it_among_ranks_knows_the_size_of_each_parameter(name):
    parts = assemble(LOADED, case(name))
    drawn = dict(tree.leaves(parts.init(parts, None)["params"]))
    sizes = parts.shape.parameter_shapes()
    assert {of_a_kind(each) for each in drawn} == sizes.keys()
    assert all(sizes[of_a_kind(each)][0] == tuple(leaf.shape) for each, leaf in drawn.items())


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
    weight, layer = state["params"]["embed"]["weight"], state["params"]["layers"][0]["layer"]
    hidden = nn.functional.embedding(x, weight)
    hidden = hidden + nn.functional.linear(hidden, layer["weight"], layer["bias"])
    loss = nn.functional.cross_entropy((hidden @ weight.T).flatten(0, 1), y.flatten())
    assert torch.allclose(torch.autograd.grad(loss, weight)[0], grads["embed"]["weight"], atol=1e-6)


class Sum(nn.Module):
    """Two matrices of one size that are added before they multiply, as an adapter's change is to a weight."""

    def __init__(self):
        super().__init__()
        self.base, self.change = (nn.Parameter(torch.randn(16, 16) / 4) for _ in range(2))

    def forward(self, x):
        return x @ (self.base + self.change)


@pytest.mark.parametrize("strategies", [("accumulate",), ("clip_gradients",)], ids="+".join)
def test_gradients_that_autograd_gives_twice_are_changed_once(strategies):
    def make(shape):
        head = nn.Parameter(torch.randn(shape.vocabulary, 16))
        return nn.Embedding(shape.vocabulary, 16), [Sum()], nn.Identity(), head

    loaded = replace(LOADED, workloads={**LOADED.workloads, "sums": of_torch("sums", make)})
    sizes = {"layers": 1, "vocabulary": 11, "batch": 4, "tokens": 6}
    x, y = torch.randint(0, 11, (4, 6)), torch.randint(0, 11, (4, 6))

    def grads(*applied):
        knobs = {"clip_gradients": {"norm": 1e-3}}
        of = tuple(Applied(name=name, knobs=knobs.get(name, {})) for name in applied)
        named = {"workload": "sums", "corpus": "drawn", "tokenizer": "none", "place": "torch/cpu"}
        parts = assemble(loaded, Case(**named, shape=sizes, strategies=of))
        return dict(tree.leaves(parts.grad(parts, parts.init(parts, None), x, y)[1]))

    changed, plain = grads(*strategies), grads()
    norm = torch.stack([gradient.norm() for gradient in plain.values()]).norm()
    ratio = 1e-3 / norm if "clip_gradients" in strategies else 1.0
    assert {name.rpartition(".")[2] for name in plain} >= {"base", "change"}
    for name, gradient in changed.items():
        torch.testing.assert_close(gradient, plain[name] * ratio, rtol=1e-4, atol=1e-7, msg=name)


class Scaled(nn.Module):
    """A module whose outputs a buffer scales."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.register_buffer("scale", torch.ones(16), persistent=False)

    def forward(self, x):
        return self.inner(x) * self.scale


def test_the_buffers_of_a_model_are_where_it_computes():
    def make(shape):
        blocks = [Scaled(nn.Linear(16, 16)) for _ in range(shape.layers)]
        head = nn.Parameter(torch.zeros(shape.vocabulary, 16))
        return Scaled(nn.Embedding(shape.vocabulary, 16)), blocks, Scaled(nn.Identity()), head

    workloads = {**LOADED.workloads, "scaled": of_torch("scaled", make)}
    shape = {"layers": 2, "vocabulary": 11, "batch": 2, "tokens": 5}
    scaled = Case(workload="scaled", shape=shape, place="torch/cuda", corpus="drawn", tokenizer="none")
    record = prediction.measure(
        Task(kind="predict", cases=(scaled,), run_id="", parent=0, folder="", steps=2),
        replace(LOADED, workloads=workloads),
        backends.load("torch"),
    )
    assert record.prediction.predicted_peak_bytes, record.missing


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
            positions = torch.arange(x.shape[1], device=x.device)[None]
            return layer(x, position_embeddings=rotary(x, positions), position_ids=positions)

        return model.model.embed_tokens, model.model.layers, model.model.norm, model.lm_head.weight, call

    workload = of_torch("llama", make)
    parts = workload.on["torch"](Sizes(layers=2, vocabulary=50, batch=2, tokens=8), Place("torch", "cpu"), None, 0)
    step = backends.load("torch").prepare(parts)
    losses = [float(loss) for loss, _ in itertools.islice(training(parts, step), 4)]
    assert losses[-1] < losses[0]


SHAPE = Sizes(layers=3, vocabulary=11, batch=2, tokens=5)
IDS = torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(0))


def parts_and_state(make, shape=SHAPE):
    parts = of_torch("own", make).on["torch"](shape, Place("torch", "cpu"), None, 0)
    return parts, parts.init(parts, None)


def loss_in_parts(make):
    parts, state = parts_and_state(make)
    return parts.grad(parts, state, IDS[:, :-1], IDS[:, 1:])[0]


def loss_of_modules(make):
    torch.manual_seed(0)
    embed, blocks, norm, head, *_ = make(SHAPE)
    hidden = embed(IDS[:, :-1])
    for block in blocks:
        hidden = block(hidden)
    return nn.functional.cross_entropy((norm(hidden) @ head.T).flatten(0, 1), IDS[:, 1:].flatten())


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.at, self.tokens = nn.Embedding(11, 16), nn.Embedding(11, 16)

    def forward(self, ids):
        return self.tokens(ids) + self.at(torch.arange(ids.shape[1]))


def positions_before_tokens(shape):
    embed = Positions()
    return embed, [nn.Linear(16, 16)], nn.Identity(), embed.tokens.weight


def test_a_tied_head_is_the_parameter_that_was_given_as_head():
    assert loss_in_parts(positions_before_tokens) == pytest.approx(loss_of_modules(positions_before_tokens).item())


class Power(nn.Module):
    def __init__(self, exponent):
        super().__init__()
        self.inner, self.exponent = nn.Linear(16, 16), exponent

    def forward(self, x):
        return x + self.inner(x).abs() ** self.exponent


class Multiplied(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.register_buffer("scale", torch.tensor(scale))

    def forward(self, x):
        return x + self.scale * self.inner(x)


@pytest.mark.parametrize(
    "block",
    [
        lambda at: Power(1.0 + at % 2),
        lambda at: Multiplied(1.0 + at % 2),
        lambda at: nn.Linear(16, 16, bias=at != 1),
        lambda at: [nn.Sequential(nn.Linear(16, 16), nn.ReLU()), nn.Linear(16, 16)][at % 2],
    ],
    ids=["an attribute", "a buffer", "parameters", "modules"],
)
def test_blocks_that_differ_compute_what_each_of_them_does(block):
    def make(shape):
        return nn.Embedding(11, 16), [block(at) for at in range(3)], nn.Identity(), nn.Parameter(torch.randn(11, 16))

    assert loss_in_parts(make) == pytest.approx(loss_of_modules(make).item())


def test_it_is_trained_without_dropout():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix, self.drop = nn.GRU(16, 16, num_layers=2, dropout=0.5, batch_first=True), nn.Dropout(0.5)

        def forward(self, x):
            assert self.mix.training, "cuDNN has no backward pass of a GRU that is evaluated"
            return x + self.drop(self.mix(x)[0])

    def make(shape):
        embed = nn.Embedding(11, 16)
        return embed, [Block() for _ in range(2)], nn.Dropout(0.5), embed.weight

    assert len({loss_in_parts(make).item() for _ in range(3)}) == 1


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.register_buffer("mask", torch.full((5, 5), -torch.inf).triu(1))
        self.register_buffer("order", torch.arange(5))

    def forward(self, x):
        assert (self.mask.dtype, self.order.dtype) == (x.dtype, torch.int64)
        q = self.inner(x)[:, None]
        return x + nn.functional.scaled_dot_product_attention(q, q, q, self.mask)[:, 0]


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 16)
        self.register_buffer("shift", torch.arange(16.0))

    def forward(self, x):
        return self.table(x) + self.shift


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_floating_buffers_have_the_type_of_what_is_computed(dtype):
    def make(shape):
        embed = Shifted()
        return embed, [Masked() for _ in range(2)], nn.LayerNorm(16), embed.table.weight

    parts, _ = parts_and_state(make)
    inner = parts.draw
    parts = replace(parts, draw=lambda *args: inner(*args).to(dtype))
    loss, _ = parts.grad(parts, parts.init(parts, None), IDS[:, :-1], IDS[:, 1:])
    assert loss.item() == pytest.approx(loss_of_modules(make).item(), rel=2e-2 if dtype == torch.bfloat16 else 1e-6)


class WithMore(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.more = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.inner(x)


def test_a_parameter_that_the_model_does_not_use_is_refused_by_its_name():
    def make(shape):
        embed = nn.Embedding(11, 16)
        return embed, [WithMore() for _ in range(3)], nn.Identity(), embed.weight

    sentence = "'layers.0.layer.more.weight' has no part in the loss: use it in the model, or leave it out"
    with pytest.raises(Refusal, match=sentence):
        loss_in_parts(make)


class Joined(nn.Module):
    """Two matrices that are used as one, whose gradients are parts of one array as well."""

    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.randn(16, 16)) for _ in range(2))

    def forward(self, x):
        left, right = nn.functional.linear(x, torch.cat([self.left, self.right])).chunk(2, dim=-1)
        return left * right


class Added(nn.Module):
    """Two matrices that are added up: autograd gives both the same gradient."""

    def __init__(self):
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.randn(16, 16)) for _ in range(2))

    def forward(self, x):
        return nn.functional.linear(x, self.one + self.other)


def gradients_of(block):
    parts, _ = parts_and_state(lambda shape: (nn.Embedding(11, 16), [block()], nn.Identity(), nn.Linear(16, 11).weight))
    _, grads = parts.grad(parts, parts.init(parts, None), IDS[:, :-1], IDS[:, 1:])
    return grads["layers"][0]["layer"]


def test_gradients_that_lie_beside_each_other_are_no_copies():
    left, right = gradients_of(Joined).values()
    assert left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    left.mul_(0)
    assert right.abs().max() > 0


def test_a_gradient_that_autograd_gives_twice_can_be_changed_each_by_itself():
    one, other = gradients_of(Added).values()
    before = other.clone()
    one.mul_(0)
    assert other.equal(before) and before.abs().max() > 0


def one_block_twice(shape):
    return nn.Embedding(11, 16), [nn.Linear(16, 16)] * 2, nn.Identity(), nn.Parameter(torch.randn(11, 16))


def one_matrix_within_a_block(shape):
    block = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    block[1].weight = block[0].weight
    return nn.Embedding(11, 16), [block], nn.Identity(), nn.Parameter(torch.randn(11, 16))


SHARED = {
    one_block_twice: "'layers.0.layer.weight' and 'layers.1.layer.weight'",
    one_matrix_within_a_block: "'layers.0.layer.0.weight' and 'layers.0.layer.1.weight'",
}


@pytest.mark.parametrize("make", SHARED)
def test_one_parameter_under_two_names_is_refused_in_a_sentence(make):
    for built in (parts_and_state, of_torch("own", make).parameters):
        with pytest.raises(Refusal, match=f"{SHARED[make]} of this model are one parameter: give each"):
            built(make) if built is parts_and_state else built(SHAPE)


def pieces(embed=None, blocks=None, norm=None, head=None):
    """What a model is made of, 11 ids and width 16, where nothing else is said."""
    embed = nn.Embedding(11, 16) if embed is None else embed
    head = nn.Parameter(torch.randn(11, 16)) if head is None else head
    return embed, [nn.Linear(16, 16)] if blocks is None else blocks, nn.Identity() if norm is None else norm, head


class Scale:
    """Settings as an object that nothing compares."""

    def __init__(self, value):
        self.value, self.itself, self.array = value, self, np.arange(3)


class Holding(nn.Module):
    """A block that holds such settings."""

    def __init__(self, scale):
        super().__init__()
        self.linear, self.scale = nn.Linear(16, 16), scale

    def forward(self, x):
        return x + self.linear(x) * self.scale.value


def beside(scale):
    """Call a block with a parameter that is of no piece."""
    return lambda block, x_BTD: block(x_BTD) * scale


def test_blocks_that_hold_equal_objects_run_through_one_module_and_may_be_generated():
    def make(shape):
        return pieces(blocks=(Holding(Scale(0.5)) for _ in range(shape.layers)))

    assert loss_in_parts(make).item() == pytest.approx(loss_of_modules(make).item(), rel=1e-6)
    listed = of_torch("own", lambda shape: pieces(blocks=[Holding(Scale(0.5)) for _ in range(shape.layers)]))
    assert of_torch("own", make).parameters(SHAPE) == listed.parameters(SHAPE) > 11 * 16 * 2


def test_a_block_that_returns_more_than_hidden_states_is_refused():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(16, 16, batch_first=True)

        def forward(self, x):
            return self.gru(x)

    with pytest.raises(Refusal, match="a block returns a tuple: return hidden states alone, or give `call`"):
        loss_in_parts(lambda shape: pieces(blocks=[Recurrent()]))


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (pieces()[:3], r"returns other pieces: return \(embed, blocks, norm, head\)"),
        (None, "returns other pieces"),
        (pieces(head=nn.Linear(16, 11)), "the head of the model is a Linear: give its weight"),
        (pieces(norm="none"), "norm of the model is a str: give a module, nn.Identity"),
        (pieces(blocks=[torch.relu]), r"blocks\[0\] of the model is a builtin_function_or_method: give a module"),
        (pieces(blocks=[]), "the model has no blocks"),
        (pieces(blocks=nn.Linear(16, 16)), "the blocks of the model are a Linear: give a list of modules"),
        (pieces(embed=nn.Embedding(10, 16)), "the embedding of the model has 10 rows, and there are 11 ids"),
        (pieces(head=nn.Parameter(torch.randn(7, 16))), "the head of the model has 7 rows, and there are 11 ids"),
        (
            pieces(blocks=[nn.Linear(16, 16), nn.Linear(16, 16).requires_grad_(False)]),
            r"the parameter 'weight' of blocks\[1\] is frozen",
        ),
        (pieces(head=nn.Parameter(torch.randn(11, 16), requires_grad=False)), "the head of the model is frozen"),
        ((*pieces(), beside(nn.Parameter(torch.ones(16)))), "`call` uses 'scale', whose parameters are of no piece"),
        (pieces(blocks=[nn.Sequential(nn.BatchNorm1d(16))]), r"blocks\[0\] of the model has a BatchNorm"),
        (
            pieces(blocks=[nn.Linear(16, 16).double()]),
            r"the parameter 'weight' of blocks\[0\] is not in float32: make it",
        ),
        (pieces(head=nn.Parameter(torch.randn(11, 16).bfloat16())), "the head of the model is not in float32: make it"),
        (pieces(embed=nn.Embedding(11, 16, sparse=True)), "embed of the model has an Embedding with sparse=True"),
        (
            pieces(blocks=[Holding(Scale(1.0)), Holding(Scale(2.0))]),
            r"blocks\[1\] and blocks\[0\] differ in 'scale', a Scale",
        ),
    ],
)
def test_pieces_that_are_none_are_refused_in_a_sentence(made, sentence):
    for built in (parts_and_state, of_torch("own", lambda shape: made).parameters):
        with pytest.raises(Refusal, match=sentence):
            built(lambda shape: made) if built is parts_and_state else built(SHAPE)


@pytest.mark.parametrize(
    ("first", "sentence"),
    [
        (lambda shape, key: {"head": jnp.ones((11, 16))}, "init of the model returns no 'layers'"),
        (lambda shape, key: jnp.ones((11, 16)), "init of the model returns no 'layers'"),
        (lambda shape, key: {"layers": {"w": jnp.ones((2, 16, 16))}}, "returns neither 'head' nor 'embed'"),
        (
            lambda shape, key: {"layers": {"w": jnp.ones((2, 16, 16), jnp.bfloat16)}, "head": jnp.ones((11, 16))},
            "returns 'layers.w' in another type than float32: return that",
        ),
        (
            lambda shape, key: {"layers": {"w": jnp.ones((3, 16)), "b": jnp.ones((2, 16))}, "head": jnp.ones((11, 16))},
            r"'layers.w' with a first axis of 3, and 'layers.b' one of 2: stack all layers, \[L, ...\]",
        ),
        (
            lambda shape, key: {"layers": {"w": jnp.ones((3, 16)), "b": jnp.ones(())}, "head": jnp.ones((11, 16))},
            "returns 'layers.b' with no axis: stack all layers",
        ),
        (lambda shape, key: {"layers": {"w": jnp.ones(3)}, "embed": jnp.ones(11)}, r"'embed', .* no array \[V, D\]"),
        (lambda shape, key: {"layers": {"w": jnp.ones(3)}, "head": [jnp.ones(11)]}, r"'head', .* no array \[V, D\]"),
        (
            lambda shape, key: {"layers": {"w": jnp.ones(3)}, "embed": jnp.ones((7, 16))},
            "the embed of the model has 7 rows, and there are 11 ids",
        ),
    ],
)
def test_first_values_without_layers_or_head_are_refused_in_a_sentence(first, sentence):
    workload = of_jax("own", first, lambda *_: None, lambda *_: None, lambda *_: None)
    with pytest.raises(Refusal, match=sentence):
        workload.on["jax"](SHAPE, Place("jax", "cpu"), None, 0)


@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        ({"block": lambda shape, p, x: (x, p)}, r"`block` of the model returns a tuple: .* float32\[2, 5, 16\] alone"),
        ({"block": lambda shape, p, x: None}, "`block` of the model returns a NoneType: return hidden states"),
        (
            {"block": lambda shape, p, x: x.astype(jnp.float16)},
            r"`block` .* returns float16\[2, 5, 16\]: return hidden states float32\[2, 5, 16\]",
        ),
        ({"block": lambda shape, p, x: x[:, :3]}, r"`block` .* returns float32\[2, 3, 16\]: return hidden"),
        ({"embed": lambda shape, params, ids: (ids,)}, r"`embed` .* returns a tuple: return hidden states \[B, T, D\]"),
        ({"embed": lambda shape, params, ids: ids * 1.0}, r"`embed` .* returns float32\[2, 5\]: return hidden states"),
        ({"norm": lambda shape, params, x: (x,)}, r"`norm` .* returns a tuple: .* states \[2, 5, 16\] alone"),
        ({"norm": lambda shape, params, x: x[..., :8]}, r"`norm` .* float32\[2, 5, 8\]: .* states \[2, 5, 16\]"),
    ],
)
def test_what_is_no_hidden_states_of_a_jax_model_is_refused_in_a_sentence(own, sentence):
    functions = {
        "init": lambda shape, key: {"embed": jnp.ones((11, 16)), "layers": {"w": jnp.ones((3, 16))}},
        "embed": lambda shape, params, ids: params["embed"][ids],
        "block": lambda shape, p, x: x * p["w"],
        "norm": lambda shape, params, x: x,
    }
    workload = of_jax("own", **(functions | own))
    parts = workload.on["jax"](SHAPE, Place("jax", "cpu"), None, 0)
    with pytest.raises(Refusal, match=sentence):
        parts.grad(parts, parts.init(parts), jnp.zeros((2, 5), int), jnp.zeros((2, 5), int))


def test_a_model_that_changes_the_type_of_its_parameters_is_refused_where_nothing_is_computed():
    with FakeTensorMode(), pytest.raises(Refusal, match="the model's function changes the type of its parameters"):
        parts_and_state(lambda shape: pieces(blocks=[nn.Linear(16, 16).to(torch.bfloat16)]))


def test_sizes_of_a_jax_model_may_be_lists():
    class Listed(Sizes):
        widths: list[int] = Field([16, 16])

    def first(shape, key):
        return {"layers": {"w": jnp.ones((len(shape.widths), 16, 16))}, "head": jnp.ones((11, 16))}

    workload = of_jax("own", first, lambda *_: None, lambda *_: None, lambda *_: None, shape=Listed)
    parts = workload.on["jax"](Listed(vocabulary=11), Place("jax", "cpu"), None, 0)
    assert parts.init(parts)["params"]["layers"]["w"].shape == (2, 16, 16)


def test_a_model_without_values_takes_no_memory_of_a_prediction():
    with FakeTensorMode(), LiveStorage() as live:
        before = live.live
        module = emptied(nn.Linear(1000, 1000))
        assert live.live == before and module.weight.is_meta and module.weight.shape == (1000, 1000)
