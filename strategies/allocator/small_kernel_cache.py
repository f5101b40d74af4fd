"""Let the CPU's library keep the kernels of 64 sizes of product, not of 1,024; pay for those that it writes anew.

In bfloat16 oneDNN writes a kernel for each size of product, 0.56 MiB, and keeps it. The experts of a mixture get other
numbers of tokens in each step, so that a process grows step by step, by up to 0.6 GiB. torch has a cache of its own
above that of oneDNN: both must be small. Little is lost where sizes do not come again; a model with more than 64
sizes in each step writes all of them anew. To use it outside of the harness, set `ONEDNN_PRIMITIVE_CACHE_CAPACITY=64`
and `LRU_CACHE_CAPACITY=64` in the environment of your training process.

Source: oneDNN, "Primitive Cache"; torch, third_party/ideep (lru_cache).
"""

from harness import Parts, Strategy, hookimpl

VARIABLES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}


def on_torch(parts: Parts) -> Parts:
    return parts


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "small_kernel_cache",
            rewrites=(),
            on={"torch": on_torch},
            about=__doc__,
            environment=VARIABLES,
            excludes={"torch/cuda": "on a GPU products have other libraries"},
        )
    ]
