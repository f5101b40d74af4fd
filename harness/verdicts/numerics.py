"""Judge whether a strategy still computes the same thing, in units of the baseline's own rounding error.

Strategy and baseline are both compared with the baseline in float64. A strategy that only adds in another
order is about as wrong as the baseline; a bug is many times as wrong, and a wrong scale is wrong in one
direction. Absolute tolerances see neither: a gradient scaled by 1.0001 passes the usual ones.

The rungs, from the top; invalid comes before all others. Errors are relative to the norm of the
reference: E over all gradients, E_t for one tensor; Q is the largest absolute one. u is the unit roundoff of the dtype
that is worked in, and E_b the baseline's own E.

* bit_exact: losses, gradients and updated parameters equal as integers, and the baseline equals itself.
* reassociated: E <= 2 E_b + u, every E_t <= 3 E_b,t + 4 u, Q <= 2 Q_b + 2 ulp(max abs ref), the loss error <= 2 x the
  baseline's + 4 u abs(loss), and no later loss off by `DRIFT` roundoffs, that of the evaluation included. A scale
  error below about sqrt(3) E_b hides here; a bias above half of the error earns a warning.
* lower_precision: declared; E <= 2 x that of the baseline at that precision, or 4 u of the precision where the baseline
  cannot run at it; no more than 0.35 of the error is bias, since rounding has no direction; and no loss further from
  the baseline's than 2 x those of the baseline at that precision + 2 u of the precision: one for what a loss is made
  of, one for the loss itself.
* approximate: declared to be another algorithm; shown, not judged. One with parameters of other sizes need only be
  finite.
* diverged: everything else.
* invalid: a gradient missing, extra, None, of another shape or undeclared dtype; a number that is not finite; or a
  baseline whose E_b exceeds 50 u sqrt(layers), on which nothing can stand.

A tensor whose reference is zero has its error taken relative to the norm of the whole gradient. If all of that is zero,
the error of a zero gradient is 0 and of any other infinite.
"""

import json
import math
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.records.record import LADDER, Verdict

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]


UNIT_ROUNDOFF = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "tf32": 2.0**-11,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "int8": 2.0**-7,
    "float8": 2.0**-4,
}
MOST_BIAS = 0.35
"""The share of a gradient's error that may be a common scale, where the error is that of a lower precision."""
DRIFT = 1700
"""How many roundoffs (1e-4 in float32) the loss of a later update may differ by, at a learning rate of 1e-3."""
# A tensor this much smaller than the whole gradient is zero but for the rounding of the float64 reference
# itself, like the gradient of a key bias, which softmax cancels.
UNREPEATED = "; nor does it repeat itself, as where a model changes its buffers or draws random numbers"
_ZERO = 2.0**-46


@dataclass(frozen=True)
class Outcome:
    """What one run at the probe shape produced.

    `gradients` and `parameters` (after the updates) hold float arrays by parameter name, a gradient that
    never came as None. NumPy has no bfloat16: such arrays come widened to float32, and `dtypes` names the
    true dtype of each gradient. `trajectory` holds the loss of every update; `loss` the one the gradients
    belong to; `evaluation` that of a run that is evaluated at its end, before it is resumed.
    """

    loss: float
    gradients: "Mapping[str, Array | None]"
    dtypes: Mapping[str, str]
    parameters: "Mapping[str, Array | None]"
    trajectory: tuple[float, ...]
    evaluation: float | None = None


@dataclass(frozen=True)
class _Error:
    total: float  # norm(x - ref) / norm(ref) over all gradients
    tensors: dict[str, float]  # the same for each
    largest: float  # max abs(x - ref)
    peak: float  # max abs(ref)
    bias: float  # abs(<x, ref> / <ref, ref> - 1)
    loss: float  # abs(loss - ref)

    @property
    def bias_ratio(self) -> float:
        """The part of the error that is a common scale."""
        return self.bias / self.total if 0 < self.total < math.inf else 0.0


