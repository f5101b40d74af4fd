"""Rewrite nothing; use and pay the same as the baseline.

The control of every comparison: what differs in its row is noise, and other rows must differ by more.
"""

from harness import Parts, Strategy, hookimpl


def on_any(parts: Parts) -> Parts:
    return parts


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [Strategy("nothing", rewrites=(), on={"torch": on_any, "jax": on_any}, about=__doc__)]
