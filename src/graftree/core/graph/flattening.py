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
import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

from graftree import _jax
from graftree.annotations import Path
from graftree.core import paths, walks
from graftree.core.graph import graphdefs, nodes, tree_checks
from graftree.core.graph.graphdefs import (
    LEAF,
    NODE,
    ArrayRefDef,
    Cell,
    GraphDef,
    NodeRef,
    NodeRow,
    Tree,
    VariableDef,
    tree_row,
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
        if mapping:
            self.update(mapping)

    @staticmethod
    def from_indexmap(indexmap: Mapping[Any, Any]) -> RefMap:
        """The inverse of an `IndexMap`."""
        made = RefMap()
        made._entries = {id(obj): (obj, index) for index, obj in indexmap.items()}
        return made

    def by_number(self) -> IndexMap:
        """The inverse, if the values are numbers."""
        return IndexMap({index: obj for obj, index in self._entries.values()})

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
        return IndexMap([(index, obj) for obj, index in refmap.items()])


# Flattening.


def flatten_graph(
    node: Any,
    ref_index: RefMap | None = None,
    ref_outer_index: RefMap | None = None,
    members: list[Any] | None = None,
) -> tuple[GraphDef[Any], list[Any]]:
    """Graph-mode `flatten` without paths; the leaves are Variables, refs and arrays.

    Fills ``members`` with the object or container of each row.
    """
    kind = nodes.kind_of(node)
    if kind is Leaf.ARRAY or kind is Leaf.STATIC:
        return GraphDef.of(LEAF, (), 1), [node]
    flattener = _Flattener(
        RefMap() if ref_index is None else ref_index,
        RefMap() if ref_outer_index is None else ref_outer_index,
        members=members,
    )
    return flattener.result(flattener.cell_of(node, kind))


def flatten_leaves(
    treedef: Any,
    given: Sequence[Any],
    sharing: bool,
    refs: RefMap,
    outer: RefMap,
    *,
    as_before: Mapping[int, VariableDef] | None = None,
    members: list[Any] | None = None,
) -> tuple[GraphDef[Any], list[Any]]:
    """The skeleton and the leaves of what JAX takes apart into what is given.

    With ``sharing`` the objects among that are taken apart, too. With ``as_before``
    they keep the numbers that they have in ``outer``, and Variables are defined as by
    these numbers there: what has not changed has the skeleton that it had, whatever
    metadata its Variables have now. Fills ``members`` as `flatten_graph` does.
    """
    flattener = _Flattener(refs, outer, as_before, members)
    flattener.rows.append(None)
    flattener.members.append(None)
    cells: list[Cell] = []
    for x in given:
        kind = nodes.kind_of(x)
        is_object = kind is Leaf.VARIABLE or kind is Leaf.REF
        if is_object or (sharing and isinstance(kind, GraphKind)):
            cells.append(flattener.cell_of(x, kind))
        else:
            cells.append(LEAF)
            flattener.leaves.append(x)
    counts = len(flattener.rows), len(flattener.leaves)
    flattener.rows[0] = tree_row(Tree(treedef), tuple(cells), *counts)
    return flattener.result(NODE)


class _Flattener:
    """One walk over objects; collects the rows of a skeleton, and the leaves."""

    def __init__(
        self,
        refs: RefMap,
        outer: RefMap,
        as_before: Mapping[int, VariableDef] | None = None,
        members: list[Any] | None = None,
    ) -> None:
        # The dicts behind the maps: asking them directly saves a tenth of the walk.
        self.refs = refs._entries
        self.outer = outer._entries
        self.as_before = as_before
        self.rows: list[Any] = []
        self.members = [] if members is None else members
        self.leaves: list[Any] = []
        # The nodes above, of which children remain. No recursion, whose depth Python
        # limits.
        self._open: list[_OpenRow] = []

    def result(self, root: Cell) -> tuple[GraphDef[Any], list[Any]]:
        """The skeleton with this root, and the leaves."""
        return GraphDef.of(root, self.rows, len(self.leaves)), self.leaves

    def cell_of(self, x: Any, kind: nodes.Kind) -> Cell:
        """The cell of a node, Variable or ref; lists it and all below it."""
        root, pending = self._enter(x, kind), self._open
        while pending:
            if self._list_children(pending[-1]):
                if len(pending) == _DEEP:
                    _check_for_cycles(x)
            else:
                node, number, before, _, cells = pending.pop()
                counts = len(self.rows) - number, len(self.leaves) - before
                self.rows[number] = _make_row((*node, tuple(cells), *counts))
        return root

    def _list_children(self, row: _OpenRow) -> bool:
        """Lists children, until one has children itself; whether that was so."""
        cells, leaves = row.cells, self.leaves
        # This runs for each attribute of a model; each call of a function counts.
        kinds, statics, atoms = nodes.KINDS, graphdefs.STATICS, graphdefs.ATOMS
        for _, value, is_data in row.children:
            kind = kinds.get(type(value)) or nodes.kind_of(value)
            if is_data is False or (is_data is None and kind is Leaf.STATIC):
                is_atom = type(value) in atoms
                known = statics.get((type(value), value)) if is_atom else None
                cells.append(known or graphdefs.static_of(value))
            elif kind is Leaf.ARRAY or kind is Leaf.STATIC:
                cells.append(LEAF)
                leaves.append(value)
            else:
                cell = self._enter(value, kind)
                cells.append(cell)
                if cell is NODE:
                    return True
        return False

    def _enter(self, x: Any, kind: nodes.Kind) -> Cell:
        """The cell of a node, Variable or ref; the children of a node are to come."""
        index = outer = None
        if not isinstance(kind, TreeKind):
            known = self.refs.get(id(x))
            if known is not None:
                return NodeRef(known[1])
            index, outer = self._number(x)
            if not isinstance(kind, GraphKind):
                self.leaves.append(x)
                if kind is Leaf.REF:
                    return ArrayRefDef(index, outer)
                return self._define(x, index, outer)
        children, metadata = kind.flatten(x)
        counts = len(self.rows), len(self.leaves)
        node = type(x), index, outer, metadata, tuple([child[0] for child in children])
        self._open.append(_OpenRow(node, *counts, iter(children), []))
        self.rows.append(None)
        self.members.append(x)
        return NODE

    def _define(self, variable: Any, index: int, outer: int | None) -> VariableDef:
        if self.as_before and index in self.as_before:
            return self.as_before[index]
        entries = variables.metadata_of(variable)
        if not entries.is_fixed:
            entries = entries.noted()
        raw, ref = variable.get_raw_value(), None
        if _jax.is_ref(raw):
            known = self.refs.get(id(raw))
            ref = NodeRef(known[1]) if known else ArrayRefDef(*self._number(raw))
        return VariableDef(type(variable), index, outer, entries, ref)

    def _number(self, x: Any) -> tuple[int, int | None]:
        """Gives a new object the next number; also returns its outer one."""
        index = len(self.refs)
        if self.as_before is not None:
            # New ones have numbers that no object had.
            known = self.outer.get(id(x))
            index = index + len(self.outer) if known is None else known[1]
            self.refs[id(x)] = x, index
            return index, None
        self.refs[id(x)] = x, index
        # Both may be one map.
        outer = self.outer.get(id(x))
        return index, None if outer is None else outer[1]


# The constructor of a named tuple is a function in Python.
_make_row: Callable[[tuple[Any, ...]], NodeRow]
_make_row = functools.partial(tuple.__new__, NodeRow)


class _OpenRow(NamedTuple):
    """A row whose cells are being listed.

    Attributes:
        node: What is known of it: type, numbers, metadata, keys.
        number: Its place among the rows.
        before: How many leaves come before it.
        children: What remains of its children.
        cells: What was found.
    """

    node: tuple[Any, ...]
    number: int
    before: int
    children: Iterator[nodes.Child]
    cells: list[Cell]


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
    keys = tuple([path for path, _, _ in listed])
    order = tuple([i for _, i, _ in listed])
    cells = tuple([_cell_in_tree(i, leaf) for _, i, leaf in listed])
    tree, count = Tree(treedef, order), len(listed)
    row = NodeRow(type(node), None, None, tree, keys, cells, 1, count)
    return GraphDef.of(NODE, (row,), count), [leaf for _, _, leaf in listed]


def _cell_in_tree(number: int, leaf: Any) -> Cell:
    if not isinstance(leaf, Variable):
        return LEAF
    metadata = variables.metadata_of(leaf).noted()
    return VariableDef(type(leaf), number, None, metadata, None)


def raw_of(leaf: Any) -> Any:
    """The raw value of a leaf of a state, which is a Variable or the value itself."""
    return leaf.get_raw_value() if isinstance(leaf, Variable) else leaf
