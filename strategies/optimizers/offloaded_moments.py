"""Keep the optimizer's moments in page-locked host memory; pay the way there and back for each tensor at each step.

Peak on the device: under AdamW 8 bytes less for each parameter, and the moments of one tensor (in JAX, what the
compiler keeps in flight). Host: those 8 bytes, locked. The update itself is the untouched one, on the device, and in
torch tensor by tensor. (Ren et al., 2021, arXiv:2101.06840, which updates on the host instead.) On a CPU it stands in
for a run on a GPU: nothing is saved.
"""

from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl, optimizers, tree

STAND_IN = "stands in for a GPU: the moments of a CPU are in the memory of the host already"


def marked(parts: Parts) -> None:
    """Note where this only stands in for what it is for."""
    if parts.place.device == "cpu":
        parts.notes["offloading"] = STAND_IN


def on_torch(parts: Parts) -> Parts:
    import torch

    inner_init, inner = parts.init, parts.update

    def init(parts: Parts, source: Any = None) -> Any:
        """Move moments that are there from the start to the host; those of AdamW come with the first update."""
        state = inner_init(parts, source)
        return state if state["moments"] is None else {**state, "moments": tree.mapped(to_host, state["moments"])}

    def to_host(moment: Any) -> Any:
        if moment.device.type == "cpu":
            return moment
        return torch.empty(moment.shape, dtype=moment.dtype, pin_memory=True).copy_(moment, non_blocking=True)

    def update(parts: Parts, state: Any, grads: Any) -> Any:
        marked(parts)
        alone = {}
        for (name, sub), (_, g) in zip(optimizers.one_by_one(state), tree.leaves(grads), strict=True):
            moments = sub["moments"]
            near = (
                tree.mapped(lambda of, p=sub["params"][name]: of.to(p.device, non_blocking=True), moments)
                if moments
                else None
            )
            after = inner(parts, {**sub, "moments": near}, {name: g})
            results = after["moments"]
            if moments:
                results = tree.mapped(lambda of, new: of.copy_(new, non_blocking=True), moments, results)
            elif results is not None:
                results = tree.mapped(to_host, results)
            alone[name] = {**after, "moments": results}
        return optimizers.joined(state, alone)

    return replace(parts, init=init, update=update)


def on_jax(parts: Parts) -> Parts:
    import jax

    inner_init, inner_update = parts.init, parts.update

    def moved(state: Any, space: Any) -> Any:
        away = {key: jax.device_put(state[key], space) for key in ("first", "second") if key in state}
        return {**state, **away}

    def init(parts: Parts, source: Any = None) -> Any:
        state = inner_init(parts, source)
        return {**state, **{key: jax.tree.map(to_host, state[key]) for key in ("first", "second") if key in state}}

    def to_host(moment: Any) -> Any:
        """Move one moment and free it on the device before the next is moved; what is only traced is not there."""
        away = jax.block_until_ready(jax.device_put(moment, jax.memory.Space.Host))
        if not isinstance(moment, jax.core.Tracer):
            moment.delete()
        return away

    def update(parts: Parts, state: Any, grads: Any) -> Any:
        marked(parts)
        near = moved(state, jax.memory.Space.Device)
        return moved(inner_update(parts, near, grads), jax.memory.Space.Host)

    return replace(parts, init=init, update=update)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "offloaded_moments",
            rewrites=("init", "update"),
            calls=("init", "update"),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
        )
    ]
