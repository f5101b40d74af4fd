"""Scoring with a cache gives, token by token, the losses of one forward pass over whole rows."""

from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from pydantic import ValidationError

from harness import Place, backends
from harness.contract import plugins
from harness.contract.data import IGNORED
from harness.contract.loop import training
from harness.contract.place import NAMES
from harness.records import Case
from harness.worker import numerics
from harness.workloads import decoder, scoring
from harness.workloads.scoring import PRESETS, Shape

on_torch, on_jax = (import_module(f"harness.workloads.scoring._{name}") for name in ("torch", "jax"))
BUILD = {
    "torch": partial(on_torch.build, place=Place("torch", "cpu"), corpus=None),
    "jax": partial(on_jax.build, place=Place("jax", "cpu"), corpus=None),
}
WHOLE = {name: import_module(f"harness.workloads.decoder._{name}").build for name in NAMES}
PROBES = {
    name: scoring.probe(Shape(**PRESETS[name]))
    for name in ("pythia-70m", "pythia-70m-learned", "qwen3-4b", "llama-3-8b")
}
SMALL = scoring.probe(Shape(**PRESETS["llama-3-8b"]))


def sharp(parts):
    """Draw larger parameters: as they are drawn first, attention is nearly even, and no position matters."""
    inner = parts.draw

    def draw(parts, name, shape, deviation):
        return inner(parts, name, shape, 10 * deviation if deviation > 0 else deviation)

    return replace(parts, draw=draw)


def scored(backend, shape, steps=1, parts=None):
    """The losses, and what was observed last."""
    module = backends.load(backend)
    parts = sharp(parts or BUILD[backend](shape))
    turns = list(islice(training(parts, module.prepare(parts), finish=lambda outputs: outputs), steps))
    observed = {name: array for name, (array, _) in module.arrays(turns[-1][1][0]["observed"]).items()}
    return [float(loss) for loss, _ in turns], observed


@cache
def whole(backend, preset, **changes):
    """Losses [B, T] and last logits [B, V] of one forward pass of the decoder over whole rows."""
    module, shape = backends.load(backend), PROBES[preset].model_copy(update=changes)
    plain = decoder.Shape(**shape.model_dump(exclude={"prompt"}))
    parts = sharp(WHOLE[backend](plain, Place(backend, "cpu"), None))
    taken = []
    parts = replace(parts, loss=lambda parts, x_BTD, w_VD, y_BT: taken.append(x_BTD @ w_VD.T) or x_BTD.sum())
    x, y = next(parts.batches(parts, parts.windows(parts, parts.source(parts))))
    import_module(f"harness.workloads.decoder._{backend}").forward(parts, parts.init(parts)["params"], x, y)
    logits_BTV = module.arrays({"logits": taken[0]})["logits"][0].astype(np.float64)
    if shape.soft_cap:
        logits_BTV = shape.soft_cap * np.tanh(logits_BTV / shape.soft_cap)
    picked_BT = np.take_along_axis(logits_BTV, np.asarray(y)[..., None], -1)[..., 0]
    return np.log(np.exp(logits_BTV).sum(-1)) - picked_BT, logits_BTV[:, -1]


PROMPTS = [(preset, prompt, "torch") for preset in PROBES for prompt in (1, 13, 36)]
PROMPTS += [(preset, 13, "jax") for preset in PROBES] + [("llama-3-8b", prompt, "jax") for prompt in (1, 36)]
"""In JAX, which compiles for each, all prompts of one preset alone."""


