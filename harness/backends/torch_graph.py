"""What autograd keeps beside the tensors: the graph itself, an object for each operator and for each tensor it saves.

It is small until operators are many and what they save is not: windows, chunks and tiles under checkpoints free their
tensors, but the operators of all of them stand in one graph until the backward pass ends.
"""

from typing import Any

import torch

NODE = 1200
"""Bytes of an operator in the graph, with what stands for a tensor that it saves; the tensor's own bytes are apart.

An empirical figure: 560 to 580 for the operator alone, 650 to 750 for each saved tensor, as much under a checkpoint,
where a placeholder of Python stands for it. 13,440 operators of 48 windows took 15.6 MiB. The heap keeps their place.
"""


class Graph:
    """The largest graph that a run has had so far."""

    def __init__(self) -> None:
        self.most = 0
        self._nodes = 0
        self._ended = False

    @property
    def open(self) -> int:
        """Return how many operators the graph has that the next one joins."""
        return 0 if self._ended else self._nodes

    def added(self, args: Any) -> int:
        """Return by how many bytes the largest graph has grown, after an operator with these arguments."""
        if torch._C._current_graph_task_id() != -1:
            self._ended = True
            return 0
        if not torch.is_grad_enabled() or not any(map(_wants_gradient, args)):
            return 0
        self._nodes = self.open + 1
        self._ended = False
        grown = max(0, self._nodes - self.most)
        self.most += grown
        return grown * NODE


def _wants_gradient(argument: Any) -> bool:
    if isinstance(argument, (list, tuple)):
        return any(map(_wants_gradient, argument))
    return isinstance(argument, torch.Tensor) and argument.requires_grad
