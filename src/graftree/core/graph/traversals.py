"""Walks over objects: listing, mapping, and finding what is shared.

Graph mode visits static attributes and bookkeeping too, and each object that is tracked
by identity once. Tree mode sees what JAX sees, with Variables as leaves, and refuses
shared references and cycles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from graftree import _jax, config
from graftree.core import filters, paths
from graftree.core.graph import flattening, freshness, merging, nodes, tree_checks
from graftree.core.graph.nodes import Child, GraphKind, Leaf, TreeKind
from graftree.core.objects import bookkeeping, classes
from graftree.core.objects.attributes import AttributeTable, is_data
from graftree.core.objects.pytrees import Pytree
from graftree.core.variables.variables import Variable

Path = tuple[Any, ...]


def iter_graph(
    node: Any, /, *, graph: bool | None = None
) -> Iterator[tuple[Path, Any]]:
    """Lists an object and everything below it, children before parents.

    Args:
        node: Any object or container.
        graph: ``True`` visits static attributes and bookkeeping too, each object once;
            ``False`` visits what JAX sees. ``None`` takes the default.

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
    is_graph = config.graph_mode(graph)
    return _post_order(node, _GraphWalk() if is_graph else _TreeWalk("iter_graph"))


def iter_nodes(
    node: Any, /, *, graph: bool | None = None
) -> Iterator[tuple[Path, Any]]:
    """What `iter_graph` lists, in graph mode without what has no children."""
    is_graph = config.graph_mode(graph)
    return _post_order(node, _NodeWalk() if is_graph else _TreeWalk("iter_graph"))


def _post_order(root: Any, walk: _GraphWalk | _TreeWalk) -> Iterator[tuple[Path, Any]]:
    """Yields all that a walk enters, children before parents."""
    # A node, its path, and what remains of its children. No recursion, whose depth
    # Python limits; and nested generators take longer the deeper they are.
    pending: list[tuple[Any, Path, Iterator[tuple[Any, Any]]]]
    pending = [(root, (), iter(walk.enter(root, ()) or ()))]
    while pending:
        x, path, remaining = pending[-1]
        for key, child in remaining:
            where = (*path, key)
            below = walk.enter(child, where)
            if below is not None:
                pending.append((child, where, iter(below)))
                break
        else:
            pending.pop()
            walk.leave(x)
            yield path, x


class _GraphWalk:
    """What a walk in graph mode has met: each object is entered once."""

    def __init__(self) -> None:
        self.seen: dict[int, Any] = {}

    def enter(self, x: Any, path: Path) -> list[tuple[Any, Any]] | None:
        """The children of a value, or ``None`` if it was met before."""
        kind = nodes.kind_of(x)
        is_container = not isinstance(kind, Leaf) and not _is_singleton(x)
        if is_container or kind is Leaf.VARIABLE:
            if id(x) in self.seen:
                return None
            self.seen[id(x)] = x
        return _graph_children(x, kind)

    def leave(self, x: Any) -> None:
        """Nothing: what was met stays so."""


class _NodeWalk(_GraphWalk):
    """A walk that passes over leaves, which most of an object is."""

    def enter(self, x: Any, path: Path) -> list[tuple[Any, Any]] | None:
        kind = nodes.kind_of(x)
        if isinstance(kind, Leaf) or id(x) in self.seen:
            return None
        if not _is_singleton(x):
            self.seen[id(x)] = x
        return [
            (key, value)
            for key, value, _ in kind.flatten(x)[0]
            if value is not None and not isinstance(nodes.kind_of(value), Leaf)
        ]


def _is_singleton(x: Any) -> bool:
    """Whether ``x`` is a singleton of CPython: to meet it twice is not sharing."""
    return x is None or (type(x) is tuple and not x)


def _graph_children(x: Any, kind: nodes.Kind) -> list[tuple[Any, Any]]:
    """The children that graph mode visits, with the bookkeeping of Pytrees."""
    if isinstance(kind, Leaf):
        return []
    listed = [(child.key, child.value) for child in kind.flatten(x)[0]]
    if isinstance(x, Pytree):
        entries = bookkeeping.complete(x)
        listed += [(name, entries[name]) for name in bookkeeping.NAMES]
        listed.sort(key=lambda item: paths.sort_key(item[0]))
    return listed


class _TreeWalk:
    """What a walk in tree mode has met: nothing may be met twice."""

    def __init__(self, function: str) -> None:
        self.function = function
        self.above: dict[int, Path] = {}
        self.leaves: dict[int, tuple[Any, Path]] = {}

    def enter(self, x: Any, path: Path) -> list[tuple[Any, Any]]:
        """The children of a value that is met."""
        if isinstance(x, Pytree) and not classes.facts_of(type(x)).is_pytree:
            where = paths.to_string(path)
            raise tree_checks.not_a_pytree_error(x, where, self.function)
        if tree_checks.is_variable_or_ref(x):
            if id(x) in self.leaves:
                _, first = self.leaves[id(x)]
                flat = [(paths.to_string(p), x) for p in (first, path)]
                tree_checks.check_tree(flat, self.function)
            self.leaves[id(x)] = x, path
        elif id(x) in self.above:
            first, second = paths.to_string(self.above[id(x)]), paths.to_string(path)
            raise tree_checks.cycle_error(x, first, second)
        elif _is_tree_node(x) and not _is_singleton(x):
            self.above[id(x)] = path
        return _tree_children(x)

    def leave(self, x: Any) -> None:
        """Ends the visit of a value, so that it may be met at other places."""
        self.above.pop(id(x), None)


