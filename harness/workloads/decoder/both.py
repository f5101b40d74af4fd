"""The decoder's functions that are the same in both frameworks; those of one framework that they call are passed in."""

from collections.abc import Callable
from typing import Any

from harness.contract.parts import Parts
from harness.contract.toolkit import trees


def linear(parts: Parts, p: dict[str, Any], name: str, x: Any) -> Any:
    """Multiply by a weight [in, out] and add its bias where there is one."""
    bias = p.get(f"b{name}")
    return x @ p[name] if bias is None else x @ p[name] + bias


def block(normalise: Callable[..., Any], parts: Parts, p: dict[str, Any], x_BTD: Any) -> Any:
    """Apply one pre-norm layer."""
    shape = parts.shape
    mixed_BTD = parts.mix(parts, p, normalise(shape, x_BTD, p, "mix_norm"))
    if shape.parallel:
        return x_BTD + mixed_BTD + parts.feed(parts, p, normalise(shape, x_BTD, p, "feed_norm"))
    x_BTD = x_BTD + mixed_BTD
    return x_BTD + parts.feed(parts, p, normalise(shape, x_BTD, p, "feed_norm"))


def head(params: dict[str, Any]) -> Any:
    """Return the weight [V, D] of the logits: the embedding where both are tied; with a bias in one column more."""
    return params["head"] if "head" in params else params["embed"]


def forward(for_head: Callable[..., Any], parts: Parts, params: dict[str, Any], x_BT: Any, y_BT: Any) -> Any:
    """Compute the loss of one batch."""
    x_BTD = parts.embed(parts, params, x_BT)
    x_BTD = parts.stack(parts, params["layers"], x_BTD)
    x_BTD = for_head(parts.shape, params, x_BTD)
    return parts.loss(parts, x_BTD, head(params), y_BT)


def trained(state: dict[str, Any], params: Any) -> Any:
    """Return all parameters: those that are trained, and what the state has of others."""
    return trees.merged(state["frozen"], params) if "frozen" in state else params


def step(parts: Parts, state: dict[str, Any], x: Any, y: Any) -> tuple[dict[str, Any], Any]:
    """Run one training step."""
    value, grads = parts.grad(parts, state, x, y)
    return parts.update(parts, state, grads), value
