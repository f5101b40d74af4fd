"""Hold some heads and some inner columns of every layer on each rank; pay four sums of all activations in each layer.

The weights of queries, keys, values and of the feed's inner width are parted by columns, those behind them by rows;
each rank computes its share for the whole batch, and the shares are summed. Peak of a rank: 16 / R bytes per parameter
of the layers, 1 / R of what attention and feed save; hidden states, norms, embedding and head are whole, and so is the
batch. The heads must be multiples of the ranks. It does not go with what divides the batch. (Megatron-LM: Shoeybi et
al., 2019, arXiv:1909.08053.)
"""

from dataclasses import replace
from typing import Any

from harness import Parts, tree

COLUMNS, ROWS = ("wq", "wk", "wv", "gate", "up"), ("wo", "down")
DIM = {**dict.fromkeys(COLUMNS, 1), **dict.fromkeys((f"b{name}" for name in COLUMNS), 0), **dict.fromkeys(ROWS, 0)}
"""The dimension by which a parameter of a layer is parted."""


def in_torch(parts: Parts) -> Parts:
    import torch
    import torch.distributed as dist

    from strategies.sharding import on_torch as ranks

    inner_draw, inner_mix, inner_feed, inner_gather = parts.draw, parts.mix, parts.feed, parts.gather

    def draw(parts: Parts, name: str, shape: tuple[int, ...], deviation: float) -> Any:
        value, R = inner_draw(parts, name, shape, deviation), dist.get_world_size()
        dim = DIM.get(name.rpartition(".")[2]) if name.startswith("layers.") else None
        if dim is None:
            return value
        if value.shape != shape:
            raise ValueError("tensor_parallel parts what another strategy has parted already: leave out one of the two")
        size = -(-shape[dim] // R)  # columns of nothing add nothing, and stay nothing
        return ranks.filled(value, size * R, dim, 0).chunk(R, dim)[dist.get_rank()].clone()

    def on_first(p: Any, bias: str) -> Any:
        """Let one rank add what is to be added once."""
        return {**p, bias: p[bias] * float(dist.get_rank() == 0)} if bias in p else p

    def checked(parts: Parts) -> Any:
        shape, R = parts.shape, dist.get_world_size()
        if getattr(parts.share, "fineness", 0) > 0:
            raise ValueError("tensor_parallel needs the whole batch on every rank: leave out what divides the batch")
        if shape.heads % R or shape.key_heads % R:
            raise ValueError(
                f"tensor_parallel gives each of {R} ranks as many of {shape.heads} heads and of {shape.key_heads} for "
                "keys and values: take a divisor of both"
            )
        heads = {"heads": shape.heads // R, "kv_heads": shape.key_heads // R, "head_width": shape.head}
        return replace(parts, shape=shape.model_copy(update=heads))

    def mix(parts: Parts, p: Any, x_BTD: Any) -> Any:
        return ranks.over_ranks(inner_mix(checked(parts), on_first(p, "bwo"), x_BTD))

    def feed(parts: Parts, p: Any, x_BTD: Any) -> Any:
        return ranks.over_ranks(inner_feed(parts, on_first(p, "bdown"), x_BTD))

    def gather(parts: Parts, params: Any) -> Any:
        def made(name: str, value: Any, size: Any) -> Any:
            dim = DIM.get(name.rpartition(".")[2]) if name.startswith("layers.") else None
            if dim is None or value.shape == size:
                return value
            whole = ranks.all_gather(value.detach().movedim(dim, 0)).movedim(0, dim)
            return torch.narrow(whole, dim, 0, size[dim])

        return inner_gather(parts, tree.mapped(made, tree.names(params), params, ranks.sized(parts, params)))

    return replace(parts, draw=draw, mix=mix, feed=feed, gather=gather, **ranks.dividing(parts, ranks.for_all))


def in_jax(parts: Parts) -> Parts:
    from strategies.sharding import on_jax

    return on_jax.tensor_parallel(parts)
