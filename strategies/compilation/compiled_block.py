"""Fuse each layer by torch's compiler, forward and backward; keep fewer intermediates, pay the time to compile.

Peak: the values that the compiler saves between its two graphs, instead of those of each operator: pointwise operators
in a chain keep one input and are recomputed (min-cut rematerialisation, He and Yu, 2023, in
`torch._functorch.partitioners`). Compiling takes tens of seconds and memory of its own, at the first step; sizes are
taken as static. The compiled code lies in a temporary folder of the process, or where `TORCHINDUCTOR_CACHE_DIR` says;
no helper processes stay. A C++ compiler is needed on a CPU. It is not predicted: fake tensors cannot run machine code,
and the uncompiled code keeps up to twice as much. Sums are fused, so results differ in the last bits. torch compiles
eight forms of a function: batches of more lengths than those, as of documents, are computed uncompiled, which is noted.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, wraps
from logging import WARNING, Handler, LogRecord, getLogger
from types import MappingProxyType
from typing import Any

from harness import Parts, Strategy, Unpredictable, hookimpl

UNPREDICTED = (
    "what compiled code keeps shows in a run alone, and the uncompiled code keeps up to twice as much: measure it"
)


@cache
def ready() -> Any:
    """Prepare the compiler of this process, without workers; return its folder, which ends with the process.

    A folder that the environment names, and that can be written, is used instead and stays: code that lies there is not
    compiled again.
    """
    import os
    import tempfile
    import warnings

    try:
        folder: Any = os.environ["TORCHINDUCTOR_CACHE_DIR"]
        os.makedirs(folder, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(folder)
    except (KeyError, OSError):
        folder = tempfile.TemporaryDirectory(prefix="harness-compiled-", ignore_cleanup_errors=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder.name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, while it imports its compiler
        import torch._inductor.compile_fx
    torch._inductor.config.compile_threads = 1
    torch._inductor.config.cpp_cache_precompile_headers = False  # they would lie in another folder, and stay
    return folder


class Noted(Handler):
    """Note what torch says where it has compiled as many forms of a function as it may."""

    def __init__(self, notes: dict[str, Any]) -> None:
        super().__init__(WARNING)
        self.notes = notes

    def emit(self, record: LogRecord) -> None:
        if "recompile_limit" in record.getMessage():
            self.notes["compiled"] = "not all batches: torch compiled no more forms, and ran other lengths uncompiled"


@contextmanager
def noted(notes: dict[str, Any]) -> Iterator[None]:
    """Note within it what ran uncompiled."""
    compiler, handler = getLogger("torch._dynamo.convert_frame"), Noted(notes)
    compiler.addHandler(handler)
    try:
        yield
    finally:
        compiler.removeHandler(handler)


def compiled(
    inner: Callable[..., Any], inductor: Mapping[str, Any] = MappingProxyType({}), **settings: Any
) -> Callable[..., Any]:
    """Compile a part at its first call for each shape; `settings` are those of `torch._functorch.config`."""
    import warnings

    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    parts_compiled: list[Callable[..., Any]] = []

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        with torch._functorch.config.patch(**settings), torch._inductor.config.patch(dict(inductor)):
            return compile_fx(graph, inputs)

    @wraps(inner)
    def part(parts: Parts, *args: Any) -> Any:
        tensors = torch.utils._pytree.tree_leaves(args)
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            raise Unpredictable(UNPREDICTED)
        if not parts_compiled:
            ready()
            # A separate backend: torch looks compiled code up by the function alone, whatever the settings were.
            parts_compiled.append(torch.compile(inner, backend=backend, dynamic=False))
        with warnings.catch_warnings(), noted(parts.notes):
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
            return parts_compiled[0](parts, *args)

    return part


def on_torch(parts: Parts) -> Parts:
    return replace(parts, block=compiled(parts.block))


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "compiled_block",
            rewrites=("block",),
            on={"torch": on_torch},
            about=__doc__,
            conflicts={"before int8_activations": "torch cannot compile what rounds: name it after int8_activations"},
        )
    ]
