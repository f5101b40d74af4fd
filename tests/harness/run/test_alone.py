"""One case of a plan alone, for its memory."""

from pathlib import Path

import pytest

from harness.contract import plugins
from harness.records import Record, Task
from harness.run import alone
from harness.suite.reader import read


def test_it_has_the_threads_that_a_quota_leaves(smallest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def run(task: Task, count: int, deadline: float) -> list[Record]:
        threads.append(count)
        return [Record()]

    (tmp_path / "small.yaml").write_text(smallest)
    loaded = plugins.load()
    plan = read(tmp_path / "small.yaml", loaded)
    monkeypatch.setattr(alone.runner, "run", run)
    monkeypatch.setattr(alone.prepare_data, "of_case", lambda *rest: None)
    monkeypatch.setattr(alone.facts, "threads", lambda: 3)
    record = alone.measured(plan.cases[0], plan, loaded, (), tmp_path, "run")
    assert threads == [3] and record.case == plan.cases[0]
