"""Nested mappings as flat ones, and back; `FlatState`, the flat form of a State.

A nested mapping is a mapping whose values are leaves or nested mappings; its flat form
maps paths (tuples of keys) to leaves. The functions keep insertion order, and pass on
leaves as they are.

The paths of a FlatState never change; the caller may write to the list of its leaves. A
FlatState from one object is sorted and has each path once; merging keeps it sorted, and
keeps both entries where two FlatStates have the same path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

import jax

from graftree import _jax, errors
from graftree.annotations import Filter, Path
from graftree.core import filters as filterlib, hooks, paths
from graftree.core.text import descriptions, representations
from graftree.core.variables import operators

L = TypeVar("L")


class FlatState(Sequence[tuple[Path, L]], representations.Representable):
    """A sequence of ``(path, leaf)`` pairs; a JAX pytree of its leaves.

    Args:
        items: The pairs.
        sort: Whether to sort them by path; if False, they keep their order.

    Example:
        >>> flat = nnx.FlatState([(("b",), 2), (("a",), 1)], sort=True)
        >>> flat.paths, flat.leaves
        ((('a',), ('b',)), [1, 2])
        >>> flat[0]
        (('a',), 1)
    """

    __slots__ = ("__weakref__", "_leaves", "_paths")
    _paths: tuple[Path, ...]
    _leaves: list[L]

    def __init__(self, items: Iterable[tuple[Path, L]], /, *, sort: bool):
        items = paths.sorted_by_path(items) if sort else list(items)
        self._paths = tuple([path for path, _ in items])
        self._leaves = [leaf for _, leaf in items]

    @staticmethod
    def from_sorted_keys_values(
        keys: Iterable[Path], values: Iterable[L], /
    ) -> FlatState[L]:
        """Creates a FlatState from paths that are sorted already.

        Args:
            keys: The paths; a tuple is kept, not copied.
            values: The leaves; a list is kept, not copied.

        Returns:
            A new FlatState.

        Example:
            >>> nnx.FlatState.from_sorted_keys_values((("a",),), [1]).leaves
            [1]
        """
        flat = FlatState.__new__(FlatState)
        flat._paths = keys if type(keys) is tuple else tuple(keys)
        flat._leaves = values if type(values) is list else list(values)
        return flat

    def __setstate__(self, state: tuple[None, Mapping[str, Any]]) -> None:
        """Takes over the slots in a pickle, which may be one of Flax NNX."""
        slots = {"_keys": (), "_values": (), **state[1]}
        self._paths = tuple(slots.get("_paths", slots["_keys"]))
        self._leaves = list(slots.get("_leaves", slots["_values"]))

    @property
    def paths(self) -> tuple[Path, ...]:
        """Paths of the leaves."""
        return self._paths

    @property
    def leaves(self) -> list[L]:
        """Leaves: the internal list, not a copy."""
        return self._leaves

    def __len__(self) -> int:
        return len(self._paths)

    def __iter__(self) -> Iterator[tuple[Path, L]]:
        return zip(self._paths, self._leaves, strict=True)

    @overload
    def __getitem__(self, index: int) -> tuple[Path, L]: ...
    @overload
    def __getitem__(self, index: slice) -> FlatState[L]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            paths, leaves = self._paths[index], self._leaves[index]
            return FlatState.from_sorted_keys_values(paths, leaves)
        return self._paths[index], self._leaves[index]

    def __nnx_repr__(self) -> Iterable[descriptions.Item]:
        """Yields one entry per pair."""
        return representations.sequence_items(type(self), self)

    @staticmethod
    def merge(flat_state: FlatState[L], /, *flat_states: FlatState[L]) -> FlatState[L]:
        """Merges FlatStates.

        Args:
            flat_state: The first FlatState.
            *flat_states: Further FlatStates.

        Returns:
            A new FlatState with all entries, sorted. Entries with equal paths are all
            kept, later ones last. A single FlatState is returned as it is.

        Example:
            >>> a, b = nnx.FlatState([(("a",), 1)], sort=True), nnx.FlatState(
            ...     [(("b",), 2)], sort=True
            ... )
            >>> nnx.FlatState.merge(b, a).leaves
            [1, 2]
        """
        if not flat_states:
            return flat_state
        all_states = (flat_state, *flat_states)
        return FlatState([item for flat in all_states for item in flat], sort=True)

    def split(self, first: Filter, /, *filters: Filter) -> Any:
        """Divides the entries into groups; each entry must match a filter.

        Args:
            first: The filter of the first group.
            *filters: The filters of further groups. An entry goes to the first group
                whose filter matches.

        Returns:
            A FlatState, or with several filters a tuple with one per filter.

        Raises:
            ValueError: If an entry matches no filter, or ``...`` is not the last one.

        Example:
            >>> flat = nnx.FlatState([(("a",), 1), (("b",), 2)], sort=False)
            >>> a, rest = flat.split(nnx.PathContains("a"), ...)
            >>> rest.leaves
            [2]
        """
        *groups, rest = self.grouped((first, *filters))
        if rest:
            raise remainder_error([*rest])
        return tuple(groups) if filters else groups[0]

    def filter(self, first: Filter, /, *filters: Filter) -> Any:
        """Divides the entries into groups; drops those that match no filter.

        Args:
            first: The filter of the first group.
            *filters: The filters of further groups. An entry goes to the first group
                whose filter matches.

        Returns:
            A FlatState, or with several filters a tuple with one per filter.

        Raises:
            ValueError: If ``...`` is not the last filter.

        Example:
            >>> flat = nnx.FlatState([(("a",), 1), (("b",), 2)], sort=False)
            >>> flat.filter(nnx.PathContains("a")).leaves
            [1]
        """
        *groups, _ = self.grouped((first, *filters))
        return tuple(groups) if filters else groups[0]

    def grouped(self, filters: Sequence[Filter]) -> list[FlatState[L]]:
        """Divides the entries by the first filter that matches.

        Args:
            filters: One filter per group.

        Returns:
            One FlatState per filter, and a last one with all other entries.

        Raises:
            ValueError: If ``...`` stands before another filter.

        Example:
            >>> flat = nnx.FlatState([(("a",), 1), (("b",), 2)], sort=False)
            >>> [len(group) for group in flat.grouped([nnx.PathContains("a")])]
            [1, 1]
        """
        groups = filterlib.group(self, filters)
        return [FlatState(group, sort=False) for group in groups]

    def to_nested_state(self) -> Any:
        """Converts to a State with these leaves.

        Returns:
            A new State; of equal paths, the last one counts.

        Raises:
            ValueError: If a path is empty, or leads through the leaf of another path.

        Example:
            >>> nnx.FlatState([(("a", "b"), 1)], sort=False).to_nested_state()["a"]
            State({
              'b': 1
            })
        """
        return hooks.nested_state.call(nest(self))


def remainder_error(rest: Sequence[tuple[Path, Any]]) -> ValueError:
    """Builds the error for leaves that no filter matches, where each must match one."""
    shown = [f"{path}: {type(leaf).__name__}" for path, leaf in rest[:20]]
    if len(rest) > 20:
        shown.append(f"and {len(rest) - 20} more")
    return ValueError(
        errors.message(
            f"Non-exhaustive filters, got a non-empty remainder of {len(rest)} leaves:",
            where="\n".join(shown),
            way_out="Use `...` as the last filter to match all that remains.",
        )
    )


def create_path_filters(state: Mapping) -> dict[filterlib.PathIn, Any]:
    """Groups the paths of a state by the values of its leaves.

    Args:
        state: A nested mapping whose leaves, or the values of whose Variables, can be
            hashed.

    Returns:
        A dict from one `PathIn` filter per value to the value.

    Raises:
        TypeError: If a value can't be hashed.

    Example:
        >>> nnx.statelib.create_path_filters(nnx.State({"a": 0, "b": None, "c": 0}))
        {PathIn(('a',),('c',)): 0, PathIn(('b',)): None}
    """
    groups: dict[Any, list[Path]] = {}
    for path, leaf in sorted_leaves(state):
        groups.setdefault(operators.unwrap(leaf), []).append(path)
    return {filterlib.PathIn(*group): value for value, group in groups.items()}


jax.tree_util.register_pytree_node(
    FlatState, lambda flat: (flat.leaves, flat.paths), FlatState.from_sorted_keys_values
)


# Nested mappings.


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
        keep_empty_nodes: Whether to store `empty_node` for an empty mapping; otherwise
            it is dropped. An empty root always gives ``{}``.
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
    items = leaves(xs, is_leaf, keeps_empty=keep_empty_nodes)
    return {path if sep is None else sep.join(path): value for path, value in items}


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
    return leaves(xs, is_leaf)


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
    """Returns the mapping that a State wraps; any other mapping is returned itself."""
    if type(xs) is dict:
        return xs
    if not isinstance(xs, Mapping):
        raise TypeError(
            f"Expected a State or another mapping, got {type(xs).__name__}."
        )
    # Asked of the class: an `nnx.Dict` may have an item of that name.
    is_state = hasattr(type(xs), "raw_mapping")
    return getattr(xs, "raw_mapping", xs) if is_state else xs


def leaves(
    xs: Mapping,
    /,
    is_leaf: IsLeaf | None = None,
    *,
    keeps_empty: bool = False,
    kinds: type | tuple[type, ...] = Mapping,
) -> list[tuple[tuple[Any, ...], Any]]:
    """Lists the leaves of a nested mapping with their paths, in insertion order.

    Args:
        xs: The nested mapping.
        is_leaf: As for `flatten_mapping`.
        keeps_empty: Whether to list `empty_node` for an empty mapping below the root.
        kinds: Mappings of other kinds are leaves.
    """
    if is_leaf is not None and is_leaf((), xs):
        return [((), xs)]
    items: list[tuple[Path, Any]] = []
    # Remembers which types are mappings: asking an abstract class would take longer
    # than all the rest.
    nests: dict[type, bool] = {}
    # The rest of each mapping above. No recursion, whose depth Python limits.
    pending: list[tuple[Path, Iterator[Any]]] = [((), iter(xs.items()))]
    while pending:
        path, remaining = pending[-1]
        for key, value in remaining:
            kind, child_path = type(value), (*path, key)
            if kind not in nests:
                nests[kind] = issubclass(kind, kinds)
            if not nests[kind] or (is_leaf is not None and is_leaf(child_path, value)):
                items.append((child_path, value))
            elif value or not keeps_empty:
                pending.append((child_path, iter(value.items())))
                break
            else:
                items.append((child_path, empty_node))
        else:
            pending.pop()
    return items


def sorted_leaves(state: Any) -> list[tuple[Path, Any]]:
    """Lists the leaves of a state with their paths, sorted by path."""
    return paths.sorted_by_path(leaves(raw_mapping(state)))


def nest(items: Iterable[tuple[Path, Any]]) -> dict:
    """Builds nested dicts from paths and leaves."""
    root: dict = {}
    # The mappings on the way to that of the last leaf, which is the last of them.
    nodes, parent, node = [root], (), root
    for path, leaf in items:
        if not path:
            raise ValueError(
                "A nested mapping can't have a leaf at the empty path: "
                f"got {type(leaf).__name__} at path {path!r}."
            )
        # Neighbours usually have the same parent; in deep objects, one of two
        # neighbours is below the parent of the other. Short paths are walked from the
        # root as quickly as they are compared.
        if path[:-1] != parent:
            former, parent, depth = parent, path[:-1], 0
            if len(parent) > 16 < len(former):
                depth = min(len(former), len(parent))
                depth *= former[:depth] == parent[:depth]
            del nodes[depth + 1 :]
            node = nodes[depth]
            for key in parent[depth:]:
                node = node.setdefault(key, {})
                if type(node) is not dict:
                    raise conflict(path[: len(nodes)], node)
                nodes.append(node)
        node[path[-1]] = leaf
    return root


def conflict(path: Path, leaf: Any) -> ValueError:
    """Builds the error for a path that should hold both a leaf and further keys."""
    return ValueError(
        errors.message(
            f"Conflicting entries at path {tuple(path)!r}: a leaf of type "
            f"{type(leaf).__name__} and a mapping.",
            way_out="Remove one of them or rename its key.",
        )
    )


def _check_mapping(xs: Any) -> None:
    # The contract names AssertionError, even under `python -O`.
    if not isinstance(xs, Mapping):
        raise AssertionError(f"expected Mapping; got {type(xs).__name__}")
