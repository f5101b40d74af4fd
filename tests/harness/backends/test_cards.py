"""A card is known by what drivers and people call it."""

import pytest

from harness.backends import cards


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L40", None),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", None),
        ("Quadro RTX 6000", None),
        ("NVIDIA RTX A5000 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("rtx4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4080 SUPER", None),
        ("NVIDIA GeForce RTX 4060 Ti", None),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA GeForce RTX 3090 Ti", "rtx3090-ti"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("GeForce RTX 4080 16 GB (Windows, WDDM)", "rtx4080"),
        ("Tesla T4 (sm_75, 14912 MiB)", "t4"),
        ("V100-16GB", "v100"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("NVIDIA GeForce RTX 2080 Ti", "rtx2080-ti"),
        ("NVIDIA GeForce RTX 2080", None),
        ("NVIDIA B200", "b200"),
        ("", None),
    ],
)
def test_a_card_is_known_by_its_name(name, key):
    assert cards.key_of(name) == key


@pytest.mark.parametrize("key", cards.CARDS)
def test_every_key_is_found_in_the_name_of_its_card(key):
    assert cards.key_of(key) == key
    assert key.split("-")[0] == cards.key_of(cards.CARDS[key].name).split("-")[0]


@pytest.mark.parametrize(
    ("named", "key"),
    [
        ("", "h100"),
        ("Voodoo 2", "h100"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 3090 Ti", "rtx3090-ti"),
        ("NVIDIA GeForce RTX 4060 Ti", "rtx4060"),  # its architecture
    ],
)
def test_the_environment_chooses_and_otherwise_the_default_stands(monkeypatch, named, key):
    monkeypatch.setenv("HARNESS_GPU", named)
    assert cards.chosen() is cards.CARDS[key]