@pytest.mark.parametrize(("preset", "prompt", "backend"), PROMPTS)
def test_every_token_has_the_loss_of_one_forward_pass(preset, prompt, backend):
    shape = PROBES[preset].model_copy(update={"prompt": prompt})
    [loss], observed = scored(backend, shape)
    losses_BT, logits_BV = whole(backend, preset)
    np.testing.assert_allclose(observed["losses"], losses_BT[:, prompt:], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(observed["logits"], logits_BV, rtol=1e-4, atol=1e-4)
    assert loss == pytest.approx(losses_BT[:, prompt:].mean(), rel=1e-5)
    assert observed["losses"].shape == (3, 37 - prompt) and np.std(observed["losses"]) > 0.01


@pytest.mark.parametrize("backend", NAMES)
def test_logits_are_bent_as_those_of_the_decoder(backend):
    shape = SMALL.model_copy(update={"soft_cap": 1.0})
    _, observed = scored(backend, shape)
    _, logits_BV = whole(backend, "llama-3-8b", soft_cap=1.0)
    np.testing.assert_allclose(observed["logits"], logits_BV, rtol=1e-4, atol=1e-4)
    assert 0.8 < np.abs(observed["logits"]).max() <= 1.0


def test_torch_and_jax_give_the_same_losses():
    actual, _ = scored("torch", SMALL, 4)
    assert scored("jax", SMALL, 4)[0] == pytest.approx(actual, rel=1e-5)
    assert len(set(actual)) == 4, "each step scores rows of its own"


@pytest.mark.parametrize("backend", NAMES)
def test_a_row_knows_nothing_of_the_one_before(backend):
    """The cache is filled anew: rows score the same whatever was in it."""
    parts = BUILD[backend](SMALL)
    batches = parts.batches(parts, parts.windows(parts, parts.source(parts)))
    first, other = next(batches), next(batches)
    again = replace(parts, batches=lambda parts, windows: iter([other, first]))
    losses, _ = scored(backend, SMALL, 2, again)
    alone, _ = scored(backend, SMALL)
    assert losses[1] == alone[0] != losses[0]


@pytest.mark.parametrize("backend", NAMES)
def test_ignored_targets_are_left_out_of_the_mean(backend):
    module, parts = backends.load(backend), sharp(BUILD[backend](SMALL))
    x, y = next(parts.batches(parts, parts.windows(parts, parts.source(parts))))
    y = np.asarray(y)
    cut, none = y.copy(), y.copy()
    cut[0, SMALL.prompt + 1 :], none[:] = IGNORED, IGNORED

    def step(y):
        like = torch.from_numpy(y) if backend == "torch" else jnp.asarray(y)
        state, loss = parts.step(parts, parts.init(parts), x, like)
        return module.arrays({"losses": state["observed"]["losses"]})["losses"][0], float(loss)

    losses, _ = step(y)
    storage = cut[:, SMALL.prompt :] != IGNORED
    seen, mean = step(cut)
    np.testing.assert_allclose(seen, np.where(storage, losses, 0), rtol=1e-6)
    assert mean == pytest.approx(losses[storage].mean(), rel=1e-6)
    assert step(none)[1] == 0.0


@pytest.mark.parametrize("backend", NAMES)
def test_nothing_is_trained(backend):
    module, parts = backends.load(backend), BUILD[backend](SMALL)
    before = module.arrays(parts.init(parts)["params"])
    for _, (state, _) in islice(training(parts, module.prepare(parts), finish=lambda outputs: outputs), 2):
        after = module.arrays(state["params"])
    assert all(np.array_equal(before[name][0], after[name][0]) for name in before)
    assert state.keys() == {"params", "kept", "observed"}, "no moments"


# The untouched caches


def rows_of(count, seed=0):
    """New keys and values [B, T, G, K]."""
    random = np.random.Generator(np.random.Philox(key=seed))
    return random.standard_normal((2, 2, count, 2, 4), np.float32)


def kept_over(backend, pieces, tokens):
    """What a cache gives for the last of some pieces, and all that was put into it."""
    asarray = torch.from_numpy if backend == "torch" else jnp.asarray
    shape = Shape(layers=2, width=8, heads=2, batch=2, tokens=tokens, prompt=1)
    parts = BUILD[backend](shape)
    empty, append = parts.cache(parts, 2, tokens, asarray(np.zeros(1, np.float32)))
    storage, put, position = empty(), [], 0
    for count in pieces:
        new = rows_of(count, position)
        put.append(new)
        for layer in range(2):
            storage, k, v, seen = append(storage, layer, position, *map(asarray, new * (layer + 1)))
        position += count
    return np.stack([np.asarray(k), np.asarray(v)]), np.concatenate(put, 2) * 2, seen


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("pieces", [(1, 1, 1), (3, 1, 2), (6,)])
def test_a_cache_gives_everything_that_was_put_in_in_order(pieces, backend):
    actual, due, seen = kept_over(backend, pieces, 6)
    assert np.array_equal(actual, due) and seen is None


def test_writing_beyond_the_end_raises_and_gives_nan_where_the_position_is_traced():
    with pytest.raises(ValueError, match="holds 5 tokens, and token 6 is written"):
        kept_over("jax", (5, 1), 5)
    parts = BUILD["jax"](Shape(layers=1, width=8, heads=2, batch=2, tokens=5, prompt=1))
    empty, append = parts.cache(parts, 2, 5, jnp.zeros(1))
    k, v = map(jnp.asarray, rows_of(1))
    write = jax.jit(lambda position: append(empty(), 0, position, k, v)[1])
    assert not jnp.isnan(write(4)).any() and jnp.isnan(write(5)).any()


def test_jax_holds_one_cache_through_the_loop_over_tokens():
    """Donated and written in place: neither the state nor the loop brings a second one."""
    shape = Shape(layers=4, width=64, heads=4, vocabulary=64, batch=8, tokens=1024, prompt=8)
    module, parts = backends.load("jax"), BUILD["jax"](shape)
    abstract = replace(parts, draw=module.abstract_draw)
    analysis = module.lowered(parts, module.like(scoring.decoder.abstract_batch(shape)), abstract).compile()
    analysis = analysis.memory_analysis()
    size = 4 * shape.cache_numbers
    assert analysis.alias_size_in_bytes >= size
    assert analysis.temp_size_in_bytes < 0.75 * size, "keys and values of a layer, twice, and no second cache"


# Attention of one token


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_attention_is_the_softmax_over_the_keys_that_are_seen(device, masked, count, backend):
    random = np.random.Generator(np.random.Philox(key=1))
    q, k, v = (random.standard_normal((2, n, heads, 8), np.float32) for n, heads in ((count, 4), (7, 2), (7, 2)))
    seen = np.arange(7) <= np.arange(7 - count, 7)[:, None]
    if masked:
        seen &= np.arange(7) != 2
    scores = np.einsum("bthk,bshk->bhts", q, k.repeat(2, axis=2)) / 8**0.5
    shares = np.exp(np.where(seen, scores, -np.inf))
    due = np.einsum("bhts,bshk->bthk", shares / shares.sum(-1, keepdims=True), v.repeat(2, axis=2))
    if backend == "torch":
        q, k, v = map(torch.from_numpy, (q, k, v))
        actual = on_torch.attention(Place(backend, device), q, k, v, torch.from_numpy(seen) if masked else None)
    else:
        actual = on_jax.attention(q, k, v, 7 - count, jnp.asarray(seen) if masked else None)
    np.testing.assert_allclose(actual, due, rtol=1e-4, atol=1e-5)


# Shapes, floor, prediction, answers


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"tokens": 64, "prompt": 64}, "a prompt of 64 leaves nothing of 64 tokens"),
        ({"prompt": 0}, "prompt\n.*greater than or equal to 1"),
        ({"ignored": 0.1}, "ignored is of training"),
        ({"label_smoothing": 0.1}, "label_smoothing is of training"),
        ({"learning_rate": 0.1}, "learning_rate is of training"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_in_words(sizes, sentence):
    with pytest.raises(ValidationError, match=sentence):
        Shape(**sizes)


def test_every_preset_is_a_shape_and_survives_its_own_dump():
    for sizes in PRESETS.values():
        shape = Shape(**sizes)
        for each in (shape, scoring.tiny(shape), scoring.probe(shape)):
            assert Shape.model_validate(each.model_dump()) == each


@cache
def loaded():
    return plugins.load()


def test_the_throughput_counts_the_tokens_that_go_one_by_one():
    workload = loaded().workloads["scoring"]
    assert workload.tokens_per_step(Shape(batch=3, tokens=100, prompt=40)) == 180


@pytest.mark.long
@pytest.mark.parametrize("backend", NAMES)
def test_the_predicted_peak_is_the_floor_and_little_more(backend):
    workload, module = loaded().workloads["scoring"], backends.load(backend)
    shape = Shape(layers=4, width=128, heads=4, vocabulary=512, batch=8, tokens=96, prompt=16)
    parts = replace(BUILD[backend](shape), draw=module.abstract_draw)
    place = Place(backend, "cpu")
    peaks = module.predict(lambda: parts, place, workload.abstract_batch(shape), 0, 2).peaks
    assert workload.floor(shape) < max(peaks.values()) < 2.5 * workload.floor(shape)


@pytest.mark.parametrize("backend", NAMES)
def test_answers_compare_losses_and_logits(backend):
    module = backends.load(backend)
    module.start(Place(backend, "cpu"))
    case = Case(
        workload="scoring",
        shape=SMALL.model_dump(),
        place=f"{backend}/cpu",
        corpus="drawn",
        tokenizer="none",
    )
    actual = numerics.observer(loaded(), case, module, updates=2)(0)
    assert actual.gradients["losses"].shape == (3, 24) and actual.gradients["logits"].shape == (3, 67)
    assert len(actual.trajectory) == 2
