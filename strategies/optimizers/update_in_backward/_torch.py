"""Updates within the backward pass of torch: a hook on each parameter takes its finished gradient."""

from typing import Any

from harness import Parts, optimizers, tree
from strategies.optimizers.update_in_backward import REFUSED, watched


def step(parts: Parts, state: Any, x: Any, y: Any) -> Any:
    """Run one step; each parameter's gradient is applied as soon as it is made."""
    if parts.ranks > 1 and parts.division.gradients_reduced:
        raise ValueError(REFUSED.format(how="sums gradients over ranks"))
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

    handles = [sub["params"][name].register_hook(hook(name, sub)) for name, sub in optimizers.one_by_one(state)]
    try:
        value, grads = parts.grad(watched(parts, x), state, x, y)
    finally:
        for handle in handles:
            handle.remove()
    if any(g is not placeholders.get(name) for name, g in tree.leaves(grads)):
        raise ValueError(REFUSED.format(how="makes other gradients of them"))
    return optimizers.joined(state, alone), value
