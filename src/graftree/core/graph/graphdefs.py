"""GraphDef: the structure of an object, hashable and comparable.

A skeleton is a tuple of rows, one for each object or container, in preorder. A row has
a *cell* for each key. For

    class Model:  a = Param, b = [array, 3], c = (the same Param as a), k = 5 (static)

    rows                    keys                  cells
    NodeRow(Model, 0)       ("a", "b", "c", "k")  VariableDef(Param, 1), NODE,
                                                  NodeRef(1), Static(5)
    NodeRow(list, None)     (0, 1)                LEAF, Static(3)

A NODE cell is the next row; a LEAF, a VariableDef and an ArrayRefDef take the next
leaf. The number of an object that is tracked by identity is its ``index``;
``outer_index`` is the number of the object that it stands for outside a transform, if
there is one.

A value that JAX takes apart is one row, whose metadata is a `Tree`: an object in tree
mode, or the arguments of a call. Its keys are paths, and it has no static cells.

All are tuples, so that equality and hashing run in C. A `GraphState` has its GraphDef.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import operator
import threading
import weakref
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax

from graftree import _jax
from graftree.core import fingerprints, hooks, pickling
from graftree.core.hashable_mappings import HashableMapping
from graftree.core.objects.callables import OwnMethod
from graftree.core.states import flat_states
from graftree.core.states.states import State
from graftree.core.text import descriptions, representations

Node = TypeVar("Node")
T = TypeVar("T")
# As in `annotations`, but of keys that code may compare and count with.
Path = tuple[Any, ...]


class Marker(enum.Enum):
    """The meaning of a cell without further data."""

    NODE = "node"
    LEAF = "leaf"


NODE, LEAF = Marker.NODE, Marker.LEAF


class Static(tuple[Any, Any]):
    """A static value, with the fingerprint that tells it from its equals.

    Args:
        value: The value.
    """

    __slots__ = ()

    def __new__(cls, value: Any) -> Static:
        # In this order for the reason that `fingerprints.fingerprinted` gives.
        return tuple.__new__(cls, (fingerprints.fingerprint(value), value))

    @property
    def value(self) -> Any:
        """The value."""
        return self[1]

    def __copy__(self) -> Static:
        return self

    def __getnewargs__(self) -> tuple[Any]:
        return (pickling.by_name(self[1]),)

    def __repr__(self) -> str:
        return f"Static(value={descriptions.safe_repr(self[1])})"


# Those of atoms, by their type and value. A model has many that are equal.
STATICS: dict[tuple[type, Any], Static] = {}
ATOMS = frozenset({int, bool, str, type(None)})
_MOST_STATICS = 4096


def static_of(value: Any) -> Static:
    """The `Static` of a value; for an atom the same one each time."""
    made = Static(value)
    if type(value) in ATOMS:
        if len(STATICS) > _MOST_STATICS:
            STATICS.clear()
        STATICS[type(value), value] = made
    return made


class NodeRef(NamedTuple):
    """An object met before."""

    index: int


class ArrayRefDef(NamedTuple):
    """An array ref."""

    index: int
    outer_index: int | None


class VariableDef(NamedTuple):
    """A Variable; ``array_refdef`` describes its ref, if it has one."""

    type: type
    index: int
    outer_index: int | None
    metadata: HashableMapping
    array_refdef: ArrayRefDef | NodeRef | None

    def __repr__(self) -> str:
        return (
            f"VariableDef(type={self.type.__name__!r}, index={self.index}, "
            f"outer_index={self.outer_index}, "
            f"metadata={descriptions.safe_repr(dict(self.metadata))})"
        )


Cell = VariableDef | ArrayRefDef | NodeRef | Static | Marker


class Tree(NamedTuple):
    """The metadata of a value that JAX takes apart.

    Attributes:
        treedef: JAX's.
        order: For each cell its place in the treedef; ``None`` if they are in order.
    """

    treedef: Any
    order: tuple[int, ...] | None = None


class NodeRow(NamedTuple):
    """An object, or (``index`` is ``None``) a container.

    Attributes:
        type: Its type.
        index: Its number, if it is tracked by identity.
        outer_index: The number of the object outside that it stands for.
        metadata: The data that its type gives besides its children.
        keys: The keys of its children, in order.
        cells: The cells at these keys.
        num_rows: The number of rows that it takes, with all below it.
        num_leaves: The number of leaves in it, with all below it.
    """

    type: type
    index: int | None
    outer_index: int | None
    metadata: Any
    keys: tuple[Any, ...]
    cells: tuple[Cell, ...]
    num_rows: int
    num_leaves: int


# The form in which clients know a skeleton: `GraphDef.nodes`, `GraphDef.attributes`.


class NodeDef(NamedTuple):
    """A graph node, or (``index`` is ``None``) a container."""

    type: type
    index: int | None
    outer_index: int | None
    num_attributes: int
    metadata: Any

    def __repr__(self) -> str:
        return (
            f"NodeDef(type={self.type.__name__!r}, index={self.index}, "
            f"outer_index={self.outer_index}, num_attributes={self.num_attributes})"
        )


class TreeNodeDef(NamedTuple):
    """An object in tree mode.

    Attributes:
        type: Of the object.
        treedef: JAX's, with Variables as leaves.
        path_index: For each leaf in the order of the paths, its path and its place in
            the treedef.
    """

    type: type
    treedef: Any
    path_index: tuple[tuple[Any, int], ...]


class GraphDef(Generic[Node]):
    """The structure of an object, as `split` returns it: types, static values, sharing.

    Hashable. Equality is structural: the values of the leaves do not matter. A GraphDef
    is a JAX pytree without leaves, so it can be an argument of ``jax.jit``.

    Args:
        nodes: A `NodeDef`, `VariableDef`, `ArrayRefDef` or `NodeRef` for each object
            and container, in preorder; in tree mode a `TreeNodeDef` comes first.
        attributes: Pairs of a key and `NODE`, `LEAF` or a `Static`, in the same order.
        num_leaves: How many leaves fill the skeleton.

    Attributes:
        root: The cell of the object.
        rows: The rows of all objects and containers in it.

    Raises:
        dataclasses.FrozenInstanceError: On assignment to an attribute.

    Example:
        >>> a = nnx.graphdef(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> b = nnx.graphdef(nnx.Linear(2, 3, rngs=nnx.Rngs(1)))
        >>> a == b, hash(a) == hash(b), a.num_leaves
        (True, True, 2)
    """

    __slots__ = ("__weakref__", "_cache", "num_leaves", "root", "rows")
    root: Cell
    rows: tuple[NodeRow, ...]
    num_leaves: int

    def __init__(
        self,
        nodes: Sequence[Any],
        attributes: Sequence[tuple[Any, Any]],
        num_leaves: int,
    ) -> None:
        made = GraphDef.of(*_read(nodes, attributes), num_leaves)
        for name in ("root", "rows", "num_leaves", "_cache"):
            object.__setattr__(self, name, getattr(made, name))

    @staticmethod
    def of(root: Cell, rows: Sequence[NodeRow], num_leaves: int) -> GraphDef[Any]:
        """The skeleton of these rows."""
        made, store = object.__new__(GraphDef), object.__setattr__
        store(made, "root", root)
        store(made, "rows", tuple(rows))
        store(made, "num_leaves", num_leaves)
        store(made, "_cache", {})
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")

    def __hash__(self) -> int:
        # `is` and this cache make a GraphDef cheap as the key of a compile cache.
        found = self._cache.get("hash")
        if found is None:
            found = self._cache["hash"] = hash((self.root, self.rows))
        return found

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, GraphDef):
            return NotImplemented
        try:
            return self.root == other.root and self.rows == other.rows
        except Exception:  # of the comparison of a static value
            return _are_alike(self, other)

    def __repr__(self) -> str:
        lines = ["GraphDef(", "  nodes=["]
        lines += [f"    {node!r}," for node in self.nodes]
        lines += ["  ],", "  attributes=["]
        lines += [f"    {attribute!r}," for attribute in self.attributes]
        return "\n".join([*lines, "  ],", f"  num_leaves={self.num_leaves}", ")"])

    def __reduce__(self) -> Any:
        return GraphDef.of, (self.root, self.rows, self.num_leaves)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphDef[Node]:
        return self

    @property
    def nodes(self) -> list[Any]:
        """The objects and containers in it, in preorder."""
        return _listed(self)[0]

    @property
    def attributes(self) -> list[tuple[Any, Any]]:
        """The keys of all attributes and members, in preorder, with their cells."""
        return _listed(self)[1]

    def apply(self, state: Any, *states: Any, graph: bool | None = None) -> Any:
        """Calls a method of the object made of this GraphDef and the states.

        Args:
            state: The state, or the first of several.
            *states: Further states.
            graph: The mode of the split after the call; ``None`` takes the default.

        Returns:
            A proxy for the object: its attributes and items select a method, and a call
            returns the output and the new ``(graphdef, state)``.

        Example:
            >>> graphdef, state = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
            >>> y, _ = graphdef.apply(state)(jnp.ones((1, 2)))
            >>> y.shape
            (1, 3)
        """
        return hooks.apply_graphdef.call(self, (state, *states), graph)

    def listed(self) -> list[tuple[Path, Any]]:
        """Each row, and each other cell, with its path, in preorder."""
        rows, found = iter(self.rows), []
        # The rest of each row above. No recursion, whose depth Python limits.
        pending: list[Iterator[tuple[Path, Any]]] = [iter([((), self.root)])]
        while pending:
            for item in pending[-1]:
                path, what = item
                if what is NODE:
                    row = next(rows)
                    found.append((path, row))
                    if type(row.metadata) is Tree:
                        below = [(*path, *keys) for keys in row.keys]
                    else:
                        below = [(*path, key) for key in row.keys]
                    pending.append(zip(below, row.cells, strict=True))
                    break
                found.append(item)
            else:
                pending.pop()
        return found

    def blueprint(self) -> Blueprint:
        """The way from the leaves to the object; cached."""
        if "blueprint" in self._cache:
            return self._cache["blueprint"]
        rows, below = self.rows, iter(range(1, len(self.rows)))
        made = Blueprint([[None] * len(row.cells) for row in rows], [], [])
        # Rows with those above and the rest of their cells. No recursion, whose depth
        # Python limits.
        pending = [(0, 0, 0, enumerate(rows[0].cells))]
        while pending:
            number, above, place_above, cells = pending[-1]
            for place, cell in cells:
                if cell is NODE:
                    row = next(below)
                    pending.append((row, number, place, enumerate(rows[row].cells)))
                    break
                if type(cell) is Static and type(cell[1]) is not OwnMethod:
                    made.contents[number][place] = cell[1]
                else:
                    made.cells.append((number, place, cell))
            else:
                pending.pop()
                made.order.append((number, above, place_above))
        self._cache["blueprint"] = made
        return made

    def leaves(self) -> tuple[tuple[Path, VariableDef | ArrayRefDef | None], ...]:
        """For each leaf its path, and its definition unless it is plain; cached."""
        found = self._cache.get("leaves")
        if found is None:
            found = self._cache["leaves"] = tuple(
                [
                    (path, None if what is LEAF else what)
                    for path, what in self.listed()
                    if what is LEAF or type(what) in _DEFINITIONS
                ]
            )
        return found

    def paths(self) -> tuple[Path, ...]:
        """The path of each leaf, in order; cached."""
        found = self._cache.get("paths")
        if found is None:
            found = self._cache["paths"] = tuple([path for path, _ in self.leaves()])
        return found

    def places(self) -> dict[Any, Any]:
        """The paths as nested dicts, with the number of each leaf; cached."""
        places = self._cache.get("places")
        if places is None:
            numbers = zip(self.paths(), itertools.count())
            places = self._cache["places"] = flat_states.nest(numbers)
        return places

    def tops(self) -> list[Any]:
        """For each cell of the root its row, or itself if it has none."""
        pairs = zip(self.rows[0].cells, self.starts(), strict=False)
        return [self.rows[row] if cell is NODE else cell for cell, (row, _) in pairs]

    def starts(self) -> list[tuple[int, int]]:
        """For each cell of the root how many rows and leaves come before it; cached.

        Those of the end are the last.
        """
        found = self._cache.get("starts")
        if found is None:
            row, leaf = 1, 0
            found = self._cache["starts"] = [(row, leaf)]
            for cell in self.rows[0].cells:
                if cell is NODE:
                    top = self.rows[row]
                    row, leaf = row + top.num_rows, leaf + top.num_leaves
                elif _is_leaf(cell):
                    leaf += 1
                found.append((row, leaf))
        return found

    def part(self, treedef: Any, start: int, stop: int) -> GraphDef[Any]:
        """The skeleton of a part of a value that JAX took apart: of some root cells."""
        rows, num_leaves = self._below(start, stop)
        cells = self.rows[0].cells[start:stop]
        return _of_tree(Tree(treedef), cells, self.rows[rows], num_leaves)

    def with_part(self, start: int, stop: int, part: GraphDef[Any]) -> GraphDef[Any]:
        """The skeleton with another part there, of as many cells."""
        top, *rows = self.rows
        cells, (below, replaced) = [*top.cells], self._below(start, stop)
        cells[start:stop] = part.rows[0].cells
        rows[below.start - 1 : below.stop - 1] = part.rows[1:]
        num_leaves = self.num_leaves - replaced + part.num_leaves
        return _of_tree(top.metadata, tuple(cells), rows, num_leaves)

    def _below(self, start: int, stop: int) -> tuple[slice, int]:
        """The place of the rows of some cells of the root, and the number of leaves."""
        (first, before), (end, after) = self.starts()[start], self.starts()[stop]
        return slice(first, end), after - before


jax.tree_util.register_static(GraphDef)


def _are_alike(one: GraphDef[Any], other: GraphDef[Any]) -> bool:
    """Whether two skeletons are equal, where static values fail to be compared."""
    is_alike = len(one.rows) == len(other.rows) and _is_cell_alike(one.root, other.root)
    return is_alike and all(
        _fixed(row) == _fixed(another)
        and fingerprints.is_same(row.metadata, another.metadata)
        and all(map(_is_cell_alike, row.cells, another.cells))
        for row, another in zip(one.rows, other.rows, strict=True)
    )


_fixed = operator.itemgetter(0, 1, 2, 4, 6, 7)  # all but metadata and cells


def _is_cell_alike(cell: Cell, other: Cell) -> bool:
    if isinstance(cell, Static) and isinstance(other, Static):
        return fingerprints.are_same(cell, other)
    return cell == other


_DEFINITIONS = (VariableDef, ArrayRefDef)


def _is_leaf(what: Any) -> bool:
    return what is LEAF or type(what) in _DEFINITIONS


class Blueprint(NamedTuple):
    """The way from leaves to an object.

    Attributes:
        contents: For each row its static values in their places.
        cells: The other cells, in the order of leaves: their row, place and cell.
        order: The rows, each after those below it: its number, the row above, and its
            place there.
    """

    contents: list[list[Any]]
    cells: list[tuple[int, int, Cell]]
    order: list[tuple[int, int, int]]


def tree_row(
    tree: Tree, cells: tuple[Cell, ...], num_rows: int, num_leaves: int
) -> NodeRow:
    """The row of a value that JAX took apart, with numbered members."""
    keys = tuple([(number,) for number in range(len(cells))])
    return NodeRow(tuple, None, None, tree, keys, cells, num_rows, num_leaves)


def _of_tree(
    tree: Tree, cells: tuple[Cell, ...], rows: Sequence[NodeRow], num_leaves: int
) -> GraphDef[Any]:
    top = tree_row(tree, cells, len(rows) + 1, num_leaves)
    return GraphDef.of(NODE, (top, *rows), num_leaves)


def _listed(graphdef: GraphDef[Any]) -> tuple[list[Any], list[tuple[Any, Any]]]:
    """`GraphDef.nodes` and `GraphDef.attributes`."""
    nodes: list[Any] = []
    attributes: list[tuple[Any, Any]] = []
    is_tree = bool(graphdef.rows) and type(graphdef.rows[0].metadata) is Tree
    for path, what in graphdef.listed():
        is_row = isinstance(what, NodeRow)
        is_attribute = what is LEAF or isinstance(what, Static)
        if not is_attribute:
            nodes.append(_node_def(what) if is_row else what)
        # In a tree the root is a row, so a cell is an attribute though it has no path.
        if path or is_attribute or (is_tree and not is_row):
            key = path if is_tree else path[-1] if path else None
            attributes.append((key, what if is_attribute else NODE))
    return nodes, attributes


def _node_def(row: NodeRow) -> NodeDef | TreeNodeDef:
    tree = row.metadata
    if type(tree) is Tree:
        order = range(len(row.keys)) if tree.order is None else tree.order
        path_index = tuple(zip(row.keys, order, strict=True))
        return TreeNodeDef(row.type, tree.treedef, path_index)
    return NodeDef(row.type, row.index, row.outer_index, len(row.keys), row.metadata)


def _read(
    nodes: Sequence[Any], attributes: Sequence[tuple[Any, Any]]
) -> tuple[Cell, Sequence[Any]]:
    """The root and the rows that are listed so; the inverse of `_listed`."""
    top = nodes[0] if nodes else LEAF
    if isinstance(top, TreeNodeDef):
        definitions = iter(nodes[1:])
        cells = [next(definitions) if x is NODE else x for _, x in attributes]
        tree = Tree(top.treedef, tuple([place for _, place in top.path_index]))
        keys, count = tuple([path for path, _ in top.path_index]), len(cells)
        row = NodeRow(top.type, None, None, tree, keys, tuple(cells), 1, count)
        return NODE, [row]
    remaining = [*nodes]
    # Backwards, so that the members of a node come before it. For each cell read: its
    # key, itself, its rows.
    found: list[tuple[Any, Any, list[NodeRow]]] = []
    listed = [(None, NODE), *attributes] if nodes else attributes
    for key, what in reversed(listed):
        cell, rows = (remaining.pop() if what is NODE else what), []
        if isinstance(cell, NodeDef):
            kind, index, outer, count, metadata = cell
            members = [found.pop() for _ in range(count)]
            rows = [row for _, _, below in members for row in below]
            keys, cells = tuple([x[0] for x in members]), tuple([x[1] for x in members])
            num_leaves = sum(below[0].num_leaves for *_, below in members if below)
            counts = len(rows) + 1, num_leaves + sum(map(_is_leaf, cells))
            row = NodeRow(kind, index, outer, metadata, keys, cells, *counts)
            cell, rows = NODE, [row, *rows]
        found.append((key, cell, rows))
    ((_, root, rows),) = found
    return root, rows


class Interned(pickling.Rebuilt):
    """Values that JAX gets as static data, each with a number of its own.

    JAX does not hash static data of pytree nodes; it compares it with the data that it
    compiled for, inside its cache in C++. If a comparison runs Python code, another
    thread may take its turn and change that cache meanwhile: then the process dies
    (tests/stress/static_data.py). So equal values are made the same one, with a unique
    number in front: numbers decide, and are compared in C.

    A static value that was changed in place, and so has a new hash, is not taken for
    its earlier self either.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, tuple[int, weakref.ref[Any]]]
        self._known = weakref.WeakKeyDictionary()
        # Otherwise two threads could both come first. User code compares static values.
        self._lock = threading.RLock()

    def intern(self, x: T, is_new: bool = False) -> tuple[int, T]:
        """The value that equals this one and came first, after its number.

        If it ``is_new``, it has changed in a way that no comparison sees.
        """
        if is_new:
            return next(_numbers), x
        with self._lock:
            number, weak = self._known.get(x, (0, None))
            known = None if weak is None else weak()
            if known is None:
                number, known = next(_numbers), x
                self._known[x] = number, weakref.ref(x)
            return number, known


