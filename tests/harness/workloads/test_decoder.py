"""The decoder is the same model in torch and in JAX, of the published sizes, trained by AdamW on aligned windows."""

from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from pydantic import ValidationError

from harness import Parts, Place, Source, backends, tree
from harness.contract import place, plugins
from harness.contract.data import IGNORED, windows_in
from harness.contract.loop import training
from harness.workloads import decoder
from harness.workloads.data import rows
from harness.workloads.decoder import PRESETS, Shape

on_torch, on_jax = (import_module(f"harness.workloads.decoder._{name}") for name in ("torch", "jax"))
TORCH, JAX = Place("torch", "cpu"), Place("jax", "cpu")
BUILD = {
    "torch": partial(on_torch.build, place=TORCH, corpus=None),
    "jax": partial(on_jax.build, place=JAX, corpus=None),
}
SMALL = Shape(layers=2, width=16, heads=2, hidden=24, vocabulary=29, batch=2, tokens=11)


def losses(backend, shape, steps=4):
    module = backends.load(backend)
    parts = BUILD[backend](shape)
    loop = training(parts, module.prepare(parts), finish=module.wait)
    return [float(loss) for loss, _ in islice(loop, steps)]


def test_the_plugin_offers_functions_also_after_its_modules_were_imported():
    """A submodule takes the place of a function of the same name in its package."""
    assert all(callable(build) for build in plugins.load().workloads["decoder"].on.values())


# One model in two frameworks


PROBES = {
    name: decoder.probe(Shape(**PRESETS[name]))
    for name in ("pythia-70m", "pythia-70m-learned", "qwen3-4b", "llama-3-8b")
}


@pytest.mark.parametrize("shape", [*PROBES.values(), Shape(**PRESETS["tiny"])], ids=[*PROBES, "tiny"])
def test_torch_and_jax_give_the_same_losses(shape):
    actual = losses("torch", shape)
    assert losses("jax", shape) == pytest.approx(actual, rel=1e-5)
    assert actual[0] == pytest.approx(np.log(shape.vocabulary), rel=0.05), "untrained, it knows nothing"
    assert len(set(actual)) == 4


def test_probes_keep_what_makes_each_model_different():
    assert PROBES["pythia-70m"].parallel and PROBES["pythia-70m"].norm == "layer" and PROBES["pythia-70m"].bias
    assert PROBES["pythia-70m-learned"].positions == "learned"
    assert PROBES["qwen3-4b"].tied and PROBES["qwen3-4b"].query_key_norm
    assert PROBES["llama-3-8b"].key_heads < PROBES["llama-3-8b"].heads
    assert all(shape.ignored > 0 for shape in PROBES.values())


def test_the_trained_tokens_and_the_first_parameters_follow_the_seed():
    ids = [BUILD["torch"](SMALL, seed=seed) for seed in (0, 0, 1)]
    first, again, other = (parts.source(parts).inputs for parts in ids)
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    first, again, other = (parts.init(parts)["params"]["embed"] for parts in ids)
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("pythia-70m", 70_426_624),
        ("pythia-70m-learned", 70_426_624 + 2048 * 512),
        ("llama-3-8b", 8_030_261_248),
        ("qwen3-4b", 4_022_468_096),
    ],
)
def test_presets_have_the_published_parameter_counts(name, count):
    assert Shape(**PRESETS[name]).parameters() == count


@pytest.mark.parametrize("backend", place.NAMES)
@pytest.mark.parametrize("shape", [SMALL, *PROBES.values()], ids=["small", *PROBES])
def test_the_count_is_that_of_the_arrays_made(backend, shape):
    parts = BUILD[backend](shape)
    arrays = backends.load(backend).arrays(parts.init(parts)["params"])
    assert sum(array.size for array, _ in arrays.values()) == shape.parameters()


# Rotary positions


