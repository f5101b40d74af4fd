"""Training runs of published models: the model from its configuration by transformers, then the steps as published."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.backends.cuda_allocator import OutOfMemory
from published import adapters, texts
from published.machine import Refused, capacity_of, device_of

META = torch.device("meta")
ACTIVATION_FIELDS = ("activation_function", "hidden_act", "hidden_activation")
ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh"}
"""Names of activations in transformers where rows have another."""
INNER = ("ffn_dim", "n_inner")
"""What architectures call the inner width of the feed part that do not call it `intermediate_size`."""
OFF = 0.01
"""By how much the parameters of a model that is built may differ from those that its row counts."""
ZERO_GRAD = ("zero_grad before forward", "zero_grad after forward, before backward")
"""Where a loop can drop the gradients of the step before; to drop them after a step takes what it takes before one."""
UNSAID = 1.02
"""By how much a process can exceed what its loop reserves: lengths of batches and samples of the driver vary."""


def predicted_process(row: dict[str, Any]) -> dict[str, int]:
    """Return what a process takes above its first sample, and at most where the row leaves its loop open.

    That first sample has the context of the device. Raises Refused, OutOfMemory.
    """
    figures = predicted(row)
    _, steps = texts.iterations(row)
    others = [way for way in ZERO_GRAD if way not in steps] if "not recorded" in steps else []
    most, capacity = figures["reserved_bytes"], capacity_of(row)
    for way in others:
        try:
            most = max(most, predicted(row | {"steps": f"{steps.split(';')[0]}; {way}"})["reserved_bytes"])
        except OutOfMemory:
            most = capacity
    most = max(figures["reserved_bytes"], min(int(UNSAID * most), capacity))
    return figures | {"process_bytes": figures["reserved_bytes"], "at_most_bytes": most}


def predicted(row: dict[str, Any]) -> dict[str, int]:
    """Return the allocated and reserved bytes of a training run. Raises Refused, OutOfMemory."""
    attention = texts.attention(row)
    model = skeleton(row, attention)
    with device_of(row) as device, attention_of(attention), transformers_of(row):
        place(model, row)
        adapt(model, row)
        model.train()
        optimizer = optimizer_of(row, [p for p in model.parameters() if p.requires_grad])
        batch = batch_of(row)
        model.forward = autocast(row, model.forward)
        if row["family"].startswith("xmem"):
            one_loop(model, optimizer, batch, *texts.iterations(row))
        else:
            step = fresh_step if row["family"] == "fitcheck" else kept_step
            step(model, optimizer, batch)
            device.allocator.reset_peaks()
            for _ in range(1 if row["family"] == "fitcheck" else 2):
                step(model, optimizer, batch)
        return {
            "allocated_bytes": device.allocator.peak_allocated,
            "reserved_bytes": device.allocator.peak_reserved,
        }


def skeleton(row: dict[str, Any], attention: str) -> Any:
    """Make the model of a row on the meta device, in the type that its weights are loaded in. Raises Refused."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    config = config_of(row)
    builder = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    made: Any = builder._model_mapping[type(config)]
    kind = "sdpa" if "eager" not in attention and made._supports_sdpa else "eager"
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    try:
        with META:
            model = builder.from_config(config, dtype=texts.loaded_type(row), attn_implementation=kind)
    except KeyError as error:
        raise Refused(f"transformers knows no {error}, which its config names") from None
    built, counted = sum(parameter.numel() for parameter in model.parameters()), row["config"].get("n_params")
    if counted and abs(built / counted - 1) > OFF:
        raise Refused(f"by its config the model has {built:,} parameters, and it says {counted:,}: complete the config")
    if row.get("use_cache") is False:
        model.config.use_cache = False
    return model


