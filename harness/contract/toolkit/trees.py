"""Nested dicts and lists of arrays: their leaves by name, and a function over all of them."""

from collections.abc import Callable, Iterator
from typing import Any


def leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each leaf with its dotted name (`layers.0.wq`), in the order of the tree."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, f"{name}.{key}" if name else str(key))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from leaves(value, f"{name}.{index}" if name else str(index))
    else:
        yield name, tree


def names(tree: Any) -> Any:
    """Return the same structure with the dotted name of each leaf in its place."""
    return rebuilt(tree, (name for name, _ in leaves(tree)))


def mapped(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply a function leaf by leaf to trees of one structure; return that structure."""
    if isinstance(tree, dict):
        return {key: mapped(function, value, *(o[key] for o in others)) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [mapped(function, value, *(o[i] for o in others)) for i, value in enumerate(tree)]
    return function(tree, *others)


def rebuilt(tree: Any, values: Iterator[Any]) -> Any:
    """Put new leaves, in the order of `leaves`, into the structure of a tree."""
    return mapped(lambda _: next(values), tree)


def merged(tree: Any, other: Any) -> Any:
    """Join two trees: dicts by their keys, lists of one length by position; of two leaves take the other's."""
    if isinstance(tree, dict) and isinstance(other, dict):
        both = {key: merged(value, other[key]) if key in other else value for key, value in tree.items()}
        return both | {key: value for key, value in other.items() if key not in tree}
    if isinstance(tree, list) and isinstance(other, list):
        return [merged(one, two) for one, two in zip(tree, other, strict=True)]
    return other
