"""How products with the weights of layers are computed: by the library, or by kernels that are written out.

They are here to be compared and not to be used: what a kernel that reads each number from memory anew loses against one
that keeps tiles of them near, and what both lose against the library.
"""

from importlib.util import find_spec


def excluded() -> dict[str, str]:
    """Return the places whose kernels have no compiler here, and what to do: that of a GPU comes with torch."""
    return (
        {} if find_spec("numba") else {"torch/cpu": "it needs the package numba: install it to measure this strategy"}
    )
