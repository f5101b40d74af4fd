"""The judge of answers, run whole: what is the same is told so, and every kind of wrong strategy is found out."""

from functools import cache

import pytest

from harness import Place, backends
from harness.contract import plugins
from harness.records import Applied, Case, Task
from harness.run import runner
from harness.worker import numerics

MUTANTS = '''
from dataclasses import replace

from harness import Holding, Strategy, hookimpl, tree
from harness.workloads import decoder


def scaled(parts, by: float = 0.0):
    inner = parts.loss
    return replace(parts, loss=lambda parts, x, w, y: inner(parts, x, w, y) * (1 + by))


def shifted_mask(parts):
    """Leave out the neighbours of the ignored targets."""
    inner = parts.loss

    def loss(parts, x, w, y):
        kept = (y != -100).roll(1, -1)
        return inner(parts, x, w, y.clamp(min=0).where(kept, -100))

    return replace(parts, loss=loss)


def dropped_token(parts):
    inner = parts.loss

    def loss(parts, x, w, y):
        y = y.clone()
        y[:, -1] = -100
        return inner(parts, x, w, y)

    return replace(parts, loss=loss)


def mean_of_means(parts):
    inner = parts.loss

    def loss(parts, x, w, y):
        import torch

        pairs = zip(x.reshape(-1, x.shape[-1]).split(23), y.reshape(-1).split(23))
        return torch.stack([inner(parts, x_CD, w, y_C) for x_CD, y_C in pairs]).mean()

    return replace(parts, loss=loss)


def stale_row(parts):
    """Take the gradient of one row of the batch for the next one as well, as a buffer not cleared would."""
    inner = parts.grad

    def grad(parts, state, x, y):
        return inner(parts, state, x[[0, 0, *range(2, len(x))]], y[[0, 0, *range(2, len(y))]])

    return replace(parts, grad=grad)


def stale_gradient(parts):
    """Give each update the gradients of the one before; the first gets its own."""
    inner = parts.grad

    def grad(parts, state, x, y):
        value, grads = inner(parts, {**state}, x, y)
        previous = state.get("previous", grads)
        state["previous"] = grads
        return value, previous

    return replace(parts, grad=grad)


def stored_low(parts, by: float = 0.0):
    """Round what leaves each block to bfloat16."""
    inner = parts.block

    def block(parts, p, x):
        import torch

        return inner(parts, p, x).to(torch.bfloat16).float()

    return scaled(replace(parts, block=block), by) if by else replace(parts, block=block)


def changed(parts, change, update=None):
    inner, inner_update = parts.grad, parts.update

    def grad(parts, state, x, y):
        value, grads = inner(parts, state, x, y)
        return value, change(dict(grads))

    def filled(parts, state, grads):
        head = grads.get("head")
        head = state["params"]["head"] * 0 if head is None else head
        in_order = {name: grads.get(name) for name in state["params"]}
        return inner_update(parts, state, {**in_order, "head": head.detach()})

    return replace(parts, grad=grad, update=filled if update else parts.update)


def not_a_number(parts):
    def change(grads):
        grads["embed"][5] = float("nan")
        return grads

    return changed(parts, change)


def other_shape(parts):
    return changed(parts, lambda grads: {**grads, "head": grads["head"].sum(1, keepdim=True)})


def missing(parts):
    return changed(parts, lambda grads: {k: v for k, v in grads.items() if k != "head"}, update=True)


def none(parts):
    return changed(parts, lambda grads: {**grads, "head": None}, update=True)


def other_dtype(parts):
    return changed(parts, lambda grads: {**grads, "norm": grads["norm"].double()})


def flipped_update(parts):
    inner = parts.update
    return replace(parts, update=lambda parts, state, grads: inner(parts, state, tree.mapped(lambda g: -g, grads)))


def uncorrected_update(parts):
    """Leave out the correction of AdamW's moments for their start at zero: after many steps it is 1."""
    inner = parts.update
    return replace(parts, update=lambda parts, state, grads: inner(parts, {**state, "steps": 10**6}, grads))


def undecayed_update(parts):
    """Forget the weight decay of AdamW."""
    inner, undecayed = parts.update, parts.shape.model_copy(update={"weight_decay": 0.0})
    return replace(parts, update=lambda parts, *rest: inner(replace(parts, shape=undecayed), *rest))


def mean_of_batches(parts):
    """Average the means of the batches that are evaluated, whatever number of targets each has."""
    inner = parts.evaluate

    def evaluate(parts, state, batches):
        import torch

        return torch.stack([inner(parts, state, [batch]) for batch in batches]).mean()

    return replace(parts, evaluate=evaluate)


def forgetful(parts, what: str = "moments"):
    """Lose the moments, or the number of steps, of a run that is resumed."""
    inner = parts.resume

    def resume(parts, source, file):
        return {**inner(parts, source, file), what: None if what == "moments" else 0}

    return replace(parts, resume=resume)


def lossy(parts):
    """Give two windows again and again."""
    return replace(parts, order=lambda parts, source, epoch: lambda start, stop: [n % 2 for n in range(start, stop)])


def through_frequencies(shape, place, corpus, seed=0):
    """A model with an operator that has no form in 16 bits."""
    import torch

    parts = decoder.on_torch(shape, place, corpus, seed)
    inner = parts.feed

    def feed(parts, p, x):
        y = inner(parts, p, x)
        return torch.fft.irfft(torch.fft.rfft(y, dim=-1), n=y.shape[-1], dim=-1)

    return replace(parts, feed=feed)


def never_used(parts):
    return replace(parts, source=parts.source, draw=parts.draw, cache=lambda parts: None)


@hookimpl
def harness_strategies():
    def one(function, *rewrites, name=None, **declared):
        on = {"torch": function, "jax": function}
        return Strategy(name or function.__name__, rewrites, on, "Be wrong.", **declared)

    return [
        one(scaled, "loss"),
        one(shifted_mask, "loss"),
        one(dropped_token, "loss"),
        one(mean_of_means, "loss"),
        one(stale_row, "grad"),
        one(stale_gradient, "grad"),
        one(stored_low, "block"),
        one(stored_low, "block", name="declared_low", precision="bfloat16"),
        one(stored_low, "block", "loss", name="declared_low_scaled", precision="bfloat16"),
        one(stored_low, "block", name="declared_approximate", approximate=True),
        one(not_a_number, "grad"),
        one(other_shape, "grad"),
        one(missing, "grad", "update"),
        one(none, "grad", "update"),
        one(other_dtype, "grad"),
        one(flipped_update, "update"),
        one(uncorrected_update, "update"),
        one(undecayed_update, "update"),
        one(mean_of_batches, "evaluate"),
        one(forgetful, "resume"),
        one(never_used, "cache"),
        one(lossy, "order", feeds="reordered", holds=lambda extent: Holding()),
    ]


@hookimpl
def harness_workloads():
    made, *_ = decoder.harness_workloads()
    return [replace(made, name="frequencies", on={"torch": through_frequencies})]
'''


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """A function from strategies to what the harness records of their answer; the yardsticks are made once."""
    folder = tmp_path_factory.mktemp("answers")
    path = folder / "mutants.py"
    path.write_text(MUTANTS)
    loaded = plugins.load((str(path),))
    workload = loaded.workloads["decoder"]
    shape = workload.probe(workload.shape(layers=2)).model_dump()

    def task(kind, backend, applied, sizes, name="decoder"):
        case = Case(
            workload=name,
            shape=shape | dict(sizes),
            place=f"{backend}/cpu",
            corpus="drawn",
            tokenizer="none",
            strategies=applied,
        )
        settings = {"run_id": "test", "parent": 0, "folder": str(folder), "plugins": (str(path),)}
        own = "-".join(map(str, (name, backend, *sum(sizes, ()))))
        return Task(kind=kind, cases=(case,), reference=str(folder / own), **settings)

    @cache
    def yardsticks(backend, sizes, name):
        module = backends.load(backend)
        module.start(Place(backend, "cpu"))
        if backend == "jax":  # its 64-bit mode is chosen when a process starts
            (made,) = runner.run(task("reference", backend, (), sizes, name), 1, 120.0)
        else:
            made = numerics.measure(task("reference", backend, (), sizes, name), loaded, module)
        assert made.status == "ok", made.evidence
        plain = numerics.measure(task("numerics", backend, (), sizes, name), loaded, module)
        assert plain.numerics.verdict == "bit_exact"
        return module

    def judged(*applied, backend="torch", seeds=numerics.SEEDS, workload="decoder", **sizes):
        sizes = tuple(sizes.items())
        module = yardsticks(backend, sizes, workload)
        given = tuple(Applied(name=name, knobs=knobs) for name, knobs in applied)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(numerics, "SEEDS", seeds)
            return numerics.measure(task("numerics", backend, given, sizes, workload), loaded, module)

    return judged


