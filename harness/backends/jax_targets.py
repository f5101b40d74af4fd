"""GPUs that XLA compiles for without one: what its compiler must know of each card."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from harness.backends import Unavailable

PLUGINS = ("jax-cuda13-plugin", "jax-cuda13-pjrt")
"""The compiler for GPUs. It needs neither a GPU nor NVIDIA's libraries."""
CUDNN = 91002
"""The version of cuDNN that is supposed to be there: 9.10.2."""


class Target(NamedTuple):
    """A card: its name, what of its memory programs can use, and how it is built.

    Sources: NVIDIA's data sheets, and the tuning guides of the architectures for shared memory and threads.
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    cores: int
    units_per_core: int
    threads_per_core: int
    shared_per_core: int
    shared_per_block: int
    cache_bytes: int
    bandwidth: float
    gigahertz: float


MIB, GIB, KIB = 1 << 20, 1 << 30, 1 << 10
TARGETS = {
    "h100": Target(
        "NVIDIA H100 80GB HBM3", 81_008 * MIB, (9, 0), 132, 128, 2048, 228 * KIB, 227 * KIB, 50 * MIB, 3.352e12, 1.98
    ),
    "h200": Target("NVIDIA H200", 143_100 * MIB, (9, 0), 132, 128, 2048, 228 * KIB, 227 * KIB, 60 * MIB, 4.8e12, 1.98),
    "a100": Target(
        "NVIDIA A100-SXM4-80GB", 81_038 * MIB, (8, 0), 108, 64, 2048, 164 * KIB, 163 * KIB, 40 * MIB, 2.039e12, 1.41
    ),
    "l4": Target("NVIDIA L4", 22_563 * MIB, (8, 9), 58, 128, 1536, 100 * KIB, 99 * KIB, 48 * MIB, 3.0e11, 2.04),
    "rtx4090": Target(
        "NVIDIA GeForce RTX 4090", 24_080 * MIB, (8, 9), 128, 128, 1536, 100 * KIB, 99 * KIB, 72 * MIB, 1.008e12, 2.52
    ),
}
DEFAULT = "h100"
VARIABLE = "HARNESS_GPU"
"""The variable of a predicting process that names the card."""

_CONFIG = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {card.shared_per_core} threads_per_core_limit: {card.threads_per_core}
  core_count: {card.cores} fpus_per_core: {card.units_per_core}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {card.bandwidth:.0f} l2_cache_size: {card.cache_bytes} clock_rate_ghz: {card.gigahertz}
  device_memory_size: {card.memory_bytes} shared_memory_per_block_optin: {card.shared_per_block}
  cuda_compute_capability {{ major: {card.capability[0]} minor: {card.capability[1]} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{card.name}"
"""
"""XLA's `GpuTargetConfigProto` as text."""


def chosen() -> Target:
    """Return the target that the environment names; the default where it names none, or one that is not known."""
    return TARGETS[key_of(os.environ.get(VARIABLE, "")) or DEFAULT]


def key_of(name: str) -> str | None:
    """Return the key of a target that stands in a card's name, as `NVIDIA L4` has `l4`; None for other cards."""
    words = re.sub(r"[^a-z0-9]+", " ", name.lower().replace("rtx 4090", "rtx4090")).split()
    return next((key for key in TARGETS if key in words), None)


def lacking(jax_version: str) -> str | None:
    """Return why nothing can be compiled for a GPU here, and what to do; None where it can."""
    wanted = " ".join(f"{name}=={jax_version}" for name in PLUGINS)
    try:
        found = {version(name) for name in PLUGINS}
    except PackageNotFoundError:
        return (
            "jax/cuda is predicted by XLA's compiler for GPUs, which needs no GPU and is not installed: "
            f"pip install {wanted} (the extra cuda-planning)"
        )
    if found != {jax_version}:
        other = ", ".join(sorted(found))
        return f"the compiler for GPUs is of version {other} and JAX of {jax_version}: pip install {wanted}"
    return None


def devices(target: Target, count: int = 1) -> list[Any]:
    """Return so many devices of a card that need not be there, to compile for; raise Unavailable where XLA refuses."""
    import jax
    from jax.experimental import topologies

    if (reason := lacking(jax.__version__)) is not None:
        raise Unavailable(reason)
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=_CONFIG.format(card=target), topology=f"1x1x{count}"
        )
    except (RuntimeError, NotImplementedError) as error:
        first = str(error).partition("\n")[0]
        raise Unavailable(f"XLA's compiler for GPUs does not start: {first}") from None
    return list(topology.devices)


@contextmanager
def supposed(target: Target) -> Iterator[None]:
    """Answer what JAX asks of cuDNN and of the card for a target, where it would ask those of this machine."""
    from jax._src.cudnn import fused_attention_stablehlo as attention

    answers = {
        "check_cudnn_version": lambda: CUDNN,
        "check_compute_capability": lambda least: _capability(least) <= target.capability,
        "is_cuda_compute_capability_equal": lambda asked: _capability(asked) == target.capability,
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
