"""Rewrite nothing; use and pay the same as the baseline.

The control of every comparison: when its verdict is not `same`, the other verdicts of the comparison cannot be trusted.
"""

from harness import Parts, Strategy, hookimpl


def on_any(parts: Parts) -> Parts:
    return parts


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [Strategy("nothing", rewrites=(), on={"torch": on_any, "jax": on_any}, about=__doc__)]
