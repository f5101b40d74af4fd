"""Strategies of the stack and its blocks: what they keep, what they run again, and what stays the same."""

import math
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from harness import Place, Sizes, Unpredictable, backends, tree
from harness.backends import jax as on_jax
from harness.backends import torch_graph
from harness.contract import place, plugins
from harness.records import Applied, Case, Task
from harness.worker import prediction
from harness.workloads.decoder import Shape
from harness.workloads.decoder import _jax as decoder_in_jax
from harness.workloads.decoder import _torch as decoder_in_torch
from strategies.activations.budget_checkpoint import Costs, choose
from strategies.activations.reversible import branches
from strategies.attention.automatic_windows import UNKNOWN, chosen

LOADED = plugins.load()
DECODER, TEMPORAL = LOADED.workloads["decoder"], LOADED.workloads["temporal"]
LAYERS = 5
SHAPE = Shape(layers=LAYERS, width=32, heads=2, hidden=48, vocabulary=31, batch=2, tokens=16)
# Deep, and with a row long enough that the activations outweigh the parameters.
DEEP = Shape(layers=12, width=32, heads=2, hidden=128, vocabulary=32, tokens=512)


def parts_of(backend, shape, *strategies, workload=DECODER):
    parts = workload.on[backend](shape, Place(backend, "cpu"), None, 0)
    for name, knobs in strategies:
        parts = LOADED.strategies[name].on[backend](parts, **knobs)
    return parts


def first_gradient(parts):
    state = parts.init(parts, None)
    x, y = next(parts.batches(parts, parts.windows(parts, parts.source(parts))))
    grad = jax.jit(partial(parts.grad, parts)) if parts.place.backend == "jax" else partial(parts.grad, parts)
    loss, grads = grad(state, x, y)
    return float(loss), {name: array for name, (array, _) in backends.load(parts.place.backend).arrays(grads).items()}


@cache
def plain_gradient(backend):
    return first_gradient(parts_of(backend, SHAPE))


FUSED = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else {}
"""Tests compile without, for it is quicker; temporaries are a user's only with it. Later there is none."""


@cache
def activations(backend, name=None, knobs=(), shape=DEEP):
    """Predicted bytes of a step's tensors above what lasts from one step to the next; autograd's graph is apart."""
    parts = partial(parts_of, backend, shape, *([(name, dict(knobs))] if name else []))
    batch = DECODER.abstract_batch(shape)
    if backend == "jax":
        built = parts()
        compiled = on_jax.lowered(built, on_jax.like(batch), built).compile(FUSED)
        return compiled.memory_analysis().temp_size_in_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_graph, "NODE", 0)
        peaks = backends.load("torch").predict(parts, Place("torch", "cpu"), batch, source_bytes=0, steps=1).peaks
    return peaks["first_step/backward"] - peaks["init"]


def blocks_run(name, knobs):
    """How often each block of a torch stack runs in one gradient."""
    ran = []
    parts = parts_of("torch", SHAPE)
    inner = parts.block

    def block(parts, p, x_BTD):
        ran.append(id(p))
        return inner(parts, p, x_BTD)

    parts = LOADED.strategies[name].on["torch"](replace(parts, block=block), **knobs)
    state = parts.init(parts, None)
    x, y = next(parts.batches(parts, parts.windows(parts, parts.source(parts))))
    parts.grad(parts, state, x, y)
    ran.clear()  # a first step may look before it chooses
    parts.grad(parts, state, x, y)
    return [ran.count(id(layer)) for layer in state["params"]["layers"]]


EXACT = [
    ("torch", "budget_checkpoint", {"budget_mib": 0.0}),
    ("torch", "budget_checkpoint", {"budget_mib": 0.3}),
    ("torch", "nested_checkpoint", {"every": 2}),
    ("torch", "offload_boundary", {"least_kib": 1}),
    ("torch", "feed_checkpoint", {}),
    ("torch", "recomputed_activation", {}),
    ("jax", "budget_checkpoint", {"budget_mib": 0.0}),
    ("jax", "nested_checkpoint", {"every": 2}),
    ("jax", "named_checkpoint", {}),
    ("jax", "offload_checkpoint", {}),
    ("jax", "feed_checkpoint", {}),
    ("jax", "recomputed_activation", {}),
    ("jax", "tiled_feed", {"rows": 16, "recompute": False}),
]


@pytest.mark.parametrize(("backend", "name", "knobs"), EXACT, ids=lambda value: str(value))
def test_what_is_recomputed_changes_no_gradient(backend, name, knobs):
    loss, grads = plain_gradient(backend)
    actual, found_grads = first_gradient(parts_of(backend, SHAPE, (name, knobs)))
    if backend == "torch":
        assert actual == loss
        assert all(np.array_equal(found_grads[key], grads[key]) for key in grads)
    else:
        assert actual == pytest.approx(loss, rel=1e-6)
        for key in grads:
            np.testing.assert_allclose(found_grads[key], grads[key], rtol=1e-4, atol=1e-7)


