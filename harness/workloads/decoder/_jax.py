"""The decoder's untouched parts in JAX: plain functions over dicts of arrays, the layers stacked and scanned.

An unrolled loop of layers would undo rematerialisation on the CPU: XLA merges the recomputation with the original.
"""

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from harness.contract.data import IGNORED, Source
from harness.contract.objective import Objective
from harness.contract.parts import Parts
from harness.contract.place import Place
from harness.contract.toolkit import mesh, optimizers
from harness.workloads import parameters as drawing
from harness.workloads import undivided
from harness.workloads.data import rows
from harness.workloads.decoder import Shape, both
from harness.workloads.whole_run import _jax as whole_run


def at_least_float32(x: Any) -> Any:
    """Widen a half-precision array; leave the others."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def rotary_table(shape: Shape, positions: Any, like: Any) -> tuple[Any, Any]:
    """Return cos and sin [T, rotated / 2] of these positions, computed on the host in float64 and rounded once."""
    if not isinstance(positions, tuple):  # known on the device alone
        whole = rotary_table(shape, (slice(0, shape.tokens),), like)
        return whole[0][positions], whole[1][positions]
    exponents = np.arange(0, shape.rotated, 2) / shape.rotated
    at_T = np.concatenate([np.arange(each.start, each.stop) for each in positions])
    angles = np.outer(at_T, shape.rotary_base**-exponents)
    dtype = jnp.promote_types(like.dtype, jnp.float32)
    return jnp.asarray(np.cos(angles), dtype), jnp.asarray(np.sin(angles), dtype)


def turn(x_BTHK: Any, cos: Any, sin: Any, rotated: int) -> Any:
    """Rotate the first `rotated` dimensions of each head, halves against each other; keep the dtype."""
    cos, sin = cos[:, None], sin[:, None]
    a, b, rest = jnp.split(x_BTHK, [rotated // 2, rotated], axis=-1)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BTHK.dtype)
    return jnp.concatenate([turned, rest], -1) if rest.shape[-1] else turned


def normalise(shape: Shape, x: Any, p: dict[str, Any], name: str) -> Any:
    """Normalise the last dimension, in float32 at the least."""
    wide = at_least_float32(x)
    weight = p[name].astype(wide.dtype)
    if shape.norm == "layer":
        centred = wide - wide.mean(-1, keepdims=True)
        scaled = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)
        return (scaled * weight + p[f"{name}_bias"].astype(wide.dtype)).astype(x.dtype)
    scaled = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)
    return (scaled * weight).astype(x.dtype)


def rotary(parts: Parts, positions: tuple[slice, ...], like: Any) -> tuple[Any, Any]:
    """Put the angles of these positions into the program, as constants."""
    return rotary_table(parts.shape, positions, like)


def mix(parts: Parts, p: dict[str, Any], x_BTD: Any) -> Any:
    """Attend with grouped queries and, where the positions are not learned, rotary ones."""
    y_BTHK = parts.attend(parts, *projected(parts, p, x_BTD, angles(parts, x_BTD)))
    return parts.linear(parts, p, "wo", y_BTHK.reshape(*x_BTD.shape[:2], -1))


def angles(parts: Parts, x_BTD: Any) -> tuple[Any, Any] | None:
    """Return cosines and sines of the positions of this rank's tokens; none where positions are learned."""
    if parts.shape.positions == "learned":
        return None
    tokens = x_BTD.shape[1]
    cos, sin = parts.rotary(parts, parts.positions(parts, tokens), x_BTD)
    return mesh.own_rows(cos, tokens), mesh.own_rows(sin, tokens)


def projected(parts: Parts, p: dict[str, Any], x_BTD: Any, angles: tuple[Any, Any] | None) -> tuple[Any, Any, Any]:
    """Compute queries BTHK, keys and values BTGK of a layer, turned by these cosines and sines where there are any."""
    shape: Shape = parts.shape
    B, T, _ = x_BTD.shape

    def heads(name: str, number: int) -> Any:
        return parts.linear(parts, p, name, x_BTD).reshape(B, T, number, shape.head)

    q, k, v = heads("wq", shape.heads), heads("wk", shape.key_heads), heads("wv", shape.key_heads)
    if shape.query_key_norm:
        rms = shape.model_copy(update={"norm": "rms"})
        q, k = normalise(rms, q, p, "query_norm"), normalise(rms, k, p, "key_norm")
    if angles is not None:
        q, k = turn(q, *angles, shape.rotated), turn(k, *angles, shape.rotated)
    return q, k, v


