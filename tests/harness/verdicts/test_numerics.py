"""The ladder, climbed by a two-layer decoder in NumPy: done otherwise, done coarser, and done wrong."""

import functools
import itertools
import math
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from harness.records.record import LADDER, Verdict
from harness.verdicts.numerics import UNIT_ROUNDOFF, Outcome, compare, load, save, worst

# A scale of 1 + 1e-6 comes near the bound on the largest error; these seeds keep clear of it on every CPU.
SEEDS = (5, 6, 7)
B, T, D, F, V, LAYERS = 5, 12, 128, 256, 127, 2
MATRICES = ("wq", "wk", "wv", "wo", "w1", "w2")
RATE = 0.05

# the decoder


def bfloat16(x):
    """Round float32 to the nearest bfloat16, ties to even, widened again."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)


def float16(x):
    return x.astype(np.float16).astype(np.float32)


def exact(x):
    return x


def initial(seed, dtype):
    rng = np.random.default_rng(seed)
    shapes = {"embed": (V, D)}
    for layer in range(LAYERS):
        sizes = [(D, D)] * 4 + [(D, F), (F, D)]
        shapes |= {f"layers.{layer}.{name}": size for name, size in zip(MATRICES, sizes, strict=True)}
    shapes["unembed"] = (D, V)
    # Drawn in float32, so that float64 starts from the very same numbers.
    return {
        name: rng.normal(0, 1 if name == "embed" else size[0] ** -0.5, size).astype(np.float32).astype(dtype)
        for name, size in shapes.items()
    }


def batch(seed):
    """Tokens, targets and the weight of each target: ragged rows, padded with weight 0."""
    rng = np.random.default_rng(100 + seed)
    lengths = rng.permutation([T, T - 1, T - 4, T - 7, 3])
    tokens = rng.integers(0, V - 1, (B, T + 1))  # the last token never occurs: its embedding row is unused
    return tokens[:, :-1], tokens[:, 1:], (np.arange(T) < lengths[:, None]).astype(np.float64)


def decode(p, tokens, targets, weight, count=None, store=exact, compute=exact, chunk=B * T, ahead=0, drop=None):
    """Return the weighted mean loss and its gradients.

    `store` rounds what the forward keeps for the backward, `compute` also what it passes on; `chunk` rows
    of logits exist at a time; `ahead` tokens of the future are seen; `drop` scales the embeddings.
    """
    dtype = p["embed"].dtype
    weight = (weight / (weight.sum() if count is None else count)).astype(dtype)
    drop = dtype.type(1) if drop is None else drop.astype(dtype)
    mask = np.where(np.tril(np.ones((T, T), bool), ahead), 0, -np.inf).astype(dtype)
    shrink = dtype.type(D**-0.5)
    layers = [{name: compute(p[f"layers.{layer}.{name}"]) for name in MATRICES} for layer in range(LAYERS)]
    x = p["embed"][tokens] * drop
    kept = []
    for w in layers:
        x = compute(x)
        q, k, v = (compute(x @ w[name]) for name in ("wq", "wk", "wv"))
        scores = q @ k.swapaxes(1, 2) * shrink + mask
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        a = compute(powers / powers.sum(-1, keepdims=True))
        z = compute(a @ v)
        y = compute(x + z @ w["wo"])
        h = compute(np.tanh(y @ w["w1"]))
        kept.append([store(saved) for saved in (x, q, k, v, a, z, y, h)])
        x = y + h @ w["w2"]

    grads = dict.fromkeys(p)
    rows, answers, weights = compute(x).reshape(-1, D), targets.ravel(), weight.ravel()
    loss, out = dtype.type(0), compute(p["unembed"])
    grads["unembed"], d_rows = np.zeros_like(out), np.zeros_like(rows)
    for start in range(0, len(rows), chunk):
        piece = slice(start, start + chunk)
        logits = rows[piece] @ out
        logits -= logits.max(-1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
        here = np.arange(len(logits)), answers[piece]
        loss = loss - (logits[here] * weights[piece]).sum()
        d_logits = np.exp(logits)
        d_logits[here] -= 1
        d_logits = compute(d_logits * weights[piece][:, None])
        grads["unembed"] += store(rows[piece]).T @ d_logits
        d_rows[piece] = d_logits @ out.T

    dx = d_rows.reshape(x.shape)
    for layer in reversed(range(LAYERS)):
        w, (x, q, k, v, a, z, y, h) = layers[layer], kept[layer]
        dx = compute(dx)
        du = compute(dx @ w["w2"].T * (1 - h * h))
        dy = compute(dx + du @ w["w1"].T)
        dz = compute(dy @ w["wo"].T)
        da, dv = compute(dz @ v.swapaxes(1, 2)), compute(a.swapaxes(1, 2) @ dz)
        ds = compute(a * (da - (da * a).sum(-1, keepdims=True)) * shrink)
        dq, dk = compute(ds @ k), compute(ds.swapaxes(1, 2) @ q)
        pairs = zip(MATRICES, (x, x, x, z, y, h), (dq, dk, dv, dy, du, dx), strict=True)
        for name, left, right in pairs:
            grads[f"layers.{layer}.{name}"] = np.tensordot(left, right, ((0, 1), (0, 1)))
        dx = dy + dq @ w["wq"].T + dk @ w["wk"].T + dv @ w["wv"].T
    grads["embed"] = np.zeros_like(p["embed"])
    np.add.at(grads["embed"], tokens, dx * drop)
    return loss, grads


def accumulate(p, tokens, targets, weight, mean_of_means=False):
    """Do two rows at a time, the last time one; a mean of means weighs the three alike."""
    total, grads = p["embed"].dtype.type(0), {name: np.zeros_like(array) for name, array in p.items()}
    for start in range(0, B, 2):
        rows = slice(start, start + 2)
        count = 3 * weight[rows].sum() if mean_of_means else weight.sum()
        loss, some = decode(p, tokens[rows], targets[rows], weight[rows], count)
        total = total + loss
        for name in grads:
            grads[name] += some[name]
    return total, grads


def dropout(seed, generator=7):
    return np.random.default_rng((generator, seed)).integers(0, 2, (B, T, D)) * 2.0


def outcome(step, p, updates=2):
    """Take plain gradient steps; the gradients kept are the first."""
    first, losses = None, []
    for _ in range(updates):
        loss, grads = step(p)
        first = first or grads
        losses.append(float(loss))
        p = {name: p[name] - p[name].dtype.type(RATE) * grads[name].astype(p[name].dtype) for name in p}
    return Outcome(losses[0], first, {name: str(g.dtype) for name, g in first.items()}, p, tuple(losses))


@functools.cache
def done(seed, how=decode, dtype="float32", **options):
    data = batch(seed)
    return outcome(lambda p: how(p, *data, **options), initial(seed, dtype))


def scaled(run, factor):
    return replace(run, gradients={name: g * g.dtype.type(factor) for name, g in run.gradients.items()})


def spoiled(run, **gradients):
    return replace(run, gradients={**run.gradients, **gradients})


def judge(seed, strategy, **declared):
    baseline, reference = done(seed), done(seed, dtype="float64")
    return compare(strategy, baseline, baseline, reference, layers=LAYERS, **declared)


def error(run, reference):
    return math.sqrt(
        sum(((run.gradients[n] - g) ** 2).sum() for n, g in reference.gradients.items())
        / sum((g**2).sum() for g in reference.gradients.values())
    )


def test_the_decoder_has_the_gradients_it_claims():
    p, data, rng = initial(5, "float64"), batch(5), np.random.default_rng(1)
    _, grads = decode(p, *data)
    for _ in range(3):
        way = {name: rng.normal(size=array.shape) for name, array in p.items()}
        up, down = (decode({n: p[n] + h * way[n] for n in p}, *data)[0] for h in (1e-7, -1e-7))
        assert (up - down) / 2e-7 == pytest.approx(sum((grads[n] * way[n]).sum() for n in p), rel=1e-5)


# the rungs

every_seed = pytest.mark.parametrize("seed", SEEDS)


@every_seed
def test_the_same_again_is_bit_exact(seed):
    again = outcome(lambda p: decode(p, *batch(seed)), initial(seed, "float32"))
    verdict = judge(seed, again)
    assert (verdict.verdict, verdict.grad_error_ratio, verdict.warnings) == ("bit_exact", 1.0, ())


@every_seed
@pytest.mark.parametrize(
    "other",
    [{"chunk": 7}, {"chunk": 1}, {"how": accumulate}],
    ids=["chunks of 7", "chunks of 1", "accumulated"],
)
def test_another_order_of_summing_is_reassociated(seed, other):
    verdict = judge(seed, done(seed, **other))
    assert verdict.verdict == "reassociated", verdict
    assert verdict.warnings == ()
    assert verdict.grad_error_ratio == pytest.approx(1, abs=0.25)
    assert verdict.reason.startswith("gradient error ")
    # Declaring a coarser result does not lower the rung that is reached.
    assert judge(seed, done(seed, **other), precision="bfloat16", approximate=True).verdict == "reassociated"


@every_seed
@pytest.mark.parametrize("factor", [1 + 1e-4, 1 - 1e-4, 1 + 1e-5])
def test_a_small_scale_diverges(seed, factor):
    verdict = judge(seed, scaled(done(seed), factor))
    assert verdict.verdict == "diverged"
    assert verdict.bias_ratio > 0.9
    assert verdict.worst_tensor in verdict.reason
    assert verdict.worst_ratio > 3


@every_seed
def test_a_scale_below_rounding_passes_with_a_warning(seed):
    verdict = judge(seed, scaled(done(seed), 1 + 1e-6))
    assert verdict.verdict == "reassociated", verdict
    assert ["bias" in warning for warning in verdict.warnings] == [True]


def dropped(seed):
    tokens, targets, weight = batch(seed)
    weight[0, 1] = 0
    return outcome(lambda p: decode(p, tokens, targets, weight), initial(seed, "float32"))


def stale(seed):
    """Return one matrix's gradient as it was an update earlier."""
    return spoiled(done(seed), **{"layers.1.w2": decode(done(seed).parameters, *batch(seed))[1]["layers.1.w2"]})