ONE = (0,)
"""The seed of what does not depend on it; what does is asked of every one."""


def on_every_seed(bench, *applied):
    return [bench(*applied, seeds=(seed,)).numerics for seed in numerics.SEEDS]


# What is the same


def test_nothing_is_bit_exact(bench):
    assert bench(("nothing", {})).numerics.verdict == "bit_exact"


@pytest.mark.parametrize("name", ["numpy_copy", "python_lists", "strided_view"])
def test_windows_held_otherwise_are_bit_exact(bench, name):
    record = bench((name, {}), seeds=ONE)
    assert record.status == "ok", record.evidence
    assert record.numerics.verdict == "bit_exact"


def test_a_checkpoint_is_bit_exact(bench):
    assert bench(("checkpoint", {"every": 2})).numerics.verdict == "bit_exact"


@pytest.mark.parametrize("name", ["chunked_loss", "fused_loss"])
def test_a_loss_in_chunks_is_reassociated(bench, name):
    verdict = bench((name, {"chunk": 23})).numerics
    assert verdict.verdict == "reassociated", verdict.reason
    assert 0.5 < verdict.grad_error_ratio < 2
    assert not verdict.warnings


def test_a_composition_is_reassociated(bench):
    verdict = bench(("checkpoint", {}), ("chunked_loss", {"chunk": 23})).numerics
    assert verdict.verdict == "reassociated", verdict.reason


