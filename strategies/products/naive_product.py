"""Multiply with the weights of layers by a kernel of one loop for each dimension; keep what it keeps, pay its time.

Each number of the result is added up from a row and a column that are read from memory as they lie. On a CPU the loops
are compiled by numba, on a GPU by Triton, there one thread for each number of the result. The backward pass multiplies
so as well, by transposed copies. float32 and float64 only. Compared with `tiled_product`, which differs in the tiles
alone.
"""

from harness import Parts, Strategy, hookimpl
from strategies.products import excluded


def on_torch(parts: Parts) -> Parts:
    from strategies.products._written import with_products

    return with_products(parts, "naive")


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy("naive_product", rewrites=("linear",), on={"torch": on_torch}, about=__doc__, excludes=excluded()),
    ]
