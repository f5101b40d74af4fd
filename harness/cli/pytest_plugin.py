"""Suites as tests: `pytest suites/mine.yaml` measures each case, and pytest-benchmark keeps its step times.

A YAML file is a suite where it is named on the command line, and nowhere else. Its cases are measured as by
`harness run`, in workers of their own and in rounds, when the first of its tests runs; the benchmark fixture is then
passed the steps that each worker timed. A wrong answer, a case that ends in an error, and with `--harness-against`
whatever became worse than there fails its test.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from warnings import warn

import pytest

FAIL_ON = ("answer", "status", "peak>5%")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("harness", "suites of memory strategies as tests")
    group.addoption("--harness-results", metavar="FOLDER", default="results", help="The folder for results.")
    group.addoption("--harness-plugin", metavar="PLUGIN", action="append", default=[], help="A .py file or a module.")
    group.addoption("--harness-rounds", metavar="N", type=int, help="Time rounds, in place of the suite's.")
    group.addoption("--harness-against", metavar="RESULTS", help="Earlier results: fail where a case became worse.")
    group.addoption(
        "--harness-fail-on",
        metavar="CONDITION",
        action="append",
        default=[],
        help=f"What is worse: peak>5%%, time>10%%, answer, status. By default {', '.join(FAIL_ON).replace('%', '%%')}.",
    )


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> "SuiteFile | None":
    if file_path.suffix in (".yaml", ".yml") and parent.session.isinitpath(file_path):
        return SuiteFile.from_parent(parent, path=file_path)
    return None


class SuiteFile(pytest.File):
    """A suite; its rows are there after the first test has asked for one."""

    _rows: dict[str, Any] | None = None
    _refusal: str | None = None
    _worse: dict[str, list[str]]
    _measured_as: dict[str, str]
    """Each case with the vocabulary that its corpus has, both by digest: tests are named by the suite's own sizes."""

    def collect(self) -> Iterable[pytest.Item]:
        from harness.contract import plugins
        from harness.suite import bounds, reader
        from harness.verbs import compare
        from harness.verdicts import claims, expressions

        if hasattr(self.config, "workerinput"):
            raise self.CollectError(
                f"{self.path}: a suite is measured by one process, not by workers of xdist: give -n 0, or -p no:xdist"
            )
        if not self.config.pluginmanager.hasplugin("benchmark"):
            raise self.CollectError(
                f"{self.path}: suites are tests with pytest-benchmark: "
                "pip install pytest-benchmark, or leave out -p no:benchmark"
            )
        try:
            self.names = tuple(self.config.getoption("--harness-plugin"))
            self.loaded = plugins.load(self.names)
            self.plan = reader.read(self.path, self.loaded, rounds=self.config.getoption("--harness-rounds"))
            cases = [group.cases for group in self.plan.comparisons]
            claims.refuse(self.plan.suite.claims, cases, str(self.path))
            asked = self.config.getoption("--harness-fail-on")
            self.conditions = [compare.Condition.parse(each) for each in asked or FAIL_ON]
            if any(condition.figure == "missing" for condition in self.conditions):
                raise compare.ConditionError("a case that is missing has no test to fail: use `harness compare` for it")
            if asked and self.config.getoption("--harness-against") is None:
                raise compare.ConditionError("--harness-fail-on needs earlier results: name them by --harness-against")
        except (plugins.PluginError, bounds.SuiteError, expressions.ClaimError, compare.ConditionError) as error:
            raise self.CollectError(str(error)) from None
        settings = [_settings(group.baseline) for group in self.plan.comparisons]
        varying = _varying(settings)
        for group, own in zip(self.plan.comparisons, settings, strict=True):
            sizes = [f"{name}={own[name]}" for name in varying if name in own]
            for case in group.cases:
                name = f"[{'-'.join([str(case.place), *sizes, case.label])}]"
                item = CaseTest.from_parent(self, name=name, callobj=measured)
                item.case, item.clock = case, Clock()
                item.add_marker(pytest.mark.benchmark(timer=item.clock.now, group=f"{self.plan.name} {case.place}"))
                yield item

    def row(self, case: Any) -> Any:
        """Return the judged row of a case; at the first call measure all cases that were selected.

        What cannot be measured for a reason that a user can mend fails every test with that reason, as a warning does
        that `filterwarnings` makes an error.
        """
        from harness.records import store
        from harness.suite import bounds
        from harness.verdicts import expressions

        if self._rows is None and self._refusal is None:
            try:
                self._rows = {row.case.digest(): row for row in self._measure()}
            except (bounds.SuiteError, expressions.ClaimError, store.StoreError, Warning) as error:
                self._refusal = str(error)
        if self._rows is None:
            pytest.fail(self._refusal or "", pytrace=False)
        return self._rows.get(self._measured_as[case.digest()])

    def worse(self, case: Any) -> list[str]:
        """Return what became worse than in earlier results."""
        return self._worse.get(self._measured_as[case.digest()], [])

    def _measure(self) -> Iterator[Any]:
        from harness.records import store
        from harness.run import bench, prepare_data, session
        from harness.suite.plan import words
        from harness.verdicts import judge

        items = (item for item in self.session.items if isinstance(item, CaseTest) and item.parent is self)
        wanted = {item.case.digest() for item in items}
        rounds = self.config.getoption("--harness-rounds")
        folder = Path(self.config.getoption("--harness-results"))
        options = bench.Options(folder, self.names, rounds, fresh=True)
        asked = self.plan.having(lambda case: case.digest() in wanted)
        file = os.path.relpath(self.path, self.config.invocation_params.dir)
        named = replace(asked, asked=words([file], self.names, rounds))
        plan = prepare_data.closed(named, self.loaded, options.cache)
        before = self._earlier(plan)
        pairs = zip(asked.cases, plan.cases, strict=True)
        self._measured_as = {case.digest(): measured.digest() for case, measured in pairs}
        path = session.run(plan, self.loaded, options, bench.Progress())
        tables = judge.judge(store.read(path)[0])
        self._worse = self._compared(before, tables)
        for table in tables:
            yield from table.rows

    def _earlier(self, plan: Any) -> Sequence[Any] | None:
        """Judge earlier results, before new ones can take their place."""
        from harness.records import store
        from harness.verbs.pairing import completed
        from harness.verdicts import judge

        against = self.config.getoption("--harness-against")
        if against is None:
            return None
        files = store.newest(Path(against))
        tables: list[Any] = []
        for sentence in store.notes_of_parts(Path(against)):
            warn(sentence, stacklevel=2)
        for file in files:
            records, problems = store.read(file, self.loaded.aliases)
            tables += completed(judge.judge(records), self.loaded.workloads)
            for problem in problems:
                warn(problem, stacklevel=2)
        known = {row.case.digest() for table in tables for row in table.rows}
        if not any(case.digest() in known for case in plan.cases):
            raise store.StoreError(f"'{against}' has no case of {self.path.name}: name results of this suite")
        return tables

    def _compared(self, before: Sequence[Any] | None, after: Sequence[Any]) -> dict[str, list[str]]:
        from harness.verbs import compare

        worse: dict[str, list[str]] = {}
        for change in compare.compare(before, after) if before is not None else ():
            if any(condition.met(change) for condition in self.conditions):
                worse.setdefault(change.case.digest(), []).append(f"{change.figure} became worse: {change.how}")
        return worse