@pytest.mark.long
@pytest.mark.parametrize("name", ["checkpoint", "chunked_loss"])
def test_in_jax_as_well(bench, name):
    knobs = {"chunk": 23} if name == "chunked_loss" else {}
    verdict = bench((name, knobs), backend="jax").numerics
    assert verdict.verdict in ("bit_exact", "reassociated"), verdict.reason


@pytest.mark.long
def test_in_jax_nothing_is_bit_exact_and_a_wrong_scale_diverges(bench):
    assert bench(("nothing", {}), backend="jax").numerics.verdict == "bit_exact"
    assert bench(("scaled", {"by": 1e-4}), backend="jax").numerics.verdict == "diverged"


# What is not


@pytest.mark.parametrize("by", [1e-6, 1e-5, 1e-4])
def test_a_wrong_scale_diverges_on_every_seed(bench, by):
    verdicts = on_every_seed(bench, ("scaled", {"by": by}))
    assert [verdict.verdict for verdict in verdicts] == ["diverged"] * 3
    assert all(verdict.bias_ratio > 0.5 for verdict in verdicts)


def test_a_scale_as_small_as_rounding_is_warned_of(bench):
    """Below about sqrt(3) times the baseline's own error, 2e-7 at this probe, a wrong scale cannot be told."""
    verdict = bench(("scaled", {"by": 2.0**-22})).numerics
    assert verdict.verdict == "reassociated", verdict.reason
    assert any("bias" in warning for warning in verdict.warnings)


@pytest.mark.parametrize(
    "name", ["shifted_mask", "dropped_token", "mean_of_means", "stale_row", "stale_gradient", "stored_low"]
)
def test_a_bug_diverges_on_every_seed(bench, name):
    verdicts = on_every_seed(bench, (name, {}))
    assert [verdict.verdict for verdict in verdicts] == ["diverged"] * 3, [v.reason for v in verdicts]


def test_a_declared_precision_is_lower_precision(bench):
    verdict = bench(("declared_low", {})).numerics
    assert verdict.verdict == "lower_precision", verdict.reason


def test_the_precision_of_this_project_is_lower_precision(bench):
    record = bench(("bfloat16", {}))
    assert record.status == "ok", record.evidence
    verdict = record.numerics
    assert verdict.verdict == "lower_precision", verdict.reason


@pytest.mark.parametrize("by", [0.01, 0.002])
def test_a_declared_precision_does_not_excuse_a_wrong_scale(bench, by):
    for verdict in on_every_seed(bench, ("declared_low_scaled", {"by": by})):
        assert verdict.verdict == "diverged", verdict.reason
        assert verdict.bias_ratio > 0.35, "where the size of the error does not tell, its direction does"


