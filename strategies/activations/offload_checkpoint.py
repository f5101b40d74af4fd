"""Keep what products of weights gave in the host's memory instead of the device's, and recompute the rest.

Peak on the device: L hidden states and what one block saves, as with `checkpoint`; on the host the outputs that
`selective_checkpoint` keeps, which are carried there and back. JAX only, a checkpoint policy:
`offload_dot_with_no_batch_dims`. For torch see `offload_boundary` and `offload_activations`. On a CPU, which has one
memory, it stands in for a run on a GPU: it recomputes, and the kept outputs stay where they are.
"""

from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl
from strategies.activations._recomputed import recomputed_in_jax

STAND_IN = "stands in for a GPU: a CPU has one memory, and XLA offloads nothing there"


def on_jax(parts: Parts) -> Parts:
    import jax

    policy = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    inner = recomputed_in_jax(parts.block, policy)

    def block(parts: Parts, p: Any, x_BTD: Any) -> Any:
        if parts.place.device == "cpu":
            parts.notes["offloading"] = STAND_IN
        return inner(parts, p, x_BTD)

    return replace(parts, block=block)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [Strategy("offload_checkpoint", rewrites=("block",), on={"jax": on_jax}, about=__doc__)]
