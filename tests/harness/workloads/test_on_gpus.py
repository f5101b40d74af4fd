"""What workloads do otherwise where the place is a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from harness import Parts, Place
from harness.backends import cards, jax_cuda
from harness.backends.torch_cuda_operators import attention_kernel
from harness.workloads import parameters
from harness.workloads.causal_lm import stand_ins
from harness.workloads.decoder import _jax as on_jax
from harness.workloads.decoder import _torch as on_torch
from harness.workloads.scoring import _torch as scoring

CPU, GPU = Place("torch", "cpu"), Place("torch", "cuda")


@pytest.fixture
def asked(monkeypatch):
    """What torch's attention was called with."""
    asked = []
    inner = F.scaled_dot_product_attention

    def attention(q, k, v, **options):
        asked.append((q.shape[1], k.shape[1], options["enable_gqa"]))
        return inner(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    return asked


@pytest.mark.parametrize(
    ("place", "dtype", "call"),
    [
        (GPU, torch.float32, (8, 8, False)),
        (GPU, torch.bfloat16, (8, 2, True)),
        (CPU, torch.float32, (8, 2, True)),
    ],
)
def test_heads_of_32_bits_share_no_keys_on_a_gpu_where_no_kernel_could(asked, place, dtype, call):
    torch.manual_seed(0)
    q, k = torch.randn(1, 16, 8, 8, dtype=dtype), torch.randn(1, 16, 2, 8, dtype=dtype)
    y = on_torch.attend(Parts(None, place), q, k, k)
    assert asked == [call]
    torch.testing.assert_close(y, on_torch.attend(Parts(None, CPU), q, k, k))


def by_scoring(place, q, k, mask):
    return scoring.attention(place, q, k, k, mask)


def by_a_stand_in(place, q, k, mask):
    with stand_ins.running(Parts(None, place), None, {}):
        return stand_ins.attention(None, *(x.transpose(1, 2) for x in (q, k, k)), mask)[0]


@pytest.mark.parametrize("attend", [by_scoring, by_a_stand_in])
@pytest.mark.parametrize(("place", "kernel"), [(GPU, "efficient"), (CPU, "math")], ids=["cuda", "cpu"])
def test_heads_under_a_mask_share_no_keys_on_a_gpu_where_few_kernels_could(monkeypatch, attend, place, kernel):
    chosen = []
    inner = F.scaled_dot_product_attention

    def attention(q, k, v, attn_mask, **options):
        chosen.append(attention_kernel(q, k, v, attn_mask, cards.CARDS["a100"]))
        return inner(q, k, v, attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    torch.manual_seed(0)
    q, k = torch.randn(1, 16, 8, 8, dtype=torch.bfloat16), torch.randn(1, 16, 2, 8, dtype=torch.bfloat16)
    mask = torch.ones(16, 16, dtype=torch.bool).tril().triu(-3)
    y = attend(place, q, k, mask)
    assert chosen == [kernel]
    torch.testing.assert_close(y, attend(CPU, q, k, mask))


@pytest.mark.parametrize(
    ("width", "dtype", "takes"),
    [(12, jnp.bfloat16, False), (64, jnp.bfloat16, True), (128, jnp.float16, True), (256, jnp.bfloat16, False),
     (64, jnp.float32, False)],
)  # fmt: skip
def test_cudnn_gets_only_heads_that_it_takes(width, dtype, takes):
    q = jax.ShapeDtypeStruct((1, 64, 4, width), dtype)
    parts = Parts(None, Place("jax", "cuda"))
    with jax_cuda.supposed(cards.CARDS["a100"]):
        traced = jax.jit(lambda q: on_jax.attend(parts, q, q, q)).trace(q)
        program = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("cudnn" in program) == takes


# Parameters


def test_large_parameters_alone_are_drawn_on_a_gpu():
    size, gpu = parameters.LARGE, Place("jax", "cuda")
    assert parameters.on_device(gpu, (size + 1,), 0.02)
    assert not parameters.on_device(gpu, (size,), 0.02)
    assert not parameters.on_device(Place("jax", "cpu"), (size + 1,), 0.02)
    assert not parameters.on_device(gpu, (size + 1,), 0.0), "ones are ones anywhere"


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_what_a_device_draws_follows_from_name_and_seed(backend):
    def drawn(name, seed):
        key = parameters.key(name, seed)
        if backend == "torch":
            return on_torch.drawn_on("cpu", key, (300, 100), 0.02).numpy()
        return np.asarray(on_jax.drawn_there([key], (300, 100), 0.02, stacked=False))

    first = drawn("embed", 0)
    assert first.dtype == np.float32
    assert abs(first.std() / 0.02 - 1) < 0.02 and abs(first.mean()) < 1e-3
    np.testing.assert_array_equal(first, drawn("embed", 0))
    assert abs(np.corrcoef(first.ravel(), drawn("embed", 1).ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(first.ravel(), drawn("head", 0).ravel())[0, 1]) < 0.03


def test_layers_that_are_stacked_are_drawn_each_by_its_own_name():
    keys = [parameters.key(f"layers.{index}.up", 0) for index in range(3)]
    stacked = np.asarray(on_jax.drawn_there(keys, (40, 30), 0.02, stacked=True))
    assert stacked.shape == (3, 40, 30)
    for key, layer in zip(keys, stacked, strict=True):
        np.testing.assert_array_equal(layer, on_jax.drawn_there([key], (40, 30), 0.02, stacked=False))


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_draw_goes_to_the_device_where_the_rule_says_so(backend, monkeypatch):
    module = on_torch if backend == "torch" else on_jax
    parts = Parts(None, Place(backend, "cuda"))
    calls = []
    monkeypatch.setattr(parameters, "LARGE", 100)
    name = "drawn_on" if backend == "torch" else "drawn_there"
    monkeypatch.setattr(module, name, lambda *rest: calls.append(rest))
    module.draw(0, parts, "embed", (11, 10), 0.02)
    assert len(calls) == 1
    if backend == "jax":
        module.draw(0, parts, "layers.up", (2, 11, 10), 0.02)
        assert len(calls[1][0]) == 2, "a key for each layer"
        module.draw(0, parts, "layers.up", (20, 3, 3), 0.02)
        assert len(calls) == 2, "each layer is small"
