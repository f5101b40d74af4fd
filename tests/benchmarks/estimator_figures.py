"""Estimators of others beside our predictions, on the measured rows of published decoders on torch/cpu.

    pip install fitcheck-llm canifinetune gpu-estimator accelerate    # into an environment that has the harness
    python tests/benchmarks/estimator_figures.py [RESULTS] [--write]

Each estimator gets the rows of whose strategies it has an input for each, with its best input: the configuration, the
exact number of parameters, float32 or the row's type, AdamW, batch and tokens. What a driver or a margin takes is left
out of its answer where it reports that by itself, since a peak here is above what the process had before. One that is
not installed is skipped and named. Nothing is fetched: what two of them look up at a hub of models is answered here.
With `--write` the tables go into results/published_models/ESTIMATORS.md.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from importlib import metadata
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from textwrap import fill
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

from residual_figures import of_row
from tabulate import tabulate

from harness.contract import plugins
from harness.records import store
from harness.report.insert import insert_into
from harness.report.results import read

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "results/published_models/ESTIMATORS.md"
SUITES = ("published_models", "published_hybrids", "real_models")
"""Those whose rows are published configurations, which is what estimators take."""
MIB, GIB = 1 << 20, 1 << 30
HEADS = ("estimator", "rows", "median error", "95th percentile", "largest", "took more")
OURS = ("ours: median", "ours: 95th", "ours: largest", "ours: took more", "at most is above by", "more than at most")


class Run(NamedTuple):
    """A measured row: the model as its `config.json` has it, how it was trained, and its peak in bytes."""

    model: str
    config: dict[str, Any]
    parameters: int
    batch: int
    tokens: int
    label: str
    strategies: frozenset[str]
    peak_bytes: int
    predicted_bytes: int
    at_most_bytes: int | None

    @property
    def precision(self) -> str:
        return "bf16" if "bfloat16" in self.strategies else "fp32"

    @property
    def eager(self) -> bool:
        """Whether attention makes its scores: those with a cap."""
        return bool(self.config.get("attn_logit_softcapping"))


class Estimator(NamedTuple):
    """A package, the strategies that it has an input for, and what it answers in bytes; ValueError where it refuses."""

    package: str
    strategies: frozenset[str]
    estimate: Callable[[Run], float]


def of_fitcheck(run: Run) -> float:
    """Weights, gradients, moments and activations; not the 500 MiB of a context and the 5 % of an allocator."""
    fitcheck: Any = importlib.import_module("fitcheck")
    with answered_hub(run):
        config = fitcheck.fetch_model_config(run.model)
    training = fitcheck.TrainingConfig(
        precision=run.precision,
        optimizer="adamw",
        batch_size=run.batch,
        seq_len=run.tokens,
        lora_rank=None,
        grad_checkpoint="checkpoint" in run.strategies,
        flash_attn=not run.eager,
    )
    report = fitcheck.estimate(config, training, fitcheck.get_gpu("h100"))
    return float(report.total_mib - report.overhead_mib) * MIB


@contextmanager
def answered_hub(run: Run) -> Iterator[None]:
    """Answer what fitcheck looks up of a model: its `config.json`, and how many parameters its files have."""
    parser = importlib.import_module("fitcheck.config_parser")
    answer = SimpleNamespace(safetensors=SimpleNamespace(total=run.parameters))
    hub = SimpleNamespace(model_info=lambda *names, **wanted: answer)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(run.config), encoding="utf-8")
        with (
            patch.object(parser, "hf_hub_download", lambda **file: str(path)),
            patch.object(parser, "HfApi", lambda **access: hub),
        ):
            yield


def of_canifinetune(run: Run) -> float:
    """All but what it adds for a driver and as a margin; the AdamW that keeps nothing but two moments."""
    estimator: Any = importlib.import_module("canifinetune.estimator")
    models = importlib.import_module("canifinetune.estimator.model_metadata")
    request = estimator.EstimateRequest(
        model_id=run.model,
        method="full",
        base_dtype=run.precision,
        optimizer="adamw_torch_fused",
        micro_batch_size=run.batch,
        seq_len=run.tokens,
        gradient_checkpointing="checkpoint" in run.strategies,
        attention_implementation="eager" if run.eager else "sdpa",
        gpu_vram_gb=80,
    )
    with (
        patch.object(models, "fetch_model_config", lambda *names, **wanted: run.config),
        patch.object(models, "fetch_model_parameter_count", lambda *names, **wanted: run.parameters),
    ):
        memory = estimator.estimate(request).memory
    return float(memory.total_estimated_gb - memory.cuda_overhead_gb - memory.safety_margin_gb) * GIB


def of_gpu_estimator(run: Run) -> float:
    """The whole answer: the fifth that it adds is not reported by itself."""
    package: Any = importlib.import_module("gpu_estimator")
    result = package.GPUEstimator().estimate(
        run.parameters,
        batch_size=run.batch,
        sequence_length=run.tokens,
        precision=run.precision,
        optimizer="adamw",
        gradient_checkpointing="checkpoint" in run.strategies,
    )
    return float(result.total_memory_gb) * GIB


def of_accelerate(run: Run) -> float:
    """What `accelerate estimate-memory` shows as training with Adam, which by itself leaves out a head of its own."""
    transformers: Any = importlib.import_module("transformers")
    accelerate: Any = importlib.import_module("accelerate")
    utils: Any = importlib.import_module("accelerate.utils")
    command: Any = importlib.import_module("accelerate.commands.estimate")
    config = transformers.AutoConfig.for_model(**run.config)
    with accelerate.init_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.tie_weights()  # else a head that is the embedding counts twice
    total_bytes, _ = utils.calculate_maximum_sizes(model)
    return float(max(command.estimate_training_usage(total_bytes, "float32").values()))


ESTIMATORS = (
    Estimator("fitcheck-llm", frozenset({"checkpoint"}), of_fitcheck),
    Estimator("canifinetune", frozenset({"checkpoint", "bfloat16"}), of_canifinetune),
    Estimator("gpu-estimator", frozenset({"checkpoint"}), of_gpu_estimator),
    Estimator("accelerate", frozenset(), of_accelerate),
)
"""In bfloat16 the harness keeps no weights and moments in float32: an estimator that does prices no such row."""


class Answers(NamedTuple):
    """What one estimator says of the rows that it can price, in bytes, and the rows that it refuses."""

    package: str
    priced: list[tuple[Run, float]]
    refused: list[Run]


def main() -> None:
    parser = argparse.ArgumentParser(description="Set estimators of others beside our predictions.")
    parser.add_argument("results", type=Path, nargs="?", default=ROOT / "results")
    parser.add_argument("--write", action="store_true", help=f"put the tables into {DOCUMENT.relative_to(ROOT)}")
    options = parser.parse_args()
    runs = list(measured(options.results))
    text = written(runs, [answers(each, runs) for each in ESTIMATORS if version(each.package)])
    print(text)
    if options.write:
        insert_into(DOCUMENT, {"estimators": lambda choice: text})


def measured(folder: Path) -> Iterator[Run]:
    """Yield the rows of published decoders whose peak is to be believed, each with the prediction made before it."""
    from harness.workloads.causal_lm import Shape, parameters

    files = [file for suite in SUITES for file in store.newest(folder / suite)]
    for row in (
        row for each in read(files, print, plugins.load().aliases) for table in each.tables for row in table.rows
    ):
        if row.case.workload == "causal_lm" and str(row.case.place) == "torch/cpu" and (known := of_row(row)):
            shape = Shape(**row.case.shape)
            yield Run(
                shape.name,
                shape.values(),
                parameters(shape),
                shape.batch,
                shape.tokens,
                row.label,
                frozenset(applied.name for applied in row.case.strategies),
                known.peak_bytes,
                row.predicted_bytes or 0,
                row.at_most_bytes,
            )


def version(package: str) -> str | None:
    """Return the version of a package; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def answers(estimator: Estimator, runs: Sequence[Run]) -> Answers:
    """Ask an estimator about the rows of whose strategies it has an input for each."""
    priced, refused = [], []
    for run in runs:
        if run.strategies <= estimator.strategies:
            try:
                priced.append((run, estimator.estimate(run)))
            except ValueError as error:
                print(f"{estimator.package} refuses {run.model}: {error}", file=sys.stderr)
                refused.append(run)
    return Answers(estimator.package, priced, refused)


