"""Hold some heads and some inner columns of every layer on each rank; pay four sums of all activations in each layer.

The weights of queries, keys, values and of the feed's inner width are parted by columns, those behind them by rows;
each rank computes its share for the whole batch, and the shares are summed. Peak of a rank: 16 / R bytes per parameter
of the layers, 1 / R of what attention and feed save; hidden states, norms, embedding and head are whole, and so is the
batch. The heads must be multiples of the ranks, in torch those of keys as well. It does not go with what divides the
batch. (Megatron-LM: Shoeybi et al., 2019, arXiv:1909.08053.)
"""

from typing import Any

from harness import Parts

COLUMNS, ROWS = ("wq", "wk", "wv", "gate", "up"), ("wo", "down")
DIM = {**dict.fromkeys(COLUMNS, 1), **dict.fromkeys((f"b{name}" for name in COLUMNS), 0), **dict.fromkeys(ROWS, 0)}
"""The dimension by which a parameter of a layer is parted."""


def refuse_added(known: bool, value: Any) -> None:
    """Refuse a matrix that a strategy adds beside those of the model, and one that it has packed."""
    if not known or isinstance(value, dict):
        raise ValueError(
            "tensor_parallel and megatron_sequence_parallel divide the model's own matrices: beside lora or qlora take "
            "fsdp, or leave out the adapters"
        )


def on_torch(parts: Parts) -> Parts:
    from strategies.sharding.tensor_parallel._torch import tensor_parallel

    return tensor_parallel(parts)


def on_jax(parts: Parts) -> Parts:
    from strategies.sharding.tensor_parallel._jax import tensor_parallel

    return tensor_parallel(parts)
