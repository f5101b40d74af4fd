"""Configurations of decoders: those that were published with well-known models, and those in a `config.json`.

`published.json` has the values of the files that lie beside the weights, and where. Nothing here needs transformers:
the process that reads a suite has no framework.
"""

import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from harness.contract.plugins import nearest

PUBLISHED = Path(__file__).with_name("published.json")
Values = dict[str, Any]
NAMES = {
    "hidden_size": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
}
"""Sizes that every decoder has, by the name that most give them, with those of the others."""
OF_THE_ARCHITECTURE = ("num_attention_heads", "vocab_size", "max_position_embeddings")
"""Those of them that files leave out where they are the architecture's usual ones."""
BOUNDS = {
    "hidden_size": 1 << 20,
    "num_hidden_layers": 1000,
    "num_attention_heads": 1 << 16,
    "vocab_size": 1 << 22,
    "max_position_embeddings": 1 << 26,
}
OPTIONAL = ("num_key_value_heads", "head_dim", "intermediate_size", "moe_intermediate_size", "sliding_window")
"""Sizes that not every decoder has."""
SIZES = (*(name for names in NAMES.values() for name in names), *OPTIONAL)
"""Names of all of them."""
MOST = 1 << 26
"""The largest that one of them can be."""
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_USED = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k")
"""Names of how many experts a layer has, and of how many a token goes to."""
OF_NO_USE = ("torch_dtype", "dtype", "quantization_config", "auto_map", "architectures", "_name_or_path")
"""Keys of a file that say how weights are stored, which are never read."""
BY_LAYER = (
    "layer_types",
    "mlp_layer_types",
    "no_rope_layers",
    "layers_block_type",
    "attention_layers",
    "hybrid_override_pattern",
)
"""Keys whose values are lists, or strings, with an entry for each layer."""


@cache
def published() -> dict[str, dict[str, Any]]:
    """Return the configurations that ship with the harness by name, each with `config` and `source`."""
    table: dict[str, dict[str, Any]] = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    return table


def named(name: str) -> str | None:
    """Return the published configuration that a name means: its own, or that of its repository on the Hub."""
    sources = {entry["source"].lower(): known for known, entry in published().items()}
    return name if name in published() else sources.get(name.lower())


def read(config: str | Values) -> Values:
    """Return the values of a published name, of a `config.json` or its folder, or those given; of a model with
    several parts those of its text decoder.

    Raises ValueError for a name or file that is not there, and for values that describe no decoder.
    """
    if isinstance(config, str):
        return dict(published()[config]["config"]) if config in published() else _text(_of_file(config), config)
    return _text(config, "the configuration")


def _of_file(path: str) -> Values:
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file() and (
        file.name == "config.json" or path.endswith(".json") or path.startswith(("/", ".", "~"))
    ):
        raise ValueError(f"there is no file '{file}': give the config.json of a model, or a published name")
    if not file.is_file():
        hint = nearest(named(path) or path, published())
        raise ValueError(f"there is no published configuration and no file '{path}'{hint}")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"'{path}' cannot be read as JSON ({error}): give the config.json of a model") from None
    if not isinstance(values, dict):
        raise ValueError(f"'{path}' holds no JSON object: give the config.json of a model")
    return values


def _text(values: Values, name: str) -> Values:
    inner = values.get("text_config")
    values = inner if isinstance(inner, dict) else values
    values = {key: value for key, value in values.items() if key not in OF_NO_USE}
    if not isinstance(values.get("model_type"), str):
        raise ValueError(f"{name} has no model_type: add the one of its architecture, such as llama")
    values = _usual(values) | _counted(values) | values
    _demand_sizes(values, name)
    return values