# A budget


def budgeted(backend, budget_mib, shape=DEEP, *before):
    """The choice that a budget led to: notes of a step that is only predicted or traced."""
    parts = parts_of(backend, shape, *before, ("budget_checkpoint", {"budget_mib": budget_mib}))
    batch = DECODER.abstract_batch(shape)
    if backend == "jax":
        on_jax.lowered(parts, on_jax.like(batch), parts)
    else:
        backends.load("torch").predict(lambda: parts, Place("torch", "cpu"), batch, source_bytes=0, steps=1)
    return parts.notes


@pytest.mark.parametrize(
    ("layers", "costs", "budget", "choice"),
    [
        (6, Costs(100, 10), 600, (6, 1)),
        (6, Costs(100, 10), 599, (5, 1)),
        (6, Costs(100, 10), 340, (3, 3)),
        (6, Costs(100, 10), 309, (2, 2)),
        (6, Costs(100, 10), 0, (0, 1)),
        (9, Costs(10, 10), 0, (0, 3)),
        (6, Costs(100, 10, gradients=1000), 0, (0, 6)),
    ],
    ids=str,
)
def test_a_budget_keeps_the_most_layers_that_fit_and_else_takes_the_least(layers, costs, budget, choice):
    assert choose(layers, costs, budget) == choice


@pytest.mark.long
@pytest.mark.parametrize("backend", place.NAMES)
def test_a_larger_budget_recomputes_fewer_layers_and_is_kept(backend):
    notes = {mib: budgeted(backend, mib) for mib in (0.0, 0.1, 3.0, 6.0, 12.0, 400.0)}
    recomputed = [note["recomputed_layers"] for note in notes.values()]
    assert recomputed == sorted(recomputed, reverse=True)
    assert recomputed[0] == DEEP.layers and recomputed[-1] == 0 and len(set(recomputed)) >= 3
    for mib, note in notes.items():
        fits = note["predicted_activation_bytes"] <= mib * 2**20
        assert fits or note["recomputed_layers"] == recomputed[0]
        assert ("no choice fits" in note["choice"]) == (not fits and mib > 0)
    assert f"of {DEEP.layers} layers" in notes[3.0]["choice"] and "of a budget of 3.0" in notes[3.0]["choice"]


@pytest.mark.long
@pytest.mark.parametrize("backend", place.NAMES)
def test_the_least_choice_is_within_5_percent_of_the_best_interval(backend):
    intervals = [activations(backend, "checkpoint", (("every", k),)) for k in (1, 2, 3, 4, 6, 12)]
    assert activations(backend, "budget_checkpoint") <= 1.05 * min(intervals)


@pytest.mark.long_in_jax
@pytest.mark.parametrize("backend", place.NAMES)
def test_a_budget_moves_the_peak_by_what_it_allows(backend):
    low, high = (budgeted(backend, mib)["predicted_activation_bytes"] for mib in (0.0, 8.0))
    measured = [activations(backend, "budget_checkpoint", (("budget_mib", mib),)) for mib in (0.0, 8.0)]
    assert measured[1] - measured[0] == pytest.approx(high - low, rel=0.15)


def test_a_budget_counts_what_autograd_saves_of_a_block():
    """Only unique storages, no parameters: 2 norms, 5 projections, attention and GELU of one pre-norm block."""
    shape = Shape(layers=4, width=32, heads=2, feed="gelu", vocabulary=32, tokens=512)
    saved = budgeted("torch", 1e6, shape)["predicted_activation_bytes"] / shape.layers
    hidden = 4 * shape.tokens * shape.width
    assert 14 * hidden < saved < 20 * hidden


def test_a_budget_counts_nothing_that_outlives_a_layer():
    """The copies of weights that autocast makes stay: what is counted grows with the tokens alone."""

    def predicted(tokens):
        shape = Shape(layers=2, width=64, heads=2, hidden=256, vocabulary=32, tokens=tokens)
        parts = parts_of("torch", shape, ("budget_checkpoint", {"budget_mib": 1e6}), ("bfloat16_autocast", {}))
        first_gradient(parts)
        return parts.notes["predicted_activation_bytes"]

    assert predicted(32) == pytest.approx(2 * predicted(16), rel=0.02)


