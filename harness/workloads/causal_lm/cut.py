"""Cut a decoder of transformers by itself.

A small model of the same architecture is run once with real numbers. What is called in which order says where its
layers are, which modules follow them, which module of a layer attends and which is its feed part. The model of the size
that was asked for is then made without values, in which the same modules have the same names.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from harness.contract.plugins import ALIKE
from harness.refusal import Refusal
from harness.workloads.causal_lm import configs, stand_ins
from harness.workloads.user_model.kinds import kinds_of

MIX = ("self_attn", "attn", "attention")
FEED = ("mlp",)
"""What the modules of a layer are called that attend, and those that transform each token."""
READ_BY_LAYERS = {
    "hidden_size_per_layer_input": "each of its layers has an input of its own",
    "num_kv_shared_layers": "some of its layers read keys and values of others",
}
"""What a configuration may have in its layers that parts, which get hidden states alone, have no place for."""
FILLED = (torch.zeros, torch.ones, torch.randn)
"""What makes arrays with values; one of more than `LARGE` numbers is no buffer."""
LARGE = 1 << 24


class CutError(Refusal):
    """A model that cannot be trained in parts, in one sentence."""


@dataclass(frozen=True)
class Anatomy:
    """Names within the model without its head: of the list of layers, of what follows them, and of a layer's parts.

    A layer returns `returned` values in a tuple, and its module for `mix` so many as `mixed`; 0: hidden states alone.
    `mix` and `feed` are None where the first layer has no module for them. `constant` are the deviations of parameters
    that are not drawn (0: ones, -1: zeros), those of the layers by their names within one. `kinds` are those of the
    layers of the small model. `uncalled` are matrices that a layer multiplies by itself. `apart`: texts that lie end to
    end in a row can be told apart, by their positions and in attention.
    """

    layers: str
    kinds: tuple[str, ...]
    after: tuple[str, ...]
    returned: int
    mix: str | None
    mixed: int
    feed: str | None
    constant: dict[str, float]
    uncalled: frozenset[str] = frozenset()
    apart: bool = True


@dataclass(frozen=True)
class Parameter:
    """Shape and deviation of one parameter, as `Parts.draw` wants them."""

    shape: tuple[int, ...]
    deviation: float

    @property
    def count(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Cut:
    """A model in pieces that hold no parameters.

    `base` is the model without its head, in which stand-ins take the place of the layers and of what follows them.
    The logits are `factor` times the products with the head; `bias`: a number is added to each.
    `kinds` names the kind of each layer; `layer`, `mix` and `feed` have the module of each kind, `after` those that
    follow the layers. `transposed` names the matrices of a layer that are stored [in, out]. `parameters` are those of
    the whole by their names in a state, shared ones once; `buffers` those tensors that are none, all layers' included.
    `tied` is the name of the embedding's weight where that is the head as well.
    """

    base: nn.Module
    anatomy: Anatomy
    kinds: tuple[str, ...]
    layer: dict[str, nn.Module]
    mix: dict[str, nn.Module]
    feed: dict[str, nn.Module]
    transposed: frozenset[str]
    after: dict[str, nn.Module]
    parameters: dict[str, Parameter]
    buffers: dict[str, torch.Tensor]
    tied: str | None
    factor: float
    bias: bool


def made(values: configs.Values, attention: str | None = None) -> Any:
    """Make the model of a configuration, with the attention of the parts or one of transformers' own.

    Where an architecture has modules for one attention each it keeps that, as transformers chooses. Raises CutError
    for a configuration that transformers does not take.
    """
    try:
        import transformers
    except ImportError:
        raise CutError("'causal_lm' needs the package transformers: install it, or the extra 'models'") from None
    stand_ins.register()
    own = dict(values)
    kind, version = own.pop("model_type"), transformers.__version__
    if kind not in transformers.CONFIG_MAPPING:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as decoders

        near = get_close_matches(kind, decoders, 1, ALIKE)
        hint = f"; did you mean '{near[0]}'?" if near else ": see its model_type, or install a newer version"
        raise CutError(f"transformers {version} knows no architecture '{kind}'{hint}")
    if more := next((key for key in READ_BY_LAYERS if own.get(key)), None):
        raise CutError(f"the architecture '{kind}' cannot be cut into layers: {READ_BY_LAYERS[more]} ({more})")
    try:
        config = transformers.AutoConfig.for_model(kind, **own)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        if attention is None and model._can_set_attn_implementation():
            model.set_attn_implementation(stand_ins.ATTENTION)
        if model.config._experts_implementation == "grouped_mm":
            model.set_experts_implementation(stand_ins.EXPERTS)
    except Exception as error:
        reason = f"it knows no {in_a_line(error)}" if isinstance(error, KeyError) else in_a_line(error)
        raise CutError(f"transformers {version} makes no decoder of the architecture '{kind}': {reason}") from None
    _store_constants(model)
    return model.eval()  # without dropout


def _store_constants(model: nn.Module) -> None:
    """Let parameters that are never trained be buffers."""
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            if not p.requires_grad and p.device.type != "meta":
                delattr(module, name)
                module.register_buffer(name, p.detach())


def base_of(model: Any) -> Any:
    """Return a model without its head."""
    return model.model if model.base_model is model else model.base_model


def in_a_line(error: Exception) -> str:
    """Return the beginning of what an error says, whose first line may just announce the next."""
    return (" ".join(str(error).split()) or type(error).__name__)[:200]


class _WithoutMemory(TorchFunctionMode):
    """Let arrays that are made without values have no memory either, and no large ones: they are parameters."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty or (func in FILLED and _count(args) > LARGE):
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _count(size: tuple[Any, ...]) -> int:
    """Count the numbers of an array by its size, in one argument or several."""
    return prod(size[0] if size and isinstance(size[0], tuple | list) else size)


