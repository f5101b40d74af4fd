"""XLA's compiler for GPUs, for a card that need not be there."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from harness.backends import Unavailable
from harness.backends.cards import Card

PLUGINS = ("jax-cuda13-plugin", "jax-cuda13-pjrt")
"""The compiler for GPUs. It needs neither a GPU nor NVIDIA's libraries."""
CUDNN = 91002
"""The version of cuDNN that is supposed to be there: 9.10.2."""


_CONFIG = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {build.shared_per_core} threads_per_core_limit: {build.threads_per_core}
  core_count: {build.cores} fpus_per_core: {build.units_per_core}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {build.bandwidth:.0f} l2_cache_size: {build.cache_bytes} clock_rate_ghz: {build.gigahertz}
  device_memory_size: {card.memory_bytes} shared_memory_per_block_optin: {build.shared_per_block}
  cuda_compute_capability {{ major: {card.capability[0]} minor: {card.capability[1]} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{card.name}"
"""
"""XLA's `GpuTargetConfigProto` as text."""


def lacking(jax_version: str) -> str | None:
    """Return why nothing can be compiled for a GPU here, and what to do; None where it can."""
    wanted = " ".join(f"{name}=={jax_version}" for name in PLUGINS)
    try:
        installed = {version(name) for name in PLUGINS}
    except PackageNotFoundError:
        return (
            "jax/cuda is predicted by XLA's compiler for GPUs, which needs no GPU and is not installed: "
            f"pip install {wanted} (the extra cuda-planning)"
        )
    if installed != {jax_version}:
        other = ", ".join(sorted(installed))
        return f"the compiler for GPUs is of version {other} and JAX of {jax_version}: pip install {wanted}"
    return None


def device(card: Card) -> Any:
    """Return one device of a card, to compile for.

    Raises Unavailable where the compiler is not there or does not load; what it says of our own description of the
    card is a fault, and passes.
    """
    import jax
    from jax.experimental import topologies

    if (reason := lacking(jax.__version__)) is not None:
        raise Unavailable(reason)
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=_CONFIG.format(card=card, build=card.build), topology="1x1x1"
        )
    except NotImplementedError as error:
        raise Unavailable(f"XLA's compiler for GPUs does not load ({error}): install it anew") from None
    (only,) = topology.devices
    return only


@contextmanager
def supposed(card: Card) -> Iterator[None]:
    """Answer what JAX asks of cuDNN and of the card for one, where it would ask those of this machine."""
    from jax._src.cudnn import fused_attention_stablehlo as attention

    answers = {
        "check_cudnn_version": lambda: CUDNN,
        "check_compute_capability": lambda least: _capability(least) <= card.capability,
        "is_cuda_compute_capability_equal": lambda asked: _capability(asked) == card.capability,
    }
    before = {name: getattr(attention, name) for name in answers}
    for name, answer in answers.items():
        setattr(attention, name, answer)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(attention, name, function)


def _capability(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split("."))
