"""Make the rows that the cases of a plan read, in processes of their own: this one never loads numpy."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.contract.assembly import shape_of
from harness.contract.place import Place
from harness.contract.plugins import Plugins
from harness.machine import environment
from harness.records import Case
from harness.records.task import FrameFile, TokenFile
from harness.run import temporary
from harness.suite.plan import Group, Plan
from harness.suite.schema import SuiteError

Corpus = TokenFile | FrameFile


def prepare(
    plan: Plan, plugins: Plugins, cache: Path, runs: Callable[[Case], bool]
) -> tuple[Plan, dict[str, Corpus | None]]:
    """Make the rows of every group that `runs`, by the key of the group; raise SuiteError where they cannot be had.

    A vocabulary of 0 becomes as many tokens as the corpus has, so the plan that is returned is the one to follow.
    """
    groups, found = [], {}
    for group in plan.groups:
        open_ended = group.baseline.shape.get("vocabulary") == 0
        corpus = of_group(plan, group, plugins, cache) if open_ended or runs(group.baseline) else None
        if open_ended and isinstance(corpus, TokenFile):
            group = _with_vocabulary(group, corpus.vocabulary)
        groups.append(group)
        found[group.baseline.group] = corpus
    return replace(plan, groups=tuple(groups)), found


def _with_vocabulary(group: Group, size: int) -> Group:
    return Group(tuple(case.model_copy(update={"shape": case.shape | {"vocabulary": size}}) for case in group.cases))


def of_group(plan: Plan, group: Group, plugins: Plugins, cache: Path) -> Corpus | None:
    """Make the rows of one group; None for a workload that draws its own."""
    case = group.baseline
    workload = plugins.workloads[case.workload]
    if workload.wanted is None:
        return None
    steps = max(plan.suite.memory_steps, plan.suite.steps or 0)
    spec = {
        "corpus": case.corpus,
        "root": str(plan.path.resolve().parent),
        "seed": case.seed,
        "cache": str(cache),
        **workload.wanted(shape_of(plugins, case), steps),
    }
    if workload.data == "tokens":
        spec["tokenizer"] = case.tokenizer
    return made(workload.data, spec)


def supposed(plan: Plan, case: Case, plugins: Plugins) -> Corpus | None:
    """Describe the token ids that a case would read, without making them: their number and their type."""
    workload = plugins.workloads[case.workload]
    if workload.wanted is None or workload.data != "tokens":
        return None
    steps = max(plan.suite.memory_steps, plan.suite.steps or 0)
    wanted = workload.wanted(shape_of(plugins, case), steps)
    size = wanted["vocabulary"]
    return TokenFile(Path("supposed"), wanted["needed"], size, "uint16" if size <= 1 << 16 else "uint32", "")


def made(data: str, spec: dict[str, Any]) -> Corpus:
    """Make the rows of a specification in a process of its own; raise SuiteError when it refuses."""
    with temporary.folder("harness-corpus-") as folder:
        path = folder / "spec.json"
        with temporary.refusing():
            path.write_text(json.dumps(spec), encoding="utf-8")
        env = environment.variables("predict", Place("torch", "cpu"), "corpus", 1, None)
        command = [sys.executable, "-m", f"harness.workloads.data.{data}", str(path)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    try:
        told = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise SuiteError(f"corpus '{spec['corpus']}': it could not be prepared: {done.stderr.strip()[-300:]}") from None
    if "error" in told:
        raise SuiteError(told["error"])
    if data == "tokens":
        return TokenFile(**{**told, "path": Path(told["path"])})
    return FrameFile(**{**told, "path": Path(told["path"]), "labels": Path(told["labels"])})