def compare(
    strategy: Outcome,
    baseline: Outcome,
    baseline_again: Outcome,
    reference: Outcome,
    *,
    layers: int,
    dtype: str = "float32",
    precision: str | None = None,
    approximate: bool = False,
    baseline_low: Outcome | None = None,
) -> Verdict:
    """Judge one seed: the first rung from the top whose conditions hold.

    `reference` is the baseline in float64, `dtype` the working dtype, `precision` the dtype that the strategy declares
    and `baseline_low` the baseline run at it, None where it cannot run. Raise ValueError for a dtype whose roundoff is
    unknown or a number of layers below 1.
    """
    if layers < 1:
        raise ValueError(f"layers is {layers}: pass the number of layers of the probe, at least 1")
    u, low = _roundoff(dtype), _roundoff(precision or dtype)
    refusal = _incomparable(strategy, baseline, reference, any_dtype=precision is not None, approximate=approximate)
    if refusal is not None:
        return refusal
    own, error = _error(baseline, reference), _error(strategy, reference)
    reproducible = _same_bits(baseline, baseline_again)
    if (limit := 50 * u * math.sqrt(layers)) < own.total:
        size = f"its gradient error {own.total:.2g} is above {limit:.2g}, too much for {dtype}"
        return _invalid(f"the baseline is at fault: {size}{'' if reproducible else UNREPEATED}")

    bounds = {name: 3 * of_tensor + 4 * u for name, of_tensor in own.tensors.items()}
    figures = _measured(error, own, bounds, reproducible)
    if reproducible and _same_bits(strategy, baseline):
        return replace(figures, verdict="bit_exact", reason="loss, gradients and parameters are equal bit for bit")
    excess = _excess(error, own, bounds, reference.loss, u) or _drift(strategy, baseline, DRIFT * u)
    if excess is None:
        return _reassociated(figures, error, own)
    if precision is not None:
        if baseline_low is not None and _fault(baseline_low, baseline, any_dtype=True) is not None:
            baseline_low = None
        at_it = None if baseline_low is None else _error(baseline_low, reference)
        excess, explained = _beyond_precision(error, at_it, precision, low)
        excess = excess or _drift(strategy, baseline, 2 * low + 2 * _furthest(baseline_low, baseline))
        if excess is None:
            return replace(figures, verdict="lower_precision", reason=explained)
    if approximate:
        return replace(figures, verdict="approximate", reason=f"declared to be another algorithm; {excess}")
    return replace(figures, reason=excess)


def _incomparable(
    strategy: Outcome, baseline: Outcome, reference: Outcome, *, any_dtype: bool, approximate: bool
) -> Verdict | None:
    """Return the verdict of runs whose gradients do not compare; None where they do."""
    if fault := _fault(baseline, baseline):
        return _invalid(f"the baseline is at fault: {fault}")
    if fault := _fault(reference, baseline, any_dtype=True):
        return _invalid(f"the float64 reference is at fault: {fault}")
    if approximate and _sizes(strategy) != _sizes(baseline):
        if fault := _fault(strategy, strategy):
            return _invalid(fault)
        return replace(_invalid("declared to be another model, whose gradients do not compare"), verdict="approximate")
    fault = _fault(strategy, baseline, any_dtype)
    return None if fault is None else _invalid(fault)


def _measured(error: _Error, own: _Error, bounds: Mapping[str, float], reproducible: bool) -> Verdict:
    """Return the figures of a verdict, on the lowest rung until a higher one is shown."""
    furthest = max(bounds, key=lambda name: error.tensors[name] / bounds[name], default=None)
    return Verdict(
        verdict="diverged",
        grad_error_ratio=_ratio(error.total, own.total),
        bias_ratio=error.bias_ratio,
        worst_tensor=furthest,
        worst_ratio=None if furthest is None else _ratio(error.tensors[furthest], own.tensors[furthest]),
        warnings=() if reproducible else ("the baseline does not repeat itself bit for bit",),
        reason="",
    )


