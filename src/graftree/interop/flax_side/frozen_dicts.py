"""Dicts that can't be changed, and nested dicts as flat ones.

``flax.core.FrozenDict`` and the functions around it: a FrozenDict copies the nested
dicts that it is made from, and shows them as FrozenDicts again. As a pytree it is like
a dict: children in the order of their sorted keys, at paths ``DictKey(key)``.

``flax.traverse_util``: unlike ``nnx.traversals``, which takes any mapping, these
functions only enter dicts and FrozenDicts; a State among the values is a leaf, and
at the root an error.
"""

from __future__ import annotations

import collections.abc
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Self, TypeVar, cast

import jax

from graftree.core.states import flat_states
from graftree.interop.flax_side import state_dicts

K = TypeVar("K")
V = TypeVar("V")


class FrozenKeysView(collections.abc.KeysView[K]):
    """Keys of a FrozenDict.

    Example:
        >>> freeze({"a": 1}).keys()
        frozen_dict_keys(['a'])
    """

    def __repr__(self) -> str:
        return f"frozen_dict_keys({list(self)})"


class FrozenValuesView(collections.abc.ValuesView[V]):
    """Values of a FrozenDict.

    Example:
        >>> freeze({"a": 1}).values()
        frozen_dict_values([1])
    """

    def __repr__(self) -> str:
        return f"frozen_dict_values({list(self)})"


@jax.tree_util.register_pytree_with_keys_class
class FrozenDict(Mapping[K, V]):
    """A dict that can't be changed, nor can the dicts in it.

    Args:
        *args: As for `dict`: a mapping, or pairs of key and value.
        **kwargs: More entries.

    Example:
        >>> params = FrozenDict({"dense": {"bias": 1}})
        >>> params["dense"]
        FrozenDict({
            bias: 1,
        })
        >>> params["dense"] = 2
        Traceback (most recent call last):
        ValueError: FrozenDict is immutable.
    """

    __slots__ = ("_dict", "_hash")

    def __init__(
        self, *args: Any, __unsafe_skip_copy__: bool = False, **kwargs: Any
    ) -> None:
        entries = dict(*args, **kwargs)
        self._dict: dict[Any, Any] = (
            entries if __unsafe_skip_copy__ else _thawed(entries)
        )
        self._hash: int | None = None

    def __getitem__(self, key: K) -> V:
        value = self._dict[key]
        is_dict = isinstance(value, dict)
        view = FrozenDict(value, __unsafe_skip_copy__=True) if is_dict else value
        return cast(V, view)

    def __setitem__(self, key: K, value: V) -> None:
        raise ValueError("FrozenDict is immutable.")

    def __contains__(self, key: object) -> bool:
        return key in self._dict

    def __iter__(self) -> Iterator[K]:
        return iter(self._dict)

    def __len__(self) -> int:
        return len(self._dict)

    def __repr__(self) -> str:
        return self.pretty_repr()

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (self.unfreeze(),)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(self.items()))
        return self._hash

    def keys(self) -> FrozenKeysView[K]:
        """Returns the keys, in the order of insertion."""
        return FrozenKeysView(self)

    def values(self) -> FrozenValuesView[V]:
        """Returns the values; dicts among them are FrozenDicts."""
        return FrozenValuesView(self)

    def items(self) -> Any:
        """Yields pairs of key and value."""
        for key in self._dict:
            yield key, self[key]

    def pretty_repr(self, num_spaces: int = 4) -> str:
        """Formats the FrozenDict, an entry per line."""
        if not self._dict:
            return "FrozenDict({})"
        return f"FrozenDict({_text(self._dict, num_spaces)})"

    def copy(self, add_or_replace: Mapping[K, V] = cast(Any, {})) -> Self:
        """Returns a FrozenDict with further entries, or others."""
        return type(self)({**self, **unfreeze(add_or_replace)})

    def pop(self, key: K) -> tuple[Self, V]:
        """Returns a FrozenDict without an entry, and the value of that entry."""
        value = self[key]
        rest = {other: self._dict[other] for other in self._dict if other != key}
        return type(self)(rest), value

    def unfreeze(self) -> dict[K, V]:
        """Returns a copy as nested dicts."""
        return unfreeze(self)

    def tree_flatten_with_keys(self) -> tuple[tuple[Any, ...], Hashable]:
        """Returns the children with their keys, and the sorted keys."""
        keys = tuple(sorted(cast(Any, self._dict)))
        children = [(jax.tree_util.DictKey(key), self._dict[key]) for key in keys]
        return tuple(children), keys

    @classmethod
    def tree_unflatten(cls, keys: tuple[Any, ...], values: tuple[Any, ...]) -> Self:
        """Makes the FrozenDict with these keys and children."""
        # Not a copy: the children belong to JAX, which made them for this.
        return cls(dict(zip(keys, values, strict=True)), __unsafe_skip_copy__=True)


