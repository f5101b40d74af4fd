"""The function that a classifier is trained to minimise, whichever way its loss is computed."""

from dataclasses import dataclass, fields
from typing import Any


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
