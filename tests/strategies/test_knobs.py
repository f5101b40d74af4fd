"""Values of knobs that mean nothing are refused when a strategy is applied, in one sentence."""

from functools import cache

import pytest

from harness import Place
from harness.contract import plugins

LOADED = plugins.load()
ANY = {
    ("bfloat16_stochastic", "seed"),
    ("document_windows", "end"),
}
"""Knobs that are no sizes: each of their values means something."""
LATER = {("fused_loss", "chunk"), ("chunked_recurrence", "chunk")}
"""Knobs that are looked at when the part is called."""
ABOVE_0 = [
    ("accumulate", "pieces"),
    ("apollo", "rank"),
    ("apollo", "every"),
    ("chunked_attention", "chunk"),
    ("chunked_backward_loss", "chunk"),
    ("chunked_loss", "chunk"),
    ("clip_gradients", "norm"),
    ("clip_in_backward", "norm"),
    ("cut_loss", "rows"),
    ("cut_loss", "tile"),
    ("float16_master", "interval"),
    ("float16_master", "scale"),
    ("float16_scaled", "interval"),
    ("float16_scaled", "scale"),
    ("galore", "rank"),
    ("galore", "every"),
    ("galore", "scale"),
    ("jax_row_updates", "limit_mib"),
    ("lion", "factor"),
    ("lisa", "every"),
    ("lisa", "layers"),
    ("lomo", "factor"),
    ("lora", "alpha"),
    ("lora", "rank"),
    ("mapped_moments", "elements"),
    ("peft_lora", "alpha"),
    ("peft_lora", "rank"),
    ("qlora", "alpha"),
    ("qlora", "rank"),
    ("soap", "every"),
    ("streaming", "rows"),
    ("tiled_feed", "rows"),
    ("vocabulary_parallel_loss", "chunk"),
    ("window_attention", "window"),
]
IN_OTHER_WORDS = [
    ("badam", "every"),
    ("block_sparse_attention", "chunk"),
    ("bucketed_lengths", "pool"),
    ("hf_datasets", "document"),
    ("hf_datasets", "examples"),
    ("int8_activations", "group"),
    ("max_examples", "count"),
    ("native_sparse_attention", "block"),
    ("native_sparse_attention", "chunk"),
    ("paged_cache", "block"),
    ("prefetch_process", "depth"),
    ("prefetch_shared", "workers"),
    ("reservoir", "size"),
    ("sparse_embedding_gradient", "rows"),
    ("streaming_vocabulary", "size"),
    ("truncated", "tokens"),
]
"""Knobs of which 0 means nothing either, refused in a sentence of their own."""


SIZES = [
    (name, knob.name)
    for name, strategy in sorted(LOADED.strategies.items())
    for knob in strategy.knobs.values()
    if knob.type in (int, float) and (name, knob.name) not in ANY | LATER
]


@cache
def parts_of(workload, backend):
    made = LOADED.workloads[workload]
    return made.on[backend](made.tiny(made.shape()), Place(backend, "cpu"), None, 0)


def applied(name, **knobs):
    """Apply a strategy on each backend that it runs on here, to the first workload that takes it; skip without one."""
    strategy = LOADED.strategies[name]
    obstacles = {backend: strategy.obstacle(Place(backend, "cpu")) for backend in strategy.on}
    here = [backend for backend, obstacle in obstacles.items() if obstacle is None]
    if not here:
        pytest.skip("; ".join(dict.fromkeys(obstacles.values())))
    for backend in here:
        workload = next(
            (each for each, made in LOADED.workloads.items() if backend in made.on and strategy.misfit(made) is None)
        )
        yield backend, lambda function=strategy.on[backend], at=(workload, backend): function(parts_of(*at), **knobs)


@pytest.mark.parametrize(("name", "knob"), SIZES)
def test_a_size_below_0_is_refused(name, knob):
    below = LOADED.strategies[name].knobs[knob].type(-1)
    for backend, apply in applied(name, **{knob: below}):
        with pytest.raises(ValueError, match="-1"):
            apply()
            pytest.fail(f"{name} takes {knob} -1 on {backend}")


@pytest.mark.parametrize(("name", "knob"), ABOVE_0)
def test_a_size_of_0_is_refused_where_it_means_nothing(name, knob):
    zero = LOADED.strategies[name].knobs[knob].type(0)
    for _, apply in applied(name, **{knob: zero}):
        with pytest.raises(ValueError, match=f"^{name}: {knob} is 0(.0)?: set {knob} above 0$"):
            apply()


@pytest.mark.parametrize(("name", "knob"), IN_OTHER_WORDS)
def test_a_size_of_0_is_refused_in_other_words(name, knob):
    for _, apply in applied(name, **{knob: 0}):
        with pytest.raises(ValueError, match=rf"^{name}: .*\b0\b"):
            apply()


@pytest.mark.parametrize("name", ["muon", "sgd_momentum"])
def test_a_momentum_of_1_is_refused(name):
    for _, apply in applied(name, momentum=1.0):
        with pytest.raises(ValueError, match=r"momentum is 1\.0: set momentum to 0 or more, and below 1"):
            apply()
