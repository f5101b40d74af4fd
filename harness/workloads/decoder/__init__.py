"""A decoder-only transformer trained on next tokens (Vaswani et al. 2017, in its present forms).

Rotary (Su et al. 2021) or learned positions, grouped-query attention (Ainslie et al. 2023), RMSNorm (Zhang and Sennrich
2019) or LayerNorm, SwiGLU (Shazeer 2020) or GELU, tied or untied head, AdamW (Loshchilov and Hutter 2019).
"""

from typing import Any, Literal

from pydantic import Field, model_validator

from harness.contract.data import Extent
from harness.contract.hooks import hookimpl
from harness.contract.workload import Workload
from harness.workloads.halves import halves
from harness.workloads.settings import Text

Sizes = dict[str, tuple[tuple[int, ...], float]]
"""Shape and deviation of each parameter."""


class Shape(Text):
    """The sizes of a decoder and of its training run."""

    layers: int = Field(4, ge=1, le=1000)
    width: int = Field(256, ge=2, le=1 << 16)
    heads: int = Field(4, ge=1, le=1024)
    kv_heads: int | None = Field(None, ge=1, le=1024, description="key and value heads; by default as many as heads")
    head_width: int | None = Field(None, ge=2, le=4096, description="by default width / heads")
    hidden: int | None = Field(None, ge=1, le=1 << 20, description="inner width of the feed part; by default as usual")
    tied: bool = Field(False, description="the head is the embedding")
    head_bias: bool = Field(False, description="the head adds a number to each logit: one column more, which meets a 1")
    feed: Literal["swiglu", "gelu"] = "swiglu"
    norm: Literal["rms", "layer"] = "rms"
    bias: bool = False
    parallel: bool = Field(False, description="attention and feed read the same input and are added (GPT-NeoX)")
    query_key_norm: bool = Field(False, description="RMSNorm of each head's queries and keys (Qwen3)")
    positions: Literal["rotary", "learned"] = Field(
        "rotary", description="angles by which heads are turned, or one learned vector for each of `tokens` positions"
    )
    rotary_share: float = Field(1.0, gt=0, le=1, description="share of a head's width that is rotated")
    rotary_base: float = Field(10_000.0, gt=1, le=1e9)

    @model_validator(mode="after")
    def _fits_together(self) -> "Shape":
        if not self.head_width and self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}: give head_width as well")
        if self.heads % self.key_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.tied and self.head_bias:
            raise ValueError("a head that is the embedding has no bias of its own: leave out tied or head_bias")
        if self.head < 2 and self.positions == "rotary":
            raise ValueError(f"a head of width {self.head} is too narrow for rotary positions: at least 2")
        return self

    @property
    def key_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head(self) -> int:
        return self.head_width or self.width // self.heads

    @property
    def rotated(self) -> int:
        return max(2, 2 * int(self.head * self.rotary_share / 2))

    @property
    def inner(self) -> int:
        usual = 4 * self.width if self.feed == "gelu" else 64 * -(-8 * self.width // (3 * 64))
        return self.hidden or usual

    def parameter_shapes(self) -> Sizes:
        """Name each parameter once, with its shape and the deviation it is drawn with (0: ones; -1: zeros).

        Those of a layer carry the prefix `layers.` and stand for all `layers`.
        """
        width, deviation = self.width, 0.02
        out = deviation / (2 * self.layers) ** 0.5
        query, key = self.heads * self.head, self.key_heads * self.head
        layer: Sizes = {
            "wq": ((width, query), deviation),
            "wk": ((width, key), deviation),
            "wv": ((width, key), deviation),
            "wo": ((query, width), out),
            "up": ((width, self.inner), deviation),
            "down": ((self.inner, width), out),
        }
        if self.feed == "swiglu":
            layer["gate"] = ((width, self.inner), deviation)
        if self.bias:
            layer.update({f"b{name}": ((shape[-1],), -1.0) for name, (shape, _) in layer.items()})
        layer |= self._norm("mix_norm") | self._norm("feed_norm")
        if self.query_key_norm:
            layer |= {"query_norm": ((self.head,), 0.0), "key_norm": ((self.head,), 0.0)}
        shapes: Sizes = {"embed": ((self.vocabulary, width), deviation)}
        if self.positions == "learned":
            shapes["position"] = ((self.tokens, width), deviation)
        shapes |= {f"layers.{name}": value for name, value in layer.items()}
        shapes |= self._norm("norm")
        if not self.tied:
            shapes["head"] = ((self.vocabulary, width + self.head_bias), deviation)
        return shapes

    def _norm(self, name: str) -> Sizes:
        scale: Sizes = {name: ((self.width,), 0.0)}
        return scale if self.norm == "rms" else scale | {f"{name}_bias": ((self.width,), -1.0)}

    def parameters(self) -> int:
        """Count the parameters, shared ones once."""
        total = 0
        for name, (shape, _) in self.parameter_shapes().items():
            size = 1
            for length in shape:
                size *= length
            total += size * (self.layers if name.startswith("layers.") else 1)
        return total


PYTHIA_70M: dict[str, Any] = {
    "layers": 6,
    "width": 512,
    "heads": 8,
    "vocabulary": 50_304,
    "tokens": 2048,
    "feed": "gelu",
    "norm": "layer",
    "bias": True,
    "parallel": True,
    "rotary_share": 0.25,
}

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "vocabulary": 512, "tokens": 128},
    "small": {"layers": 6, "width": 512, "heads": 8, "vocabulary": 32_000, "tokens": 2048},
    "pythia-70m": PYTHIA_70M,
    "pythia-70m-learned": PYTHIA_70M | {"positions": "learned"},
    "llama-3-8b": {
        "layers": 32,
        "width": 4096,
        "heads": 32,
        "kv_heads": 8,
        "hidden": 14_336,
        "vocabulary": 128_256,
        "tokens": 8192,
        "rotary_base": 500_000.0,
    },
    "qwen3-0.6b": {
        "layers": 28,
        "width": 1024,
        "heads": 16,
        "kv_heads": 8,
        "head_width": 128,
        "hidden": 3072,
        "vocabulary": 151_936,
        "tokens": 4096,
        "tied": True,
        "query_key_norm": True,
        "rotary_base": 1_000_000.0,
    },
    "qwen3-4b": {
        "layers": 36,
        "width": 2560,
        "heads": 32,
        "kv_heads": 8,
        "head_width": 128,
        "hidden": 9728,
        "vocabulary": 151_936,
        "tokens": 4096,
        "tied": True,
        "query_key_norm": True,
        "rotary_base": 1_000_000.0,
    },
}


