"""What the CPU's library (oneDNN) takes of an LSTM [T, B, I] of H units beside its outputs: a workspace, and scratch.

A call is one layer in one direction; a GRU, a plain recurrence and projections do not go there. The workspace is made
for both passes and lives between them. Of its arrays those count that a pass has written: gates and cells after the
forward pass, the gradients of states in the backward pass. So oneDNN sizes them (`set_workspace_sizes` in
rnn_utils.hpp), and so they were measured in float32 with vectors of 256 bits, by kernels that training in float32 takes
with wider ones as well. What bfloat16 takes is from its source, and was not measured.
"""

from typing import Any

import torch

from harness.backends import processor

FORWARD = torch.ops.aten.mkldnn_rnn_layer.default
BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default
PACKS = {FORWARD: 1, BACKWARD: 2}
"""How many times the bytes of the weights are taken beside them: in an order of its own, and there their gradients."""
REVERSED = {FORWARD: 7, BACKWARD: 13}
"""Where it stands among the arguments that the row is read from its end: states are copied then."""
HIDDEN = {FORWARD: 10, BACKWARD: 15}
GRADIENT = 10
"""Where the gradient of the outputs stands; one of two directions is a part of an array, and is copied."""
MERGED = 128
"""Rows of a batch from which a forward pass multiplies step by step, so that the products of one are there at once."""
LINE = 64
"""Bytes that the rows of arrays are rounded up to."""
FLOAT = 4


def kept(args: Any) -> int:
    """Return the bytes of the workspace that a forward pass has written; without gradients it is scratch."""
    steps, rows, width, hidden, size = _sizes(FORWARD, args)
    gates = steps * rows * _padded(4 * hidden, size) * size if torch.is_grad_enabled() else 0
    cells = (steps + 1) * rows * hidden * args[6].element_size()
    states = 2 * (steps + 1) * rows * _padded(width, size) * size if args[REVERSED[FORWARD]] else 0
    return gates + cells + states


def scratch(func: Any, args: Any) -> int:
    """Return the bytes that a pass takes beside its results and the workspace while it runs."""
    steps, rows, width, hidden, size = _sizes(func, args)
    packed = PACKS[func] * sum(weight.nbytes for weight in args[1:3])
    by_step = size < FLOAT and processor.has_bfloat16()
    if func is FORWARD:
        if not torch.is_grad_enabled():
            return packed + kept(args)
        turns = 1 if by_step or rows >= MERGED else steps
        return packed + turns * rows * _padded(4 * hidden, FLOAT) * FLOAT
    of_states = (steps + 1) * rows * (3 * _padded(width, FLOAT) + hidden) * FLOAT
    copied = args[GRADIENT].nbytes if args[GRADIENT] is not None and not args[GRADIENT].is_contiguous() else 0
    widened = steps * rows * (args[0].shape[2] + hidden) * FLOAT if size < FLOAT else 0
    return packed + of_states + copied + widened + (1 if by_step else steps) * rows * _padded(4 * hidden, size) * size


def _sizes(func: Any, args: Any) -> tuple[int, int, int, int, int]:
    """Return T, B, the larger of I and H, H, and the bytes of an element."""
    (steps, rows, width), hidden = args[0].shape, args[HIDDEN[func]]
    return steps, rows, max(width, hidden), hidden, args[0].element_size()


def _padded(length: int, size: int) -> int:
    """Return the elements of a row with what aligns it, which leaves no multiple of 256."""
    line = LINE // size
    whole = -(-length // line) * line
    return whole + line if whole % 256 == 0 else whole
