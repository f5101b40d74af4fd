"""A rule's first state in JAX: one program for each rule, whatever it encloses."""

import numpy as np
import pytest

from harness import optimizers, update_rules
from harness.contract import plugins
from harness.contract.assembly import assemble
from harness.records import Case

LOADED = plugins.load()


def first_of(begin, workload="decoder"):
    """Return what a rule that begins so keeps of all parameters, drawn anew."""
    made = LOADED.workloads[workload]
    case = Case(
        workload=workload,
        shape=made.probe(made.shape()).model_dump(),
        place="jax/cpu",
        corpus="drawn",
        tokenizer="none",
    )
    parts = update_rules.in_jax(assemble(LOADED, case), begin, None)
    return parts.init(parts, None)["first"]


def filled(value, encloses=None):
    """Return a beginning that fills what is kept with a value; it encloses something else as well."""
    import jax.numpy as jnp

    def begin(name, p):
        assert encloses is None or encloses
        return {"m": jnp.full_like(p, value)}

    return begin


@pytest.fixture
def compiled():
    """The programs that are compiled meanwhile."""
    import jax

    events = []

    def listen(event, seconds, **described):
        events.extend([event] * ("backend_compile" in event))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


def test_rules_that_enclose_other_values_begin_otherwise():
    for value in (1.0, 2.0, 1.0):
        embed = np.asarray(first_of(filled(value))["embed"]["m"])
        assert (embed == value).all()


def test_one_program_begins_all_tensors_of_a_rule_and_is_compiled_once(compiled):
    first_of(filled(3.0))
    compiled.clear()
    first_of(filled(4.0))
    assert len(compiled) == 1
    first_of(filled(4.0))
    assert len(compiled) == 1


def test_a_rule_that_encloses_a_function_made_anew_is_compiled_once(compiled):
    for _ in range(2):
        compiled.clear()
        first_of(filled(5.0, encloses=(lambda: 0, 7)))
    assert not compiled


def test_a_rule_may_enclose_what_has_no_hash():
    assert (np.asarray(first_of(filled(6.0, encloses={"rank": 4}))["embed"]["m"]) == 6.0).all()


def test_layers_begin_as_one_of_them_does_and_are_stacked():
    import jax.numpy as jnp

    seen = []

    def begin(name, p):
        seen.append((name, p.ndim))
        return jnp.zeros(p.shape[-1:], p.dtype)

    decoder = LOADED.workloads["decoder"]
    shape = decoder.probe(decoder.shape())
    assert first_of(begin)["layers"]["wq"].shape == (shape.layers, shape.width)
    assert ("layers.wq", 2) in seen and all(optimizers.of_layers(name) or "." not in name for name, _ in seen)
