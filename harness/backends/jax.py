"""JAX: compiled steps with donated state, device counters, and prediction from the compiler's own analysis."""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from harness.backends import NO_VARIABLES, Batch, Sizes, Step, Unavailable, cards, jax_cuda, jax_scratch
from harness.backends.jax_flops import work
from harness.contract.parts import BESIDE, Parts
from harness.contract.place import Place
from harness.contract.protocols import Array, DrawPart, Tree
from harness.contract.toolkit import mesh, trees
from harness.records.forecast import Forecast
from harness.records.roofline import Operations

EAGER = False
"""A compiled step is one phase."""

QUICK = {"xla_backend_optimization_level": 0}
"""How a program for the CPU is compiled that never runs: without LLVM's optimisation, which comes after the buffers.

Half of the time goes with it, and no byte of the analysis.
"""

SCRATCH_FAILED = "YNNPACK operation failed: error"
"""How a step ends whose library found no memory for its scratch on the CPU; the reason itself is lost.

`ynn_runtime::invoke` (XNNPACK, ynnpack/subgraph/runtime.cc) says so of every operation that cannot be carried out, and
XLA fixes and checks the sizes of its operations before the program runs.
"""

DRAWN = 3
"""Copies of a parameter while it is drawn on the CPU: of numpy, of JAX, and one between."""

BOUND_SLACK = 0.01
"""By how much of a budget the allocator's limit may differ from it: it is passed as a rounded share of the device."""

_base: dict[int, int] = {}
"""The bytes in use on each device, from which its peak counts."""
_before: dict[int, int] = {}
"""The peak of each device before the run, which the run must exceed to be seen: the counter has no reset."""


def start(place: Place) -> dict[str, str]:
    """Make the device ready; return its facts. Raises Unavailable where there is none."""
    platform = "gpu" if place.device == "cuda" else place.device
    try:
        devices = jax.devices(platform)
    except RuntimeError as error:  # no plugin for it, no device, or a driver that is too old, in JAX's own words
        reason = str(error).strip().partition("\n")[0]
        raise Unavailable(f"JAX finds no {place.device} device that it can use: {reason}") from None
    if place.device == "cuda":
        full_precision()
    return {"device": devices[0].device_kind, "threads": os.environ.get("OMP_NUM_THREADS", "")}


def full_precision() -> None:
    """Let products of float32 be products of float32: a GPU's compiler would round their factors to TF32."""
    jax.config.update("jax_default_matmul_precision", "highest")


def warm(place: Place) -> None:
    """Do nothing: a compiled step takes its scratch and returns it within the call."""


def deterministic(place: Place, strict: bool = True) -> None:
    """Ask for full-precision products; a GPU's compiler was asked for the same bits when the process began."""
    full_precision()


def double() -> AbstractContextManager[object]:
    """Let arrays of 64 bits be made."""
    context: AbstractContextManager[object] = jax.enable_x64(True)
    return context


def cap(place: Place, budget: int | None) -> int | None:
    """Return the budget where the allocator has it for a limit, by XLA_PYTHON_CLIENT_MEM_FRACTION from the start.

    Its limit is another where the device is smaller, or its memory was not known then.
    """
    if budget is None or not (counters := _stats(place)):
        return None
    return budget if abs(counters[0].get("bytes_limit", 0) - budget) <= BOUND_SLACK * budget else None


def like(batch: Sizes, device: str = "cpu") -> tuple[Array, ...]:
    """Describe a batch for `prepare` and `predict`."""
    return tuple(jax.ShapeDtypeStruct(size, jnp.dtype(dtype)) for size, dtype in batch)


def prepare(parts: Parts, batch: Any = None, abstract: Parts | None = None) -> Step:
    """Compile the step with the state donated; ahead of time where `abstract` parts give the state's shapes."""
    if batch is not None and abstract is not None:
        step = lowered(parts, batch, abstract).compile()
        _compile_last()
        return step
    if parts.ranks > 1:
        return _prepared_at_first(parts)
    return jax.jit(partial(parts.step, parts), donate_argnums=0)


