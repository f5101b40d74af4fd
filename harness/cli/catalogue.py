"""`harness list` and `harness show`: what the plugins offer, and what files may say."""

import inspect
import json
import re
from enum import StrEnum, auto
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from harness.cli import completion
from harness.cli.options import PluginOption
from harness.cli.screen import note, out
from harness.contract import plugins
from harness.contract.strategy import Strategy
from harness.contract.workload import Workload

MEASURED = re.compile(rb'"kind": ?"memory"')
"""What stands in results in which something was measured."""


class Schema(StrEnum):
    """The files that have a schema."""

    record = auto()
    suite = auto()


def list_all(plugin: PluginOption = None) -> None:
    """List the strategies by the part they rewrite, and the workloads."""
    loaded = plugins.load(tuple(plugin or ()))
    width = max(map(len, (*loaded.strategies, *loaded.workloads)), default=0)
    by_part: dict[str, list[str]] = {}
    for strategy in loaded.strategies.values():
        part = strategy.rewrites[0] if strategy.rewrites else "(none)"
        by_part.setdefault(part, []).append(f"  {strategy.name:<{width}} {strategy.summary}")
    for part, lines in by_part.items():
        out.print(f"{part}\n" + "\n".join(lines))
    out.print("workloads")
    for workload in loaded.workloads.values():
        out.print(f"  {workload.name:<{width}} presets: {', '.join(workload.presets)}")


def show(
    name: Annotated[
        str | None, typer.Argument(help="A strategy or a workload.", autocompletion=completion.offered)
    ] = None,
    schema: Annotated[Schema | None, typer.Option(help="Print the JSON schema of such a file instead.")] = None,
    results: Annotated[
        Path | None, typer.Option(help="Results that say what a strategy does; by default those that are here.")
    ] = None,
    plugin: PluginOption = None,
) -> None:
    """Show what a strategy keeps and pays, its knobs and its figures; or a workload's sizes; or a JSON schema."""
    if (name is None) == (schema is None):
        raise plugins.PluginError("name either a strategy or workload, or a schema with --schema")
    if schema is not None and results is None:
        out.print(json.dumps(_schema(schema), indent=1))
        return
    loaded = plugins.load(tuple(plugin or ()))
    if name is not None and name not in loaded.workloads:  # one may have the former name of a strategy
        name = loaded.aliases.get(name, name)
    if results is not None and (name is None or name in loaded.workloads):
        raise plugins.PluginError("--results goes with a strategy, not with a workload or a schema: leave it out")
    assert name is not None
    if name in loaded.strategies:
        _show_strategy(loaded.strategies[name])
        out.print("\n" + measured(name, results or _results(), loaded))
    elif name in loaded.workloads:
        _show_workload(loaded.workloads[name])
    else:
        names = [*loaded.strategies, *loaded.workloads]
        raise plugins.PluginError(f"there is no strategy or workload '{name}'{plugins.nearest(name, names)}")


def _schema(file: Schema) -> dict[str, Any]:
    from harness.records import Record
    from harness.suite.schema import Suite

    return (Record if file is Schema.record else Suite).model_json_schema()


def _show_strategy(strategy: Strategy) -> None:
    from harness.report import counterparts

    out.print(f"{strategy.name}: {strategy.about.strip()}\n")
    out.print(f"rewrites: {', '.join(strategy.rewrites) or 'nothing'}\nbackends: {', '.join(strategy.on)}")
    for knob in strategy.knobs.values():
        out.print(f"knob {knob.name}: {knob.type.__name__}, default {str(knob.default).lower()}")
    others: dict[tuple[str, str], list[str]] = {}
    for other, reason in strategy.conflicts.items():
        order, _, name = other.rpartition(" ")
        others.setdefault((order or "with", reason), []).append(name)
    for (order, reason), names in others.items():
        out.print(f"not {order} {', '.join(names)}: {reason}")
    out.print(f"code: {', '.join(_code(strategy))}")
    for line in counterparts.lines(strategy):
        out.print(line)


def _code(strategy: Strategy) -> list[str]:
    """Return the files of what a strategy rewrites, or the folders of packages; from here, where they lie below."""
    from harness.machine import history

    paths: dict[str, None] = {}
    for form in strategy.on.values():
        made = history.written(form)
        made = made if inspect.isroutine(made) or inspect.isclass(made) else type(made)  # an object that is called
        path = Path(inspect.getsourcefile(made) or "")
        path = path.parent if path.name == "__init__.py" else path
        paths[str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)] = None
    return list(paths)


def _results() -> Path:
    """Return the results of this folder if something was measured in it, or else those that come with the harness."""
    from harness.records import store
    from harness.suite import shipped

    here = Path("results")
    measured = any(MEASURED.search(file.read_bytes()) for file in store.below(here))
    return here if measured else shipped.folder("results")


def measured(name: str, folder: Path, loaded: plugins.Plugins) -> str:
    """Return in a line for each backend what a strategy did alone in all results below a folder."""
    from harness.records import store
    from harness.report.results import read
    from harness.report.typical import line
    from harness.verdicts.remedies import typical

    names = [name, *(former for former, current in loaded.aliases.items() if current == name)]
    named = re.compile(f'"(?:{"|".join(names)})"'.encode())
    files = [file for file in store.newest(folder) if named.search(file.read_bytes())]
    results = read(files, note, loaded.aliases)
    answers = typical(name, [(each.folder, each.tables) for each in results if not each.searched])
    return "\n".join(map(line, answers)) or f"measured: never alone in '{folder}'"


def _show_workload(workload: Workload) -> None:
    out.print(f"{workload.name}: {workload.about.strip()}\n")
    fields = dict(workload.shape.model_fields)  # type: ignore[attr-defined]
    if "evaluate" in workload.lacks:
        fields.pop("evaluations", None)
    for field, info in fields.items():
        about = info.description or ""
        default = "required" if info.is_required() else f"default {info.get_default(call_default_factory=True)}"
        choices = ", ".join(map(str, get_args(info.annotation))) if get_origin(info.annotation) is Literal else ""
        words = [choices, *([about] if "by default" in about else [default, about])]
        out.print(f"{field}: {'; '.join(filter(None, words))}")
    for preset, values in workload.presets.items():
        out.print(f"preset {preset}: {', '.join(f'{key}={value}' for key, value in values.items())}")
