"""Parts made of somebody's JAX functions."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from harness.contract.data import Source
from harness.contract.parts import Parts
from harness.contract.place import Place
from harness.contract.toolkit import trees
from harness.refusal import Refusal
from harness.workloads.decoder import _jax as decoder
from harness.workloads.decoder import both
from harness.workloads.user_model.shared import demand_rows, with_the_decoders


def parts_of(
    first: Callable[..., Any],
    embed_: Callable[..., Any],
    block_: Callable[..., Any],
    norm: Callable[..., Any],
    shape: Any,
    place: Place,
    corpus: Any,
    seed: int,
) -> Parts:
    """Build the parts."""
    program, sizes = compiled(first, shape)
    values: dict[str, Any] = {}

    def draw(parts: Parts, name: str, shape: tuple[int, ...], deviation: float) -> Any:
        if not values:
            with jax.enable_x64(False):
                values.update(trees.leaves(program(jax.random.key(seed))))
        return values.pop(name)

    def init(parts: Parts, source: Source | None = None) -> dict[str, Any]:
        drawn = (parts.draw(parts, name, leaf.shape, 0.0) for name, leaf in trees.leaves(sizes))
        return decoder.with_moments(parts, trees.rebuilt(sizes, drawn))

    def embed(parts: Parts, params: dict[str, Any], x_BT: Any) -> Any:
        return hidden("embed", embed_(shape, params, x_BT), (*x_BT.shape, None))

    def block(parts: Parts, p: dict[str, Any], x_BTD: Any) -> Any:
        return hidden("block", block_(shape, p, x_BTD), x_BTD.shape, x_BTD.dtype)

    def grad(parts: Parts, state: dict[str, Any], x: Any, y: Any) -> tuple[Any, Any]:
        def loss(params: dict[str, Any]) -> Any:
            x_BTD = parts.stack(parts, params["layers"], parts.embed(parts, params, x))
            head_VD = both.head(params)
            x_BTD = hidden("norm", norm(shape, params, x_BTD), (*x_BTD.shape[:-1], head_VD.shape[-1]))
            return parts.loss(parts, x_BTD, head_VD, y)

        return jax.value_and_grad(loss)(state["params"])

    own = {"draw": draw, "init": init, "embed": embed, "block": block, "grad": grad}
    return with_the_decoders(decoder, shape, place, corpus, seed, **own)


def hidden(function: str, made: Any, shape: tuple[int | None, ...], dtype: Any = None) -> Any:
    """Return what a function of the model made. Raises Refusal where these are no hidden states of a shape and a type.

    An axis that is None, and a type that is None, may be any.
    """
    due = "[B, T, D]" if None in shape else f"{list(shape)}" if dtype is None else f"{dtype}{list(shape)}"
    if not isinstance(made, jax.Array):
        raise Refusal(f"`{function}` of the model returns a {type(made).__name__}: return hidden states {due} alone")
    alike = len(made.shape) == len(shape) and all(b in (a, None) for a, b in zip(made.shape, shape, strict=True))
    if not alike or made.dtype != (dtype or made.dtype):
        raise Refusal(f"`{function}` of the model returns {made.dtype}{list(made.shape)}: return hidden states {due}")
    return made


def compiled(first: Callable[..., Any], shape: Any) -> tuple[Any, Any]:
    """Compile what makes the first values before anything is measured; return it, and the sizes that it gives.

    In 32 bit throughout: the float64 reference would else draw other numbers.
    """
    return _compiled(first, type(shape), shape.model_dump_json())  # type: ignore[arg-type]


@cache
def _compiled(first: Callable[..., Any], of_sizes: Any, text: str) -> tuple[Any, Any]:
    """Compile it for the sizes in a text: lists among them have no hash."""
    shape = of_sizes.model_validate_json(text)
    with jax.enable_x64(False):
        key = jax.random.key(0)
        make = partial(first, shape)
        sizes = jax.eval_shape(make, key)
        demand_pieces(sizes, shape.vocabulary)
        return jax.jit(make).lower(key).compile(), sizes


def demand_pieces(sizes: Any, vocabulary: int) -> None:
    """Raise Refusal where the first values lack the layers, or what logits are made with, for each id."""
    if not isinstance(sizes, dict) or not any(True for _ in trees.leaves(sizes.get("layers", {}))):
        raise Refusal("init of the model returns no 'layers': return a dict with the layers' arrays, stacked [L, ...]")
    if not {"head", "embed"} & sizes.keys():
        raise Refusal(
            "init of the model returns neither 'head' nor 'embed', of which logits are made: add 'head' [V, D]"
        )
    demand_axes(sizes, vocabulary)
    if other := next((name for name, leaf in trees.leaves(sizes) if leaf.dtype != jnp.float32), None):
        raise Refusal(
            f"init of the model returns '{other}' in another type than float32: return that, and use the strategy "
            "`bfloat16` or another of that kind"
        )


def demand_axes(sizes: Any, vocabulary: int) -> None:
    """Raise Refusal where arrays of the layers are not stacked, or what logits are made with has other axes."""
    lengths = {name: leaf.shape[:1] for name, leaf in trees.leaves(sizes["layers"])}
    first, length = next(iter(lengths.items()))
    if other := next((name for name in lengths if lengths[name] != length or not length), None):
        own = "no axis" if not lengths[other] else f"a first axis of {lengths[other][0]}"
        beside = f", and 'layers.{first}' one of {length[0]}" if other != first and length else ""
        raise Refusal(f"init of the model returns 'layers.{other}' with {own}{beside}: stack all layers, [L, ...]")
    name = "head" if "head" in sizes else "embed"
    if len(getattr(sizes[name], "shape", ())) != 2:
        raise Refusal(f"init of the model returns '{name}', of which logits are made, as no array [V, D]: give it")
    demand_rows({name: sizes[name].shape[0]}, vocabulary)


def count(first: Callable[..., Any], shape: Any) -> int:
    """Count the parameters, without making them."""
    sizes = jax.eval_shape(partial(first, shape), jax.random.key(0))
    return sum(leaf.size for _, leaf in trees.leaves(sizes))
