"""The devices among which a run is divided in JAX: the first so many of the process, in one row."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "ranks"
"""The name by which strategies know the row: `jax.lax.psum(value, "ranks")`."""


def row(ranks: int) -> Mesh:
    """Line up one device for each rank; the types of arrays that are divided among them say how."""
    return jax.make_mesh((ranks,), (AXIS,), devices=jax.devices()[:ranks])


def lies_on_row(value: Any) -> bool:
    """Return whether an array, or one that is traced, was put on a row of devices."""
    return not jax.typeof(value).sharding.mesh.empty


def on_each(ranks: int, value: Any) -> Any:
    """Put on every device, whole, what no strategy has put there."""
    if ranks == 1 or lies_on_row(value):
        return value
    return jax.device_put(value, NamedSharding(row(ranks), PartitionSpec()))


def own_rows(values: Any, rows: int) -> Any:
    """Return this rank's of the rows of all ranks; those of one rank are all its own."""
    if len(values) == rows:
        return values
    return jax.lax.dynamic_slice_in_dim(values, jax.lax.axis_index(AXIS) * rows, rows)
