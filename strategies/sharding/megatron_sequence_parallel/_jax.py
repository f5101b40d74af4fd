"""Layers in columns and rows, and some tokens between them, in JAX."""

from dataclasses import replace
from typing import Any

from harness import Parts
from strategies.sharding._jax import all_gather, dividing, positions_by, summed_part, tokens_by
from strategies.sharding.shares import TOKENS, in_order
from strategies.sharding.tensor_parallel._jax import in_columns_and_rows


def megatron_sequence_parallel(parts: Parts) -> Parts:
    """Gather all tokens before a part of a layer, and keep of what all ranks add after it the own tokens."""
    inner = parts.add_positions

    def add_positions(parts: Parts, params: Any, x_BTD: Any) -> Any:
        """Add those of the own tokens: within a layer `positions` are of all."""
        return inner(replace(parts, positions=positions_by(in_order)), params, x_BTD)

    parts = replace(parts, add_positions=add_positions)
    parts = in_columns_and_rows("megatron_sequence_parallel", parts, _all_tokens, _own_tokens)
    return dividing(parts, tokens_by(in_order), TOKENS)


def _all_tokens(parts: Parts, x_BTD: Any) -> Any:
    return all_gather(parts, x_BTD, axis=1)


def _own_tokens(parts: Parts, x_BTD: Any) -> Any:
    return summed_part(parts, x_BTD, axis=1)