def _compile_last() -> None:
    """Compile the smallest of programs: XLA holds some MiB that a program left until it compiles another.

    Freed in the run they would hide as much of its memory: 3 to 9 MiB after the step of a decoder of four layers.
    """
    jax.jit(lambda: jnp.zeros(())).lower().compile()


def lowered(parts: Parts, batch: Any, abstract: Parts) -> Any:
    """Trace and lower the step for a state and a batch known by shape alone."""
    state = _state(abstract)
    if parts.ranks == 1:
        return jax.jit(partial(parts.step, parts), donate_argnums=0).lower(state, *batch)
    _refuse_too_many(parts.ranks)
    state, batch = (_on_row(parts.ranks, each) for each in (state, tuple(batch)))
    return jax.jit(_divided(parts, state, *batch), donate_argnums=0).lower(state, *batch)


def _prepared_at_first(parts: Parts) -> Callable[..., Any]:
    """Compile the step of several devices when its first state shows how it is divided."""
    compiled: Callable[..., Any] | None = None
    _refuse_too_many(parts.ranks)

    def step(state: Any, x: Any, y: Any) -> Any:
        nonlocal compiled
        if compiled is None:
            compiled = jax.jit(_divided(parts, state, x, y), donate_argnums=0)
        return compiled(jax.tree.map(partial(mesh.on_each, parts.ranks), state), x, y)

    return step


def _refuse_too_many(ranks: int) -> None:
    if ranks > (present := len(jax.devices())):
        raise Unavailable(f"{ranks} ranks need as many devices, and JAX sees {present}")


def _divided(parts: Parts, state: Any, x: Any, y: Any) -> Callable[..., Any]:
    """Return the step as each device takes it, on its own part of the state and all of the batch.

    What comes out lies as it went in. What comes out smaller than it went in, as gradients do that are put in the place
    of whole parameters, is divided along the dimension in which it is.
    """
    went_in = jax.tree.map(_spec, state)
    each = partial(
        jax.shard_map,
        partial(parts.step, parts),
        mesh=mesh.row(parts.ranks),
        in_specs=(went_in, PartitionSpec(), PartitionSpec()),
        check_vma=False,  # a rank that sums over all has what it gave differentiated as its own
    )
    own, _ = jax.eval_shape(each(out_specs=PartitionSpec()), state, x, y)
    come_out = jax.tree.map(partial(_comes_out, parts.ranks), state, own)
    return each(out_specs=(come_out, PartitionSpec()))


def _spec(leaf: Any) -> PartitionSpec:
    return jax.typeof(leaf).sharding.spec


def _comes_out(ranks: int, before: Any, after: Any) -> PartitionSpec:
    """Return how an array lies that a device made in the place of one, from the sizes of both."""
    spec = (*_spec(before), *(None for _ in before.shape))
    whole = tuple(size // ranks if name else size for size, name in zip(before.shape, spec, strict=False))
    smaller = (name or (mesh.AXIS if a < b else None) for name, a, b in zip(spec, after.shape, whole, strict=False))
    return PartitionSpec(*smaller)


def _on_row(ranks: int, shapes: Any) -> Any:
    """Describe arrays that lie on several devices: divided as their types say, or else whole on each."""
    on_row = partial(NamedSharding, mesh.row(ranks))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on_row(_spec(leaf))), shapes)


def _state(parts: Parts) -> Any:
    """Describe the state that `init` makes, each array with the memory that it lies in: `eval_shape` forgets that."""
    program, shapes = jax.make_jaxpr(partial(parts.init, parts), return_shape=True)(None)
    leaves, structure = jax.tree.flatten(shapes)
    placed = [_in_memory(leaf, aval) for leaf, aval in zip(leaves, program.out_avals, strict=True)]
    return jax.tree.unflatten(structure, placed)


def _in_memory(leaf: Any, aval: Any) -> Any:
    if getattr(aval, "memory_space", None) != jax.memory.Space.Host:
        return leaf
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=host)


def wait(outputs: Tree) -> None:
    """Return when all outputs are computed."""
    jax.block_until_ready(outputs)


def finish(outputs: Tree) -> Any:
    """End one turn: block on all outputs, then read the clock."""
    jax.block_until_ready(outputs)
    return time.perf_counter_ns()


