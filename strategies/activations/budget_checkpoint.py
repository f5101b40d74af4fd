"""Keep as many of the last layers whole as a budget allows; keep segment inputs of the others and run these twice.

With the last `t` of L layers whole and those before in segments of k <= t, recomputed one at a time, the activations of
the stack peak at t A + ceil((L - t) / k) x bytes, where A is what one block saves, its input x included; or at the end
of the backward pass at k A and the gradients made by then. The whole layers are the last ones, since what they save is
freed before the first segment is recomputed and needs the room. The largest t that fits `budget_mib` is taken: no
choice that fits recomputes fewer layers. Where none fits, or with 0, no layer stays whole, since it would lie beside
what the loss takes, and k is the one with the lowest peak, about the square root of L x / A. A is not assumed: torch
runs one block once more, at the first step, and counts what it saves for itself alone; JAX asks for the shapes,
and its stacked weights are copied where they are cut. The loss and scratch within a block come on top. Sources: Chen et
al., "Training Deep Nets with Sublinear Memory Cost" (2016); Jain et al., "Checkmate" (2020, arXiv:1910.02653).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

from harness import Parts, Strategy, hookimpl, tree


class Costs(NamedTuple):
    """Bytes: what a layer saves, a hidden state, a layer's gradients, and the copy of weights where a stack is cut."""

    saved: int
    hidden: int
    gradients: int = 0
    copied: int = 0


class Choice(NamedTuple):
    """How many of the last layers stay whole, and how many of the others make a segment."""

    whole: int
    segment: int

    def peak(self, layers: int, costs: Costs) -> int:
        """Predict the most bytes that activations take, with the gradients that are made meanwhile.

        That is when all inputs are kept and no gradient is made, or when the first segment is undone at last.
        """
        ahead = layers - self.whole
        at_first = max(self.whole, min(self.segment, ahead)) * costs.saved + -(-ahead // self.segment) * costs.hidden
        at_last = min(self.segment, ahead) * costs.saved + max(0, layers - self.segment) * costs.gradients
        cut = self.whole > 0 < ahead or ahead % self.segment
        return max(at_first, at_last if ahead else 0) + (costs.copied if cut else 0)


def choose(layers: int, costs: Costs, budget: int) -> Choice:
    """Choose the fewest recomputed layers that fit a budget in bytes; where none fits, the lowest peak."""
    choices = [Choice(whole, size) for whole in range(layers + 1) for size in range(1, (whole or layers) + 1)]
    by_peak = {choice: choice.peak(layers, costs) for choice in choices}
    fitting = [choice for choice, peak in by_peak.items() if peak <= budget]
    if fitting:
        return max(fitting, key=lambda choice: (choice.whole, -by_peak[choice], -choice.segment))
    none_whole = [choice for choice in choices if not choice.whole]
    return min(none_whole, key=lambda choice: (by_peak[choice], choice.segment))


def chosen(parts: Parts, layers: int, costs: Costs, budget: int) -> Choice:
    """Choose, and note the choice."""
    choice = choose(layers, costs, budget)
    peak, ahead = choice.peak(layers, costs), layers - choice.whole
    sentence = f"{ahead} of {layers} layers are recomputed, at most {min(choice.segment, ahead)} at a time: "
    sentence += f"{peak / 2**20:.1f} MiB predicted"
    if budget:
        sentence += f" of a budget of {budget / 2**20:.1f}"
        sentence += "" if peak <= budget else ", which no choice fits: this one takes the least"
    parts.notes.update(choice=sentence, recomputed_layers=ahead, predicted_activation_bytes=peak)
    return choice


def size_of(array: Any) -> int:
    """Count the bytes of an array."""
    return prod(array.shape) * int(array.dtype.itemsize)


def bytes_of(mebibytes: float) -> int:
    """Read the budget; raise ValueError for a negative one."""
    if mebibytes < 0:
        raise ValueError(f"budget_checkpoint: budget_mib must be 0 (the least) or more, not {mebibytes}")
    return int(mebibytes * 2**20)


def share_of_activations(budget: float, shape: Any, small: Any) -> float:
    """Return the same share of the activations of a smaller shape, by the hidden states of all layers."""
    return budget * _hidden(small) / _hidden(shape)


def _hidden(shape: Any) -> int:
    tokens = getattr(shape, "tokens", getattr(shape, "window", 1))
    return int(shape.layers * shape.batch * tokens * getattr(shape, "width", 1))


def over_two(parts: Parts, costs_of: Callable[..., Costs], checkpointed: Any, budget: int) -> Parts:
    """Run the first layers of a stack in checkpointed segments and the last ones whole."""
    inner = parts.stack
    choices: dict[Any, Choice] = {}

    def stack(parts: Parts, ps: Any, x_BTD: Any) -> Any:
        stacked = isinstance(ps, dict)
        layers = len(next(tree.leaves(ps))[1]) if stacked else len(ps)
        key = (layers, tuple(x_BTD.shape), x_BTD.dtype)
        if key not in choices:
            choices[key] = chosen(parts, layers, costs_of(parts, ps, x_BTD), budget)
        choice = choices[key]
        ahead = layers - choice.whole
        if not ahead:
            return inner(parts, ps, x_BTD)
        if not choice.whole:
            return checkpointed(parts, every=choice.segment).stack(parts, ps, x_BTD)
        before, after = (
            tree.mapped(lambda p, part=part: p[part], ps) if stacked else ps[part]
            for part in (slice(None, ahead), slice(ahead, None))
        )
        x_BTD = checkpointed(parts, every=choice.segment).stack(parts, before, x_BTD)
        return inner(parts, after, x_BTD)

    return replace(parts, stack=stack)


def on_torch(parts: Parts, budget_mib: float = 0.0) -> Parts:
    import torch
    from torch.autograd.graph import saved_tensors_hooks
    from torch.multiprocessing.reductions import StorageWeakRef

    from strategies.activations import checkpoint

    inner = parts.stack

    def costs_of(parts: Parts, ps: Any, x_BTD: Any) -> Costs:
        saved: dict[StorageWeakRef, int] = {}

        def pack(tensor: Any) -> Any:
            storage = tensor.untyped_storage()
            saved[StorageWeakRef(storage)] = storage.nbytes()  # a reference keeps its number from another storage
            return tensor.detach()  # an output that held its own graph would live on

        with torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor):
            x_BTD = x_BTD.detach().requires_grad_()
            inner(parts, ps[:1], x_BTD)
        # What outlives the layer is not saved for it: weights, their copies in autocast, what all layers share.
        own = sum(size for storage, size in saved.items() if storage.expired())
        trained = (leaf for _, leaf in tree.leaves(ps[0]) if leaf.requires_grad)
        return Costs(own + size_of(x_BTD), size_of(x_BTD), gradients=sum(map(size_of, trained)))

    def checkpointed(parts: Parts, every: int) -> Parts:
        return checkpoint.on_torch(replace(parts, stack=inner), every)

    return over_two(parts, costs_of, checkpointed, bytes_of(budget_mib))


