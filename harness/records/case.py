"""One row of a comparison: a workload, its sizes, a place, the strategies."""

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator

from harness.records.place import Place

CONTROL = "nothing"
VERDICT_ROUNDS = 2
"""From this many time rounds on, times can have an interval."""


class Value(BaseModel):
    """A frozen value that refuses unknown keys and coerced types."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, ser_json_inf_nan="constants"
    )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copy with other fields, unchecked but for their names; raise TypeError for one that is not there."""
        if unknown := (update or {}).keys() - type(self).model_fields:
            raise TypeError(f"a {type(self).__name__} has no field '{min(unknown)}'")
        return super().model_copy(update=update, deep=deep)


class Applied(Value):
    """A strategy with the knobs it was given; the knobs left out keep their defaults."""

    name: str
    knobs: dict[str, bool | int | float | str] = Field(default_factory=dict)

    def __str__(self) -> str:
        knobs = ", ".join(f"{key}={_knob_text(value)}" for key, value in self.knobs.items())
        return f"{self.name}({knobs})" if knobs else self.name


def _knob_text(value: bool | int | float | str) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class Claim(Value):
    """A sentence that somebody believes, and an expression over measured figures that decides it."""

    id: str = Field(min_length=1, max_length=64)
    says: str = Field(min_length=1, max_length=1000)
    that: str = Field(min_length=1, max_length=1000)
    where: dict[str, bool | int | float | str] = Field(default_factory=dict)


def _place(value: Any) -> Place:
    return value if isinstance(value, Place) else Place.parse(value)


class Case(Value):
    """One row of a comparison: a workload at a shape, in a place, with strategies applied left to right.

    `ranks` are the processes (in JAX: the devices of one process) among which the strategies divide the run; the budget
    is that of each. The place is written, and may be given, as text: `torch/cpu`.
    """

    workload: str
    shape: dict[str, Any]
    place: Annotated[Place, PlainValidator(_place), PlainSerializer(str, return_type=str)]
    corpus: str
    tokenizer: str
    strategies: tuple[Applied, ...] = ()
    seed: int = 0
    budget_bytes: int | None = None
    ranks: int = Field(1, ge=1, le=1024)

    @property
    def label(self) -> str:
        """The name of the row: the strategies joined by ` + `, or `baseline`; and on how many ranks, if several."""
        return self.strategies_label + (f" on {self.ranks} ranks" if self.ranks > 1 else "")

    @property
    def strategies_label(self) -> str:
        """The strategies joined by ` + `, or `baseline`."""
        return " + ".join(map(str, self.strategies)) or "baseline"

    @property
    def is_baseline(self) -> bool:
        """Whether no strategy is applied."""
        return not self.strategies

    @property
    def is_control(self) -> bool:
        """Whether the strategy that changes nothing is the only one."""
        return [applied.name for applied in self.strategies] == [CONTROL]

    @property
    def plain(self) -> "Case":
        """The case that this one is compared to: without strategies, in one process."""
        return self.model_copy(update={"strategies": (), "ranks": 1})

    @property
    def comparison_key(self) -> str:
        """A key that a case shares with those it is compared to: all but the strategies and their ranks."""
        return self.plain.digest()

    def digest(self, *versions: str) -> str:
        """Hash the case with the versions of the code that runs it (SHA-256 of canonical JSON)."""
        text = json.dumps([self.model_dump(mode="json"), *versions], sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:24]