@every_seed
@pytest.mark.parametrize(
    "bug",
    [
        dropped,
        stale,
        lambda seed: done(seed, ahead=1),
        lambda seed: done(seed, how=accumulate, mean_of_means=True),
    ],
    ids=["dropped token", "stale gradient", "shifted mask", "mean of means"],
)
def test_a_bug_diverges_whatever_is_declared(seed, bug):
    verdict = judge(seed, bug(seed))
    assert verdict.verdict == "diverged"
    assert verdict.grad_error_ratio > 1000
    assert "x the baseline's own in " in verdict.reason
    assert judge(seed, bug(seed), precision="float16").verdict == "diverged"


@pytest.mark.parametrize(("off", "verdict"), [(1e-6, "reassociated"), (0.25, "diverged")])
def test_beside_a_loss_of_0_a_later_one_is_off_by_itself(off, verdict):
    baseline, strategy = (
        replace(run, trajectory=(run.loss, last)) for run, last in ((done(5), 0.0), (done(5, chunk=7), off))
    )
    answer = compare(strategy, baseline, baseline, done(5, dtype="float64"), layers=LAYERS)
    assert answer.verdict == verdict
    assert verdict == "reassociated" or "by update 2 the loss is off by 2.5e-01" in answer.reason


@every_seed
def test_another_dropout_generator_diverges(seed):
    def run(generator, dtype="float32", **options):
        drop = dropout(seed, generator)
        return outcome(lambda p: decode(p, *batch(seed), drop=drop, **options), initial(seed, dtype))

    baseline, reference = run(7), run(7, "float64")
    judged = functools.partial(compare, baseline=baseline, baseline_again=run(7), reference=reference, layers=LAYERS)
    assert judged(run(7)).verdict == "bit_exact"
    assert judged(run(7, chunk=7)).verdict == "reassociated"
    assert judged(run(8)).verdict == "diverged"


