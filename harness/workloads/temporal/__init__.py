"""A network over windows of sensor frames, trained to label every frame: recurrent, selective, attending or hybrid.

`network` chooses what mixes the frames: `lstm` (Hochreiter and Schmidhuber 1997), `gru` (Cho et al. 2014), `mamba`
(Gu and Dao 2023), causal `attention` (Vaswani et al. 2017) with rotary positions, or `jamba` (Lieber et al. 2024),
whose layers are groups of a Mamba and an attention block, here one of each. All stand in the decoder's pre-norm
blocks with a SwiGLU feed, and are trained by AdamW on the cross-entropy of all frames.
"""

from math import prod
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from harness.contract.data import Extent, windows_in
from harness.contract.hooks import hookimpl
from harness.contract.parts import ENDING_PARTS, RANK_PARTS
from harness.contract.workload import Workload
from harness.workloads.decoder import Sizes
from harness.workloads.halves import halves

CONVOLVED = 4
"""Frames under the causal convolution of Mamba."""


class Shape(BaseModel):
    """The sizes of a network over frames and of its training run."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    network: Literal["lstm", "gru", "mamba", "attention", "jamba"] = "lstm"
    frames: int = Field(4096, ge=1, le=1 << 40, description="frames of the source")
    features: int = Field(64, ge=1, le=1 << 20, description="values of a frame")
    classes: int = Field(16, ge=2, le=1 << 22, description="labels that a frame can have")
    window: int = Field(30, ge=1, le=1 << 26, description="frames in a row of the batch")
    stride: int = Field(1, ge=1, le=1 << 26, description="frames between the starts of two windows")
    batch: int = Field(64, ge=1, le=1 << 20)
    layers: int = Field(1, ge=1, le=1000, description="of jamba: groups of two blocks")
    width: int = Field(128, ge=2, le=1 << 16)
    heads: int = Field(4, ge=1, le=1024)
    states: int = Field(16, ge=1, le=4096, description="states of each channel of a selective scan")
    expand: int = Field(2, ge=1, le=64, description="channels of a selective scan, in widths")
    learning_rate: float = Field(1e-3, ge=0, le=10)
    weight_decay: float = Field(0.01, ge=0, le=1)
    shuffle: bool = Field(False, description="take the windows of each epoch in a random order")

    # What the decoder's parts ask of a shape, and this network leaves no choice about.
    norm: ClassVar[str] = "rms"
    feed: ClassVar[str] = "swiglu"
    bias: ClassVar[bool] = False
    parallel: ClassVar[bool] = False
    head_bias: ClassVar[bool] = False
    query_key_norm: ClassVar[bool] = False
    positions: ClassVar[str] = "rotary"
    rotary_base: ClassVar[float] = 10_000.0

    @model_validator(mode="after")
    def _fits_together(self) -> "Shape":
        count = windows_in(self.frames, self.window, self.stride)
        if count < self.batch:
            raise ValueError(f"{self.frames} frames hold {count} windows, fewer than one batch of {self.batch}")
        if self.attends and self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        if self.attends and self.head < 2:
            raise ValueError(f"a head of width {self.head} is too narrow for rotary positions: at least 2")
        return self

    @property
    def attends(self) -> bool:
        return self.network in ("attention", "jamba")

    @property
    def key_heads(self) -> int:
        return self.heads

    @property
    def head(self) -> int:
        return self.width // self.heads

    @property
    def rotated(self) -> int:
        return 2 * (self.head // 2)

    @property
    def inner(self) -> int:
        """The inner width of the feed part."""
        return 64 * -(-8 * self.width // (3 * 64))

    @property
    def channels(self) -> int:
        """E, the width of a selective scan."""
        return self.expand * self.width

    @property
    def rank(self) -> int:
        """The rank of the step sizes of a selective scan."""
        return -(-self.width // 16)

    def parameter_shapes(self) -> Sizes:
        """Name each parameter once, with its shape and the deviation it is drawn with (0: ones; -1: zeros).

        Those of a layer carry the prefix `layers.` and stand for all `layers`.
        """
        layer = {"lstm": self._gates(4), "gru": self._gates(3), "mamba": self._mamba()}.get(self.network, {})
        if self.attends:
            layer |= dict.fromkeys(("wq", "wk", "wv"), ((self.width, self.width), 0.02))
            layer["wo"] = ((self.width, self.width), self._out)
        if self.network == "jamba":
            layer |= {"mamba_norm": ((self.width,), 0.0)} | self._mamba()
        layer |= dict.fromkeys(("up", "gate"), ((self.width, self.inner), 0.02))
        layer |= {"down": ((self.inner, self.width), self._out)}
        layer |= dict.fromkeys(("mix_norm", "feed_norm"), ((self.width,), 0.0))
        shapes: Sizes = {"embed": ((self.features, self.width), usual(self.features))}
        shapes |= {f"layers.{name}": value for name, value in layer.items()}
        return shapes | {"norm": ((self.width,), 0.0), "head": ((self.classes, self.width), 0.02)}

    @property
    def _out(self) -> float:
        return 0.02 / (2 * self.layers) ** 0.5

    def _gates(self, gates: int) -> Sizes:
        """List the gates of a recurrence as torch's kernels take them: [gates, in], with a bias for input and state."""
        rows = gates * self.width
        return {
            "wx": ((rows, self.width), usual(self.width)),
            "wh": ((rows, self.width), usual(self.width)),
            "bx": ((rows,), -1.0),
            "bh": ((rows,), -1.0),
        }

    def _mamba(self) -> Sizes:
        """Name the parameters as Mamba does; `dt_bias` and `a_log` are what is learnt on top of their first values."""
        width, channels, states, rank = self.width, self.channels, self.states, self.rank
        return {
            "in_proj": ((width, 2 * channels), usual(width)),
            "conv": ((channels, CONVOLVED), usual(CONVOLVED)),
            "conv_bias": ((channels,), -1.0),
            "x_proj": ((channels, rank + 2 * states), usual(channels)),
            "dt_proj": ((rank, channels), usual(rank)),
            "dt_bias": ((channels,), -1.0),
            "a_log": ((channels, states), -1.0),
            "skip": ((channels,), 0.0),
            "out_proj": ((channels, width), self._out),
        }

    def parameters(self) -> int:
        """Count the parameters."""
        return sum(
            prod(shape) * (self.layers if name.startswith("layers.") else 1)
            for name, (shape, _) in self.parameter_shapes().items()
        )


