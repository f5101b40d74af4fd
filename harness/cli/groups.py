"""Options that go together, as one argument of a command."""

import inspect
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import wraps
from inspect import Parameter
from typing import Any


def together(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command in which each argument that is a dataclass is asked for as one option a field."""
    own = inspect.signature(command, eval_str=True).parameters
    groups: dict[str, Callable[..., Any]] = {
        name: each.annotation
        for name, each in own.items()
        if isinstance(each.annotation, type) and is_dataclass(each.annotation)
    }
    fields = {name: inspect.signature(group).parameters for name, group in groups.items()}
    options = [
        option.replace(kind=Parameter.KEYWORD_ONLY)
        for name, each in own.items()
        for option in (fields[name].values() if name in fields else (each,))
    ]

    @wraps(command)
    def asked(**values: Any) -> None:
        grouped = {
            name: group(**{field: values.pop(field) for field in fields[name]}) for name, group in groups.items()
        }
        command(**grouped, **values)

    asked.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return asked