@every_seed
@pytest.mark.parametrize(("precision", "rounding"), [("bfloat16", bfloat16), ("float16", float16)])
def test_coarser_activations_must_be_declared(seed, precision, rounding):
    strategy = done(seed, store=rounding)
    assert judge(seed, strategy).verdict == "diverged"
    verdict = judge(seed, strategy, precision=precision)
    assert verdict.verdict == "lower_precision", verdict
    assert error(strategy, done(seed, dtype="float64")) / UNIT_ROUNDOFF[precision] < 1
    # Declaring another precision than the one used does not help.
    if precision == "bfloat16":
        assert judge(seed, strategy, precision="float16").verdict == "diverged"


@every_seed
@pytest.mark.parametrize("factor", [1.01, 1.002])
def test_declared_rounding_has_no_direction(seed, factor):
    verdict = judge(seed, scaled(done(seed, store=bfloat16), factor), precision="bfloat16")
    assert verdict.verdict == "diverged"
    assert "bias" in verdict.reason
    assert verdict.bias_ratio > 0.35


@every_seed
def test_the_baseline_at_the_declared_precision_sets_the_bound(seed):
    low = done(seed, compute=bfloat16)
    judged = functools.partial(judge, seed, precision="bfloat16")
    assert judged(low).verdict == "lower_precision"
    assert judged(low, baseline_low=low).verdict == "lower_precision"
    # Without it 4 roundoffs are allowed; beside a run that is finer, twice that run's error.
    finer = done(seed, store=float16)
    assert judged(low, baseline_low=finer).verdict == "diverged"
    assert "above" in judged(low, baseline_low=finer).reason
    # One that came out broken cannot judge.
    assert judged(low, baseline_low=replace(finer, loss=math.nan)).verdict == "lower_precision"


