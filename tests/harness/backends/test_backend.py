"""Each module of a framework has the functions that `Backend` names, with its arguments, defaults and types."""

import inspect
import re
from pathlib import Path

import pytest

import harness
from harness import backends
from harness.backends import Backend
from harness.contract.place import NAMES

MEMBERS = [name for name, member in vars(Backend).items() if inspect.isfunction(member) and not name.startswith("_")]


@pytest.mark.parametrize("name", NAMES)
def test_a_module_has_the_functions_of_a_backend(name: str) -> None:
    pytest.importorskip(name)
    module = backends.load(name)
    assert isinstance(module.EAGER, bool)
    for member in MEMBERS:
        promised = inspect.signature(getattr(Backend, member))
        _, *parameters = promised.parameters.values()
        assert inspect.signature(getattr(module, member)) == promised.replace(parameters=parameters), member


def test_what_a_worker_asks_of_a_backend_is_promised() -> None:
    sources = Path(harness.__file__).with_name("worker").glob("*.py")
    asked = {name for path in sources for name in re.findall(r"\b(?<!\.)_?backend\.(\w+)", path.read_text())}
    assert {"prepare", "wait", "EAGER", "cast"} <= asked
    assert asked <= {*MEMBERS, "EAGER"}
