"""Products that are written out are those of the library, forward and backward, at ragged sizes."""

import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

import pytest

from harness import Place, Strategy
from harness.contract import plugins
from harness.contract.assembly import assemble
from harness.records import Applied, Case
from strategies import products

torch = pytest.importorskip("torch")
NAMES = ("naive_product", "tiled_product")
ON_GPU = """
import torch
from strategies.products import _gpu
x, w = torch.randn(37, 21), torch.randn(21, 50)
for kernel in (_gpu.naive, _gpu.tiled):
    y = torch.full((37, 50), torch.nan)
    kernel(x, w, y)
    assert torch.allclose(y, x @ w, atol=1e-5), (y - x @ w).abs().max()
print("the same")
"""
COMPILED = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from strategies.products import _gpu
signature = dict(x="*fp32", w="*fp32", y="*fp32", N="i32", K="i32", M="i32", TILE="constexpr")
for kernel in (_gpu._naive, _gpu._tiled):
    source = ASTSource(fn=kernel, signature=signature, constexprs=dict(TILE=_gpu.TILE))
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttir"]
    narrow = [line for line in text.splitlines() if re.search(r"arith.muli .*i32", line)]
    assert len(narrow) == 2 and all("%c16" in line for line in narrow), narrow
print("of 64 bits")
"""


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_multiplies_and_differentiates_as_the_library_does(name: str) -> None:
    pytest.importorskip("numba")
    from strategies.products import _written

    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*size, generator=generator, dtype=torch.float64) for size in ((3, 19, 21), (21, 50)))
    both = [tuple(each.clone().requires_grad_() for each in (x, w)) for _ in range(2)]
    own, due = _written._Product.apply(name.removesuffix("_product"), *both[0]), both[1][0] @ both[1][1]
    assert torch.allclose(own, due, atol=1e-12)
    slopes = torch.randn(due.shape, generator=generator, dtype=torch.float64)
    for a, b in zip(torch.autograd.grad(own, both[0], slopes), torch.autograd.grad(due, both[1], slopes), strict=True):
        assert torch.allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("frozen", [0, 1])
def test_of_a_frozen_factor_no_gradient_is_made(frozen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from strategies.products import _written

    calls: list[str] = []
    monkeypatch.setattr(_written, "product", lambda name, x, w: calls.append(name) or x @ w)
    factors = [torch.ones(5, 3), torch.ones(3, 4)]
    factors[1 - frozen].requires_grad_()
    _written._Product.apply("naive", *factors).sum().backward()
    assert len(calls) == 2, "one forward, one backward"
    assert factors[frozen].grad is None and factors[1 - frozen].grad is not None


def test_types_that_a_kernel_does_not_know_are_refused() -> None:
    from strategies.products import _written

    half = torch.ones(2, 2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="naive_product: it multiplies float32 or float64, not torch"):
        _written.product("naive", half, half)


@pytest.mark.parametrize("name", NAMES)
def test_the_products_of_a_part_go_through_the_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from strategies.products import _written

    seen = []

    def product(kernel: str, x: "torch.Tensor", w: "torch.Tensor") -> "torch.Tensor":
        seen.append((kernel, tuple(x.shape), tuple(w.shape)))
        return torch.mm(x, w)

    monkeypatch.setattr(_written, "product", product)
    shape = {"layers": 1, "width": 16, "heads": 2, "hidden": 40, "vocabulary": 32, "tokens": 8, "feed": "gelu"}
    case = Case(
        workload="decoder", shape=shape, place=Place("torch", "cpu"), corpus="drawn", tokenizer="none",
        strategies=(Applied(name=name),),
    )  # fmt: skip
    parts = assemble(plugins.load(), case)
    state = parts.init(parts, parts.source(parts))
    x = torch.randn(1, 8, 16, requires_grad=True)
    parts.feed(parts, state["params"]["layers"][0], x).sum().backward()
    kernel = name.removesuffix("_product")
    assert seen[:2] == [(kernel, (8, 16), (16, 40)), (kernel, (8, 40), (40, 16))]
    assert len(seen) == 6 and {each[0] for each in seen} == {kernel}


@pytest.mark.parametrize("name", NAMES)
def test_without_numba_a_gpu_is_a_place_for_them_and_a_cpu_is_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def offered(spec: object) -> Strategy:
        monkeypatch.setattr(products, "find_spec", lambda package: spec)
        (strategy,) = import_module(f"strategies.products.{name}").harness_strategies()
        return strategy

    without, with_it = offered(None), offered(object())
    assert "needs the package numba" in str(without.obstacle(Place("torch", "cpu")))
    assert without.obstacle(Place("torch", "cuda")) is None
    assert with_it.obstacle(Place("torch", "cpu")) is None


@pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")
def test_the_kernels_of_a_gpu_give_the_same_in_tritons_interpreter() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", ON_GPU], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "the same", done.stderr


@pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")
def test_what_a_gpu_multiplies_to_find_a_number_has_64_bits_but_for_the_tiles() -> None:
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True)
    assert done.stdout.strip() == "of 64 bits", done.stderr
