"""Nested mappings as flat ones, and back.

A nested mapping is a mapping whose values are leaves or again nested mappings; its
flat form maps paths (tuples of keys) to leaves. The functions keep insertion order, and
leaves are passed on as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from graftree import _jax, errors
from graftree.annotations import Path
from graftree.core import paths


class EmptyNode:
    """Stands for an empty mapping in a flat mapping; a pytree without leaves."""

    def __repr__(self) -> str:
        return "EmptyNode()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EmptyNode)

    def __hash__(self) -> int:
        return hash(EmptyNode)


_jax.register_leafless(EmptyNode)

empty_node = EmptyNode()
"""The only `EmptyNode` that is needed."""

IsLeaf = Callable[[Path, Mapping], bool]
"""Says whether the mapping at a path is to be kept whole."""


def flatten_mapping(
    xs: Mapping,
    /,
    *,
    keep_empty_nodes: bool = False,
    is_leaf: IsLeaf | None = None,
    sep: str | None = None,
) -> dict:
    """Turns a nested mapping into one dict from paths to leaves.

    Args:
        xs: The nested mapping.
        keep_empty_nodes: Whether to store `empty_node` for an empty mapping, which is
            otherwise dropped. An empty root always gives ``{}``.
        is_leaf: A function of path and mapping, called on each mapping including the
            root; where it returns True, the mapping is stored as a leaf.
        sep: A separator to join the keys of each path, which must then be strings.

    Returns:
        A new dict from tuples of keys, or from joined strings, to the leaves.

    Raises:
        AssertionError: If ``xs`` is not a mapping.
        TypeError: If ``sep`` is given and a key is not a string.

    Example:
        >>> nnx.traversals.flatten_mapping({"a": {"b": 1}, "c": 2})
        {('a', 'b'): 1, ('c',): 2}
        >>> nnx.traversals.flatten_mapping({"a": {"b": 1}, "c": 2}, sep="/")
        {'a/b': 1, 'c': 2}
    """
    _check_mapping(xs)
    flat = {}
    for path, value in walk(xs, (), is_leaf):
        if value is empty_node and not (path and keep_empty_nodes):
            continue
        flat[path if sep is None else sep.join(path)] = value
    return flat


def flatten_to_sequence(
    xs: Mapping, /, *, is_leaf: IsLeaf | None = None
) -> list[tuple[Path, Any]]:
    """Lists the leaves of a nested mapping with their paths.

    Args:
        xs: The nested mapping.
        is_leaf: A function of path and mapping, called on each mapping including the
            root; where it returns True, the mapping is listed as a leaf.

    Returns:
        Pairs ``(path, leaf)`` in insertion order, without empty mappings.

    Raises:
        AssertionError: If ``xs`` is not a mapping.

    Example:
        >>> nnx.traversals.flatten_to_sequence({"b": {"x": 1}, "a": 2})
        [(('b', 'x'), 1), (('a',), 2)]
    """
    _check_mapping(xs)
    if is_leaf is not None:
        return [item for item in walk(xs, (), is_leaf) if item[1] is not empty_node]
    return leaves(xs)


def unflatten_mapping(
    xs: Mapping | Iterable[tuple[Any, Any]], /, *, sep: str | None = None
) -> dict:
    """Turns a flat mapping into nested dicts; undoes `flatten_mapping`.

    Args:
        xs: A mapping from paths to leaves, or an iterable of such pairs. A leaf that
            is `empty_node` becomes an empty dict.
        sep: A separator at which to split the paths, which must then be strings.

    Returns:
        New nested dicts.

    Raises:
        TypeError: If ``xs`` is neither a mapping nor an iterable.
        ValueError: If a path is empty, or leads through the leaf of another path.

    Example:
        >>> nnx.traversals.unflatten_mapping({("a", "b"): 1, ("c",): 2})
        {'a': {'b': 1}, 'c': 2}
    """
    pairs: Any = xs.items() if isinstance(xs, Mapping) else xs
    if not isinstance(pairs, Iterable):
        raise TypeError(
            f"expected Mapping or Iterable; got {type(xs).__name__}, where pairs of "
            "path and value are needed."
        )
    if sep is not None:
        pairs = ((path.split(sep), value) for path, value in pairs)
    return nest(
        (path, {} if isinstance(value, EmptyNode) else value) for path, value in pairs
    )


def raw_mapping(xs: Any) -> Mapping:
    """The mapping that a State wraps; any other mapping is returned itself."""
    if type(xs) is dict:
        return xs
    if not isinstance(xs, Mapping):
        raise TypeError(
            f"Expected a State or another mapping, got {type(xs).__name__}."
        )
    return getattr(xs, "raw_mapping", xs)


def leaves(xs: Mapping, /) -> list[tuple[Path, Any]]:
    """Lists the leaves of a nested mapping with their paths, in insertion order."""
    items: list[tuple[Path, Any]] = []
    # Remembers which types are mappings: asking an abstract class would take longer
    # than all the rest.
    nests: dict[type, bool] = {}
    # What remains of each mapping above. No recursion, whose depth Python limits.
    pending: list[tuple[Path, Iterator[Any]]] = [((), iter(xs.items()))]
    while pending:
        path, remaining = pending[-1]
        for key, value in remaining:
            kind = type(value)
            if kind not in nests:
                nests[kind] = issubclass(kind, Mapping)
            if nests[kind]:
                pending.append(((*path, key), iter(value.items())))
                break
            items.append(((*path, key), value))
        else:
            pending.pop()
    return items


def sorted_leaves(state: Any) -> list[tuple[Path, Any]]:
    """Lists the leaves of a state with their paths, sorted by path."""
    return paths.sorted_by_path(leaves(raw_mapping(state)))


def nest(items: Iterable[tuple[Path, Any]]) -> dict:
    """Builds nested dicts from paths and leaves."""
    root: dict = {}
    prefix, node = None, root
    for path, leaf in items:
        if not path:
            raise ValueError(
                "The empty path can't be the place of a leaf in a nested mapping: "
                f"got {type(leaf).__name__} at path {path!r}."
            )
        # Neighbours mostly have the same parent, so it is looked up once for them.
        if path[:-1] != prefix:
            prefix = path[:-1]
            node = _descend(root, prefix)
        node[path[-1]] = leaf
    return root


def _descend(node: dict, path: Path) -> dict:
    """The dict at a path, made if it does not exist."""
    for depth, key in enumerate(path):
        node = node.setdefault(key, {})
        if type(node) is not dict:
            raise conflict(path[: depth + 1], node)
    return node


def conflict(path: Path, leaf: Any) -> ValueError:
    """The error for a path that should hold both a leaf and further keys."""
    return ValueError(
        errors.message(
            f"Conflicting entries at path {tuple(path)!r}: a leaf of type "
            f"{type(leaf).__name__} and a mapping.",
            way_out="Remove one of them or rename its key.",
        )
    )


def _check_mapping(xs: Any) -> None:
    # The contract names AssertionError, also under `python -O`.
    if not isinstance(xs, Mapping):
        raise AssertionError(f"expected Mapping; got {type(xs).__name__}")


def walk(
    xs: Mapping,
    path: tuple[Any, ...],
    is_leaf: IsLeaf | None,
    kinds: type | tuple[type, ...] = Mapping,
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields leaves, and `empty_node` for empty mappings, with their paths.

    Mappings that are not of these kinds are leaves.
    """
    if is_leaf is not None and is_leaf(path, xs):
        yield path, xs
    elif not xs:
        yield path, empty_node
    else:
        for key, value in xs.items():
            if isinstance(value, kinds):
                yield from walk(value, (*path, key), is_leaf, kinds)
            else:
                yield (*path, key), value
