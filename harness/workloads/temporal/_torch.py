"""The untouched parts of a network over frames in torch: the decoder's, with other ways to mix."""

import math
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F

from harness.contract.parts import ABSENT, Parts
from harness.contract.place import Place
from harness.workloads.data import rows
from harness.workloads.decoder import _torch as decoder
from harness.workloads.temporal import CONVOLVED, Shape


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """Widen a half-precision tensor; leave the others."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def embed(parts: Parts, params: dict[str, Any], x_BTF: torch.Tensor) -> torch.Tensor:
    """Project each frame to the width of the network, in the type of the parameters."""
    return x_BTF.to(params["embed"].dtype) @ params["embed"]


def mix(parts: Parts, p: dict[str, torch.Tensor], x_BTD: torch.Tensor) -> torch.Tensor:
    """Mix the frames by a recurrence that begins with zeros."""
    return parts.recur(parts, p, x_BTD, None)[0]


def lstm(parts: Parts, p: dict[str, torch.Tensor], x_BTD: torch.Tensor, carried: Any) -> tuple[torch.Tensor, Any]:
    """Run torch's own LSTM over the frames; gates are in the order input, forget, cell, output."""
    h_1BD, c_1BD = carried or [x_BTD.new_zeros(1, len(x_BTD), parts.shape.width)] * 2
    weights = [p["wx"], p["wh"], p["bx"], p["bh"]]
    y_BTD, *carried = torch.lstm(x_BTD, [h_1BD, c_1BD], weights, True, 1, 0.0, True, False, True)
    return y_BTD, carried


def gru(parts: Parts, p: dict[str, torch.Tensor], x_BTD: torch.Tensor, carried: Any) -> tuple[torch.Tensor, Any]:
    """Run torch's own GRU over the frames; gates are in the order reset, update, new."""
    (h_1BD,) = carried or [x_BTD.new_zeros(1, len(x_BTD), parts.shape.width)]
    weights = [p["wx"], p["wh"], p["bx"], p["bh"]]
    y_BTD, *carried = torch.gru(x_BTD, h_1BD, weights, True, 1, 0.0, True, False, True)
    return y_BTD, carried


def mamba(parts: Parts, p: dict[str, torch.Tensor], x_BTD: torch.Tensor) -> torch.Tensor:
    """Mix the frames by a selective scan, whose step sizes, inputs and outputs depend on the frame."""
    shape: Shape = parts.shape
    x_BTE, gate_BTE = (x_BTD @ p["in_proj"]).chunk(2, -1)
    before_BET = F.pad(x_BTE.mT, (CONVOLVED - 1, 0))
    x_BTE = F.silu(F.conv1d(before_BET, p["conv"][:, None], p["conv_bias"], groups=shape.channels).mT)
    low_BTR, b_BTS, c_BTS = (x_BTE @ p["x_proj"]).split([shape.rank, shape.states, shape.states], -1)
    bias_E = at_least_float32(p["dt_bias"])
    bias_E = bias_E + first_bias(shape.channels, bias_E)
    delta_BTE = F.softplus(at_least_float32(low_BTR @ p["dt_proj"]) + bias_E)
    log_ES = at_least_float32(p["a_log"])
    a_ES = -torch.exp(log_ES + torch.arange(1, shape.states + 1, dtype=log_ES.dtype, device=log_ES.device).log())
    y_BTE = parts.scan(parts, x_BTE, delta_BTE, a_ES, b_BTS, c_BTS) + p["skip"] * x_BTE
    return (y_BTE * F.silu(gate_BTE)) @ p["out_proj"]


def first_bias(channels: int, like: torch.Tensor) -> torch.Tensor:
    """Return the biases whose softplus, the first step sizes, lie evenly in logarithm between 0.001 and 0.1."""
    steps = torch.linspace(math.log(1e-3), math.log(1e-1), channels, dtype=torch.float64, device=like.device).exp()
    return (steps + torch.log(-torch.expm1(-steps))).to(like.dtype)


def scan(
    parts: Parts,
    x_BTE: torch.Tensor,
    delta_BTE: torch.Tensor,
    a_ES: torch.Tensor,
    b_BTS: torch.Tensor,
    c_BTS: torch.Tensor,
) -> torch.Tensor:
    """Compute h_t = exp(delta_t a) h_t-1 + delta_t b_t x_t and y_t = c_t h_t with all states at once, in log depth.

    Decays and states are float32 at the least.
    """
    wide = torch.promote_types(x_BTE.dtype, torch.float32)
    delta_BTE, b_BTS, c_BTS = delta_BTE.to(wide), b_BTS.to(wide), c_BTS.to(wide)
    decay_BTES = torch.exp(delta_BTE[..., None] * a_ES.to(wide))
    input_BTES = (delta_BTE * x_BTE)[..., None] * b_BTS[:, :, None]
    return (states(decay_BTES, input_BTES) @ c_BTS[..., None])[..., 0].to(x_BTE.dtype)


def states(decay_BTES: torch.Tensor, input_BTES: torch.Tensor) -> torch.Tensor:
    """Return all states of h_t = decay_t h_t-1 + input_t: those at odd times from pairs of times, then the others.

    Decays are multiplied and never divided by, so that a product may vanish. `jax.lax.associative_scan` does the same.
    """
    T = decay_BTES.shape[1]
    if T == 1:
        return input_BTES + 0 * decay_BTES  # a row of one frame has a gradient for its decay as well: zero
    even, odd, later = slice(0, T - 1, 2), slice(1, None, 2), slice(2, None, 2)
    at_odd = states(
        decay_BTES[:, odd] * decay_BTES[:, even],
        input_BTES[:, odd] + decay_BTES[:, odd] * input_BTES[:, even],
    )
    at_later = input_BTES[:, later] + decay_BTES[:, later] * at_odd[:, : (T - 1) // 2]
    at_even = torch.cat([input_BTES[:, :1], at_later], 1)
    pairs = torch.stack([at_even[:, : T // 2], at_odd], 2).flatten(1, 2)
    return torch.cat([pairs, at_even[:, -1:]], 1) if T % 2 else pairs


def jamba_block(parts: Parts, p: dict[str, torch.Tensor], x_BTD: torch.Tensor) -> torch.Tensor:
    """Apply one group: a selective scan, then the decoder's block with attention as its `mix`."""
    x_BTD = x_BTD + mamba(parts, p, decoder.normalise(parts.shape, x_BTD, p, "mamba_norm"))
    return decoder.block(parts, p, x_BTD)


def transfer(parts: Parts, x: Any, y: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Move a batch to the device, frames as float32 and labels as int64."""
    frames = x if isinstance(x, torch.Tensor) else torch.from_numpy(np.require(x, np.float32, ["C", "W"]))
    return frames.to(parts.place.device, torch.float32), decoder.ids_on(parts.place, y)


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
