"""GPUs that need not be there: what predictions in torch and in JAX must know of each card."""

import os
import re
from typing import NamedTuple

DEVICE = "cuda"
KIB, MIB = 1 << 10, 1 << 20


class Build(NamedTuple):
    """How a card is built, as XLA's compiler asks: counts for one core, sizes in bytes, bytes a second, and GHz."""

    cores: int
    units_per_core: int
    threads_per_core: int
    shared_per_core: int
    shared_per_block: int
    cache_bytes: int
    bandwidth: float
    gigahertz: float


class Card(NamedTuple):
    """A card: what it calls itself, what of its memory programs can use, its compute capability and its build.

    `context_bytes` are those of a process without tensors: what the driver and the loaded kernels take. None where
    nobody has published them.
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    build: Build
    context_bytes: int | None = None


CARDS = {
    "h100": Card(
        "NVIDIA H100 80GB HBM3",
        81_008 * MIB,
        (9, 0),
        Build(132, 128, 2048, 228 * KIB, 227 * KIB, 50 * MIB, 3.352e12, 1.98),
    ),
    "h200": Card(
        "NVIDIA H200",
        143_155 * MIB,
        (9, 0),
        Build(132, 128, 2048, 228 * KIB, 227 * KIB, 60 * MIB, 4.8e12, 1.98),
        context_bytes=758 * MIB,
    ),
    "b200": Card(
        "NVIDIA B200",
        182_630 * MIB,
        (10, 0),
        Build(148, 128, 2048, 228 * KIB, 227 * KIB, 126 * MIB, 8.0e12, 1.965),
    ),
    "a100": Card(
        "NVIDIA A100-SXM4-80GB",
        81_038 * MIB,
        (8, 0),
        Build(108, 64, 2048, 164 * KIB, 163 * KIB, 40 * MIB, 2.039e12, 1.41),
    ),
    "a100-40gb": Card(
        "NVIDIA A100-SXM4-40GB",
        40_506 * MIB,
        (8, 0),
        Build(108, 64, 2048, 164 * KIB, 163 * KIB, 40 * MIB, 1.555e12, 1.41),
    ),
    "l40s": Card(
        "NVIDIA L40S",
        45_467 * MIB,
        (8, 9),
        Build(142, 128, 1536, 100 * KIB, 99 * KIB, 96 * MIB, 8.64e11, 2.52),
    ),
    "l4": Card(
        "NVIDIA L4",
        22_563 * MIB,
        (8, 9),
        Build(58, 128, 1536, 100 * KIB, 99 * KIB, 48 * MIB, 3.0e11, 2.04),
    ),
    "a40": Card(
        "NVIDIA A40",
        45_486 * MIB,
        (8, 6),
        Build(84, 128, 1536, 100 * KIB, 99 * KIB, 6 * MIB, 6.96e11, 1.74),
    ),
    "a10": Card(
        "NVIDIA A10",
        22_731 * MIB,
        (8, 6),
        Build(72, 128, 1536, 100 * KIB, 99 * KIB, 6 * MIB, 6.0e11, 1.7),
    ),
    "a10g": Card(
        "NVIDIA A10G",
        22_587 * MIB,
        (8, 6),
        Build(80, 128, 1536, 100 * KIB, 99 * KIB, 6 * MIB, 6.0e11, 1.71),
    ),
    "rtx6000-ada": Card(
        "NVIDIA RTX 6000 Ada Generation",
        48_517 * MIB,
        (8, 9),
        Build(142, 128, 1536, 100 * KIB, 99 * KIB, 96 * MIB, 9.6e11, 2.505),
    ),
    "a6000": Card(
        "NVIDIA RTX A6000",
        48_538 * MIB,
        (8, 6),
        Build(84, 128, 1536, 100 * KIB, 99 * KIB, 6 * MIB, 7.68e11, 1.8),
    ),
    "a5000": Card(
        "NVIDIA RTX A5000",
        24_138 * MIB,
        (8, 6),
        Build(64, 128, 1536, 100 * KIB, 99 * KIB, 6 * MIB, 7.68e11, 1.7),
    ),
    "v100": Card(
        "Tesla V100-SXM2-16GB",
        16_148 * MIB,
        (7, 0),
        Build(80, 64, 2048, 96 * KIB, 96 * KIB, 6 * MIB, 9.0e11, 1.53),
    ),
    "v100-32gb": Card(
        "Tesla V100-SXM2-32GB",
        32_492 * MIB,
        (7, 0),
        Build(80, 64, 2048, 96 * KIB, 96 * KIB, 6 * MIB, 9.0e11, 1.53),
    ),
    "t4": Card(
        "Tesla T4",
        14_912 * MIB,
        (7, 5),
        Build(40, 64, 1024, 64 * KIB, 64 * KIB, 4 * MIB, 3.2e11, 1.59),
        context_bytes=147_718_144,
    ),
    "rtx5090": Card(
        "NVIDIA GeForce RTX 5090",
        32_109 * MIB,
        (12, 0),
        Build(170, 128, 1536, 100 * KIB, 99 * KIB, 96 * MIB, 1.792e12, 2.41),
    ),
    "rtx5080": Card(
        "NVIDIA GeForce RTX 5080",
        15_841 * MIB,
        (12, 0),
        Build(84, 128, 1536, 100 * KIB, 99 * KIB, 64 * MIB, 9.6e11, 2.62),
    ),
    "rtx4090": Card(
        "NVIDIA GeForce RTX 4090",
        24_080 * MIB,
        (8, 9),
        Build(128, 128, 1536, 100 * KIB, 99 * KIB, 72 * MIB, 1.008e12, 2.52),
    ),
    "rtx4080": Card(
        "NVIDIA GeForce RTX 4080",
        16_376 * MIB,
        (8, 9),
        Build(76, 128, 1536, 100 * KIB, 99 * KIB, 64 * MIB, 7.168e11, 2.51),
    ),
    "rtx4070": Card(
        "NVIDIA GeForce RTX 4070",
        11_866 * MIB,
        (8, 9),
        Build(46, 128, 1536, 100 * KIB, 99 * KIB, 36 * MIB, 5.04e11, 2.48),
    ),
    "rtx4060": Card(
        "NVIDIA GeForce RTX 4060",
        8_318_222_336,
        (8, 9),
        Build(24, 128, 1536, 100 * KIB, 99 * KIB, 24 * MIB, 2.72e11, 2.46),
    ),
    "rtx3090-ti": Card(
        "NVIDIA GeForce RTX 3090 Ti",
        24_112 * MIB,
        (8, 6),
        Build(84, 128, 1536, 100 * KIB, 99 * KIB, 6 * MIB, 1.008e12, 1.86),
    ),
    "rtx3090": Card(
        "NVIDIA GeForce RTX 3090",
        24_123 * MIB,
        (8, 6),
        Build(82, 128, 1536, 100 * KIB, 99 * KIB, 6 * MIB, 9.36e11, 1.7),
    ),
    "rtx3080": Card(
        "NVIDIA GeForce RTX 3080",
        10_351_935_488,
        (8, 6),
        Build(68, 128, 1536, 100 * KIB, 99 * KIB, 5 * MIB, 7.6e11, 1.71),
    ),
    "rtx3060": Card(
        "NVIDIA GeForce RTX 3060",
        12_622_168_064,
        (8, 6),
        Build(28, 128, 1536, 100 * KIB, 99 * KIB, 3 * MIB, 3.6e11, 1.78),
    ),
    "rtx2080-ti": Card(
        "NVIDIA GeForce RTX 2080 Ti",
        11_008 * MIB,
        (7, 5),
        Build(68, 64, 1024, 64 * KIB, 64 * KIB, 5_632 * KIB, 6.16e11, 1.545),
    ),
}
"""Cards by key.

