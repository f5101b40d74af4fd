"""Keep parameters, gradients and moments in bfloat16 and round updates at random; pay with noise instead of losses.

Peak: 8 bytes for each parameter under AdamW as in plain bfloat16, without a float32 copy; in the update float32 slices
of 256 Ki elements, of larger parameters of a sixteenth, 4 Mi at most, since less keeps no GPU busy; in JAX those of a
layer's whole matrix. A value between two neighbours is rounded up with a probability equal to its distance from the
lower one, so that the mean over many steps is right. Rounding to nearest would lose every update below 1/256 of a
weight, and the second moment would never decay. The random bits follow from `seed`, the step, the name of the parameter
and where in its memory an update begins, so a run can be repeated. What is wider, as adapters are, is not rounded.
Parts of a parameter on several ranks may get the same bits, and in JAX layers that are updated one by one do. Source:
Zamirai et al., 2021, arXiv:2010.06192.
"""

import zlib
from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl, tree
from strategies.precision import bfloat16

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8
SLICE, LARGEST = 1 << 18, 1 << 22


def on_torch(parts: Parts, seed: int = 0) -> Parts:
    import torch

    def rounded(wide: Any, bits: Any) -> Any:
        """Round float32 to bfloat16: add random bits below the last that stays, and cut them off. NaN stays."""
        noise = torch.randint(0, 1 << 16, wide.shape, dtype=torch.int32, device=wide.device, generator=bits)
        narrow = noise.add_(wide.view(torch.int32)).bitwise_and_(-1 << 16).view(torch.float32)
        return narrow.masked_fill_(wide.isnan(), torch.nan)

    @torch.no_grad()
    def update(parts: Parts, state: Any, grads: Any) -> Any:
        steps = state["steps"] + 1
        rate, decay = parts.shape.learning_rate, parts.shape.weight_decay
        if state["moments"] is None:
            state["moments"] = tree.mapped(lambda p: [torch.zeros_like(p), torch.zeros_like(p)], state["params"])

        def move(p: Any, name: str, g: Any, moments: list[Any]) -> None:
            key = f"{seed} {steps} {name} {p.storage_offset()}"  # slices of one tensor come one by one
            bits = torch.Generator(p.device).manual_seed(zlib.crc32(key.encode()))
            arrays = [torch.atleast_1d(each) for each in (p, g, *moments)]
            elements = min(max(SLICE, p.numel() // 16), LARGEST)
            rows = max(1, elements * len(arrays[0]) // p.numel())
            for p_, g_, m_, v_ in zip(*(each.split(rows) for each in arrays), strict=True):
                g_ = g_.to(torch.float32)
                m = m_.to(torch.float32).lerp_(g_, 1 - BETA_1)
                v = v_.to(torch.float32).mul_(BETA_2).addcmul_(g_, g_, value=1 - BETA_2)
                scale = (v / (1 - BETA_2**steps)).sqrt_().add_(EPSILON)
                wide = p_.to(torch.float32).mul_(1 - rate * decay)
                wide.addcdiv_(m, scale, value=-rate / (1 - BETA_1**steps))
                for narrow, exact in ((p_, wide), (m_, m), (v_, v)):
                    narrow.copy_(rounded(exact, bits) if narrow.dtype == torch.bfloat16 else exact)

        tree.mapped(move, state["params"], tree.names(state["params"]), grads, state["moments"])
        return {**state, "steps": steps}

    return replace(bfloat16.on_torch(parts), update=update)


def on_jax(parts: Parts, seed: int = 0) -> Parts:
    import jax
    import jax.numpy as jnp

    def rounded(wide: Any, key: Any) -> Any:
        """Round float32 to bfloat16: add random bits below the last that stays, and cut them off. NaN stays."""
        noise = jax.random.bits(key, wide.shape, jnp.uint16).astype(jnp.uint32)
        bits = (jax.lax.bitcast_convert_type(wide, jnp.uint32) + noise) & jnp.uint32(0xFFFF0000)
        narrow = jax.lax.bitcast_convert_type(bits, jnp.float32)
        return jnp.where(jnp.isnan(wide), wide, narrow).astype(jnp.bfloat16)

    def update(parts: Parts, state: Any, grads: Any) -> Any:
        steps = state["steps"] + 1
        count = steps.astype(jnp.float32)
        rate, decay = parts.shape.learning_rate, parts.shape.weight_decay
        of_step = jax.random.fold_in(jax.random.key(seed), steps)

        def move(p: Any, g: Any, m: Any, v: Any, key: Any) -> Any:
            dtypes = [each.dtype for each in (p, m, v)]
            g, m, v, wide = (each.astype(jnp.float32) for each in (g, m, v, p))
            m = m + (1 - BETA_1) * (g - m)
            v = BETA_2 * v + (1 - BETA_2) * g * g
            scale = jnp.sqrt(v) / jnp.sqrt(1 - BETA_2**count) + EPSILON
            wide = wide * (1 - rate * decay) - rate / (1 - BETA_1**count) * (m / scale)
            keys = jax.random.split(key, 3)
            stored = zip((wide, m, v), keys, dtypes, strict=True)
            return tuple(rounded(each, of) if dtype == jnp.bfloat16 else each for each, of, dtype in stored)

        def leaf(p: Any, name: str, g: Any, m: Any, v: Any) -> Any:
            if not p.ndim:
                return tuple(each[0] for each in leaf(p[None], name, g[None], m[None], v[None]))
            key = jax.random.fold_in(of_step, zlib.crc32(name.encode()))
            rows = min(len(p), max(1, SLICE * len(p) // p.size))  # a layer is a row of its stack

            def turn(start: Any, size: int, arrays: Any) -> Any:
                p, m, v, of = (jax.lax.dynamic_slice_in_dim(each, start, size) for each in (*arrays, g))
                new = move(p, of, m, v, jax.random.fold_in(key, start))
                return tuple(
                    jax.lax.dynamic_update_slice_in_dim(each, value.astype(each.dtype), start, 0)
                    for each, value in zip(arrays, new, strict=True)
                )

            whole = len(p) // rows
            arrays = jax.lax.fori_loop(0, whole, lambda at, arrays: turn(at * rows, rows, arrays), (p, m, v))
            return turn(whole * rows, len(p) % rows, arrays) if len(p) % rows else arrays

        moved = tree.mapped(leaf, state["params"], tree.names(state["params"]), grads, state["first"], state["second"])
        params, first, second = (tree.mapped(lambda _, new, i=i: new[i], state["params"], moved) for i in range(3))
        return {**state, "params": params, "first": first, "second": second, "steps": steps}

    return replace(bfloat16.on_jax(parts), update=update)


@hookimpl
def harness_strategies() -> list[Strategy]:
    on = {"torch": on_torch, "jax": on_jax}
    rules = (
        *("adafactor", "adam_4bit", "adam_8bit", "adam_mini", "apollo", "galore", "lion", "lomo", "muon"),
        *("sgd_momentum", "soap", "fused_adamw", "foreach_adamw"),
    )
    return [
        Strategy(
            "bfloat16_stochastic",
            rewrites=("draw", "update"),
            on=on,
            about=__doc__,
            precision="bfloat16",
            conflicts=dict.fromkeys(rules, "it rounds what AdamW updates, and each has an update of its own"),
        )
    ]