def _reassociated(figures: Verdict, error: _Error, own: _Error) -> Verdict:
    """Return the verdict of a strategy within the rounding of the baseline; much bias in it is warned of."""
    reason = f"gradient error {_times(error.total, own.total)} the baseline's own"
    warnings = figures.warnings
    if error.bias_ratio > 0.5:
        warnings += (f"bias is {error.bias_ratio:.2f} of the gradient error: a small wrong scale may hide in it",)
    return replace(figures, verdict="reassociated", reason=reason, warnings=warnings)


def _beyond_precision(error: _Error, at_it: _Error | None, precision: str, low: float) -> tuple[str | None, str]:
    """Return what a declared precision of roundoff `low` does not explain, or None, and what it explains.

    `at_it` is the error of the baseline at that precision, None where it cannot run. In some models its own rounding
    has more of a common scale than rounding usually has.
    """
    allowed, source = 4 * low, f"4 x the roundoff of {precision}"
    bias, usual = MOST_BIAS, ""
    if at_it is not None:
        allowed, source = 2 * at_it.total, f"2 x the baseline's in {precision}"
        if 1.25 * at_it.bias_ratio > MOST_BIAS:
            bias, usual = 1.25 * at_it.bias_ratio, f", 1.25 x the baseline's in {precision}"
    explained = f"gradient error {error.total:.2g} is within {allowed:.2g}, {source}"
    if error.total > allowed:
        return f"gradient error {error.total:.2g} is above {allowed:.2g}, {source}", explained
    if error.bias_ratio > bias:
        share = f"bias is {error.bias_ratio:.2f} of the gradient error, above {bias:.2f}{usual}"
        return f"{share}: a wrong scale, not rounding", explained
    return None, explained


def _drift(strategy: Outcome, baseline: Outcome, limit: float) -> str | None:
    """Say which loss parts from the baseline's by more than a limit although the first gradient was right.

    Right strategies stay within 2e-7 of the baseline's loss over 20 float32 updates, a gradient one step old is off
    by 1.4e-3 and more; the bound lies between, at `DRIFT` roundoffs. In bfloat16 right ones stay within 2.4 of its
    roundoffs, AdamW without its bias correction is off by 30, and with the other sign by 105.
    """
    for when, off in _distances(strategy, baseline):
        if off > limit:
            return f"the first gradient is right, but {when} the loss is off by {off:.1e}, more than {limit:.1e}"
    return None


def _furthest(run: Outcome | None, baseline: Outcome) -> float:
    """Return how far the losses of a run part from the baseline's at most, 0 for no run."""
    return 0.0 if run is None else max((off for _, off in _distances(run, baseline)), default=0.0)


