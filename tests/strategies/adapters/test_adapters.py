"""Adapters: nothing but them is trained, they begin as nothing, 4 bits are the paper's, and combinations hold."""

import os
from dataclasses import replace
from functools import cache, partial

import pytest

from harness import Parts, Place, backends, tree
from harness.contract import plugins
from harness.contract.assembly import assemble
from harness.records import Applied, Case, Task
from harness.run.schedule import conflict
from harness.worker import numerics, prediction

LOADED = plugins.load()
CASES = [("decoder", "torch"), ("decoder", "jax"), ("causal_lm", "torch")]


def case(workload, backend, *strategies, seed=0):
    made = LOADED.workloads[workload]
    return Case(
        workload=workload,
        shape=made.probe(made.shape()).model_dump(),
        place=f"{backend}/cpu",
        corpus="drawn",
        tokenizer="none",
        seed=seed,
        strategies=tuple(each if isinstance(each, Applied) else Applied(name=each) for each in strategies),
    )


def lora(**knobs):
    return Applied(name="lora", knobs={"rank": 4, **knobs})


def qlora(**knobs):
    return Applied(name="qlora", knobs={"rank": 4, **knobs})


def outcome(case, draw=None):
    """What three updates gave; a case that draws its parameters as usual is run once for all tests."""
    return observed(case, draw) if draw is not None else of_text(case.model_dump_json())


@cache
def of_text(case):
    return observed(Case.model_validate_json(case))


def observed(case, draw=None):
    backend = backends.load(case.place.backend)
    backend.start(case.place)
    return numerics.observer(LOADED, case, backend, draw, updates=3)(0)


def state_of(case):
    parts = assemble(LOADED, case)
    return parts, parts.init(parts, None)


@pytest.mark.long_in_jax
@pytest.mark.parametrize(("workload", "backend"), CASES)
def test_the_first_loss_is_that_of_the_model_and_then_adapters_alone_learn(workload, backend):
    pytest.importorskip("transformers" if workload == "causal_lm" else backend)
    plain, adapted = outcome(case(workload, backend)), outcome(case(workload, backend, lora()))
    assert adapted.loss == pytest.approx(plain.loss, rel=1e-7)
    assert adapted.trajectory[-1] < adapted.trajectory[0]
    assert adapted.gradients and all(".adapters." in name for name in adapted.gradients)
    assert {name[-2:] for name in adapted.gradients} == {".a", ".b"}
    # B is zero at first, so A cannot have a gradient yet, and B must have one
    assert all(abs(g).max() == 0 for name, g in adapted.gradients.items() if name.endswith(".a"))
    assert all(abs(g).max() > 0 for name, g in adapted.gradients.items() if name.endswith(".b"))


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_what_an_adapter_adds_is_multiplied_by_alpha_over_rank(backend):
    import jax.numpy as jnp
    import numpy as np
    import torch

    draws = np.random.Generator(np.random.Philox(key=0))
    x, w, a, b = (draws.standard_normal(size, np.float32) for size in ((2, 3, 5), (5, 4), (2, 5), (4, 2)))
    array = torch.from_numpy if backend == "torch" else jnp.asarray
    parts = Parts(None, Place(backend, "cpu"), linear=lambda parts, p, name, x: x @ p[name])
    parts = LOADED.strategies["lora"].on[backend](parts, rank=2, alpha=6.0)
    p = {"up": array(w), "adapters": {"up": {"a": array(a), "b": array(b)}}}
    y = np.asarray(parts.linear(parts, p, "up", array(x)))
    np.testing.assert_allclose(y, x @ w + 6 / 2 * (x @ a.T @ b.T), rtol=1e-4, atol=1e-4)


@pytest.mark.long_in_jax
@pytest.mark.parametrize(("workload", "backend"), CASES)
@pytest.mark.parametrize("others", [("checkpoint", "fused_loss"), ("update_in_backward",)], ids="+".join)
def test_what_is_combined_with_adapters_leaves_their_answer_as_it_is(workload, backend, others):
    if backend == "jax" and "update_in_backward" in others:
        with pytest.raises(ValueError, match="another strategy trains a part of the parameters"):
            outcome(case(workload, backend, lora(), *others))
        return
    alone, together = outcome(case(workload, backend, lora())), outcome(case(workload, backend, lora(), *others))
    assert together.trajectory == pytest.approx(alone.trajectory, rel=1e-5)
    assert together.gradients.keys() == alone.gradients.keys()


