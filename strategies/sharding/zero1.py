"""Hold the moments of a part of every parameter on each rank; pay a transfer of all parameters after each step.

The gradients are summed into parts, one after the other, each rank updates its part of every parameter, and the parts
are put together again. Peak of a rank: 8 + 8 / R bytes per parameter in float32 under AdamW while the gradients are
whole, and the activations of its rows. An optimizer that looks at a whole matrix (Muon, Adafactor) sees a part of it,
which is another answer. (ZeRO, stage 1: Rajbhandari et al., 2020, arXiv:1910.02054.)
"""

from dataclasses import replace
from functools import wraps
from typing import Any

from harness import Parts, tree


def in_torch(parts: Parts) -> Parts:
    import torch
    import torch.distributed as dist

    from strategies.sharding import on_torch as ranks

    inner_init, inner_update, inner_gather = parts.init, parts.update, parts.gather
    divided = ranks.dividing(parts, ranks.by_rows)

    def init(parts: Parts, source: Any = None) -> Any:
        """Make the parameters; here the moments come with the first update, and of parts. In JAX they are made now."""
        return inner_init(parts, source)

    @wraps(divided["reduce"])
    def reduce(parts: Parts, loss: Any, grads: Any) -> Any:
        ranks.replace_leaves(
            grads, ranks.sized(parts, grads), lambda grad, size: ranks.summed_part(grad) if grad.shape == size else grad
        )
        return divided["reduce"](parts, loss, grads)

    def part_of(value: Any, size: Any) -> Any:
        """Take this rank's part of a whole parameter, of its own storage where the parts are equal."""
        if value.shape != size:
            return value
        if value.numel() % dist.get_world_size():
            return ranks.own_part(value)
        return value.detach().view(dist.get_world_size(), -1)[dist.get_rank()]

    def put_back(value: Any, part: Any, size: Any) -> Any:
        if value.shape != size:
            return part
        value.detach().copy_(ranks.joined(part, size))
        return value

    @torch.no_grad()
    def update(parts: Parts, state: Any, grads: Any) -> Any:
        params = state["params"]
        known = ranks.sized(parts, params)
        state = inner_update(parts, {**state, "params": tree.mapped(part_of, params, known)}, grads)
        return {**state, "params": tree.mapped(put_back, params, state["params"], known)}

    def gather(parts: Parts, params: Any) -> Any:
        """Make whole what is parted of gradients: the parameters are whole."""

        def made(value: Any, size: Any) -> Any:
            own = len(size) and value.dim() == 1 and value.shape != size
            return ranks.joined(value.detach(), size) if own else value

        return inner_gather(parts, tree.mapped(made, params, ranks.sized(parts, params)))

    return replace(parts, share=divided["share"], reduce=reduce, init=init, gather=gather, update=update)


def in_jax(parts: Parts) -> Parts:
    from strategies.sharding import on_jax

    return on_jax.zero1(parts)
