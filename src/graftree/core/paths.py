"""Keys and paths: how places in an object tree are named, ordered and printed.

A path is a tuple of keys: attribute names (``str``), dict keys and indices (``int``);
``()`` is the root. Keys are hashable, and ``sort_key`` orders any two of them, also
of different types: numbers first, by value; then strings; then other keys, grouped
by type. Every listing of leaves in the package follows this order.
"""

import operator
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import jax

from graftree.annotations import Key, Path

V = TypeVar("V")

_NUMBERS, _STRINGS, _OTHERS = range(3)


def sort_key(key: Key) -> tuple:
    """Sorts keys: numbers by value, then strings, then others, type by type."""
    if isinstance(key, str):
        return (_STRINGS, "", key)
    if isinstance(key, (int, float)):
        return (_NUMBERS, "", key)
    if isinstance(key, tuple):
        return (_OTHERS, type(key).__name__, path_sort_key(key))
    return (_OTHERS, type(key).__name__, key)


def path_sort_key(path: Path) -> tuple:
    """Sorts paths, key by key."""
    return tuple(map(sort_key, path))


def sorted_keys(keys: Iterable[Key]) -> list[Key]:
    """Lists keys in the order of `sort_key`."""
    listed: list[Any] = list(keys)
    # Python's own comparison is several times faster, gives the same order where it
    # gives one, and raises for the mixed types that it can't order.
    try:
        return sorted(listed)
    except TypeError:
        return sorted(listed, key=sort_key)


def sorted_items(mapping: Mapping[Any, V]) -> list[tuple[Any, V]]:
    """Lists the items of a mapping in the order of its keys."""
    return [(key, mapping[key]) for key in sorted_keys(mapping)]


def sorted_by_path(items: Iterable[tuple[Path, V]]) -> list[tuple[Path, V]]:
    """Lists ``(path, value)`` pairs in the order of their paths."""
    items = list(items)
    try:
        return sorted(items, key=operator.itemgetter(0))
    except TypeError:
        return sorted(items, key=lambda item: path_sort_key(item[0]))


def from_jax(jax_key_path: tuple) -> Path:
    """Turns the key path of a JAX tree function into a path.

    Args:
        jax_key_path: Entries as given by ``jax.tree_util.tree_flatten_with_path``.

    Returns:
        A tuple of keys: indices, dict keys and attribute names; entries of unknown
        types become strings.

    Raises:
        ValueError: If a key can't be hashed or can't be compared with others.

    Example:
        >>> from graftree.core import paths
        >>> [(path, _)] = jax.tree.leaves_with_path({"a": [None, 1.0]})
        >>> paths.from_jax(path)
        ('a', 1)
    """
    return tuple(map(key_from_jax, jax_key_path))


def key_from_jax(entry: Any) -> Key:
    """Turns one entry of a JAX key path into a key."""
    if isinstance(entry, jax.tree_util.GetAttrKey):
        return entry.name
    if isinstance(entry, jax.tree_util.SequenceKey):
        return entry.idx
    if isinstance(entry, (jax.tree_util.DictKey, jax.tree_util.FlattenedIndexKey)):
        return _check_key(entry.key)
    return str(entry)


def _check_key(key: Any) -> Key:
    # The common types need no test. None has no order, but is alone in its type.
    if isinstance(key, (str, int)) or key is None:
        return key
    try:
        hash(key)
        orderable = type(key).__lt__ not in (vars(object)["__lt__"], None)
    except TypeError:
        orderable = False
    if not orderable:
        raise ValueError(
            f"Invalid key {key!r} of type {type(key).__name__} in a path: keys must "
            "be hashable and comparable. Use strings or integers as keys."
        )
    return key


def to_string(path: Path, root: str = "") -> str:
    """Prints a path with slashes, as in ``layers/0/kernel``."""
    return "/".join(map(str, path)) if path else root


def spelled(path: Path) -> tuple[str, ...]:
    """A path as checkpoints spell it, where all keys are strings."""
    return tuple(map(str, path))


def keystr(jax_key_path: tuple) -> str:
    """Prints a JAX key path as the Python expression that reads it."""
    return jax.tree_util.keystr(jax_key_path)
