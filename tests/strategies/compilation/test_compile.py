"""Compiled parts give the same answers up to rounding, save less, and leave nothing behind."""

import os
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
import torch

from harness import Parts, Place, Unpredictable, backends
from harness.contract import plugins
from harness.machine.memory import children
from harness.workloads.decoder import Shape
from strategies.compilation import compiled_block

LOADED = plugins.load()
DECODER = LOADED.workloads["decoder"]
SHAPE = Shape(layers=1, width=32, heads=2, hidden=48, vocabulary=31, batch=2, tokens=16)
NAMES = ["compiled_block", "compiled_step", "compiled_budget"]


def parts_of(shape, name=None, **knobs):
    parts = DECODER.on["torch"](shape, Place("torch", "cpu"), None, 0)
    return parts if name is None else LOADED.strategies[name].on["torch"](parts, **knobs)


def first_gradient(parts):
    state = parts.init(parts, None)
    x, y = next(parts.batches(parts, parts.windows(parts, parts.source(parts))))
    loss, grads = parts.grad(parts, state, x, y)
    return float(loss), {name: array for name, (array, _) in backends.load("torch").arrays(grads).items()}


@cache
def plain(shape):
    return first_gradient(parts_of(shape))


def saved(parts, shape):
    """Bytes that the graph of one stack keeps, weights left out."""
    params = parts.init(parts, None)["params"]
    weights = {leaf.untyped_storage()._cdata for p in params["layers"] for leaf in p.values()}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            storages[storage._cdata] = storage
        return tensor

    x = torch.randn(shape.batch, shape.tokens, shape.width)
    parts.stack(parts, params["layers"], x)  # compiled here: hooks that are active then would be compiled in
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        assert parts.stack(parts, params["layers"], x).requires_grad
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        pytest.param("compiled_block", (16,), marks=pytest.mark.long),
        *(pytest.param(name, (16, 24), marks=pytest.mark.slow) for name in NAMES),
    ],
    ids=str,
)
def test_compiled_parts_have_the_gradient_of_the_plain_ones_at_every_shape(name, tokens):
    """Two shapes through one function: a second shape is compiled for itself, not approximated."""
    before, others = torch._dynamo.utils.counters["stats"]["unique_graphs"], set(children())
    for shape in (SHAPE.model_copy(update={"tokens": each}) for each in tokens):
        loss, grads = plain(shape)
        result, found_grads = first_gradient(parts_of(shape, name))
        assert result == pytest.approx(loss, rel=1e-6)
        for key in grads:
            np.testing.assert_allclose(found_grads[key], grads[key], rtol=1e-4, atol=1e-7)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= before + len(tokens), "nothing was compiled"
    assert set(children()) <= others, "a process of the compiler is left"


def test_lengths_that_torch_does_not_compile_are_noted(monkeypatch):
    compiled_block.ready()
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, inputs: graph.forward)
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 2)
    parts, uncompiled = Parts(None, Place("torch", "cpu")), []

    def block(parts, p, x):
        if not torch.compiler.is_compiling():
            uncompiled.append(len(x))
        return x * 2

    part = compiled_block.compiled(block)
    notes = [len(parts.notes) for length in (3, 4, 3, 5, 4, 6) if len(part(parts, {}, torch.ones(length))) == length]
    assert uncompiled == [5, 6] and notes == [0, 0, 0, 1, 1, 1]
    assert parts.notes["compiled"].endswith("ran other lengths uncompiled")


@pytest.mark.slow
def test_a_smaller_budget_keeps_less():
    whole = saved(parts_of(SHAPE), SHAPE)
    by_budget = {budget: saved(parts_of(SHAPE, "compiled_budget", budget=budget), SHAPE) for budget in (0.0, 1.0)}
    assert by_budget[0.0] < 0.5 * by_budget[1.0]
    assert by_budget[1.0] <= whole


@pytest.mark.parametrize("name", NAMES)
def test_what_compiled_code_takes_is_not_predicted(name):
    place, batch = Place("torch", "cpu"), DECODER.abstract_batch(SHAPE)
    with pytest.raises(Unpredictable, match="measure it"):
        backends.load("torch").predict(lambda: parts_of(SHAPE, name), place, batch, source_bytes=0, steps=1)


COMPILING = """
from harness import Place, plugins
from harness.workloads.decoder import Shape
loaded = plugins.load()
shape = Shape(layers=1, width=16, heads=1, hidden=16, vocabulary=31, tokens=8)
parts = loaded.workloads["decoder"].on["torch"](shape, Place("torch", "cpu"), None, 0)
parts = loaded.strategies["compiled_block"].on["torch"](parts)
state = parts.init(parts, None)
x, y = next(parts.batches(parts, parts.windows(parts, parts.source(parts))))
loss, _ = parts.grad(parts, state, x, y)
import os
from torch._dynamo.utils import counters
print(len(list(os.walk(os.environ["TMPDIR"]))), counters["inductor"]["fxgraph_cache_hit"], float(loss))
"""


def compiled_in(tmp_path, **variables):
    """Return the folders there were, how many graphs came compiled, and the loss, of a process of its own."""
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "HOME": str(tmp_path / "home")}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    (tmp_path / "tmp").mkdir(exist_ok=True)
    program = [sys.executable, "-c", COMPILING]
    done = subprocess.run(program, env={**environment, **variables}, capture_output=True, text=True, check=True)
    folders, hits, loss = done.stdout.split()
    return int(folders), int(hits), float(loss)


@pytest.mark.slow
def test_the_compiler_leaves_no_file_behind(tmp_path):
    (tmp_path / "file").write_text("")
    for variables in ({}, {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "file" / "folder")}):
        folders, hits, _ = compiled_in(tmp_path, **variables)
        assert folders > 3, "nothing was compiled"
        assert not hits
        assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["file"]


@pytest.mark.slow
def test_a_folder_that_is_named_has_the_code_of_the_next_process(tmp_path):
    _, before, loss = compiled_in(tmp_path, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "programs"))
    _, after, again = compiled_in(tmp_path, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "programs"))
    assert (before, after) == (0, 2), "the forward and the backward pass"
    assert loss == again


def test_a_folder_that_cannot_be_written_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, *_, **__: path != str(tmp_path))
    with compiled_block.ready.__wrapped__() as folder:
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == folder != str(tmp_path)


def test_the_compiler_is_asked_for_what_the_knobs_say(monkeypatch):
    asked = []
    monkeypatch.setattr(compiled_block, "compiled", lambda inner, **settings: asked.append(settings) or inner)
    for name, knobs in (
        ("compiled_loss", {}),
        ("compiled_loss", {"chunks": 3}),
        ("compiled_loss", {"chunks": 0}),
        ("compiled_budget", {"budget": 0.25}),
    ):
        parts_of(SHAPE, name, **knobs)
    chunkers = [{"inductor": {"auto_chunker.enable": True, "auto_chunker.num_chunk": each}} for each in (8, 3, None)]
    assert asked == [*chunkers, {"activation_memory_budget": 0.25}]


@pytest.mark.parametrize("budget", [-0.1, 1.1])
def test_a_budget_is_a_share(budget):
    with pytest.raises(ValueError, match="a share from 0 to 1"):
        parts_of(SHAPE, "compiled_budget", budget=budget)
