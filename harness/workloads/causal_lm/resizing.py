"""A configuration at other sizes: with fewer layers, another vocabulary, or so small that a step costs milliseconds.

Every kind of layer stays, by what the values list by layer and by the rules after which kinds repeat.
"""

from collections.abc import Mapping
from typing import Any

from harness.workloads.causal_lm.configs import BY_LAYER, Values, is_size, key, of

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
