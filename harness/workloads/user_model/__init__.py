"""A model of your own as a workload: cut once into embedding, blocks, norm and head, it is trained on next tokens.

The parts are `embed`, `block`, `stack`, `loss`, `grad`, `update` and those of the data, so that strategies of them
apply; what is inside of a block (`mix`, `attend`, `feed`) is not named, and strategies of it are refused with a
sentence. In torch the rows of a batch, moments, gradients and parameters can be divided among ranks. AdamW, the loss
and the data are the decoder's.
"""

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field

from harness.contract.data import Extent
from harness.contract.parts import ENDING_PARTS, RANK_PARTS, Parts
from harness.contract.place import Place
from harness.contract.workload import Workload
from harness.workloads.settings import Text

LACKS = (
    "add_positions",
    "linear",
    "rotary",
    "mix",
    "attend",
    "recur",
    "scan",
    "feed",
    "cache",
    *ENDING_PARTS,
)
"""The parts that no model of one's own has; in JAX those of ranks are lacking too, in torch of them `positions`."""


class Sizes(Text):
    """The sizes of a training run and the number of layers; add those of your model in a subclass."""

    layers: int = Field(2, ge=1, le=1000)


def of_torch(
    name: str,
    make: Callable[[Any], Any],
    shape: type[Sizes] = Sizes,
    small: Mapping[str, Any] | None = None,
    about: str = "",
    presets: Mapping[str, Mapping[str, Any]] | None = None,
) -> Workload:
    """Make a workload of torch modules.

    `make(shape)` returns `(embed, blocks, norm, head)`: a module from ids [B, T] to [B, T, D], the modules of the
    layers, a module over [B, T, D], and the parameter [V, D] that logits are made with; as a fifth,
    `call(block, x_BTD) -> x_BTD` where a layer takes or returns more than its hidden states. The head may be the
    weight of `embed`. Matrices of the layers are taken to be [out, in], as torch's modules store them. `small` are
    sizes at which a step costs milliseconds; there, answers are compared.
    """

    def build(shape: Any, place: Place, corpus: Any, seed: int = 0) -> Parts:
        from harness.workloads.user_model._torch import parts_of

        return parts_of(make, shape, place, corpus, seed)

    def parameters(shape: Any) -> int:
        from harness.workloads.user_model._torch import count

        return count(make, shape)

    def parameter_shapes(shape: Any) -> dict[str, tuple[tuple[int, ...], float]]:
        from harness.workloads.user_model._torch import shapes_of

        return shapes_of(make, shape)

    own = {"parameter_shapes": parameter_shapes, "__doc__": shape.__doc__, "__module__": shape.__module__}
    of_ranks = type(shape.__name__, (shape,), own)
    return _workload(name, {"torch": build}, parameters, of_ranks, small, about, presets, (*LACKS, "positions"))


def of_jax(
    name: str,
    init: Callable[..., Any],
    embed: Callable[..., Any],
    block: Callable[..., Any],
    norm: Callable[..., Any],
    shape: type[Sizes] = Sizes,
    small: Mapping[str, Any] | None = None,
    about: str = "",
    presets: Mapping[str, Mapping[str, Any]] | None = None,
) -> Workload:
    """Make a workload of JAX functions.

    `init(shape, key)` returns nested dicts of arrays: `layers`, whose leaves are stacked [L, ...], `head` [V, D] (or
    `embed` [V, D], which then is the head as well), and whatever `embed(shape, params, x_BT) -> x_BTD`,
    `block(shape, p, x_BTD) -> x_BTD` and `norm(shape, params, x_BTD) -> x_BTD` need. Matrices of the layers are taken
    to be [in, out]. `small` as for `of_torch`.
    """

    def build(shape: Any, place: Place, corpus: Any, seed: int = 0) -> Parts:
        from harness.workloads.user_model._jax import parts_of

        return parts_of(init, embed, block, norm, shape, place, corpus, seed)

    def parameters(shape: Any) -> int:
        from harness.workloads.user_model._jax import count

        return count(init, shape)

    return _workload(name, {"jax": build}, parameters, shape, small, about, presets, (*LACKS, *RANK_PARTS))


def _workload(
    name: str,
    on: Mapping[str, Callable[..., Parts]],
    parameters: Callable[[Any], int],
    shape: type[Sizes],
    small: Mapping[str, Any] | None,
    about: str,
    presets: Mapping[str, Mapping[str, Any]] | None,
    lacks: tuple[str, ...],
) -> Workload:
    def reduced(shape: Any, **sizes: Any) -> Any:
        return shape.model_copy(update={"stride": None, "corpus_tokens": None, **sizes, **(small or {})})

    return Workload(
        name=name,
        about=about or f"A model of your own.\n\n{__doc__}",
        shape=shape,
        presets=presets or {},
        on=on,
        abstract_batch=lambda shape: (((shape.batch, shape.tokens), "int32"),) * 2,
        tiny=lambda shape: reduced(shape, layers=2, vocabulary=512, batch=2, tokens=64),
        probe=lambda shape: reduced(shape, layers=3, vocabulary=67, batch=3, tokens=37, ignored=0.15),
        floor=lambda shape: parameters(shape) * 16 + 2 * shape.batch * shape.tokens * 8,
        parameters=parameters,
        tokens_per_step=lambda shape: shape.batch * shape.tokens,
        wanted=_wanted,
        extent=_extent,
        lacks=lacks,
    )


def _wanted(shape: Any, steps: int) -> dict[str, int]:
    from harness.workloads.decoder import wanted

    return wanted(shape, steps)


def _extent(shape: Any, corpus: Any, steps: int) -> Extent:
    from harness.workloads.data.rows import token_extent

    return token_extent(shape, corpus, steps)