def attend(parts: Parts, q_BTHK: Any, k_BTGK: Any, v_BTGK: Any) -> Any:
    """Attend causally through jax.nn.dot_product_attention."""
    if parts.place.device == "cpu" and q_BTHK.dtype == jnp.float16:  # XLA has no such product there
        q, k, v = (x.astype(jnp.float32) for x in (q_BTHK, k_BTGK, v_BTGK))
        return jax.nn.dot_product_attention(q, k, v, is_causal=True).astype(jnp.float16)
    on_gpu = parts.place.device == "cuda"
    implementation: Literal["cudnn", "xla"] = "cudnn" if on_gpu and fits_cudnn(q_BTHK) else "xla"
    return jax.nn.dot_product_attention(q_BTHK, k_BTGK, v_BTGK, is_causal=True, implementation=implementation)


def fits_cudnn(q_BTHK: Any) -> bool:
    """Check whether cuDNN's flash attention takes such heads on every card: 16 bits, and widths like 64 or 128."""
    return q_BTHK.dtype in (jnp.bfloat16, jnp.float16) and q_BTHK.shape[-1] % 8 == 0 and q_BTHK.shape[-1] <= 128


def feed(parts: Parts, p: dict[str, Any], x_BTD: Any) -> Any:
    """Apply SwiGLU or GELU within each token."""
    up = parts.linear(parts, p, "up", x_BTD)
    swiglu = parts.shape.feed == "swiglu"
    inner = jax.nn.silu(parts.linear(parts, p, "gate", x_BTD)) * up if swiglu else jax.nn.gelu(up, approximate=False)
    return parts.linear(parts, p, "down", inner)


def block(parts: Parts, p: dict[str, Any], x_BTD: Any) -> Any:
    """Apply one pre-norm layer."""
    return both.block(normalise, parts, p, x_BTD)


def stack(parts: Parts, ps: dict[str, Any], x_BTD: Any) -> Any:
    """Apply the given layers in order, as a scan over their stacked parameters."""
    return jax.lax.scan(lambda x, p: (parts.block(parts, p, x), None), x_BTD, ps)[0]


def for_head(shape: Shape, params: dict[str, Any], x: Any) -> Any:
    """Normalise hidden states for the classifier; where it has a bias, a 1 behind them meets it."""
    x = normalise(shape, x, params, "norm")
    return jnp.pad(x, (*((0, 0),) * (x.ndim - 1), (0, 1)), constant_values=1) if shape.head_bias else x


def embed(parts: Parts, params: dict[str, Any], x_BT: Any) -> Any:
    """Look up the row of each token, and add that of its position."""
    return parts.add_positions(parts, params, params["embed"][x_BT])


def add_positions(parts: Parts, params: dict[str, Any], x_BTD: Any) -> Any:
    """Add the learned vector of each position, where positions are learned; what fills up a row gets the last one."""
    if parts.shape.positions == "rotary":
        return x_BTD
    tokens = x_BTD.shape[1]
    at = parts.positions(parts, tokens)
    if isinstance(at, tuple):
        at = jnp.concatenate([jnp.arange(each.start, each.stop) for each in at])
    table_TD = params["position"]
    return x_BTD + table_TD[jnp.minimum(mesh.own_rows(at, tokens), len(table_TD) - 1)]


def loss(parts: Parts, x_BTD: Any, w_VD: Any, y_BT: Any) -> Any:
    """Average the loss of all B T V logits over the tokens that are not ignored."""
    y_N = y_BT.reshape(-1)
    losses_N = Objective.of(parts.shape).in_jax(x_BTD.reshape(-1, x_BTD.shape[-1]) @ w_VD.T, y_N)
    return losses_N.sum() / (y_N != IGNORED).sum().astype(losses_N.dtype)


