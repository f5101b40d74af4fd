"""Train on a few frames at a time and carry the states of a recurrence on, but no gradient; long links are not learnt.

Truncated backpropagation through time (Williams and Peng, 1990; Sutskever, 2013): each row is cut into segments of
`steps` frames, of which the first may be shorter. The gradient of each is taken by itself, from the states that the
segment before left, and all are summed before the update, each weighed by its targets that count. Peak: the activations
of `steps` frames of all layers, and the gradients once more while they are added. The loss is that of the whole row;
its gradient lacks what would pass through a border, so it is another algorithm. For LSTM and GRU.

In JAX, where a gradient brings no states along, they come from a forward pass of their own.
"""

from harness import Parts, Strategy, hookimpl

WITHOUT = "truncated_bptt carries the states of an LSTM or a GRU, and this network has none: take one of these"


def checked(steps: int) -> int:
    """Check that a segment has a step, and return it; raise ValueError."""
    if steps < 1:
        raise ValueError(f"truncated_bptt: steps must be at least 1, not {steps}")
    return steps


def on_torch(parts: Parts, steps: int = 64) -> Parts:
    from strategies.scan.truncated_bptt._torch import truncated

    return truncated(parts, checked(steps))


def on_jax(parts: Parts, steps: int = 64) -> Parts:
    from strategies.scan.truncated_bptt._jax import truncated

    return truncated(parts, checked(steps))


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "truncated_bptt",
            rewrites=("grad",),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            calls=("recur",),
            approximate=True,
            probe={"steps": 5},
            conflicts={
                "reversible": "it runs the layers one by one, and the two streams would begin anew in each",
                **dict.fromkeys(
                    ("sequence_windows", "automatic_windows"),
                    "it runs the layers one by one, and windows are merged after all of them",
                ),
                "budget_checkpoint": "it runs layers one by one, and each would get the whole budget: use checkpoint",
            },
        )
    ]
