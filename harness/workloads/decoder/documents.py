"""The decoder, trained on whole documents: every batch is padded to the longest document in it.

So the memory of a step follows the longest document of its batch, and the peak of a run comes where the longest of all
does. A record says what share of the tokens is padding, which batch of an epoch is the largest, and at which step the
peak came. Real tokens count, padding does not.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from pydantic import Field, model_validator

from harness.contract.data import Extent
from harness.contract.parts import Parts
from harness.contract.place import Place
from harness.contract.workload import Workload
from harness.workloads import decoder


class Shape(decoder.Shape):
    """The sizes of a decoder and of the documents that it is trained on, of at most `tokens` tokens to predict."""

    documents: int = Field(64, ge=1, le=1 << 30, description="how many documents to hold: those of an epoch")
    longer: Literal["refuse", "skip"] = Field("refuse", description="what becomes of documents longer than tokens")

    @model_validator(mode="after")
    def _fills_a_batch_of_documents(self) -> "Shape":
        if self.documents < self.batch:
            raise ValueError(f"{self.documents} documents fill no batch of {self.batch}: give more, or a smaller batch")
        return self


def tiny(shape: Shape) -> decoder.Shape:
    """Keep the structure of a shape at sizes that cost milliseconds."""
    return decoder.tiny(shape).model_copy(update={"documents": 8})


def probe(shape: Shape) -> decoder.Shape:
    """Reduce a shape to where answers are compared."""
    return decoder.probe(shape).model_copy(update={"documents": 24})


def wanted(shape: Shape, steps: int) -> dict[str, Any]:
    """Return which documents are read: of one token more than `tokens`, since the last one is a target alone."""
    return {
        "vocabulary": shape.vocabulary,
        "documents": shape.documents,
        "longest": shape.tokens + 1,
        "longer": shape.longer,
    }


def extent(shape: Shape, corpus: Any, steps: int) -> Extent:
    """Return the sizes of the source."""
    from harness.workloads.data import padding

    return padding.extent(shape, corpus, steps)


def _on_documents(build: Callable[..., Parts], shape: Shape, place: Place, corpus: Any, seed: int = 0) -> Parts:
    from harness.workloads.data import padding

    parts = build(shape, place, corpus, seed)
    return replace(parts, source=partial(padding.source, seed=seed), windows=padding.windows)


WORKLOAD = Workload(
    name="documents",
    about=__doc__ or "",
    shape=Shape,
    presets=decoder.PRESETS,
    on={"torch": partial(_on_documents, decoder.on_torch), "jax": partial(_on_documents, decoder.on_jax)},
    abstract_batch=decoder.abstract_batch,
    tiny=tiny,
    probe=probe,
    floor=decoder.floor,
    parameters=Shape.parameters,
    tokens_per_step=lambda shape: shape.batch * shape.tokens,
    wanted=wanted,
    extent=extent,
    data="documents",
    lacks=("recur", "scan", "cache"),
)