def test_a_budget_is_shared_out_where_the_width_of_a_model_has_no_name():
    shape = Sizes(layers=12, batch=2, tokens=512)
    small = shape.model_copy(update={"layers": 3, "batch": 3, "tokens": 37})
    probed = LOADED.strategies["budget_checkpoint"].probed({"budget_mib": 8.0}, shape, small)
    assert probed["budget_mib"] == pytest.approx(8.0 * (3 * 3 * 37) / (12 * 2 * 512))


def test_layers_before_the_last_run_twice_under_a_budget():
    assert blocks_run("budget_checkpoint", {"budget_mib": 0.0}) == [2] * LAYERS
    assert blocks_run("budget_checkpoint", {"budget_mib": 0.25}) == [2, 2, 1, 1, 1]
    assert blocks_run("budget_checkpoint", {"budget_mib": 100.0}) == [1] * LAYERS


@pytest.mark.parametrize("backend", place.NAMES)
def test_one_layer_is_recomputed_unless_it_fits(backend):
    one = DEEP.model_copy(update={"layers": 1})
    for mib, recomputed in ((0.0, 1), (100.0, 0)):
        notes = budgeted(backend, mib, one)
        assert notes["recomputed_layers"] == recomputed and notes["predicted_activation_bytes"] > 0


def test_what_is_frozen_has_no_gradient_that_activations_would_wait_for():
    shape = Shape(layers=12, width=128, heads=2, hidden=512, vocabulary=32, tokens=64)
    assert "at most 12 at a time" in budgeted("torch", 0.0, shape)["choice"], "gradients outweigh the activations"
    assert "at most 1 at a time" in budgeted("torch", 0.0, shape, ("lora", {"rank": 2}))["choice"]


def test_a_budget_below_zero_is_refused():
    with pytest.raises(ValueError, match="budget_mib must be 0"):
        parts_of("torch", SHAPE, ("budget_checkpoint", {"budget_mib": -1.0}))


# Nested


def test_nested_segments_run_each_block_three_times_but_for_their_last():
    """A segment runs again only up to the input of its last block."""
    assert blocks_run("nested_checkpoint", {"every": 2}) == [3, 2, 3, 2, 2]


@pytest.mark.long_in_jax
@pytest.mark.parametrize("backend", place.NAMES)
def test_nested_segments_keep_less_than_each_layer_of_a_deep_stack(backend):
    """36 hidden states against 6 + 6, all else being equal: what one block saves, and the gradients."""
    shape = Shape(layers=36, width=32, heads=2, hidden=128, vocabulary=32, batch=16, tokens=128)
    hidden = 4 * shape.batch * shape.tokens * shape.width
    flat = activations(backend, "checkpoint", (("every", 1),), shape)
    assert flat - activations(backend, "nested_checkpoint", (), shape) > 10 * hidden


# The feed part by itself

WIDE = 4 * DEEP.tokens * DEEP.inner
"""Bytes of one inner activation; under SwiGLU a layer saves four of them: up, gate, its silu, their product."""


