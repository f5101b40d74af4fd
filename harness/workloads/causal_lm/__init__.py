"""A published decoder, trained on next tokens: the architecture is that of transformers, made from its `config.json`.

No weights are fetched: they are drawn, so that memory, time and rounding are those of the model and its losses are not.
The model is cut into embedding, layers, norm and head; attention and feed part of a layer have names where the
architecture has modules for them. It is trained without dropout. The optimizer, the data and what follows the steps of
a whole run are the decoder's.
"""

from typing import Any

from pydantic import Field, model_validator

from harness.contract.hooks import hookimpl
from harness.contract.parts import Parts
from harness.contract.place import Place
from harness.contract.workload import Workload
from harness.workloads.causal_lm import configs, resizing
from harness.workloads.decoder import abstract_batch, extent, wanted
from harness.workloads.settings import Text


class Shape(Text):
    """The configuration of a decoder and the sizes of its training run."""

    config: str | dict[str, Any] = Field(
        "smollm2-135m", description="a published name, the path of a config.json, or its values"
    )
    changes: dict[str, Any] = Field(
        default_factory=dict, description="values in place of the configuration's: {hidden_size: 256}"
    )
    layers: int = Field(1, ge=1, le=1000, description="by default the configuration's")
    vocabulary: int = Field(1, ge=1, le=1 << 22, description="by default the configuration's")
    soft_cap: float = Field(0.0, ge=0, le=1e9, description="of the logits; by default the configuration's")

    @model_validator(mode="before")
    @classmethod
    def _completed(cls, settings: Any) -> Any:
        """Take from the configuration what the settings lack, and the values of a file in place of its name."""
        if not isinstance(settings, dict):
            return settings
        config, changes = settings.get("config", "smollm2-135m"), settings.get("changes") or {}
        if not isinstance(config, str | dict) or not isinstance(changes, dict):
            return settings
        values = configs.changed(configs.read(config), changes)
        own: dict[str, Any] = {
            "layers": configs.of(values, "num_hidden_layers"),
            "vocabulary": configs.of(values, "vocab_size"),
            "soft_cap": configs.number(values, "final_logit_softcapping"),
        }
        named = isinstance(config, str) and config in configs.published()
        return {**own, **settings, "config": config if named else configs.read(config)}

    @model_validator(mode="after")
    def _fits_positions(self) -> "Shape":
        positions = configs.of(self.values(), "max_position_embeddings")
        if self.tokens > positions:
            raise ValueError(f"{self.tokens:,} tokens are more than the {positions:,} positions of {self.name}")
        return self

    @property
    def name(self) -> str:
        """The name of the configuration, or of its architecture."""
        return self.config if isinstance(self.config, str) else str(self.config["model_type"])

    @property
    def mixture(self) -> bool:
        """Whether it is a mixture of experts: its data decide how many tokens each expert gets."""
        return any("experts" in name and configs.is_size(value) for name, value in self.values().items())

    def values(self) -> dict[str, Any]:
        """Return the values of the configuration at these sizes."""
        values = configs.changed(configs.read(self.config), self.changes)
        return resizing.with_sizes(values, self.layers, self.vocabulary, self.soft_cap)

    def parameter_shapes(self) -> dict[str, tuple[tuple[int, ...], float]]:
        """Return shape and deviation of each parameter by name, of layers those of each kind: `layers.KIND.NAME`."""
        from harness.workloads.causal_lm.proven import cut
        from harness.workloads.user_model.shared import of_a_kind

        return {of_a_kind(name): (each.shape, each.deviation) for name, each in cut(self).parameters.items()}


def reduced(shape: Shape, layers: int, **sizes: Any) -> Shape:
    """Keep the architecture and every kind of layer at sizes that cost milliseconds."""
    values = configs.changed(configs.read(shape.config), shape.changes)
    changes = {**shape.changes, **resizing.small(values, shape.tokens)}
    layers = max(layers, resizing.period(values))
    return shape.model_copy(
        update={"changes": changes, "layers": layers, "stride": None, "corpus_tokens": None, **sizes}
    )


def tiny(shape: Shape) -> Shape:
    """Keep the architecture at sizes that cost milliseconds."""
    return reduced(shape, 2, vocabulary=512, batch=2, tokens=64)


def probe(shape: Shape) -> Shape:
    """Reduce a shape to where answers are compared: ragged sizes, ignored targets, the same architecture."""
    return reduced(shape, 3, vocabulary=67, batch=3, tokens=37, ignored=0.15)


def parameters(shape: Shape) -> int:
    """Count the parameters, shared ones once, without making them."""
    from harness.workloads.causal_lm.proven import cut

    return sum(each.count for each in cut(shape).parameters.values())


def floor(shape: Shape) -> int:
    """Count the bytes of float32 parameters, gradients and two moments, and one batch of token ids."""
    return parameters(shape) * 16 + 2 * shape.batch * shape.tokens * 8


def on_torch(shape: Shape, place: Place, corpus: Any, seed: int = 0) -> Parts:
    """Build the untouched parts."""
    from harness.workloads.causal_lm._torch import build
    from harness.workloads.causal_lm.proven import cut

    return build(cut(shape), shape, place, corpus, seed)


WORKLOAD = Workload(
    name="causal_lm",
    about=__doc__ or "",
    shape=Shape,
    presets={name: {"config": name} for name in configs.published()},
    on={"torch": on_torch},
    abstract_batch=abstract_batch,
    tiny=tiny,
    probe=probe,
    floor=floor,
    parameters=parameters,
    tokens_per_step=lambda shape: shape.batch * shape.tokens,
    wanted=wanted,
    extent=extent,
    imports=("transformers.modeling_utils", "torch._dynamo"),
    lacks=("add_positions", "rotary", "recur", "scan", "cache", "positions"),
)


@hookimpl
def harness_workloads() -> list[Workload]:
    from harness.workloads.causal_lm import documents  # which begins with the workload above

    return [WORKLOAD, documents.WORKLOAD]