def floor(shape: Shape) -> int:
    """Count the bytes of float32 parameters, gradients and two moments, one batch and one window of token ids."""
    batch = 2 * shape.batch * shape.tokens * 8
    return shape.parameters() * 4 * 4 + batch + 2 * shape.tokens * 4


def tiny(shape: Shape) -> Shape:
    """Keep the structure of a shape at sizes that cost milliseconds."""
    return _reduced(shape, layers=2, width=64, hidden=128, vocabulary=512, batch=2, tokens=64, corpus_tokens=None)


def probe(shape: Shape) -> Shape:
    """Reduce a shape to where answers are compared: ragged sizes, ignored targets, the same code."""
    sizes = {"layers": 3, "width": 48, "hidden": 80, "vocabulary": 67, "batch": 3, "tokens": 37}
    return _reduced(shape, **sizes, ignored=0.15, corpus_tokens=None)


def _reduced(shape: Shape, **sizes: Any) -> Shape:
    few_keys = 2 if shape.key_heads < shape.heads else None
    return shape.model_copy(update={"heads": 4, "kv_heads": few_keys, "head_width": None, "stride": None, **sizes})


def wanted(shape: Shape, steps: int) -> dict[str, int]:
    """Count the token ids that so many steps without a second epoch read, the shifted target included.

    Where the shape says how many to hold, exactly so many are taken, and read again and again.
    """
    read = (shape.batch * steps - 1) * shape.step + shape.tokens + 1
    exact = shape.corpus_tokens
    return {"vocabulary": shape.vocabulary, "needed": exact or read, "exact": int(exact is not None)}


def abstract_batch(shape: Shape) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Return shape and dtype of x_BT and y_BT as the windows hand them over."""
    size = (shape.batch, shape.tokens)
    return ((size, "int32"), (size, "int32"))


def extent(shape: Shape, corpus: Any, steps: int) -> Extent:
    """Return the sizes of the source."""
    from harness.workloads.data.rows import token_extent

    return token_extent(shape, corpus, steps)


on_torch, on_jax = halves(__name__)


@hookimpl
def harness_workloads() -> list[Workload]:
    from harness.workloads.decoder import documents  # which begins with the shape above

    return [
        Workload(
            name="decoder",
            about=__doc__ or "",
            shape=Shape,
            presets=PRESETS,
            on={"torch": on_torch, "jax": on_jax},
            abstract_batch=abstract_batch,
            tiny=tiny,
            probe=probe,
            floor=floor,
            parameters=Shape.parameters,
            tokens_per_step=lambda shape: shape.batch * shape.tokens,
            wanted=wanted,
            extent=extent,
            lacks=("recur", "scan", "cache"),
        ),
        documents.WORKLOAD,
    ]