@pytest.mark.long_in_jax
@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("adapter", [lora, qlora])
def test_adapters_learn_under_autocast(adapter, backend):
    wide = outcome(case("decoder", backend, adapter()))
    narrow = outcome(case("decoder", backend, adapter(), "bfloat16_autocast"))
    assert narrow.gradients.keys() == wide.gradients.keys()
    for name, gradient in wide.gradients.items():
        if name.endswith(".b"):
            assert abs(narrow.gradients[name]).max() == pytest.approx(abs(gradient).max(), rel=0.2), name


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("names", [("qlora", "bfloat16_autocast"), ("bfloat16_autocast", "qlora")], ids="+".join)
def test_autocast_decides_in_which_type_packed_matrices_multiply(backend, names):
    import jax

    plain, types = assemble(LOADED, case("decoder", backend)), set()

    def linear(parts, p, name, x):
        y = plain.linear(parts, p, name, x)
        types.add(str(y.dtype).removeprefix("torch."))
        return y

    parts = replace(plain, linear=linear)
    for name in names:
        parts = LOADED.strategies[name].on[backend](parts)
    source = parts.source(parts)
    x, y = parts.transfer(parts, *parts.windows(parts, source).batch([0]))
    grad, state = partial(parts.grad, parts), parts.init(parts, source)
    types.clear()  # those of one token of its own, by which adapters learn the sizes
    jax.eval_shape(grad, state, x, y) if backend == "jax" else grad(state, x, y)
    assert types == {"bfloat16"}


@pytest.mark.long
@pytest.mark.parametrize(("workload", "backend"), CASES)
def test_a_combination_is_judged_against_adapters_alone_in_twice_the_width(workload, backend, tmp_path):
    frame = backends.load(backend)
    combined = case(workload, backend, lora(), "checkpoint", "fused_loss")
    frame.start(combined.place)
    task = Task(kind="numerics", cases=(combined,), run_id="r", parent=os.getpid(), folder=str(tmp_path))
    verdict = numerics.measure(task, LOADED, frame).numerics
    assert (verdict.verdict, verdict.reason[:43]) == (
        "approximate",
        "it trains something else than the baseline;",
    ), verdict
    assert 0.1 < verdict.grad_error_ratio < 3, "the yardstick has no rounding of its own"


@pytest.mark.parametrize(
    ("name", "packed"),
    [
        ("layers.0.mlp.gate_proj.weight", True),
        ("layers.0.mlp.gate.weight", False),
        ("layers.0.feed_forward.router.weight", False),
        ("layers.0.block_sparse_moe.router.layer.weight", False),
        ("embed_tokens.weight", False),
    ],
)
def test_a_router_is_not_packed(name, packed):
    from strategies.adapters.qlora import is_matrix

    assert is_matrix(name, (8, 64)) is packed


@pytest.mark.parametrize(
    ("name", "shape", "packed"),
    [
        ("layers.0.wq", (8, 64), True),
        ("layers.0.wq", (8, 63), False),
        ("layers.wq", (2, 8, 64), True),
        ("layers.0.adapters.wq.a", (4, 64), False),
    ],
)
def test_what_has_two_numbers_for_each_byte_is_packed_and_adapters_are_not(name, shape, packed):
    from strategies.adapters.qlora import is_matrix

    assert is_matrix(name, shape) is packed


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_last_block_that_is_short_has_a_scale_of_its_own(backend):
    """Six numbers, ten times as large, after 266 blocks, whose scales have more than one scale of theirs."""
    import jax.numpy as jnp
    import numpy as np
    import torch

    from strategies.adapters.qlora import _jax, _torch

    values = np.random.Generator(np.random.Philox(key=0)).standard_normal((131, 130), np.float32)
    values.reshape(-1)[-6:] *= 10
    if backend == "torch":
        wide = _torch.widened(_torch.packed(torch.from_numpy(values))).numpy()
    else:
        wide = np.asarray(_jax.widened(_jax.packed(jnp.asarray(values))))
    blocks, off = (np.abs(np.pad(each.reshape(-1), (0, 58)).reshape(267, 64)) for each in (values, wide - values))
    largest = blocks.max(1)
    of_scale = np.abs(largest - largest.mean()) / 16 + 1e-3  # an 8-bit float is off by a sixteenth at the most
    assert (off.max(1) <= 0.16 * (largest + of_scale) + of_scale).all(), "levels lie at most 0.31 of the scale apart"