def config_of(row: dict[str, Any]) -> Any:
    """Make the configuration from the sizes in a row, whose names are those of transformers. Raises Refused."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    if not isinstance(row["config"], dict):
        raise Refused(f"its config is {row['config']!r}: write the sizes of the model")
    sizes = dict(row["config"])
    arch = sizes.pop("arch")
    names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    kind = next((kind for kind, cls in names.items() if cls == arch), None)
    if kind is None:
        raise Refused(f"transformers has no model '{arch}' that predicts tokens")
    made = CONFIG_MAPPING[kind]
    for published_name, name in (
        ("attn_softcap", "attn_logit_softcapping"),
        ("final_softcap", "final_logit_softcapping"),
    ):
        if published_name in sizes:
            sizes[name] = sizes.pop(published_name)
    activation, dropout = sizes.pop("activation", None), sizes.pop("dropout", None)
    if sizes.pop("attention_layers", None) == "alternating global,local":
        sizes["attention_types"] = [[["global", "local"], sizes["num_hidden_layers"] // 2]]
        sizes["num_layers"] = sizes.pop("num_hidden_layers")
    for aside in ("n_params", "norm", "qkv_bias", "qk_norm"):
        sizes.pop(aside, None)
    if "vocab_size" not in sizes:
        raise Refused("the row gives no sizes of the model")
    usual = made().to_dict()
    inner = next((name for name in INNER if name in usual), None)
    if inner is not None and "intermediate_size" in sizes and "intermediate_size" not in usual:
        sizes[inner] = sizes.pop("intermediate_size")
    if activation is not None:
        sizes |= {name: ACTIVATIONS.get(activation, activation) for name in ACTIVATION_FIELDS if name in usual}
    if dropout is not None:  # it is said of all places that have one by default
        sizes |= {
            name: dropout for name, value in usual.items() if "drop" in name and isinstance(value, float) and value
        }
    return made(**sizes)


def place(model: nn.Module, row: dict[str, Any]) -> None:
    """Put the weights on the device one after another, in 4 bits where the row has them so."""
    if texts.is_quantised(row):
        quantise(model, texts.compute_type(row), nested="double_quant false" not in str(row["param_dtype"]).lower())
    placed: dict[int, nn.Parameter] = {}
    for module in [each for each in model.modules() if not isinstance(each, adapters.Linear4bit)]:
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in placed:  # tied weights are placed once
                there = isinstance(parameter, adapters.Placed)
                placed[id(parameter)] = parameter if there else adapters.Placed(torch.empty_like(parameter))
            setattr(module, name, placed[id(parameter)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty_like(buffer))


def quantise(model: nn.Module, compute: torch.dtype, nested: bool) -> None:
    """Load weights as transformers does with `device_map` and bitsandbytes: one large request, then name by name."""
    parameters = dict(model.named_parameters())
    packed = {name for name in parameters if _is_packed(model, name)}
    whole = sum(each.numel() * each.element_size() for name, each in parameters.items() if name not in packed)
    whole += sum(parameters[name].numel() for name in packed) // 2
    torch.empty(whole // 2, dtype=torch.float16, device=META)
    for name in sorted(parameters, key=lambda name: [(not part.isdigit(), part.zfill(9)) for part in name.split(".")]):
        path = name.rpartition(".")[0]
        parent, _, own = path.rpartition(".")
        if name in packed:
            linear: Any = model.get_submodule(path)
            setattr(model.get_submodule(parent), own, adapters.Linear4bit(linear, compute, nested))
        elif f"{path}.weight" not in packed:
            parameter = adapters.Placed(torch.empty_like(parameters[name]))
            for module in model.modules():
                for other, tied in list(module.named_parameters(recurse=False)):
                    if tied is parameters[name]:
                        setattr(module, other, parameter)


def _is_packed(model: nn.Module, name: str) -> bool:
    path, _, leaf = name.rpartition(".")
    return leaf == "weight" and path != "lm_head" and isinstance(model.get_submodule(path), nn.Linear)


def adapt(model: Any, row: dict[str, Any]) -> None:
    """Prepare a model for training as its row says: adapters, frozen weights, recomputed layers. Raises Refused."""
    if texts.is_quantised(row):
        adapters.prepare(model)
    if lora := row.get("lora"):
        if lora.get("bias", "none") != "none":
            raise Refused(f"adapters whose bias is '{lora['bias']}' are not rebuilt")
        adapted = adapters.adapt(model, lora["targets"], texts.count(lora, "r"), float(lora.get("dropout") or 0.0))
        if not adapted:
            raise Refused(f"the model has no layer of the names {lora['targets']}")
    elif texts.is_quantised(row):
        raise Refused("weights in 4 bits are not trained: a row in nf4 has adapters")
    if texts.is_checkpointed(row):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()


def optimizer_of(row: dict[str, Any], parameters: list[nn.Parameter]) -> Any:
    """Make the optimizer of a row; the loops over all parameters at once are those of a GPU. Raises Refused."""
    name = str(row["optimizer"])
    if "adamw8bit" in name.lower() or name.lower() in ("paged_adamw_8bit", "adamw_8bit", "adamw_bnb_8bit"):
        return EightBits(parameters, paged="paged" in name.lower())
    if name.startswith("transformers Adafactor("):
        return adafactor(parameters)
    known, options = texts.optimizer(name)
    kind = getattr(torch.optim, known)
    if "foreach" not in inspect.signature(kind).parameters or options.get("fused"):
        raise Refused(f"the optimizer '{name}' is not rebuilt")
    try:
        return kind(parameters, **({"lr": 1e-3, "foreach": True} | options))
    except (TypeError, ValueError) as error:
        raise Refused(f"the optimizer '{name}' cannot be made: {error}") from None


def adafactor(parameters: list[nn.Parameter]) -> Any:
    """Make the Adafactor of transformers; no value of a parameter decides its rate, since none has one here."""
    from transformers.optimization import Adafactor

    optimizer = Adafactor(parameters, lr=1e-3, relative_step=False)
    optimizer._get_lr = lambda group, state: group["lr"]  # type: ignore[method-assign]
    return optimizer


class EightBits:
    """AdamW in 8 bits of bitsandbytes. Where `paged`, moments of large tensors lie in managed memory, not in torch's.

    Those of fewer than 100,000 elements lie on the device, in 32 bits below 4,096; the rest has a scale for each 256.
    """

    def __init__(self, parameters: list[nn.Parameter], paged: bool) -> None:
        self.parameters, self.paged = parameters, paged
        self.state: list[torch.Tensor] = []

    def step(self) -> None:
        """Make the moments at the first call; update in place."""
        if self.state:
            return
        self.state += [torch.empty(256, device=META) for _ in range(2)]
        for parameter in self.parameters:
            small = parameter.numel() < 4096
            if not self.paged or parameter.numel() < 100_000:
                kind = torch.float32 if small else torch.uint8
                self.state += [torch.zeros_like(parameter, dtype=kind) for _ in range(2)]
            if not small:
                self.state += [torch.zeros(-(-parameter.numel() // 256), device=META) for _ in range(2)]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def batch_of(row: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Make the arguments of the model, as the row's `inputs` name them."""
    size = (texts.count(row, "batch"), texts.count(row, "seq"))
    ids = torch.empty(size, dtype=torch.int64, device=META)
    if "no attention_mask" in str(row["inputs"]):
        return {"input_ids": ids, "labels": ids}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def autocast(row: dict[str, Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    """Run a forward pass under the autocast of a row, if it has one."""
    kind = texts.autocast_type(row)

    def within(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cuda", kind, enabled=kind is not None):
            return forward(*args, **kwargs)

    return within


def fresh_step(model: Any, optimizer: Any, batch: dict[str, torch.Tensor]) -> None:
    """Train one step whose gradients are dropped before it; the outputs live as long as it."""
    optimizer.zero_grad(set_to_none=True)
    out = model(**batch)
    out.loss.backward()
    optimizer.step()


def kept_step(model: Any, optimizer: Any, batch: dict[str, torch.Tensor]) -> None:
    """Train one step whose gradients are dropped after it."""
    out = model(**batch)
    out.loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def one_loop(model: Any, optimizer: Any, batch: dict[str, torch.Tensor], count: int, steps: str) -> None:
    """Train as many steps as a text says, in one loop, so that the outputs of each live until the next are there."""
    for _ in range(count):
        if "zero_grad before forward" in steps:
            optimizer.zero_grad(set_to_none=True)
        out = model(**batch)
        if "zero_grad after forward" in steps:
            optimizer.zero_grad(set_to_none=True)
        out.loss.backward()
        optimizer.step()
        if "zero_grad after step" in steps:
            optimizer.zero_grad(set_to_none=True)


@contextmanager
def attention_of(text: str) -> Iterator[None]:
    """Let attention choose among the kernels that the row names."""
    with ExitStack() as stack:
        if "efficient_attention" in text:
            stack.enter_context(sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION))
            stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", _repeated(F)))
        yield


@contextmanager
def transformers_of(row: dict[str, Any]) -> Iterator[None]:
    """Run transformers with the cache of a row's version: before 4.54 it took keys and values as they are.

    Its attention then made copies of them that lie in one piece. OPT had an attention of its own, which did so before.
    """
    from transformers.cache_utils import DynamicLayer
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    version = str((row.get("stack") or {}).get("transformers") or "")
    numbers = [int(part) for part in version.split(".")[:2] if part.isdigit()]
    if not numbers or tuple(numbers) >= (4, 54) or row["config"]["arch"] == "OPTForCausalLM":
        yield
        return
    later, attend = DynamicLayer.update, ALL_ATTENTION_FUNCTIONS["sdpa"]

    def update(self: Any, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.is_initialized:
            return later(self, keys, values, *args, **kwargs)
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values
        return keys, values

    def in_one_piece(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return attend(module, q.contiguous(), k.contiguous(), v.contiguous(), *args, **kwargs)

    with (
        mock.patch.object(DynamicLayer, "update", update),
        mock.patch.dict(AttentionInterface._global_mapping, {"sdpa": in_one_piece}),
    ):
        yield


def _repeated(functional: Any) -> Callable[..., torch.Tensor]:
    """Repeat grouped keys and values for each head, as the published script does."""
    original = functional.scaled_dot_product_attention

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if (groups := q.size(-3) // k.size(-3)) > 1:
            k, v = k.repeat_interleave(groups, dim=-3), v.repeat_interleave(groups, dim=-3)
            kwargs.pop("enable_gqa", None)
        result: torch.Tensor = original(q, k, v, *args, **kwargs)
        return result

    return attend