Builds are those of NVIDIA's data sheets, and of the tuning guides of the architectures for shared memory and threads.
The memory is what torch or the driver says of such a card; it differs a little from driver to driver.
The context of the T4 is that of runs that Anassbzdd/fitcheck published (see docs/gpu_predictions.md), that of the H200
the larger one of results/gpu: in bfloat16, with torch 2.11 for CUDA 13.
"""
VARIANTS = {"ti", "super", "laptop", "d", "max"}
"""Words that make another card of a name: an RTX 4060 Ti, 4080 SUPER, 3080 Laptop GPU, 4090 D or 2080 with Max-Q."""
DEFAULT = "h100"
VARIABLE = "HARNESS_GPU"
"""The variable of a predicting process that names the card."""


def chosen() -> Card:
    """Return the card that the environment names; for a variant of a card that card, and for others the default."""
    name = os.environ.get(VARIABLE, "")
    return CARDS[key_of(name) or key_of(" ".join(_words(name) - VARIANTS)) or DEFAULT]


def key_of(name: str) -> str | None:
    """Return the longest key whose words stand in a card's name, as `NVIDIA L4` has `l4`; None for other cards.

    A card of which the name has a variant is another one, unless the key has it as well.
    """
    words = _words(name)
    keys = (key for key in CARDS if words & VARIANTS <= set(key.split("-")) <= words)
    return max(keys, key=len, default=None)


def _words(name: str) -> set[str]:
    return set(re.sub(r"rtx (?=\d)", "rtx", re.sub(r"[^a-z0-9]+", " ", name.lower())).split())