def _is_tree_node(x: Any) -> bool:
    if isinstance(x, tuple):
        # JAX takes named tuples without a registration, but no other subclass.
        return type(x) is tuple or hasattr(x, "_fields")
    return _jax.is_pytree_type(type(x)) and not isinstance(x, Variable)


def _tree_children(x: Any) -> list[tuple[Any, Any]]:
    if not _is_tree_node(x):
        return []
    listed, _ = _jax.flatten_one_level(x)
    keyed = [(paths.key_from_jax(entry), child) for entry, child in listed]
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
        return [(child.key, child.value) for child in kind.flatten(node)[0]]
    if isinstance(node, Pytree) and not classes.facts_of(type(node)).is_pytree:
        raise tree_checks.not_a_pytree_error(node, "", function)
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
            that one is used; any other value is wrapped in a Variable with the type and
            metadata of the original.
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
    graphdef, leaves = freshness.flatten_node(node, graph, "map")
    mapped = [
        f(path, leaf) for path, leaf in zip(graphdef.paths(), leaves, strict=True)
    ]
    return merging.unflatten(graphdef, mapped, recreate_variables=recreate_variables)


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
        What ``f`` returns for the root.

    Raises:
        ValueError: For cycles; in tree mode also for shared references.

    Example:
        >>> def double(path, x):
        ...     return x * 2 if isinstance(x, int) else x
        >>> nnx.recursive_map(double, [1, (2, 3)])
        [2, (4, 6)]
    """
    if config.graph_mode(graph):
        return _map_graph(f, node, (), {}, {})
    return _map_tree(f, node, (), _TreeWalk("recursive_map"))


def _map_graph(
    f: Callable[[Path, Any], Any],
    x: Any,
    path: Path,
    above: dict[int, Path],
    done: dict[int, tuple[Any, Any]],
) -> Any:
    kind = nodes.kind_of(x)
    if id(x) in done:
        return done[id(x)][1]
    if isinstance(kind, Leaf):
        mapped = f(path, x)
    else:
        if id(x) in above and not _is_singleton(x):
            raise ValueError(
                f"Found cycle in the graph at path {paths.to_string(path)!r}: the "
                f"{type(x).__name__} is also at "
                f"{paths.to_string(above[id(x)], '<root>')!r}."
            )
        above[id(x)] = path
        items = [
            (key, _map_graph(f, child, (*path, key), above, done))
            for key, child in _graph_children(x, kind)
        ]
        above.pop(id(x), None)
        mapped = f(path, _with_items(x, kind, items))
    if nodes.is_graph_node(x):
        done[id(x)] = x, mapped
    return mapped


def _with_items(x: Any, kind: Any, items: list[tuple[Any, Any]]) -> Any:
    """A copy of a node with other children."""
    children, metadata = kind.flatten(x)
    if isinstance(kind, TreeKind):
        return kind.unflatten(items, metadata)
    copied = kind.create_empty(metadata)
    if isinstance(x, Pytree):
        items = [item for item in items if item[0] not in bookkeeping.NAMES]
        metadata = metadata._replace(table=_reclassified(x, children, items))
    keys, values = [key for key, _ in items], [value for _, value in items]
    kind.fill(copied, metadata, keys, values)
    return copied


def _reclassified(
    x: Pytree, children: list[Child], items: list[tuple[Any, Any]]
) -> AttributeTable:
    """The table of ``x``; data put in place of a static value becomes data."""
    table = bookkeeping.table_of(x)
    for child, (key, value) in zip(children, items, strict=True):
        name = classes.name_of(type(x), key)
        if not table[name] and value is not child.value and is_data(value):
            table = table.with_entry(name, True)
    return table


def _map_tree(
    f: Callable[[Path, Any], Any], x: Any, path: Path, walk: _TreeWalk
) -> Any:
    mapped = {
        key: _map_tree(f, child, (*path, key), walk)
        for key, child in walk.enter(x, path)
    }
    walk.leave(x)
    if _is_tree_node(x):
        listed, treedef = _jax.flatten_one_level(x)
        x = treedef.unflatten([mapped[paths.key_from_jax(e)] for e, _ in listed])
    return f(path, x)


def find_duplicates(node: Any, /, *, only: Any = ...) -> list[list[Path]]:
    """Finds objects that can be reached by several paths.

    Args:
        node: Any object or container.
        only: A filter for the repeated occurrences to count.

    Returns:
        For each graph node, Variable, ref or array that occurs more than once, the list
        of its paths. Objects below a repeated node are listed at its first path only.

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
    found = flattening.RefMap()
    _find(node, (), predicate, found, [])
    return [listed for listed in found.values() if len(listed) > 1]


def _find(
    x: Any,
    path: Path,
    predicate: Callable[[Path, Any], bool],
    found: flattening.RefMap,
    above: list[Any],
) -> None:
    kind = nodes.kind_of(x)
    if isinstance(kind, GraphKind) or (
        isinstance(kind, Leaf) and kind is not Leaf.STATIC
    ):
        if x in found:
            if predicate(path, x):
                found[x].append(path)
            return
        found[x] = [path]
    elif any(x is other for other in above):
        return
    if isinstance(kind, Leaf):
        return
    above.append(x)
    for key, child, status in kind.flatten(x)[0]:
        if status is not False:
            _find(child, (*path, key), predicate, found, above)
    above.pop()
