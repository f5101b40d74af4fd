"""Keep the keys and values of each layer in a file mapped into memory; pay page faults and what is written back.

Peak: no anonymous memory for kv; its pages count as resident while they are touched, backed by files, so that the
kernel can write them out and take them back. The files lie in `folder` and never have a name: they end with the
process, however it ends. A folder in memory (tmpfs) raises an error, since its files are the memory to be saved. All
disk space is reserved at once, since a full disk would otherwise kill the process at a later write.

A compiled JAX step reaches a file only by a call to the host, which copies a whole layer for every token: there the
keys and values of one layer are in memory beside the pages of the file.
"""

import math
from dataclasses import replace
from typing import Any

from harness import BESIDE, Parts, Strategy, hookimpl, mapped_files
from strategies.cache.preallocated_cache import appending, within

ON_GPU = "keeps its files in the host's memory, where a GPU does not attend"


def on_torch(parts: Parts, folder: str = mapped_files.FOLDER) -> Parts:
    from torch._subclasses import FakeTensor

    def cache(parts: Parts, batch: int, tokens: int, like: Any) -> Any:
        shape = parts.shape
        size = (2, batch, tokens, shape.key_heads, shape.head)

        def empty() -> Any:
            if isinstance(like, FakeTensor):  # a prediction counts the pages that will be resident, and makes no file
                return [like.new_empty(size) for _ in range(shape.layers)]
            mapped_files.check("mapped_cache", folder, shape.layers * math.prod(size) * like.element_size())
            return [mapped_files.in_torch("mapped_cache", folder, size, like.dtype) for _ in range(shape.layers)]

        return empty, appending(tokens)

    return replace(parts, cache=cache)


def on_jax(parts: Parts, folder: str = mapped_files.FOLDER) -> Parts:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import io_callback

    stores: dict[tuple[int, ...], Any] = {}

    def cache(parts: Parts, batch: int, tokens: int, like: Any) -> Any:
        shape, dtype = parts.shape, np.dtype(like.dtype)
        size = (shape.layers, 2, batch, tokens, shape.key_heads, shape.head)
        of_layer = jax.ShapeDtypeStruct(size[1:], dtype)
        parts.notes[BESIDE] = (math.prod(size) + math.prod(size[1:])) * dtype.itemsize

        def empty() -> Any:
            if not isinstance(like, jax.core.Tracer):  # a prediction makes no file
                mapped_files.check("mapped_cache", folder, math.prod(size) * dtype.itemsize)
            return jnp.zeros((), jnp.int32)  # counts the writes, so that each waits for the one before

        def store() -> Any:
            """Map the file when it is first written to."""
            if size not in stores:
                stores[size] = mapped_files.in_numpy("mapped_cache", folder, size, dtype)
            return stores[size]

        def written(count: Any, layer: Any, position: Any, k_BTGK: Any, v_BTGK: Any) -> Any:
            """Write new tokens on the host, and copy the layer."""
            end, layer = within(int(position) + k_BTGK.shape[1], tokens), int(layer)
            for old, new in zip(store()[layer], (k_BTGK, v_BTGK), strict=True):
                old[:, int(position) : end] = np.asarray(new)
            return np.int32(count + 1), store()[layer]

        def append(count: Any, layer: Any, position: Any, k_BTGK: Any, v_BTGK: Any) -> Any:
            end = position + k_BTGK.shape[1]
            known = isinstance(end, int)
            if known:
                within(end, tokens)
            results = jax.ShapeDtypeStruct((), jnp.int32), of_layer
            new = (x.astype(dtype) for x in (k_BTGK, v_BTGK))
            count, kv = io_callback(written, results, count, layer, position, *new)
            k, v = kv[:, :, :end] if known else kv
            return count, k, v, None

        return empty, append

    return replace(parts, cache=cache)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "mapped_cache",
            rewrites=("cache",),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            excludes={"torch/cuda": ON_GPU, "jax/cuda": ON_GPU},
        )
    ]