@contextmanager
def without_values() -> Iterator[None]:
    """Make modules whose parameters take no memory; buffers are computed as ever."""
    register = nn.Module.register_parameter

    def emptied(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta" and parameter.requires_grad:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = emptied  # type: ignore[method-assign, assignment]
    try:
        with _WithoutMemory():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def layers_of(model: Any) -> tuple[str, nn.ModuleList]:
    """Return the list of layers and its name within the model without its head; raise CutError where there is none."""
    count = model.config.num_hidden_layers
    for name, module in base_of(model).named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name, module
    raise CutError(f"the architecture '{model.config.model_type}' cannot be cut: it has no list of its {count} layers")


def anatomy_of(model: Any) -> Anatomy:
    """Run a small model once and see what it calls."""
    base = base_of(model)
    within, layers = layers_of(model)
    order: list[str] = []
    calls: dict[str, tuple[Any, Any, Any]] = {}

    def watch(name: str, module: nn.Module) -> Any:
        def called(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            order.append(name)
            calls[name] = args, kwargs, output

        return module.register_forward_hook(called, with_kwargs=True)

    hooks = [watch(name, module) for name, module in base.named_modules()]
    try:
        with torch.no_grad():
            base(input_ids=torch.arange(2, 9)[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    first, last = f"{within}.0", f"{within}.{len(layers) - 1}"
    if last not in calls:
        raise CutError(f"the architecture '{model.config.model_type}' cannot be cut: its last layer is not called")
    later = order[order.index(last) + 1 :]
    mix = next((name for name in MIX if isinstance(calls.get(f"{first}.{name}", (None,) * 3)[2], tuple)), None)
    return Anatomy(
        layers=within,
        kinds=kinds_of(layers, getattr(model.config, "layer_types", None)),
        after=tuple(name for name in later if name and not list(base.get_submodule(name).children())),
        returned=_returned(calls[last]),
        mix=mix,
        mixed=_returned(calls[f"{first}.{mix}"]) if mix else 0,
        feed=next((name for name in FEED if _maps_tokens(calls.get(f"{first}.{name}"))), None),
        constant=_constant(base, within),
        uncalled=_uncalled(layers, within, calls),
    )


def _uncalled(layers: nn.ModuleList, within: str, calls: Collection[str]) -> frozenset[str]:
    """Return the names of the matrices of layers that no module multiplies by; of a list of them, where none does."""
    called = {_of_a_list(_short(name, within)) for name in calls}
    linear = {name for layer in layers for name, each in layer.named_modules() if isinstance(each, nn.Linear)}
    return frozenset(name for name in linear if _of_a_list(name) not in called)


def _of_a_list(name: str) -> str:
    """Return what the names of all modules of one list have in common."""
    return ".".join("*" if each.isdigit() else each for each in name.split("."))


def _returned(call: tuple[Any, Any, Any]) -> int:
    """Count the values of the tuple that a module returned; 0 where it was none."""
    return len(call[2]) if isinstance(call[2], tuple) else 0


def _maps_tokens(call: tuple[Any, Any, Any] | None) -> bool:
    """Return whether a module was called with hidden states alone, and returned hidden states alone."""
    if call is None:
        return False
    args, kwargs, output = call
    return len(args) == 1 and not kwargs and isinstance(output, torch.Tensor) and output.shape == args[0].shape


def _constant(base: nn.Module, within: str) -> dict[str, float]:
    """Find the parameters that begin with all ones (deviation 0) or all zeros (-1)."""
    constant = {}
    for name, parameter in base.named_parameters():
        for value, deviation in ((1.0, 0.0), (0.0, -1.0)):
            if bool((parameter == value).all()):
                constant[_short(name, within)] = deviation
    return constant


def _short(name: str, within: str) -> str:
    """Return the name of a parameter within its layer; of one outside of the layers the name as it is."""
    return name.removeprefix(f"{within}.").partition(".")[2] if name.startswith(f"{within}.") else name


def pieces(model: Any, anatomy: Anatomy) -> Cut:
    """Take a model to pieces; it is not whole any more afterwards."""
    base, (_, layers) = base_of(model), layers_of(model)
    head = model.get_output_embeddings()
    kinds = kinds_of(layers, getattr(model.config, "layer_types", None))
    _demand_seen(model, kinds, anatomy.kinds)
    tied = next((name for name, p in base.named_parameters() if p is head.weight), None)
    bias = getattr(head, "bias", None) is not None
    if bias and tied is not None:
        raise CutError(f"the architecture '{model.config.model_type}' cannot be cut: its tied head has a bias")
    after = {name: base.get_submodule(name) for name in anatomy.after}
    parameters = _parameters(model, anatomy, kinds, tied, bias)
    buffers = {name: buffer.detach() for name, buffer in base.named_buffers()}
    of_kind = {kind: layers[kinds.index(kind)] for kind in dict.fromkeys(kinds)}
    transposed = frozenset(
        name for layer in of_kind.values() for name in stand_ins.replace_linear(layer, anatomy.uncalled)
    )
    mix, feed = ({kind: layer.get_submodule(name) for kind, layer in of_kind.items()} if name else {}
                 for name in (anatomy.mix, anatomy.feed))  # fmt: skip
    for kind, layer in of_kind.items():
        if anatomy.mix:
            layer.set_submodule(anatomy.mix, stand_ins.Mix(mix[kind], anatomy.mixed))
        if anatomy.feed:
            layer.set_submodule(anatomy.feed, stand_ins.Feed(feed[kind]))
    for at, kind in enumerate(kinds):
        layers[at] = stand_ins.Layer(layers[at], kind, anatomy.returned)
    for name in after:
        base.set_submodule(name, nn.Identity())
    factor = _factor(model.config)
    return Cut(base, anatomy, kinds, of_kind, mix, feed, transposed, after, parameters, buffers, tied, factor, bias)


def _factor(config: Any) -> float:
    """Return what the products with the head are multiplied by: Granite divides them, Cohere and others multiply."""
    by = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None) or 1.0
    return float(by) / float(getattr(config, "logits_scaling", None) or 1.0)


def _demand_seen(model: Any, kinds: tuple[str, ...], seen: tuple[str, ...]) -> None:
    """Raise CutError where a layer is of a kind that the small model, which proves the cut, does not have."""
    at = next((at for at, kind in enumerate(kinds) if kind not in seen), None)
    if at is not None:
        raise CutError(
            f"the architecture '{model.config.model_type}' cannot be cut at {len(kinds)} layers: a small model of "
            f"{len(seen)} proves the cut and has none of the kind of layer {at}; give at most {at} layers"
        )


def _parameters(
    model: Any, anatomy: Anatomy, kinds: tuple[str, ...], tied: str | None, bias: bool
) -> dict[str, Parameter]:
    """Name every parameter as it stands in a state, with how it is drawn; a bias of the head is its last column."""
    deviations = (getattr(model.config, name, None) for name in ("initializer_range", "init_std"))
    deviation = float(next((value for value in deviations if value), 0.02))

    def drawn(name: str, p: torch.Tensor) -> Parameter:
        return Parameter(tuple(p.shape), anatomy.constant.get(_short(name, anatomy.layers), deviation))

    parameters = {}
    for name, p in base_of(model).named_parameters():
        if name.startswith(f"{anatomy.layers}."):
            at, _, short = name.removeprefix(f"{anatomy.layers}.").partition(".")
            parameters[f"layers.{at}.{kinds[int(at)]}.{short}"] = drawn(name, p)
        elif name.rpartition(".")[0] in anatomy.after:
            parameters[f"norm.{name}"] = drawn(name, p)
        else:
            parameters[f"embed.{name}"] = drawn(name, p)
    if tied is None:
        outputs, width = model.get_output_embeddings().weight.shape
        parameters["head"] = Parameter((outputs, width + bias), deviation)
    return parameters
