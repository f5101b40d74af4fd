"""XLA's compiler for GPUs, for a card that need not be there."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from harness.backends import Unavailable
from harness.backends.cards import Card

PLUGINS = ("jax-cuda13-plugin", "jax-cuda13-pjrt")
"""The compiler for GPUs. It needs no GPU, and up to JAX 0.10 none of NVIDIA's packages."""
ASSEMBLER = ("nvidia-cuda-nvcc", "nvidia-nvvm")
"""What it runs besides from JAX 0.11 on: NVIDIA's assembler of PTX."""
NO_ASSEMBLER = ("PTX compilation provider", "Failed to get configs")
"""How a compilation ends without it."""
CUDNN = 91002
"""The version of cuDNN that is supposed to be there: 9.10.2."""
WAYS: tuple[dict[str, bool], ...] = (
    {"xla_gpu_enable_triton_gemm": False},
    {"xla_gpu_experimental_gemm_fusion_v2": True},
)
"""How JAX 0.11 is to compile: left to itself its compiler fuses products for which, without a card, it has no kernel.

The two ways can differ by a fifth in what they take, and neither is always that of the card. The larger is within 5 %
below what five programs took on an H200 (results/gpu_jax).
"""


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

    Raises ValueError for a card that CUDA 13 left behind, and Unavailable where the compiler is not there or does not
    load; what it says of our own description of the card is a fault, and passes.
    """
    import jax
    from jax.experimental import topologies

    if card.capability < (7, 5):
        raise ValueError(
            f"JAX is built for CUDA 13, which begins with compute capability 7.5, and {card.name} has "
            f"{card.capability[0]}.{card.capability[1]}: take torch, or another card"
        )
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


def compiled(lowered: Any) -> Any:
    """Compile a step for a card that is not there, in the way that takes most where it is not known which one it would.

    Raises Unavailable where the assembler is missing.
    """
    import jax

    if jax.__version_info__ < (0, 11):
        return lowered.compile()
    try:
        programs = [lowered.compile(way) for way in WAYS]
    except jax.errors.JaxRuntimeError as error:
        if any(words in str(error) for words in NO_ASSEMBLER):
            raise Unavailable(f"the compiler for GPUs lacks an assembler: pip install {' '.join(ASSEMBLER)}") from None
        raise
    return max(programs, key=lambda program: program.memory_analysis().temp_size_in_bytes)


@contextmanager
def supposed(card: Card) -> Iterator[None]:
    """Answer what JAX and Pallas ask of cuDNN and of the card for one, where they would ask those of this machine."""
    from jax._src.cudnn import fused_attention_stablehlo as attention

    answers: dict[tuple[Any, str], Any] = {
        (attention, "check_cudnn_version"): lambda: CUDNN,
        (attention, "check_compute_capability"): lambda least: _capability(least) <= card.capability,
        (attention, "is_cuda_compute_capability_equal"): lambda asked: _capability(asked) == card.capability,
    }
    with suppress(ImportError):  # before JAX 0.11 Pallas supposes capability 9.0 where it finds no card
        gpu_info = import_module("jax._src.pallas.triton.gpu_info")
        major, minor = card.capability
        info = gpu_info.GpuInfo(gpu_version=None, arch_name=f"{major}.{minor}", compute_capability=10 * major + minor)
        answers[gpu_info, "get_gpu_info"] = lambda: info
    before = {asked: getattr(*asked) for asked in answers}
    for asked, answer in answers.items():
        setattr(*asked, answer)
    try:
        yield
    finally:
        for asked, function in before.items():
            setattr(*asked, function)


def _capability(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split("."))
