"""Multiply float32 with factors rounded to 10 bits on a GPU's tensor cores; keep every byte, pay precision alone.

Peak: that of the untouched run. Products take about an eighth of their time in full float32 on an H100; sums stay in
float32. Elsewhere here float32 means float32: torch leaves TF32 off, and JAX, whose compiler takes it by itself, is
asked not to. (NVIDIA, "A100 Tensor Core GPU Architecture", 2020.)
"""

from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl

NO_SUCH_PRODUCT = "a CPU has no products of this type"


def on_torch(parts: Parts) -> Parts:
    import torch

    inner = parts.step
    switches: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)

    def step(parts: Parts, state: Any, x: Any, y: Any) -> Any:
        before = [switch.allow_tf32 for switch in switches]
        for switch in switches:
            switch.allow_tf32 = True
        try:
            return inner(parts, state, x, y)
        finally:
            for switch, value in zip(switches, before, strict=True):
                switch.allow_tf32 = value

    return replace(parts, step=step)


def on_jax(parts: Parts) -> Parts:
    import jax

    inner = parts.step

    def step(parts: Parts, state: Any, x: Any, y: Any) -> Any:
        with jax.default_matmul_precision("tensorfloat32"):  # read while the step is traced
            return inner(parts, state, x, y)

    return replace(parts, step=step)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "tf32",
            rewrites=("step",),
            calls=("step",),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            precision="tf32",
            excludes=dict.fromkeys(("torch/cpu", "jax/cpu"), NO_SUCH_PRODUCT),
        )
    ]