_numbers = itertools.count()


class GraphState(representations.MappingReprMixin, MutableMapping[Any, Any]):
    """A State together with the GraphDef it fills; made by `unpack`.

    Reads and writes go to the State. As a JAX pytree, it has the paths of the State,
    and the GraphDef is static.

    Args:
        graphdef: The structure.
        state: The State.

    Raises:
        ValueError: If ``state`` is not a State.

    Example:
        >>> graph_state = nnx.unpack(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> graph_state.kernel.shape
        (2, 3)
    """

    __slots__ = ("_graphdef", "_state")

    def __init__(self, graphdef: GraphDef[Any], state: State) -> None:
        if not isinstance(state, State):
            raise ValueError(f"Expected a State object, got {type(state).__name__}.")
        object.__setattr__(self, "_graphdef", graphdef)
        object.__setattr__(self, "_state", state)

    @property
    def raw_mapping(self) -> Any:
        """The nested dict of the State."""
        return self._state.raw_mapping

    def __getitem__(self, key: Any) -> Any:
        return self._state[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._state[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._state[key]

    def __dir__(self) -> list[str]:
        return representations.names_of_object(self, dir(self._state))

    def __getattr__(self, name: str) -> Any:
        if name in GraphState.__slots__:
            raise AttributeError(name)
        return getattr(self._state, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._state[name] = value

    def __iter__(self) -> Iterator[Any]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GraphState):
            return NotImplemented
        return self._graphdef == other._graphdef and self._state == other._state

    __hash__ = None

    def __or__(self, other: Any) -> GraphState:
        return GraphState(self._graphdef, self._state | state_of(other))

    def __reduce__(self) -> Any:
        return GraphState, (self._graphdef, self._state)


def graphdef_of(graph_state: GraphState) -> GraphDef[Any]:
    """The GraphDef of a GraphState."""
    return graph_state._graphdef


def state_of(graph_state: Any) -> Any:
    """The State; another mapping is returned as it is."""
    return graph_state._state if isinstance(graph_state, GraphState) else graph_state


def _flatten_with_keys(graph_state: GraphState) -> Any:
    listed, treedef = _jax.flatten_one_level(graph_state._state)
    return listed, (treedef, graph_state._graphdef)


def _unflatten(aux: Any, children: Any) -> GraphState:
    treedef, graphdef = aux
    return GraphState(graphdef, jax.tree.unflatten(treedef, children))


jax.tree_util.register_pytree_with_keys(GraphState, _flatten_with_keys, _unflatten)
