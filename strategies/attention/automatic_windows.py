"""Work on a sequence window by window, as `sequence_windows` does, in windows as long as the memory allows.

Peak: what the stack saves of one window takes at most half of `available_gib` (0: what this machine has available, or
its GPU where that computes), the rest is for what does not grow with the window. How much a window saves is measured
once, on three short pieces of the sequence, and carried on as a parabola: attention that keeps its scores grows with
the square. A window is a power of two, every second half of it begins another, and a sequence that fits one window is
left alone. On a GPU it is predicted only with `available_gib`. Price and answer are those of `sequence_windows`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from harness import Parts, Strategy, Unpredictable, available_bytes, hookimpl, knobs, tree
from strategies.attention import sequence_windows

SHARE = 0.5
"""Of the available memory, for what is saved of one window."""
LEAST = 16
"""Tokens of a window, however little memory there is."""
PIECE = 64
"""Tokens of the shortest piece that is measured; the others are twice and four times as long."""

UNKNOWN = "the window is as long as the free memory of the GPU allows, which is not known here: give available_gib"


def chosen(saved: Callable[[int], int], least: float, tokens: int, available: int) -> int:
    """Return the longest window of which the stack saves its share of the available bytes; `tokens` if all of them fit.

    `saved` gives the bytes that are saved of so many tokens, and `least` how many each token saves at the least: what
    a checkpoint inside of the stack keeps is not all seen.
    """
    piece = max(1, min(PIECE, tokens // 8))
    one, two, four = (saved(piece * times) for times in (1, 2, 4))
    square = max(0.0, (four - 3 * two + 2 * one) / (6 * piece**2))
    linear = max(least, (two - one) / piece - 3 * square * piece)
    window = LEAST
    while window < tokens and 2 * window * (linear + 2 * window * square) <= SHARE * available:
        window *= 2
    return min(window, tokens)


def _windowed(
    on_backend: Callable[..., Parts],
    saved_of: Callable[..., int],
    free_on_gpu: Callable[[Any], int],
    parts: Parts,
    available_gib: float,
) -> Parts:
    inner = parts.stack
    made: dict[int, Any] = {}

    def stack(parts: Parts, ps: Any, x_BTD: Any) -> Any:
        B, T, D = x_BTD.shape
        if T not in made:
            on_host = bool(available_gib) or parts.place.device == "cpu"
            available = available_bytes(available_gib) if on_host else free_on_gpu(x_BTD)
            layers = len(ps) if isinstance(ps, list) else len(next(leaf for _, leaf in tree.leaves(ps)))
            window = chosen(
                partial(saved_of, inner, parts, ps, x_BTD), layers * B * D * x_BTD.dtype.itemsize, T, available
            )
            parts.notes["window"] = f"{window:,} of {T:,} tokens, of {available / (1 << 20):,.0f} MiB available"
            made[T] = on_backend(replace(parts, stack=inner), window, max(1, window // 2)).stack
        return made[T](parts, ps, x_BTD)

    return replace(parts, stack=stack)


def saved_in_torch(inner: Any, parts: Parts, ps: Any, x_BTD: Any, tokens: int) -> int:
    """Count the bytes that autograd saves of so many tokens, parameters included."""
    import torch
    from torch.autograd.graph import saved_tensors_hooks

    storages: dict[int, int] = {}

    def note(tensor: Any) -> Any:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor.detach()  # an output that is saved as it is holds its own graph, which then never ends

    with torch.enable_grad(), saved_tensors_hooks(note, lambda tensor: tensor):
        y_BTD = inner(parts, ps, x_BTD[:, :tokens].detach().clone().requires_grad_())  # noqa: F841  keeps what is saved
    return sum(storages.values())


def saved_in_jax(inner: Any, parts: Parts, ps: Any, x_BTD: Any, tokens: int) -> int:
    """Count the bytes that the backward pass needs of so many tokens, parameters included."""
    import jax

    B, _, D = x_BTD.shape
    sizes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), ps)
    piece = jax.ShapeDtypeStruct((B, tokens, D), x_BTD.dtype)
    needed = jax.eval_shape(lambda ps, x: jax.vjp(partial(inner, parts), ps, x)[1], sizes, piece)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(needed))


def free_in_torch(x_BTD: Any) -> int:
    """Return what this process may still take of the GPU; raise Unpredictable for one that need not be there."""
    import torch
    from torch._subclasses import FakeTensor

    if isinstance(x_BTD, FakeTensor):
        raise Unpredictable(UNKNOWN)
    free, total = torch.cuda.mem_get_info()
    allowed = int(torch.cuda.get_per_process_memory_fraction() * total) - torch.cuda.memory_reserved()
    return max(0, min(free, allowed))


def free_in_jax(x_BTD: Any) -> int:
    """Return what JAX's allocator may still hand out; raise Unpredictable where it does not say, or no GPU is here."""
    import jax

    try:
        stats = jax.devices("gpu")[0].memory_stats() or {}
    except RuntimeError:  # predictions see no GPU, even where there is one
        stats = {}
    if "bytes_limit" not in stats:
        raise Unpredictable(UNKNOWN)
    return int(stats["bytes_limit"] - stats["bytes_in_use"])


def on_torch(parts: Parts, available_gib: float = 0.0) -> Parts:
    knobs.at_least_0("automatic_windows", available_gib=available_gib)
    return _windowed(sequence_windows.on_torch, saved_in_torch, free_in_torch, parts, available_gib)


def on_jax(parts: Parts, available_gib: float = 0.0) -> Parts:
    knobs.at_least_0("automatic_windows", available_gib=available_gib)
    return _windowed(sequence_windows.on_jax, saved_in_jax, free_in_jax, parts, available_gib)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "automatic_windows",
            rewrites=("stack",),
            calls=("stack",),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            approximate=True,
            probe={"available_gib": 1e-6},
            conflicts={
                **sequence_windows.conflicts,
                **dict.fromkeys(
                    ("ddp", "zero1", "zero2", "fsdp", "tensor_parallel", "vocabulary_parallel_loss"),
                    "each rank would read by itself how much memory is free, and ranks with windows of two lengths may "
                    "wait for each other without end: use sequence_windows",
                ),
            },
        )
    ]