def seconds(marks: Sequence[Any]) -> list[float]:
    """Turn marks into the seconds between them."""
    return [(b - a) / 1e9 for a, b in pairwise(marks)]


def clear(place: Place) -> None:
    """Note the bytes in use as the base, and the peak so far; the allocator's peak cannot be reset."""
    counters = _stats(place)
    _base.clear()
    _base.update({index: stats.get("bytes_in_use", 0) for index, stats in enumerate(counters)})
    _before.clear()
    _before.update({index: stats.get("peak_bytes_in_use", 0) for index, stats in enumerate(counters)})


def reset_peak(place: Place) -> None:
    """Do nothing: JAX offers no reset, so a phase sets the peak when the counter rose in it."""


def peak(place: Place) -> dict[str, int]:
    """Read the peak of the run so far, in bytes above the base: of several devices that of the largest.

    Nothing before the run exceeded what was in use at its largest earlier, as when compiling tried kernels on arrays
    of its own: how much less the run took cannot be told.
    """
    of_devices = peaks(place)
    return {"allocated": max(of_devices)} if of_devices else {}


def in_use(place: Place) -> int | None:
    """Read the bytes in use on the fullest device now, above its base; None on the CPU."""
    of_devices = [stats.get("bytes_in_use", 0) - _base.get(at, 0) for at, stats in enumerate(_stats(place))]
    return max(of_devices, default=None)


def tracing() -> bool:
    """Return True: all of a step is traced before it runs."""
    return True


def peaks(place: Place) -> list[int]:
    """Read the peak of each device in the run so far, in bytes above its base; none on the CPU, and none unseen."""
    return [
        stats["peak_bytes_in_use"] - _base.get(at, 0)
        for at, stats in enumerate(_stats(place))
        if stats.get("peak_bytes_in_use", 0) > _before.get(at, 0)
    ]


def reserved(place: Place) -> int | None:
    """Return the bytes that the allocator has taken from the driver; None where it does not tell."""
    return next((stats.get("pool_bytes") for stats in _stats(place)), None)


def _stats(place: Place) -> list[dict[str, int]]:
    """Read the counters of each device; the CPU has none."""
    if place.device == "cpu":
        return []
    return [device.memory_stats() or {} for device in jax.devices("gpu")]


def ran_out(error: BaseException) -> str | None:
    """Return whose memory ran out, by the words of the error; None for any other."""
    text = str(error)
    if isinstance(error, MemoryError) or "MemoryError: " in text:  # a callback's error comes as text
        return "host"
    if "Shared memory size limit exceeded" in text:  # of one kernel: no memory that a strategy saves
        return None
    if SCRATCH_FAILED in text:
        return "host"
    if "RESOURCE_EXHAUSTED" in text or "Out of memory" in text:
        return "host" if jax.default_backend() == "cpu" or "pinned_host" in text else "device"
    return None


def abstract_draw(parts: Parts, name: str, shape: tuple[int, ...], deviation: float) -> Array:
    """Stand in for the drawing of a parameter where no values are wanted."""
    return jnp.zeros(shape, jnp.float32)


def predict(
    build: Callable[[], Parts],
    place: Place,
    batch: Batch,
    source_bytes: int,
    steps: int,
    ranks: int = 1,
    environment: Mapping[str, str] = NO_VARIABLES,
) -> Forecast:
    """Compile the step for the shapes and add up the compiler's analysis: arguments + temporaries + outputs - reused.

    The program of several devices is analysed as that of one; its share of what the process holds comes on top.
    Its own peak field is not used: it left out nearly all temporaries on the CPU. What the CPU's library takes within
    a call is not in the analysis either, see `jax_scratch`. A GPU need not be there, see `jax_cuda`.
    """
    if place.device == "cuda":
        return _for_gpu(build, batch, ranks)
    parts = build()
    if getattr(parts.shape, "evaluations", 0):
        raise Unavailable("what follows the steps of a run is there in torch alone: leave out `evaluations`")
    compiled = lowered(parts, like(batch), parts).compile(QUICK)
    arguments, growth, _ = _analysis(compiled)
    made = arguments if ranks > 1 else max(arguments, _most_while_drawn(parts))
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    growth += jax_scratch.scratch(compiled.as_text() or "", threads)
    growth += int(parts.notes.get(BESIDE, 0))
    living = source_bytes + arguments
    peaks = {"init": source_bytes + made, "batches": living, "steady_step": living + growth}
    if ranks > 1:
        return Forecast(peaks, ())
    return Forecast(peaks, _work(parts, _state(parts), like(batch)))