def products(*strategy, shape=SHAPE, workload=DECODER):
    """How many matrix products and attentions one gradient of a torch stack takes."""
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten
    counted = aten.mm.default, aten.addmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default
    counted += (aten._grouped_mm.default,)

    class Watch(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.number += function in counted
            return function(*args, **(kwargs or {}))

    parts = parts_of("torch", shape, *strategy, workload=workload)
    state = parts.init(parts, None)
    x, y = next(parts.batches(parts, parts.windows(parts, parts.source(parts))))
    with Watch() as watch:
        parts.grad(parts, state, x, y)
    return watch.number


def program(parts):
    """The program of one gradient in JAX."""
    batch = on_jax.like(DECODER.abstract_batch(SHAPE))
    state = jax.eval_shape(partial(parts.init, parts), None)
    return jax.make_jaxpr(partial(parts.grad, parts))(state, *batch)


def operations(*strategy):
    """How often each operation stands in it, the layers' once: all are one loop."""

    def names(within):
        for equation in within.eqns:
            yield equation.primitive.name
            for inner in jax.tree.leaves(equation.params):
                if hasattr(inner, "eqns"):
                    yield from names(inner)

    return Counter(names(program(parts_of("jax", SHAPE, *strategy))))


@pytest.mark.long_in_jax
@pytest.mark.parametrize("backend", place.NAMES)
def test_a_recomputed_activation_keeps_two_of_four_and_a_recomputed_feed_none(backend):
    plain = activations(backend)
    half, none = (plain - activations(backend, name) for name in ("recomputed_activation", "feed_checkpoint"))
    assert half > 0.8 * 2 * (DEEP.layers - 1) * WIDE
    assert none > 0.8 * 4 * (DEEP.layers - 1) * WIDE and none > half


def test_no_product_is_computed_twice_for_an_activation():
    plain = products()
    assert products(("recomputed_activation", {})) == plain
    assert products(("feed_checkpoint", {})) == plain + 2 * LAYERS, (
        "up and gate, but not down, whose output nobody needs"
    )


@pytest.mark.parametrize("name", ["selective_checkpoint", "recomputed_activation"])
def test_nor_is_a_product_of_experts(name):
    pytest.importorskip("transformers", reason="needs the package transformers")
    causal = LOADED.workloads["causal_lm"]
    count = partial(products, shape=causal.probe(causal.shape(config="mixtral-8x7b")), workload=causal)
    assert count((name, {})) == count() < count(("checkpoint", {}))


def test_nor_is_one_in_jax():
    plain, half, none = (operations(*each) for each in ((), [("recomputed_activation", {})], [("feed_checkpoint", {})]))
    assert half["logistic"] == none["logistic"] == plain["logistic"] + 1
    assert half["dot_general"] == plain["dot_general"] == none["dot_general"] - 2


# Checkpoints that keep products


@pytest.mark.long_in_jax
@pytest.mark.parametrize("backend", place.NAMES)
def test_a_selective_checkpoint_keeps_more_than_inputs_and_less_than_all(backend):
    inputs, some, everything = (activations(backend, name) for name in ("checkpoint", "selective_checkpoint", None))
    assert 1.1 * inputs < some < 0.7 * everything


def test_a_selective_checkpoint_computes_no_product_twice():
    assert products(("selective_checkpoint", {})) == products() < products(("checkpoint", {}))


def test_a_selective_checkpoint_of_jax_computes_the_products_of_attention_alone_twice():
    plain, more = operations(), operations(("selective_checkpoint", {}))
    assert more["logistic"] == plain["logistic"] + 1
    assert more["dot_general"] == plain["dot_general"] + 2


def test_what_a_selective_checkpoint_keeps_serves_one_backward_pass():
    parts = parts_of("torch", SHAPE, ("selective_checkpoint", {}))
    state = parts.init(parts, None)
    hidden = parts.stack(parts, state["params"]["layers"], torch.ones(1, SHAPE.tokens, SHAPE.width))
    hidden.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="Trying to backward an extra time"):
        hidden.sum().backward()


# Tiles


@pytest.mark.long_in_jax
@pytest.mark.parametrize("backend", place.NAMES)
def test_tiles_that_are_not_recomputed_save_little(backend):
    plain = activations(backend)
    whole, tiled = (activations(backend, "tiled_feed", (("rows", 64), ("recompute", r))) for r in (False, True))
    assert tiled < 0.85 * plain and whole > 0.9 * plain


# JAX policies


def traced(parts):
    return str(program(parts))


def test_a_name_keeps_a_hidden_state_a_layer_and_runs_fewer_products():
    each, named, plain = (
        traced(parts_of("jax", SHAPE, *strategy)).count("dot_general")
        for strategy in ([("checkpoint", {"every": 1})], [("named_checkpoint", {})], [])
    )
    assert plain < named < each
    hidden = 4 * DEEP.tokens * DEEP.width
    more = activations("jax", "named_checkpoint") - activations("jax", "checkpoint", (("every", 1),))
    assert more < 1.5 * DEEP.layers * hidden < 0.1 * activations("jax")


def test_products_go_to_the_host_and_come_back():
    assert "pinned_host" not in traced(parts_of("jax", SHAPE))
    program = traced(parts_of("jax", SHAPE, ("offload_checkpoint", {})))
    away, back = (program.count(f"memory_kind={kind}") for kind in ("pinned_host", "device"))
    away, back = max(away, program.count("Host")), max(back, program.count("Device"))
    assert away >= 6 and back >= 6  # q, k, v, out and both of the feed


def test_the_inputs_of_layers_go_to_the_host_and_nothing_else_does():
    program = traced(parts_of("jax", SHAPE, ("offload_boundary", {"least_kib": 1})))
    assert program.count("memory_kind=pinned_host") + program.count("Host") >= 1
    of_large_inputs_alone = traced(parts_of("jax", SHAPE, ("offload_boundary", {})))
    assert "Host" not in of_large_inputs_alone and "pinned_host" not in of_large_inputs_alone
    one, all_ = (
        traced(parts_of("jax", SHAPE, each))
        for each in (("offload_boundary", {"least_kib": 1}), ("offload_checkpoint", {}))
    )
    assert one.count("Host") + one.count("pinned_host") < all_.count("Host") + all_.count("pinned_host")


@pytest.mark.parametrize("name", ["offload_checkpoint", "offload_boundary"])
def test_where_one_memory_is_all_there_is_offloading_says_so(name):
    parts = parts_of("jax", SHAPE, (name, {}))
    traced(parts)
    assert "stands in for a GPU" in parts.notes["offloading"]


