"""The values a training run is made of: `Source`, `Windows`, `Parts`; and what rewrites them: `Strategy`."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, cast

from harness.contract.place import Place

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
