"""The parts of a cut decoder: its modules, whose parameters and buffers are handed to them at each call."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from harness.contract.data import Source
from harness.contract.parts import Parts
from harness.contract.place import Place
from harness.workloads.causal_lm import stand_ins
from harness.workloads.causal_lm.cut import Cut, cut
from harness.workloads.decoder import _torch as decoder
from harness.workloads.decoder import both
from harness.workloads.user_model.shared import with_the_decoders


def build(shape: Any, place: Place, corpus: Any, seed: int) -> Parts:
    """Build the untouched parts."""
    own = parts_of(cut(shape))
    return with_the_decoders(decoder, shape, place, corpus, seed, draw=partial(decoder.draw, seed), **own)


def parts_of(model: Cut) -> dict[str, Any]:
    """Build the parts of a model, by name."""
    anatomy = model.anatomy
    buffers: dict[str, torch.Tensor] = {}
    rest: dict[Any, stand_ins.Rest] = {}
    embedding, layers = Module(model.base, ""), {}
    first = {kind: f"{anatomy.layers}.{model.kinds.index(kind)}" for kind in model.layer}
    layers = {kind: Module(module, first[kind]) for kind, module in model.layer.items()}
    mixes = {kind: Module(module, f"{first[kind]}.{anatomy.mix}") for kind, module in model.mix.items()}
    feeds = {kind: Module(module, f"{first[kind]}.{anatomy.feed}") for kind, module in model.feed.items()}
    after = [(name, Module(module, name)) for name, module in model.after.items()]

    def held(parts: Parts) -> dict[str, torch.Tensor]:
        """Return the buffers of the whole model, made when they are asked for first."""
        if not buffers:
            device = parts.place.device
            buffers.update({name: buffer.to(device, copy=True) for name, buffer in model.buffers.items()})
        return buffers

    def init(parts: Parts, source: Source | None = None) -> dict[str, Any]:
        held(parts)
        drawn = {
            name: decoder.trainable(parts.draw(parts, name, each.shape, each.deviation))
            for name, each in model.parameters.items()
        }
        return {"params": in_groups(model, drawn), "moments": None, "steps": 0}

    def embed(parts: Parts, params: dict[str, Any], x_BT: torch.Tensor) -> torch.Tensor:
        rest.clear()
        return embedded(parts, params["embed"], input_ids=x_BT)

    def embedded(parts: Parts, p: dict[str, Any], **inputs: torch.Tensor) -> torch.Tensor:
        """Run all that comes before the layers; what these are called with is noted on the way."""
        with stand_ins.running(parts, None, rest):
            output = embedding.called(p, held(parts), (), {**inputs, "use_cache": False})
        hidden_BTD: torch.Tensor = output[0]
        return hidden_BTD

    def block(parts: Parts, p: dict[str, Any], x_BTD: torch.Tensor) -> torch.Tensor:
        kind, own = next(iter(p.items()))
        if kind not in rest or rest[kind].size != tuple(x_BTD.shape[:2]):
            note_others(parts, x_BTD)
        with stand_ins.running(parts, p, rest):
            output = layers[kind].called(own, held(parts), *rest[kind].with_states(x_BTD))
        return output[0] if anatomy.tuples else output

    def note_others(parts: Parts, x_BTD: torch.Tensor) -> None:
        """Note what layers are called with for rows of another length than the embedding had."""
        empty = {
            name.removeprefix("embed."): torch.zeros((), dtype=x_BTD.dtype, device=x_BTD.device).expand(each.shape)
            for name, each in model.parameters.items()
            if name.startswith("embed.")
        }
        with torch.no_grad():
            embedded(parts, empty, inputs_embeds=x_BTD.detach())

    def mix(parts: Parts, p: dict[str, Any], x_BTD: torch.Tensor) -> torch.Tensor:
        kind, own = next(iter(p.items()))
        with stand_ins.running(parts, p, rest):
            output = mixes[kind].called(
                inner(own, f"{anatomy.mix}."), held(parts), *rest[kind, "mix"].with_states(x_BTD)
            )
        mixed_BTD: torch.Tensor = output[0]
        return mixed_BTD

    def feed(parts: Parts, p: dict[str, Any], x_BTD: torch.Tensor) -> torch.Tensor:
        kind, own = next(iter(p.items()))
        with stand_ins.running(parts, p, rest):
            fed_BTD: torch.Tensor = feeds[kind].called(inner(own, f"{anatomy.feed}."), held(parts), (x_BTD,), {})
        return fed_BTD

    def grad(parts: Parts, state: dict[str, Any], x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, Any]:
        params = both.trained(state, state["params"])
        x_BTD = parts.stack(parts, params["layers"], parts.embed(parts, params, x))
        for name, module in after:
            x_BTD = module.called(inner(params["norm"], f"{name}."), held(parts), (x_BTD,), {})
        head = params["head"] if model.tied is None else params["embed"][model.tied]
        return decoder.gradients(parts.loss(parts, x_BTD, head, y), state["params"])

    linear = partial(stand_ins.linear, model.transposed)
    named = {"linear": linear, "mix": mix if mixes else None, "feed": feed if feeds else None, "attend": decoder.attend}
    return {"init": init, "embed": embed, "block": block, "grad": grad, **named}


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


def inner(p: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Select the parameters of a module within another, by the names that it knows."""
    return {name.removeprefix(prefix): value for name, value in p.items() if name.startswith(prefix)}


def in_groups(model: Cut, values: Mapping[str, Any]) -> dict[str, Any]:
    """Put parameters into the structure of a state: of a layer, in a dict that names its kind."""
    groups: dict[str, Any] = {group: inner(values, f"{group}.") for group in ("embed", "norm")}
    groups["layers"] = [{kind: inner(values, f"layers.{at}.{kind}.")} for at, kind in enumerate(model.kinds)]
    return groups if model.tied is not None else {**groups, "head": values["head"]}
