"""The untouched parts of a network over frames in JAX: the decoder's, with other ways to mix."""

from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from harness.contract.parts import ABSENT, Parts
from harness.contract.place import Place
from harness.workloads.data import rows
from harness.workloads.decoder import _jax as decoder
from harness.workloads.decoder._jax import at_least_float32
from harness.workloads.temporal import CONVOLVED, Shape


def embed(parts: Parts, params: dict[str, Any], x_BTF: Any) -> Any:
    """Project each frame to the width of the network, in the type of the parameters."""
    return x_BTF.astype(params["embed"].dtype) @ params["embed"]


def mix(parts: Parts, p: dict[str, Any], x_BTD: Any) -> Any:
    """Mix the frames by a recurrence that begins with zeros."""
    return parts.recur(parts, p, x_BTD, None)[0]


def lstm(parts: Parts, p: dict[str, Any], x_BTD: Any, carried: Any) -> tuple[Any, Any]:
    """Run an LSTM over the frames; gates are in the order of torch: input, forget, cell, output."""

    def tick(carry: tuple[Any, Any], gates_BG: Any) -> tuple[tuple[Any, Any], Any]:
        h_BD, c_BD = carry
        i, f, g, o = jnp.split(gates_BG + h_BD @ p["wh"].T + p["bh"], 4, -1)
        c_BD = jax.nn.sigmoid(f) * c_BD + jax.nn.sigmoid(i) * jnp.tanh(g)
        h_BD = jax.nn.sigmoid(o) * jnp.tanh(c_BD)
        return (h_BD, c_BD), h_BD

    zeros_BD = jnp.zeros_like(x_BTD[:, 0])
    return over_frames(tick, carried or (zeros_BD, zeros_BD), x_BTD @ p["wx"].T + p["bx"])


def gru(parts: Parts, p: dict[str, Any], x_BTD: Any, carried: Any) -> tuple[Any, Any]:
    """Run a GRU over the frames; gates are in the order of torch: reset, update, new."""

    def tick(h_BD: Any, gates_BG: Any) -> tuple[Any, Any]:
        r_x, z_x, n_x = jnp.split(gates_BG, 3, -1)
        r_h, z_h, n_h = jnp.split(h_BD @ p["wh"].T + p["bh"], 3, -1)
        new_BD = jnp.tanh(n_x + jax.nn.sigmoid(r_x + r_h) * n_h)
        h_BD = new_BD + jax.nn.sigmoid(z_x + z_h) * (h_BD - new_BD)
        return h_BD, h_BD

    first_BD = jnp.zeros_like(x_BTD[:, 0]) if carried is None else carried
    return over_frames(tick, first_BD, x_BTD @ p["wx"].T + p["bx"])


def over_frames(tick: Any, first: Any, x_BTG: Any) -> tuple[Any, Any]:
    """Scan over the second dimension; return what each tick gives, along it, and what the last one carries."""
    last, y_TBD = jax.lax.scan(tick, first, jnp.moveaxis(x_BTG, 1, 0))
    return jnp.moveaxis(y_TBD, 0, 1), last


def mamba(parts: Parts, p: dict[str, Any], x_BTD: Any) -> Any:
    """Mix the frames by a selective scan, whose step sizes, inputs and outputs depend on the frame."""
    shape: Shape = parts.shape
    x_BTE, gate_BTE = jnp.split(x_BTD @ p["in_proj"], 2, -1)
    x_BTE = jax.nn.silu(convolve(p, x_BTE))
    low_BTR, b_BTS, c_BTS = jnp.split(x_BTE @ p["x_proj"], [shape.rank, shape.rank + shape.states], -1)
    bias_E = at_least_float32(p["dt_bias"])
    bias_E = bias_E + jnp.asarray(first_bias(shape.channels), bias_E.dtype)
    delta_BTE = jax.nn.softplus(at_least_float32(low_BTR @ p["dt_proj"]) + bias_E)
    log_ES = at_least_float32(p["a_log"])
    a_ES = -jnp.exp(log_ES + jnp.asarray(np.log(np.arange(1, shape.states + 1)), log_ES.dtype))
    y_BTE = parts.scan(parts, x_BTE, delta_BTE, a_ES, b_BTS, c_BTS) + p["skip"] * x_BTE
    return (y_BTE * jax.nn.silu(gate_BTE)) @ p["out_proj"]


def convolve(p: dict[str, Any], x_BTE: Any) -> Any:
    """Convolve each channel with the frames before: a sum of shifted products, as XLA's convolution is slow here."""
    T = x_BTE.shape[1]
    before = jnp.pad(x_BTE, ((0, 0), (CONVOLVED - 1, 0), (0, 0)))
    return sum((before[:, k : k + T] * p["conv"][:, k] for k in range(CONVOLVED)), start=p["conv_bias"])


def first_bias(channels: int) -> Any:
    """Return the biases whose softplus, the first step sizes, lie evenly in logarithm between 0.001 and 0.1."""
    steps = np.exp(np.linspace(np.log(1e-3), np.log(1e-1), channels))
    return steps + np.log(-np.expm1(-steps))


def scan(parts: Parts, x_BTE: Any, delta_BTE: Any, a_ES: Any, b_BTS: Any, c_BTS: Any) -> Any:
    """Compute h_t = exp(delta_t a) h_t-1 + delta_t b_t x_t and y_t = c_t h_t with all states at once, in log depth.

    Decays and states are float32 at the least.
    """
    wide = jnp.promote_types(x_BTE.dtype, jnp.float32)
    delta_BTE, b_BTS, c_BTS = (array.astype(wide) for array in (delta_BTE, b_BTS, c_BTS))
    decay_BTES = jnp.exp(delta_BTE[..., None] * a_ES.astype(wide))
    input_BTES = (delta_BTE * x_BTE)[..., None] * b_BTS[:, :, None]
    _, h_BTES = jax.lax.associative_scan(combine, (decay_BTES, input_BTES), axis=1)
    return jnp.einsum("btes,bts->bte", h_BTES, c_BTS).astype(x_BTE.dtype)


def combine(left: tuple[Any, Any], right: tuple[Any, Any]) -> tuple[Any, Any]:
    """Join two stretches of h -> decay h + input."""
    return right[0] * left[0], right[0] * left[1] + right[1]


def jamba_block(parts: Parts, p: dict[str, Any], x_BTD: Any) -> Any:
    """Apply one group: a selective scan, then the decoder's block with attention as its `mix`."""
    x_BTD = x_BTD + mamba(parts, p, decoder.normalise(parts.shape, x_BTD, p, "mamba_norm"))
    return decoder.block(parts, p, x_BTD)


def transfer(parts: Parts, x: Any, y: Any) -> tuple[Any, Any]:
    """Move a batch to the device, frames as float32 and labels as int32."""
    return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.int32)


def build(shape: Shape, place: Place, corpus: Any, seed: int = 0) -> Parts:
    """Build the untouched parts."""
    parts = decoder.build(cast(Any, shape), place, corpus, seed)
    mixes = {"lstm": mix, "gru": mix, "mamba": mamba}
    return replace(
        parts,
        source=partial(rows.frame_source, seed=seed),
        transfer=transfer,
        embed=embed,
        add_positions=ABSENT,
        mix=mixes.get(shape.network, parts.mix),
        block=jamba_block if shape.network == "jamba" else parts.block,
        recur=gru if shape.network == "gru" else lstm,
        scan=scan,
        outputs_first=lambda name: name.endswith((".wx", ".wh", ".conv")),
    )