def written(runs: Sequence[Run], known: Sequence[Answers]) -> str:
    """Write what was compared, the errors of each estimator beside ours on the same rows, and those by strategy."""
    versions = ", ".join(f"{each.package} {version(each.package)}" for each in known)
    missing = [each.package for each in ESTIMATORS if each.package not in {one.package for one in known}]
    absent = f" Not installed there: {', '.join(missing)}." * bool(missing)
    pieces = [
        f"*Estimated {date.today()} by {versions or 'none of them'}.{absent}*",
        beside(runs, known),
        sentence(runs),
        "By strategy: the median error, with its sign; empty where it cannot price them.",
        by_strategy(runs, known),
        "\n".join(line for each in known if (line := refusals(each))),
    ]
    return "\n\n".join(piece for piece in pieces if piece)


def beside(runs: Sequence[Run], known: Sequence[Answers]) -> str:
    cells = [(*theirs(each, len(runs)), *ours([run for run, _ in each.priced])) for each in known]
    return grid(cells, HEADS + OURS, 1) if cells else ""


def theirs(each: Answers, count: int) -> tuple[str, ...]:
    sizes = [(estimate, run.peak_bytes) for run, estimate in each.priced]
    return f"`{each.package}`", f"{len(sizes)} of {count}", *figures(sizes)