def _most_while_drawn(parts: Parts) -> int:
    """Return the most that drawing one parameter after the other takes: those before it, and it in `DRAWN` copies."""
    earlier, most = 0, 0

    def draw(parts: Parts, name: str, shape: tuple[int, ...], deviation: float) -> Any:
        nonlocal earlier, most
        value = inner(parts, name, shape, deviation)
        most = max(most, earlier + DRAWN * 4 * math.prod(shape))
        earlier += sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(value))
        return value

    inner = parts.draw
    jax.eval_shape(partial(parts.init, replace(parts, draw=draw)), None)
    return most


def _for_gpu(build: Callable[[], Parts], batch: Sizes, ranks: int) -> Forecast:
    """Compile the step for a GPU as its own compiler does, without tuning; what lies on the host counts apart."""
    if ranks > 1:
        raise Unavailable("jax/cuda is predicted for one GPU, and this row runs on several")
    card = cards.chosen()
    device = jax_cuda.device(card)
    with jax_cuda.supposed(card), jax.default_matmul_precision("highest"):
        parts = build()
        state, arrays = jax.tree.map(partial(_laid_on, device), (_state(parts), like(batch)))
        compiled = jax_cuda.compiled(jax.jit(partial(parts.step, parts), donate_argnums=0).lower(state, *arrays))
        counted = _work(parts, state, arrays)
    arguments, growth, on_host = _analysis(compiled)
    return Forecast(
        {"init": arguments, "steady_step": arguments + growth}, counted, host_bytes=on_host, target=card.name
    )


def _laid_on(device: Any, leaf: Any) -> Any:
    """Describe an array as one of a device, or of the host's memory beside it where it is described so."""
    kind = getattr(getattr(leaf, "sharding", None), "memory_kind", None)
    sharding = jax.sharding.SingleDeviceSharding(device, memory_kind=kind if kind == "pinned_host" else None)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _analysis(compiled: Any) -> tuple[int, int, int]:
    """Return what a program takes for its arguments, what more while it runs, and what on the host beside a device."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise Unavailable("this jaxlib gives no memory analysis")
    growth = analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    on_host = analysis.host_argument_size_in_bytes + analysis.host_temp_size_in_bytes
    return analysis.argument_size_in_bytes, growth, on_host


def _work(parts: Parts, state: Any, batch: Any) -> tuple[Operations, ...]:
    return work(jax.make_jaxpr(partial(parts.step, parts))(state, *batch))


def agreed(flag: bool) -> bool:
    """Return the flag: all devices are those of one process."""
    return flag


def arrays(values: Tree) -> dict[str, tuple[Any, str]]:
    """Copy each leaf to numpy, bfloat16 widened exactly to float32, with the name of its own dtype."""
    copies: dict[str, tuple[Any, str]] = {}
    for name, leaf in trees.leaves(values):
        if leaf is None:
            copies[name] = (None, "")
            continue
        dtype = str(leaf.dtype)
        copies[name] = (np.asarray(leaf.astype(jnp.float32) if dtype == "bfloat16" else leaf), dtype)
    return copies


def cast(inner: DrawPart, dtype: str) -> DrawPart:
    """Draw in another dtype: float64 for the reference, a declared precision for its own yardstick."""

    def draw(parts: Parts, name: str, shape: tuple[int, ...], deviation: float) -> Any:
        return inner(parts, name, shape, deviation).astype(dtype)

    return draw


def buffer(array: Array) -> memoryview:
    """Return the bytes of an array on the host, to be read."""
    return np.asarray(array).reshape(-1).view(np.uint8).data
