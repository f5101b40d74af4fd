"""Parts made of somebody's torch modules, whose parameters are handed to them at each call."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

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
from harness.workloads.user_model.kinds import OF_PLACE, PLAIN, kinds_of
from harness.workloads.user_model.shared import inner, of_a_kind, with_the_decoders

DEEP = 8
"""How deep objects that hold each other are compared."""
BATCH_NORM = nn.modules.batchnorm._BatchNorm


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


def seeded(make: Callable[[Any], Any], shape: Any, seed: int) -> Modules:
    """Make the model anew, always with the same first values."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = cut(make, shape)
    for module in (model.embed, *model.blocks, model.norm):
        without_dropout(module)
    return model


def cut(make: Callable[[Any], Any], shape: Any) -> Modules:
    """Make the model in its pieces. Raises Refusal for pieces that are none, or that have no row for each id."""
    made = make(shape)
    if not isinstance(made, tuple | list) or len(made) not in (4, 5):
        raise Refusal(
            "the model's function returns other pieces: return (embed, blocks, norm, head), and call if needed"
        )
    embed, blocks, *rest = made
    if isinstance(blocks, Iterator):
        blocks = list(blocks)
    model = Modules(embed, blocks, *rest)
    pieces = {"embed": model.embed, **{f"blocks[{at}]": block for at, block in enumerate(model.blocks)}}
    for name, module in {**pieces, "norm": model.norm}.items():
        if not isinstance(module, nn.Module):
            raise Refusal(f"{name} of the model is a {type(module).__name__}: give a module, nn.Identity() for none")
    if len(pieces) == 1:
        raise Refusal("the model has no blocks: give at least one")
    demand_alike(model.blocks)
    if not isinstance(model.head, torch.Tensor):
        raise Refusal(f"the head of the model is a {type(model.head).__name__}: give its weight, of [V, D]")
    rows = {"head": len(model.head)}
    if isinstance(model.embed, nn.Embedding):
        rows["embedding"] = model.embed.num_embeddings
    if few := next((name for name, count in rows.items() if count < shape.vocabulary), None):
        raise Refusal(
            f"the {few} of the model has {rows[few]:,} rows, and there are {shape.vocabulary:,} ids: "
            "make it of shape.vocabulary rows"
        )
    demand_trained(model)
    return model


def demand_trained(model: Modules) -> None:
    """Raise Refusal for what a step would not train as the model means it: frozen, of no piece, or of statistics."""
    modules = {"embed": model.embed, **{f"blocks[{at}]": each for at, each in enumerate(model.blocks)}}
    if isinstance(model.head, nn.Parameter) and not model.head.requires_grad:
        raise Refusal(
            "the head of the model is frozen, and all parameters of a model of your own are trained: train it"
        )
    known = {id(model.head)}
    for place, module in {**modules, "norm": model.norm}.items():
        known |= {id(p) for p in module.parameters()}
        if frozen := next((name for name, p in module.named_parameters() if not p.requires_grad), None):
            raise Refusal(
                f"the parameter '{frozen}' of {place} is frozen, and all parameters of a model of your own are trained:"
                " make it a buffer, or let it be trained"
            )
        if any(isinstance(each, BATCH_NORM) and each.track_running_stats for each in module.modules()):
            raise Refusal(
                f"{place} of the model has a BatchNorm, whose statistics change as it is trained, which a model of "
                "your own does not do here: use LayerNorm or GroupNorm"
            )
    for name, value in inspect.getclosurevars(model.call).nonlocals.items() if inspect.isfunction(model.call) else ():
        of_value = value.parameters() if isinstance(value, nn.Module) else [value]
        if any(isinstance(each, nn.Parameter) and id(each) not in known for each in of_value):
            raise Refusal(
                f"`call` uses '{name}', whose parameters are of no piece and would not be trained: give them to a block"
            )


def demand_alike(blocks: Sequence[nn.Module]) -> None:
    """Raise Refusal where blocks that run through one module, see `kinds_of`, differ in an object that they hold."""
    kinds = kinds_of(blocks)
    for at, (kind, block) in enumerate(zip(kinds, blocks, strict=True)):
        first = blocks[kinds.index(kind)]
        modules = zip(first.named_modules(), block.modules(), strict=True)
        both = ((name, vars(a), vars(b)) for (name, a), b in modules)
        for name, key, one, other in ((n, k, a.get(k), b.get(k)) for n, a, b in both for k in a | b):
            if not key.startswith("_") and key not in OF_PLACE and not isinstance(one, PLAIN) and not equal(one, other):
                place = f"{name}.{key}" if name else key
                raise Refusal(
                    f"blocks[{at}] and blocks[{kinds.index(kind)}] differ in '{place}', a {type(one).__name__}, which "
                    "is not looked at: give what differs as plain attributes (numbers, strings, tuples, functions)"
                )


def equal(one: Any, other: Any, deep: int = DEEP) -> bool:
    """Check whether two objects are equal, or else of one type and with equal attributes, and these so `deep`.

    What cannot be compared, such as tensors in a dataclass, is taken to be equal.
    """
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, nn.Module | torch.Tensor) or deep == 0:
        return True  # modules and buffers are compared as such
    if type(one).__eq__ is not object.__eq__:
        try:
            same = one == other
            return bool(same.all() if hasattr(same, "all") else same)  # of arrays
        except (RuntimeError, TypeError, ValueError):
            return True
    its = vars(other) if hasattr(other, "__dict__") else None
    return its is not None and all(equal(each, its.get(key), deep - 1) for key, each in vars(one).items())


def without_dropout(module: nn.Module) -> None:
    """Switch dropout off; recurrences stay in training otherwise, since cuDNN has their gradients in no other mode."""
    for each in module.eval().modules():
        if isinstance(each, nn.RNNBase):
            each.train().dropout = 0.0


def named(model: Modules, kinds: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return every parameter by the name that it has in the state. Raises Refusal where two names stand for one."""
    layers = {f"layers.{at}.{kind}": block for at, (kind, block) in enumerate(zip(kinds, model.blocks, strict=True))}
    modules = {"embed": model.embed, **layers, "norm": model.norm}
    parameters = {
        f"{group}.{name}": p
        for group, module in modules.items()
        for name, p in module.named_parameters(remove_duplicate=False)
    }
    if tied_name(model) is None:
        parameters["head"] = model.head
    first: dict[int, str] = {}
    for name, p in parameters.items():
        other = first.setdefault(id(p), name)
        if other != name:
            raise Refusal(
                f"'{other}' and '{name}' of this model are one parameter: give each a parameter of its own, "
                "since only the head may be one of the embedding's"
            )
    return {name: p.detach() for name, p in parameters.items()}


def tied_name(model: Modules) -> str | None:
    """Return the name within the embedding of the parameter that is the head as well; None where there is none."""
    return next((name for name, p in model.embed.named_parameters() if p is model.head), None)


def emptied(module: nn.Module) -> nn.Module:
    """Remove the values of a module's parameters; its buffers stay."""
    for owner in module.modules():
        for name, parameter in list(owner._parameters.items()):
            if parameter is not None:
                owner._parameters[name] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
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
