"""The decoder scoring text token by token from a cache of keys and values: a prompt at once, then one token at a time.

A step takes rows of `tokens`, runs the first `prompt` of them together, and then each other token alone, given the true
tokens before it (teacher forcing), so that losses compare. The loss is the mean negative log-likelihood of the targets
of these `tokens - prompt`, ignored ones left out
(0 where none is left); nothing is trained. A token's time and a step's memory are those of generating text with a
cache (Pope et al. 2022, arXiv:2211.05102).
"""

from typing import Any

from pydantic import Field, model_validator

from harness.contract.hooks import hookimpl
from harness.contract.parts import ENDING_PARTS, RANK_PARTS
from harness.contract.workload import Workload
from harness.workloads import decoder
from harness.workloads.halves import halves

OF_TRAINING = ("learning_rate", "weight_decay", "ignored", "label_smoothing", "z_loss")

LACKS = ("mix", "attend", "recur", "scan", "block", "stack", "loss", "grad", "update", *RANK_PARTS, *ENDING_PARTS)


class Shape(decoder.Shape):
    """The sizes of a decoder, of the rows it scores, and of the prompt."""

    prompt: int = Field(64, ge=1, le=1 << 26, description="tokens of a row that are taken at once; the others follow")

    @model_validator(mode="after")
    def _scores(self) -> "Shape":
        if self.prompt >= self.tokens:
            raise ValueError(f"a prompt of {self.prompt} leaves nothing of {self.tokens} tokens: give fewer")
        trained = [name for name in OF_TRAINING if getattr(self, name) != type(self).model_fields[name].default]
        if trained:
            raise ValueError(f"{trained[0]} is of training, and scoring trains nothing: leave it out")
        return self

    @property
    def cache_numbers(self) -> int:
        """The keys and values of all tokens of a batch."""
        return 2 * self.layers * self.batch * self.tokens * self.key_heads * self.head


PRESETS: dict[str, dict[str, Any]] = {
    name: sizes | {"prompt": sizes["tokens"] // 2 if name == "tiny" else sizes["tokens"] - 64}
    for name, sizes in decoder.PRESETS.items()
}
"""The decoder's. All but the smallest take all but 64 tokens at once."""


def floor(shape: Shape) -> int:
    """Count the bytes of float32 parameters, of all keys and values, and of one row of logits."""
    return 4 * (shape.parameters() + shape.cache_numbers + shape.batch * shape.vocabulary)


def tiny(shape: Shape) -> Shape:
    """Keep the structure of a shape at sizes that cost milliseconds."""
    return Shape(**decoder.tiny(shape).model_dump() | {"tokens": 12, "prompt": 6})


def probe(shape: Shape) -> Shape:
    """Reduce a shape to where answers are compared: ragged sizes, the same code."""
    return Shape(**decoder.probe(shape).model_dump() | {"ignored": 0.0, "prompt": 13})


on_torch, on_jax = halves(__name__)


@hookimpl
def harness_workloads() -> list[Workload]:
    return [
        Workload(
            name="scoring",
            about=__doc__ or "",
            shape=Shape,
            presets=PRESETS,
            on={"torch": on_torch, "jax": on_jax},
            abstract_batch=decoder.abstract_batch,
            tiny=tiny,
            probe=probe,
            floor=floor,
            parameters=Shape.parameters,
            tokens_per_step=lambda shape: shape.batch * (shape.tokens - shape.prompt),  # those that go one by one
            wanted=decoder.wanted,
            extent=decoder.extent,
            lacks=LACKS,
        )
    ]