@every_seed
def test_a_declared_algorithm_is_shown_not_judged(seed):
    strategy = done(seed, ahead=1)
    verdict = judge(seed, strategy, approximate=True)
    assert verdict.verdict == "approximate"
    assert verdict.grad_error_ratio > 1000
    assert judge(seed, strategy, approximate=True, precision="bfloat16").verdict == "approximate"
    assert judge(seed, spoiled(strategy, embed=None), approximate=True).verdict == "invalid"


@every_seed
def test_what_cannot_be_compared_is_invalid(seed):
    run = done(seed)
    unused_row = run.gradients["embed"].copy()
    unused_row[V - 1, 0] = np.nan
    missing = dict(run.gradients)
    del missing["layers.1.wk"]
    half = {name: g.astype(np.float16) for name, g in run.gradients.items()}
    broken = {
        "gradient of embed holds NaN": spoiled(run, embed=unused_row),
        "gradient of unembed holds NaN": spoiled(run, unembed=run.gradients["unembed"] * np.float32(np.inf)),
        "no gradient of layers.1.wk": replace(run, gradients=missing),
        "no gradient of layers.0.wq": spoiled(run, **{"layers.0.wq": None}),
        "extra gradient of bias": spoiled(run, bias=np.zeros(3, np.float32)),
        "of embed has shape": spoiled(run, embed=run.gradients["embed"].T),
        "is float16, not float32": replace(run, gradients=half, dtypes=dict.fromkeys(half, "float16")),
        "embed is bfloat16, not float32": replace(run, dtypes={**run.dtypes, "embed": "bfloat16"}),
        "parameter of embed holds NaN": replace(run, parameters={**run.parameters, "embed": unused_row}),
        "no updated parameter of": replace(run, parameters={}),
        "loss is NaN": replace(run, loss=math.nan),
        "loss is NaN or infinite": replace(run, trajectory=(run.loss, math.inf)),
        "1 updates were made, not 2": replace(run, trajectory=run.trajectory[:1]),
    }
    for reason, strategy in broken.items():
        verdict = judge(seed, strategy)
        assert (verdict.verdict, verdict.grad_error_ratio) == ("invalid", None), reason
        assert reason in verdict.reason
    assert np.count_nonzero(run.gradients["embed"][V - 1]) == 0


