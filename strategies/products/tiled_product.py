"""Multiply with the weights of layers by a kernel over tiles of 16 x 16; keep what the library keeps, pay its time.

A tile of either factor is copied to where it is near, on a CPU a small array that stays in its cache, on a GPU shared
memory, and read from there 16 times. On a CPU the loops are compiled by numba, on a GPU by Triton. The backward pass
multiplies so as well, by transposed copies. float32 and float64 only. Source: the tiled product of NVIDIA's CUDA C++
Programming Guide.
"""

from harness import Parts, Strategy, hookimpl
from strategies.products import excluded


def on_torch(parts: Parts) -> Parts:
    from strategies.products._written import with_products

    return with_products(parts, "tiled")


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy("tiled_product", rewrites=("linear",), on={"torch": on_torch}, about=__doc__, excludes=excluded()),
    ]
