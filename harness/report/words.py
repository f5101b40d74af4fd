"""How bytes, phases and comparisons are written."""

from collections.abc import Iterable
from typing import Any

from harness.records import Case
from harness.verdicts.remarks import LEAST_FOR_PERCENT
from harness.workloads.data.frames import GENERATED

MIB = 1 << 20
COUNTED = ("corpus_tokens", "tokens", "frames", "features")
PREDICTED, AT_MOST = "predicted MiB", "at most"
"""Columns of several tables."""
SIZES = ("window", "stride", "layers", "width", "vocabulary", "batch")


def heading(case: Case) -> str:
    shape = case.shape
    network = f" ({name})" if (name := _model(shape)) else ""
    words = [f"{case.workload}{network} on {case.place}"]
    words += [f"{_grouped(shape[name])} {name.replace('_', ' ')}" for name in COUNTED if shape.get(name)]
    words += [f"{name} {_grouped(shape[name])}" for name in SIZES if shape.get(name)]
    if case.corpus not in ("standard_library", GENERATED) or (case.tokenizer != "bpe" and "vocabulary" in shape):
        words.append(case.corpus if case.corpus == "zipf" else f"{case.tokenizer} of {case.corpus}")
    if case.budget_bytes:
        words.append(f"budget {case.budget_bytes / MIB:,.0f} MiB")
    return ", ".join(words)


def _model(shape: dict[str, Any]) -> str:
    """Return the name of the network or configuration, of one without a name its architecture."""
    config = shape.get("config", shape.get("network", ""))
    return str(config.get("model_type", "")) if isinstance(config, dict) else str(config)


def _grouped(value: object) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def mib(value: int | None) -> str:
    return "" if value is None else f"{value / MIB:,.0f}" if value >= 100 * MIB else f"{value / MIB:,.1f}"


def residual(size: int | None, ratio: float | None, *peaks: int | None) -> str:
    """Show how far a peak lies from its prediction; in MiB where both are so small that percents mean nothing."""
    if size is None or ratio is None:
        return ""
    if max(peak or 0 for peak in peaks) < LEAST_FOR_PERCENT:
        return f"{size / MIB:+.1f} MiB"
    return f"{ratio:+.1%}"


def rounds(count: int) -> str:
    return f"{count} round{'' if count == 1 else 's'}"


def phase_name(name: str | None) -> str:
    """Show the phase that sets the peak, and how many tie with it."""
    if not name:
        return ""
    first, *others = [phase.removeprefix("steady_step/").removeprefix("first_step/") for phase in name.split(", ")]
    more = len(dict.fromkeys(other for other in others if other != first))
    return first + (f" (+{more})" if more else "")


def sureness(coverages: Iterable[float | None]) -> str:
    """Say with what probability bounds hold; an empty text where there is none."""
    shares = sorted({each for each in coverages if each is not None})
    if not shares:
        return ""
    span = " to ".join(dict.fromkeys(f"{100 * share:.0f} %" for share in (shares[0], shares[-1])))
    return f"- at most: with a probability of {span} it takes no more, by the errors of predictions of its kind"