def usual(inputs: int) -> float:
    """Return the deviation of what torch's layers draw, uniformly within 1 / sqrt(inputs)."""
    return float((3 * inputs) ** -0.5)


PRESETS: dict[str, dict[str, Any]] = {
    "document": {"frames": 380_000, "features": 287, "window": 30, "stride": 1, "batch": 256},
}


def floor(shape: Shape) -> int:
    """Count the bytes of float32 parameters, gradients and two moments, one batch and one window of frames."""
    window = shape.window * (shape.features + 1) * 4
    return shape.parameters() * 4 * 4 + shape.batch * window + window


def tiny(shape: Shape) -> Shape:
    """Keep the structure of a shape at sizes that cost milliseconds."""
    sizes = {"frames": 64, "features": 8, "classes": 8, "window": 16, "stride": 1, "batch": 2}
    return shape.model_copy(update={**sizes, "layers": 2, "width": 64, "heads": 4, "states": 4})


def probe(shape: Shape) -> Shape:
    """Reduce a shape to where answers are compared: ragged sizes, overlapping windows, the same code."""
    sizes = {"frames": 54, "features": 11, "classes": 7, "window": 13, "stride": 2, "batch": 3}
    layers = 2 if shape.network == "jamba" else 3
    return shape.model_copy(update={**sizes, "layers": layers, "width": 36, "heads": 3, "states": 5})


def wanted(shape: Shape, steps: int) -> dict[str, int]:
    """Count frames, features and classes: all frames are read, however few of them the steps read."""
    return {"frames": shape.frames, "features": shape.features, "classes": shape.classes}


def abstract_batch(shape: Shape) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Return shape and dtype of x_BTF and y_BT as the windows hand them over."""
    size = (shape.batch, shape.window)
    return (((*size, shape.features), "float32"), (size, "int32"))


def extent(shape: Shape, corpus: Any, steps: int) -> Extent:
    """Return the sizes of the source."""
    from harness.workloads.data.rows import frame_extent

    return frame_extent(shape, corpus, steps)


on_torch, on_jax = halves(__name__)


@hookimpl
def harness_workloads() -> list[Workload]:
    return [
        Workload(
            name="temporal",
            about=__doc__ or "",
            shape=Shape,
            presets=PRESETS,
            on={"torch": on_torch, "jax": on_jax},
            abstract_batch=abstract_batch,
            tiny=tiny,
            probe=probe,
            floor=floor,
            parameters=Shape.parameters,
            tokens_per_step=lambda shape: shape.batch * shape.window,
            wanted=wanted,
            extent=extent,
            data="frames",
            lacks=("add_positions", "cache", *RANK_PARTS, *ENDING_PARTS),
        )
    ]
