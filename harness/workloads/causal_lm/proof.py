"""Compare what the parts of a small model compute with what the model itself computes, with attention of its own."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from harness.contract.parts import Parts
from harness.contract.place import Place
from harness.contract.toolkit import trees
from harness.workloads.causal_lm._torch import Modules, parts_of
from harness.workloads.causal_lm.cut import Cut, base_of
from harness.workloads.decoder import _torch as decoder

TOLERANCE = 1e-4
"""How far loss and gradients of float32 may lie apart, as a share of the largest."""
SIZE = (2, 24)
"""Rows and tokens that are compared: more tokens than a window of a small model has."""
TEXTS = (21, 17)
"""Tokens of texts that lie end to end in a row."""


def difference(model: Any, cut: Cut) -> str | None:
    """Return in words where the loss or a gradient of the parts differs from the model's own; None where none does."""
    ids_BT = torch.randint(2, model.config.vocab_size, SIZE, generator=torch.Generator().manual_seed(0))
    trained = dict(model.named_parameters())
    loss = model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss
    grads = dict(zip(trained.values(), torch.autograd.grad(loss, [*trained.values()], allow_unused=True), strict=True))
    if unused := [name for name, p in trained.items() if grads[p] is None]:
        return f"its parameter {unused[0]} has no part in the loss"
    expected = {"loss": loss.detach(), **named(model, cut, grads.__getitem__)}
    own_loss, own_grads = in_parts(model, cut, ids_BT)
    own = {"loss": own_loss, **dict(trees.leaves(own_grads))}
    for name, value in expected.items():
        off = float((own[name] - value).abs().max())
        if not off <= TOLERANCE * float(value.abs().max()) + 1e-7:
            return f"in parts its {'loss' if name == 'loss' else f'gradient of {name}'} is off by {off:.2g}"
    return None


def tells_apart(model: Any, cut: Cut) -> bool:
    """Check whether two texts end to end in a row come out as each does alone, where attention tells them apart."""
    parts, state = parts_and_state(model, cut)
    ids_1T = torch.arange(2, 2 + sum(TEXTS))[None]

    def positions(parts: Parts, tokens: int) -> tuple[slice, ...]:
        return tuple(slice(0, length) for length in TEXTS)

    def attend(own: Parts, *qkv: torch.Tensor) -> torch.Tensor:
        return torch.cat([parts.attend(own, *each) for each in zip(*(x.split(TEXTS, 1) for x in qkv), strict=True)], 1)

    def hidden(parts: Parts, ids: torch.Tensor) -> torch.Tensor:
        return parts.stack(parts, state["params"]["layers"], parts.embed(parts, state["params"], ids))

    with torch.no_grad():
        alone = torch.cat([hidden(parts, each) for each in ids_1T.split(TEXTS, 1)], 1)
        try:
            together = hidden(replace(parts, positions=positions, attend=attend), ids_1T)
        except Exception:
            return False  # it takes no positions, or has a rule of its own for rows of several texts
    return bool((together - alone).abs().max() <= TOLERANCE * alone.abs().max())


def in_parts(model: Any, cut: Cut, ids_BT: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Return loss and gradients of the parts, for the values of a model."""
    parts, state = parts_and_state(model, cut)
    return parts.grad(parts, state, ids_BT[:, :-1], ids_BT[:, 1:])


def parts_and_state(model: Any, cut: Cut) -> tuple[Parts, Any]:
    """Return the parts of a model that was cut, and a state of the values of one that was not."""
    values = named(model, cut, torch.Tensor.detach)
    shape = SimpleNamespace(soft_cap=float(getattr(model.config, "final_logit_softcapping", None) or 0.0))
    parts = Parts(
        shape,
        Place("torch", "cpu"),
        draw=lambda parts, name, size, deviation: values[name].clone(),
        stack=decoder.stack,
        loss=decoder.loss,
        **parts_of(Modules(cut)),
    )
    return parts, parts.init(parts, None)


def named(model: Any, cut: Cut, of: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what `of` makes of each parameter of a whole model, by the names that these have in a state."""
    base, head, values = dict(base_of(model).named_parameters()), model.get_output_embeddings(), {}
    for name in cut.parameters:
        group, _, rest = name.partition(".")
        if group == "layers":
            at, _, short = rest.partition(".")
            rest = f"{cut.anatomy.layers}.{at}.{short.partition('.')[2]}"
        values[name] = of(base[rest] if group != "head" else head.weight)
        if group == "head" and cut.bias:
            values[name] = torch.cat([values[name], of(head.bias)[:, None]], 1)
    return values