@pytest.mark.long_in_jax
@pytest.mark.parametrize(("workload", "backend"), CASES)
def test_qlora_is_lora_on_the_rounded_model(workload, backend):
    rounded = outcome(case(workload, backend, qlora()))
    expected = outcome(case(workload, backend, lora()), draw=rounding(backend))
    assert rounded.trajectory == pytest.approx(expected.trajectory, rel=1e-6)


@pytest.mark.parametrize("config", ["smollm2-135m", "qwen2.5-0.5b", "gpt2"])
def test_packed_matrices_multiply_in_8_bits_as_wide_ones_do(config):
    """With biases, and stored [in, out], as well."""
    pytest.importorskip("transformers")
    made = LOADED.workloads["causal_lm"]
    shape = {"shape": made.probe(made.shape(config=config)).model_dump()}
    packs, wide = (case("causal_lm", "torch", "float8_matmul", each) for each in (qlora(), lora()))
    rounded = outcome(packs.model_copy(update=shape))
    expected = outcome(wide.model_copy(update=shape), draw=rounding("torch"))
    assert rounded.trajectory == pytest.approx(expected.trajectory, rel=1e-6)
    assert rounded.trajectory != outcome(packs.model_copy(update=shape | {"strategies": (qlora(),)})).trajectory


def rounding(backend):
    """Let the matrices that qlora packs be drawn as it widens them."""

    def draw(inner):
        from strategies.adapters.qlora import is_matrix

        def of(parts, name, shape, deviation):
            value = inner(parts, name, shape, deviation)
            if not is_matrix(name, shape):
                return value
            if backend == "torch":
                from strategies.adapters.qlora._torch import packed, widened

                return widened(packed(value))
            import jax.numpy as jnp

            from strategies.adapters.qlora._jax import packed, widened

            return jnp.stack([widened(packed(one)) for one in value])

        return of

    return draw


def test_the_levels_are_the_nearest_of_the_paper_and_both_frameworks_round_alike():
    import jax.numpy as jnp
    import numpy as np
    import torch

    from strategies.adapters.qlora import LEVELS, _jax, _torch

    assert len(LEVELS) == 16 and LEVELS[0] == -1 and LEVELS[7] == 0 and LEVELS[15] == 1
    assert list(LEVELS) == sorted(set(LEVELS))
    values = torch.randn(96, 130, generator=torch.Generator().manual_seed(0))
    once = _torch.packed(values)
    wide = _torch.widened(once)
    largest = values.view(-1, 64).abs().amax(1)
    outer = once["outer"].repeat_interleave(256)[: len(largest)]
    scales = once["scales"].float() / 448 * outer + once["mean"]
    # an 8-bit float has four bits, the first of them always 1: it is off by a sixteenth of itself at the most
    assert ((scales - largest).abs() <= (largest - largest.mean()).abs() / 16 + 1e-5).all()
    of_block = scales.repeat_interleave(64).view(values.shape)
    nearest = (torch.tensor(LEVELS) * of_block[..., None] - values[..., None]).abs().amin(-1)
    assert ((wide - values).abs() <= nearest + 1e-6).all()
    other = _jax.packed(jnp.asarray(values.numpy()))
    assert (np.asarray(other["codes"]) == once["codes"].numpy()).mean() > 0.999
    assert np.isclose(_jax.widened(other), wide.numpy(), rtol=1e-5).mean() > 0.999
    size = sum(leaf.numel() * leaf.element_size() for leaf in once.values())
    assert size <= 4.2 / 8 * values.numel(), "4 bits, and 0.127 for the scales"


