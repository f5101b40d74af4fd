"""Fuse the whole forward and backward pass by torch's compiler; keep fewer intermediates, pay a longer compilation.

Peak: as with `compiled_block`, and what lies between layers, the embedding and the loss is fused too; the graphs hold
all layers, so compiling takes time in proportion to the depth. The optimizer stays as it is: it works in place, one
parameter at a time, and its count of steps would be compiled in. The graph is cut in two where a part cannot be
traced. `compiled_block` describes prediction, temporary files and rounding.
"""

from dataclasses import replace

from harness import Parts, Strategy, hookimpl


def on_torch(parts: Parts) -> Parts:
    from strategies.compilation.compiled_block import compiled

    return replace(parts, grad=compiled(parts.grad))


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [Strategy("compiled_step", rewrites=("grad",), on={"torch": on_torch}, about=__doc__)]
