"""Parts made of somebody's torch modules, whose parameters are handed to them at each call."""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._python_dispatch import _disable_current_modes

from harness.contract.data import Source
from harness.contract.parts import Parts
from harness.contract.place import Place
from harness.refusal import Refusal
from harness.workloads import undivided
from harness.workloads.decoder import _torch as decoder
from harness.workloads.user_model.kinds import kinds_of
from harness.workloads.user_model.pieces import Pieces, cut, named, tied_name
from harness.workloads.user_model.shared import inner, of_a_kind, with_the_decoders


def parts_of(make: Callable[[Any], Any], shape: Any, place: Place, corpus: Any, seed: int) -> Parts:
    """Build the parts; the modules that stay hold no parameters of their own."""
    model = seeded(make, shape, seed)
    tied, call, kinds = tied_name(model), model.call, kinds_of(model.blocks)
    # layers of one kind differ in their parameters alone, so the first one serves them all
    blocks = {kind: emptied(model.blocks[kinds.index(kind)]) for kind in dict.fromkeys(kinds)}
    embed_, norm_ = emptied(model.embed), emptied(model.norm)
    del model
    values: dict[str, torch.Tensor] = {}

    def draw(parts: Parts, name: str, shape: tuple[int, ...], deviation: float) -> torch.Tensor:
        return values.pop(name).to(place.device)

    def init(parts: Parts, source: Source | None = None) -> dict[str, Any]:
        for module in (embed_, *blocks.values(), norm_):
            place_buffers(module, place.device)
        values.update(named(seeded(make, shape, seed), kinds))
        drawn = {
            name: parts.draw(parts, name, tuple(value.shape), 0.0).requires_grad_()
            for name, value in list(values.items())
        }
        values.clear()
        params: dict[str, Any] = {group: inner(drawn, group) for group in ("embed", "norm")}
        params["layers"] = [{kind: inner(drawn, f"layers.{at}.{kind}")} for at, kind in enumerate(kinds)]
        return {"params": params if tied else {**params, "head": drawn["head"]}, "moments": None, "steps": 0}

    def head(params: dict[str, Any]) -> torch.Tensor:
        weight_VD: torch.Tensor = params["embed"][tied] if tied else params["head"]
        return weight_VD

    def embed(parts: Parts, params: dict[str, Any], x_BT: torch.Tensor) -> torch.Tensor:
        return called(embed_, params["embed"], head(params).dtype, x_BT)

    def block(parts: Parts, p: dict[str, Any], x_BTD: torch.Tensor) -> torch.Tensor:
        kind, own = next(iter(p.items()))
        made = call(partial(called, blocks[kind], own, x_BTD.dtype), x_BTD)
        if not isinstance(made, torch.Tensor):
            raise Refusal(
                f"a block returns a {type(made).__name__}: return hidden states alone, or give `call` to take them out"
            )
        return made

    def grad(parts: Parts, state: dict[str, Any], x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, Any]:
        params = state["params"]
        x, y, weight = parts.shard_batch(parts, x, y)
        x_BTD = parts.stack(parts, params["layers"], parts.embed(parts, params, x))
        x_BTD = called(norm_, params["norm"], x_BTD.dtype, x_BTD)
        value = parts.loss(parts, x_BTD, head(params), y)
        value = value if weight is None else value * weight
        return parts.reduce_gradients(parts, *decoder.gradients(value, params))

    own: dict[str, Any] = {
        "draw": draw,
        "init": init,
        "embed": embed,
        "block": block,
        "grad": grad,
        "outputs_first": lambda name: True,
        "shard_batch": undivided.shard_batch,
        "reduce_gradients": undivided.reduce_gradients,
        "gather_parameters": undivided.gather_parameters,
    }
    return with_the_decoders(decoder, shape, place, corpus, seed, **own)


def seeded(make: Callable[[Any], Any], shape: Any, seed: int) -> Pieces:
    """Make the model anew, always with the same first values."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = cut(make, shape)
    for module in (model.embed, *model.blocks, model.norm):
        without_dropout(module)
    return model


def without_dropout(module: nn.Module) -> None:
    """Switch dropout off; recurrences stay in training otherwise, since cuDNN has their gradients in no other mode."""
    for each in module.eval().modules():
        if isinstance(each, nn.RNNBase):
            each.train().dropout = 0.0


def emptied(module: nn.Module) -> nn.Module:
    """Remove the values of a module's parameters; its buffers stay."""
    for owner in module.modules():
        for name, parameter in list(owner._parameters.items()):
            if parameter is not None:
                with _disable_current_modes():  # in a prediction they would count it
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                owner._parameters[name] = nn.Parameter(empty, requires_grad=False)
    return module


def place_buffers(module: nn.Module, device: str) -> None:
    """Move the buffers of a module to a device."""
    for owner in module.modules():
        for name, buffer in list(owner._buffers.items()):
            if buffer is not None:
                owner._buffers[name] = buffer.to(device)


def called(
    module: nn.Module, p: dict[str, torch.Tensor], dtype: torch.dtype, *arguments: Any, **named_arguments: Any
) -> Any:
    """Call a module with these parameters, and with its floating buffers in a type, as `module.to(dtype)` has them."""
    buffers = {name: each.to(dtype) for name, each in module.named_buffers() if each.is_floating_point()}
    return functional_call(module, {**buffers, **p}, arguments, named_arguments)


def count(make: Callable[[Any], Any], shape: Any) -> int:
    """Count the parameters, without making them."""
    return sum(prod(size) for size in _sizes(make, shape).values())


def shapes_of(make: Callable[[Any], Any], shape: Any) -> dict[str, tuple[tuple[int, ...], float]]:
    """Return shape and deviation of each parameter by name, of layers those of each kind: `layers.KIND.NAME`."""
    return {of_a_kind(name): (size, 0.0) for name, size in _sizes(make, shape).items()}


def _sizes(make: Callable[[Any], Any], shape: Any) -> dict[str, tuple[int, ...]]:
    """Return the sizes of all parameters by their names in the state, without making them."""
    key = make, shape.model_dump_json()
    if key not in _KNOWN:
        with _disable_current_modes(), torch.device("meta"):
            model = cut(make, shape)
            _KNOWN[key] = {name: tuple(p.shape) for name, p in named(model, kinds_of(model.blocks)).items()}
    return _KNOWN[key]


_KNOWN: dict[Any, dict[str, tuple[int, ...]]] = {}
"""The sizes of the parameters of models that were asked for before."""
