"""The three doors through which plugins come in (pluggy hooks)."""

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from harness.contract.strategy import Strategy
    from harness.contract.workload import Workload
    from harness.records import Record, Task

hookspec = pluggy.HookspecMarker("harness")
hookimpl = pluggy.HookimplMarker("harness")


@hookspec
def harness_strategies() -> "list[Strategy]":  # type: ignore[empty-body]
    """Return the strategies of a plugin."""


@hookspec
def harness_workloads() -> "list[Workload]":  # type: ignore[empty-body]
    """Return the workloads of a plugin."""


@hookspec(firstresult=True)
def harness_measure(task: "Task") -> "Record":  # type: ignore[empty-body]
    """Run one task in this process and return what was seen.

    Called in the worker. An implementation with `wrapper=True` is an instrument: it sees the record of the inner
    one and returns it with something added to `extra`.
    """