# Offloaded inputs of blocks


def test_block_inputs_leave_for_files_and_nothing_else_does(tmp_path, monkeypatch):
    opened = []
    original = torch.from_file

    def from_file(path, **knobs):
        opened.append(knobs["size"])
        return original(path, **knobs)

    monkeypatch.setattr(torch, "from_file", from_file)
    first_gradient(parts_of("torch", SHAPE, ("offload_boundary", {"least_kib": 1, "folder": str(tmp_path)})))
    assert opened == [SHAPE.batch * SHAPE.tokens * SHAPE.width] * LAYERS
    assert not list(tmp_path.iterdir())
    opened.clear()
    first_gradient(parts_of("torch", SHAPE, ("offload_boundary", {"least_kib": 5, "folder": str(tmp_path)})))
    assert not opened, "they are of 4 KiB"


# Reversible


def graph_in_torch(f, g, ps, x_BTD):
    first = second = x_BTD.to(torch.promote_types(x_BTD.dtype, torch.float32))
    for p in ps:
        first = first + f(p, second.to(x_BTD.dtype))
        second = second + g(p, first.to(x_BTD.dtype))
    return ((first + second) / 2).to(x_BTD.dtype)


def graph_in_jax(f, g, ps, x_BTD):
    def one(streams, p):
        first, second = streams
        first = first + f(p, second.astype(x_BTD.dtype))
        return (first, second + g(p, first.astype(x_BTD.dtype))), None

    first, second = jax.lax.scan(one, (x_BTD.astype(jnp.float32), x_BTD.astype(jnp.float32)), ps)[0]
    return ((first + second) / 2).astype(x_BTD.dtype)


def mix_and_feed(parts):
    """The branches of a decoder, from the workload's own norm, mix and feed."""
    normalise = {"torch": decoder_in_torch, "jax": decoder_in_jax}[parts.place.backend].normalise
    return (
        lambda p, x_BTD: parts.mix(parts, p, normalise(parts.shape, x_BTD, p, "mix_norm")),
        lambda p, x_BTD: parts.feed(parts, p, normalise(parts.shape, x_BTD, p, "feed_norm")),
    )


def by_a_graph(parts, of=mix_and_feed):
    """Parts with the same two streams, in float32 at the least, by an ordinary graph."""
    run = {"torch": graph_in_torch, "jax": graph_in_jax}[parts.place.backend]
    return replace(parts, stack=lambda parts, ps, x_BTD: run(*of(parts), ps, x_BTD))


def drawn_in(dtype, backend):
    module = backends.load(backend)
    return lambda parts: replace(parts, draw=module.cast(parts.draw, dtype))


def away(answer, reference):
    off = sum(float(np.sum((answer[name].astype(np.float64) - reference[name]) ** 2)) for name in reference)
    return math.sqrt(off / sum(float(np.sum(reference[name].astype(np.float64) ** 2)) for name in reference))


@pytest.mark.parametrize("feed_first", [False, True], ids=["sequential", "parallel"])
@pytest.mark.parametrize("backend", place.NAMES)
def test_reversible_layers_have_the_gradient_of_a_plain_backward_pass(backend, feed_first):
    shape = SHAPE.model_copy(update={"parallel": feed_first})
    loss, grads = first_gradient(by_a_graph(parts_of(backend, shape)))
    actual, found_grads = first_gradient(parts_of(backend, shape, ("reversible", {})))
    assert actual == pytest.approx(loss, rel=1e-6)
    assert away(found_grads, grads) < 3e-6


@pytest.mark.long_in_jax
@pytest.mark.parametrize(("dtype", "of", "bound"), [("float32", mix_and_feed, 2e-5), ("bfloat16", branches, 3e-3)])
@pytest.mark.parametrize("backend", place.NAMES)
def test_what_is_rebuilt_stays_right_with_depth_and_in_bfloat16(backend, dtype, of, bound):
    """Streams in float32: weights and branches may be bfloat16, and are then rounded alike in both."""
    shape = SHAPE.model_copy(update={"layers": 32})
    low = drawn_in(dtype, backend)
    _, grads = first_gradient(by_a_graph(low(parts_of(backend, shape)), of))
    _, actual = first_gradient(low(parts_of(backend, shape, ("reversible", {}))))
    assert away(actual, grads) < bound


@pytest.mark.long_in_jax
@pytest.mark.parametrize("backend", place.NAMES)
def test_reversible_layers_keep_nothing_of_their_depth(backend):
    shapes = [DEEP.model_copy(update={"layers": layers}) for layers in (4, 20)]
    parameters = [4 * shape.parameters() for shape in shapes]  # their gradients are made meanwhile
    low, high = (
        activations(backend, "reversible", (), shape) - size for shape, size in zip(shapes, parameters, strict=True)
    )
    assert high - low < 16 * 4 * DEEP.tokens * DEEP.width * 0.25  # a checkpoint keeps one hidden state a layer