def on_jax(parts: Parts, budget_mib: float = 0.0) -> Parts:
    import jax

    from strategies.activations import checkpoint

    inner = parts.stack

    def residuals(parts: Parts, ps: Any, x_BTD: Any, layers: int) -> int:
        """Count what a scan over the first layers saves, weights left out."""
        total = 0

        def shapes(ps: Any, x_BTD: Any) -> Any:
            nonlocal total
            weights = {id(leaf) for leaf in jax.tree.leaves(ps)}
            pulled = jax.vjp(partial(inner, parts), ps, x_BTD)[1]
            buffers = {id(leaf): leaf for leaf in jax.tree.leaves(pulled) if id(leaf) not in weights}
            total = sum(map(size_of, buffers.values()))
            return x_BTD

        jax.eval_shape(shapes, jax.tree.map(lambda p: p[:layers], ps), x_BTD)
        return total

    def costs_of(parts: Parts, ps: Any, x_BTD: Any) -> Costs:
        # The second layer counts, where there is one: what all layers share, as masks are, is saved once.
        leaves, first = jax.tree.leaves(ps), residuals(parts, ps, x_BTD, 1)
        saved = residuals(parts, ps, x_BTD, 2) - first if len(leaves[0]) > 1 else first
        return Costs(saved, size_of(x_BTD), copied=sum(map(size_of, leaves)))

    def checkpointed(parts: Parts, every: int) -> Parts:
        return checkpoint.on_jax(replace(parts, stack=inner), every)

    return over_two(parts, costs_of, checkpointed, bytes_of(budget_mib))


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "budget_checkpoint",
            rewrites=("stack",),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            scaled={"budget_mib": share_of_activations},
        )
    ]