def _thawed(value: Any) -> Any:
    """Copies nested dicts and FrozenDicts as dicts."""
    if not isinstance(value, (dict, FrozenDict)):
        return value
    return {key: _thawed(entry) for key, entry in value.items()}


def freeze(xs: Mapping[Any, Any]) -> FrozenDict[Any, Any]:
    """Returns a FrozenDict with a copy of nested dicts.

    Args:
        xs: A dict or FrozenDict.

    Returns:
        A new FrozenDict.

    Example:
        >>> freeze({"a": 1}) == {"a": 1}
        True
    """
    return FrozenDict(xs)


def unfreeze(x: Any) -> Any:
    """Returns nested dicts with a copy of a FrozenDict.

    Args:
        x: A FrozenDict, or a dict that may hold some.

    Returns:
        New dicts with sorted keys. Anything else is returned as it is.

    Example:
        >>> unfreeze(freeze({"b": {"c": 1}, "a": 2}))
        {'a': 2, 'b': {'c': 1}}
    """
    if not isinstance(x, (dict, FrozenDict)):
        return x
    return jax.tree.map(lambda leaf: leaf, _thawed(x))


def copy(x: Any, add_or_replace: Mapping[Any, Any] = cast(Any, {})) -> Any:
    """Returns a dict or FrozenDict with further entries, or others.

    Args:
        x: A dict or FrozenDict; it stays as it is.
        add_or_replace: The entries to set in the copy.

    Returns:
        A new object of the type of ``x``.

    Raises:
        TypeError: If ``x`` is neither a dict nor a FrozenDict.

    Example:
        >>> copy({"a": 1}, {"b": 2})
        {'a': 1, 'b': 2}
    """
    if isinstance(x, FrozenDict):
        return x.copy(add_or_replace)
    _check_dict(x)
    return {**jax.tree.map(lambda leaf: leaf, x), **add_or_replace}


def pop(x: Any, key: Any) -> tuple[Any, Any]:
    """Returns a dict or FrozenDict without an entry, and the value of that entry.

    Args:
        x: A dict or FrozenDict; it stays as it is.
        key: The key of the entry.

    Returns:
        A new object of the type of ``x``, and the value.

    Raises:
        KeyError: If there is no such entry.
        TypeError: If ``x`` is neither a dict nor a FrozenDict.

    Example:
        >>> pop({"a": 1, "b": 2}, "a")
        ({'b': 2}, 1)
    """
    if isinstance(x, FrozenDict):
        return x.pop(key)
    _check_dict(x)
    rest = jax.tree.map(lambda leaf: leaf, x)
    return rest, rest.pop(key)


def _check_dict(x: Any) -> None:
    if not isinstance(x, dict):
        raise TypeError(f"Expected FrozenDict or dict, got {type(x)}")


