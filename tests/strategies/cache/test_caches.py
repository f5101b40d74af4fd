"""Caches give what was put into them, or say how much of it; they end where they end, and leave no file behind."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from harness import Place, backends, mapped_files
from harness.contract import plugins
from harness.contract.assembly import assemble
from harness.contract.loop import training
from harness.contract.place import NAMES
from harness.records import Applied, Case
from strategies.cache import int8_cache, mapped_cache, offloaded_cache, window_cache

LOADED = plugins.load()
SCORING = LOADED.workloads["scoring"]
EXACT = [
    ("torch", "preallocated_cache", {}),
    ("torch", "preallocated_cache", {"capacity": 50}),
    ("torch", "paged_cache", {"block": 1}),
    ("torch", "paged_cache", {"block": 5}),
    ("torch", "paged_cache", {"block": 64}),
    ("torch", "mapped_cache", {}),
    ("jax", "preallocated_cache", {"capacity": 50}),
]
ASARRAY = {"torch": torch.from_numpy, "jax": jnp.asarray}


def parts_of(backend, *applied, **shape):
    sizes = SCORING.probe(SCORING.shape(kv_heads=2)).model_dump() | shape
    case = Case(
        workload="scoring",
        shape=sizes,
        place=f"{backend}/cpu",
        corpus="drawn",
        tokenizer="none",
        strategies=tuple(Applied(name=name, knobs=knobs) for name, knobs in applied),
    )
    return assemble(LOADED, case, draw=sharp)


def sharp(inner):
    """Draw larger parameters: as they are drawn first, attention is nearly even, and no position matters."""

    def draw(parts, name, shape, deviation):
        return inner(parts, name, shape, 10 * deviation if deviation > 0 else deviation)

    return draw


def observed(backend, parts, steps=1):
    """What the last of some steps observed, in numpy."""
    module = backends.load(backend)
    loop = training(parts, module.prepare(parts), finish=lambda outputs: outputs)
    state, _ = [next(loop)[1] for _ in range(steps)][-1]
    return {name: array for name, (array, _) in module.arrays(state["observed"]).items()}


@pytest.mark.parametrize("prompt", [1, 13, 36])
@pytest.mark.parametrize(("backend", "name", "knobs"), EXACT, ids=lambda value: str(value))
def test_an_exact_cache_scores_as_the_untouched_one_row_after_row(backend, name, knobs, prompt):
    result = observed(backend, parts_of(backend, (name, knobs), prompt=prompt), 2)
    due = observed(backend, parts_of(backend, prompt=prompt), 2)
    for which in ("losses", "logits"):
        np.testing.assert_allclose(result[which], due[which], rtol=1e-4, atol=1e-4)


# Of one cache, without a model


def rows_of(count, seed=0):
    """New keys and values [B, T, G, K]."""
    random = np.random.Generator(np.random.Philox(key=seed))
    return random.standard_normal((2, 2, count, 2, 4), np.float32)


def filled(backend, part, pieces, tokens, traced=False):
    """What a cache gives for the last of some pieces in the second of two layers, and what was put into it."""
    shape = SCORING.shape(layers=2, width=8, heads=2, batch=2, tokens=max(2, tokens), prompt=1)
    parts = replace(SCORING.on[backend](shape, Place(backend, "cpu"), None))
    empty, append = part(parts, 2, tokens, ASARRAY[backend](np.zeros(1, np.float32)))
    memory, put, position = empty(), [], 0
    if traced:
        append = jax.jit(append)
    for count in pieces:
        new = rows_of(count, position)
        put.append(new)
        for layer in range(2):
            memory, k, v, seen = append(memory, layer, position, *map(ASARRAY[backend], new * (layer + 1)))
        position += count
    return np.stack([np.asarray(k), np.asarray(v)]), np.concatenate(put, 2) * 2, seen


def part_of(backend, module, **knobs):
    shape = SCORING.shape(layers=2, width=8, heads=2, batch=2, tokens=8, prompt=1)
    on = getattr(module, f"on_{backend}")
    return on(SCORING.on[backend](shape, Place(backend, "cpu"), None), **knobs).cache


ENDING = [
    ("torch", "preallocated_cache"),
    ("jax", "preallocated_cache"),
    ("torch", "int8_cache"),
    ("jax", "int8_cache"),
    ("torch", "mapped_cache"),
    ("jax", "mapped_cache"),
    ("torch", "offloaded_cache"),
]


@pytest.mark.parametrize("pieces", [(5, 1), (6,), (4, 2)])
@pytest.mark.parametrize(("backend", "name"), ENDING)
def test_writing_beyond_the_end_raises(backend, name, pieces):
    part = part_of(backend, import_module(f"strategies.cache.{name}"))
    with pytest.raises(ValueError, match="holds 5 tokens, and token 6 is written"):
        filled(backend, part, pieces, 5)


def test_a_traced_write_beyond_the_end_gives_nan():
    part = part_of("jax", int8_cache)
    assert not np.isnan(filled("jax", part, (1,) * 5, 5, traced=True)[0]).any()
    assert np.isnan(filled("jax", part, (1,) * 6, 5, traced=True)[0]).any()


@pytest.mark.parametrize("backend", NAMES)
def test_a_capacity_below_a_row_is_refused_and_one_above_it_reserved(backend):
    with pytest.raises(ValueError, match="capacity of 36 tokens and a row has 37: give at least 37"):
        observed(backend, parts_of(backend, ("preallocated_cache", {"capacity": 36})))
    parts = parts_of(backend, ("preallocated_cache", {"capacity": 40}))
    memory = backends.load(backend).arrays({"kept": parts.init(parts)["kept"]})
    shape = parts.shape
    assert sum(array.nbytes for array, _ in memory.values()) == 4 * shape.cache_numbers // 37 * 40


def test_a_preallocated_cache_copies_nothing_and_the_untouched_one_everything():
    """Bytes that the keys and values of one more token bring into being."""
    made = {}
    for name, applied in (("kept", [("preallocated_cache", {})]), ("untouched", [])):
        parts = parts_of("torch", *applied)
        empty, append = parts.cache(parts, 3, 37, torch.zeros(1))
        memory = empty()
        new = torch.ones(3, 1, 2, 12)
        memory, first, _, _ = append(memory, 0, 0, new, new)
        memory, k, _, _ = append(memory, 0, 1, new, new)
        made[name] = k.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
    assert made == {"kept": False, "untouched": True}


def test_pages_are_taken_as_they_fill_and_go_back_with_the_next_row():
    parts = parts_of("torch", ("paged_cache", {"block": 4}))
    empty, append = parts.cache(parts, 3, 37, torch.zeros(1))
    memory, taken = empty(), []
    for position, count in ((0, 6), (6, 2), (8, 1), (0, 1)):
        new = torch.ones(3, count, 2, 12)
        memory, k, _, _ = append(memory, 0, position, new, new)
        taken.append(len(memory[0]))
        assert k.shape[1] == position + count
    assert taken == [2, 2, 3, 1]


# A window is attention under a mask


def windowed(shape, backend, window, sinks):
    """Losses of the decoder's whole rows whose attention sees a window and sinks, by dense scores."""
    from harness.workloads import decoder

    plain = decoder.Shape(**shape.model_dump(exclude={"prompt"}))
    on_torch = import_module("harness.workloads.decoder._torch")
    parts = on_torch.build(plain, Place("torch", "cpu"), None)
    parts = replace(parts, draw=sharp(parts.draw))
    place = torch.arange(shape.tokens)
    seen = (place <= place[:, None]) & ((place > place[:, None] - window) | (place < sinks))

    def attend(parts, q, k, v):
        k, v = (x.repeat_interleave(shape.heads // shape.key_heads, 2) for x in (k, v))
        scores = torch.einsum("bthk,bshk->bhts", q, k) * shape.head**-0.5
        return torch.einsum("bhts,bshk->bthk", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)

    taken = []
    parts = replace(parts, attend=attend, loss=lambda parts, x, w, y: taken.append((x @ w.T, y)))
    x, y = next(parts.batches(parts, parts.windows(parts, parts.source(parts))))
    with torch.no_grad():
        on_torch.forward(parts, parts.init(parts)["params"], x, y)
    ((logits, y),) = taken
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), y, reduction="none").numpy(), logits[:, -1]


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize(("window", "sinks", "prompt"), [(8, 2, 13), (8, 0, 3), (1, 0, 13), (5, 4, 1), (64, 4, 13)])
def test_a_window_cache_is_attention_under_its_mask_past_the_wrap(window, sinks, prompt, backend):
    parts = parts_of(backend, ("window_cache", {"window": window, "sinks": sinks}), prompt=prompt)
    result = observed(backend, parts, 1)
    losses, logits = windowed(parts.shape, backend, window, sinks)
    np.testing.assert_allclose(result["losses"], losses[:, prompt:], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(result["logits"], logits, rtol=1e-4, atol=1e-4)


@pytest.mark.long_in_jax
@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("pieces", [(3, 9, 2), (1, 12, 1), (13, 1, 1, 1)])
def test_a_window_takes_pieces_of_any_length(pieces, backend):
    result, put, seen = filled(backend, part_of(backend, window_cache, window=4, sinks=2), pieces, 20)
    last, total, seen = pieces[-1], sum(pieces), np.asarray(seen)
    for query in range(last):
        at = total - last + query
        due = [i for i in range(total) if i <= at and (i > at - 4 or i < 2)]
        visible = {array.tobytes() for array in np.moveaxis(result[:, :, seen[query]], 2, 0)}
        assert visible == {array.tobytes() for array in np.moveaxis(put[:, :, due], 2, 0)} and seen[query].sum() == len(
            due
        )


@pytest.mark.parametrize("backend", NAMES)
def test_a_window_holds_its_slots_and_no_more(backend):
    parts = parts_of(backend, ("window_cache", {"window": 8, "sinks": 2}))
    memory = backends.load(backend).arrays({"kept": parts.init(parts)["kept"]})
    assert sum(array.nbytes for array, _ in memory.values()) == 4 * parts.shape.cache_numbers * 10 // 37
    with pytest.raises(ValueError, match="window is 0 and sinks 4"):
        parts_of(backend, ("window_cache", {"window": 0}))


# 8 bits


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("pieces", [(6,), (3, 1, 2)])
def test_numbers_of_8_bits_are_within_half_a_step_of_their_row(pieces, backend):
    result, due, _ = filled(backend, part_of(backend, int8_cache), pieces, 6)
    step = np.abs(due).max(-1, keepdims=True) / 127
    assert (np.abs(result - due) <= 0.5001 * step).all() and not np.array_equal(result, due)


@pytest.mark.parametrize("backend", NAMES)
def test_a_row_of_zeros_stays_zero_and_a_large_one_spoils_no_other(backend):
    part = part_of(backend, int8_cache)
    shape = SCORING.shape(layers=1, width=8, heads=2, batch=1, tokens=4, prompt=1)
    parts = SCORING.on[backend](shape, Place(backend, "cpu"), None)
    empty, append = part(parts, 1, 4, ASARRAY[backend](np.zeros(1, np.float32)))
    new = rows_of(4)[0, :1]
    new[:, 1], new[:, 2] = 0, 1e6 * new[:, 2]
    _, k, _, _ = append(empty(), 0, 0, ASARRAY[backend](new), ASARRAY[backend](new))
    k = np.asarray(k)
    assert (k[:, 1] == 0).all() and np.isfinite(k).all()
    np.testing.assert_allclose(k[:, [0, 3]], new[:, [0, 3]], atol=0.02)


@pytest.mark.parametrize("backend", NAMES)
def test_8_bits_take_a_quarter_and_the_scales_beside_one_wide_layer(backend):
    parts = parts_of(backend, ("int8_cache", {}))
    memory = backends.load(backend).arrays({"kept": parts.init(parts)["kept"]})
    numbers = parts.shape.cache_numbers
    wide = 4 * numbers // parts.shape.layers if backend == "torch" else 0
    assert sum(array.nbytes for array, _ in memory.values()) == numbers + 4 * numbers // parts.shape.head + wide


# Files


def open_files(folder, of="self"):
    """Paths of a folder that a process has open or mapped."""
    links = [os.path.join(f"/proc/{of}/fd", name) for name in os.listdir(f"/proc/{of}/fd")]
    maps = [line.split(maxsplit=5)[-1] for line in Path(f"/proc/{of}/maps").read_text().splitlines()]
    return [path for path in [*map(os.path.realpath, links), *maps] if path.startswith(str(folder))]


def test_a_mapped_cache_lies_in_files_without_names(tmp_path):
    parts = parts_of("torch", ("mapped_cache", {"folder": str(tmp_path)}))
    state = parts.init(parts)
    mapped = open_files(tmp_path)
    assert len(mapped) == parts.shape.layers and all("(deleted)" in path for path in mapped), "mapped, and not open"
    assert sum(layer.numel() for layer in state["kept"]) == parts.shape.cache_numbers
    assert os.listdir(tmp_path) == []
    del state
    assert open_files(tmp_path) == []


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("pieces", [(1,) * 6, (3, 1, 2)])
def test_a_mapped_file_gives_jax_everything_compiled_or_not(pieces, traced):
    result, due, seen = filled("jax", part_of("jax", mapped_cache), pieces, 6, traced)
    assert np.array_equal(result, due) and seen is None


def test_a_process_that_is_killed_leaves_no_file(tmp_path):
    program = f"""
import time, torch
from harness import Place
from harness.workloads.scoring import Shape, on_torch
from strategies.cache import mapped_cache
shape = Shape(layers=2, width=16, heads=2, vocabulary=11, tokens=8, prompt=4)
parts = mapped_cache.on_torch(on_torch(shape, Place("torch", "cpu"), None), folder={str(tmp_path)!r})
state = parts.init(parts)
print("mapped", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "mapped\n"
        assert len(open_files(tmp_path, child.pid)) == 2
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL and os.listdir(tmp_path) == []


def test_a_step_that_fails_leaves_no_file(tmp_path):
    parts = parts_of("torch", ("mapped_cache", {"folder": str(tmp_path)}))

    def failing(parts, p, x_BTD):
        assert open_files(tmp_path)
        raise MemoryError("in the feed")

    with pytest.raises(MemoryError, match="in the feed"):
        observed("torch", replace(parts, feed=failing))
    assert os.listdir(tmp_path) == []


# Beside a GPU


@pytest.mark.parametrize("pieces", [(1,) * 6, (3, 1, 2)])
def test_an_offloaded_cache_gives_everything_from_two_layers_on_the_device(pieces):
    """The same copies, here without streams."""
    part = part_of("torch", offloaded_cache)
    result, due, seen = filled("torch", part, pieces, 6)
    assert np.array_equal(result, due) and seen is None


def test_an_offloaded_cache_scores_as_the_untouched_one():
    parts = parts_of("torch")
    result, due = observed("torch", offloaded_cache.on_torch(parts), 2), observed("torch", parts, 2)
    np.testing.assert_allclose(result["losses"], due["losses"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("device", "layers"), [("cuda", 2), ("cpu", 8 + 2)])
def test_a_prediction_counts_two_layers_of_an_offloaded_cache_and_on_a_cpu_the_host_as_well(device, layers):
    module = backends.load("torch")
    sizes = {"layers": 8, "width": 64, "hidden": 64, "vocabulary": 64, "batch": 4, "tokens": 200, "prompt": 190}
    place = Place("torch", device)
    parts = replace(parts_of("torch", **sizes, heads=4, kv_heads=4), place=place, draw=module.abstract_draw)
    batch = SCORING.abstract_batch(parts.shape)
    size = 4 * parts.shape.cache_numbers
    forecasts = {
        name: module.predict(lambda made=made: made, place, batch, 0, 1)
        for name, made in (("offloaded", offloaded_cache.on_torch(parts)), ("untouched", parts))
    }
    footprints = {name: forecast.peaks["init"] for name, forecast in forecasts.items()}
    assert footprints["offloaded"] - footprints["untouched"] == pytest.approx(size * layers / 8, rel=0.05)
    if device == "cuda":  # page-locked blocks are powers of two
        assert forecasts["untouched"].host_bytes < size <= forecasts["offloaded"].host_bytes < 2.1 * size


def test_a_prediction_counts_the_pages_of_a_mapped_cache_and_makes_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped_files, "unnamed", None)
    module, applied = backends.load("torch"), ("mapped_cache", {"folder": str(tmp_path)})
    peaks = []
    for names in ((applied,), (("preallocated_cache", {}),)):
        parts = replace(parts_of("torch", *names), draw=module.abstract_draw)
        batch = SCORING.abstract_batch(parts.shape)
        forecast = module.predict(lambda made=parts: made, Place("torch", "cpu"), batch, 0, 1)
        peaks.append(max(forecast.peaks.values()))
    assert peaks[0] == peaks[1] > SCORING.floor(parts.shape)


@pytest.mark.gpu
def test_an_offloaded_cache_orders_its_streams():
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    shape = SCORING.shape(layers=6, width=256, heads=4, batch=8, tokens=300, prompt=200)
    parts = SCORING.on["torch"](shape, Place("torch", "cuda"), None)
    result, due = observed("torch", offloaded_cache.on_torch(parts), 2), observed("torch", parts, 2)
    np.testing.assert_allclose(result["losses"], due["losses"], rtol=1e-4)