@pytest.mark.long_in_jax
@pytest.mark.parametrize("backend", place.NAMES)
def test_reversible_layers_work_where_a_block_has_more_than_two_branches(backend):
    shape = TEMPORAL.probe(TEMPORAL.shape(network="jamba"))
    loss, grads = first_gradient(by_a_graph(parts_of(backend, shape, workload=TEMPORAL), branches))
    actual, found_grads = first_gradient(parts_of(backend, shape, ("reversible", {}), workload=TEMPORAL))
    assert actual == pytest.approx(loss, rel=1e-6)
    assert away(found_grads, grads) < 3e-6
    assert all(np.any(array) for array in grads.values())


NORMED = ["gemma-2-2b", "gemma-3-1b", "olmo-2-7b", "phi-3-mini", "pythia-70m"]
"""Published decoders whose blocks normalise or drop what a branch gives."""


@pytest.mark.parametrize("name", NORMED)
def test_blocks_that_treat_the_output_of_a_branch_are_reversible(name):
    pytest.importorskip("transformers", reason="needs the package transformers")
    causal = LOADED.workloads["causal_lm"]
    shape = causal.probe(causal.shape(config=name))
    parts = parts_of("torch", shape, workload=causal)
    state = parts.init(parts, None)
    x_BTD = parts.embed(parts, state["params"], torch.arange(2, 39)[None])
    f, g = branches(parts)
    for p in state["params"]["layers"]:
        mixed = x_BTD + f(p, x_BTD)
        whole = mixed + g(p, x_BTD if name == "pythia-70m" else mixed)  # its branches are side by side
        torch.testing.assert_close(whole, parts.block(parts, p, x_BTD))
    wide = drawn_in("float64", "torch")  # norms of what is small enlarge rounding
    loss, grads = first_gradient(wide(by_a_graph(parts, branches)))
    actual, found_grads = first_gradient(wide(parts_of("torch", shape, ("reversible", {}), workload=causal)))
    assert actual == pytest.approx(loss, rel=1e-12)
    assert away(found_grads, grads) < 1e-12


# Windows over the sequence

TOKENS = 23
LONG = SHAPE.model_copy(update={"tokens": TOKENS})


def windowed(backend, window, stride, merge, shape=LONG):
    return parts_of(backend, shape, ("sequence_windows", {"window": window, "stride": stride, "merge": merge}))


def merged_oracle(plain, ps, x_BTD, window, stride):
    """Window by window in numpy, token by token: the average and the maximum."""
    starts = [*range(0, TOKENS - window, stride), TOKENS - window]
    stack = compiled(plain)
    seen = [[] for _ in range(TOKENS)]
    for start in starts:
        y = stack(ps, x_BTD[:, start : start + window])
        y = np.asarray(y.detach() if isinstance(y, torch.Tensor) else y)
        for offset in range(window):
            seen[start + offset].append(y[:, offset])
    assert all(seen)
    return {"average": np.stack([np.mean(ys, 0) for ys in seen], 1), "max": np.stack([np.max(ys, 0) for ys in seen], 1)}


def compiled(parts):
    """Their stack, compiled in JAX."""
    stack = partial(parts.stack, parts)
    return jax.jit(stack) if parts.place.backend == "jax" else stack


@cache
def layers_of(backend):
    """The plain parts of longer rows, and the parameters of their layers."""
    plain = parts_of(backend, LONG)
    return plain, plain.init(plain, None)["params"]["layers"]


@pytest.mark.parametrize(("window", "stride"), [(8, 4), (8, 8), (7, 2), (10, 9), (22, 1)])
@pytest.mark.parametrize("backend", place.NAMES)
def test_overlapping_outputs_are_merged_token_by_token(backend, window, stride):
    plain, ps = layers_of(backend)
    # Far below zero, so that a maximum that started from zero would show.
    x = np.random.default_rng(0).normal(-30, 1, (2, TOKENS, LONG.width)).astype(np.float32)
    x = torch.from_numpy(x) if backend == "torch" else jnp.asarray(x)
    for merge, due in merged_oracle(plain, ps, x, window, stride).items():
        parts = windowed(backend, window, stride, merge)
        actual = compiled(parts)(ps, x)
        actual = np.asarray(actual.detach() if backend == "torch" else actual)
        np.testing.assert_allclose(actual, due, rtol=1e-5, atol=1e-5, err_msg=merge)


