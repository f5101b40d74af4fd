"""Make the rows that the cases of a plan read, in processes of their own: this one never loads numpy."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.contract.assembly import shape_of
from harness.contract.place import Place
from harness.contract.plugins import Plugins
from harness.machine import environment
from harness.machine.child import AnswerError, answer_of
from harness.records import Case
from harness.records.task import DocumentFile, FrameFile, TokenFile, id_type
from harness.run import temporary
from harness.suite.bounds import SuiteError
from harness.suite.plan import Comparison, Plan
from harness.workloads.data.tokens import SMALLEST_CAP

Corpus = TokenFile | FrameFile
FILES: dict[str, type[Corpus]] = {"tokens": TokenFile, "frames": FrameFile, "documents": DocumentFile}

UNWRITABLE = "name a writable folder"
"""How a refusal of rows ends whose file cannot be written; which folder it is the environment says."""


def prepare(
    plan: Plan, plugins: Plugins, cache: Path, runs: Callable[[Case], bool]
) -> tuple[Plan, dict[str, Corpus | None]]:
    """Make the rows of every comparison that `runs`, by the key of the comparison; raise SuiteError where that fails.

    A vocabulary of 0 becomes as many tokens as the corpus has, so the plan that is returned is the one to follow.
    """
    comparisons: list[Comparison] = []
    corpora: dict[str, Corpus | None] = {}
    known: dict[str, Corpus] = {}
    for comparison in plan.comparisons:
        open_ended = comparison.baseline.shape.get("vocabulary") == 0
        reads = open_ended or runs(comparison.baseline)
        corpus = of_case(plan, comparison.baseline, plugins, cache, known) if reads else None
        if open_ended and isinstance(corpus, TokenFile):
            comparison = _with_vocabulary(comparison, corpus.vocabulary)
        comparisons.append(comparison)
        corpora[comparison.baseline.comparison_key] = corpus
    return replace(plan, comparisons=tuple(comparisons)), corpora


def closed(plan: Plan, plugins: Plugins, cache: Path) -> Plan:
    """Return the plan with a vocabulary of 0 replaced by as many tokens as the corpus has, as a run measures it.

    Raise SuiteError for a corpus that cannot be made.
    """
    return prepare(plan, plugins, cache, lambda case: False)[0]


def _with_vocabulary(comparison: Comparison, size: int) -> Comparison:
    return Comparison(
        tuple(case.model_copy(update={"shape": case.shape | {"vocabulary": size}}) for case in comparison.cases)
    )


def of_case(
    plan: Plan, case: Case, plugins: Plugins, cache: Path, known: dict[str, Corpus] | None = None
) -> Corpus | None:
    """Make the rows of a case and of those that it is compared to; None for a workload that draws its own.

    `known` are rows that were made a moment ago, by what was asked for: a process makes them, which takes a second.
    """
    workload = plugins.workloads[case.workload]
    if workload.wanted is None:
        return None
    steps = steps_read(plan)
    spec = {
        "corpus": case.corpus,
        "root": str(plan.path.resolve().parent),
        "seed": case.seed,
        "cache": str(cache),
        **workload.wanted(shape_of(plugins, case), steps),
    }
    if workload.data != "frames":
        spec["tokenizer"] = case.tokenizer
    known = {} if known is None else known
    wanted = json.dumps([workload.data, spec])
    if wanted not in known:
        known[wanted] = made(workload.data, spec)
    return known[wanted]


def supposed(plan: Plan, case: Case, plugins: Plugins) -> Corpus | None:
    """Describe the token ids that a case would read, without making them: their number and their type.

    Documents are made: a peak follows their lengths.
    """
    workload = plugins.workloads[case.workload]
    if workload.data == "documents":
        return of_case(plan, case, plugins, environment.cache_folder())
    return described(case, plugins, steps_read(plan))


def described(case: Case, plugins: Plugins, steps: int) -> Corpus | None:
    """Describe the token ids that a case reads in so many steps: their number and their type; None for other rows.

    A text is supposed to be as long as the file that is made of one at the most.
    """
    workload = plugins.workloads[case.workload]
    if workload.wanted is None or workload.data != "tokens":
        return None
    wanted = workload.wanted(shape_of(plugins, case), steps)
    size, tokens = wanted["vocabulary"], wanted["needed"]
    if case.corpus != "zipf" and not wanted.get("exact"):
        tokens = max(SMALLEST_CAP, 1 << (tokens - 1).bit_length())
    return TokenFile(Path("supposed"), tokens, size, id_type(size), "")


def steps_read(plan: Plan) -> int:
    """Return the most steps that a run of a case takes, in one process."""
    return max(plan.suite.memory_steps, plan.suite.steps or 0)


def made(data: str, spec: dict[str, Any]) -> Corpus:
    """Make the rows of a specification in a process of its own; raise SuiteError when it refuses."""
    with temporary.folder("harness-corpus-") as folder:
        path = folder / "spec.json"
        with temporary.refusing():
            path.write_text(json.dumps(spec), encoding="utf-8")
        env = environment.variables("predict", Place("torch", "cpu"), "corpus", 1, None)
        try:
            answer = answer_of(f"harness.workloads.data.{data}", str(path), env=env)
        except AnswerError as error:
            raise SuiteError(f"corpus '{spec['corpus']}': it could not be prepared: {error}") from None
    if "error" in answer:
        raise SuiteError(answer["error"].replace(UNWRITABLE, f"{UNWRITABLE} with XDG_CACHE_HOME"))
    fields = answer | {key: Path(answer[key]) for key in ("path", "labels", "lengths") if key in answer}
    return FILES[data](**fields)
