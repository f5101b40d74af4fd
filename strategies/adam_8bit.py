"""Keep both moments of Adam as 8-bit codes with a scale per block of 256; pay rounding of the moments at each step.

Peak: 2 + 2 * 4 / 256 bytes of moments for each parameter instead of 8, and while a step is applied a few float32 slices
of 1 Mi elements. The codes are those of Dettmers et al., 2021 (arXiv:2110.02861): levels that lie evenly within each of
seven decades below the largest value of the block, with a sign for the first moment and without one for the second.
Unlike there a second moment is never rounded to zero but to the least level: where the gradient of an element vanishes,
as in the rows of an embedding, a momentum over nothing would be a step of a thousand learning rates (the zero point of
Li et al., 2023, arXiv:2309.01507).
Tensors of fewer than `least` elements keep float32 moments, so a model of small tensors saves nothing.

Declared approximate and not of lower precision: the ladder bounds a declared precision by the error of the first
gradient, which no rounding of the moments can touch, so that verdict would vouch for nothing. The losses of 20 updates
do part from the baseline's by more than float32 explains.
"""

import math
from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl, tree

BLOCK = 256
SLICE = 1 << 20
BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8


def levels(signed: bool) -> Any:
    """Give the 256 values in [-1, 1], or in [0, 1], that the codes stand for, in ascending order."""
    import numpy as np

    values = [0.0, 1.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1)
        means = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)
        values += [*means, *-means] if signed else [*means]
    return np.sort(values).astype(np.float32)


def middles(signed: bool) -> Any:
    """Give the 255 values at which the nearest level changes."""
    import numpy as np

    of = levels(signed).astype(np.float64)
    return ((of[:-1] + of[1:]) / 2).astype(np.float32)


