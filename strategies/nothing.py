"""Rewrite nothing; keep and pay what the baseline does.

The control of every comparison: when its verdict is not `same`, the others are not to be believed.
"""

from harness import Parts, Strategy, hookimpl


def untouched(parts: Parts) -> Parts:
    return parts


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [Strategy("nothing", rewrites=(), on={"torch": untouched, "jax": untouched}, about=__doc__)]
