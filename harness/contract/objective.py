"""The function that a classifier is trained to minimise, whichever way its loss is computed."""

from dataclasses import dataclass, fields
from typing import Any

from harness.contract.data import IGNORED


@dataclass(frozen=True)
class Objective:
    """The loss of logits a [V] and a target y; the mean over all targets but the ignored ones is minimised.

    The logits are z = soft_cap tanh(a / soft_cap), or a itself where soft_cap is 0 (Gemma 2, arXiv:2408.00118). With
    their log-sum-exp l and p = softmax(z), the loss of a token is

        l - (1 - label_smoothing) z_y - label_smoothing mean(z) + z_loss l^2

    (Szegedy et al. 2016; Chowdhery et al. 2022), and its gradient for a

        (p (1 + 2 z_loss l) - (1 - label_smoothing) onehot(y) - label_smoothing / V) (1 - (z / soft_cap)^2).
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    soft_cap: float = 0.0

    @classmethod
    def of(cls, shape: Any) -> "Objective":
        """Read it from the shape of a workload; what the shape does not name is off."""
        named = (field.name for field in fields(cls))
        return cls(**{name: getattr(shape, name) for name in named if hasattr(shape, name)})

    def in_torch(self, logits_NV: Any, y_N: Any, reduction: str = "mean") -> Any:
        """Compute the mean or the sum of the losses of logits [N, V] without their cap, in float32 at the least.

        Pass logits that no variable holds: the narrow ones are then freed as soon as they are capped.
        """
        import torch
        import torch.nn.functional as F

        wide = torch.promote_types(logits_NV.dtype, torch.float32)
        if self.soft_cap:
            logits_NV = self.soft_cap * torch.tanh(logits_NV.to(wide) / self.soft_cap)
        smoothing = self.label_smoothing
        loss = F.cross_entropy(
            logits_NV.to(wide), y_N, ignore_index=IGNORED, reduction=reduction, label_smoothing=smoothing
        )
        if not self.z_loss:
            return loss
        counts_N = y_N != IGNORED
        # Filled, not multiplied: where nothing counts the mean is 0 / 0, but the gradient of what is ignored is 0.
        squares = self.z_loss * logits_NV.to(wide).logsumexp(1).square().masked_fill(~counts_N, 0).sum()
        return loss + (squares / counts_N.sum() if reduction == "mean" else squares)

    def in_jax(self, logits_NV: Any, y_N: Any) -> Any:
        """Compute the loss of each row of logits [N, V] without their cap, in float32 at the least; 0 if ignored."""
        import jax
        import jax.numpy as jnp

        logits_NV = logits_NV.astype(jnp.promote_types(logits_NV.dtype, jnp.float32))
        if self.soft_cap:
            logits_NV = self.soft_cap * jnp.tanh(logits_NV / self.soft_cap)
        counts_N = y_N != IGNORED
        picked_N = jnp.take_along_axis(logits_NV, jnp.where(counts_N, y_N, 0)[:, None], 1)[:, 0]
        lse_N = jax.nn.logsumexp(logits_NV, axis=1)
        losses_N = lse_N - picked_N
        if self.label_smoothing:
            losses_N += self.label_smoothing * (picked_N - logits_NV.mean(1))
        if self.z_loss:
            losses_N += self.z_loss * jnp.square(lse_N)
        return jnp.where(counts_N, losses_N, 0)
