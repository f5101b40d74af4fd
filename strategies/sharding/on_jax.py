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
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from harness import IGNORED, Parts, tree
from strategies.sharding.shares import chosen, in_order
from strategies.sharding.tensor_parallel import COLUMNS, ROWS

AXIS = "ranks"
Size = tuple[int, ...]
Blocks = Callable[[int, int], tuple[int, ...]]

# What passes between ranks


def own_rank(parts: Parts) -> Any:
    """Give the number of this rank."""
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
    """Take this rank's part of what every rank holds, filled up to as much on each."""
    if parts.ranks == 1:
        return whole
    size = -(-whole.shape[axis] // parts.ranks)
    whole = filled(whole, size * parts.ranks, axis)
    return lax.dynamic_slice_in_dim(whole, own_rank(parts) * size, size, axis)


def after(value: Any, *others: Any) -> Any:
    """Give a value, but not before the others are there; a barrier would be gone by the time that order is decided."""
    there = jnp.array(True)
    for other in others:
        first = other[(0,) * other.ndim]
        there &= first == first  # it is, or it is no number, which the compiler cannot know
    return jnp.where(there, value, jnp.nan if jnp.issubdtype(value.dtype, jnp.floating) else 0)


@jax.custom_vjp
def in_turn(x: Any, w: Any) -> tuple[Any, Any]:
    """Give both, the second after the first; and in the backward pass the gradient of the first after the second's."""
    return x, after(w, x)


in_turn.defvjp(lambda x, w: (in_turn(x, w), None), lambda _, grads: (after(grads[0], grads[1]), grads[1]))


@jax.custom_vjp
def known(value: Any) -> Any:
    """Give a value whose gradient comes after it: what is computed again would not wait for the first time."""
    return value


known.defvjp(lambda value: (value, value), lambda value, grad: (after(grad, value),))


def filled(values: Any, size: int, axis: int, nothing: int = 0) -> Any:
    """Fill a dimension up to a size."""
    missing = [(0, size - have if at == axis else 0) for at, have in enumerate(values.shape)]
    return jnp.pad(values, missing, constant_values=nothing) if any(map(any, missing)) else values


# Who trains on what of a batch


def by_rows(parts: Parts, x: Any, y: Any) -> Any:
    """Take as many rows of the batch as every rank takes; the last ones are filled up with rows that do not count."""
    size = -(-len(x) // parts.ranks)
    if (used := -(-len(x) // size)) < parts.ranks:
        parts.notes["ranks"] = (
            f"a batch of {len(x)} rows leaves {parts.ranks - used} of {parts.ranks} ranks without any"
        )
    whole = size * parts.ranks
    return weighed(parts, *(own_piece(parts, filled(each, whole, 0, nothing)) for each, nothing in _batch(x, y)))


def by_tokens(parts: Parts, x: Any, y: Any, blocks: Blocks) -> Any:
    """Take some of the equal blocks into which each row is cut, those of the last one filled up with ignored tokens."""
    order = [block for rank in range(parts.ranks) for block in blocks(rank, parts.ranks)]
    size = -(-x.shape[1] // len(order))

    def own(values: Any, nothing: int) -> Any:
        cut = filled(values, size * len(order), 1, nothing).reshape(len(values), len(order), size)
        return own_piece(parts, cut[:, np.array(order)], 1).reshape(len(values), -1)

    return weighed(parts, *(own(each, nothing) for each, nothing in _batch(x, y)))


def for_all(parts: Parts, x: Any, y: Any) -> Any:
    """Take the whole batch, as every rank does: each loss counts as one of R."""
    return x, y, 1 / parts.ranks


def _batch(x: Any, y: Any) -> Any:
    return (x, 0), (y, IGNORED)


def weighed(parts: Parts, x: Any, y: Any) -> Any:
    """Weigh a share by the targets in it that count: the mean over all is no mean of means.

    A share without any gets one, and no weight: a mean over nothing is no number.
    """
    kept = (y != IGNORED).sum()
    total = over_ranks(parts, kept)
    x = jnp.where(total >= kept, x, 0)  # which is so: but the layers wait for it, see `after`
    weight = kept / total
    return x, jnp.where(kept == 0, jnp.zeros_like(y), y), weight


for_all.fineness = 0  # type: ignore[attr-defined]
by_rows.fineness = 1  # type: ignore[attr-defined]


def tokens_by(blocks: Blocks) -> Callable[..., Any]:
    """Divide rows of tokens by blocks; `blocks(rank, ranks)` names those of a rank, among as many for each."""
    share = partial(by_tokens, blocks=blocks)
    share.fineness = 2  # type: ignore[attr-defined]
    return share


def positions_by(blocks: Blocks) -> Callable[..., Any]:
    """Give the positions of the blocks of all ranks, after each other: which rank this is, no number says."""

    def positions(parts: Parts, tokens: int) -> tuple[slice, ...]:
        order = [block for rank in range(parts.ranks) for block in blocks(rank, parts.ranks)]
        size = tokens * parts.ranks // len(order)
        return tuple(slice(block * size, (block + 1) * size) for block in order)

    return positions


def dividing(parts: Parts, share: Callable[..., Any]) -> dict[str, Any]:
    """Give the parts `share` and `reduce` of a strategy that divides the batch by `share`."""
    return chosen(parts, share, summed)


def summed(parts: Parts, loss: Any, grads: Any) -> tuple[Any, Any]:
    """Sum the loss, and the gradients of parameters that every rank holds whole: what is divided is summed."""

    return over_devices(parts, loss, grads, {name for name, grad, size in _leaves(parts, grads) if grad.shape == size})


def _leaves(parts: Parts, grads: Any) -> list[tuple[str, Any, Size]]:
    whole = sizes(parts)
    return [(name, grad, whole[name]) for name, grad in tree.leaves(grads)]


def over_devices(parts: Parts, loss: Any, grads: Any, names: set[str]) -> tuple[Any, Any]:
    """Sum the loss and these of the gradients: those of the layers one layer at a time, in place, and after all others.

    All of it comes after the backward pass, in which ranks may exchange, too.
    """
    if parts.ranks == 1:
        return loss, grads
    found = dict(tree.leaves(grads))
    layers = {name: found[name] for name in found if name.startswith("layers.")}
    done = layers.values()
    loss = over_ranks(parts, after(loss, *done))
    alone = {name: over_ranks(parts, after(found[name], *done)) for name in found if name in names - layers.keys()}
    whole = {name: layers[name] for name in layers if name in names}
    if whole:
        others = (loss, *({**found, **alone}[name] for name in found if name not in layers))
        small = min(whole, key=lambda name: whole[name].size)
        whole[small] = after(whole[small], *others)

        def of_layer(layer: Any, all_: Any) -> Any:
            return {name: each.at[layer].set(over_ranks(parts, each[layer])) for name, each in all_.items()}

        whole = lax.fori_loop(0, len(whole[small]), of_layer, whole)
    summed_ = {**found, **alone, **whole}
    return loss, tree.mapped(summed_.__getitem__, tree.names(grads))


summed.over_ranks = True  # type: ignore[attr-defined]

# Parameters in parts


def sizes(parts: Parts) -> dict[str, Size]:
    """Give the whole size of each parameter by its dotted name, those of the layers stacked."""
    found = parts.shape.parameter_shapes().items()
    return {name: (parts.shape.layers, *size) if name.startswith("layers.") else size for name, (size, _) in found}


def sized(parts: Parts, params: Any) -> Any:
    """Put the whole size of each parameter in its place."""
    return tree.mapped(sizes(parts).__getitem__, tree.names(params))


def rows_axis(name: str) -> int:
    """Give the dimension of a stored parameter along which it is divided: its rows, behind the layers."""
    return 1 if name.startswith("layers.") else 0


def divisible(name: str, size: Size) -> bool:
    """Say whether a parameter is divided: a matrix of more than one row."""
    axis = rows_axis(name)
    return len(size) == axis + 2 and size[axis] > 1


def divided(parts: Parts, name: str, value: Any, axis: int | None = None) -> Any:
    """Divide a parameter among the ranks by its rows, or by another dimension."""
    axis = rows_axis(name) if axis is None else axis
    value = filled(value, -(-value.shape[axis] // parts.ranks) * parts.ranks, axis)
    return laid(parts, value, axis) if parts.ranks > 1 else value


def laid(parts: Parts, value: Any, axis: int | None) -> Any:
    """Put an array on all devices, divided along a dimension or whole on each."""
    row = jax.make_mesh((parts.ranks,), (AXIS,), devices=jax.devices()[: parts.ranks])
    spec = PartitionSpec() if axis is None else PartitionSpec(*(None,) * axis, AXIS)
    return jax.device_put(value, NamedSharding(row, spec))


def lies_divided(value: Any) -> bool:
    """Say whether another strategy has divided an array."""
    return any(jax.typeof(value).sharding.spec)


def gathered(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Make a `gather` that puts parts on all devices, and cuts off what they were filled up with."""

    def gather(parts: Parts, params: Any) -> Any:
        def whole(value: Any, size: Size) -> Any:
            if value.shape == size and not lies_divided(value):
                return value
            value = laid(parts, value, None) if parts.ranks > 1 else value
            return value[tuple(map(slice, size))]

        return inner(parts, tree.mapped(whole, params, sized(parts, params)))

    return gather


# The strategies


def ddp(parts: Parts) -> Parts:
    """Hold everything on every device, and divide the rows of the batch."""
    return replace(parts, **dividing(parts, by_rows))


def fsdp(parts: Parts) -> Parts:
    """Hold a part of every matrix, and make those of a block whole within the scan over the layers."""
    inner_draw, inner_grad = parts.draw, parts.grad

    def draw(parts: Parts, name: str, shape: Size, deviation: float) -> Any:
        value = inner_draw(parts, name, shape, deviation)
        return divided(parts, name, value) if divisible(name, shape) and not lies_divided(value) else value

    def grad(parts: Parts, state: Any, x: Any, y: Any) -> Any:
        size_of, block_, loss_, embed_ = sizes(parts), parts.block, parts.loss, parts.embed

        def whole(name: str, part: Any) -> Any:
            rows = size_of[name][rows_axis(name)]
            return part if part.ndim < 2 or len(part) == rows else all_gather(parts, part)[:rows]

        def block(parts: Parts, p: Any, x_BTD: Any) -> Any:
            def of_parts(p: Any, x_BTD: Any) -> Any:
                return block_(parts, {name: whole(f"layers.{name}", part) for name, part in p.items()}, x_BTD)

            return jax.checkpoint(of_parts, policy=all_but_whole, prevent_cse=False)(p, x_BTD)

        def loss(parts: Parts, x_BTD: Any, w_VD: Any, y_BT: Any) -> Any:
            if takes_rows(loss_):
                return loss_(parts, x_BTD, w_VD, y_BT)
            x_BTD, w_VD = in_turn(x_BTD, w_VD) if parts.ranks > 1 else (x_BTD, w_VD)
            return loss_(parts, x_BTD, whole("embed", w_VD), y_BT)

        def embed(parts: Parts, params: Any, x_BT: Any) -> Any:
            w_VD = params["embed"]
            return embed_(parts, {**params, "embed": w_VD if takes_rows(embed_) else whole("embed", w_VD)}, x_BT)

        return inner_grad(replace(parts, block=block, loss=loss, embed=embed), state, x, y)

    return replace(parts, draw=draw, grad=grad, gather=gathered(parts.gather), **dividing(parts, by_rows))


def takes_rows(part: Any) -> bool:
    """Say whether a part takes the rows that this rank holds, see `vocabulary_parallel_loss`."""
    return getattr(part, "over_vocabulary", False)


def all_but_whole(primitive: Any, *_: Any, **__: Any) -> bool:
    """Save what a block would save, but for parameters made whole: gathered, and what was filled up cut off."""
    return primitive.name not in ("all_gather", "slice")


def zero1(parts: Parts) -> Parts:
    """Hold a part of the moments of every matrix; sum its gradient into parts, and gather what they moved."""
    inner_init, inner_update = parts.init, parts.update
    share = dividing(parts, by_rows)["share"]

    def init(parts: Parts, source: Any = None) -> Any:
        inner_draw = parts.draw

        def draw(parts: Parts, name: str, shape: Size, deviation: float) -> Any:
            value = inner_draw(parts, name, shape, deviation)
            return divided(parts, name, value) if divisible(name, shape) and not lies_divided(value) else value

        state = inner_init(replace(parts, draw=draw), source)
        return {**state, "params": parts.gather(parts, state["params"])}

    def reduce(parts: Parts, loss: Any, grads: Any) -> Any:
        names = {name for name, grad, size in _leaves(parts, grads) if grad.shape == size}
        cut = {name for name, _, size in _leaves(parts, grads) if name in names and divisible(name, size)}
        loss, grads = over_devices(parts, loss, grads, names - cut)
        before = [loss, *(grad for name, grad in tree.leaves(grads) if name not in cut)]

        def in_parts(name: str, grad: Any) -> Any:
            if name not in cut or parts.ranks == 1:
                return grad
            axis = rows_axis(name)
            whole = filled(after(grad, *before), -(-grad.shape[axis] // parts.ranks) * parts.ranks, axis)
            return summed_part(parts, whole, axis)

        return loss, tree.mapped(in_parts, tree.names(grads), grads)

    def update(parts: Parts, state: Any, grads: Any) -> Any:
        params = state["params"]
        whole = tree.mapped(lambda p, g: p.shape == g.shape, params, grads)

        def own(name: str, param: Any, whole: bool) -> Any:
            return param if whole else own_piece(parts, param, rows_axis(name))

        def joined(name: str, part: Any, size: Size, whole: bool) -> Any:
            if whole:
                return part
            return all_gather(parts, part, rows_axis(name))[tuple(map(slice, size))]

        names = tree.names(params)
        moved = inner_update(parts, {**state, "params": tree.mapped(own, names, params, whole)}, grads)
        return {**moved, "params": tree.mapped(joined, names, moved["params"], sized(parts, params), whole)}

    reduce.over_ranks = True  # type: ignore[attr-defined]
    return replace(parts, init=init, share=share, reduce=reduce, update=update, gather=gathered(parts.gather))


def sequence_parallel(parts: Parts) -> Parts:
    """Divide the tokens of every row; around attention, exchange them for all tokens of some heads."""
    inner = parts.mix

    def exchanging(attend: Any, parts: Parts, q_BTHK: Any, k_BTGK: Any, v_BTGK: Any) -> Any:
        if (heads := q_BTHK.shape[2]) % parts.ranks:
            raise ValueError(
                f"sequence_parallel gives each of {parts.ranks} ranks as many of {heads} heads: "
                "take a divisor, or ring_attention"
            )
        if k_BTGK.shape[2] % parts.ranks:  # each rank needs the keys of its own heads
            k_BTGK, v_BTGK = (jnp.repeat(x, heads // x.shape[2], 2) for x in (k_BTGK, v_BTGK))
        q, k, v = (exchanged(parts, x, 2, 1) for x in (q_BTHK, k_BTGK, v_BTGK))
        return exchanged(parts, attend(parts, q, k, v), 1, 2)

    def mix(parts: Parts, p: Any, x_BTD: Any) -> Any:
        return inner(replace(parts, attend=partial(exchanging, parts.attend)), p, x_BTD)

    return replace(parts, mix=mix, positions=positions_by(in_order), **dividing(parts, tokens_by(in_order)))


KEYS = ("wk", "wv")
"""Matrices that are divided only where there are enough heads of keys and values."""


def tensor_parallel(parts: Parts) -> Parts:
    """Hold some heads of attention and some columns of the feed part; sum what each adds to the tokens of all."""
    inner_draw, inner_mix, inner_feed = parts.draw, parts.mix, parts.feed

    def draw(parts: Parts, name: str, shape: Size, deviation: float) -> Any:
        value = inner_draw(parts, name, shape, deviation)
        short = name.removeprefix("layers.")
        if short == name or lies_divided(value):
            return value
        if short.removeprefix("b") in KEYS and parts.shape.key_heads % parts.ranks:
            return value
        if short.removeprefix("b") in COLUMNS:
            return divided(parts, name, value, axis=len(shape) - 1)
        return divided(parts, name, value) if short in ROWS else value

    def added(parts: Parts, inner: Callable[..., Any], p: Any, x_BTD: Any, out: str) -> Any:
        """Sum what the ranks add; a bias is added by each, and so in parts."""
        if getattr(parts.share, "fineness", 0) > 0:
            raise ValueError("tensor_parallel needs the same tokens on all ranks: leave out what divides the batch")
        bias = {f"b{out}": p[f"b{out}"] / parts.ranks} if f"b{out}" in p else {}
        return over_ranks(parts, inner(parts, {**p, **bias}, x_BTD))

    def mix(parts: Parts, p: Any, x_BTD: Any) -> Any:
        shape, ranks = parts.shape, parts.ranks
        if shape.heads % ranks:
            raise ValueError(f"tensor_parallel: {shape.heads} heads cannot be divided among {ranks} ranks")
        own = {"heads": shape.heads // ranks, "head_width": shape.head, "kv_heads": shape.key_heads // ranks}
        if shape.key_heads % ranks:
            if ranks % shape.key_heads:
                raise ValueError(f"tensor_parallel: {ranks} ranks cannot share {shape.key_heads} heads of keys")
            start = own_rank(parts) * shape.key_heads // ranks * shape.head
            held = [name for name in p if name.removeprefix("b") in KEYS]
            p = p | {name: lax.dynamic_slice_in_dim(p[name], start, shape.head, -1) for name in held}
            own["kv_heads"] = 1
        small = replace(parts, shape=shape.model_copy(update=own))
        return added(small, inner_mix, p, x_BTD, "wo")

    def feed(parts: Parts, p: Any, x_BTD: Any) -> Any:
        return added(parts, inner_feed, p, x_BTD, "down")

    gather = gathered(parts.gather)
    return replace(parts, draw=draw, mix=mix, feed=feed, gather=gather, **dividing(parts, for_all))