def on_torch(parts: Parts, least: int = 4096) -> Parts:
    import torch
    import torch.nn.functional as F

    inner = parts.init

    def init(parts: Parts, source: Any = None) -> Any:
        state = inner(parts, source)
        return {**state, "moments": tree.mapped(begin, state["params"])}

    def begin(p: Any) -> list[Any]:
        if p.numel() < least:
            return [torch.zeros_like(p, dtype=torch.float32, requires_grad=False) for _ in range(2)]
        blocks = -(-p.numel() // BLOCK)
        zero = [int((levels(signed) == 0).argmax()) for signed in (True, False)]
        codes = [torch.full((blocks, BLOCK), code, dtype=torch.uint8, device=p.device) for code in zero]
        scales = [torch.zeros(blocks, device=p.device) for _ in range(2)]
        return [codes[0], scales[0], codes[1], scales[1]]

    @torch.no_grad()
    def update(parts: Parts, state: Any, grads: Any) -> Any:
        moments = state["moments"]
        steps = state["steps"] + 1
        device = parts.place.device
        tables = [torch.from_numpy(of(signed)).to(device) for signed in (True, False) for of in (levels, middles)]

        def whole(p: Any, g: Any, held: list[Any]) -> None:
            if len(held) == 2:
                adamw(p, g.to(torch.float32), *held)
                return
            first, first_scale, second, second_scale = held
            p_N, g_N = p.view(-1), g.reshape(-1)
            for row in range(0, len(first), SLICE // BLOCK):
                rows = slice(row, row + SLICE // BLOCK)
                span = slice(row * BLOCK, min(p_N.numel(), (row + SLICE // BLOCK) * BLOCK))
                m = widened(first[rows], first_scale[rows], tables[0])
                v = widened(second[rows], second_scale[rows], tables[2])
                n = span.stop - span.start
                adamw(p_N[span], g_N[span].to(torch.float32), m.view(-1)[:n], v.view(-1)[:n])
                narrow(m, first[rows], first_scale[rows], tables[1], 0)
                narrow(v, second[rows], second_scale[rows], tables[3], 1)

        def adamw(p: Any, g: Any, m: Any, v: Any) -> None:
            p.mul_(1 - parts.shape.learning_rate * parts.shape.weight_decay)
            m.lerp_(g, 1 - BETA_1)
            v.mul_(BETA_2).addcmul_(g, g, value=1 - BETA_2)
            scale = v.sqrt().div_(math.sqrt(1 - BETA_2**steps)).add_(EPSILON)
            p.sub_(torch.div(m, scale, out=scale).mul_(parts.shape.learning_rate / (1 - BETA_1**steps)))

        tree.mapped(whole, state["params"], grads, moments)
        return {**state, "steps": steps}

    def widened(codes: Any, scale: Any, values: Any) -> Any:
        """Look the codes up; by int32, as int64 would be the largest tensor of the step."""
        return F.embedding(codes.to(torch.int32), values[:, None]).squeeze(-1).mul_(scale[:, None])

    def narrow(values: Any, codes: Any, scale: Any, between: Any, least_code: int) -> None:
        """Write the codes and scales of a slice; a block of zeros has scale 0."""
        torch.amax(values.abs(), 1, out=scale)
        values.div_(scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None])
        codes.copy_(torch.bucketize(values, between, out_int32=True).clamp_(min=least_code))

    return replace(parts, init=init, update=update)


def on_jax(parts: Parts, least: int = 4096) -> Parts:
    import jax
    import jax.numpy as jnp

    inner = parts.init

    def init(parts: Parts, source: Any = None) -> Any:
        state = inner(parts, source)
        named = names_of(state["params"])
        for key, signed in (("first", True), ("second", False)):
            state[key] = tree.mapped(lambda p, name, signed=signed: begin(p, name, signed), state["params"], named)
        return state

    def begin(p: Any, name: str, signed: bool) -> Any:
        lead = p.shape[:1] if stacked(name) else ()
        size = math.prod(p.shape[len(lead) :])
        if size < least:
            return jnp.zeros(p.shape, jnp.float32)
        blocks = -(-size // BLOCK)
        codes = jnp.full((*lead, blocks, BLOCK), int((levels(signed) == 0).argmax()), jnp.uint8)
        return {"codes": codes, "scale": jnp.zeros((*lead, blocks), jnp.float32)}

    def update(parts: Parts, state: Any, grads: Any) -> Any:
        steps = state["steps"] + 1
        rate, decay = parts.shape.learning_rate, parts.shape.weight_decay

        def adamw(p: Any, g: Any, m: Any, v: Any) -> Any:
            count = steps.astype(jnp.float32)
            g = g.astype(jnp.float32)
            m = m + (1 - BETA_1) * (g - m)
            v = BETA_2 * v + (1 - BETA_2) * g * g
            scale = jnp.sqrt(v) / jnp.sqrt(1 - BETA_2**count) + EPSILON
            return (p * (1 - rate * decay) - rate / (1 - BETA_1**count) * (m / scale)).astype(p.dtype), m, v

        def whole(p: Any, g: Any, first: Any, second: Any) -> Any:
            if not isinstance(first, dict):
                return adamw(p, g, first, second)
            p_N, g_N = p.reshape(-1), g.reshape(-1)

            def slice_of(at: Any, n: int, held: Any) -> Any:
                """Move `n` elements from `at` on, the codes included."""
                p_N, first, second = held
                rows = -(-n // BLOCK)
                m, v = (
                    widened(cut(of["codes"], at // BLOCK, rows), cut(of["scale"], at // BLOCK, rows), signed)
                    for of, signed in ((first, True), (second, False))
                )
                padding = rows * BLOCK - n
                moved, m, v = adamw(
                    jnp.pad(cut(p_N, at, n), (0, padding)), jnp.pad(cut(g_N, at, n), (0, padding)), m, v
                )
                p_N = jax.lax.dynamic_update_slice_in_dim(p_N, moved[:n], at, 0)
                return p_N, put(first, narrow(m, True), at // BLOCK), put(second, narrow(v, False), at // BLOCK)

            count = p_N.size // SLICE
            held = (p_N, first, second)
            if count:
                held = jax.lax.fori_loop(0, count, lambda at, held: slice_of(at * SLICE, SLICE, held), held)
            if p_N.size % SLICE:
                held = slice_of(count * SLICE, p_N.size % SLICE, held)
            return held[0].reshape(p.shape), *held[1:]

        moved = tree.mapped(
            lambda p, name, g, m, v: layer_by_layer(whole, name, p, g, m, v),
            state["params"],
            names_of(state["params"]),
            grads,
            state["first"],
            state["second"],
        )
        params, first, second = (tree.mapped(lambda _, new, i=i: new[i], state["params"], moved) for i in range(3))
        return {**state, "params": params, "first": first, "second": second, "steps": steps}

    def cut(array: Any, at: Any, size: int) -> Any:
        return jax.lax.dynamic_slice_in_dim(array, at, size)

    def put(held: Any, new: Any, row: Any) -> Any:
        return {key: jax.lax.dynamic_update_slice_in_dim(held[key], new[key], row, 0) for key in held}

    def widened(codes: Any, scale: Any, signed: bool) -> Any:
        return (jnp.asarray(levels(signed))[codes.astype(jnp.int32)] * scale[:, None]).reshape(-1)

    def narrow(values: Any, signed: bool) -> Any:
        values = values.reshape(-1, BLOCK)
        scale = jnp.abs(values).max(1)
        of_one = values / jnp.maximum(scale, jnp.finfo(jnp.float32).tiny)[:, None]
        codes = jnp.searchsorted(jnp.asarray(middles(signed)), of_one)
        return {"codes": jnp.maximum(codes, 0 if signed else 1).astype(jnp.uint8), "scale": scale}

    return replace(parts, init=init, update=update)


def names_of(params: Any) -> Any:
    """Put the dotted name of each leaf in its place."""
    return tree.rebuilt(params, (name for name, _ in tree.leaves(params)))


def stacked(name: str) -> bool:
    """Say whether a leaf of that name holds one tensor for each layer, along its first dimension (in JAX)."""
    return name.startswith("layers.")


def layer_by_layer(move: Any, name: str, p: Any, g: Any, *moments: Any) -> Any:
    """Call `move(p, g, *moments) -> (p, *moments)` for a tensor, or for that of each layer, in the place of the old."""
    import jax

    if not stacked(name):
        return move(p, g, *moments)

    def turn(layer: Any, held: Any) -> Any:
        old, *rest = jax.tree.map(lambda each: each[layer], held)
        new = tuple(move(old, g[layer], *rest))
        return jax.tree.map(lambda each, value: each.at[layer].set(value), held, new)

    return jax.lax.fori_loop(0, len(p), turn, (p, *moments))


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "adam_8bit",
            rewrites=("init", "update"),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            approximate=True,
            probe={"least": 64},
        )
    ]
