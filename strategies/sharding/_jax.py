"""How a run is divided among devices in JAX: each takes the step on its own part, as a process of its own would.

The harness runs the whole step under `jax.shard_map` over a row of devices, whose axis is called `ranks`. So within it
an array is this device's part, and what passes between devices is written where it passes. Outside, where parameters
are drawn, arrays are whole, and `jax.device_put` says how they are divided: matrices by their rows, filled up with
zeros to as many on each device; vectors stay whole.

The loss of a batch is the sum of what the ranks compute. So the gradient of a parameter that every rank holds is the
sum of theirs, and the backward pass of each collective is its transpose: of gathering, summing into parts; of summing,
summing; of exchanging, exchanging back. With one rank nothing passes, and there is no axis.

XLA's CPU runs what is independent in any order, on each device in its own. It keeps collectives that stand side by side
in order, but not those within a loop and those beside it: devices then wait for each other for ever. So no collective
may stand beside a loop that has some, unless one needs what the other gives: see `after`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from harness import IGNORED, Parts, tree
from strategies.sharding import shares

AXIS = "ranks"
Size = tuple[int, ...]
Blocks = Callable[[int, int], tuple[int, ...]]

# What passes between ranks


def own_rank(parts: Parts) -> Any:
    """Return the number of this rank."""
    return lax.axis_index(AXIS) if parts.ranks > 1 else 0


def all_gather(parts: Parts, part: Any, axis: int = 0) -> Any:
    """Put the parts of all ranks after each other."""
    return lax.all_gather(part, AXIS, axis=axis, tiled=True) if parts.ranks > 1 else part


def summed_part(parts: Parts, whole: Any, axis: int = 0) -> Any:
    """Sum over all ranks and keep this one's part of the sum."""
    return lax.psum_scatter(whole, AXIS, scatter_dimension=axis, tiled=True) if parts.ranks > 1 else whole


def over_ranks(parts: Parts, value: Any) -> Any:
    """Sum over all ranks."""
    return lax.psum(value, AXIS) if parts.ranks > 1 else value


def exchanged(parts: Parts, value: Any, cut: int, joined: int) -> Any:
    """Cut one dimension, send each rank its piece, and join what came from all along another dimension."""
    return lax.all_to_all(value, AXIS, cut, joined, tiled=True) if parts.ranks > 1 else value


