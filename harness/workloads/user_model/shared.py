"""What all models cut into modules share: the parts that are the decoder's, the parameters of a module by name."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from harness.contract.parts import Parts
from harness.contract.place import Place
from harness.refusal import Refusal
from harness.workloads.data import rows
from harness.workloads.decoder import both


def with_the_decoders(decoder: Any, shape: Any, place: Place, corpus: Any, seed: int, **parts: Any) -> Parts:
    """Build the parts of a model: its own, and those of the data and of one half of the decoder."""
    return replace(
        rows.data_parts(shape, place, corpus, partial(rows.token_source, seed=seed)),
        transfer=decoder.transfer,
        stack=decoder.stack,
        loss=decoder.loss,
        update=decoder.update,
        step=both.step,
        **parts,
    )


def of_a_kind(name: str) -> str:
    """Return the name of a parameter, `layers.0.KIND.NAME`, without the place of its layer."""
    return "layers." + name.split(".", 2)[2] if name.startswith("layers.") else name


def inner(values: Mapping[str, Any], group: str) -> dict[str, Any]:
    """Select the parameters of one module, by the names that it knows."""
    return {name.removeprefix(f"{group}."): p for name, p in values.items() if name.startswith(f"{group}.")}


def demand_rows(rows: Mapping[str, int], vocabulary: int) -> None:
    """Raise Refusal where one of several pieces has fewer rows than there are ids."""
    if few := next((name for name, count in rows.items() if count < vocabulary), None):
        raise Refusal(
            f"the {few} of the model has {rows[few]:,} rows, and there are {vocabulary:,} ids: "
            "make it of shape.vocabulary rows"
        )
