"""Walks over objects: listing, mapping, and finding shared values.

Graph mode also visits static attributes and bookkeeping, and each object that is
tracked by identity once. Tree mode sees the same as JAX, with Variables as leaves;
shared references and cycles are errors.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any

from graftree import _jax, config
from graftree.core import filters, paths, walks
from graftree.core.graph import flattening, nodes
from graftree.core.graph.graphdefs import Path
from graftree.core.graph.nodes import Child, GraphKind, Leaf, TreeKind
from graftree.core.objects import attributes, bookkeeping, callables
from graftree.core.objects.pytrees import Pytree
from graftree.core.variables.variables import Variable


def iter_graph(
    node: Any, /, *, graph: bool | None = None
) -> Iterator[tuple[Path, Any]]:
    """Lists an object and everything below it, children before parents.

    Args:
        node: Any object or container.
        graph: ``True`` also visits static attributes and bookkeeping, each object once;
            ``False`` visits the same as JAX. ``None`` takes the default.

    Yields:
        Pairs of a path and a value; the root comes last, with ``()``.

    Raises:
        ValueError: During iteration in tree mode, for shared references, cycles and
            objects that are not pytrees.

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> [path for path, x in nnx.iter_graph(model) if isinstance(x, nnx.Param)]
        [('bias',), ('kernel',)]
    """
    children_of = _in_graph() if config.graph_mode(graph) else _in_tree("iter_graph")
    return walks.walk(node, children_of, children_first=True)


def iter_nodes(
    node: Any, /, *, graph: bool | None = None
) -> Iterator[tuple[Path, Any]]:
    """Lists the same as `iter_graph`; in graph mode only values with children."""
    children_of = (
        _nodes_in_graph() if config.graph_mode(graph) else _in_tree("iter_graph")
    )
    return walks.walk(node, children_of, children_first=True)


def _in_graph() -> walks.ChildrenOf:
    """Finds the children of a value in graph mode; each object comes once."""
    is_new = walks.Once()

    def below(x: Any, _: Path) -> list[tuple[Any, Any]] | None:
        kind = nodes.kind_of(x)
        is_container = not isinstance(kind, Leaf) and not _is_singleton(x)
        if (is_container or kind is Leaf.VARIABLE) and not is_new(x):
            return None
        return _graph_children(x, kind)

    return below


def _nodes_in_graph() -> walks.ChildrenOf:
    """Lists children as `_in_graph` does, without leaves, which are the most."""
    is_new, kinds = walks.Once(), nodes.KINDS

    def below(x: Any, _: Path) -> list[tuple[Any, Any]] | None:
        kind = nodes.kind_of(x)
        if isinstance(kind, Leaf) or not (_is_singleton(x) or is_new(x)):
            return None
        return [
            (key, value)
            for key, value in nodes.items(x, kind)
            if value is not None and type(kinds.get(type(value))) is not Leaf
        ]

    return below


def _is_singleton(x: Any) -> bool:
    """Whether ``x`` is a singleton of CPython: meeting it twice is not sharing."""
    return x is None or (type(x) is tuple and not x)


def _graph_children(x: Any, kind: nodes.Kind) -> list[tuple[Any, Any]]:
    """Lists the children that graph mode visits, with the bookkeeping of Pytrees."""
    if isinstance(kind, Leaf):
        return []
    items = nodes.items(x, kind)
    if isinstance(x, Pytree):
        entries = bookkeeping.complete(x)
        items += [(name, entries[name]) for name in bookkeeping.NAMES]
        items.sort(key=lambda item: paths.sort_key(item[0]))
    return items


def _in_tree(function: str) -> walks.ChildrenOf:
    """Finds the children of a value in tree mode; nothing may come twice."""
    above, leaves = walks.Above(), flattening.RefMap()

    def below(x: Any, path: Path) -> list[tuple[Any, Any]]:
        if isinstance(x, Pytree) and not attributes.facts_of(type(x)).is_pytree:
            raise nodes.not_a_pytree_error(x, paths.to_string(path), function)
        if nodes.is_variable_or_ref(x):
            first = leaves.setdefault(x, path)
            if first is not path:
                flat = [(paths.to_string(p), x) for p in (first, path)]
                nodes.check_tree(flat, function)
        elif _is_tree_node(x) and not _is_singleton(x):
            nodes.check_above(above, x, path)
        return _tree_children(x)

    return below


def _is_tree_node(x: Any) -> bool:
    if isinstance(x, tuple):
        # JAX takes named tuples without a registration, but no other subclass.
        return type(x) is tuple or hasattr(x, "_fields")
    return _jax.is_pytree_type(type(x)) and not isinstance(x, Variable)


def _tree_children(x: Any) -> list[tuple[Any, Any]]:
    if not _is_tree_node(x):
        return []
    items, _ = _jax.flatten_one_level(x)
    keyed = [(paths.key_from_jax(entry), child) for entry, child in items]
    if isinstance(x, Pytree):
        keyed.append((bookkeeping.NAMES[1], bookkeeping.state_of(x)))
    return sorted(keyed, key=lambda item: paths.sort_key(item[0]))


def iter_children(
    node: Any, /, *, graph: bool | None = None
) -> Iterator[tuple[Any, Any]]:
    """Lists the children of a node that are graph nodes, Variables or refs.

    Args:
        node: A Module, another graph node or a container.
        graph: The mode; ``None`` takes the default.

    Yields:
        Pairs of a key and a child; a child under two keys is listed twice.

    Raises:
        ValueError: If ``node`` is not a node, at the first ``next``.

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> [key for key, _ in nnx.iter_children(model)]
        ['bias', 'kernel']
    """
    for key, child in _node_children(node, graph, "iter_children"):
        if nodes.is_graph_node(child):
            yield key, child


def iter_module_children(
    node: Any, /, *, graph: bool | None = None
) -> Iterator[tuple[Any, Any]]:
    """Lists the children of a node that are graph nodes, without Variables.

    Args:
        node: A Module, another graph node or a container.
        graph: The mode; ``None`` takes the default.

    Yields:
        Pairs of a key and a child.

    Raises:
        ValueError: If ``node`` is not a node, at the first ``next``.

    Example:
        >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> [key for key, _ in nnx.iter_module_children(model)]
        ['layers']
    """
    for key, child in _node_children(node, graph, "iter_module_children"):
        if nodes.is_node_module(child):
            yield key, child


def _node_children(
    node: Any, graph: bool | None, function: str
) -> list[tuple[Any, Any]]:
    is_graph = config.graph_mode(graph)
    kind = nodes.kind_of(node)
    if is_graph:
        if isinstance(kind, Leaf):
            raise ValueError(
                f"Expected a graph node, got {type(node).__name__}. Pass a Module or "
                f"another node, or graph=False to nnx.{function} for JAX pytrees."
            )
        return nodes.items(node, kind)
    if isinstance(node, Pytree) and not attributes.facts_of(type(node)).is_pytree:
        raise nodes.not_a_pytree_error(node, "", function)
    if isinstance(kind, Leaf) or not nodes.is_pytree_node(
        node, check_graph_registry=False
    ):
        raise ValueError(
            f"Expected a pytree node, got {type(node).__name__}. Pass a Module or "
            f"another pytree, or graph=True to nnx.{function} for graph nodes."
        )
    return _tree_children(node)


# Mapping.


def map(
    f: Callable[[Path, Any], Any],
    node: Any,
    /,
    *,
    graph: bool | None = None,
    recreate_variables: bool = True,
) -> Any:
    """Builds a new object with ``f(path, leaf)`` in place of each leaf.

    Args:
        f: Called with the Variables of ``node`` themselves. If it returns a Variable,
            that one is used; any other value is wrapped in a Variable with the
            original's type and metadata.
        node: Any object, container, Variable or array; it is not changed.
        graph: The mode; ``None`` takes the default.
        recreate_variables: Whether to wrap values; if False, they are used as they are.

    Returns:
        The new object.

    Raises:
        ValueError: In tree mode, for shared references and cycles.

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> zeros = nnx.map(lambda path, leaf: jnp.zeros_like(leaf[...]), model)
        >>> zeros.kernel[...].sum()
        Array(0., dtype=float32)
    """
    graphdef, leaves = flattening.flatten(node, graph, "map")
    mapped = [f(*item) for item in zip(graphdef.paths(), leaves, strict=True)]
    return flattening.unflatten(graphdef, mapped, recreate_variables=recreate_variables)


def recursive_map(
    f: Callable[[Path, Any], Any], node: Any, /, *, graph: bool | None = None
) -> Any:
    """Replaces each node and leaf, bottom up, by ``f(path, value)``.

    Args:
        f: Called with copies of the nodes whose children are already replaced.
        node: Any object or container; it is not changed. Variables are shared with the
            result unless ``f`` replaces them.
        graph: ``True`` maps shared objects once; ``None`` takes the default.

    Returns:
        The result of ``f`` for the root.

    Raises:
        ValueError: For cycles; in tree mode also for shared references.

    Example:
        >>> def double(path, x):
        ...     return x * 2 if isinstance(x, int) else x
        >>> nnx.recursive_map(double, [1, (2, 3)])
        [2, (4, 6)]
    """
    is_graph = config.graph_mode(graph)
    # For each node that is not rebuilt yet, its new children.
    items: dict[Path, dict[Any, Any]] = collections.defaultdict(dict)
    done: dict[int, tuple[Any, Any]] = {}  # graph nodes and their replacements
    static: set[Path] = set()
    above = walks.Above()

    def children_of(x: Any, path: Path) -> list[tuple[Any, Any]] | None:
        if id(x) in done:
            items[path[:-1]][path[-1]] = done[id(x)][1]
            return None
        kind = nodes.kind_of(x)
        if not (isinstance(kind, Leaf) or _is_singleton(x)):
            first = above(x, path)
            if first is not None:
                raise ValueError(
                    f"Found cycle in the graph at path {paths.to_string(path)!r}: the "
                    f"{type(x).__name__} is also at "
                    f"{paths.to_string(first, '<root>')!r}."
                )
        if path in static or isinstance(kind, GraphKind):
            static.update(
                (*path, child.key)
                for child in nodes.children(x)
                if path in static or child.is_data is False
            )
        return _graph_children(x, kind)

    new = None
    chosen = children_of if is_graph else _in_tree("recursive_map")
    for path, x in walks.walk(node, chosen, children_first=True):
        new_children = items.pop(path, {})
        if is_graph:
            new = f(path, _with_items(x, new_children, is_static=path in static))
        else:
            new = f(path, _with_leaves(x, new_children))
        if is_graph and nodes.is_graph_node(x):
            done[id(x)] = x, new
        if path:
            items[path[:-1]][path[-1]] = new
    return new  # the root comes last


def _with_items(x: Any, items: dict[Any, Any], *, is_static: bool) -> Any:
    """Copies a node with other children; a leaf is returned as it is.

    A static value with the same children is itself, too: a copy has sorted keys.
    """
    kind = nodes.kind_of(x)
    if isinstance(kind, Leaf):
        return x
    children, metadata = kind.flatten(x)
    if is_static and all([items[child.key] is child.value for child in children]):
        return x
    if isinstance(kind, TreeKind):
        return kind.unflatten([*items.items()], metadata)
    copied = kind.create_empty(metadata)
    if isinstance(x, Pytree):
        items = {k: value for k, value in items.items() if k not in bookkeeping.NAMES}
        metadata = metadata._replace(table=_reclassified(x, children, items))
    kind.fill(copied, metadata, [*items], [*items.values()])
    if isinstance(x, Pytree):
        callables.bind_own(copied, x)
    return copied


def _reclassified(
    x: Pytree, children: list[Child], items: dict[Any, Any]
) -> attributes.AttributeTable:
    """Returns the table of ``x``; data put where a static value was becomes data."""
    table = bookkeeping.table_of(x)
    for child, (key, value) in zip(children, items.items(), strict=True):
        name = attributes.name_of(type(x), key)
        if not table[name] and value is not child.value and attributes.is_data(value):
            table = table.with_entry(name, True)
    return table


def _with_leaves(x: Any, items: dict[Any, Any]) -> Any:
    """Copies a value that JAX takes apart, with other children."""
    if not _is_tree_node(x):
        return x
    children, treedef = _jax.flatten_one_level(x)
    return treedef.unflatten(
        [items[paths.key_from_jax(entry)] for entry, _ in children]
    )


def find_duplicates(node: Any, /, *, only: Any = ...) -> list[list[Path]]:
    """Finds objects that can be reached by several paths.

    Args:
        node: Any object or container.
        only: A filter for the repeated occurrences to count.

    Returns:
        For each graph node, Variable, ref or array that occurs more than once, the list
        of its paths. Objects below a repeated node are listed only at its first path.

    Example:
        >>> class Tied(nnx.Module):
        ...     def __init__(self):
        ...         self.a = nnx.Param(jnp.ones(2))
        ...         self.b = nnx.Param(jnp.ones(2))
        ...         self.c = self.a
        >>> nnx.find_duplicates(Tied())
        [[('a',), ('c',)]]
    """
    predicate = filters.to_predicate(only)
    paths_of = flattening.RefMap()
    above = walks.Above()

    def children_of(x: Any, path: Path) -> list[tuple[Any, Any]]:
        kind = nodes.kind_of(x)
        has_identity = kind is Leaf.ARRAY or nodes.is_graph_node(x)
        if has_identity and x in paths_of:
            if predicate(path, x):
                paths_of[x].append(path)
            return []
        if has_identity:
            paths_of[x] = [path]
        if isinstance(kind, Leaf) or above(x, path) is not None:
            return []
        return nodes.items(x, kind, only_data=True)

    collections.deque(walks.walk(node, children_of), maxlen=0)
    return [path_list for path_list in paths_of.values() if len(path_list) > 1]
