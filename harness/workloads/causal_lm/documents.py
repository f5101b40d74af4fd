"""A published decoder, trained on whole documents: every batch is padded to the longest document in it.

So it is where a published model is fine-tuned on messages, articles or modules. The model is that of `causal_lm`;
documents, padding and figures are those of `documents`.
"""

from dataclasses import replace
from functools import partial
from typing import Any, Literal

from pydantic import Field, model_validator

from harness.contract.parts import Parts
from harness.contract.place import Place
from harness.workloads import causal_lm
from harness.workloads.decoder import documents as of_the_decoder

FILLS_A_BATCH = of_the_decoder.Shape._fills_a_batch_of_documents


class Shape(causal_lm.Shape):
    """The sizes of a published decoder, and of the documents that it is trained on."""

    documents: int = Field(64, ge=1, le=1 << 30, description="how many documents to hold: those of an epoch")
    longer: Literal["refuse", "skip"] = Field("refuse", description="what becomes of documents longer than tokens")

    _fills_a_batch = model_validator(mode="after")(FILLS_A_BATCH)  # type: ignore[arg-type]


def tiny(shape: Shape) -> causal_lm.Shape:
    """Keep the architecture at sizes that cost milliseconds."""
    return causal_lm.tiny(shape).model_copy(update={"documents": 8})


def probe(shape: Shape) -> causal_lm.Shape:
    """Reduce a shape to where answers are compared."""
    return causal_lm.probe(shape).model_copy(update={"documents": 24})


def on_torch(shape: Shape, place: Place, corpus: Any, seed: int = 0) -> Parts:
    """Build the untouched parts."""
    from harness.workloads.data import padding

    parts = causal_lm.on_torch(shape, place, corpus, seed)
    return replace(parts, source=partial(padding.source, seed=seed), windows=padding.windows)


WORKLOAD = replace(
    causal_lm.WORKLOAD,
    name="causal_lm_documents",
    about=__doc__ or "",
    shape=Shape,
    on={"torch": on_torch},
    tiny=tiny,
    probe=probe,
    wanted=of_the_decoder.wanted,
    extent=of_the_decoder.extent,
    data="documents",
)