def forward(parts: Parts, params: dict[str, Any], x_BT: Any, y_BT: Any) -> Any:
    """Compute the loss of one batch."""
    return both.forward(for_head, parts, params, x_BT, y_BT)


def grad(parts: Parts, state: dict[str, Any], x: Any, y: Any) -> tuple[Any, Any]:
    """Compute the loss of this rank's share and its gradient for every parameter; sum them over the ranks."""
    x, y, weight = parts.shard_batch(parts, x, y)

    def value(params: dict[str, Any]) -> Any:
        mean = forward(parts, both.trained(state, params), x, y)
        return mean if weight is None else mean * weight

    return parts.reduce_gradients(parts, *jax.value_and_grad(value)(state["params"]))


def update(parts: Parts, state: dict[str, Any], grads: Any) -> dict[str, Any]:
    """Apply AdamW, leaf by leaf."""
    shape: Shape = parts.shape
    steps = state["steps"] + 1
    moved = jax.tree.map(
        partial(optimizers.adamw_in_jax, steps=steps, rate=shape.learning_rate, decay=shape.weight_decay),
        state["params"],
        grads,
        state["first"],
        state["second"],
    )
    params, first, second = jax.tree.transpose(
        jax.tree.structure(state["params"]), jax.tree.structure((0, 0, 0)), moved
    )
    return {**state, "params": params, "first": first, "second": second, "steps": steps}


def draw(seed: int, parts: Parts, name: str, shape: tuple[int, ...], deviation: float) -> Any:
    """Draw the first value of one parameter; those of the layers are stacked, each drawn by its own name."""
    in_layers = name.startswith("layers.")
    short = name.removeprefix("layers.")
    names = [f"layers.{index}.{short}" for index in range(shape[0])] if in_layers else [name]
    one = shape[1:] if in_layers else shape
    if drawing.on_device(parts.place, one, deviation):
        return drawn_there([drawing.key(name, seed) for name in names], one, deviation, in_layers)
    if not in_layers:
        return jnp.asarray(drawing.normal(name, shape, deviation, seed))
    stacked = np.empty(shape, np.float32)
    for index, each in enumerate(names):
        stacked[index] = drawing.normal(each, one, deviation, seed)
    return jnp.asarray(stacked)


def drawn_there(keys: list[int], shape: tuple[int, ...], deviation: float, stacked: bool) -> Any:
    """Draw float32 [shape] from a normal distribution where arrays are made; stacked, one for each key in turn."""
    words = np.array([[key >> 32, key & 0xFFFFFFFF] for key in keys], np.uint32)

    def one(words_2: Any) -> Any:
        return deviation * jax.random.normal(jax.random.wrap_key_data(words_2), shape, jnp.float32)

    return jax.jit(partial(jax.lax.map, one))(words) if stacked else jax.jit(one)(words[0])


def init(parts: Parts, source: Source | None = None) -> dict[str, Any]:
    """Make the parameters and the optimizer's moments: a compiled step needs its whole state from the start."""
    return with_moments(parts, drawn(parts))


def with_moments(parts: Parts, params: Any) -> dict[str, Any]:
    """Put moments of zero, those that are wanted, and a count of no steps beside the parameters."""
    moments = {name: jax.tree.map(jnp.zeros_like, params) for name in sorted(parts.moments)}
    return {"params": params, **moments, "steps": jnp.zeros((), jnp.int32)}


def drawn(parts: Parts) -> dict[str, Any]:
    """Draw all parameters, those of the layers stacked."""
    shape: Shape = parts.shape
    params: dict[str, Any] = {"layers": {}}
    for name, (size, deviation) in shape.parameter_shapes().items():
        if name.startswith("layers."):
            value = parts.draw(parts, name, (shape.layers, *size), deviation)
            params["layers"][name.removeprefix("layers.")] = mesh.on_each(parts.ranks, value)
        else:
            params[name] = mesh.on_each(parts.ranks, parts.draw(parts, name, size, deviation))
    return params


def transfer(parts: Parts, x: Any, y: Any) -> tuple[Any, Any]:
    """Move a batch to the device, ids as int32."""
    return jnp.asarray(x, jnp.int32), jnp.asarray(y, jnp.int32)


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
        rotary=rotary,
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
    return whole_run.with_ending(parts)
