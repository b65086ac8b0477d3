"""GraphDef: the structure of an object, hashable and comparable.

A skeleton lists what `flattening.flatten` met, in preorder, in two flat sequences. For

    class Model:  a = Param, b = [array, 3], c = (the same Param as a), k = 5 (static)

    nodes                                    attributes
    NodeDef(Model, 0, 4 attributes)          ("a", NODE)
    VariableDef(Param, 1)                    ("b", NODE)
    NodeDef(list, None, 2 attributes)        (0, LEAF)  (1, Static(3))
    NodeRef(1)                               ("c", NODE)  ("k", Static(5))

Read with one iterator each: a NODE attribute takes the next entry of ``nodes``, a LEAF
and a VariableDef take the next leaf. The number of an object that is tracked by
identity is its ``index``; ``outer_index`` is the number of the object that it stands
for outside a transform, if there is one.

Tree mode has one `TreeNodeDef` that holds JAX's treedef, and for each leaf, in the
order of the paths, a NODE attribute with a VariableDef, or a LEAF attribute.

All entries are tuples, so that equality and hashing run in C.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax

from graftree.core import imprints, pickling
from graftree.core.imprints import HashableMapping

Node = TypeVar("Node")


class Marker(enum.Enum):
    """What an attribute that is not static refers to."""

    NODE = "node"
    LEAF = "leaf"


NODE, LEAF = Marker.NODE, Marker.LEAF


class Static(tuple[Any, Any]):
    """A static value, with the imprint that tells it from its equals.

    Args:
        value: The value.
    """

    __slots__ = ()

    def __new__(cls, value: Any) -> Static:
        # In this order for the reason that `imprints.told_apart` gives.
        return tuple.__new__(cls, (imprints.imprint(value), value))

    @property
    def value(self) -> Any:
        """The value."""
        return self[1]

    def __copy__(self) -> Static:
        return self

    def __getnewargs__(self) -> tuple[Any]:
        return (pickling.by_name(self[1]),)

    def __repr__(self) -> str:
        return f"Static(value={self[1]!r})"


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
            f"outer_index={self.outer_index}, metadata={dict(self.metadata)})"
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


class Parts(NamedTuple):
    """A node and its children, whose values stand at ``start:stop`` of the list."""

    definition: NodeDef
    place: int
    keys: tuple[Any, ...]
    start: int
    stop: int


class Blueprint(NamedTuple):
    """The attributes of a graph-mode skeleton as one flat list of values.

    The root has place 0; the children of one node stand side by side. So an object is
    built by a few plain loops: copy the list, put in the leaves and what refers to
    objects, then make of each slice of it a node.

    Attributes:
        values: The list, with the static values in their places.
        objects: The nodes that are tracked by identity, in order, with their numbers.
        leaves: For each leaf its definition, unless it is plain, and its place.
        references: Numbers of objects that are met again, and where.
        nodes: All nodes, those below a node before it.
    """

    values: list[Any]
    objects: list[tuple[int, NodeDef]]
    leaves: list[tuple[VariableDef | ArrayRefDef | None, int]]
    references: list[tuple[int, int]]
    nodes: list[Parts]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class GraphDef(Generic[Node]):
    """The structure of an object, as `split` returns it: types, static values, sharing.

    Hashable. Equality is structural: the values of the leaves do not matter. A GraphDef
    is a JAX pytree without leaves, so it can be an argument of ``jax.jit``.

    Args:
        nodes: The entries described at the top of this file.
        attributes: Pairs of a key and `NODE`, `LEAF` or a `Static`.
        num_leaves: How many leaves fill the skeleton.

    Raises:
        dataclasses.FrozenInstanceError: On assignment to an attribute.

    Example:
        >>> a = nnx.graphdef(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> b = nnx.graphdef(nnx.Linear(2, 3, rngs=nnx.Rngs(1)))
        >>> a == b, hash(a) == hash(b), a.num_leaves
        (True, True, 2)
    """

    __slots__ = ("__weakref__", "_cache", "attributes", "nodes", "num_leaves")
    nodes: list[Any]
    attributes: list[tuple[Any, Any]]
    num_leaves: int

    def __init__(
        self,
        nodes: Sequence[Any],
        attributes: Sequence[tuple[Any, Any]],
        num_leaves: int,
    ) -> None:
        store = object.__setattr__
        store(self, "nodes", list(nodes))
        store(self, "attributes", list(attributes))
        store(self, "num_leaves", num_leaves)
        store(self, "_cache", {})

    def __hash__(self) -> int:
        # `is` and this cache make a GraphDef cheap as the key of a compile cache.
        found = self._cache.get("hash")
        if found is None:
            key = (tuple(self.nodes), tuple(self.attributes))
            found = self._cache["hash"] = hash(key)
        return found

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, GraphDef):
            return NotImplemented
        if self.num_leaves != other.num_leaves:
            return False
        mine, theirs = self._cache.get("hash"), other._cache.get("hash")
        if mine is not None and theirs is not None and mine != theirs:
            return False
        return self.nodes == other.nodes and self.attributes == other.attributes

    def __repr__(self) -> str:
        lines = ["GraphDef(", "  nodes=["]
        lines += [f"    {node!r}," for node in self.nodes]
        lines += ["  ],", "  attributes=["]
        lines += [f"    {attribute!r}," for attribute in self.attributes]
        return "\n".join([*lines, "  ],", f"  num_leaves={self.num_leaves}", ")"])

    def __reduce__(self) -> Any:
        return GraphDef, (self.nodes, self.attributes, self.num_leaves)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphDef[Node]:
        return self

    @property
    def is_tree(self) -> bool:
        """Whether it was made in tree mode."""
        return bool(self.nodes) and isinstance(self.nodes[0], TreeNodeDef)

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
        return _callers[0](self, (state, *states), graph)

    def leaves(self) -> tuple[tuple[Any, VariableDef | ArrayRefDef | None], ...]:
        """For each leaf its path, and its definition unless it is plain; cached."""
        found = self._cache.get("leaves")
        if found is None:
            found = self._cache["leaves"] = tuple(_list_leaves(self))
        return found

    def paths(self) -> tuple[Any, ...]:
        """The path of each leaf, in order; cached."""
        found = self._cache.get("paths")
        if found is None:
            found = self._cache["paths"] = tuple([path for path, _ in self.leaves()])
        return found

    def blueprint(self) -> Blueprint:
        """Where each value of the object stands in one flat list; cached."""
        found = self._cache.get("blueprint")
        if found is None:
            found = self._cache["blueprint"] = _draw(self)
        return found

    def is_fixed(self) -> bool:
        """Whether an object of it changes by its attributes only; cached.

        Not so if there are containers or refs in it, or static values that may change.
        A ``None`` in the place of data is a container to JAX, but nothing is in it.
        """
        found = self._cache.get("fixed")
        if found is None:
            found = self._cache["fixed"] = not self.is_tree and all(
                node.index is not None or node.type is type(None)
                if isinstance(node, NodeDef)
                else isinstance(node, NodeRef)
                or (isinstance(node, VariableDef) and node.array_refdef is None)
                for node in self.nodes
            )
            found = self._cache["fixed"] = found and not any(
                type(attribute) is Static and imprints.may_change(attribute.value)
                for _, attribute in self.attributes
            )
        return found

    def tree(self) -> dict[Any, Any]:
        """The paths as nested dicts, with the number of each leaf; cached."""
        found = self._cache.get("tree")
        if found is None:
            found = self._cache["tree"] = {}
            for number, path in enumerate(self.paths()):
                place = found
                for key in path[:-1]:
                    place = place.setdefault(key, {})
                place[path[-1]] = number
        return found


jax.tree_util.register_static(GraphDef)

# Filled by `functional`, which is defined above this file.
_callers: list[Callable[[GraphDef[Any], Sequence[Any], bool | None], Any]] = []


def register_caller(
    caller: Callable[[GraphDef[Any], Sequence[Any], bool | None], Any],
) -> None:
    """Says how `GraphDef.apply` merges, calls and splits."""
    _callers[:] = [caller]


def _list_leaves(graphdef: GraphDef[Any]) -> list[tuple[Any, Any]]:
    if graphdef.is_tree:
        definitions = iter(graphdef.nodes[1:])
        return [
            (path, next(definitions) if attribute is NODE else None)
            for path, attribute in graphdef.attributes
        ]
    if not graphdef.nodes:
        return [((), None)]
    found: list[tuple[Any, Any]] = []
    nodes, attributes = iter(graphdef.nodes), iter(graphdef.attributes)

    # Nodes whose attributes are still to come: path, and how many. No recursion, whose
    # depth Python limits.
    root = next(nodes)
    if not isinstance(root, NodeDef):
        return [((), root)] if isinstance(root, (VariableDef, ArrayRefDef)) else []
    pending: list[tuple[tuple[Any, ...], int]] = [((), root.num_attributes)]
    while pending:
        path, remaining = pending.pop()
        while remaining:
            key, attribute = next(attributes)
            remaining -= 1
            if attribute is NODE:
                node = next(nodes)
                if isinstance(node, NodeDef):
                    pending.append((path, remaining))
                    path, remaining = (*path, key), node.num_attributes
                elif not isinstance(node, NodeRef):
                    found.append(((*path, key), node))
            elif attribute is LEAF:
                found.append(((*path, key), None))
    return found


def _draw(graphdef: GraphDef[Any]) -> Blueprint:
    root = graphdef.nodes[0] if graphdef.nodes else None
    if not isinstance(root, (NodeDef, NodeRef)):
        # Tree mode has one for each Variable.
        return Blueprint([None], [], [(root, 0)], [], [])
    blueprint = Blueprint([None], [], [], [], [])
    values, leaves = blueprint.values, blueprint.leaves
    nodes, attributes = iter(graphdef.nodes), iter(graphdef.attributes)

    def enter(node: NodeDef, place: int) -> Any:
        """Makes room for the children; the node, its place, its keys, and where."""
        if node.index is not None:
            blueprint.objects.append((node.index, node))
        start, stop = len(values), len(values) + node.num_attributes
        values.extend([None] * node.num_attributes)
        return node, place, [], start, stop

    next(nodes)
    if isinstance(root, NodeRef):
        blueprint.references.append((root.index, 0))
        return blueprint
    # Nodes whose children are still to come. No recursion, whose depth Python limits.
    pending = [enter(root, 0)]
    while pending:
        node, place, keys, start, stop = above = pending.pop()
        for child in range(start + len(keys), stop):
            key, attribute = next(attributes)
            keys.append(key)
            if attribute is LEAF:
                leaves.append((None, child))
            elif attribute is not NODE:
                values[child] = attribute.value
            elif isinstance(below := next(nodes), NodeDef):
                pending += [above, enter(below, child)]
                break
            elif isinstance(below, NodeRef):
                blueprint.references.append((below.index, child))
            else:
                leaves.append((below, child))
        else:
            blueprint.nodes.append(Parts(node, place, tuple(keys), start, stop))
    return blueprint
