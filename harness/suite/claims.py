"""The claims of a suite, read without the plugins that its rows need."""

from pathlib import Path

from pydantic import ValidationError

from harness.records import Claim
from harness.suite import yaml
from harness.suite.bounds import SuiteError
from harness.suite.schema import Suite


def claims_of(path: Path) -> tuple[Claim, ...]:
    """Return the claims of a suite; raise SuiteError where the file is none."""
    try:
        document = yaml.load(path)
        return tuple(Suite.model_validate(document.data).claims)
    except yaml.YamlError as error:
        raise SuiteError(str(error)) from None
    except ValidationError as error:
        raise SuiteError(f"{path}{yaml.fault(document, error)}") from None
