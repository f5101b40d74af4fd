"""What builds the untouched parts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from harness.contract.data import Extent
from harness.contract.parts import Parts

OF_ROWS = {"tokens", "batch"}
"""Sizes of a shape that say nothing of the model."""


@dataclass(frozen=True)
class Workload:
    """A training run to compare strategies on.

    `shape` is the pydantic model of its sizes. `on[backend](shape, place, corpus, seed) -> Parts` builds the untouched
    parts; without a corpus they generate their data.
    `abstract_batch(shape)` gives the shapes and dtypes of x and y, so that a step can be prepared without data.
    `tiny(shape)` is the same code at sizes that cost nothing (first-use costs are paid there); `probe(shape)` a
    reduced shape, ragged where the real one could be, at which answers are compared; `floor(shape)` the bytes
    that a step which holds everything at once cannot do without. `tokens_per_step(shape)` is the throughput unit,
    `parameters(shape)` how many there are (None: not known).

    `data` is what is read, `tokens` of a text, `frames` of a sensor, or `documents`, whose batches differ in size: it
    decides who prepares the corpus. Of documents `abstract_batch` and `tokens_per_step` give the most there may be.
    `wanted(shape, steps)` gives the sizes that this needs (see `harness.workloads.data`; None: the workload draws its
    own data), `extent(shape, corpus, steps)` the sizes of the source, `lacks` the parts that stay
    None, or that only its own parts call: those of ranks, of which there is one, and of an ending. `imports` are
    modules that take long to load: many workers load them once.
    """

    name: str
    about: str
    shape: type
    presets: Mapping[str, Mapping[str, Any]]
    on: Mapping[str, Callable[..., Parts]]
    abstract_batch: Callable[[Any], tuple[tuple[tuple[int, ...], str], ...]]
    tiny: Callable[[Any], Any]
    probe: Callable[[Any], Any]
    floor: Callable[[Any], int]
    tokens_per_step: Callable[[Any], int]
    parameters: Callable[[Any], int] | None = None
    wanted: Callable[[Any, int], dict[str, Any]] | None = None
    extent: Callable[[Any, Any, int], Extent] | None = None
    data: str = "tokens"
    lacks: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()

    def preset_of(self, shape: Mapping[str, Any]) -> str | None:
        """Return the name of the published model that a shape has the sizes of, whatever its rows; None without one."""
        for name, sizes in self.presets.items():
            if all(shape.get(key) == value for key, value in sizes.items() if key not in OF_ROWS):
                return name
        return None
