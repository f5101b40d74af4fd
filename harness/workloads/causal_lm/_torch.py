"""The parts of a cut decoder: its modules, whose parameters and buffers are handed to them at each call."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from harness.contract.data import Source
from harness.contract.parts import Parts
from harness.contract.place import Place
from harness.refusal import Refusal
from harness.workloads import undivided
from harness.workloads.causal_lm import stand_ins
from harness.workloads.causal_lm.cut import Cut
from harness.workloads.decoder import _torch as decoder
from harness.workloads.decoder import both
from harness.workloads.user_model.shared import inner, with_the_decoders
from harness.workloads.whole_run import _torch as whole_run


def build(model: Cut, shape: Any, place: Place, corpus: Any, seed: int) -> Parts:
    """Build the untouched parts."""
    modules = Modules(model)
    own = parts_of(modules)
    parts = with_the_decoders(decoder, shape, place, corpus, seed, draw=partial(decoder.draw, seed), **own)
    return whole_run.with_ending(parts, partial(forward, modules))


def parts_of(modules: "Modules") -> dict[str, Any]:
    """Build the parts of a model, by name."""
    transposed = modules.model.transposed
    parts: dict[str, Any] = {
        "init": partial(init, modules),
        "embed": partial(embed, modules),
        "block": partial(block, modules),
        "grad": partial(grad, modules),
        "linear": partial(stand_ins.linear, transposed),
        "attend": decoder.attend,
        "outputs_first": partial(outputs_first, transposed),
        "shard_batch": undivided.shard_batch,
        "reduce_gradients": undivided.reduce_gradients,
        "gather_parameters": undivided.gather_parameters,
    }
    if modules.mix:
        parts["mix"] = partial(mix, modules)
    if modules.feed:
        parts["feed"] = partial(feed, modules)
    return parts


def outputs_first(transposed: frozenset[str], name: str) -> bool:
    """Return whether a matrix `layers.0.KIND.NAME.weight` is stored [out, in]."""
    return name.removesuffix(".weight").split(".", 3)[-1] not in transposed


def init(modules: "Modules", parts: Parts, source: Source | None = None) -> dict[str, Any]:
    """Draw the parameters, and put the buffers onto the device."""
    modules.buffers(parts)
    drawn = {
        name: decoder.trainable(parts.draw(parts, name, each.shape, each.deviation))
        for name, each in modules.model.parameters.items()
    }
    return {"params": in_groups(modules.model, drawn), "moments": None, "steps": 0}


def embed(modules: "Modules", parts: Parts, params: dict[str, Any], x_BT: torch.Tensor) -> torch.Tensor:
    """Look up the tokens; what layers are called with is noted anew."""
    modules.rest.clear()
    return embedded(modules, parts, params["embed"], input_ids=x_BT, **placed(modules, parts, x_BT))


def placed(modules: "Modules", parts: Parts, x_BT: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the position ids of tokens where a strategy lays texts end to end, and the model can tell them apart."""
    if parts.positions is None:
        return {}
    if not modules.model.anatomy.apart:
        raise Refusal("texts cannot lie end to end in a row of this architecture: it does not tell them apart")
    places = [torch.arange(each.start, each.stop, device=x_BT.device) for each in parts.positions(parts, x_BT.shape[1])]
    return {"position_ids": torch.cat(places)[None]}


def embedded(modules: "Modules", parts: Parts, p: dict[str, Any], **inputs: torch.Tensor) -> torch.Tensor:
    """Run all that comes before the layers; what these are called with is noted on the way."""
    with stand_ins.running(parts, None, modules.rest):
        output = modules.embedding.called(p, modules.buffers(parts), (), {**inputs, "use_cache": False})
    hidden_BTD: torch.Tensor = output[0]
    return hidden_BTD


def block(modules: "Modules", parts: Parts, p: dict[str, Any], x_BTD: torch.Tensor) -> torch.Tensor:
    """Run a layer."""
    kind, own = next(iter(p.items()))
    if kind not in modules.rest or modules.rest[kind].size != tuple(x_BTD.shape[:2]):
        note_others(modules, parts, x_BTD)
    with stand_ins.running(parts, p, modules.rest):
        output = modules.layer[kind].called(own, modules.buffers(parts), *modules.rest[kind].with_states(x_BTD))
    return output[0] if modules.model.anatomy.returned else output


def note_others(modules: "Modules", parts: Parts, x_BTD: torch.Tensor) -> None:
    """Note what layers are called with for rows of another length than the embedding had."""
    empty = {
        name.removeprefix("embed."): torch.zeros((), dtype=x_BTD.dtype, device=x_BTD.device).expand(each.shape)
        for name, each in modules.model.parameters.items()
        if name.startswith("embed.")
    }
    with torch.no_grad():
        embedded(modules, parts, empty, inputs_embeds=x_BTD.detach())