def _distances(run: Outcome, baseline: Outcome) -> Iterator[tuple[str, float]]:
    """Yield when a loss was computed and its distance from the baseline's, relative unless that is 0."""
    pairs = zip(run.trajectory, baseline.trajectory, strict=False)
    losses = [(f"by update {step}", *pair) for step, pair in enumerate(pairs, start=1)]
    if run.evaluation is not None and baseline.evaluation is not None:
        losses.append(("in the evaluation", run.evaluation, baseline.evaluation))
    for when, own, other in losses:
        yield when, abs(own - other) / (abs(other) or 1.0)


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict of several seeds: the lowest rung, with its reason and the warnings of all of them.

    Between seeds on one rung the larger gradient error speaks. Raise ValueError if there is none.
    """
    if not verdicts:
        raise ValueError("no verdict to choose from: compare at least one seed")

    def wrongness(verdict: Verdict) -> tuple[int, float]:
        ratio = verdict.grad_error_ratio
        unbounded = math.inf if verdict.verdict == "diverged" else 0.0  # no ratio is finite, or none was formed
        return LADDER.index(verdict.verdict), unbounded if ratio is None else ratio

    lowest = max(verdicts, key=wrongness)
    return replace(lowest, warnings=tuple(dict.fromkeys(warning for v in verdicts for warning in v.warnings)))


def save(path: Path, outcome: Outcome) -> None:
    """Write an outcome as a .npz of plain arrays, whole or not at all.

    Raise ValueError for an array that is not of a NumPy float dtype, since only objects would need pickle.
    """
    import numpy as np

    arrays: dict[str, Array] = {}
    names: dict[str, list[str | None]] = {"gradients": [], "parameters": []}
    missing = []
    for kind, index, name, array in _arrays(outcome):
        names[kind].append(name)
        if array is None:
            missing.append(name)
            continue
        array = np.asarray(array)
        if array.dtype.kind != "f":
            raise ValueError(f"{kind} of {name} are {array.dtype}: widen them to float32 or float64 first")
        # Arrays are numbered because a parameter may have any name, and a zip member may not.
        arrays[f"{kind}_{index}"] = array
    text = json.dumps({**names, "missing": missing, "dtypes": dict(outcome.dtypes), "evaluation": outcome.evaluation})
    arrays["names"] = np.frombuffer(text.encode(), dtype=np.uint8)
    arrays["losses"] = np.array([outcome.loss, *outcome.trajectory], dtype=np.float64)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def load(path: Path) -> Outcome:
    """Read what `save` wrote, without pickle. Raise ValueError if the file is anything else."""
    import numpy as np

    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        names = json.loads(arrays["names"].tobytes())
        loss, *trajectory = arrays["losses"].tolist()
        gradients, parameters = (
            {name: arrays.get(f"{kind}_{index}") for index, name in enumerate(names[kind])}
            for kind in ("gradients", "parameters")
        )
        pairs = [(name, array) for named in (gradients, parameters) for name, array in named.items()]
        if [name for name, array in pairs if array is None] != names["missing"]:
            raise ValueError("an array is lost")
        if any(array.dtype.kind != "f" for _, array in pairs if array is not None):
            raise ValueError("an array is not of a float dtype")
        return Outcome(loss, gradients, dict(names["dtypes"]), parameters, tuple(trajectory), names["evaluation"])
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not a saved outcome: delete it and run the numerics again") from error


def _roundoff(dtype: str) -> float:
    if dtype not in UNIT_ROUNDOFF:
        raise ValueError(f"no unit roundoff is known for {dtype!r}: use one of {', '.join(UNIT_ROUNDOFF)}")
    return UNIT_ROUNDOFF[dtype]


def _arrays(run: Outcome) -> "Iterator[tuple[str, int, str, Array | None]]":
    for kind, arrays_of_kind in (("gradients", run.gradients), ("parameters", run.parameters)):
        for index, (name, array) in enumerate(arrays_of_kind.items()):
            yield kind, index, name, array


def _fault(run: Outcome, like: Outcome, any_dtype: bool = False) -> str | None:
    """Return what makes a run incomparable with the one it should be like, or None."""
    import numpy as np

    for kind, arrays, wanted in (
        ("gradient", run.gradients, like.gradients),
        ("updated parameter", run.parameters, like.parameters),
    ):
        for name, expected in wanted.items():
            array = arrays.get(name)
            if array is None or expected is None:
                return f"there is no {kind} of {name}"
            if array.shape != expected.shape:
                return f"the {kind} of {name} has shape {array.shape}, not {expected.shape}"
            dtype, due = str(array.dtype), str(expected.dtype)
            if kind == "gradient":
                dtype, due = run.dtypes.get(name, dtype), like.dtypes.get(name, due)
            if dtype != due and not any_dtype:
                return f"the {kind} of {name} is {dtype}, not {due}, and no precision is declared"
            if not np.isfinite(array).all():
                return f"the {kind} of {name} holds NaN or infinity"
        if extra := next((name for name in arrays if name not in wanted), None):
            return f"there is an extra {kind} of {extra}"
    if not all(map(math.isfinite, (run.loss, *run.trajectory, run.evaluation or 0.0))):
        return "a loss is NaN or infinite"
    if len(run.trajectory) != len(like.trajectory):
        return f"{len(run.trajectory)} updates were made, not {len(like.trajectory)}"
    return None


def _sizes(run: Outcome) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in run.parameters.items() if array is not None}


def _same_bits(run: Outcome, other: Outcome) -> bool:
    import numpy as np

    def same(a: "Array | None", b: "Array | None") -> bool:
        if a is None or b is None:
            return a is b
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()

    return (
        same(np.float64(run.loss), np.float64(other.loss))  # type: ignore[arg-type]
        and (run.trajectory, run.evaluation) == (other.trajectory, other.evaluation)
        and run.dtypes == other.dtypes
        and run.gradients.keys() == other.gradients.keys()
        and run.parameters.keys() == other.parameters.keys()
        and all(same(run.gradients[name], other.gradients[name]) for name in run.gradients)
        and all(same(run.parameters[name], other.parameters[name]) for name in run.parameters)
    )


def _error(run: Outcome, reference: Outcome) -> _Error:
    """Measure a run's gradients against the reference, in float64."""
    import numpy as np

    away, size = {}, {}
    largest = peak = along = 0.0
    for name, wanted in reference.gradients.items():
        ref = np.asarray(wanted, dtype=np.float64).ravel()
        off = np.asarray(run.gradients[name], dtype=np.float64).ravel() - ref
        away[name], size[name] = float(np.linalg.norm(off)), float(np.linalg.norm(ref))
        largest = max(largest, float(np.abs(off).max(initial=0.0)))
        peak = max(peak, float(np.abs(ref).max(initial=0.0)))
        # <x, ref> / <ref, ref> - 1 = <x - ref, ref> / <ref, ref>, which does not cancel.
        along += float(off @ ref)
    whole = math.hypot(*size.values())
    yardstick = {name: norm if norm > _ZERO * whole else whole for name, norm in size.items()}
    return _Error(
        total=_relative(math.hypot(*away.values()), whole),
        tensors={name: _relative(away[name], yardstick[name]) for name in away},
        largest=largest,
        peak=peak,
        bias=_relative(abs(along), whole**2),
        loss=abs(run.loss - reference.loss),
    )


