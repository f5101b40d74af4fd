"""Hold the classifier's rows of a part of the vocabulary on each rank; pay a transfer of all hidden states.

Every rank computes the logits of its words for all tokens, `chunk` rows at a time, and the ranks exchange the largest
logit, the sum of exponentials and the target's logit of each token: three numbers. The logits are computed again in the
backward pass. Where the batch is divided the hidden states of all ranks are gathered first. Peak of a rank: chunk x V /
R logits (in JAX, where a chunk of every rank is gathered, chunk x V), the hidden states of all tokens and their
gradient; 16 / R bytes per parameter of the classifier, and of the embedding where it is the same. (Megatron-LM: Shoeybi
et al., 2019, arXiv:1909.08053.)
"""

from dataclasses import replace
from typing import Any

from harness import IGNORED, Objective, Parts, knobs, tree
from strategies.sharding.shares import WHOLE


def on_torch(parts: Parts, chunk: int = 1024) -> Parts:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    from strategies.sharding import _torch as ranks
    from strategies.sharding.vocabulary_parallel_loss._torch import rows_of, vocabulary_losses

    knobs.above_0("vocabulary_parallel_loss", chunk=chunk)
    inner_draw, inner_embed, inner_gather_parameters = parts.draw, parts.embed, parts.gather_parameters
    tied = getattr(parts.shape, "tied", False)
    classifier = "embed" if tied else "head"

    def is_divided(parts: Parts) -> bool:
        return parts.division.granularity > WHOLE

    def draw(parts: Parts, name: str, shape: tuple[int, ...], deviation: float) -> Any:
        value = inner_draw(parts, name, shape, deviation)
        if name != classifier:
            return value
        if value.shape != shape:  # parted by another strategy
            value = ranks.joined(value, shape)
        return ranks.own_part(ranks.filled(value, rows_of(shape[0]) * dist.get_world_size(), 0, 0)).view(-1, shape[1])

    def embed(parts: Parts, params: Any, x_BT: Any) -> Any:
        """Look up the tokens of all ranks among the own rows, and sum what the ranks have."""
        if not tied:
            return inner_embed(parts, params, x_BT)
        w_rD, divided = params["embed"], is_divided(parts)
        at = (ranks.all_gather(x_BT) if divided else x_BT) - dist.get_rank() * len(w_rD)
        inside = (at >= 0) & (at < len(w_rD))
        rows_BTD = F.embedding(at.clamp(0, len(w_rD) - 1), w_rD) * inside.unsqueeze(-1)
        return parts.add_positions(parts, params, (ranks.scattered if divided else ranks.over_ranks)(rows_BTD))

    def loss(parts: Parts, x_BTD: Any, w_rD: Any, y_BT: Any) -> Any:
        x_nD, y_n = x_BTD.reshape(-1, x_BTD.shape[-1]), y_BT.reshape(-1)
        vocabulary, objective, own = parts.shape.vocabulary, Objective.of(parts.shape), slice(None)
        if is_divided(parts):
            own = slice(dist.get_rank() * len(y_n), (dist.get_rank() + 1) * len(y_n))
            x_nD, all_n = ranks.gathered(x_nD), ranks.all_gather(y_n)
        else:
            all_n = y_n
        losses_n = vocabulary_losses(x_nD, w_rD, all_n, vocabulary, chunk, objective)[own]
        kept_n = y_n != IGNORED
        return torch.where(kept_n, losses_n, 0).sum() / kept_n.sum()

    def gather_parameters(parts: Parts, params: Any) -> Any:
        def made(name: str, value: Any) -> Any:
            whole = name != classifier or value.dim() == 1 or len(value) == parts.shape.vocabulary
            return value if whole else ranks.all_gather(value.detach())[: parts.shape.vocabulary]

        return inner_gather_parameters(parts, tree.mapped(made, tree.names(params), params))

    division = replace(parts.division, over_vocabulary=frozenset({"loss", "embed"} if tied else {"loss"}))
    parts = replace(parts, draw=draw, embed=embed, loss=loss, gather_parameters=gather_parameters, division=division)
    return ranks.dividing(parts, ranks.for_all, WHOLE)


def on_jax(parts: Parts, chunk: int = 1024) -> Parts:
    from strategies.sharding.vocabulary_parallel_loss import _jax

    knobs.above_0("vocabulary_parallel_loss", chunk=chunk)
    return _jax.vocabulary_parallel_loss(parts, chunk)
