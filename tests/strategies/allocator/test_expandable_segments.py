"""The strategy is a variable that torch's allocator reads before it starts, on a GPU alone."""

from harness import Place
from harness.contract import plugins

STRATEGY = plugins.load().strategies["expandable_segments"]


def test_it_is_set_for_the_process_and_changes_no_part():
    assert STRATEGY.environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    parts = object()
    assert STRATEGY.on["torch"](parts) is parts and not STRATEGY.rewrites


def test_it_is_for_torch_on_a_gpu():
    assert STRATEGY.obstacle(Place("torch", "cuda")) is None
    assert "that of the C library" in STRATEGY.obstacle(Place("torch", "cpu"))
    assert "nothing for jax" in STRATEGY.obstacle(Place("jax", "cuda"))