def _relative(error: float, norm: float) -> float:
    if norm:
        return error / norm
    return math.inf if error else 0.0


def _excess(error: _Error, own: _Error, bounds: Mapping[str, float], loss: float, u: float) -> str | None:
    """Say which bound of "reassociated" is broken, or None."""
    inside = {name: error.tensors[name] / bound for name, bound in bounds.items()}
    over = [name for name in inside if inside[name] > 1]
    if over:
        furthest, first = max(over, key=inside.__getitem__), over[0]
        where = f" in {furthest}" + (f", first in {first}" if first != furthest else "")
        size = _times(error.tensors[furthest], own.tensors[furthest])
        return f"gradient error {size} the baseline's own{where}"
    if error.total > 2 * own.total + u:
        return f"gradient error {_times(error.total, own.total)} the baseline's own"
    # frexp gives peak = m 2^e with m in [0.5, 1), where a format with roundoff u has a number every u 2^e.
    ulp = math.ldexp(u, math.frexp(error.peak)[1])
    if error.largest > 2 * own.largest + 2 * ulp:
        return f"largest gradient error {_times(error.largest, own.largest)} the baseline's own"
    if error.loss > 2 * own.loss + 4 * u * abs(loss):
        return f"loss error {_times(error.loss, own.loss)} the baseline's own"
    return None


def _ratio(error: float, own: float) -> float | None:
    if own and math.isfinite(error):
        return error / own
    return None if error else 1.0


def _times(error: float, own: float) -> str:
    ratio = _ratio(error, own)
    return f"{error:.2g} against none of" if ratio is None else f"{ratio:.3g} x"


def _invalid(reason: str) -> Verdict:
    return Verdict("invalid", None, None, None, None, (), reason)
