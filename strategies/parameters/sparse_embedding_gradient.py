"""Keep the gradient of the rows that were read in place of the whole embedding's; pay an update in slices.

Peak: B T D numbers instead of V D between the backward pass and the update, and a dense gradient of `rows` rows at a
time while the embedding is updated, after all others. The steps are those of the untouched optimizer, which moves rows
that were not read as well, by their moments and their decay; an optimizer for sparse gradients, such as SparseAdam of
torch, leaves them, and is another rule. So the update must treat each element by itself, as Adam does.
With a tied head every row has a gradient: that model is refused. torch only: JAX compiles the update with the step.
"""

from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl, optimizers, tree

NAME = "embed"


def refuse_others(moments: Any, rows: int) -> None:
    """Refuse moments that do not have a row for each row of what they belong to."""
    if any(each.dim() == 0 or len(each) != rows for each in moments):
        raise ValueError(
            "sparse_embedding_gradient updates some rows at a time, and this optimizer keeps something that is not "
            "in rows: combine it with AdamW, SGD or Lion"
        )


def on_torch(parts: Parts, rows: int = 4096) -> Parts:
    if rows < 1:
        raise ValueError(f"sparse_embedding_gradient: {rows} rows cannot be updated at a time: set rows to 1 or more")
    import torch

    def step(parts: Parts, state: Any, x: Any, y: Any) -> Any:
        if "frozen" in state:
            raise ValueError(
                "sparse_embedding_gradient: the embedding is frozen beside adapters, and has no gradient: leave it out"
            )
        if "head" not in state["params"]:
            raise ValueError(
                "sparse_embedding_gradient: the head is tied to the embedding, so that every row of it has a gradient: "
                "leave this strategy out"
            )
        with torch.no_grad():
            read = parts.embed(replace(parts, add_positions=lambda parts, params, x: x), state["params"], x)
        as_read = {**state, "params": {**state["params"], NAME: read.requires_grad_()}}
        loss, grads = parts.grad(replace(parts, embed=placed), as_read, x, y)
        del as_read, read
        alone, left = dict(optimizers.one_by_one(state)), dict(tree.leaves(grads))
        del grads
        after = {name: parts.update(parts, sub, {name: left.pop(name)}) for name, sub in alone.items() if name != NAME}
        after[NAME] = in_slices(parts, alone[NAME], x.reshape(-1), left.pop(NAME).flatten(0, -2))
        return optimizers.joined(state, after), loss

    def placed(parts: Parts, params: Any, x: Any) -> Any:
        if x.shape != params[NAME].shape[:-1]:
            raise ValueError(
                "sparse_embedding_gradient: the rows that were read are those of the whole batch, and the gradient is "
                "taken of pieces of it, or of a rank's share: leave one of the two out"
            )
        return parts.add_positions(parts, params, params[NAME])

    def in_slices(parts: Parts, state: Any, ids_N: Any, g_ND: Any) -> Any:
        """Update the embedding a few rows at a time, in place; its moments may begin with that."""
        p_VD, moments = state["params"][NAME], state["moments"] and state["moments"][NAME]
        refuse_others(moments or (), len(p_VD))
        after, pieces = state, []
        for start in range(0, len(p_VD), rows):
            p = p_VD.detach()[start : start + rows]
            g = p.new_zeros(len(p) + 1, p.shape[1])  # the last row takes what was read elsewhere
            within = (ids_N >= start) & (ids_N < start + len(p))
            g.index_add_(0, torch.where(within, ids_N - start, len(p)), g_ND)
            of_rows = {NAME: [each[start : start + rows] for each in moments]} if moments else None
            after = parts.update(parts, {**state, "params": {NAME: p}, "moments": of_rows}, {NAME: g[: len(p)]})
            made = (after["moments"] or {NAME: []})[NAME]
            refuse_others(made, len(p))
            pieces.append((p, after["params"][NAME], made))
        moved = all(new is p for p, new, _ in pieces)
        begun = moments or [torch.cat(each) for each in zip(*(made for *_, made in pieces), strict=True)] or None
        whole = p_VD if moved else torch.cat([new for _, new, _ in pieces])
        return {**after, "params": {NAME: whole}, "moments": begun and {NAME: begun}}

    return replace(parts, step=step)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "sparse_embedding_gradient",
            rewrites=("step",),
            calls=("embed", "add_positions", "grad", "update"),  # a decoder: other networks read no rows
            on={"torch": on_torch},
            about=__doc__,
            probe={"rows": 13},
            conflicts={
                "accumulate": "the rows that were read are those of the whole batch, and not of its pieces",
                **dict.fromkeys(
                    ("offloaded_moments", "mapped_moments"),
                    "the embedding's moments begin in slices, which are joined in memory and not where it keeps them",
                ),
                **dict.fromkeys(
                    ("tensor_parallel", "vocabulary_parallel_loss"),
                    "the gradient of the rows that were read is not summed over the ranks",
                ),
                "fsdp": "each rank has a flat part of the embedding, and no rows to read",
            },
        )
    ]