def pretty_repr(x: Any, num_spaces: int = 4) -> str:
    """Formats nested dicts, an entry per line.

    Args:
        x: A dict or FrozenDict; for anything else, the text is its ``repr``.
        num_spaces: How far each level is indented.

    Returns:
        The text.

    Example:
        >>> print(pretty_repr({"a": {"b": 1}}))
        {
            a: {
                b: 1,
            },
        }
    """
    if isinstance(x, FrozenDict):
        return x.pretty_repr(num_spaces)
    return _text(x, num_spaces)


def _text(x: Any, num_spaces: int) -> str:
    if not isinstance(x, dict):
        return repr(x)
    if not x:
        return "{}"
    lines = [f"{key}: {_text(value, num_spaces)}," for key, value in x.items()]
    inner = "\n".join(lines).replace("\n", "\n" + " " * num_spaces)
    return "{\n" + " " * num_spaces + inner + "\n}"


def _from_state_dict(target: FrozenDict[Any, Any], state: Any) -> FrozenDict[Any, Any]:
    # Not a level of its own in paths: a FrozenDict is a dict there.
    restored = state_dicts.restore_dict({key: target[key] for key in target}, state)
    return FrozenDict(restored)


state_dicts.register_serialization_state(
    FrozenDict, lambda xs: state_dicts.to_state_dict(unfreeze(xs)), _from_state_dict
)


EmptyNode = flat_states.EmptyNode
empty_node = flat_states.empty_node
"""Stands for an empty dict among the values of a flat one."""

Path = tuple[Any, ...]

_DICTS = (dict, FrozenDict)


def flatten_dict(
    xs: Mapping[Any, Any],
    keep_empty_nodes: bool = False,
    is_leaf: Callable[[Path, Mapping[Any, Any]], bool] | None = None,
    sep: str | None = None,
) -> dict[Any, Any]:
    """Turns nested dicts into one dict from paths to leaves.

    Args:
        xs: A dict or FrozenDict, whose values may be such again.
        keep_empty_nodes: Whether to store `empty_node` for an empty dict, which
            otherwise leaves no trace.
        is_leaf: A function of path and dict; where it returns True, the dict is stored.
        sep: If given, the keys of a path, which must be strings, are joined by it.

    Returns:
        A new dict from tuples of keys, or from joined strings, to the leaves.

    Raises:
        AssertionError: If ``xs`` is neither a dict nor a FrozenDict.
        TypeError: If ``sep`` is given and a key is not a string.

    Example:
        >>> flatten_dict({"a": {"b": 1}, "c": 2}, sep="/")
        {'a/b': 1, 'c': 2}
    """
    if not isinstance(xs, _DICTS):
        raise AssertionError(
            f"expected (frozen)dict; got {type(xs)}. For a State, use "
            "nnx.traversals.flatten_mapping."
        )
    leaves = flat_states.leaves(xs, is_leaf, keeps_empty=keep_empty_nodes, kinds=_DICTS)
    return {path if sep is None else sep.join(path): value for path, value in leaves}


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
        >>> unflatten_dict({("a", "b"): 1, ("c",): 2})
        {'a': {'b': 1}, 'c': 2}
    """
    if not isinstance(xs, dict):
        raise AssertionError(f"input is not a dict; it is a {type(xs)}")
    try:
        return flat_states.unflatten_mapping(xs, sep=sep)
    except ValueError as error:
        kind = IndexError if () in xs else TypeError
        raise kind(str(error)) from None


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
        >>> params = {"dense": {"kernel": 1, "bias": 2}}
        >>> path_aware_map(lambda path, _: path[-1] == "bias", params)
        {'dense': {'kernel': False, 'bias': True}}
    """
    flat = flatten_dict(nested_dict, keep_empty_nodes=True)
    return unflatten_dict(
        {path: v if v is empty_node else f(path, v) for path, v in flat.items()}
    )


state_dicts.register_serialization_state(
    EmptyNode, lambda _: {}, lambda target, _: target
)
