"""A loss scale that adapts: halved when a gradient is not finite, doubled after `interval` good steps in a row.

The rule is that of torch.amp.GradScaler (Micikevicius et al., 2018, arXiv:1710.03740). The state of a run has the scale
and the counts of good steps in a row and of skipped steps.
"""

from dataclasses import replace
from typing import Any

from harness import Parts, tree

GROWTH, BACKOFF = 2.0, 0.5
KEYS = ("scale", "good_steps", "skipped_steps")
conflicts: dict[str, str] = dict.fromkeys(
    ("zero1", "zero2", "fsdp", "tensor_parallel", "megatron_sequence_parallel", "vocabulary_parallel_loss"),
    "each rank would decide alone whether a step has overflowed",
)
"""Strategies with which no loss scale goes together."""


def scaled(parts: Parts, scale: Any) -> Parts:
    """Multiply the loss by a scale, in float32: 65,536 is more than float16 has."""
    inner = parts.loss

    def loss(*args: Any) -> Any:
        value = inner(*args)
        return (value if hasattr(scale, "dtype") else value.float()) * scale  # in JAX the scale is an array of float32

    return replace(parts, loss=loss)


def training(state: Any) -> Any:
    """Return the state without its scale and counts, as an optimizer takes it."""
    return {key: value for key, value in state.items() if key not in KEYS}


def begin_in_torch(scale: float) -> dict[str, Any]:
    """Return the scale and the counts before the first step."""
    return {"scale": scale, "good_steps": 0, "skipped_steps": 0}


def is_finite_in_torch(grads: Any) -> bool:
    """Return whether all gradients are finite; waits for a device."""
    import torch

    return all(bool(torch.isfinite(g).all()) for _, g in tree.leaves(grads))


def after_step_in_torch(state: Any, finite: bool, interval: int) -> dict[str, Any]:
    """Return the scale and the counts after a step whose gradients were finite or not."""
    scale, good, skipped = (state[key] for key in KEYS)
    if not finite:
        return {"scale": scale * BACKOFF, "good_steps": 0, "skipped_steps": skipped + 1}
    grown = good + 1 == interval
    return {"scale": scale * (GROWTH if grown else 1), "good_steps": 0 if grown else good + 1, "skipped_steps": skipped}


def begin_in_jax(scale: float) -> dict[str, Any]:
    """Return the scale and the counts before the first step, each an array of its own."""
    import jax.numpy as jnp

    counts = {key: jnp.zeros((), jnp.int32) for key in KEYS[1:]}
    return {"scale": jnp.asarray(scale, jnp.float32), **counts}


def is_finite_in_jax(grads: Any) -> Any:
    """Return whether all gradients are finite, as an array."""
    import jax
    import jax.numpy as jnp

    return jnp.all(jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))


def after_step_in_jax(state: Any, finite: Any, interval: int) -> dict[str, Any]:
    """Return the scale and the counts after a step whose gradients were finite or not."""
    import jax.numpy as jnp

    scale, good, skipped = (state[key] for key in KEYS)
    good = jnp.where(finite, good + 1, 0)
    grown = good == interval
    factor = jnp.where(finite, jnp.where(grown, GROWTH, 1.0), BACKOFF)
    return {
        "scale": scale * factor,
        "good_steps": jnp.where(grown, 0, good),
        "skipped_steps": skipped + (1 - finite.astype(jnp.int32)),
    }
