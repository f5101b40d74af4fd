"""Layers in columns and rows, and some tokens between them, in torch."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from harness import Parts
from strategies.sharding._torch import dividing, gathered, in_a_stretch, scattered, tokens_by
from strategies.sharding.shares import TOKENS, in_order
from strategies.sharding.tensor_parallel._torch import in_columns_and_rows


def megatron_sequence_parallel(parts: Parts) -> Parts:
    """Gather all tokens before a part of a layer, and keep of what all ranks add after it the own tokens."""
    inner = parts.add_positions

    def add_positions(parts: Parts, params: Any, x_BTD: Tensor) -> Tensor:
        """Add those of the own tokens: within a layer `positions` are of all."""
        return inner(replace(parts, positions=in_a_stretch), params, x_BTD)

    parts = replace(parts, add_positions=add_positions)
    parts = in_columns_and_rows("megatron_sequence_parallel", parts, _all_tokens, _own_tokens)
    return dividing(parts, tokens_by(in_order), TOKENS)


def _all_tokens(parts: Parts, x_BTD: Tensor) -> Tensor:
    return gathered(x_BTD.transpose(0, 1)).transpose(0, 1)


def _own_tokens(x_BTD: Tensor) -> Tensor:
    return scattered(x_BTD.transpose(0, 1)).transpose(0, 1)
