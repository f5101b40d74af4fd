"""Hold a part of every parameter, gradient and moment on each rank; pay three transfers of all parameters in a step.

A block's parameters are made whole before it runs and dropped after, made whole again, one by one, in the backward
pass, and their gradients are summed into the parts at once. Peak of a rank: 16 / R bytes per parameter, one whole block
or the embedding or head, and the activations of its rows. Vectors (norms, biases) stay whole. Under a checkpoint the
parameters come with the recomputation. (ZeRO, stage 3: Rajbhandari et al., 2020, arXiv:1910.02054; Zhao et al.,
"PyTorch FSDP", 2023, arXiv:2304.11277.)
"""

from dataclasses import replace
from typing import Any

from harness import Parts, tree


def in_torch(parts: Parts) -> Parts:
    import torch
    from torch.autograd.graph import saved_tensors_hooks

    from strategies.sharding import on_torch as ranks

    inner_draw, inner_grad, inner_gather = parts.draw, parts.grad, parts.gather

    class Whole(torch.autograd.Function):
        """A tensor made whole of its parts; its gradient is summed into them."""

        @staticmethod
        def forward(ctx: Any, part: Any, size: Any) -> Any:
            return ranks.joined(part, size)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, None]:
            return ranks.summed_part(grad), None

    def is_part(value: Any, size: Any) -> bool:
        return len(size) > 1 and value.dim() == 1

    def whole(value: Any, size: Any, kept: dict[int, tuple[Any, Any]]) -> Any:
        """Make a parameter whole, and note by its storage what of."""
        if not is_part(value, size):
            return value
        full = Whole.apply(value, size)
        kept[full.untyped_storage()._cdata] = value.detach(), size
        return full

    def dropping(kept: dict[int, tuple[Any, Any]]) -> Any:
        """Let the backward pass make whole again what it needs of parameters, rather than save it.

        Where something else decides what is saved (a checkpoint, offloading), that is left to it.
        """

        def pack(value: Any) -> Any:
            found = kept.get(value.untyped_storage()._cdata)
            return value if found is None else (*found, value.size(), value.stride(), value.storage_offset())

        def unpack(packed: Any) -> Any:
            if isinstance(packed, torch.Tensor):
                return packed
            part, size, *view = packed
            return ranks.joined(part, size).as_strided(*view)

        return saved_tensors_hooks(pack, unpack)

    def saves_itself() -> bool:
        return torch._C._autograd._top_saved_tensors_default_hooks(True) is None

    def draw(parts: Parts, name: str, shape: tuple[int, ...], deviation: float) -> Any:
        value = inner_draw(parts, name, shape, deviation)
        return ranks.own_part(value) if len(shape) > 1 and value.shape == shape else value

    def grad(parts: Parts, state: Any, x: Any, y: Any) -> Any:
        of_name, block_, loss_, embed_ = ranks.sizes(parts), parts.block, parts.loss, parts.embed

        def called(function: Any, kept: Any, *args: Any) -> Any:
            if not (kept and saves_itself()):
                return function(*args)
            with dropping(kept):
                return function(*args)

        def block(parts: Parts, p: Any, x_BTD: Any) -> Any:
            kept: dict[int, Any] = {}
            p = {name: whole(value, of_name[name], kept) for name, value in p.items()}
            return called(block_, kept, parts, p, x_BTD)

        def loss(parts: Parts, x_BTD: Any, w_VD: Any, y_BT: Any) -> Any:
            kept: dict[int, Any] = {}
            w_VD = whole(w_VD, of_name["embed"], kept)
            return called(loss_, kept, parts, x_BTD, w_VD, y_BT)

        def embed(parts: Parts, params: Any, x_BT: Any) -> Any:
            return embed_(parts, {**params, "embed": whole(params["embed"], of_name["embed"], {})}, x_BT)

        return inner_grad(replace(parts, block=block, loss=loss, embed=embed), state, x, y)

    def gather(parts: Parts, params: Any) -> Any:
        def made(value: Any, size: Any) -> Any:
            return ranks.joined(value.detach(), size) if is_part(value, size) else value

        return inner_gather(parts, tree.mapped(made, params, ranks.sized(parts, params)))

    return replace(parts, draw=draw, grad=grad, gather=gather, **ranks.dividing(parts, ranks.by_rows))


def in_jax(parts: Parts) -> Parts:
    from strategies.sharding import on_jax

    return on_jax.fsdp(parts)
