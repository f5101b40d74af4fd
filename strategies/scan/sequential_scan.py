"""Step a selective scan through time and keep only what the backward pass needs; pay T small steps in a row.

Peak: about 3 B T E S elements, as the decay, the state and the input of each step stay for the backward pass; the
parallel form takes several times that for its pairs of times. Decays and states are float32 at the least. Source: Gu
and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (2023), the reference scan.
"""

from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl


def on_torch(parts: Parts) -> Parts:
    import torch

    def scan(parts: Parts, x_BTE: Any, delta_BTE: Any, a_ES: Any, b_BTS: Any, c_BTS: Any) -> Any:
        a_ES = a_ES.to(torch.promote_types(x_BTE.dtype, torch.float32))
        h_BES = a_ES.new_zeros(len(x_BTE), *a_ES.shape)
        return steps(h_BES, a_ES, x_BTE, delta_BTE, b_BTS, c_BTS)[1].to(x_BTE.dtype)

    return replace(parts, scan=scan)


def steps(h_BES: Any, a_ES: Any, *rows_BT: Any) -> tuple[Any, Any]:
    """Step through x, delta, b and c of all times in torch; return the last state and the outputs [B, T, E]."""
    import torch

    ys = []
    for x_BE, delta_BE, b_BS, c_BS in zip(*(rows.to(a_ES.dtype).unbind(1) for rows in rows_BT), strict=True):
        h_BES = torch.exp(delta_BE[..., None] * a_ES) * h_BES + (delta_BE * x_BE)[..., None] * b_BS[:, None]
        ys.append((h_BES @ c_BS[..., None])[..., 0])
    return h_BES, torch.stack(ys, 1)


def on_jax(parts: Parts) -> Parts:
    import jax
    import jax.numpy as jnp

    def scan(parts: Parts, x_BTE: Any, delta_BTE: Any, a_ES: Any, b_BTS: Any, c_BTS: Any) -> Any:
        wide = jnp.promote_types(x_BTE.dtype, jnp.float32)
        a_ES = a_ES.astype(wide)

        def tick(h_BES: Any, row: Any) -> tuple[Any, Any]:
            return step(h_BES, a_ES, *row)

        rows = tuple(jnp.moveaxis(array.astype(wide), 1, 0) for array in (x_BTE, delta_BTE, b_BTS, c_BTS))
        _, y_TBE = jax.lax.scan(tick, jnp.zeros((len(x_BTE), *a_ES.shape), wide), rows)
        return jnp.moveaxis(y_TBE, 0, 1).astype(x_BTE.dtype)

    return replace(parts, scan=scan)


def step(h_BES: Any, a_ES: Any, x_BE: Any, delta_BE: Any, b_BS: Any, c_BS: Any) -> tuple[Any, Any]:
    """Compute the next state and the output of one time in JAX."""
    import jax.numpy as jnp

    h_BES = jnp.exp(delta_BE[..., None] * a_ES) * h_BES + (delta_BE * x_BE)[..., None] * b_BS[:, None]
    return h_BES, jnp.einsum("bes,bs->be", h_BES, c_BS)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [Strategy("sequential_scan", rewrites=("scan",), on={"torch": on_torch, "jax": on_jax}, about=__doc__)]
