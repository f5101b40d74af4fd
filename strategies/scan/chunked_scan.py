"""Keep the state of a selective scan only at the borders of chunks; pay a second pass through each chunk.

Peak: T / C states of B E S elements, and the values that the C steps of one chunk save, about 3 C B E S. The state and
its gradient pass from chunk to chunk, so the result is that of the whole. Decays and states are float32 at the least.
Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), applied over time. `chunk` is C, in steps.
"""

from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl
from strategies.scan.sequential_scan import step, steps


def checked(chunk: int) -> int:
    """Check that a chunk has a step, and return it; raise ValueError."""
    if chunk < 1:
        raise ValueError(f"chunked_scan: chunk must be at least 1 step, not {chunk}")
    return chunk


def on_torch(parts: Parts, chunk: int = 64) -> Parts:
    import torch
    from torch.utils.checkpoint import checkpoint

    checked(chunk)

    def scan(parts: Parts, x_BTE: Any, delta_BTE: Any, a_ES: Any, b_BTS: Any, c_BTS: Any) -> Any:
        a_ES = a_ES.to(torch.promote_types(x_BTE.dtype, torch.float32))
        h_BES = a_ES.new_zeros(len(x_BTE), *a_ES.shape)
        ys = []
        for rows_BC in zip(*(rows.split(chunk, 1) for rows in (x_BTE, delta_BTE, b_BTS, c_BTS)), strict=True):
            h_BES, y_BCE = checkpoint(steps, h_BES, a_ES, *rows_BC, use_reentrant=False)
            ys.append(y_BCE.to(x_BTE.dtype))
        return torch.cat(ys, 1)

    return replace(parts, scan=scan)


def on_jax(parts: Parts, chunk: int = 64) -> Parts:
    import jax
    import jax.numpy as jnp

    checked(chunk)

    def scan(parts: Parts, x_BTE: Any, delta_BTE: Any, a_ES: Any, b_BTS: Any, c_BTS: Any) -> Any:
        a_ES = a_ES.astype(jnp.promote_types(x_BTE.dtype, jnp.float32))
        B, T, _ = x_BTE.shape
        size = min(chunk, T)

        def in_chunks(rows_BT: Any) -> Any:
            # A step of size zero leaves the state as it is, so the last chunk can be filled up with zeros.
            filled = jnp.pad(rows_BT, ((0, 0), (0, -T % size), (0, 0)))
            return jnp.moveaxis(filled.reshape(B, -1, size, rows_BT.shape[-1]), 0, 2)

        def tick(h_BES: Any, row: Any) -> tuple[Any, Any]:
            h_BES, y_BE = step(h_BES, a_ES, *(values.astype(a_ES.dtype) for values in row))
            return h_BES, y_BE.astype(x_BTE.dtype)

        steps = jax.checkpoint(lambda h_BES, rows_C: jax.lax.scan(tick, h_BES, rows_C), prevent_cse=False)
        rows_MC = tuple(in_chunks(rows) for rows in (x_BTE, delta_BTE, b_BTS, c_BTS))
        _, y_MCBE = jax.lax.scan(steps, jnp.zeros((B, *a_ES.shape), a_ES.dtype), rows_MC)
        return jnp.moveaxis(y_MCBE.reshape(-1, *y_MCBE.shape[2:]), 0, 1)[:, :T]

    return replace(parts, scan=scan)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "chunked_scan", rewrites=("scan",), on={"torch": on_torch, "jax": on_jax}, about=__doc__, probe={"chunk": 5}
        )
    ]
