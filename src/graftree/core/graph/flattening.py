"""Object to (skeleton, leaves); with sharing, or as a tree.

`flatten` walks an object depth first, children in the order of their keys. In graph
mode each object that is tracked by identity is entered once; in tree mode JAX flattens
the object with Variables as leaves, and shared ones are an error. `merging.unflatten`
is the inverse. Both number the tracked objects in the order of the visit:

    RefMap     object -> number, by identity; filled by `flatten`
    IndexMap   number -> object; filled by `unflatten`
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from graftree import _jax
from graftree.annotations import Path
from graftree.core import paths, walks
from graftree.core.graph import nodes, tree_checks
from graftree.core.graph.graphdefs import (
    LEAF,
    NODE,
    ArrayRefDef,
    GraphDef,
    NodeDef,
    NodeRef,
    Static,
    TreeNodeDef,
    VariableDef,
)
from graftree.core.graph.nodes import GraphKind, Leaf, TreeKind
from graftree.core.variables import variables
from graftree.core.variables.variables import Variable


class RefMap(MutableMapping[Any, Any]):
    """A mapping whose keys are objects, compared by identity and kept alive.

    Example:
        >>> a, b = [1], [1]
        >>> numbers = nnx.graphlib.RefMap({})
        >>> numbers[a] = 0
        >>> a in numbers, b in numbers
        (True, False)
    """

    def __init__(self, mapping: Any = None, /) -> None:
        self._entries: dict[int, tuple[Any, Any]] = {}
        if mapping is not None:
            self.update(mapping)

    @staticmethod
    def from_indexmap(indexmap: Mapping[Any, Any]) -> RefMap:
        """The inverse of an `IndexMap`."""
        return RefMap([(obj, index) for index, obj in indexmap.items()])

    def take(self, other: RefMap) -> None:
        """Takes on all entries of another one."""
        self._entries.update(other._entries)

    def get(self, key: Any, default: Any = None) -> Any:
        """The value of an object, or ``default``."""
        entry = self._entries.get(id(key))
        return default if entry is None else entry[1]

    def __getitem__(self, key: Any) -> Any:
        return self._entries[id(key)][1]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._entries[id(key)] = (key, value)

    def __delitem__(self, key: Any) -> None:
        del self._entries[id(key)]

    def __contains__(self, key: object) -> bool:
        return id(key) in self._entries

    def __iter__(self) -> Iterator[Any]:
        return (key for key, _ in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)


class IndexMap(dict[int, Any]):
    """Objects by their number.

    Example:
        >>> nnx.graphlib.IndexMap({0: "a"})[0]
        'a'
    """

    @staticmethod
    def from_refmap(refmap: Mapping[Any, int]) -> IndexMap:
        """The inverse of a `RefMap`."""
        return IndexMap((index, obj) for obj, index in refmap.items())


# Flattening.


def flatten_graph(
    node: Any,
    ref_index: RefMap | None = None,
    ref_outer_index: RefMap | None = None,
) -> tuple[GraphDef[Any], list[Any]]:
    """Graph-mode `flatten` without paths; the leaves are Variables, refs and arrays."""
    kind = nodes.kind_of(node)
    if kind is Leaf.ARRAY or kind is Leaf.STATIC:
        return GraphDef([], [(None, LEAF)], 1), [node]
    flattener = _Flattener(
        RefMap() if ref_index is None else ref_index,
        RefMap() if ref_outer_index is None else ref_outer_index,
    )
    flattener.visit(node, kind)
    graphdef = GraphDef(flattener.nodes, flattener.attributes, len(flattener.leaves))
    return graphdef, flattener.leaves


class _Flattener:
    """One walk over an object; collects what a GraphDef lists, and the leaves."""

    def __init__(self, refs: RefMap, outer: RefMap) -> None:
        # The dicts behind the maps: asking them directly saves a tenth of the walk.
        self.refs = refs._entries
        self.outer = outer._entries
        self.nodes: list[Any] = []
        self.attributes: list[tuple[Any, Any]] = []
        self.leaves: list[Any] = []

    def visit(self, x: Any, kind: nodes.Kind) -> None:
        """Lists a node, Variable or ref, and all below it."""
        # What remains to be visited of each node above: no recursion, whose depth
        # Python limits.
        pending = [iter(self._enter(x, kind))]
        while pending:
            below = self._list_children(pending[-1])
            if below:
                pending.append(iter(below))
                if len(pending) == _DEEP:
                    _check_for_cycles(x)
            else:
                pending.pop()

    def _list_children(self, children: Iterator[nodes.Child]) -> Sequence[nodes.Child]:
        """Lists children, until one has children itself, which are returned."""
        attributes = self.attributes
        for key, value, is_data in children:
            if is_data is False:
                attributes.append((key, Static(value)))
                continue
            kind = nodes.kind_of(value)
            if is_data is None and kind is Leaf.STATIC:
                attributes.append((key, Static(value)))
            elif kind is Leaf.ARRAY or kind is Leaf.STATIC:
                attributes.append((key, LEAF))
                self.leaves.append(value)
            else:
                attributes.append((key, NODE))
                below = self._enter(value, kind)
                if below:
                    return below
        return ()

    def _enter(self, x: Any, kind: nodes.Kind) -> Sequence[nodes.Child]:
        """Lists a node, Variable or ref; returns what is below it."""
        if isinstance(kind, TreeKind):
            children, metadata = kind.flatten(x)
            self.nodes.append(NodeDef(type(x), None, None, len(children), metadata))
            return children
        known = self.refs.get(id(x))
        if known is not None:
            self.nodes.append(NodeRef(known[1]))
            return ()
        index, outer = self._number(x)
        if isinstance(kind, GraphKind):
            children, metadata = kind.flatten(x)
            self.nodes.append(NodeDef(type(x), index, outer, len(children), metadata))
            return children
        if kind is Leaf.REF:
            self.nodes.append(ArrayRefDef(index, outer))
        else:
            entries = variables.metadata_of(x)
            if not entries.is_fixed:
                entries = entries.noted()
            ref = self._ref_of(x)
            self.nodes.append(VariableDef(type(x), index, outer, entries, ref))
        self.leaves.append(x)
        return ()

    def _number(self, x: Any) -> tuple[int, int | None]:
        """Gives a new object the next number; also returns its outer one."""
        index = len(self.refs)
        self.refs[id(x)] = x, index
        outer = self.outer.get(id(x))
        return index, None if outer is None else outer[1]

    def _ref_of(self, variable: Variable[Any]) -> ArrayRefDef | NodeRef | None:
        raw = variable.get_raw_value()
        if not _jax.is_ref(raw):
            return None
        known = self.refs.get(id(raw))
        return ArrayRefDef(*self._number(raw)) if known is None else NodeRef(known[1])


# To look for cycles takes time, so it begins where an object is deeper than most.
_DEEP = 100


def _check_for_cycles(root: Any) -> None:
    """Refuses containers that contain themselves, which have no identity here."""
    is_new, above = walks.Once(), walks.Above()

    def below(x: Any, path: Path) -> list[tuple[Any, Any]]:
        kind = nodes.kind_of(x)
        if isinstance(kind, Leaf) or (isinstance(kind, GraphKind) and not is_new(x)):
            return []
        if isinstance(kind, TreeKind):
            tree_checks.check_above(above, x, path)
        listed, _ = kind.flatten(x)
        return [(key, child) for key, child, is_data in listed if is_data is not False]

    collections.deque(walks.walk(root, below), maxlen=0)


def flatten_tree(node: Any, function: str) -> tuple[GraphDef[Any], list[Any]]:
    """Tree-mode `flatten` without paths."""
    flat, treedef = tree_checks.flatten_with_paths(node, function)
    tree_checks.check_tree(flat, function)
    listed = [(paths.from_jax(path), i, leaf) for i, (path, leaf) in enumerate(flat)]
    listed.sort(key=lambda item: paths.path_sort_key(item[0]))
    path_index = tuple((path, i) for path, i, _ in listed)
    leaves = [leaf for _, _, leaf in listed]
    entries: list[Any] = [TreeNodeDef(type(node), treedef, path_index)]
    attributes: list[tuple[Any, Any]] = []
    for path, i, leaf in listed:
        if isinstance(leaf, Variable):
            attributes.append((path, NODE))
            metadata = variables.metadata_of(leaf).noted()
            entries.append(VariableDef(type(leaf), i, None, metadata, None))
        else:
            attributes.append((path, LEAF))
    return GraphDef(entries, attributes, len(leaves)), leaves


def raw_of(leaf: Any) -> Any:
    """The raw value of a leaf of a state, which is a Variable or the value itself."""
    return leaf.get_raw_value() if isinstance(leaf, Variable) else leaf
