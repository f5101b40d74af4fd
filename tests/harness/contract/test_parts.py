"""What strategies and workloads promise each other of a run: its parts, their types, its sizes, what is divided."""

import inspect
import re
from dataclasses import fields, replace
from typing import Any, get_type_hints

import pytest

from harness import Division, Parts, Place
from harness.contract import plugins, protocols
from harness.contract.parts import PART_NAMES
from harness.contract.shapes import LayeredShape, Shape, TextShape

WORKLOADS = plugins.load().workloads


def test_every_part_is_typed_by_a_protocol_that_takes_the_parts_first() -> None:
    hints = get_type_hints(Parts)
    for name in PART_NAMES:
        assert hints[name].__module__ == protocols.__name__, name
        _, first, *_ = inspect.signature(hints[name].__call__).parameters.values()
        assert (first.name, first.annotation) == ("parts", "Parts"), name


def test_every_part_and_no_other_has_a_sentence_in_the_docstring() -> None:
    assert re.findall(r"^([a-z_]{3,})  +\w", inspect.getdoc(Parts) or "", re.MULTILINE) == list(PART_NAMES)


def accepts(function: Any, protocol: Any) -> bool:
    """Return whether a function can be called with as many arguments as its protocol has."""
    _, *arguments = inspect.signature(protocol.__call__).parameters.values()
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    return True


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_parts_of_a_workload_take_what_their_protocol_gives_them(name: str) -> None:
    workload, hints = WORKLOADS[name], get_type_hints(Parts)
    for backend, build in workload.on.items():
        pytest.importorskip(backend)
        parts = build(workload.tiny(workload.shape()), Place(backend, "cpu"), None, 0)
        offered = {part: getattr(parts, part) for part in PART_NAMES if getattr(parts, part) is not None}
        assert {"source", "embed", "step"} <= set(offered)
        assert [part for part, function in offered.items() if not accepts(function, hints[part])] == []


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_shape_offers_what_strategies_read(name: str) -> None:
    workload = WORKLOADS[name]
    shape: Any = workload.shape()
    assert isinstance(shape, Shape)
    assert workload.data != "tokens" or isinstance(shape, TextShape)
    layered = not {"positions", "cache"} <= set(workload.lacks)
    assert not layered or isinstance(shape, LayeredShape)
    assert "shard_batch" in workload.lacks or all(size for size, _ in shape.parameter_shapes().values())


def test_division_is_no_part_and_starts_with_nothing_divided() -> None:
    assert "division" in {field.name for field in fields(Parts)} and "division" not in PART_NAMES
    assert Parts(None, Place("torch", "cpu")).division == Division(0, False, frozenset())
    assert replace(Division(), granularity=2) == Division(2)
