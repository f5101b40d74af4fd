"""One training run as a value: its parts, and what several strategies have divided of it."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from harness.contract import protocols
from harness.contract.place import Place

ABSENT: Any = None
"""What a workload puts in the place of a part that it does not have."""
BESIDE = "bytes_beside_the_program"
"""The note of a part that takes memory in calls to the host, beside a compiled program."""


@dataclass(frozen=True)
class Division:
    """What strategies have divided among the ranks so far; set by `replace`, and read by those around them.

    `granularity` says how finely the batch is divided: 0 not at all, 1 by rows, 2 by tokens. `gradients_reduced`: loss
    and gradients are summed already. `over_vocabulary` names the parts that take this rank's rows of the classifier (or
    of the embedding, where that is the same) in the place of all.
    """

    granularity: int = 0
    gradients_reduced: bool = False
    over_vocabulary: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Parts:
    """One training run, cut where memory is spent.

    Every part takes the whole `parts` first and calls its neighbours through it, so a rewritten part is seen by
    all its callers. A part that a workload lacks is None. `harness.contract.protocols` has the arguments and results.

    `shape` has the sizes, see `harness.contract.shapes`. `ranks` is among how many processes (in JAX: devices) the run
    is divided, where its strategies divide it, and `division` what they have divided. In JAX the whole step runs under
    `jax.shard_map`, on each device with its own part, over an axis that is called `ranks`. `corpus` describes the files
    that are trained on (None: the workload draws its own). `notes` is where a part writes down what a reader would ask
    about: a choice it made and why, or a number. It is shared by all parts. Under `BESIDE` stands what calls to the
    host take beside a compiled program, in bytes, which its prediction adds. `moments` names what AdamW keeps of each
    parameter, as far as `init` is to make it in JAX: a strategy that keeps something else asks for less. In torch the
    first update makes them. `outputs_first` says of a matrix of a layer, by its name in the state, whether it is stored
    [out, in]: all others are [in, out].

    =================  =============================================================================================
    rows               map or read the rows [n, ...] of one `.npy` file
    source             make the source: rows and what is to be predicted from them
    windows            give random access to the windows over a source
    order              fix the order of an epoch: which windows come at the positions from start to stop
    batches            yield batches (x, y) without end
    transfer           put a batch on the device, in the types that the step takes
    draw               draw the first value of one parameter; deviation 0 means all ones, a negative one zeros
    init               make the state: parameters, and what the optimizer has before the first update
    embed              look up x_BTD of the ids x_BT (or map frames x_BTF to it), then `add_positions`
    add_positions      add to x_BTD the learned vectors of its positions; return it as it is where there are none
    linear             multiply by a weight of a layer, known by its short name, and add its bias where it has one
    rotary             compute cosines and sines [T, rotated / 2] of the angles by which queries and keys are turned
    mix                mix across the tokens of one layer: attention, or a recurrence
    attend             attend causally, with H heads of queries and G of keys and values, H a multiple of G
    recur              run an LSTM or a GRU over the frames from a state on, or from zeros; return its last state, too
    scan               run the recurrence of a selective scan
    feed               transform each token of one layer by itself
    block              apply one layer: `mix` and `feed` with their norms
    stack              apply the layers it is given (any consecutive ones)
    loss               average the loss over the targets that are not ignored
    shard_batch        take what this rank trains on, and the weight of its loss in that of the batch; None: all of it
    grad               compute the loss of this rank's part and its gradients, then sum both by `reduce_gradients`
    reduce_gradients   sum over all ranks the loss, and the gradients of which each rank has not just its own part
    gather_parameters  make every parameter, or its gradient, whole, from what the ranks hold
    positions          say where in the context the tokens at hand stand, T in all; in JAX those of all ranks after each
                       other, R T in all, of which the caller takes its own
    update             apply the optimizer
    step               take one step: `grad`, then `update`
    evaluate           average the loss over some batches, after the steps; keep their logits for metrics, or drop them
    save               write the state into a checkpoint, see `harness.checkpoints`
    resume             make the state from a checkpoint, as a new process would
    cache              make a cache of up to `tokens` tokens, of the type and device of `like`. In JAX it is pure,
                       `layer` and `position` may be traced, and S is what was reserved
    =================  =============================================================================================

    Arrays carry their dimensions as letters: `k_BTGK`. A lower-case letter is a part of what the capital counts
    (`w_vD`: some of the V rows). What a letter means beside this, a function says where it uses it.

    =  ============================================  =  =================================================
    B  rows of a batch                               C  a chunk of what is otherwise taken at once
    T  tokens (frames) of a row, or new ones         M  chunks, micro-batches or slots, after each other
    S  tokens attended to; states of a scan          N  all B T tokens; in data, the windows of a source
    D  width of the model                            W  rows of a window
    F  values of a frame                             V  vocabulary, or classes
    E  channels of a scan                            U  one rank's rows of the vocabulary
    H  heads of queries                              L  layers
    G  heads of keys and values                      R  ranks; heads of queries for one of keys, H / G
    K  width of a head                               P  tokens of a prompt, or pages of a cache
    =  ============================================  =  =================================================
    """

    shape: Any
    place: Place
    corpus: Any = None
    ranks: int = 1
    division: Division = Division()
    notes: dict[str, Any] = field(default_factory=dict, compare=False)
    moments: frozenset[str] = frozenset({"first", "second"})
    outputs_first: Callable[[str], bool] = lambda name: False
    rows: protocols.RowsPart = ABSENT
    source: protocols.SourcePart = ABSENT
    windows: protocols.WindowsPart = ABSENT
    order: protocols.OrderPart = ABSENT
    batches: protocols.BatchesPart = ABSENT
    transfer: protocols.TransferPart = ABSENT
    draw: protocols.DrawPart = ABSENT
    init: protocols.InitPart = ABSENT
    embed: protocols.EmbedPart = ABSENT
    add_positions: protocols.AddPositionsPart = ABSENT
    linear: protocols.LinearPart = ABSENT
    rotary: protocols.RotaryPart = ABSENT
    mix: protocols.LayerPart = ABSENT
    attend: protocols.AttendPart = ABSENT
    recur: protocols.RecurPart = ABSENT
    scan: protocols.ScanPart = ABSENT
    feed: protocols.LayerPart = ABSENT
    block: protocols.LayerPart = ABSENT
    stack: protocols.StackPart = ABSENT
    loss: protocols.LossPart = ABSENT
    shard_batch: protocols.ShardBatchPart = ABSENT
    grad: protocols.GradPart = ABSENT
    reduce_gradients: protocols.ReduceGradientsPart = ABSENT
    gather_parameters: protocols.GatherParametersPart = ABSENT
    positions: protocols.PositionsPart = ABSENT
    update: protocols.UpdatePart = ABSENT
    step: protocols.StepPart = ABSENT
    evaluate: protocols.EvaluatePart = ABSENT
    save: protocols.SavePart = ABSENT
    resume: protocols.ResumePart = ABSENT
    cache: protocols.CachePart = ABSENT


NOT_PARTS = ("shape", "place", "corpus", "ranks", "division", "notes", "moments", "outputs_first")
PART_NAMES: tuple[str, ...] = tuple(each.name for each in fields(Parts) if each.name not in NOT_PARTS)
DATA_PARTS = frozenset({"rows", "source", "windows", "order", "batches", "transfer"})
"""The parts that bring the batches to a step."""
RANK_PARTS = ("shard_batch", "reduce_gradients", "gather_parameters", "positions")
"""The parts that divide a run among ranks."""
ENDING_PARTS = ("evaluate", "save", "resume")
"""What follows the steps of a whole run."""
