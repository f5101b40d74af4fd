"""A part of a layer that runs again in the backward pass, in JAX."""

from collections.abc import Callable
from functools import partial
from typing import Any

from harness import Parts


def recomputed_in_jax(part: Callable[..., Any], policy: Any = None) -> Callable[..., Any]:
    """Return a part (parts, p, x_BTD) that saves for its backward pass what the policy says: without one, its inputs.

    The compiler may join equal computations: in a loop over the layers it finds none.
    """
    import jax

    def recomputed(parts: Parts, p: Any, x_BTD: Any) -> Any:
        return jax.checkpoint(partial(part, parts), prevent_cse=False, policy=policy)(p, x_BTD)

    return recomputed
