"""Parts made of somebody's torch modules, whose parameters are handed to them at each call."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call

from harness.contract.data import Source
from harness.contract.parts import Parts
from harness.contract.place import Place
from harness.workloads.decoder import _torch as decoder
from harness.workloads.user_model.shared import inner, with_the_decoders


class Modules(NamedTuple):
    """A model, cut once."""

    embed: nn.Module
    blocks: Any
    norm: nn.Module
    head: nn.Parameter
    call: Callable[..., Any] = lambda block, x_BTD: block(x_BTD)


def parts_of(make: Callable[[Any], Any], shape: Any, place: Place, corpus: Any, seed: int) -> Parts:
    """Build the parts; the modules that stay hold no parameters of their own."""
    model = seeded(make, shape, seed)
    tied, call, count_ = is_tied(model), model.call, len(model.blocks)
    # layers of one kind differ in their parameters alone, so the first one serves them all
    embed_, block_, norm_ = emptied(model.embed), emptied(model.blocks[0]), emptied(model.norm)
    del model
    values: dict[str, torch.Tensor] = {}

    def draw(parts: Parts, name: str, shape: tuple[int, ...], deviation: float) -> torch.Tensor:
        return values.pop(name).to(place.device)

    def init(parts: Parts, source: Source | None = None) -> dict[str, Any]:
        values.update(named(seeded(make, shape, seed)))
        drawn = {
            name: parts.draw(parts, name, tuple(value.shape), 0.0).requires_grad_()
            for name, value in list(values.items())
        }
        values.clear()
        params: dict[str, Any] = {group: inner(drawn, group) for group in ("embed", "norm")}
        params["layers"] = [inner(drawn, f"layers.{index}") for index in range(count_)]
        return {"params": params if tied else {**params, "head": drawn["head"]}, "moments": None, "steps": 0}

    def embed(parts: Parts, params: dict[str, Any], x_BT: torch.Tensor) -> torch.Tensor:
        return functional_call(embed_, params["embed"], (x_BT,))

    def block(parts: Parts, p: dict[str, torch.Tensor], x_BTD: torch.Tensor) -> torch.Tensor:
        return call(partial(called, block_, p), x_BTD)

    def grad(parts: Parts, state: dict[str, Any], x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, Any]:
        params = state["params"]
        x_BTD = parts.stack(parts, params["layers"], parts.embed(parts, params, x))
        x_BTD = functional_call(norm_, params["norm"], (x_BTD,))
        head = next(iter(params["embed"].values())) if tied else params["head"]
        return decoder.gradients(parts.loss(parts, x_BTD, head, y), params)

    own = {"draw": draw, "init": init, "embed": embed, "block": block, "grad": grad, "outputs_first": lambda name: True}
    return with_the_decoders(decoder, shape, place, corpus, seed, **own)


def seeded(make: Callable[[Any], Any], shape: Any, seed: int) -> Modules:
    """Make the model anew, always with the same first values."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Modules(*make(shape))


def named(model: Modules) -> dict[str, torch.Tensor]:
    """Return every parameter once, under the name that it has in the state."""
    parameters = {f"embed.{name}": p.detach() for name, p in model.embed.named_parameters()}
    for index, block in enumerate(model.blocks):
        parameters |= {f"layers.{index}.{name}": p.detach() for name, p in block.named_parameters()}
    parameters |= {f"norm.{name}": p.detach() for name, p in model.norm.named_parameters()}
    return parameters if is_tied(model) else {**parameters, "head": model.head.detach()}


def is_tied(model: Modules) -> bool:
    """Return whether the head is the weight of the embedding."""
    return any(p is model.head for p in model.embed.parameters())


def emptied(module: nn.Module) -> nn.Module:
    """Remove the values of a module's parameters; its buffers stay."""
    for owner in module.modules():
        for name, parameter in list(owner._parameters.items()):
            if parameter is not None:
                owner._parameters[name] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
    return module


def called(module: nn.Module, p: dict[str, torch.Tensor], *arguments: Any, **named_arguments: Any) -> Any:
    """Call a module with these parameters."""
    return functional_call(module, p, arguments, named_arguments)


def count(make: Callable[[Any], Any], shape: Any) -> int:
    """Count the parameters, without making them."""
    with torch.device("meta"):
        return sum(p.numel() for p in named(Modules(*make(shape))).values())