def _demand_sizes(values: Values, name: str) -> None:
    """Raise ValueError where a size is missing or absurd, or sizes do not fit each other."""
    for size in BOUNDS:
        of(values, size, name)
    if absurd := [
        size
        for size in OPTIONAL
        if isinstance(values.get(size), int | float | str) and not (is_size(values[size]) and values[size] <= MOST)
    ]:
        raise ValueError(f"{name} has a {absurd[0]} of {values[absurd[0]]!r}: give a whole number from 1 to {MOST}")
    if strange := [key for key, value in values.items() if isinstance(value, float) and not math.isfinite(value)]:
        raise ValueError(f"{name} has a {strange[0]} of {values[strange[0]]}: give a number")
    _demand_experts(values, name)
    if isinstance(shared := values.get("num_key_value_heads"), int) and of(values, "num_attention_heads") % shared:
        raise ValueError(
            f"{name} has {of(values, 'num_attention_heads')} heads and a num_key_value_heads of {shared}: "
            "give a number that divides the heads"
        )
    if (
        isinstance(share := values.get("partial_rotary_factor"), int | float)
        and (
            turned := int(
                (values.get("head_dim") or of(values, "hidden_size") // of(values, "num_attention_heads")) * share
            )
        )
        % 2
    ):
        raise ValueError(
            f"{name} turns {turned} numbers of a head, by its partial_rotary_factor of {share}, and they are turned in "
            "pairs: give sizes by which they are an even number"
        )


def _demand_experts(values: Values, name: str) -> None:
    """Raise ValueError where a token would go to more experts than there are."""
    used = next((key for key in EXPERTS_USED if is_size(values.get(key))), None)
    count = next((key for key in EXPERTS if type(values.get(key)) is int), None)
    if used is not None and count is not None and values[used] > values[count]:
        raise ValueError(
            f"{name} has a {used} of {values[used]} and a {count} of {values[count]}: give at most as many as there are"
        )


def _counted(values: Values) -> Values:
    """Return the number of layers where only a list of their kinds says it."""
    if any(name in values for name in NAMES["num_hidden_layers"]):
        return {}
    kinds = next((values[name] for name in BY_LAYER if isinstance(values.get(name), list | str)), ())
    return {"num_hidden_layers": len(kinds)} if kinds else {}


def _usual(values: Values) -> Values:
    """Return the sizes that a file leaves out and transformers, where it is installed, takes for its architecture.

    Those that follow from others, as that of a head often does, follow from the file's.
    """
    missing = [size for size in OF_THE_ARCHITECTURE if not any(name in values for name in NAMES[size])]
    if not missing:
        return {}
    try:
        from transformers import CONFIG_MAPPING

        architecture = CONFIG_MAPPING[values["model_type"]]
        usual = architecture().to_dict()
        filled = architecture(**{name: values[name] for name in SIZES if is_size(values.get(name))}).to_dict()
    except Exception:
        return {}  # it is not installed, or knows no usual sizes of this architecture
    if "num_attention_heads" in missing and not any(name in usual for name in NAMES["num_attention_heads"]):
        raise ValueError(
            f"the architecture '{values['model_type']}' has no attention heads: a decoder that can be cut attends in "
            "some of its layers"
        )
    if (
        "num_attention_heads" not in missing
        and "num_key_value_heads" not in values
        and isinstance(usual.get("num_key_value_heads"), int)
        and values[key(values, "num_attention_heads")] != usual.get("num_attention_heads")
    ):
        raise ValueError(
            f"the configuration has no num_key_value_heads and not the heads that are usual for its architecture, "
            f"'{values['model_type']}': add it"
        )
    also = (name for name in ("num_key_value_heads", "head_dim") if name not in values)
    sizes = {name: filled.get(key(filled, name)) for name in missing} | {name: filled.get(name) for name in also}
    if not any(name in filled for name in NAMES["max_position_embeddings"]):
        sizes["max_position_embeddings"] = BOUNDS["max_position_embeddings"]  # any distance is as good (ALiBi)
    return {name: size for name, size in sizes.items() if isinstance(size, int)}


def key(values: Mapping[str, Any], size: str) -> str:
    """Return the name under which these values have a size; the usual one where they do not have it."""
    return next((name for name in NAMES[size] if name in values), size)


def number(values: Mapping[str, Any], key: str) -> float:
    """Return a number that a configuration may have, 0 where it has none. Raises ValueError for what is no number."""
    value = values.get(key) or 0.0
    if not isinstance(value, int | float):
        raise ValueError(f"the configuration has a {key} of {value!r}: give a number")
    return float(value)


def of(values: Mapping[str, Any], size: str, name: str = "the configuration") -> int:
    """Return a size. Raises ValueError where it is missing or absurd."""
    value = values.get(key(values, size))
    if value is None:
        raise ValueError(f"{name} has no {size}: add it, if it is a decoder; no other model can be cut")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= BOUNDS[size]:
        raise ValueError(f"{name} has a {key(values, size)} of {value!r}: give a whole number from 1 to {BOUNDS[size]}")
    return value


def changed(values: Values, changes: Mapping[str, Any]) -> Values:
    """Return the values with some replaced. Raises ValueError for a key that they do not have, and for absurd sizes."""
    for name in changes:
        if name not in values:
            raise ValueError(f"changes: the configuration has no '{name}'{nearest(name, values)}")
    replaced = {**values, **changes}
    _demand_sizes(replaced, "the configuration with its changes")
    return replaced


def is_size(value: Any) -> bool:
    """Check whether a value is a whole number from 1 on."""
    return type(value) is int and value > 0