class CaseTest(pytest.Function):
    """The test of one case, and the clock that its benchmark reads."""

    case: Any
    clock: "Clock"


class Clock:
    """A clock that advances by the times of steps that were measured elsewhere."""

    def __init__(self) -> None:
        self.time = 0.0
        self.steps: Iterator[float] = iter(())

    def now(self) -> float:
        return self.time

    def step(self) -> None:
        self.time += next(self.steps, 0.0)


def measured(benchmark: Any, request: pytest.FixtureRequest) -> None:
    """Pass the steps of a case and its figures to the benchmark; fail where it is wrong or became worse."""
    from harness.records.record import WRONG
    from harness.verdicts.observed import step_time

    case, clock, file = request.node.case, request.node.clock, request.node.parent
    try:
        row = file.row(case)
    except pytest.fail.Exception:
        _keep_nothing(benchmark)
        raise
    assert row is not None, f"{case.label} was not measured"
    timed = [record.times.step_seconds for record in row.records if step_time(record) is not None]
    seconds = [step for steps in timed for step in steps]
    benchmark.extra_info.update(
        {
            "strategy": row.label,
            "place": str(case.place),
            "status": row.status,
            "peak_bytes": row.whole_peak_bytes,
            "predicted_bytes": row.predicted_bytes,
            "at_most_bytes": row.at_most_bytes,
            "floor_bytes": row.floor_bytes,
            "answer": row.answer,
            "verdict": row.verdict,
        }
    )
    if seconds:
        clock.steps = iter(seconds)
        benchmark.pedantic(clock.step, rounds=len(seconds))
    else:
        _keep_nothing(benchmark)
    reason = "; ".join(row.reasons) or row.status
    worse = file.worse(case)
    if worse:
        pytest.fail("; ".join(worse), pytrace=False)
    if row.status in ("unsupported", "oom_budget", "skipped_guard", "open"):
        pytest.skip(reason)
    if row.status != "ok":
        pytest.fail(f"{row.status}: {reason}", pytrace=False)
    if row.answer in WRONG:
        pytest.fail(f"the answer is {row.answer}: {row.answer_reason}", pytrace=False)
    if (failed := row.failed_answer) is not None:
        pytest.fail(f"the answer could not be compared: {failed.status}: {row.answer_reason}", pytrace=False)


def _keep_nothing(benchmark: Any) -> None:
    """Use the benchmark without a step: one that is not used warns of it."""
    benchmark.disabled = True
    benchmark.pedantic(lambda: None)


def _settings(case: Any) -> dict[str, Any]:
    """Return what tells comparisons of one place apart: their sizes, corpus, tokenizer and budget."""
    budget = None if case.budget_bytes is None else case.budget_bytes / (1 << 30)
    return {**case.shape, "corpus": case.corpus, "tokenizer": case.tokenizer, "budget_gib": budget}


def _varying(settings: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of the settings in which comparisons differ."""
    names = dict.fromkeys(name for each in settings for name in each)
    return [name for name in names if len({str(each.get(name)) for each in settings}) > 1]
