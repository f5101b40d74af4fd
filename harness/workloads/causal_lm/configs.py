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
MOST = 1 << 26
"""The largest that one of them can be."""
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_USED = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k")
"""Names of how many experts a layer has, and of how many a token goes to."""
OF_NO_USE = ("torch_dtype", "dtype", "quantization_config", "auto_map", "architectures", "_name_or_path")
"""Keys of a file that say how weights are stored, which are never read."""
SMALL = {
    "hidden_size": 64,
    "n_embd": 64,
    "n_embed": 64,
    "d_model": 64,
    "word_embed_proj_dim": 64,
    "intermediate_size": 80,
    "ffn_dim": 80,
    "n_inner": 80,
    "num_attention_heads": 4,
    "n_head": 4,
    "num_heads": 4,
    "head_dim": 16,
    "rotary_dim": 16,
    "query_pre_attn_scalar": 16,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 48,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "top_k_experts": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_num_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_head_dim": 16,
    "mamba_d_ssm": 128,
    "mamba_n_heads": 4,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_d_state": 16,
    "ssm_state_size": 16,
    "mamba_chunk_size": 16,
    "chunk_size": 16,
}
"""Sizes at which a step costs milliseconds, for the keys that a configuration has, where they are not 0."""
BY_LAYER = (
    "layer_types",
    "mlp_layer_types",
    "no_rope_layers",
    "layers_block_type",
    "attention_layers",
    "hybrid_override_pattern",
)
"""Keys whose values are lists, or strings, with an entry for each layer."""
REPEATED = (
    *BY_LAYER,
    "sliding_window_pattern",
    "full_attention_interval",
    "no_rope_layer_interval",
    "interleave_moe_layer_step",
    "decoder_sparse_step",
    "moe_layer_interval",
    "attn_layer_period",
    "expert_layer_period",
)
"""Keys that say how kinds of layers follow each other: a list or a string of them, or after how many they repeat."""
AT = ("attn_layer_indices",)
"""Keys that list the layers of one kind by their places."""
FIRST = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
"""Keys that say how many layers at the beginning are of another kind than those after them."""
UNWRITTEN: dict[str, Values] = {
    "gemma2": {"sliding_window_pattern": 2},
    "gemma3_text": {"sliding_window_pattern": 6},
    "qwen3_next": {"full_attention_interval": 4},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
    "olmo3": {"sliding_window_pattern": 4},
    "cohere2": {"sliding_window_pattern": 4},
    "exaone4": {"sliding_window_pattern": 4},
    "llama4_text": {"no_rope_layer_interval": 4},
}
"""What transformers takes for such keys where a file of the architecture lacks them."""
ALL_DIFFER = ("diffllama", "minimax")
"""Architectures in which the place of a layer is a number that it computes with."""


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
    return values


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
    """Return the sizes that a file leaves out and transformers, where it is installed, takes for its architecture."""
    missing = [size for size in OF_THE_ARCHITECTURE if not any(name in values for name in NAMES[size])]
    if not missing:
        return {}
    try:
        from transformers import CONFIG_MAPPING

        usual = CONFIG_MAPPING[values["model_type"]]().to_dict()
    except Exception:
        return {}  # it is not installed, or knows no usual sizes of this architecture
    if "num_attention_heads" in missing and not any(name in usual for name in NAMES["num_attention_heads"]):
        raise ValueError(
            f"the architecture '{values['model_type']}' has no attention heads: a decoder that can be cut attends in "
            "some of its layers"
        )
    usual.setdefault("max_position_embeddings", BOUNDS["max_position_embeddings"])  # any distance is as good (ALiBi)
    also = (name for name in ("num_key_value_heads", "head_dim") if name not in values)
    return {name: usual[name] for name in (*missing, *also) if isinstance(usual.get(name), int)}


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
        raise ValueError(f"{name} has no {size}: add it")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= BOUNDS[size]:
        raise ValueError(f"{name} has a {key(values, size)} of {value!r}: give a whole number from 1 to {BOUNDS[size]}")
    return value


def changed(values: Values, changes: Mapping[str, Any]) -> Values:
    """Return the values with some replaced. Raises ValueError for a key that they do not have."""
    for name in changes:
        if name not in values:
            raise ValueError(f"changes: the configuration has no '{name}'{nearest(name, values)}")
    return {**values, **changes}


