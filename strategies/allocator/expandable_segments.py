"""Let torch's allocator on a GPU grow its segments page by page; lose less to gaps, and pay calls to the driver.

Peak of what is allocated: unchanged. What is reserved comes nearer to it where there are gaps, and it is that which a
budget and the card bound: a run that ends without memory though enough is free in pieces may fit. Predictions replay
both allocators, so the difference shows under `reserved`. To use it outside of the harness, set
`PYTORCH_ALLOC_CONF=expandable_segments:True` in the environment of your training process. JAX has no such allocator.

Source: PyTorch, "CUDA semantics", PYTORCH_ALLOC_CONF.
"""

from harness import Parts, Strategy, hookimpl


def on_torch(parts: Parts) -> Parts:
    return parts


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "expandable_segments",
            rewrites=(),
            on={"torch": on_torch},
            about=__doc__,
            environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
            excludes={"torch/cpu": "the memory of a CPU is that of the C library's allocator"},
        )
    ]
