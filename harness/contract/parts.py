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

    `inputs[n, ...]` and `targets[n, ...]` are aligned: the targets are already shifted. `start` is the number of
    batches that were consumed before, so that a run continues where another one ended.
    """

    inputs: Any
    targets: Any
    window: int
    stride: int
    batch: int
    seed: int = 0
    shuffle: bool = False
    vocabulary: int | None = None
    start: int = 0

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise ValueError(f"{len(self.inputs)} inputs but {len(self.targets)} targets: they must be aligned")
        windows_in(len(self.inputs), self.window, self.stride)

    @property
    def count(self) -> int:
        """The number of windows."""
        return windows_in(len(self.inputs), self.window, self.stride)

    def checked(self, indices_B: Any) -> Any:
        """Give window numbers in int64; raise IndexError for one that does not exist.

        Arrays count negative numbers from their end, slices beyond it are short, and JAX takes the nearest: none of
        them says a word.
        """
        import numpy as np

        indices_B = np.array(indices_B, np.int64, order="C")  # a reversed view is no tensor
        if indices_B.size and not 0 <= indices_B.min() <= indices_B.max() < self.count:
            wrong = indices_B.min() if indices_B.min() < 0 else indices_B.max()
            raise IndexError(f"window {wrong} is not among the {self.count} of the source")
        return indices_B

    def starts(self, indices_B: Any) -> Any:
        """Give the first row [B] of each window in int64; raise IndexError for one that does not exist."""
        return self.checked(indices_B) * self.stride

    @property
    def joined(self) -> Any:
        """The array [n + 1, ...] of which inputs and targets are views, one row apart; None where they are not."""
        import numpy as np

        x, y = self.inputs, self.targets
        if not (isinstance(x, np.ndarray) and isinstance(y, np.ndarray)):
            return None
        alike = (x.dtype, x.shape, x.strides) == (y.dtype, y.shape, y.strides)
        if not alike or y.ctypes.data - x.ctypes.data != x.strides[0]:
            return None
        return np.lib.stride_tricks.as_strided(x, (len(x) + 1, *x.shape[1:]), x.strides)

    @property
    def unused(self) -> int:
        """The number of rows that lie in no window: between them, or after the last."""
        return len(self.inputs) - self.count * min(self.stride, self.window) - max(0, self.window - self.stride)


@dataclass(frozen=True)
class Windows:
    """Random access to the windows of a source: `batch(indices_B) -> (x, y)` with B windows each.

    `lasts` is how many batches stay as they were handed out: the last so many, or with None all of them. Who keeps
    more than the newest must ask.
    """

    source: Source
    batch: Callable[[Any], tuple[Any, Any]]
    lasts: int | None = None

    def __len__(self) -> int:
        return self.source.count


Part = Callable[..., Any]
ABSENT: Part = cast(Part, None)
"""What a workload puts in the place of a part that it does not have."""


@dataclass(frozen=True)
class Parts:
    """One training run, cut where memory is spent.

    Every part takes the whole `parts` first and calls its neighbours through it, so a rewritten part is seen by
    all its callers. A part that a workload lacks is None. `B` batch, `T` tokens, `D` width, `V` vocabulary,
    `E` inner width and `S` states of a selective scan.

    `ranks` is among how many processes (in JAX: devices) the run is divided, where its strategies divide it. In JAX the
    whole step runs under `jax.shard_map`, on each device with its own part, over an axis that is called `ranks`.
    `corpus` describes the files that are trained on (None: the workload draws its own). `notes` is where a part
    writes down what a reader would ask about: a choice it made and why, or a number. It is shared by all parts.

    ==========  =====================================================================================
    rows        (parts, path) -> array [n, ...]: the rows of one `.npy` file
    source      (parts) -> Source
    windows     (parts, source) -> Windows
    order       (parts, source, epoch) -> (start, stop) -> indices: which windows come at these positions
    batches     (parts, windows) -> iterator over (x, y), without end
    transfer    (parts, x, y) -> (x, y) on the device, in the types that the step takes
    draw        (parts, name, shape, std) -> array: the first value of one parameter; std 0 means all ones
    init        (parts, source) -> State: parameters, optimizer moments
    embed       (parts, params, x_BT) -> x_BTD
    mix         (parts, p, x_BTD) -> x_BTD, across tokens: attention, or a recurrence
    attend      (parts, q_BTHK, k_BTGK, v_BTGK) -> y_BTHK: causal attention of H heads, G of keys and values
    feed        (parts, p, x_BTD) -> x_BTD, within a token
    block       (parts, p, x_BTD) -> x_BTD, one layer
    scan        (parts, x_BTE, delta_BTE, a_ES, b_BTS, c_BTS) -> y_BTE: the recurrence of a selective scan
    stack       (parts, ps, x_BTD) -> x_BTD, the layers it is given (any consecutive ones)
    loss        (parts, x_BTD, w_VD, y_BT) -> scalar
    share       (parts, x, y) -> (x, y, weight): what of a batch this rank trains on, and the weight of its loss in that
                of the batch (None: all of it, in one process)
    grad        (parts, state, x, y) -> (loss, grads): of this rank's share, then summed by `reduce`
    reduce      (parts, loss, grads) -> (loss, grads): the sum over all ranks, where each has not just its own part
    gather      (parts, params) -> params: every parameter, or its gradient, whole, from the parts that the ranks hold
    positions   (parts, tokens) -> slices: where in the context the tokens at hand stand, T in all; in JAX those of all
                ranks after each other, R T in all, of which the caller takes its own
    update      (parts, state, grads) -> State: the optimizer
    step        (parts, state, x, y) -> (State, loss)
    cache       (parts, batch, tokens, like) -> (empty, append): keys and values of up to `tokens` tokens, of the type
                and device of `like`. `empty() -> kept` holds none; `append(kept, layer, position, k_BTGK, v_BTGK) ->
                (kept, k_BSGK, v_BSGK, seen_TS)` puts T tokens in at `position`, or begins anew at 0, and gives those
                to attend to; `seen` says which of them each new token sees, None that they are all in order. In JAX
                it is pure, `layer` and `position` may be traced, and S is then what was reserved
    ==========  =====================================================================================
    """

    shape: Any
    place: Place
    corpus: Any = None
    ranks: int = 1
    notes: dict[str, Any] = field(default_factory=dict, compare=False)
    rows: Part = ABSENT
    source: Part = ABSENT
    windows: Part = ABSENT
    order: Part = ABSENT
    batches: Part = ABSENT
    transfer: Part = ABSENT
    draw: Part = ABSENT
    init: Part = ABSENT
    embed: Part = ABSENT
    mix: Part = ABSENT
    attend: Part = ABSENT
    scan: Part = ABSENT
    feed: Part = ABSENT
    block: Part = ABSENT
    stack: Part = ABSENT
    loss: Part = ABSENT
    grad: Part = ABSENT
    share: Part = ABSENT
    reduce: Part = ABSENT
    gather: Part = ABSENT
    positions: Part = ABSENT
    update: Part = ABSENT
    step: Part = ABSENT
    cache: Part = ABSENT


PART_NAMES: tuple[str, ...] = tuple(
    f.name for f in fields(Parts) if f.name not in ("shape", "place", "corpus", "ranks", "notes")
)

IGNORED = -100
"""The target that carries no loss."""

FEEDS = ("same", "rounded", "reordered", "other")
"""How far the batches of a strategy may differ from the baseline's: not at all; in the last bits of their values; in
their order, each epoch being the same windows; or altogether."""


@dataclass(frozen=True)
class Extent:
    """The sizes of a source, known before any of it is read: what a prediction of host memory is made from.

    `rows` is n, the bytes are those of one row as stored (of the targets 0 where they are a view of the inputs),
    `steps` the batches that will be read, and `values` how many values a token may have, 0 where that is not known.
    """

    rows: int
    input_bytes: int
    target_bytes: int
    window: int
    stride: int
    batch: int
    steps: int = 3
    backend: str = ""
    values: int = 0

    @property
    def count(self) -> int:
        """The number of windows."""
        return windows_in(self.rows, self.window, self.stride)

    @property
    def base(self) -> int:
        """The bytes of all rows, each once."""
        return self.rows * (self.input_bytes + self.target_bytes)

    @property
    def row_bytes(self) -> int:
        """The bytes of one row of inputs and one of targets, where each is a copy."""
        return self.input_bytes + (self.target_bytes or self.input_bytes)

    @property
    def window_bytes(self) -> int:
        """The bytes of one window, inputs and targets."""
        return self.window * self.row_bytes

    @property
    def batch_bytes(self) -> int:
        """The bytes of one batch, inputs and targets."""
        return self.batch * self.window_bytes


@dataclass(frozen=True)
class Held:
    """Bytes of host memory that a data strategy says it takes.

    `source` is what is held instead of the rows (None: the rows themselves), `windows` what is held beside it,
    `making` what is taken for a moment while the windows are made, and `batches` what is held while batches flow.
    """

    source: int | None = None
    windows: int = 0
    making: int = 0
    batches: int = 0


@dataclass(frozen=True)
class Knob:
    """One setting of a strategy: its name, type and default, read from the signature of its functions."""

    name: str
    type: type
    default: Any


@dataclass(frozen=True)
class Strategy:
    """A named function `Parts -> Parts`, one for each backend.

    `rewrites` names the parts that change, `calls` others that the workload must have. `precision` declares a lower
    working dtype, `approximate` another algorithm; without them the results must stay those of the untouched parts.
    `needs` are importable packages, and `excludes` names places where the strategy cannot or would not do anything,
    with the reason (`"jax/cpu": "..."`).
    `ranks` says that it divides the run among the ranks of a case: such rows run on as many as the suite asks for.
    `probe` gives knobs that count rows a value for the small shape at which answers are compared, so that there too
    a chunk is not the whole.

    For strategies of data: `feeds` says how far its batches may differ from the baseline's (see `FEEDS`), `data` that
    it is for `tokens` or for `frames` alone, and `holds(extent, **knobs) -> Held` what it takes on the host, which is
    how it is predicted.
    """

    name: str
    rewrites: tuple[str, ...]
    on: Mapping[str, Callable[..., Parts]]
    about: str
    calls: tuple[str, ...] = ()
    precision: str | None = None
    approximate: bool = False
    ranks: bool = False
    needs: tuple[str, ...] = ()
    excludes: Mapping[str, str] = field(default_factory=dict)
    probe: Mapping[str, Any] = field(default_factory=dict)
    feeds: str = "same"
    data: str | None = None
    holds: Callable[..., Held] | None = None

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

    def misfit(self, workload: "Workload") -> str | None:
        """Say in one sentence why the strategy can never be applied to a workload, or None when it can."""
        lacking = [part for part in (*self.rewrites, *self.calls) if part in workload.lacks]
        if lacking:
            does = "rewrites" if lacking[0] in self.rewrites else "calls"
            return f"'{self.name}' {does} '{lacking[0]}', a part that the workload '{workload.name}' does not have"
        if self.data not in (None, workload.data):
            return f"'{self.name}' is for {self.data}, and the workload '{workload.name}' reads {workload.data}"
        return None

    def obstacle(self, place: Place, workload: "Workload | None" = None) -> str | None:
        """Say in one sentence why the strategy cannot be applied there, or None when it can."""
        if place.backend not in self.on:
            return f"'{self.name}' has nothing for {place.backend}: it is written for {', '.join(self.on)}"
        if (reason := self.excludes.get(str(place))) is not None:
            return f"'{self.name}' does not run on {place}: {reason}"
        missing = [package for package in self.needs if find_spec(package) is None]
        if missing:
            return f"'{self.name}' needs the package {missing[0]}: install it to measure this strategy"
        return self.misfit(workload) if workload is not None else None


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

    `data` is what is read, `tokens` of a text or `frames` of a sensor: it decides who prepares the corpus.
    `wanted(shape, steps)` gives the sizes that this needs (see `harness.tokens` and `harness.frames`; None: the
    workload draws its own data), `extent(shape, corpus, steps)` the sizes of the source, `lacks` the parts that stay
    None.
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
    wanted: Callable[[Any, int], dict[str, int]] | None = None
    extent: Callable[[Any, Any, int], Extent] | None = None
    data: str = "tokens"
    lacks: tuple[str, ...] = ()


__all__ = [
    "FEEDS",
    "IGNORED",
    "PART_NAMES",
    "Extent",
    "Held",
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