def test_moments_and_gradients_are_those_of_the_adapters_alone():
    parts, state = state_of(case("causal_lm", "torch", qlora()))
    trained = sum(leaf.numel() for _, leaf in tree.leaves(state["params"]))
    assert trained < 0.2 * LOADED.workloads["causal_lm"].parameters(parts.shape)
    assert not any(leaf.requires_grad for _, leaf in tree.leaves(state["frozen"]))


def peak(case):
    task = Task(kind="predict", cases=(case,), run_id="", parent=0, folder="", steps=2)
    return prediction.measure(task, LOADED, backends.load(case.place.backend)).prediction.predicted_peak_bytes


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.long)])
def test_no_widened_matrix_is_kept_until_the_backward_pass(backend):
    shape = LOADED.workloads["decoder"].shape(layers=8, width=256, vocabulary=256, tokens=32).model_dump()
    one, other = (case("decoder", backend, each).model_copy(update={"shape": shape}) for each in (lora(), qlora()))
    matrices = 8 * (4 * 256 * 256 + 3 * 256 * 704)
    assert peak(one) - peak(other) > 0.8 * (4 - 0.516) * matrices, "what 4 bits save, but for one matrix at a time"


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_target_that_names_no_matrix_is_refused_in_a_sentence(backend):
    with pytest.raises(
        ValueError, match="no matrix of a layer is called 'q_prj'; there is down, gate, up, wk, wo, wq, wv"
    ):
        state_of(case("decoder", backend, lora(targets="wq, q_prj")))


def test_targets_are_named_by_the_end_of_their_names():
    pytest.importorskip("transformers")
    _, state = state_of(case("causal_lm", "torch", lora(targets="q_proj,v_proj")))
    names = {name.split(".adapters.")[1] for name, _ in tree.leaves(state["params"])}
    assert names == {f"self_attn.{each}.{letter}" for each in ("q_proj", "v_proj") for letter in "ab"}


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_an_optimizer_before_adapters_is_refused_in_a_sentence(backend):
    with pytest.raises(ValueError, match="name lora or qlora before the optimizer"):
        state_of(case("decoder", backend, "sgd_momentum", lora()))


@pytest.mark.parametrize("name", ["tensor_parallel", "megatron_sequence_parallel"])
def test_what_divides_the_matrices_of_layers_refuses_packed_ones_in_a_sentence(name):
    with pytest.raises(ValueError, match="take fsdp, or leave out the adapters"):
        state_of(case("decoder", "jax", qlora(), name))
    pair = [LOADED.strategies[each] for each in ("qlora", name)]
    assert "take fsdp" in str(conflict(pair)) and "take fsdp" in str(conflict(pair[::-1]))


def test_a_type_is_named_before_what_packs():
    bfloat16, stochastic, packs = (LOADED.strategies[name] for name in ("bfloat16", "bfloat16_stochastic", "qlora"))
    assert "name it after" in str(conflict([packs, bfloat16])) and conflict([bfloat16, packs]) is None
    assert "name bfloat16 before" in str(conflict([packs, stochastic]))


@pytest.mark.long
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_matrices_of_16_bits_are_packed(backend):
    narrow = outcome(case("decoder", backend, "bfloat16", qlora()))
    assert narrow.trajectory == pytest.approx(outcome(case("decoder", backend, qlora())).trajectory, rel=1e-3)


@pytest.mark.parametrize("workload", ["decoder", "causal_lm"])
def test_the_layers_of_peft_compute_what_lora_does_and_take_as_much(workload):
    pytest.importorskip("peft", reason="needs the package peft")
    cases = [case(workload, "torch", Applied(name=name, knobs={"rank": 4})) for name in ("lora", "peft_lora")]
    ours, theirs = map(outcome, cases)
    assert theirs.trajectory == ours.trajectory
    assert theirs.gradients.keys() == ours.gradients.keys()
    assert all((theirs.gradients[name] == gradient).all() for name, gradient in ours.gradients.items())
    assert peak(cases[0]) == peak(cases[1])
