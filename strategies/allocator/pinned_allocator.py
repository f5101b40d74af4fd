"""Set glibc's malloc so that freed blocks return to the system at once; pay a map and an unmap for each large block.

Peak: what is alive, which is what the tables show as `peak MiB`; with the usual allocator it is larger (`as started`).
The price is time: each block of 64 KiB or more is mapped alone and its pages are cleared anew. To use it outside of the
harness, set the variables below in the environment of your training process: `MALLOC_ARENA_MAX=1`,
`MALLOC_MMAP_THRESHOLD_=65536`, `MALLOC_TRIM_THRESHOLD_=65536`, `MALLOC_TOP_PAD_=0` and `MALLOC_MMAP_MAX_=1000000`.

Source: glibc manual, "Malloc Tunable Parameters" (mallopt).
"""

from harness import Parts, Strategy, hookimpl

VARIABLES = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "0",
    "MALLOC_MMAP_MAX_": "1000000",
}


def on_any(parts: Parts) -> Parts:
    return parts


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "pinned_allocator",
            rewrites=(),
            on={"torch": on_any, "jax": on_any},
            about=__doc__,
            environment=VARIABLES,
            excludes=dict.fromkeys(("torch/cuda", "jax/cuda"), "the memory of a GPU has an allocator of its own"),
        )
    ]
