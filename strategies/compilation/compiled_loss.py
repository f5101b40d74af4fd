"""Let torch's compiler cut the loss into chunks by itself; keep a chunk of logits, pay the time to compile.

Inductor's automatic chunker (off unless asked for) looks for a product that is much larger than its inputs and runs it,
and what follows, piece by piece, forward and backward in one graph; the gradient of the logits is made at once.
`chunks` is how many pieces, 0 leaves it to the compiler, which leaves small logits whole. Peak: logits of a piece
several times, and both gradients. `compiled_block` describes prediction, temporary files and rounding. torch only: in
JAX every step is compiled, and XLA cuts nothing by itself.
"""

from dataclasses import replace

from harness import Parts, Strategy, hookimpl


def on_torch(parts: Parts, chunks: int = 8) -> Parts:
    from strategies.compilation.compiled_block import compiled

    if chunks < 0:
        raise ValueError(f"compiled_loss: chunks is {chunks}: give a number, or 0 to leave it to the compiler")
    chunker = {"auto_chunker.enable": True, "auto_chunker.num_chunk": chunks or None}
    return replace(parts, loss=compiled(parts.loss, inductor=chunker))


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [Strategy("compiled_loss", rewrites=("loss",), on={"torch": on_torch}, about=__doc__)]
