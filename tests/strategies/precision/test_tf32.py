"""Products of TF32: on where the strategy is, and nowhere else; float32 means float32 in both frameworks."""

import jax
import jax.numpy as jnp
import pytest
import torch

from harness import Parts, Place
from harness.contract import plugins
from harness.verdicts import numerics

TF32 = plugins.load().strategies["tf32"]
SWITCHES = torch.backends.cuda.matmul, torch.backends.cudnn


def allowed():
    return [switch.allow_tf32 for switch in SWITCHES]


@pytest.fixture(autouse=True)
def off():
    for switch in SWITCHES:
        switch.allow_tf32 = False
    yield
    assert allowed() == [False, False], "left on"


def test_it_is_on_within_the_step_and_off_after_it_even_where_that_fails():
    seen = []

    def step(parts, state, x, y):
        seen.append(allowed())
        if x is None:
            raise ValueError("no batch")
        return state, 1.0

    parts = TF32.on["torch"](Parts(None, Place("torch", "cuda"), step=step))
    assert parts.step(parts, {}, 1, 2) == ({}, 1.0)
    assert allowed() == [False, False]
    with pytest.raises(ValueError, match="no batch"):
        parts.step(parts, {}, None, None)
    assert seen == [[True, True]] * 2


def test_in_jax_a_traced_step_asks_for_it_and_another_for_the_highest():
    def step(parts, state, x, y):
        return state, (x @ y).sum()

    plain = Parts(None, Place("jax", "cuda"), step=step)
    tf32 = TF32.on["jax"](plain)
    programs = {}
    for name, parts in (("plain", plain), ("tf32", tf32)):
        with jax.default_matmul_precision("highest"):  # as every worker on a GPU has it
            traced = jax.jit(lambda x, parts=parts: parts.step(parts, {}, x, x)[1]).trace(jnp.ones((4, 4)))
            programs[name] = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "HIGHEST" in programs["plain"]
    assert "HIGHEST" not in programs["tf32"] and "HIGH" in programs["tf32"]


def test_it_declares_what_it_rounds_to_and_where_it_would_change_nothing():
    assert numerics.UNIT_ROUNDOFF[TF32.precision] == 2.0**-11
    assert "a CPU has no products" in TF32.obstacle(Place("torch", "cpu"))
    assert TF32.obstacle(Place("torch", "cuda")) is None
