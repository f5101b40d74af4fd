"""The decoder's untouched parts in torch: plain functions over dicts of tensors."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from harness.contract.data import Source
from harness.contract.objective import Objective
from harness.contract.parts import Parts
from harness.contract.place import Place
from harness.contract.toolkit import optimizers, trees
from harness.refusal import Refusal
from harness.workloads import parameters as drawing
from harness.workloads import undivided
from harness.workloads.data import rows
from harness.workloads.decoder import Shape, both
from harness.workloads.whole_run import _torch as whole_run


class RotaryTable:
    """Cosines and sines of rotary angles, made where the inputs are and grown by doubling when a row is longer.

    Angles are computed in float64 and rounded once to the working type, float32 at the least: positions beyond
    256 collide in bfloat16.
    """

    def __init__(self, rotated: int, base: float) -> None:
        self.rotated, self.base = rotated, base
        self.tables: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def __call__(self, positions: tuple[slice, ...], like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin [T, rotated / 2] of these positions, on the device of `like`."""
        tokens = max(each.stop for each in positions)
        key = (like.device, torch.promote_types(like.dtype, torch.float32))
        table = self.tables.get(key)
        if table is None or table.shape[1] < tokens:
            length = 0 if table is None else table.shape[1]
            table = self.tables[key] = self._build(max(tokens, 2 * length), *key)
        if len(positions) == 1:
            return table[0, positions[0]], table[1, positions[0]]
        return torch.cat([table[0, each] for each in positions]), torch.cat([table[1, each] for each in positions])

    def _build(self, length: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        exponents = torch.arange(0, self.rotated, 2, dtype=torch.float64, device=device) / self.rotated
        angles = torch.outer(torch.arange(length, dtype=torch.float64, device=device), self.base**-exponents)
        return torch.stack([angles.cos(), angles.sin()]).to(dtype)


def turn(x_BHTK: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotated: int) -> torch.Tensor:
    """Rotate the first `rotated` dimensions of each head, halves against each other; keep the dtype."""
    a, b, rest = x_BHTK.split([rotated // 2, rotated // 2, x_BHTK.shape[-1] - rotated], -1)
    turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x_BHTK.dtype)
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned


def normalise(shape: Shape, x: torch.Tensor, p: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Normalise the last dimension, in float32 at the least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    weight = p[name].to(wide.dtype)
    if shape.norm == "layer":
        return F.layer_norm(wide, weight.shape, weight, p[f"{name}_bias"].to(wide.dtype), 1e-5).to(x.dtype)
    return F.rms_norm(wide, weight.shape, weight, 1e-6).to(x.dtype)


def rotary(
    table: RotaryTable, parts: Parts, positions: tuple[slice, ...], like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take the angles of these positions from a table."""
    return table(positions, like)


def mix(parts: Parts, p: dict[str, torch.Tensor], x_BTD: torch.Tensor) -> torch.Tensor:
    """Attend with grouped queries and, where the positions are not learned, rotary ones."""
    rotates = parts.shape.positions == "rotary"
    angles = parts.rotary(parts, parts.positions(parts, x_BTD.shape[1]), x_BTD) if rotates else None
    y_BTHK = parts.attend(parts, *projected(parts, p, x_BTD, angles))
    return parts.linear(parts, p, "wo", y_BTHK.flatten(2))


def projected(
    parts: Parts,
    p: dict[str, torch.Tensor],
    x_BTD: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute queries BTHK, keys and values BTGK of a layer, turned by these cosines and sines where there are any."""
    shape: Shape = parts.shape
    B, T, _ = x_BTD.shape

    def heads(name: str, number: int) -> torch.Tensor:
        return parts.linear(parts, p, name, x_BTD).view(B, T, number, shape.head).transpose(1, 2)

    q, k, v = heads("wq", shape.heads), heads("wk", shape.key_heads), heads("wv", shape.key_heads)
    if shape.query_key_norm:
        rms = shape.model_copy(update={"norm": "rms"})
        q, k = normalise(rms, q, p, "query_norm"), normalise(rms, k, p, "key_norm")
    if angles is not None:
        q, k = turn(q, *angles, shape.rotated), turn(k, *angles, shape.rotated)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def attend(parts: Parts, q_BTHK: torch.Tensor, k_BTGK: torch.Tensor, v_BTGK: torch.Tensor) -> torch.Tensor:
    """Attend causally through torch's fused attention."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGK))
    k, v, grouped = shared_heads(parts.place, q, k, v)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)


def shared_heads(
    place: Place, q_BHTK: torch.Tensor, k_BGSK: torch.Tensor, v_BGSK: torch.Tensor, masked: bool = False
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Return keys and values for torch's attention, and whether it is to let groups of queries share them.

    On a GPU no fused kernel of 32 bits can, nor one that takes a mask, but for cuDNN's on some cards: torch would keep
    all scores [B, H, T, S]. So each head gets its own there.
    """
    grouped = k_BGSK.shape[1] < q_BHTK.shape[1]
    fused = q_BHTK.dtype in (torch.float16, torch.bfloat16) and not masked
    if not grouped or place.device != "cuda" or fused:
        return k_BGSK, v_BGSK, grouped
    times = q_BHTK.shape[1] // k_BGSK.shape[1]
    return k_BGSK.repeat_interleave(times, 1), v_BGSK.repeat_interleave(times, 1), False


def feed(parts: Parts, p: dict[str, torch.Tensor], x_BTD: torch.Tensor) -> torch.Tensor:
    """Apply SwiGLU or GELU within each token."""
    up = parts.linear(parts, p, "up", x_BTD)
    inner = F.silu(parts.linear(parts, p, "gate", x_BTD)) * up if parts.shape.feed == "swiglu" else F.gelu(up)
    return parts.linear(parts, p, "down", inner)


def block(parts: Parts, p: dict[str, torch.Tensor], x_BTD: torch.Tensor) -> torch.Tensor:
    """Apply one pre-norm layer."""
    return both.block(normalise, parts, p, x_BTD)


def stack(parts: Parts, ps: list[dict[str, torch.Tensor]], x_BTD: torch.Tensor) -> torch.Tensor:
    """Apply the given layers in order."""
    for p in ps:
        x_BTD = parts.block(parts, p, x_BTD)
    return x_BTD


def for_head(shape: Shape, params: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    """Normalise hidden states for the classifier; where it has a bias, a 1 behind them meets it."""
    x = normalise(shape, x, params, "norm")
    return F.pad(x, (0, 1), value=1.0) if shape.head_bias else x


def embed(parts: Parts, params: dict[str, Any], x_BT: torch.Tensor) -> torch.Tensor:
    """Look up the row of each token, and add that of its position."""
    return parts.add_positions(parts, params, F.embedding(x_BT, params["embed"]))


def add_positions(parts: Parts, params: dict[str, Any], x_BTD: torch.Tensor) -> torch.Tensor:
    """Add the learned vector of each position, where positions are learned; what fills up a row gets the last one."""
    if parts.shape.positions == "rotary":
        return x_BTD
    positions = parts.positions(parts, x_BTD.shape[1])
    at_T = torch.cat([torch.arange(each.start, each.stop, device=x_BTD.device) for each in positions])
    return x_BTD + F.embedding(at_T.clamp(max=len(params["position"]) - 1), params["position"])


def loss(parts: Parts, x_BTD: torch.Tensor, w_VD: torch.Tensor, y_BT: torch.Tensor) -> torch.Tensor:
    """Average the loss of all B T V logits over the tokens that are not ignored."""
    return Objective.of(parts.shape).in_torch(x_BTD.reshape(-1, x_BTD.shape[-1]) @ w_VD.T, y_BT.reshape(-1))


def forward(parts: Parts, params: dict[str, Any], x_BT: torch.Tensor, y_BT: torch.Tensor) -> torch.Tensor:
    """Compute the loss of one batch."""
    return both.forward(for_head, parts, params, x_BT, y_BT)


def grad(parts: Parts, state: dict[str, Any], x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Compute the loss of this rank's share and its gradient for every parameter; sum them over the ranks."""
    x, y, weight = parts.shard_batch(parts, x, y)
    value = forward(parts, both.trained(state, state["params"]), x, y)
    return parts.reduce_gradients(parts, *gradients(value if weight is None else value * weight, state["params"]))


def gradients(value: torch.Tensor, params: Any) -> tuple[torch.Tensor, Any]:
    """Return a loss, and its gradient for every parameter: zeros without memory for one that requires none.

    Raises Refusal where a parameter that does has no part in the loss.
    """
    trained = {name: p for name, p in trees.leaves(params) if p.requires_grad}
    grads = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
    unused = [name for name, grad in zip(trained, grads, strict=True) if grad is None]
    if unused:
        raise Refusal(
            f"the parameter '{unused[0]}' has no part in the loss: use it in the model, or leave it out"
            "; with a strategy, mend what loses its gradient, such as `detach`"
        )
    own = _apart(grads)
    every = (next(own) if p.requires_grad else p.new_zeros(()).expand(p.shape) for p in _values(params))
    return value.detach(), trees.rebuilt(params, every)


def _apart(grads: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield gradients that may each be changed by itself: a copy of what autograd gives twice, as to terms of a sum.

    Parts of one array that lie beside each other, as of matrices that are joined, stay there.
    """
    seen: dict[int, list[range]] = {}
    for grad in grads:
        taken = seen.setdefault(grad.untyped_storage()._cdata, [])
        own = range(grad.storage_offset(), grad.storage_offset() + grad.numel())
        yield grad.clone() if any(own.start < other.stop and other.start < own.stop for other in taken) else grad
        taken.append(own)


@torch.no_grad()
def update(parts: Parts, state: dict[str, Any], grads: Any) -> dict[str, Any]:
    """Apply AdamW in place, tensor by tensor; the moments are made at the first call."""
    shape: Shape = parts.shape
    if state["moments"] is None:
        state["moments"] = trees.mapped(lambda p: [torch.zeros_like(p), torch.zeros_like(p)], state["params"])
    state["steps"] += 1
    tensors = zip(_values(state["params"]), _values(grads), strict=True)
    moments = iter(_values(state["moments"]))
    settings = state["steps"], shape.learning_rate, shape.weight_decay
    for p, g in tensors:
        optimizers.adamw_in_torch(p, g, next(moments), next(moments), *settings)
    return state


def _values(parameters: Any) -> list[torch.Tensor]:
    return [leaf for _, leaf in trees.leaves(parameters)]


def draw(seed: int, parts: Parts, name: str, shape: tuple[int, ...], deviation: float) -> torch.Tensor:
    """Draw the first value of one parameter: on the host, or a large one on the GPU."""
    if drawing.on_device(parts.place, shape, deviation):
        return drawn_on(parts.place.device, drawing.key(name, seed), shape, deviation)
    return torch.from_numpy(drawing.normal(name, shape, deviation, seed)).to(parts.place.device)


def drawn_on(device: str, key: int, shape: tuple[int, ...], deviation: float) -> torch.Tensor:
    """Draw float32 [shape] from a normal distribution where it is to lie."""
    generator = torch.Generator(device).manual_seed(key)
    return torch.empty(shape, device=device).normal_(0.0, deviation, generator=generator)


def init(parts: Parts, source: Source | None = None) -> dict[str, Any]:
    """Make the parameters; the optimizer's moments come with the first update."""
    return {"params": drawn(parts), "moments": None, "steps": 0}


def drawn(parts: Parts) -> dict[str, Any]:
    """Draw all parameters, those of each layer in a dict of its own."""
    shape: Shape = parts.shape
    params: dict[str, Any] = {}
    layers: list[dict[str, torch.Tensor]] = [{} for _ in range(shape.layers)]
    for name, (size, deviation) in shape.parameter_shapes().items():
        if name.startswith("layers."):
            short = name.removeprefix("layers.")
            for index, layer in enumerate(layers):
                layer[short] = trainable(parts.draw(parts, f"layers.{index}.{short}", size, deviation))
        else:
            params[name] = trainable(parts.draw(parts, name, size, deviation))
    return {**params, "layers": layers}


def trainable(drawn: Any) -> Any:
    """Ask for the gradient of a parameter; one that was drawn as several tensors has none."""
    return drawn.requires_grad_() if isinstance(drawn, torch.Tensor) else drawn


def transfer(parts: Parts, x: Any, y: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Move a batch to the device, ids as int64."""
    return ids_on(parts.place, x), ids_on(parts.place, y)


def ids_on(place: Place, ids: Any) -> torch.Tensor:
    """Move ids of any integer type to the device as int64."""
    return torch.as_tensor(ids if isinstance(ids, torch.Tensor) else ids.astype("int64")).to(place.device, torch.int64)


def build(shape: Shape, place: Place, corpus: Any, seed: int = 0) -> Parts:
    """Build the untouched parts."""
    parts = replace(
        rows.data_parts(shape, place, corpus, partial(rows.token_source, seed=seed)),
        transfer=transfer,
        draw=partial(draw, seed),
        init=init,
        embed=embed,
        add_positions=add_positions,
        linear=both.linear,
        rotary=partial(rotary, RotaryTable(shape.rotated, shape.rotary_base)),
        mix=mix,
        attend=attend,
        feed=feed,
        block=block,
        stack=stack,
        loss=loss,
        shard_batch=undivided.shard_batch,
        grad=grad,
        reduce_gradients=undivided.reduce_gradients,
        gather_parameters=undivided.gather_parameters,
        positions=undivided.positions,
        update=update,
        step=both.step,
    )
    return whole_run.with_ending(parts, forward)
