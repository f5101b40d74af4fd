"""Apply each gradient as soon as it is made and drop it; keep one gradient instead of all, forgo a norm over them.

torch: a hook on each parameter gets its finished gradient (of tied weights, the sum), hands it to `update` alone, and
puts a tensor without memory in its place. Peak: the gradients less all but the largest of those alive at once.

JAX: the backward pass is a loop over the layers that carries parameters and moments, so that they are changed in place:
one layer's gradient at a time. The loop starts from the input of each layer and computes the layer again, as a
checkpoint of every layer does: that costs a second forward pass, and saves activations besides. A scan over stacked
parameters would hold them twice.

Strategies of embed, block, stack, loss and of an update that treats each tensor by itself go with it. What takes the
gradient of anything but the whole batch, or changes it afterwards (accumulation, loss scales, cast parameters), does
not, and is refused: a gradient that is applied can be neither added to nor scaled. (LOMO: Lv et al., 2023,
arXiv:2306.09782.)
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl, tree

REFUSED = (
    "'update_in_backward' applies each gradient at once, but another strategy {how}: "
    "leave out one of the two (accumulate, float16_scaled and float32_master do not go with it)"
)


def watched(parts: Parts, batch: Any) -> Parts:
    """Let the embedding refuse a gradient that is not that of the whole batch and of the loss as it is."""

    def embed(inside: Parts, params: Any, x: Any) -> Any:
        if x is not batch:
            raise ValueError(REFUSED.format(how="takes the gradient of pieces of the batch"))
        if inside.loss is not parts.loss:
            raise ValueError(REFUSED.format(how="scales the loss"))
        return parts.embed(inside, params, x)

    return replace(parts, embed=embed)


def one_by_one(state: Any) -> Iterator[tuple[str, Any]]:
    """Yield the state of each parameter alone, with its dotted name: an `update` can be called with it."""
    moments: list[Any] = []
    if state["moments"] is not None:
        tree.mapped(lambda _, held: moments.append(held), state["params"], state["moments"])
    for at, (name, p) in enumerate(tree.leaves(state["params"])):
        yield name, {**state, "params": {name: p}, "moments": {name: moments[at]} if moments else None}


def joined(state: Any, alone: dict[str, Any]) -> Any:
    """Put the states of all parameters together again."""
    names = [name for name, _ in tree.leaves(state["params"])]
    whole = {**alone[names[0]]}
    for key in ("params", "moments"):
        made = [alone[name][key] for name in names]
        whole[key] = (
            None
            if made[0] is None
            else tree.rebuilt(state["params"], (of[name] for of, name in zip(made, names, strict=True)))
        )
    return whole


def on_torch(parts: Parts) -> Parts:
    def step(parts: Parts, state: Any, x: Any, y: Any) -> Any:
        alone: dict[str, Any] = {}
        placeholders: dict[str, Any] = {}

        def hook(name: str, before: Any) -> Any:
            def applied(g: Any) -> Any:
                if name in alone:
                    raise ValueError(REFUSED.format(how="takes a gradient twice"))
                alone[name] = parts.update(parts, before, {name: g})
                placeholders[name] = g.new_zeros(()).expand(g.shape)
                return placeholders[name]

            return applied

        handles = [sub["params"][name].register_hook(hook(name, sub)) for name, sub in one_by_one(state)]
        try:
            value, grads = parts.grad(watched(parts, x), state, x, y)
        finally:
            for handle in handles:
                handle.remove()
        if any(g is not placeholders.get(name) for name, g in tree.leaves(grads)):
            raise ValueError(REFUSED.format(how="makes other gradients of them"))
        return joined(state, alone), value

    return replace(parts, step=step)


def on_jax(parts: Parts) -> Parts:
    import jax
    import jax.numpy as jnp

    def step(parts: Parts, state: Any, x: Any, y: Any) -> Any:
        params = state["params"]
        outer = {name: value for name, value in params.items() if name != "layers"}

        def layer(ps: Any, x_BTD: Any) -> Any:
            return parts.stack(parts, ps, x_BTD)

        x_BTD = parts.embed(parts, outer, x)
        x_BTD, inputs_LBTD = jax.lax.scan(
            lambda x_BTD, p: (layer(jax.tree.map(lambda leaf: leaf[None], p), x_BTD), x_BTD), x_BTD, params["layers"]
        )
        value, grads = parts.grad(
            without_layers(parts, x, x_BTD), {**state, "params": {**outer, "layers": x_BTD}}, x, y
        )
        last_BTD = grads.pop("layers")

        early = {name for name in outer if name not in read_by_embed(parts, outer, x)}
        state = updated(parts, state, early, {name: grads[name] for name in early})

        def turn(at: Any, carry: Any) -> Any:
            g_BTD, held = carry
            number = len(inputs_LBTD) - 1 - at
            ps = jax.tree.map(lambda each: jax.lax.dynamic_slice_in_dim(each, number, 1), held)
            _, backward = jax.vjp(layer, ps["params"], inputs_LBTD[number])
            of_layer, g_BTD = backward(g_BTD)
            now = {key: {"layers": value} for key, value in ps.items()}
            # A branch that is always taken keeps the update a unit: fused with the writing, it copies all layers.
            new = jax.lax.cond(
                number >= 0,
                lambda now, of_layer: as_carried(parts.update(parts, {**state, **now}, {"layers": of_layer}), now),
                lambda now, of_layer: now,
                now,
                of_layer,
            )
            held = jax.tree.map(
                lambda each, value: jax.lax.dynamic_update_slice_in_dim(each, value, number, 0),
                held,
                {key: new[key]["layers"] for key in held},
            )
            return g_BTD, held

        held = {key: value["layers"] for key, value in state.items() if is_split(value)}
        first_BTD, held = jax.lax.fori_loop(0, len(inputs_LBTD), turn, (last_BTD, held))
        state = {**state, **{key: {**state[key], "layers": value} for key, value in held.items()}}

        _, backward = jax.vjp(lambda outer: parts.embed(parts, outer, x), outer)
        late = {
            name: jax.tree.map(jnp.add, grads[name], g)
            for name, g in backward(first_BTD)[0].items()
            if name not in early
        }
        return updated(parts, state, set(late), late, counts=True), value

    def without_layers(parts: Parts, x: Any, x_BTD: Any) -> Parts:
        """Let the last layer's output be a parameter, in the place of the layers."""

        def stack(inside: Parts, ps: Any, x: Any) -> Any:
            if ps.dtype != x_BTD.dtype:
                raise ValueError(REFUSED.format(how="casts the parameters"))
            return ps

        checked = watched(replace(parts, embed=lambda *_: None), x)
        return replace(checked, stack=stack)

    def read_by_embed(parts: Parts, outer: Any, x: Any) -> set[str]:
        """Name the parameters that the embedding reads: their gradient is complete only at the very end."""
        found: set[str] = set()
        for name, value in outer.items():
            program = jax.make_jaxpr(lambda p, name=name: parts.embed(parts, {**outer, name: p}, x))(value).jaxpr
            own = {id(variable) for variable in program.invars}
            if any(id(variable) in own for equation in program.eqns for variable in equation.invars):
                found.add(name)
        return found

    def updated(parts: Parts, state: Any, names: set[str], grads: Any, counts: bool = False) -> Any:
        """Update some of the parameters outside of the layers; only the last of several updates counts the step."""
        if not names:
            return state
        some = {
            key: {name: value[name] for name in names} if is_split(value) else value for key, value in state.items()
        }
        new = parts.update(parts, some, grads)
        whole = {key: {**state[key], **new[key]} if is_split(state[key]) else new[key] for key in state}
        return whole if counts else {**whole, **{k: v for k, v in state.items() if not is_split(v)}}

    def as_carried(new: Any, now: Any) -> Any:
        """Keep of an updated state what the loop carries."""
        return {key: new[key] for key in now}

    def is_split(value: Any) -> bool:
        return isinstance(value, dict) and "layers" in value

    return replace(parts, step=step)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "update_in_backward",
            rewrites=("step",),
            calls=("embed", "stack", "loss", "grad", "update"),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
        )
    ]