@pytest.mark.parametrize("merge", ["average", "max"])
def test_the_gradient_of_merged_windows_is_that_of_an_ordinary_graph(merge):
    parts, plain = windowed("torch", 8, 5, merge), parts_of("torch", LONG)
    ps = plain.init(plain, None)["params"]["layers"]
    weights = [leaf for _, leaf in tree.leaves(ps)]
    x = torch.randn(2, TOKENS, LONG.width, generator=torch.Generator().manual_seed(0), requires_grad=True)
    scale = torch.linspace(-1, 1, TOKENS)[:, None]
    actual = torch.autograd.grad((parts.stack(parts, ps, x) * scale).sum(), [x, *weights])

    start, filler = [0, 5, 10, 15], 0.0 if merge == "average" else -math.inf
    placed = torch.stack(
        [
            torch.nn.functional.pad(plain.stack(plain, ps, x[:, s : s + 8]), (0, 0, s, TOKENS - 8 - s), value=filler)
            for s in start
        ]
    )
    count = sum(((torch.arange(TOKENS) >= s) & (torch.arange(TOKENS) < s + 8)).float() for s in start)
    merged = placed.sum(0) / count[:, None] if merge == "average" else placed.amax(0)
    expected = torch.autograd.grad((merged * scale).sum(), [x, *weights])
    for answer, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(answer, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("merge", ["average", "max"])
def test_torch_and_jax_merge_alike_in_their_gradients(merge, stacked):
    loss, grads = first_gradient(windowed("jax", 8, 5, merge))
    due_loss, due = first_gradient(windowed("torch", 8, 5, merge))
    assert loss == pytest.approx(due_loss, rel=1e-5)
    due = stacked(due)
    assert grads.keys() == due.keys()
    for name, value in due.items():
        np.testing.assert_allclose(grads[name], value, rtol=1e-3, atol=1e-5 * np.abs(value).max(), err_msg=name)


@pytest.mark.parametrize("window", [TOKENS, 10_000])
@pytest.mark.parametrize("backend", place.NAMES)
def test_one_window_is_the_plain_stack_bit_for_bit(backend, window):
    loss, grads = first_gradient(parts_of(backend, LONG))
    actual, found_grads = first_gradient(windowed(backend, window, 1, "average"))
    assert actual == loss
    assert all(np.array_equal(found_grads[name], grads[name]) for name in grads)


@pytest.mark.long_in_jax
@pytest.mark.parametrize("backend", place.NAMES)
def test_activations_do_not_grow_with_the_sequence_but_for_outputs(backend):
    """Every token more costs some of its hidden states, in float32, and nothing that a layer saves."""
    knobs = (("window", 256), ("stride", 128))
    sizes = [Shape(layers=2, width=32, heads=2, hidden=128, vocabulary=2, tokens=T) for T in (512, 1024, 2048)]
    low, middle, high = (activations(backend, "sequence_windows", knobs, size) for size in sizes)
    hidden = 4 * 32
    assert (high - middle) / 1024 < 14 * hidden
    if backend == "torch":  # XLA's plain scores grow with the square, for another reason
        plain = [activations(backend, None, (), size) for size in sizes]
        assert (high - middle) < 0.1 * (plain[2] - plain[1])
    assert (high - middle) == pytest.approx(2 * (middle - low), rel=0.25)


def test_layers_are_recomputed_within_each_window():
    every, windows = ("checkpoint", {"every": 2}), ("sequence_windows", {"window": 8, "stride": 4})
    loss, grads = first_gradient(parts_of("torch", LONG, windows))
    actual, found_grads = first_gradient(parts_of("torch", LONG, every, windows))
    assert actual == loss and all(np.array_equal(found_grads[name], grads[name]) for name in grads)
    turned, _ = first_gradient(parts_of("torch", LONG, windows, every))
    assert turned != loss, "windows that are merged after every second layer make another network"


@pytest.mark.parametrize(
    ("knobs", "sentence"),
    [
        ({"window": 4, "stride": 5}, "stride must be from 1 to window"),
        ({"window": 4, "stride": 0}, "stride must be from 1 to window"),
        ({"window": 4, "stride": 2, "merge": "sum"}, "merge is 'sum'"),
    ],
)
@pytest.mark.parametrize("backend", place.NAMES)
def test_windows_that_leave_tokens_out_are_refused(backend, knobs, sentence):
    with pytest.raises(ValueError, match=sentence):
        parts_of(backend, LONG, ("sequence_windows", knobs))


# Windows as long as the memory allows


@pytest.mark.parametrize("square", [0.0, 0.5])
@pytest.mark.parametrize("available", [100_000, 3_000_000, 40_000_000])
def test_a_window_saves_its_share_of_the_memory_and_the_next_longer_one_more(available, square):
    def grown(tokens):
        return 50 * tokens + square * tokens**2

    window = chosen(lambda tokens: 7_000_000 + grown(tokens), 1, 1 << 20, available)
    assert grown(window) <= available / 2 < grown(2 * window)
    assert chosen(lambda tokens: 7_000_000, 100, 1 << 20, available) * 100 <= available / 2, "a checkpoint's inputs"
    assert chosen(grown, 1, 32, 1 << 40) == 32, "all of them fit"
    assert chosen(grown, 1, 1 << 20, 0) == 16, "however little there is"


@pytest.mark.long_in_jax
@pytest.mark.parametrize("backend", place.NAMES)
def test_the_window_that_is_chosen_is_one_of_sequence_windows(backend):
    loss, grads = first_gradient(windowed(backend, 16, 8, "average"))
    little = parts_of(backend, LONG, ("automatic_windows", {"available_gib": 1e-6}))
    actual, found_grads = first_gradient(little)
    assert (actual, little.notes["window"]) == (loss, "16 of 23 tokens, of 0 MiB available")
    assert all(np.array_equal(found_grads[name], grads[name]) for name in grads)
    plenty = parts_of(backend, LONG, ("automatic_windows", {"available_gib": 1.0}))
    assert first_gradient(plenty)[0] == first_gradient(parts_of(backend, LONG))[0]


@pytest.mark.parametrize(("free", "share", "reserved", "left"), [(3, 1.0, 0, 3), (40, 0.5, 30, 2), (0, 0.25, 20, 0)])
def test_on_a_gpu_a_window_follows_what_torch_may_still_take_of_it(monkeypatch, free, share, reserved, left):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free << 20, 64 << 20))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: share)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved << 20)
    assert window_on_a_gpu("torch", torch.zeros).endswith(f"tokens, of {left} MiB available")