def test_an_update_that_forgets_the_weight_decay_diverges_on_every_seed(bench):
    verdicts = on_every_seed(bench, ("undecayed_update", {}))
    assert [verdict.verdict for verdict in verdicts] == ["diverged"] * 3, [v.reason for v in verdicts]


@pytest.mark.parametrize("bug", ["flipped_update", "uncorrected_update"])
@pytest.mark.parametrize("precision", ["bfloat16", "float16_scaled", "int8_activations"])
def test_a_declared_precision_does_not_excuse_a_wrong_update(bench, precision, bug):
    verdict = bench((precision, {}), (bug, {}), seeds=ONE).numerics
    assert verdict.verdict == "diverged", verdict.reason
    assert "the loss is off by" in verdict.reason


@pytest.mark.parametrize("names", [("bfloat16", "float8_matmul"), ("float8_matmul", "bfloat16")])
def test_the_coarsest_precision_of_a_row_counts(bench, names):
    verdict = bench(*((name, {}) for name in names)).numerics
    assert verdict.verdict == "lower_precision", verdict.reason
    assert "float8" in verdict.reason


@pytest.mark.parametrize("rate", [0.0, 1e-6])
def test_a_bug_of_the_update_is_seen_whatever_the_learning_rate(bench, rate):
    verdict = bench(("stale_gradient", {}), seeds=ONE, learning_rate=rate).numerics
    assert verdict.verdict == "diverged", verdict.reason


# The end of a run


@pytest.mark.parametrize("name", ["nothing", "streamed_resume", "streamed_save"])
def test_a_run_that_goes_on_as_before_is_bit_exact(bench, name):
    verdict = bench((name, {}), evaluations=3).numerics
    assert verdict.verdict == "bit_exact", verdict.reason


def test_an_evaluation_in_batches_is_reassociated(bench):
    verdict = bench(("loss_only_evaluation", {}), evaluations=3).numerics
    assert verdict.verdict in ("bit_exact", "reassociated"), verdict.reason


def test_an_evaluation_that_averages_batches_diverges(bench):
    verdict = bench(("mean_of_batches", {}), evaluations=3).numerics
    assert verdict.verdict == "diverged", verdict.reason
    assert "in the evaluation the loss is off by" in verdict.reason


@pytest.mark.parametrize("what", ["moments", "steps"])
def test_what_is_lost_of_a_resumed_run_diverges(bench, what):
    verdict = bench(("forgetful", {"what": what}), evaluations=3).numerics
    assert verdict.verdict == "diverged", verdict.reason
    assert f"by update {numerics.UPDATES + numerics.RESUMED} the loss is off by" in verdict.reason


def test_a_declared_approximation_is_shown_with_its_error(bench):
    verdict = bench(("declared_approximate", {})).numerics
    assert verdict.verdict == "approximate"
    assert verdict.grad_error_ratio > 2


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("not_a_number", "gradient of embed holds NaN"),
        ("other_shape", "gradient of head has shape"),
        ("missing", "no gradient of head"),
        ("none", "no gradient of head"),
        ("other_dtype", "gradient of norm is float64, not float32"),
    ],
)
def test_what_cannot_be_compared_is_invalid(bench, name, told):
    verdict = bench((name, {}), seeds=ONE).numerics
    assert verdict.verdict == "invalid"
    assert told in verdict.reason


def test_a_strategy_that_never_ran_is_an_error(bench):
    record = bench(("never_used", {}))
    assert (record.status, record.numerics) == ("error", None)
    assert "'never_used' rewrote 'cache', but it was never called" in record.evidence["message"]


@pytest.mark.parametrize("beside", [(), ("declared_low",)])
def test_an_order_that_loses_windows_is_invalid_whatever_stands_beside_it(bench, beside):
    verdict = bench(("lossy", {}), *((name, {}) for name in beside), seeds=ONE).numerics
    assert verdict.verdict == "invalid" and verdict.reason.startswith("an epoch gives 2 of "), verdict


def test_where_a_model_cannot_run_at_a_precision_its_roundoff_sets_the_bound(bench):
    verdict = bench(("declared_low", {}), seeds=ONE, workload="frequencies").numerics
    assert verdict.verdict == "lower_precision" and "4 x the roundoff of bfloat16" in verdict.reason, verdict
