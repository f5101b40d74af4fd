"""Compare what the parts of a small model compute with what the model itself computes, with attention of its own."""

from types import SimpleNamespace
from typing import Any

import torch

from harness.contract.parts import Parts
from harness.contract.place import Place
from harness.contract.toolkit import trees
from harness.workloads.causal_lm._torch import parts_of
from harness.workloads.causal_lm.cut import Cut
from harness.workloads.decoder import _torch as decoder

TOLERANCE = 1e-4
"""How far loss and gradients of float32 may lie apart, as a share of the largest."""
SIZE = (2, 24)
"""Rows and tokens that are compared: more tokens than a window of a small model has."""


def difference(model: Any, cut: Cut) -> str | None:
    """Return in words where the loss or a gradient of the parts differs from the model's own; None where none does."""
    ids_BT = torch.randint(2, model.config.vocab_size, SIZE, generator=torch.Generator().manual_seed(0))
    values = named(model, cut)
    loss = model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss
    expected = {
        "loss": loss.detach(),
        **dict(zip(values, torch.autograd.grad(loss, list(values.values())), strict=True)),
    }
    own_loss, own_grads = in_parts(values, model, cut, ids_BT)
    own = {"loss": own_loss, **dict(trees.leaves(own_grads))}
    for name, value in expected.items():
        off = float((own[name] - value).abs().max())
        if not off <= TOLERANCE * float(value.abs().max()) + 1e-7:
            return f"in parts its {'loss' if name == 'loss' else f'gradient of {name}'} is off by {off:.2g}"
    return None


def in_parts(values: dict[str, torch.Tensor], model: Any, cut: Cut, ids_BT: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Return loss and gradients of the parts, for the same values and tokens."""
    shape = SimpleNamespace(soft_cap=float(getattr(model.config, "final_logit_softcapping", None) or 0.0))
    parts = Parts(
        shape,
        Place("torch", "cpu"),
        draw=lambda parts, name, size, deviation: values[name].detach().clone(),
        stack=decoder.stack,
        loss=decoder.loss,
        **parts_of(cut),
    )
    state = parts.init(parts, None)
    return parts.grad(parts, state, ids_BT[:, :-1], ids_BT[:, 1:])


def named(model: Any, cut: Cut) -> dict[str, torch.Tensor]:
    """Return the parameters of a whole model by the names that they have in a state."""
    base, values = dict(model.base_model.named_parameters()), {}
    for name in cut.parameters:
        group, _, rest = name.partition(".")
        if group == "layers":
            at, _, short = rest.partition(".")
            rest = f"{cut.anatomy.layers}.{at}.{short.partition('.')[2]}"
        values[name] = base[rest] if group != "head" else model.get_output_embeddings().weight
    return values