def test_on_a_gpu_a_window_follows_what_jax_may_still_hand_out(monkeypatch):
    stats = {"bytes_limit": 5 << 20, "bytes_in_use": 2 << 20}
    monkeypatch.setattr(jax, "devices", lambda *_: [SimpleNamespace(memory_stats=lambda: stats)])
    assert window_on_a_gpu("jax", jnp.zeros).endswith("tokens, of 3 MiB available")


def window_on_a_gpu(backend, zeros):
    """Return what is noted of the window where the place is said to be a GPU."""
    parts = parts_of(backend, LONG, ("automatic_windows", {}))
    layers = parts.init(parts, None)["params"]["layers"]
    on_gpu = replace(parts, place=Place(backend, "cuda"))
    on_gpu.stack(on_gpu, layers, zeros((2, TOKENS, 32)))
    return on_gpu.notes["window"]


@pytest.mark.parametrize(("knobs", "reason"), [({}, UNKNOWN), ({"available_gib": 1.0}, None)], ids=["free", "given"])
def test_a_window_on_a_gpu_that_need_not_be_there_is_predicted_where_the_memory_is_given(knobs, reason):
    case = Case(
        workload="decoder",
        shape=LONG.model_dump(),
        place="torch/cuda",
        corpus="drawn",
        tokenizer="none",
        strategies=(Applied(name="automatic_windows", knobs=knobs),),
    )
    asked = Task(kind="predict", cases=(case,), run_id="", parent=0, folder="", steps=2)
    record = prediction.measure(asked, LOADED, backends.load("torch"))
    assert record.missing.get("predicted_peak_bytes") == reason
    assert (record.prediction.predicted_peak_bytes is None) == bool(reason)


def test_where_jax_sees_no_gpu_its_free_memory_is_not_known(monkeypatch):
    def absent(*_):
        raise RuntimeError("no GPU")

    monkeypatch.setattr(jax, "devices", absent)
    with pytest.raises(Unpredictable, match="give available_gib"):
        window_on_a_gpu("jax", jnp.zeros)


@pytest.mark.long
@pytest.mark.parametrize("backend", place.NAMES)
def test_more_memory_gives_longer_windows_that_stay_within_it(backend):
    shape = Shape(layers=4, width=32, heads=2, hidden=128, vocabulary=2, tokens=4096)
    windows = []
    for mib in (8, 32):
        parts = parts_of(backend, shape, ("automatic_windows", {"available_gib": mib / 1024}))
        first_gradient(parts)
        windows.append(int(parts.notes["window"].split()[0].replace(",", "")))
        outputs = 14 * 4 * 32 * 4096  # of all windows, as above
        assert activations(backend, "automatic_windows", (("available_gib", mib / 1024),), shape) - outputs < mib << 20
    assert 16 < windows[0] < windows[1] < 4096
