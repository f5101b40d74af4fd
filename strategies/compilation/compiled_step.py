"""Let torch's compiler fuse the whole forward and backward pass into two graphs: fewer intermediates, a longer compile.

Peak: as with `compiled_block`, and what lies between layers, the embedding and the loss is fused too; the graphs hold
all layers, so compiling takes time in proportion to the depth. The optimizer stays as it is: it works in place, one
parameter at a time, and its count of steps would be compiled in. Where a part cannot be traced the graph is cut in two
there. What is said of `compiled_block` about prediction, temporary files and rounding holds here as well.
"""

from dataclasses import replace

from harness import Parts, Strategy, hookimpl


def on_torch(parts: Parts) -> Parts:
    from strategies.compilation.compiled_block import compiled

    return replace(parts, grad=compiled(parts.grad))


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [Strategy("compiled_step", rewrites=("grad",), on={"torch": on_torch}, about=__doc__)]
