"""Nested dicts as flat ones, and back: ``flax.traverse_util``.

Unlike ``nnx.traversals``, which takes any mapping, these functions look into dicts and
FrozenDicts only; a State among the values is a leaf, and at the root an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from graftree import errors
from graftree.core.states import flat_states
from graftree.interop.flax_side import frozen_dicts, state_dicts

EmptyNode = flat_states.EmptyNode
empty_node = flat_states.empty_node
"""Stands for an empty dict among the values of a flat one."""

Path = tuple[Any, ...]

_DICTS = (dict, frozen_dicts.FrozenDict)


def flatten_dict(
    xs: Mapping[Any, Any],
    keep_empty_nodes: bool = False,
    is_leaf: Callable[[Path, Mapping[Any, Any]], bool] | None = None,
    sep: str | None = None,
) -> dict[Any, Any]:
    """Turns nested dicts into one dict from paths to leaves.

    Args:
        xs: A dict or FrozenDict, whose values may be such again.
        keep_empty_nodes: Whether `empty_node` is stored for an empty dict, which else
            leaves no trace.
        is_leaf: A function of path and dict; where it returns True, the dict is stored.
        sep: If given, the keys of a path, which must be strings, are joined by it.

    Returns:
        A new dict from tuples of keys, or from joined strings, to the leaves.

    Raises:
        AssertionError: If ``xs`` is neither a dict nor a FrozenDict.
        TypeError: If ``sep`` is given and a key is not a string.

    Example:
        >>> from graftree.interop.flax_side import nested_dicts
        >>> nested_dicts.flatten_dict({"a": {"b": 1}, "c": 2}, sep="/")
        {'a/b': 1, 'c': 2}
    """
    if not isinstance(xs, _DICTS):
        raise AssertionError(
            f"expected (frozen)dict; got {type(xs)}. For a State, use "
            "nnx.traversals.flatten_mapping."
        )
    found = flat_states.leaves(xs, is_leaf, keeps_empty=keep_empty_nodes, kinds=_DICTS)
    return {path if sep is None else sep.join(path): value for path, value in found}


def unflatten_dict(xs: dict[Any, Any], sep: str | None = None) -> dict[Any, Any]:
    """Turns a flat dict into nested ones; undoes `flatten_dict`.

    Args:
        xs: A dict from paths to leaves.
        sep: If given, the paths are strings, to be split at it.

    Returns:
        New nested dicts; a leaf that is `empty_node` becomes an empty one.

    Raises:
        AssertionError: If ``xs`` is not a dict.
        IndexError: If a path is empty.
        TypeError: If a path leads through the leaf of another path.

    Example:
        >>> from graftree.interop.flax_side import nested_dicts
        >>> nested_dicts.unflatten_dict({("a", "b"): 1, ("c",): 2})
        {'a': {'b': 1}, 'c': 2}
    """
    if not isinstance(xs, dict):
        raise AssertionError(f"input is not a dict; it is a {type(xs)}")
    root: dict[Any, Any] = {}
    for path, value in xs.items():
        keys = path if sep is None else path.split(sep)
        if not keys:
            raise IndexError(
                f"An empty path can't be the place of a leaf, here {value!r}."
            )
        node = root
        for depth, key in enumerate(keys[:-1]):
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise TypeError(_conflict(keys[: depth + 1], path))
        node[keys[-1]] = {} if isinstance(value, EmptyNode) else value
    return root


def _conflict(leaf: Any, path: Any) -> str:
    return errors.message(
        f"The path {path!r} leads through the leaf at {tuple(leaf)!r}.",
        way_out="Remove one of them or rename its key.",
    )


def path_aware_map(
    f: Callable[[Path, Any], Any], nested_dict: Mapping[str, Any]
) -> dict[str, Any]:
    """Replaces each leaf of nested dicts by a function of its path and value.

    Args:
        f: A function ``(path, value) -> new value``; the path is a tuple of keys.
        nested_dict: A dict or FrozenDict.

    Returns:
        New nested dicts; empty ones are kept.

    Raises:
        AssertionError: If ``nested_dict`` is neither a dict nor a FrozenDict.

    Example:
        >>> from graftree.interop.flax_side import nested_dicts
        >>> params = {"dense": {"kernel": 1, "bias": 2}}
        >>> nested_dicts.path_aware_map(lambda path, _: path[-1] == "bias", params)
        {'dense': {'kernel': False, 'bias': True}}
    """
    flat = flatten_dict(nested_dict, keep_empty_nodes=True)
    return unflatten_dict(
        {path: v if v is empty_node else f(path, v) for path, v in flat.items()}
    )


_DEPRECATED = "flax.traverse_util.Traversal is deprecated; use jax.tree.map or optax."


class TraverseTree:
    """Visits the leaves of a pytree; an older form of ``jax.tree.map``.

    Example:
        >>> import warnings
        >>> from graftree.interop.flax_side import nested_dicts
        >>> with warnings.catch_warnings(action="ignore"):
        ...     visit = nested_dicts.TraverseTree()
        >>> visit.update(lambda leaf: leaf + 1, [1, {"a": 2}])
        [2, {'a': 3}]
    """

    def __init__(self) -> None:
        warnings.warn(_DEPRECATED, DeprecationWarning, stacklevel=2)

    def iterate(self, inputs: Any) -> Iterator[Any]:
        """Yields the leaves."""
        yield from jax.tree.leaves(inputs)

    def update(self, fn: Callable[[Any], Any], inputs: Any) -> Any:
        """Returns the pytree with ``fn`` applied to each leaf."""
        return jax.tree.map(fn, inputs)


class ModelParamTraversal:
    """Visits the leaves of nested dicts that a function of their path chooses.

    Args:
        filter_fn: A function of a path such as ``"/dense/kernel"`` and the leaf.

    Example:
        >>> import warnings
        >>> from graftree.interop.flax_side import nested_dicts
        >>> with warnings.catch_warnings(action="ignore"):
        ...     biases = nested_dicts.ModelParamTraversal(lambda p, _: "bias" in p)
        >>> biases.update(lambda leaf: 0, {"dense": {"kernel": 1, "bias": 2}})
        {'dense': {'kernel': 1, 'bias': 0}}
    """

    def __init__(self, filter_fn: Callable[[str, Any], bool]) -> None:
        warnings.warn(_DEPRECATED, DeprecationWarning, stacklevel=2)
        self._filter_fn = filter_fn

    def _is_chosen(self, path: Path, leaf: Any) -> bool:
        return leaf is not empty_node and self._filter_fn("/" + "/".join(path), leaf)

    def iterate(self, inputs: Mapping[str, Any]) -> Iterator[Any]:
        """Yields the chosen leaves, sorted by path."""
        for path, leaf in sorted(_flat(inputs).items(), key=lambda item: item[0]):
            if self._is_chosen(path, leaf):
                yield leaf

    def update(self, fn: Callable[[Any], Any], inputs: Mapping[str, Any]) -> Any:
        """Returns new dicts with ``fn`` applied to the chosen leaves."""
        updated = unflatten_dict({
            path: fn(leaf) if self._is_chosen(path, leaf) else leaf
            for path, leaf in _flat(inputs).items()
        })  # fmt: skip
        is_frozen = isinstance(inputs, frozen_dicts.FrozenDict)
        return frozen_dicts.freeze(updated) if is_frozen else updated


def _flat(inputs: Any) -> dict[Any, Any]:
    if not isinstance(inputs, _DICTS):
        raise ValueError(
            "Can only traverse a flax Model instance or a nested dict, not "
            f"{type(inputs)}"
        )
    if isinstance(inputs, frozen_dicts.FrozenDict):
        inputs = inputs.unfreeze()
    return flatten_dict(inputs, keep_empty_nodes=True)


state_dicts.register_serialization_state(
    EmptyNode, lambda _: {}, lambda target, _: target
)