def ours(runs: Sequence[Run]) -> tuple[str, ...]:
    """Return the errors of our predictions, by how much our bound is above the peak, and the share that exceeds it."""
    bounds = [(float(run.at_most_bytes), run.peak_bytes) for run in runs if run.at_most_bytes is not None]
    slack = f"{median(signed(bounds)):.1%}" if bounds else ""
    exceeded = share([bound < peak for bound, peak in bounds])
    return *figures([(run.predicted_bytes, run.peak_bytes) for run in runs]), slack, exceeded


def figures(sizes: Sequence[tuple[float, int]]) -> tuple[str, ...]:
    """Return the errors of sizes beside measured ones, and the share that took more than their size."""
    errors = sorted(abs(error) for error in signed(sizes))
    if not errors:
        return ("",) * 4
    worst = (median(errors), errors[int(0.95 * len(errors))], errors[-1])
    return *(f"{each:.1%}" for each in worst), share([size < peak for size, peak in sizes])


def signed(sizes: Sequence[tuple[float, int]]) -> list[float]:
    return [size / peak - 1 for size, peak in sizes]


def share(those: Sequence[bool]) -> str:
    return f"{sum(those) / len(those):.0%}" if those else ""


def sentence(runs: Sequence[Run]) -> str:
    """Write the errors of our predictions on all rows."""
    middle, high, largest, _, slack, exceeded = ours(runs)
    bounded = sum(run.at_most_bytes is not None for run in runs)
    return (
        f"All {len(runs)} rows are predicted here: median error {middle}, 95th percentile {high}, largest {largest}.\n"
        f"Of {bounded} it was said what they take at most, {slack} above the peak in the median: {exceeded} took more."
    )


def by_strategy(runs: Sequence[Run], known: Sequence[Answers]) -> str:
    cells = []
    for tokens, label in dict.fromkeys((run.tokens, run.label) for run in runs):
        same = [run for run in runs if (run.tokens, run.label) == (tokens, label)]
        sizes = [[(float(run.predicted_bytes), run.peak_bytes) for run in same]]
        for each in known:
            priced = [(run, size) for run, size in each.priced if (run.tokens, run.label) == (tokens, label)]
            sizes.append([(size, run.peak_bytes) for run, size in priced])
        middles = (f"{median(signed(each)):+z.1%}" if each else "" for each in sizes)
        cells.append((f"`{label}`", f"{tokens:,}", len(same), *middles))
    return grid(cells, ("strategy", "tokens", "rows", "ours", *(f"`{each.package}`" for each in known)), 1)


def refusals(each: Answers) -> str:
    """Write which models an estimator refuses, and in how many of the rows whose strategies it knows."""
    names = ", ".join(dict.fromkeys(run.model for run in each.refused))
    text = f"- rows that `{each.package}` refuses besides: {len(each.refused)}, of {names}" if names else ""
    return fill(text, 120, subsequent_indent="  ", break_on_hyphens=False)


def grid(cells: Sequence[Sequence[object]], heads: Sequence[str], texts: int) -> str:
    """Write a table whose first columns are texts."""
    aligned = ["left"] * texts + ["right"] * (len(heads) - texts)
    return tabulate(cells, heads, tablefmt="pipe", colalign=aligned, disable_numparse=True)


if __name__ == "__main__":
    main()