def test_the_rotary_table_grows_and_keeps_its_old_values():
    table = on_torch.RotaryTable(8, 10_000.0)
    like = torch.zeros(1)
    short = [part.clone() for part in table((slice(0, 5),), like)]
    long = table((slice(0, 300),), like)
    assert [part.shape for part in long] == [(300, 4)] * 2
    for before, after in zip(short, long, strict=True):
        assert torch.equal(before, after[:5])
    assert torch.equal(table((slice(0, 5),), like)[0], short[0])
    angle = torch.tensor(299.0, dtype=torch.float64) * 10_000.0 ** (-torch.arange(0, 8, 2).double() / 8)
    torch.testing.assert_close(long[0][299].double(), angle.cos(), rtol=0, atol=1e-7)
    torch.testing.assert_close(long[1][299].double(), angle.sin(), rtol=0, atol=1e-7)


def test_the_rotary_table_is_made_where_its_input_is():
    table = on_torch.RotaryTable(8, 10_000.0)
    for like in (torch.zeros(1), torch.zeros(1, device="meta"), torch.zeros(1, dtype=torch.float64)):
        for part in table((slice(0, 7),), like):
            assert (part.device, part.dtype) == (like.device, like.dtype)
    assert table((slice(0, 7),), torch.zeros(1))[0].device.type == "cpu", "another device must not take its place"


def test_positions_beyond_256_stay_distinct_under_bfloat16():
    tables = [
        on_torch.RotaryTable(8, 10_000.0)((slice(0, 2048),), torch.zeros(1, dtype=torch.bfloat16)),
        on_jax.rotary_table(SMALL, (slice(0, 2048),), jnp.zeros(1, jnp.bfloat16)),
    ]
    for cos, sin in tables:
        assert str(cos.dtype).endswith("float32") and str(sin.dtype).endswith("float32")
        assert len(np.unique(np.concatenate([cos, sin], 1), axis=0)) == 2048


def test_rotation_depends_on_the_distance_alone_and_keeps_the_dtype():
    cos, sin = on_torch.RotaryTable(8, 10_000.0)((slice(0, 600),), torch.zeros(1, dtype=torch.float64))
    q, k = (torch.randn(1, 1, 1, 12, dtype=torch.float64).expand(1, 1, 600, 12) for _ in range(2))
    q, k = on_torch.turn(q, cos, sin, 8), on_torch.turn(k, cos, sin, 8)
    scores = (q[0, 0, 5:] * k[0, 0, :-5]).sum(-1)
    torch.testing.assert_close(scores, scores[:1].expand(595))
    half = on_torch.turn(torch.ones(1, 1, 600, 12, dtype=torch.bfloat16), cos.float(), sin.float(), 8)
    assert half.dtype == torch.bfloat16
    assert (half[..., 8:] == 1).all(), "the rest of a head is not rotated"


def test_a_token_sees_only_those_before_it():
    parts = BUILD["torch"](SMALL)
    params = parts.init(parts)["params"]
    x = torch.randn(1, 11, 16, requires_grad=True)
    parts.stack(parts, params["layers"], x)[0, 4].sum().backward()
    assert (x.grad[0, 5:] == 0).all() and (x.grad[0, :5] != 0).any(1).all()


# AdamW


def random_gradients(params, seed):
    random = torch.Generator().manual_seed(seed)
    return tree.mapped(lambda p: torch.randn(p.shape, generator=random), params)


@pytest.mark.parametrize("backend", place.NAMES)
def test_adamw_is_that_of_torch_over_ten_steps(backend):
    """The step counter, the bias corrections and the order of the decay."""
    shape = SMALL.model_copy(update={"learning_rate": 3e-2, "weight_decay": 0.3})
    own, parts = BUILD["torch"](shape), BUILD[backend](shape)
    truth = own.init(own)["params"]
    leaves = [leaf for _, leaf in tree.leaves(truth)]
    due = torch.optim.AdamW(leaves, lr=3e-2, weight_decay=0.3, foreach=False)
    state = parts.init(parts)
    for number in range(10):
        grads = random_gradients(truth, number)
        for leaf, (_, grad) in zip(leaves, tree.leaves(grads), strict=True):
            leaf.grad = grad
        due.step()
        state = parts.update(parts, state, grads if backend == "torch" else stacked(grads))
    module = backends.load(backend)
    actual, wanted = (module.arrays(p) for p in (state["params"], truth if backend == "torch" else stacked(truth)))
    assert actual.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_allclose(actual[name][0], wanted[name][0], rtol=2e-5, atol=1e-6, err_msg=name)
    assert int(state["steps"]) == 10