def test_a_declared_dtype_may_change_the_gradients_dtype():
    run = done(5, store=bfloat16)
    low = replace(
        run,
        gradients={name: bfloat16(g) for name, g in run.gradients.items()},
        dtypes=dict.fromkeys(run.dtypes, "bfloat16"),
    )
    assert judge(5, low).verdict == "invalid"
    assert judge(5, low, precision="bfloat16").verdict == "lower_precision"


def test_a_baseline_that_is_off_is_blamed():
    run, reference = done(5), done(5, dtype="float64")
    judged = functools.partial(compare, layers=LAYERS)
    off = scaled(run, 1 + 5e-6)
    assert "the baseline is at fault" in judged(off, off, off, reference).reason
    assert "repeat itself" not in judged(off, off, off, reference).reason
    assert judged(off, off, run, reference).reason.endswith("changes its buffers or draws random numbers")
    assert judged(off, off, off, reference).verdict == "invalid"
    assert judged(off, off, off, reference, dtype="bfloat16").verdict == "bit_exact"
    assert "the baseline is at fault" in judged(run, spoiled(run, embed=None), run, reference).reason
    assert "reference is at fault" in judged(run, run, run, replace(reference, loss=math.inf)).reason
    assert "reference is at fault" in judged(run, run, run, replace(reference, gradients={})).reason


def test_nothing_is_bit_exact_beside_a_baseline_that_does_not_repeat():
    run, reference = done(5), done(5, dtype="float64")
    verdict = compare(run, run, done(5, chunk=7), reference, layers=LAYERS)
    assert verdict.verdict == "reassociated"
    assert any("does not repeat" in warning for warning in verdict.warnings)


@pytest.mark.parametrize("changes", [{"trajectory": (3.0, 2.0 + 2**-40)}, {"evaluation": 2.0 + 2**-40}])
def test_one_bit_of_a_later_loss_is_not_bit_exact(changes):
    baseline = replace(done(5), trajectory=(3.0, 2.0), evaluation=2.0)
    verdict = compare(replace(baseline, **changes), baseline, baseline, done(5, dtype="float64"), layers=LAYERS)
    assert verdict.verdict == "reassociated"


def test_an_evaluation_survives_the_disk_and_must_be_finite(tmp_path):
    run = replace(done(5), evaluation=0.1)
    save(tmp_path / "a.npz", run)
    assert load(tmp_path / "a.npz").evaluation == 0.1
    verdict = judge(5, replace(done(5), evaluation=math.nan))
    assert (verdict.verdict, verdict.reason) == ("invalid", "a loss is NaN or infinite")


@pytest.mark.parametrize("what", ["loss", "gradients", "parameters"])
def test_one_bit_is_not_bit_exact(what):
    run = done(5)
    if what == "loss":
        other = replace(run, loss=math.nextafter(run.loss, math.inf))
    else:
        arrays = dict(getattr(run, what))
        arrays["unembed"] = arrays["unembed"].copy()
        arrays["unembed"][0, 0] = np.nextafter(arrays["unembed"][0, 0], np.float32(1))
        other = replace(run, **{what: arrays})
    assert judge(5, other).verdict == "reassociated"


def test_minus_zero_is_another_bit_pattern():
    run = done(5)
    embed = run.gradients["embed"].copy()
    assert embed[V - 1, 0] == 0
    embed[V - 1, 0] = -0.0
    assert judge(5, spoiled(run, embed=embed)).verdict == "reassociated"


# the constants, on gradients whose errors are known exactly

U = UNIT_ROUNDOFF["float32"]


