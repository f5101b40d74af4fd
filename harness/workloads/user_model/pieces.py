"""The pieces that somebody's function makes of a torch model, and the models that are refused."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from harness.refusal import Refusal
from harness.workloads.user_model.kinds import OF_PLACE, PLAIN, kinds_of
from harness.workloads.user_model.shared import demand_rows

DEEP = 8
"""How deep objects that hold each other are compared."""
BATCH_NORM = nn.modules.batchnorm._BatchNorm
RECAST = "_apply(): Couldn't swap"
"""What torch says where `module.to(...)` changes a type while nothing is computed, as in a prediction."""
IN_FLOAT32 = "make it in float32, and use the strategy `bfloat16` or another of that kind"


class Pieces(NamedTuple):
    """A model, cut once: `head` is its weight of shape [V, D], `call` runs one block."""

    embed: nn.Module
    blocks: Sequence[nn.Module]
    norm: nn.Module
    head: nn.Parameter
    call: Callable[..., Any] = lambda block, x_BTD: block(x_BTD)

    def by_place(self) -> dict[str, nn.Module]:
        """Return the modules, in the order of the forward pass, by the place that a refusal names."""
        return {
            "embed": self.embed,
            **{f"blocks[{at}]": block for at, block in enumerate(self.blocks)},
            "norm": self.norm,
        }


def cut(make: Callable[[Any], Any], shape: Any) -> Pieces:
    """Make the model in its pieces. Raises Refusal for pieces that are none, or that have no row for each id."""
    try:
        made = make(shape)
    except RuntimeError as error:
        if RECAST not in str(error):
            raise
        raise Refusal(f"the model's function changes the type of its parameters: {IN_FLOAT32}") from None
    if not isinstance(made, tuple | list) or len(made) not in (4, 5):
        raise Refusal(
            "the model's function returns other pieces: return (embed, blocks, norm, head), and call if needed"
        )
    embed, blocks, *rest = made
    try:
        pieces = Pieces(embed, list(blocks), *rest)
    except TypeError:
        raise Refusal(f"the blocks of the model are a {type(blocks).__name__}: give a list of modules") from None
    for place, module in pieces.by_place().items():
        if not isinstance(module, nn.Module):
            raise Refusal(f"{place} of the model is a {type(module).__name__}: give a module, nn.Identity() for none")
    if not pieces.blocks:
        raise Refusal("the model has no blocks: give at least one")
    demand_alike(pieces.blocks)
    demand_head(pieces, shape.vocabulary)
    demand_float32(pieces)
    demand_trained(pieces)
    return pieces


def demand_head(pieces: Pieces, vocabulary: int) -> None:
    """Raise Refusal for a head that is no weight, and for a head or an embedding without a row for each id."""
    if not isinstance(pieces.head, torch.Tensor):
        raise Refusal(f"the head of the model is a {type(pieces.head).__name__}: give its weight, of [V, D]")
    rows = {"head": len(pieces.head)}
    if isinstance(pieces.embed, nn.Embedding):
        rows["embedding"] = pieces.embed.num_embeddings
    demand_rows(rows, vocabulary)


def demand_float32(pieces: Pieces) -> None:
    """Raise Refusal for parameters of another type, and for an embedding whose gradients are no arrays."""
    if pieces.head.dtype != torch.float32:
        raise Refusal(f"the head of the model is not in float32: {IN_FLOAT32}")
    for place, module in pieces.by_place().items():
        if other := next((name for name, p in module.named_parameters() if p.dtype != torch.float32), None):
            raise Refusal(f"the parameter '{other}' of {place} is not in float32: {IN_FLOAT32}")
        if any(isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.sparse for each in module.modules()):
            raise Refusal(
                f"{place} of the model has an Embedding with sparse=True, whose gradients are no arrays: leave that "
                "out, and use the strategy `sparse_embedding_gradient`"
            )


def demand_trained(pieces: Pieces) -> None:
    """Raise Refusal for what a step would not train as the model means it: frozen, of no piece, or of statistics."""
    if isinstance(pieces.head, nn.Parameter) and not pieces.head.requires_grad:
        raise Refusal(
            "the head of the model is frozen, and all parameters of a model of your own are trained: train it"
        )
    known = {id(pieces.head)}
    for place, module in pieces.by_place().items():
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
    call = pieces.call
    for name, value in inspect.getclosurevars(call).nonlocals.items() if inspect.isfunction(call) else ():
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


def named(pieces: Pieces, kinds: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return every parameter by the name that it has in the state. Raises Refusal where two names stand for one."""
    layers = {f"layers.{at}.{kind}": block for at, (kind, block) in enumerate(zip(kinds, pieces.blocks, strict=True))}
    modules = {"embed": pieces.embed, **layers, "norm": pieces.norm}
    parameters = {
        f"{group}.{name}": p
        for group, module in modules.items()
        for name, p in module.named_parameters(remove_duplicate=False)
    }
    if tied_name(pieces) is None:
        parameters["head"] = pieces.head
    first: dict[int, str] = {}
    for name, p in parameters.items():
        other = first.setdefault(id(p), name)
        if other != name:
            raise Refusal(
                f"'{other}' and '{name}' of this model are one parameter: give each a parameter of its own, "
                "since only the head may be one of the embedding's"
            )
    return {name: p.detach() for name, p in parameters.items()}


def tied_name(pieces: Pieces) -> str | None:
    """Return the name within the embedding of the parameter that is the head as well; None where there is none."""
    return next((name for name, p in pieces.embed.named_parameters() if p is pieces.head), None)