def stacked(params):
    """The layers of a torch tree on top of each other, as the JAX scan takes them."""
    layers = {name: torch.stack([layer[name] for layer in params["layers"]]) for name in params["layers"][0]}
    return tree.mapped(lambda leaf: jnp.asarray(leaf.detach().numpy()), {**params, "layers": layers})


# Loss and head


def hidden(seed=0):
    random = np.random.Generator(np.random.Philox(key=seed))
    x, w = random.standard_normal((2, 9, 5), np.float32), random.standard_normal((13, 5), np.float32)
    return x, w, random.integers(0, 13, (2, 9))


def test_ignored_targets_add_nothing():
    x, w, y = hidden()
    y[0, :4] = y[1, 8] = rows.IGNORED
    counted = y.reshape(-1) != rows.IGNORED
    logits = x.reshape(-1, 5).astype(np.float64) @ w.T
    due = np.mean((np.log(np.exp(logits).sum(1)))[counted] - logits[counted, y.reshape(-1)[counted]])

    parts = BUILD["torch"](SMALL)
    x_torch = torch.from_numpy(x).requires_grad_()
    actual = parts.loss(parts, x_torch, torch.from_numpy(w), torch.from_numpy(y))
    actual.backward()
    assert actual.item() == pytest.approx(due, rel=1e-6)
    zero = (x_torch.grad.reshape(-1, 5) == 0).all(1).numpy()
    assert np.array_equal(zero, ~counted)

    parts = BUILD["jax"](SMALL)
    value, grad = jax.value_and_grad(lambda x: parts.loss(parts, x, jnp.asarray(w), jnp.asarray(y)))(jnp.asarray(x))
    assert float(value) == pytest.approx(due, rel=1e-6)
    np.testing.assert_allclose(grad, x_torch.grad, atol=1e-6)
    assert np.array_equal(np.all(np.asarray(grad).reshape(-1, 5) == 0, axis=1), ~counted)


@pytest.mark.long_in_jax
@pytest.mark.parametrize("backend", place.NAMES)
def test_the_gradient_of_a_tied_head_is_the_sum_of_both_uses(backend):
    module = backends.load(backend)
    actual = {}
    for tied in (True, False):
        parts = BUILD[backend](SMALL.model_copy(update={"tied": tied}))
        parts = replace(parts, draw=partial(same_for_head, parts.draw))
        state = parts.init(parts)
        x, y = next(parts.batches(parts, parts.windows(parts, parts.source(parts))))
        _, grads = parts.grad(parts, state, x, y)
        actual[tied] = {name: array for name, (array, _) in module.arrays(grads).items()}
    assert "head" not in actual[True]
    both = actual[False]["embed"] + actual[False]["head"]
    np.testing.assert_allclose(actual[True]["embed"], both, rtol=1e-5, atol=1e-7)
    assert np.abs(actual[False]["embed"]).max() > 1e-4 and np.abs(actual[False]["head"]).max() > 1e-4


def same_for_head(inner, parts, name, shape, deviation):
    return inner(parts, "embed" if name == "head" else name, shape, deviation)


