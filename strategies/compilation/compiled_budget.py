"""Keep a share of what torch's compiler would save of each layer; pay to recompute the rest, the cheapest first.

Peak: `budget` of the bytes that `compiled_block` keeps of each layer for the backward pass: 1 is what it keeps, 0 its
input alone, which is a checkpoint of each block. Between them the compiler solves a knapsack of bytes against its
estimate of the time of each operator; the measured peak is not monotonic in the budget (pytorch issue 197838), so try
several budgets. Source: `torch._functorch.config.activation_memory_budget`. `compiled_block` describes the rest.
"""

from dataclasses import replace

from harness import Parts, Strategy, hookimpl


def on_torch(parts: Parts, budget: float = 0.5) -> Parts:
    from strategies.compilation.compiled_block import compiled

    if not 0 <= budget <= 1:
        raise ValueError(f"compiled_budget: budget is a share from 0 to 1, not {budget}")
    return replace(parts, block=compiled(parts.block, activation_memory_budget=budget))


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "compiled_budget",
            rewrites=("block",),
            on={"torch": on_torch},
            about=__doc__,
            conflicts={"before int8_activations": "torch cannot compile what rounds: name it after int8_activations"},
        )
    ]