def known(loss=1.0, **gradients):
    arrays = {name: np.array(values, dtype=np.float64) for name, values in gradients.items()}
    return Outcome(loss, arrays, dict.fromkeys(arrays, "float32"), {}, (loss,))


def verdict_of(strategy, baseline, reference, **declared):
    return compare(strategy, baseline, baseline, reference, **{"layers": 1, **declared})


@pytest.mark.parametrize(("factor", "rung"), [(0.999, "reassociated"), (1.001, "diverged")])
@pytest.mark.parametrize("bound", ["gradient error", "gradient error in b", "largest", "loss"])
def test_each_bound_of_reassociated_binds(bound, factor, rung):
    e, many, small = 1e-6, [0.0] * 99, 2.0**-10
    if bound == "gradient error":  # a norm of 1 beside the 8 keeps ulp(8), and so the bound on the largest, wide
        reference, baseline = known(a=[1, 8, 0]), known(a=[1, 8, e])
        strategy = known(a=[1, 8, factor * (2 * e + U * math.hypot(1, 8))])
    elif bound == "gradient error in b":
        reference, baseline = known(a=[1, 0], b=[small, 0]), known(a=[1, e], b=[small, small * e])
        strategy = known(a=[1, 0], b=[small, factor * small * (3 * e + 4 * U)])
    elif bound == "largest":  # ulp(1) = 2 U
        reference, baseline = known(a=[1, 0, *many]), known(a=[1, *[e] * 100])
        strategy = known(a=[1, factor * (2 * e + 4 * U), *many])
    else:
        reference, baseline = known(loss=3, a=[1, 0]), known(loss=3 + e, a=[1, e])
        strategy = known(loss=3 + factor * (2 * e + 4 * U * 3), a=[1, e])
    seen = verdict_of(strategy, baseline, reference, layers=100)
    assert seen.verdict == rung, seen
    if rung == "diverged":
        assert seen.reason.startswith(bound.removesuffix(" in b"))
        assert seen.reason.endswith(" in b") == bound.endswith(" in b")


@pytest.mark.parametrize(("factor", "rung"), [(0.999, "lower_precision"), (1.001, "diverged")])
def test_the_bounds_of_lower_precision_bind(factor, rung):
    reference, baseline = known(a=[1, 0]), known(a=[1, 1e-7])
    declared = {"precision": "float16"}
    unit = UNIT_ROUNDOFF["float16"]
    size = known(a=[1, factor * 4 * unit])
    assert verdict_of(size, baseline, reference, **declared).verdict == rung
    low = known(a=[1, 1e-3])
    assert verdict_of(known(a=[1, factor * 2e-3]), baseline, reference, baseline_low=low, **declared).verdict == rung
    bias = 0.35 * factor
    turned = known(a=[1 + unit * bias, unit * math.sqrt(1 - bias**2)])
    seen = verdict_of(turned, baseline, reference, **declared)
    assert seen.verdict == rung
    assert seen.bias_ratio == pytest.approx(bias)


@pytest.mark.parametrize(("factor", "rung"), [(1.0, "lower_precision"), (1.24, "lower_precision"), (1.26, "diverged")])
def test_a_baseline_whose_rounding_has_a_common_scale_sets_the_bound_of_it(factor, rung):
    def biased(share):
        return known(a=[1 + 1e-3 * share, 1e-3 * math.sqrt(1 - share**2)])

    declared = {"precision": "float16", "baseline_low": biased(0.4)}
    seen = verdict_of(biased(0.4 * factor), known(a=[1, 1e-7]), known(a=[1, 0]), **declared)
    assert seen.verdict == rung, seen.reason
    assert rung == "lower_precision" or "above 0.50, 1.25 x the baseline's in float16" in seen.reason