def mix(modules: "Modules", parts: Parts, p: dict[str, Any], x_BTD: torch.Tensor) -> torch.Tensor:
    """Attend by the module of a layer that does."""
    kind, own = next(iter(p.items()))
    own = inner(own, str(modules.model.anatomy.mix))
    with stand_ins.running(parts, p, modules.rest):
        output = modules.mix[kind].called(own, modules.buffers(parts), *modules.rest[kind, "mix"].with_states(x_BTD))
    mixed_BTD: torch.Tensor = output[0]
    return mixed_BTD


def feed(modules: "Modules", parts: Parts, p: dict[str, Any], x_BTD: torch.Tensor) -> torch.Tensor:
    """Transform each token by the module of a layer that does."""
    kind, own = next(iter(p.items()))
    own = inner(own, str(modules.model.anatomy.feed))
    with stand_ins.running(parts, p, modules.rest):
        fed_BTD: torch.Tensor = modules.feed[kind].called(own, modules.buffers(parts), (x_BTD,), {})
    return fed_BTD


def grad(
    modules: "Modules", parts: Parts, state: dict[str, Any], x: torch.Tensor, y: torch.Tensor
) -> tuple[torch.Tensor, Any]:
    """Compute the loss of this rank's share and its gradient for every parameter; sum them over the ranks."""
    x, y, weight = parts.shard_batch(parts, x, y)
    value = forward(modules, parts, both.trained(state, state["params"]), x, y)
    value = value if weight is None else value * weight
    return parts.reduce_gradients(parts, *decoder.gradients(value, state["params"]))


def forward(
    modules: "Modules", parts: Parts, params: dict[str, Any], x_BT: torch.Tensor, y_BT: torch.Tensor
) -> torch.Tensor:
    """Compute the loss of one batch. What multiplies its logits multiplies hidden states; a bias meets a 1."""
    model = modules.model
    x_BTD = parts.stack(parts, params["layers"], parts.embed(parts, params, x_BT))
    for name, module in modules.after.items():
        x_BTD = module.called(inner(params["norm"], name), modules.buffers(parts), (x_BTD,), {})
    if model.factor != 1:
        x_BTD = x_BTD * model.factor
    if model.bias:
        x_BTD = F.pad(x_BTD, (0, 1), value=1.0)
    head = params["head"] if model.tied is None else params["embed"][model.tied]
    return parts.loss(parts, x_BTD, head, y_BT)


class Modules:
    """The modules of a cut model, ready to be called: those of a layer by its kind.

    `rest` is what they were called with besides hidden states, in the step that is running.
    """

    def __init__(self, model: Cut) -> None:
        anatomy = model.anatomy
        first = {kind: f"{anatomy.layers}.{model.kinds.index(kind)}" for kind in model.layer}
        self.model = model
        self.embedding = Module(model.base, "")
        self.layer = {kind: Module(module, first[kind]) for kind, module in model.layer.items()}
        self.mix = {kind: Module(module, f"{first[kind]}.{anatomy.mix}") for kind, module in model.mix.items()}
        self.feed = {kind: Module(module, f"{first[kind]}.{anatomy.feed}") for kind, module in model.feed.items()}
        self.after = {name: Module(module, name) for name, module in model.after.items()}
        self.rest: dict[Any, stand_ins.Rest] = {}
        self._buffers: dict[str, torch.Tensor] = {}

    def buffers(self, parts: Parts) -> dict[str, torch.Tensor]:
        """Return the buffers of the whole model, made when they are asked for first."""
        if not self._buffers:
            device = parts.place.device
            self._buffers.update({name: each.to(device, copy=True) for name, each in self.model.buffers.items()})
        return self._buffers


class Module:
    """A module that is called with parameters and buffers from outside: those that it has itself, by their names."""

    def __init__(self, module: nn.Module, place: str) -> None:
        self._module = module
        self._parameters = [name for name, _ in module.named_parameters()]
        prefix = f"{place}." if place else ""
        self._buffers = {name: f"{prefix}{name}" for name, _ in module.named_buffers()}

    def called(self, p: Mapping[str, Any], buffers: Mapping[str, Any], args: Any, kwargs: Any) -> Any:
        """Call it; parameters that are none of its own are left aside."""
        own = {name: p[name] for name in self._parameters} | {at: buffers[name] for at, name in self._buffers.items()}
        return functional_call(self._module, own, args, kwargs)


def in_groups(model: Cut, values: Mapping[str, Any]) -> dict[str, Any]:
    """Put parameters into the structure of a state: of a layer, in a dict that names its kind."""
    groups: dict[str, Any] = {group: inner(values, group) for group in ("embed", "norm")}
    groups["layers"] = [{kind: inner(values, f"layers.{at}.{kind}")} for at, kind in enumerate(model.kinds)]
    return groups if model.tied is not None else {**groups, "head": values["head"]}