def with_sizes(values: Values, layers: int, vocabulary: int, soft_cap: float) -> Values:
    """Return the values for so many layers, tokens and another soft cap; what is listed by layer follows."""
    count = of(values, "num_hidden_layers")
    values = {**values, key(values, "num_hidden_layers"): layers, "vocab_size": vocabulary}
    if "final_logit_softcapping" in values:
        values["final_logit_softcapping"] = soft_cap or None
    for name, kinds in values.items():
        if isinstance(kinds, str) and kinds and name in BY_LAYER:
            values[name] = "".join(kinds[at % len(kinds)] for at in range(layers))
        elif isinstance(kinds, list) and kinds and name not in AT and (name in BY_LAYER or len(kinds) == count):
            values[name] = [kinds[at % len(kinds)] for at in range(layers)]
    if isinstance(own := values.get("per_layer_config"), dict):  # Gemma 4: what layers have in place of others' values
        own = {int(at): differs for at, differs in own.items() if str(at).isdigit()}
        values["per_layer_config"] = {at: own[at % count] for at in range(layers) if at % count in own}
    if "attention_types" in values and "attention_layers" in values:  # GPT-Neo: the same, as lists that are repeated
        values["attention_types"] = [[values["attention_layers"], 1]]
    for name, other in (("pad_token_id", None), ("bos_token_id", 0), ("eos_token_id", 0)):
        token = values.setdefault(name, other)  # what an architecture takes by itself may lie beyond the vocabulary
        if isinstance(token, list) or (isinstance(token, int) and token >= vocabulary):
            values[name] = other
    return values


def period(values: Mapping[str, Any]) -> int:
    """Return after how many layers every kind of layer was there that the values tell apart."""
    values = {**UNWRITTEN.get(values["model_type"], {}), **values}
    count = of(values, "num_hidden_layers")
    if values["model_type"] in ALL_DIFFER:
        return count
    kinds = [_kind(values, at) for at in range(count)]
    return max(kinds.index(kind) for kind in kinds) + 1


def _kind(values: Mapping[str, Any], at: int) -> list[Any]:
    """Return what the values say about the kind of a layer."""
    kind: list[Any] = [at < first for first in map(values.get, FIRST) if isinstance(first, int)]
    kind += [at in places for places in map(values.get, AT) if isinstance(places, list)]
    for rule in map(values.get, REPEATED):
        if isinstance(rule, list | str) and rule:
            kind.append(rule[at % len(rule)])
        elif isinstance(rule, int) and rule > 0:
            kind.append(at % rule)
    return kind


def is_size(value: Any) -> bool:
    """Check whether a value is a whole number from 1 on."""
    return type(value) is int and value > 0


def small(values: Mapping[str, Any], tokens: int) -> Values:
    """Return what to change for sizes at which a step costs milliseconds; windows that bind at `tokens` still do."""
    changes: Values = {name: size for name, size in SMALL.items() if is_size(values.get(name))}
    if "qk_rope_head_dim" in values:  # what turns of a head has a width of its own, and head_dim is that
        changes.pop("head_dim", None)
    heads = of(values, "num_attention_heads")
    if isinstance(groups := values.get("num_key_value_heads"), int):
        changes["num_key_value_heads"] = 4 if groups == heads else 2
    for groups_of_states in ("mamba_n_groups", "n_groups"):
        if is_size(values.get(groups_of_states)):
            changes[groups_of_states] = min(values[groups_of_states], 2)
    if "mamba_d_head" in values:  # the heads of a state space are as wide as what they share out
        inner = SMALL["mamba_d_ssm"] if values.get("mamba_d_ssm") else values["mamba_expand"] * SMALL["hidden_size"]
        changes["mamba_d_head"] = inner // SMALL["mamba_n_heads"]
    window = values.get("sliding_window")
    if isinstance(window, int):
        changes["sliding_window"] = 16 if window < tokens else 1 << 12
    head = values.get("head_dim") or of(values, "hidden_size") // heads
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := values.get(name), dict):
            changes[name] = rope | {
                factors: rope[factors][: len(rope[factors]) * SMALL["head_dim"] // head]
                for factors in ("short_factor", "long_factor")
                if isinstance(rope.get(factors), list)
            }
    return changes