@pytest.mark.parametrize(("factor", "rung"), [(0.999, "lower_precision"), (1.001, "diverged")])
@pytest.mark.parametrize("where", ["trajectory", "evaluation"])
def test_losses_bind_in_a_lower_precision(where, factor, rung):
    unit = UNIT_ROUNDOFF["float16"]

    def run(off, size=unit):
        losses = {"trajectory": (1.0, 1.0, 1.0 + off)} if where == "trajectory" else {"evaluation": 1.0 + off}
        return replace(known(a=[1, size]), **losses)

    reference, baseline, low = run(0, 0), run(0, 1e-7), run(-0.01)
    judged = functools.partial(verdict_of, baseline=baseline, reference=reference, precision="float16")
    assert judged(run(factor * 2 * unit)).verdict == rung
    seen = judged(run(factor * (0.02 + 2 * unit)), baseline_low=low)
    assert seen.verdict == rung
    if rung == "diverged":
        assert {"trajectory": "by update 3", "evaluation": "in the evaluation"}[where] in seen.reason


@pytest.mark.parametrize(("factor", "rung"), [(0.999, "bit_exact"), (1.001, "invalid")])
@pytest.mark.parametrize(("layers", "dtype"), [(1, "float32"), (16, "float32"), (4, "bfloat16")])
def test_the_baseline_may_be_off_by_fifty_roundoffs_per_root_layer(layers, dtype, factor, rung):
    baseline = known(a=[1, factor * 50 * UNIT_ROUNDOFF[dtype] * math.sqrt(layers)])
    assert verdict_of(baseline, baseline, known(a=[1, 0]), layers=layers, dtype=dtype).verdict == rung


def test_a_bias_of_half_the_error_warns():
    reference, baseline = known(a=[1, 0]), known(a=[1, 1e-6])
    for bias, warned in ((0.49, False), (0.51, True)):
        strategy = known(a=[1 + 1e-6 * bias, 1e-6 * math.sqrt(1 - bias**2)])
        seen = verdict_of(strategy, baseline, reference)
        assert (seen.verdict, bool(seen.warnings)) == ("reassociated", warned)


@pytest.mark.parametrize("zero", [0.0, 1e-17])
def test_a_gradient_of_zero_is_measured_against_the_whole(zero):
    """Noise where the truth is zero, like the gradient of a key bias, is no bug while it is below u."""
    reference, baseline = known(a=[3, 4], bias=[zero]), known(a=[3, 4 + 1e-6], bias=[1e-9])
    assert verdict_of(known(a=[3, 4 + 1e-6], bias=[-8e-9]), baseline, reference).verdict == "reassociated"
    seen = verdict_of(known(a=[3, 4 + 1e-6], bias=[1e-4]), baseline, reference)
    assert (seen.verdict, seen.worst_tensor) == ("diverged", "bias")


def test_no_error_to_divide_by():
    reference = known(a=[3, 4], b=[0, 0])
    same = verdict_of(known(loss=1 + 1e-9, a=[3, 4], b=[0, 0]), reference, reference)
    assert (same.verdict, same.grad_error_ratio, same.bias_ratio) == ("reassociated", 1.0, 0.0)
    off = verdict_of(known(a=[3, 5], b=[0, 0]), reference, reference)
    assert (off.verdict, off.grad_error_ratio, off.worst_ratio) == ("diverged", None, None)
    assert "against none" in off.reason
    nothing = known(a=[0, 0])
    assert verdict_of(nothing, nothing, nothing).verdict == "bit_exact"
    assert verdict_of(known(a=[0, 1e-30]), nothing, nothing).verdict == "diverged"
    assert verdict_of(nothing, known(a=[0, 1e-30]), nothing).verdict == "invalid"


def test_the_reason_names_the_worst_and_the_first_tensor():
    names = ["embed", "layers.0.wq", "layers.1.wq"]
    reference, baseline = (known(**{name: [1, e] for name in names}) for e in (0, 1e-7))
    strategy = known(**{"embed": [1, 1e-7], "layers.0.wq": [1, 1e-5], "layers.1.wq": [1, 1e-4]})
    seen = verdict_of(strategy, baseline, reference)
    assert seen.worst_tensor == "layers.1.wq"
    assert seen.worst_ratio == pytest.approx(1000)
    assert seen.reason == "gradient error 1e+03 x the baseline's own in layers.1.wq, first in layers.0.wq"


