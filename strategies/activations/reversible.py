"""Keep the two last hidden states of the stack alone; rebuild those of every layer in the backward pass, run once more.

Another architecture: two streams, both the input at first, with y1 = x1 + F(x2) and y2 = x2 + G(y1) in each layer and
their mean at the end, so that x2 = y2 - G(y1) and x1 = y1 - F(x2) can be computed. F is the block without its `feed`, G
the block without its `mix`, each less its input. Peak: a few hidden states and what one block saves, whatever the
depth. The streams are float32 at the least: what a layer adds must survive in them to be taken off again. Sources:
Gomez et al., "The Reversible Residual Network" (2017, arXiv:1707.04585); Kitaev et al., "Reformer" (2020,
arXiv:2001.04451). The layers must be deterministic.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl, tree


def nothing(parts: Parts, p: Any, x_BTD: Any) -> int:
    """Stand in for a branch that is left out."""
    return 0


def branches(parts: Parts) -> tuple[Any, Any]:
    """Return F and G, functions of a layer's parameters and a hidden state."""

    def branch(alone: Parts) -> Any:
        return lambda p, x_BTD: alone.block(alone, p, x_BTD) - x_BTD

    return branch(replace(parts, feed=nothing)), branch(replace(parts, mix=nothing))


def on_torch(parts: Parts) -> Parts:
    import torch

    class Reversible(torch.autograd.Function):
        """Run all layers without a graph; undo them one by one in the backward pass."""

        @staticmethod
        def forward(ctx: Any, parts: Parts, ps: Any, x_BTD: Any, *weights: Any) -> Any:
            wide = torch.promote_types(x_BTD.dtype, torch.float32)
            first = second = x_BTD.to(wide)
            f, g = branches(parts)
            for p in ps:
                first = first + f(p, second.to(x_BTD.dtype))
                second = second + g(p, first.to(x_BTD.dtype))
            ctx.parts, ctx.ps, ctx.dtype = parts, ps, x_BTD.dtype
            ctx.save_for_backward(first, second)
            return ((first + second) / 2).to(x_BTD.dtype)

        @staticmethod
        def backward(ctx: Any, grad_BTD: Any) -> Any:
            first, second = ctx.saved_tensors
            d_first = d_second = grad_BTD.to(first.dtype) / 2
            f, g = branches(ctx.parts)
            d_layers = []
            for p in reversed(ctx.ps):
                second, d_first, d_p = undone(g, p, first, second, d_second, d_first, ctx.dtype)
                first, d_second, d_q = undone(f, p, second, first, d_first, d_second, ctx.dtype)
                d_layers.append([added(a, b) for a, b in zip(d_p, d_q, strict=True)])
            d_weights = [d for layer in reversed(d_layers) for d in layer]
            return None, None, (d_first + d_second).to(ctx.dtype), *d_weights

    def undone(branch: Any, p: Any, stream: Any, out: Any, d_out: Any, d_stream: Any, dtype: Any) -> Any:
        """Subtract a branch of `stream` from `out`; add its gradient to `d_stream`, and return that of its weights."""
        weights = [leaf for _, leaf in tree.leaves(p)]
        with torch.enable_grad():
            stream = stream.to(dtype).detach().requires_grad_()
            value = branch(p, stream)
        d_x, *d_p = torch.autograd.grad(value, [stream, *weights], d_out.to(value.dtype), allow_unused=True)
        return out - value.detach(), d_stream + d_x, d_p

    def added(a: Any, b: Any) -> Any:
        return b if a is None else a if b is None else a + b

    def stack(parts: Parts, ps: Any, x_BTD: Any) -> Any:
        weights: Iterator[Any] = (leaf for _, leaf in tree.leaves(ps))
        return Reversible.apply(parts, ps, x_BTD, *weights)

    return replace(parts, stack=stack)


def on_jax(parts: Parts) -> Parts:
    import jax
    import jax.numpy as jnp

    def stack(parts: Parts, ps: Any, x_BTD: Any) -> Any:
        f, g = branches(parts)
        dtype = x_BTD.dtype
        wide = jnp.promote_types(dtype, jnp.float32)

        def one(streams: Any, p: Any) -> Any:
            first, second = streams
            first = first + f(p, second.astype(dtype))
            return (first, second + g(p, first.astype(dtype))), None

        def undone(branch: Any, p: Any, stream: Any, out: Any, d_out: Any, d_stream: Any) -> Any:
            value, pull = jax.vjp(branch, p, stream.astype(dtype))
            d_p, d_x = pull(d_out.astype(value.dtype))
            return out - value, d_stream + d_x, d_p

        def back(carry: Any, p: Any) -> Any:
            first, second, d_first, d_second = carry
            second, d_first, d_p = undone(g, p, first, second, d_second, d_first)
            first, d_second, d_q = undone(f, p, second, first, d_first, d_second)
            return (first, second, d_first, d_second), jax.tree.map(jnp.add, d_p, d_q)

        @jax.custom_vjp
        def run(ps: Any, x_BTD: Any) -> Any:
            return forward(ps, x_BTD)[0]

        def forward(ps: Any, x_BTD: Any) -> Any:
            x_BTD = x_BTD.astype(wide)
            first, second = jax.lax.scan(one, (x_BTD, x_BTD), ps)[0]
            return ((first + second) / 2).astype(dtype), (ps, first, second)

        def backward(residuals: Any, grad_BTD: Any) -> Any:
            ps, first, second = residuals
            half = grad_BTD.astype(wide) / 2
            (_, _, d_first, d_second), d_ps = jax.lax.scan(back, (first, second, half, half), ps, reverse=True)
            return d_ps, (d_first + d_second).astype(dtype)

        run.defvjp(forward, backward)
        return run(ps, x_BTD)

    return replace(parts, stack=stack)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "reversible",
            rewrites=("stack",),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            approximate=True,
        )
    ]
