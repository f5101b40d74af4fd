"""Move the input of each layer to the host, or on a CPU to a file; keep nothing else and run each layer twice.

Peak on the device: what one block saves and two hidden states, whatever the depth; the L hidden states lie where
`offload_activations` puts them: in page-locked host memory beside a GPU, in an unlinked mapped file on a CPU. Inputs of
fewer than `least_kib` KiB stay. In JAX a checkpoint policy offloads what is named, and `folder` means nothing. Sources:
ALST (Bekman et al., 2025, arXiv:2506.13996), Unsloth.
"""

from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl, knobs, mapped_files
from strategies.activations.offload_checkpoint import STAND_IN

NAME = "boundary"


def on_torch(parts: Parts, least_kib: int = 1024, folder: str = mapped_files.FOLDER) -> Parts:
    from torch.utils.checkpoint import checkpoint

    from strategies.activations import offload_activations

    knobs.at_least_0("offload_boundary", least_kib=least_kib)
    inner = parts.block

    def again(parts: Parts, p: Any, x_BTD: Any, _: None) -> Any:
        # A checkpoint saves its own input, and within it saves nothing: that input is all there is to carry away.
        return checkpoint(inner, parts, p, x_BTD, use_reentrant=False)

    carried = offload_activations.on_torch(replace(parts, grad=again), least_kib, folder).grad

    def block(parts: Parts, p: Any, x_BTD: Any) -> Any:
        return carried(parts, p, x_BTD, None)

    return replace(parts, block=block)


def on_jax(parts: Parts, least_kib: int = 1024, folder: str = mapped_files.FOLDER) -> Parts:
    import jax
    from jax.ad_checkpoint import checkpoint_name

    knobs.at_least_0("offload_boundary", least_kib=least_kib)
    inner = parts.block
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[NAME],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def block(parts: Parts, p: Any, x_BTD: Any) -> Any:
        def named(p: Any, x_BTD: Any) -> Any:
            return inner(parts, p, checkpoint_name(x_BTD, NAME))

        if parts.place.device == "cpu":
            parts.notes["offloading"] = STAND_IN
        small = x_BTD.size * x_BTD.dtype.itemsize < least_kib << 10
        return jax.checkpoint(named, prevent_cse=False, policy=None if small else policy)(p, x_BTD)

    return replace(parts, block=block)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "offload_boundary",
            rewrites=("block",),
            calls=("block",),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            probe={"least_kib": 1},
            conflicts={
                "before int8_activations": "layers are recomputed without rounding their products: name it after"
            },
        )
    ]