def test_an_unknown_dtype_or_no_layers_is_refused():
    run = known(a=[1.0])
    for declared in ({"dtype": "int4"}, {"precision": "int3"}, {"layers": 0}):
        with pytest.raises(ValueError, match=r"int4|int3|layers is 0"):
            verdict_of(run, run, run, **declared)


# several seeds


def test_the_lowest_rung_of_all_seeds_counts():
    def seed(rung, ratio=1.0, *warnings):
        return Verdict(rung, ratio, 0.0, "a", ratio, warnings, f"{rung} {ratio}")

    for better, worse in itertools.pairwise(LADDER):
        assert worst([seed(better, 9.0), seed(worse), seed(better)]).reason == f"{worse} 1.0"
    assert worst([seed("reassociated", 1.0), seed("reassociated", 1.5)]).grad_error_ratio == 1.5
    assert worst([seed("diverged", 2.1), seed("diverged", None)]).grad_error_ratio is None, "infinite is the worst"
    assert worst([seed("invalid", None), seed("diverged", 7.0)]).verdict == "invalid"
    assert worst([seed("bit_exact", 1, "x"), seed("diverged", 9, "y"), seed("diverged", 2, "x")]).warnings == ("x", "y")
    with pytest.raises(ValueError, match="at least one seed"):
        worst([])


# files


def test_an_outcome_survives_the_disk_bit_for_bit(tmp_path):
    run = done(5, dtype="float64")
    odd = {
        "file": np.array([[-0.0, np.nan]], np.float32),
        "../a/b": np.array(1e-300),
        "none": None,
        "": np.zeros((0, 2), np.float16),
    }
    for written in (run, Outcome(math.nan, odd, {"file": "bfloat16"}, {"none": np.ones(2)}, (1.0, math.inf))):
        path = tmp_path / "outcome.npz"
        save(path, written)
        read = load(path)
        assert repr((read.loss, read.trajectory)) == repr((written.loss, written.trajectory))
        assert read.dtypes == written.dtypes
        for mine, its in ((read.gradients, written.gradients), (read.parameters, written.parameters)):
            assert list(mine) == list(its)
            for name, array in its.items():
                if array is None:
                    assert mine[name] is None
                else:
                    assert (mine[name].dtype, mine[name].shape) == (array.dtype, array.shape)
                    assert mine[name].tobytes() == array.tobytes()
        assert [entry.name for entry in tmp_path.iterdir()] == ["outcome.npz"]


def test_what_would_need_pickle_is_not_written(tmp_path):
    for bad in (np.array([None]), np.array(["x"]), np.array([1])):
        with pytest.raises(ValueError, match="gradients of a are"):
            save(tmp_path / "outcome.npz", Outcome(0.0, {"a": bad}, {}, {}, ()))
    assert list(tmp_path.iterdir()) == []


def test_other_files_are_not_outcomes(tmp_path):
    path = tmp_path / "outcome.npz"
    with pytest.raises(FileNotFoundError):
        load(path)
    save(path, done(5))
    whole = path.read_bytes()
    with np.load(path) as file:
        arrays = dict(file)

    def lost(name):
        return {key: array for key, array in arrays.items() if key != name}

    for wrong in (
        lost("names"),
        lost("losses"),
        lost("gradients_3"),
        {**arrays, "gradients_3": np.array(["x"])},
    ):
        np.savez(path, **wrong)
        with pytest.raises(ValueError, match="not a saved outcome"):
            load(path)
    np.savez(path, **{**arrays, "gradients_3": np.array([{}], dtype=object)})
    with pytest.raises(ValueError, match="not a saved outcome"):
        load(path)
    for content in (b"", b"no", whole[: len(whole) // 2], b"\x80\x04}."):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="not a saved outcome"):
            load(path)


def test_importing_it_loads_no_array_library():
    code = "import sys, harness.verdicts.numerics; print({'numpy', 'torch', 'jax'} & set(sys.modules))"
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"