def own_piece(parts: Parts, whole: Any, axis: int = 0) -> Any:
    """Return this rank's part of what every rank holds, filled up to as much on each."""
    if parts.ranks == 1:
        return whole
    size = -(-whole.shape[axis] // parts.ranks)
    whole = filled(whole, size * parts.ranks, axis)
    return lax.dynamic_slice_in_dim(whole, own_rank(parts) * size, size, axis)


def after(value: Any, *others: Any) -> Any:
    """Return a value, but not before the others are there; a barrier would be gone when the order is decided."""
    there = jnp.array(True)
    for other in others:
        first = other[(0,) * other.ndim]
        bits = lax.bitcast_convert_type(first, jnp.dtype(f"int{8 * first.dtype.itemsize}"))
        there &= (bits | 1) != 0  # so it is, even of what is no number, but the compiler does not know
    return jnp.where(there, value, jnp.nan if jnp.issubdtype(value.dtype, jnp.floating) else 0)


@jax.custom_vjp
def in_turn(x: Any, w: Any) -> tuple[Any, Any]:
    """Return both, the second after the first; in the backward pass the gradient of the first after the second's."""
    return x, after(w, x)


in_turn.defvjp(lambda x, w: (in_turn(x, w), None), lambda _, grads: (after(grads[0], grads[1]), grads[1]))


@jax.custom_vjp
def known(value: Any) -> Any:
    """Return a value whose gradient comes after it: what is computed again would not wait for the first time."""
    return value


known.defvjp(lambda value: (value, value), lambda value, grad: (after(grad, value),))


def filled(values: Any, size: int, axis: int, nothing: int = 0) -> Any:
    """Fill a dimension up to a size."""
    missing = [(0, size - have if at == axis else 0) for at, have in enumerate(values.shape)]
    return jnp.pad(values, missing, constant_values=nothing) if any(map(any, missing)) else values


# Who trains on what of a batch


def by_rows(parts: Parts, x: Any, y: Any) -> Any:
    """Return as many rows of the batch as every rank has; the last ones are filled up with rows that do not count."""
    size = -(-len(x) // parts.ranks)
    if (used := -(-len(x) // size)) < parts.ranks:
        parts.notes["ranks"] = (
            f"a batch of {shares.rows(len(x))} leaves {parts.ranks - used} of {parts.ranks} ranks without any"
        )
    whole = size * parts.ranks
    return weighed(parts, *(own_piece(parts, filled(each, whole, 0, nothing)) for each, nothing in _batch(x, y)))


def by_tokens(parts: Parts, x: Any, y: Any, blocks: Blocks) -> Any:
    """Return some of the equal blocks into which each row is cut, the last ones filled up with ignored tokens."""
    order = [block for rank in range(parts.ranks) for block in blocks(rank, parts.ranks)]
    size = -(-x.shape[1] // len(order))

    def own(values: Any, nothing: int) -> Any:
        cut = filled(values, size * len(order), 1, nothing).reshape(len(values), len(order), size)
        return own_piece(parts, cut[:, np.array(order)], 1).reshape(len(values), -1)

    return weighed(parts, *(own(each, nothing) for each, nothing in _batch(x, y)))


def for_all(parts: Parts, x: Any, y: Any) -> Any:
    """Return the whole batch, as on every rank: each loss counts as one of R."""
    return x, y, 1 / parts.ranks


def _batch(x: Any, y: Any) -> Any:
    return (x, 0), (y, IGNORED)


def weighed(parts: Parts, x: Any, y: Any) -> Any:
    """Weigh a part of the batch by the targets in it that count: the mean over all is no mean of means.

    A part without any gets one, and no weight: a mean over nothing is no number. The loss of a batch without any
    is 0.
    """
    targets = (y != IGNORED).sum()
    total = over_ranks(parts, targets)
    x = jnp.where(total >= targets, x, 0)  # which is so: but the layers wait for it, see `after`
    weight = targets / jnp.maximum(total, 1)
    return x, jnp.where(targets == 0, y.at[(0,) * y.ndim].set(0), y), weight


def tokens_by(blocks: Blocks) -> Callable[..., Any]:
    """Divide rows of tokens by blocks; `blocks(rank, ranks)` names those of a rank, among as many for each."""
    return partial(by_tokens, blocks=blocks)


def positions_by(blocks: Blocks) -> Callable[..., Any]:
    """Return the positions of the blocks of all ranks, after each other: which rank this is, no number says."""

    def positions(parts: Parts, tokens: int) -> tuple[slice, ...]:
        order = [block for rank in range(parts.ranks) for block in blocks(rank, parts.ranks)]
        size = tokens * parts.ranks // len(order)
        return tuple(slice(block * size, (block + 1) * size) for block in order)

    return positions


def dividing(parts: Parts, shard_batch: Callable[..., Any], granularity: int) -> Parts:
    """Divide the batch by `shard_batch`, so finely, and sum what every rank holds whole."""
    return shares.dividing(parts, shard_batch, granularity, summed)


def summed(parts: Parts, loss: Any, grads: Any) -> tuple[Any, Any]:
    """Sum the loss, and the gradients of parameters that every rank holds whole: what is divided is summed."""

    whole = {name for name, grad, size in leaves(parts, grads) if size is None or grad.shape == size}
    return over_devices(parts, loss, grads, whole)


def leaves(parts: Parts, grads: Any) -> list[tuple[str, Any, Size | None]]:
    """Return each gradient with its dotted name and the whole size of its parameter, as `sized` has it."""
    whole = sizes(parts)
    return [(name, grad, whole.get(name)) for name, grad in tree.leaves(grads)]


def over_devices(parts: Parts, loss: Any, grads: Any, names: set[str]) -> tuple[Any, Any]:
    """Sum the loss and these of the gradients: those of the layers one layer at a time, in place, and after all others.

    All of it comes after the backward pass, in which ranks may exchange, too.
    """
    if parts.ranks == 1:
        return loss, grads
    by_name = dict(tree.leaves(grads))
    layers = {name: by_name[name] for name in by_name if name.startswith("layers.")}
    done = layers.values()
    loss = over_ranks(parts, after(loss, *done))
    outside = names - layers.keys()
    alone = {name: over_ranks(parts, after(by_name[name], *done)) for name in by_name if name in outside}
    whole = {name: layers[name] for name in layers if name in names}
    if whole:
        others = (loss, *({**by_name, **alone}[name] for name in by_name if name not in layers))
        small = min(whole, key=lambda name: whole[name].size)
        whole[small] = after(whole[small], *others)

        def of_layer(layer: Any, all_: Any) -> Any:
            return {name: each.at[layer].set(over_ranks(parts, each[layer])) for name, each in all_.items()}

        whole = lax.fori_loop(0, len(whole[small]), of_layer, whole)
    by_name |= alone | whole
    return loss, tree.mapped(by_name.__getitem__, tree.names(grads))


# Parameters in parts


def sizes(parts: Parts) -> dict[str, Size]:
    """Return the whole size of each parameter by its dotted name, those of the layers stacked."""
    shapes = parts.shape.parameter_shapes().items()
    return {name: (parts.shape.layers, *size) if name.startswith("layers.") else size for name, (size, _) in shapes}


def sized(parts: Parts, params: Any) -> Any:
    """Put the size of each parameter in its place; None for one that a strategy added, which every rank holds whole."""
    return tree.mapped(sizes(parts).get, tree.names(params))


def rows_axis(name: str) -> int:
    """Return the dimension of a stored parameter along which it is divided: its rows, behind the layers."""
    return 1 if name.startswith("layers.") else 0


def divisible(name: str, size: Size | None) -> bool:
    """Return whether a parameter is divided: a matrix of the model of more than one row."""
    axis = rows_axis(name)
    return size is not None and len(size) == axis + 2 and size[axis] > 1


def divided(parts: Parts, name: str, value: Any, axis: int | None = None) -> Any:
    """Divide a parameter among the ranks by its rows, or by another dimension."""
    axis = rows_axis(name) if axis is None else axis
    value = filled(value, -(-value.shape[axis] // parts.ranks) * parts.ranks, axis)
    return laid(parts, value, axis) if parts.ranks > 1 else value


def drawn_divided(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Make a `draw` that divides every matrix of the model of more than one row, unless another strategy has."""

    def draw(parts: Parts, name: str, shape: Size, deviation: float) -> Any:
        value = inner(parts, name, shape, deviation)
        if isinstance(value, dict) or not divisible(name, sizes(parts).get(name)) or lies_divided(value):
            return value
        return divided(parts, name, value)

    return draw


def laid(parts: Parts, value: Any, axis: int | None) -> Any:
    """Put an array on all devices, divided along a dimension or whole on each."""
    row = jax.make_mesh((parts.ranks,), (AXIS,), devices=jax.devices()[: parts.ranks])
    spec = PartitionSpec() if axis is None else PartitionSpec(*(None,) * axis, AXIS)
    return jax.device_put(value, NamedSharding(row, spec))


def lies_divided(value: Any) -> bool:
    """Return whether another strategy has divided an array."""
    return any(jax.typeof(value).sharding.spec)


def gathered(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Make a `gather_parameters` that puts parts on all devices, and cuts off what they were filled up with."""

    def gather_parameters(parts: Parts, params: Any) -> Any:
        def whole(value: Any, size: Size | None) -> Any:
            if size is None or (value.shape == size and not lies_divided(value)):
                return value
            value = laid(parts, value, None) if parts.ranks > 1 else value
            return value[tuple(map(slice, size))]

        return inner(parts, tree.mapped(whole, params, sized(parts, params)))

    return gather_parameters
