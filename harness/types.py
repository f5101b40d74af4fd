"""The values a training run is made of: `Source`, `Windows`, `Parts`; and what rewrites them: `Strategy`."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from typing import Any, NamedTuple, cast


class Place(NamedTuple):
    """Where a case runs: a backend (`torch`, `jax`) and a device (`cpu`, `cuda`)."""

    backend: str
    device: str

    def __str__(self) -> str:
        return f"{self.backend}/{self.device}"

    @classmethod
    def parse(cls, text: str) -> "Place":
        """Read `backend/device`; raise ValueError for anything else."""
        backend, slash, device = text.partition("/")
        if not (backend and slash and device) or "/" in device:
            raise ValueError(f"'{text}' is not a place: write backend/device, for example torch/cpu")
        return cls(backend, device)


def windows_in(length: int, window: int, stride: int) -> int:
    """Count the windows in `length` rows: `(length - window) // stride + 1`, here and nowhere else.

    Raises ValueError when the window or the stride is not positive, or the window longer than the data.
    """
    if window < 1 or stride < 1:
        raise ValueError(f"window and stride must be at least 1, not {window} and {stride}")
    if window > length:
        raise ValueError(f"a window of {window} is longer than the {length} rows of the source")
    return (length - window) // stride + 1


@dataclass(frozen=True)
class Source:
    """Rows and what is to be predicted from them, of equal length, so that no window runs off the end.

    `inputs[n, ...]` and `targets[n, ...]` are aligned: the targets are already shifted.
    """

    inputs: Any
    targets: Any
    window: int
    stride: int
    batch: int
    seed: int = 0
    shuffle: bool = False
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise ValueError(f"{len(self.inputs)} inputs but {len(self.targets)} targets: they must be aligned")
        windows_in(len(self.inputs), self.window, self.stride)

    @property
    def count(self) -> int:
        """The number of windows."""
        return windows_in(len(self.inputs), self.window, self.stride)


@dataclass(frozen=True)
class Windows:
    """Random access to the windows of a source: `batch(indices_B) -> (x, y)` with B windows each."""

    source: Source
    batch: Callable[[Any], tuple[Any, Any]]

    def __len__(self) -> int:
        return self.source.count


Part = Callable[..., Any]
ABSENT: Part = cast(Part, None)
"""What a workload puts in the place of a part that it does not have."""


@dataclass(frozen=True)
class Parts:
    """One training run, cut where memory is spent.

    Every part takes the whole `parts` first and calls its neighbours through it, so a rewritten part is seen by
    all its callers. A part that a workload lacks is None. `B` batch, `T` tokens, `D` width, `V` vocabulary.

    ==========  =====================================================================================
    source      (parts) -> Source
    windows     (parts, source) -> Windows
    batches     (parts, windows) -> iterator over (x, y), without end
    draw        (parts, name, shape, std) -> array: the first value of one parameter; std 0 means all ones
    init        (parts, source) -> State: parameters, optimizer moments
    embed       (parts, params, x_BT) -> x_BTD
    mix         (parts, p, x_BTD) -> x_BTD, across tokens: attention, or a recurrence
    feed        (parts, p, x_BTD) -> x_BTD, within a token
    block       (parts, p, x_BTD) -> x_BTD, one layer
    stack       (parts, ps, x_BTD) -> x_BTD, the layers it is given (any consecutive ones)
    loss        (parts, x_BTD, w_VD, y_BT) -> scalar
    grad        (parts, state, x, y) -> (loss, grads)
    update      (parts, state, grads) -> State: the optimizer
    step        (parts, state, x, y) -> (State, loss)
    cache       (parts, ...) -> Cache: decoding workloads only
    ==========  =====================================================================================
    """

    shape: Any
    place: Place
    source: Part = ABSENT
    windows: Part = ABSENT
    batches: Part = ABSENT
    draw: Part = ABSENT
    init: Part = ABSENT
    embed: Part = ABSENT
    mix: Part = ABSENT
    feed: Part = ABSENT
    block: Part = ABSENT
    stack: Part = ABSENT
    loss: Part = ABSENT
    grad: Part = ABSENT
    update: Part = ABSENT
    step: Part = ABSENT
    cache: Part = ABSENT


PART_NAMES: tuple[str, ...] = tuple(f.name for f in fields(Parts) if f.name not in ("shape", "place"))


@dataclass(frozen=True)
class Knob:
    """One setting of a strategy: its name, type and default, read from the signature of its functions."""

    name: str
    type: type
    default: Any


@dataclass(frozen=True)
class Strategy:
    """A named function `Parts -> Parts`, one for each backend.

    `rewrites` names the parts that change. `precision` declares a lower working dtype, `approximate` another
    algorithm; without them the results must stay those of the untouched parts. `needs` are importable packages.
    `probe` gives knobs that count rows a value for the small shape at which answers are compared, so that there too
    a chunk is not the whole.
    """

    name: str
    rewrites: tuple[str, ...]
    on: Mapping[str, Callable[..., Parts]]
    about: str
    precision: str | None = None
    approximate: bool = False
    needs: tuple[str, ...] = ()
    probe: Mapping[str, Any] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """The first line of `about`: what is kept and what is paid."""
        return inspect.cleandoc(self.about).splitlines()[0] if self.about.strip() else ""

    @property
    def knobs(self) -> dict[str, Knob]:
        """The knobs of all backends together; raise TypeError for one without type or default."""
        found: dict[str, Knob] = {}
        for function in self.on.values():
            for parameter in list(inspect.signature(function).parameters.values())[1:]:
                typed = isinstance(parameter.annotation, type) and parameter.annotation is not parameter.empty
                if parameter.default is parameter.empty or not typed:
                    raise TypeError(
                        f"knob '{parameter.name}' of strategy '{self.name}' needs a default and a plain type"
                    )
                found[parameter.name] = Knob(parameter.name, parameter.annotation, parameter.default)
        return found

    def obstacle(self, place: Place, lacks: tuple[str, ...] = ()) -> str | None:
        """Say in one sentence why the strategy cannot be applied there, or None when it can.

        `lacks` names the parts that the workload does not have.
        """
        if place.backend not in self.on:
            return f"'{self.name}' has nothing for {place.backend}: it is written for {', '.join(self.on)}"
        missing = [package for package in self.needs if find_spec(package) is None]
        if missing:
            return f"'{self.name}' needs the package {missing[0]}: install it to measure this strategy"
        lacking = [part for part in self.rewrites if part in lacks]
        if lacking:
            return f"'{self.name}' rewrites '{lacking[0]}', a part that this workload does not have"
        return None


@dataclass(frozen=True)
class Workload:
    """A training run to compare strategies on.

    `shape` is the pydantic model of its sizes. `on[backend](shape, place, corpus, seed) -> Parts` builds the untouched
    parts; without a corpus they generate their data.
    `abstract_batch(shape)` gives the shapes and dtypes of x and y, so that a step can be prepared without data.
    `tiny(shape)` is the same code at sizes that cost nothing (first-use costs are paid there); `probe(shape)` a
    reduced shape, ragged where the real one could be, at which answers are compared; `floor(shape)` the bytes
    that a step which holds everything at once cannot do without. `tokens_per_step(shape)` is the throughput unit,
    `rows_needed(shape, steps)` the tokens of corpus that so many steps consume, `lacks` the parts that stay None.
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
    rows_needed: Callable[[Any, int], int]
    lacks: tuple[str, ...] = ()


__all__ = [
    "PART_NAMES",
    "Knob",
    "Parts",
    "Place",
    "Source",
    "Strategy",
    "Windows",
    "Workload",
    "replace",
    "windows_in",
]