# Shapes


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"width": 50, "heads": 4}, "width 50 is not a multiple of heads 4"),
        ({"heads": 4, "kv_heads": 3}, "heads 4 is not a multiple of kv_heads 3"),
        ({"width": 4, "heads": 4}, "too narrow for rotary positions"),
        ({"stride": 0}, "stride\n.*greater than or equal to 1"),
        ({"tokens": 0}, "tokens\n.*greater than or equal to 1"),
        ({"ignored": 1.0}, "ignored\n.*less than 1"),
        ({"layers": 10**9}, "layers\n.*less than or equal to 1000"),
        ({"layers": "4"}, "layers\n.*valid integer"),
        ({"depth": 4}, "depth\n.*not permitted"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_in_words(sizes, sentence):
    with pytest.raises(ValidationError, match=sentence):
        Shape(**sizes)


# Windows, sources and batches


def test_windows_are_counted_as_by_walking_over_the_rows():
    for rows_n in range(1, 41):
        for window in range(1, 9):
            for stride in range(1, 9):
                starts = [s for s in range(0, rows_n, stride) if s + window <= rows_n]
                if not starts:
                    with pytest.raises(ValueError, match=f"window of {window} is longer than the {rows_n} rows"):
                        windows_in(rows_n, window, stride)
                else:
                    assert windows_in(rows_n, window, stride) == len(starts)


def test_the_row_that_a_target_needs_is_not_counted_as_a_window():
    ids = np.arange(129)
    assert windows_in(128, 64, 65) == 1
    assert Source(ids[:-1], ids[1:], 64, 65, batch=1).count == 1


@pytest.mark.parametrize(("window", "stride"), [(0, 1), (-1, 1), (1, 0), (1, -3)])
def test_windows_without_length_or_progress_are_refused(window, stride):
    with pytest.raises(ValueError, match=f"at least 1, not {window} and {stride}"):
        windows_in(10, window, stride)
    with pytest.raises(ValueError, match="at least 1"):
        Source(np.arange(10), np.arange(10), window, stride, batch=1)


def test_a_source_refuses_inputs_and_targets_that_do_not_align():
    with pytest.raises(ValueError, match="10 inputs but 9 targets: they must be aligned"):
        Source(np.arange(10), np.arange(9), 2, 1, batch=1)


@pytest.mark.parametrize("stride", [None, 1, 4, 7, 13])
def test_a_target_is_the_next_input_in_every_window(stride):
    parts = BUILD["torch"](SMALL.model_copy(update={"stride": stride}))
    source = parts.source(parts)
    windows = parts.windows(parts, source)
    x, y = windows.batch(np.arange(len(windows)))
    assert x.shape == y.shape == (len(windows), 11)
    assert np.array_equal(x[:, 1:], y[:, :-1])
    starts = np.arange(len(windows)) * source.stride
    assert np.array_equal(y[:, -1], source.targets[starts + 10])
    assert np.array_equal(y[:-1, -1], source.inputs[starts[:-1] + 11])
    assert starts[-1] + source.window <= len(source.inputs) < starts[-1] + source.stride + source.window


def numbered(count, batch, **settings):
    return Source(np.arange(count), np.arange(count), 1, 1, batch, **settings)


def indices_of(source):
    return rows.indices(Parts(None, Place("torch", "cpu"), order=rows.order), source)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("batch", [1, 3, 4, 10])
def test_an_epoch_covers_every_window_once_but_the_ragged_last_batch(batch, shuffle):
    source = numbered(10, batch, shuffle=shuffle, seed=5)
    per_epoch = 10 // batch
    taken = list(islice(indices_of(source), 3 * per_epoch))
    assert {len(indices) for indices in taken} == {batch}
    for epoch in range(3):
        seen = np.concatenate(taken[epoch * per_epoch : (epoch + 1) * per_epoch])
        assert len(set(seen.tolist())) == per_epoch * batch and set(seen.tolist()) <= set(range(10))
        if not shuffle:
            assert seen.tolist() == list(range(per_epoch * batch))


def test_the_order_follows_the_seed_and_the_epoch():
    first, again, other = (
        [batch.tolist() for batch in islice(indices_of(numbered(40, 40, shuffle=True, seed=seed)), 2)]
        for seed in (3, 3, 4)
    )
    assert first == again != other
    assert first[0] != first[1] and first[0] != sorted(first[0])


@pytest.mark.parametrize("start", [0, 1, 3, 4, 11])
def test_a_source_that_was_read_before_goes_on_where_it_ended(start):
    settings = {"shuffle": True, "seed": 2}
    whole = [batch.tolist() for batch in islice(indices_of(numbered(13, 4, **settings)), 14)]
    rest = [batch.tolist() for batch in islice(indices_of(numbered(13, 4, **settings, start=start)), 14 - start)]
    assert rest == whole[start:]


def test_a_source_of_less_than_a_batch_is_refused():
    with pytest.raises(ValueError, match="holds 3 windows, fewer than one batch of 4"):
        next(indices_of(numbered(3, 4)))


@pytest.mark.parametrize("name", [None, "fused_loss", "cut_loss", "chunked_loss", "chunked_backward_loss"])
@pytest.mark.parametrize("backend", place.NAMES)
def test_a_bias_of_the_head_is_added_to_the_logits_and_gets_the_sum_of_their_gradients(backend, name):
    """A bias of 3 for one word and none for the others, against logits and a bias apart, in torch and float64."""
    shape = SMALL.model_copy(update={"head_bias": True, "ignored": 0.2})
    parts = BUILD[backend](shape)
    if name is not None:
        parts = plugins.load().strategies[name].on[backend](parts)
    random = np.random.Generator(np.random.Philox(key=5))
    x = random.standard_normal((2, 11, 16)).astype(np.float32)
    head = random.standard_normal((29, 17)).astype(np.float32)
    head[:, -1] = np.eye(29)[4] * 3
    y = random.integers(0, 29, (2, 11))
    y[0, 3:6] = -100
    x_64, w_64, b_64 = (torch.from_numpy(each).double().requires_grad_() for each in (x, head[:, :-1], head[:, -1]))
    ones = on_torch.normalise(shape, x_64, {"norm": torch.ones(16)}, "norm")
    logits = ones.reshape(-1, 16) @ w_64.T + b_64
    due = torch.nn.functional.cross_entropy(logits, torch.from_numpy(y).reshape(-1), ignore_index=-100)
    of_w, of_b = torch.autograd.grad(due, (w_64, b_64))
    if backend == "torch":
        own = torch.from_numpy(head).requires_grad_()
        for_head = on_torch.for_head(shape, {"norm": torch.ones(16)}, torch.from_numpy(x))
        value = parts.loss(parts, for_head, own, torch.from_numpy(y))
        (grad,) = torch.autograd.grad(value, own)
    else:
        for_head = on_jax.for_head(shape, {"norm": jnp.ones(16)}, jnp.asarray(x))
        value, grad = jax.value_and_grad(lambda w: parts.loss(parts, for_head, w, jnp.asarray(y)))(jnp.asarray(head))
    assert np.asarray(value if backend == "jax" else value.detach()) == pytest.approx(due.item(), rel=1e-5)
    np.testing.assert_allclose(np.asarray(grad)[:, :-1], of_w, atol=1e-6)
    np.testing.assert_allclose(np.asarray(grad)[:, -1], of_b, atol=1e-6)


def test_a_head_with_a_bias_has_one_column_more_and_is_no_embedding():
    assert Shape(head_bias=True).parameters() == Shape().parameters() + Shape().vocabulary
    with pytest.raises(ValidationError, match="leave out tied or head_bias"):
        Shape(head_bias=True, tied=True)


@pytest.mark.parametrize("backend", place.NAMES)
def test_a_decoder_with_a_bias_of_the_head_trains(backend):
    assert len(set(losses(backend, SMALL.model_copy(update={"head_bias": True}), 3))) == 3


@pytest.mark.parametrize("keep", [True, False])
def test_a_batch_without_a_counted_target_adds_nothing_to_an_evaluation(keep):
    parts = BUILD["torch"](SMALL)
    state = parts.init(parts)
    x, y = next(parts.batches(parts, parts.windows(parts, parts.source(parts))))
    loss = parts.evaluate(parts, state, [(x, y), (x, torch.full_like(y, IGNORED))], keep)
    assert float(loss) == pytest.approx(float(parts.evaluate(parts, state, [(x, y)])), rel=1e-6)


def test_a_corpus_holds_at_least_one_batch():
    sizes = {"tokens": 64, "stride": 32, "batch": 4}
    assert Shape(**sizes, corpus_tokens=64 + 3 * 32 + 1).corpus_tokens == 161
    with pytest.raises(ValidationError, match="corpus_tokens 160 hold no batch of 4 windows: give 161 or more"):
        Shape(**sizes, corpus_tokens=160)
    with pytest.raises(ValidationError, match="give 2,049 or more"):
        Shape(tokens=2048, corpus_tokens=1000)
