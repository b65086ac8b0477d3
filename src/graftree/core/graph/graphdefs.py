"""GraphDef: the structure of an object, hashable and comparable.

A skeleton is a tuple of node specs, one for each object or container, in preorder. A
node spec has a *field* for each key. For

    class Model:  a = Param, b = [array, 3], c = (the same Param as a), k = 5 (static)

    node specs               keys                  fields
    NodeSpec(Model, 0)       ("a", "b", "c", "k")  VariableDef(Param, 1), NODE,
                                                   NodeRef(1), Static(5)
    NodeSpec(list, None)     (0, 1)                LEAF, Static(3)

A NODE field is the next node spec; a LEAF, a VariableDef and an ArrayRefDef take the
next leaf. The number of an object that is tracked by identity is its ``index``;
``outer_index`` is the number of the object that it stands for on the caller's side of
a transform, if there is one.

A value that JAX takes apart is one node spec, whose metadata is a `Tree`: an object in
tree mode, or the arguments of a call. Its keys are paths, and it has no static fields.

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
    """Fields without further data: the next node spec, or the next leaf."""

    NODE = "node"
    LEAF = "leaf"


NODE, LEAF = Marker.NODE, Marker.LEAF


class Static(tuple[Any, Any]):
    """A static value, with the fingerprint that distinguishes it from equal ones.

    For an atom it is the same one each time.

    Args:
        value: The value.
    """

    __slots__ = ()

    def __new__(cls, value: Any) -> Static:
        key = (type(value), value) if type(value) in ATOMS else None
        if key is not None and (kept := STATICS.get(key)) is not None:
            return kept
        # In this order for the reason that `fingerprints.fingerprinted` gives.
        static = tuple.__new__(cls, (fingerprints.fingerprint(value), value))
        if key is not None:
            if len(STATICS) > _MOST_STATICS:
                STATICS.clear()
            STATICS[key] = static
        return static

    # As that of a named tuple: in C.
    value = property(operator.itemgetter(1), doc="Value that this stands for.")

    def __copy__(self) -> Static:
        return self

    def __getnewargs__(self) -> tuple[Any]:
        return (pickling.by_name(self[1]),)

    def __repr__(self) -> str:
        return f"Static(value={descriptions.safe_repr(self[1])})"


# The `Static` of each atom, by type and value. A model has many that are equal.
STATICS: dict[tuple[type, Any], Static] = {}
ATOMS = frozenset({int, bool, str, type(None)})
_MOST_STATICS = 4096


class NodeRef(NamedTuple):
    """An object that a node spec before this field describes."""

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


# Fields with data that take a leaf.
DEFINITIONS = (VariableDef, ArrayRefDef)

Field = VariableDef | ArrayRefDef | NodeRef | Static | Marker


class Tree(NamedTuple):
    """Metadata of a value that JAX takes apart.

    Attributes:
        treedef: JAX's.
        order: For each field its position in the treedef; ``None`` if in order.
    """

    treedef: Any
    order: tuple[int, ...] | None = None


class NodeSpec(NamedTuple):
    """An object, or (``index`` is ``None``) a container.

    Attributes:
        type: Its type.
        index: Its number, if it is tracked by identity.
        outer_index: The number of the caller's object that it stands for.
        metadata: The data that its type gives besides its children.
        keys: The keys of its children, in order.
        fields: The fields at these keys.
        num_nodes: The number of node specs that it takes, with all below it.
        num_leaves: The number of leaves in it, with all below it.
    """

    type: type
    index: int | None
    outer_index: int | None
    metadata: Any
    keys: tuple[Any, ...]
    fields: tuple[Field, ...]
    num_nodes: int
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
        type: The type of the object.
        treedef: JAX's, with Variables as leaves.
        path_index: For each leaf in the order of the paths, its path and its position
            in the treedef.
    """

    type: type
    treedef: Any
    path_index: tuple[tuple[Any, int], ...]


class GraphDef(Generic[Node]):
    """Structure of an object, as `split` returns it: types, static values, sharing.

    Hashable. Equality is structural: the values of the leaves do not matter. A GraphDef
    is a JAX pytree without leaves, so it can be an argument of ``jax.jit``.

    Args:
        nodes: A `NodeDef`, `VariableDef`, `ArrayRefDef` or `NodeRef` for each object
            and container, in preorder; in tree mode a `TreeNodeDef` comes first.
        attributes: Pairs of a key and `NODE`, `LEAF` or a `Static`, in the same order.
        num_leaves: How many leaves fill the skeleton.

    Attributes:
        root: The field of the object.
        specs: The node specs of all objects and containers in it.

    Raises:
        dataclasses.FrozenInstanceError: On assignment to an attribute.

    Example:
        >>> a = nnx.graphdef(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> b = nnx.graphdef(nnx.Linear(2, 3, rngs=nnx.Rngs(1)))
        >>> a == b, hash(a) == hash(b), a.num_leaves
        (True, True, 2)
    """

    __slots__ = ("__weakref__", "_cache", "num_leaves", "root", "specs")
    root: Field
    specs: tuple[NodeSpec, ...]
    num_leaves: int

    def __init__(
        self,
        nodes: Sequence[Any],
        attributes: Sequence[tuple[Any, Any]],
        num_leaves: int,
    ) -> None:
        graphdef = GraphDef.of(*_read(nodes, attributes), num_leaves)
        for name in ("root", "specs", "num_leaves", "_cache"):
            object.__setattr__(self, name, getattr(graphdef, name))

    @staticmethod
    def of(root: Field, specs: Sequence[NodeSpec], num_leaves: int) -> GraphDef[Any]:
        """Makes the skeleton of these node specs."""
        graphdef, store = object.__new__(GraphDef), object.__setattr__
        store(graphdef, "root", root)
        store(graphdef, "specs", tuple(specs))
        store(graphdef, "num_leaves", num_leaves)
        store(graphdef, "_cache", {})
        return graphdef

    def __setattr__(self, name: str, value: Any) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")

    def __hash__(self) -> int:
        # `is` and this cache make a GraphDef cheap as the key of a compile cache.
        cached_hash = self._cache.get("hash")
        if cached_hash is None:
            cached_hash = self._cache["hash"] = hash((self.root, self.specs))
        return cached_hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, GraphDef):
            return NotImplemented
        try:
            return self.root == other.root and self.specs == other.specs
        except Exception:  # of the comparison of a static value
            return _are_alike(self, other)

    def __repr__(self) -> str:
        lines = ["GraphDef(", "  nodes=["]
        lines += [f"    {node!r}," for node in self.nodes]
        lines += ["  ],", "  attributes=["]
        lines += [f"    {attribute!r}," for attribute in self.attributes]
        return "\n".join([*lines, "  ],", f"  num_leaves={self.num_leaves}", ")"])

    def __reduce__(self) -> Any:
        return GraphDef.of, (self.root, self.specs, self.num_leaves)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphDef[Node]:
        return self

    @property
    def nodes(self) -> list[Any]:
        """Objects and containers in it, in preorder."""
        return _as_lists(self)[0]

    @property
    def attributes(self) -> list[tuple[Any, Any]]:
        """Keys of all attributes and members, in preorder, with their fields."""
        return _as_lists(self)[1]

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

    def located_fields(self) -> list[tuple[Path, Any]]:
        """Lists each node spec, and each other field, with its path, in preorder."""
        specs, located = iter(self.specs), []
        # The rest of each node spec above. No recursion, whose depth Python limits.
        pending: list[Iterator[tuple[Path, Any]]] = [iter([((), self.root)])]
        while pending:
            for item in pending[-1]:
                path, field = item
                if field is NODE:
                    spec = next(specs)
                    located.append((path, spec))
                    if type(spec.metadata) is Tree:
                        child_paths = [(*path, *keys) for keys in spec.keys]
                    else:
                        child_paths = [(*path, key) for key in spec.keys]
                    pending.append(zip(child_paths, spec.fields, strict=True))
                    break
                located.append(item)
            else:
                pending.pop()
        return located

    def blueprint(self) -> Blueprint:
        """Describes the way from the leaves to the object; cached."""
        if "blueprint" in self._cache:
            return self._cache["blueprint"]
        specs, child_indices = self.specs, iter(range(1, len(self.specs)))
        blueprint = Blueprint([[None] * len(spec.fields) for spec in specs], [], [])
        # Node specs with those above and the rest of their fields. No recursion, whose
        # depth Python limits.
        pending = [(0, 0, 0, enumerate(specs[0].fields))]
        while pending:
            spec_index, above, position_above, fields = pending[-1]
            for position, field in fields:
                if field is NODE:
                    child = next(child_indices)
                    rest = enumerate(specs[child].fields)
                    pending.append((child, spec_index, position, rest))
                    break
                if type(field) is Static and type(field[1]) is not OwnMethod:
                    blueprint.contents[spec_index][position] = field[1]
                else:
                    blueprint.fields.append((spec_index, position, field))
            else:
                pending.pop()
                blueprint.order.append((spec_index, above, position_above))
        self._cache["blueprint"] = blueprint
        return blueprint

    def leaves(self) -> tuple[tuple[Path, VariableDef | ArrayRefDef | None], ...]:
        """Lists for each leaf its path, and its definition if it has one; cached."""
        leaves = self._cache.get("leaves")
        if leaves is None:
            leaves = self._cache["leaves"] = tuple(
                [
                    (path, None if field is LEAF else field)
                    for path, field in self.located_fields()
                    if field is LEAF or type(field) in DEFINITIONS
                ]
            )
        return leaves

    def paths(self) -> tuple[Path, ...]:
        """Lists the path of each leaf, in order; cached."""
        paths = self._cache.get("paths")
        if paths is None:
            paths = self._cache["paths"] = tuple([path for path, _ in self.leaves()])
        return paths

    def leaf_indices(self) -> dict[Any, Any]:
        """Returns the paths as nested dicts, with the index of each leaf; cached."""
        indices = self._cache.get("leaf_indices")
        if indices is None:
            indexed_paths = zip(self.paths(), itertools.count())
            indices = self._cache["leaf_indices"] = flat_states.nest(indexed_paths)
        return indices

    def tops(self) -> list[Any]:
        """Lists for each root field its node spec, or the field if it has none."""
        pairs = zip(self.specs[0].fields, self.starts(), strict=False)
        return [self.specs[n] if field is NODE else field for field, (n, _) in pairs]

    def starts(self) -> list[tuple[int, int]]:
        """Counts for each field of the root the specs and leaves before it; cached.

        The last counts are those of the whole value.
        """
        starts = self._cache.get("starts")
        if starts is None:
            node, leaf = 1, 0
            starts = self._cache["starts"] = [(node, leaf)]
            for field in self.specs[0].fields:
                if field is NODE:
                    spec = self.specs[node]
                    node, leaf = node + spec.num_nodes, leaf + spec.num_leaves
                elif _is_leaf(field):
                    leaf += 1
                starts.append((node, leaf))
        return starts

    def part(self, treedef: Any, start: int, stop: int) -> GraphDef[Any]:
        """Returns the skeleton of some root fields of a value that JAX took apart."""
        specs, num_leaves = self._span(start, stop)
        fields = self.specs[0].fields[start:stop]
        return of_tree(Tree(treedef), fields, self.specs[specs], num_leaves)

    def with_part(self, start: int, stop: int, other: GraphDef[Any]) -> GraphDef[Any]:
        """Replaces root fields by those of another skeleton, as many as they were."""
        top, *specs = self.specs
        fields, (span, replaced_leaves) = [*top.fields], self._span(start, stop)
        fields[start:stop] = other.specs[0].fields
        specs[span.start - 1 : span.stop - 1] = other.specs[1:]
        num_leaves = self.num_leaves - replaced_leaves + other.num_leaves
        return of_tree(top.metadata, tuple(fields), specs, num_leaves)

    def _span(self, start: int, stop: int) -> tuple[slice, int]:
        """Returns where the specs of some root fields are, and how many leaves."""
        (first, first_leaf), (end, end_leaf) = self.starts()[start], self.starts()[stop]
        return slice(first, end), end_leaf - first_leaf


jax.tree_util.register_static(GraphDef)


def _are_alike(one: GraphDef[Any], other: GraphDef[Any]) -> bool:
    """Whether two skeletons are equal, where static values fail to be compared."""
    if len(one.specs) != len(other.specs):
        return False
    return _is_field_alike(one.root, other.root) and all(
        _fixed(spec) == _fixed(another)
        and fingerprints.is_same(spec.metadata, another.metadata)
        and all(map(_is_field_alike, spec.fields, another.fields))
        for spec, another in zip(one.specs, other.specs, strict=True)
    )


_fixed = operator.itemgetter(0, 1, 2, 4, 6, 7)  # all but metadata and fields


def _is_field_alike(field: Field, other: Field) -> bool:
    if isinstance(field, Static) and isinstance(other, Static):
        return fingerprints.are_same(field, other)
    return field == other


def _is_leaf(field: Any) -> bool:
    return field is LEAF or type(field) in DEFINITIONS


class Blueprint(NamedTuple):
    """Way from leaves to an object.

    Attributes:
        contents: For each node spec its static values at their positions.
        fields: The other fields, in the order of leaves: spec, position and field.
        order: The specs, each after those below it: its index, that of the spec above,
            and its position there.
    """

    contents: list[list[Any]]
    fields: list[tuple[int, int, Field]]
    order: list[tuple[int, int, int]]


def of_tree(
    tree: Tree, fields: tuple[Field, ...], specs: Sequence[NodeSpec], num_leaves: int
) -> GraphDef[Any]:
    """Makes the skeleton of a value that JAX took apart, with numbered members.

    Args:
        tree: How JAX took it apart.
        fields: The fields of the members.
        specs: The node specs below it.
        num_leaves: How many leaves fill the skeleton.
    """
    keys, num_nodes = tuple([(n,) for n in range(len(fields))]), len(specs) + 1
    top = NodeSpec(tuple, None, None, tree, keys, fields, num_nodes, num_leaves)
    return GraphDef.of(NODE, (top, *specs), num_leaves)


def _as_lists(
    graphdef: GraphDef[Any],
) -> tuple[list[Any], list[tuple[Any, Any]]]:
    """Lists what `GraphDef.nodes` and `GraphDef.attributes` are."""
    nodes: list[Any] = []
    attributes: list[tuple[Any, Any]] = []
    is_tree = bool(graphdef.specs) and type(graphdef.specs[0].metadata) is Tree
    for path, field in graphdef.located_fields():
        is_node_spec = isinstance(field, NodeSpec)
        is_attribute = field is LEAF or isinstance(field, Static)
        if not is_attribute:
            nodes.append(_node_def(field) if is_node_spec else field)
        # In a tree the root is a spec: a field is an attribute though it has no path.
        if path or is_attribute or (is_tree and not is_node_spec):
            key = path if is_tree else path[-1] if path else None
            attributes.append((key, field if is_attribute else NODE))
    return nodes, attributes


def _node_def(spec: NodeSpec) -> NodeDef | TreeNodeDef:
    tree = spec.metadata
    if type(tree) is Tree:
        order = range(len(spec.keys)) if tree.order is None else tree.order
        path_index = tuple(zip(spec.keys, order, strict=True))
        return TreeNodeDef(spec.type, tree.treedef, path_index)
    count = len(spec.keys)
    return NodeDef(spec.type, spec.index, spec.outer_index, count, spec.metadata)


def _read(
    nodes: Sequence[Any], attributes: Sequence[tuple[Any, Any]]
) -> tuple[Field, Sequence[Any]]:
    """Reads the root and the node specs; the inverse of `_as_lists`."""
    top = nodes[0] if nodes else LEAF
    if isinstance(top, TreeNodeDef):
        definitions = iter(nodes[1:])
        fields = [next(definitions) if x is NODE else x for _, x in attributes]
        tree = Tree(top.treedef, tuple([position for _, position in top.path_index]))
        keys, count = tuple([path for path, _ in top.path_index]), len(fields)
        spec = NodeSpec(top.type, None, None, tree, keys, tuple(fields), 1, count)
        return NODE, [spec]
    remaining = [*nodes]
    # Backwards, so that the members of a node come before it. For each field read: its
    # key, itself, its node specs.
    stack: list[tuple[Any, Any, list[NodeSpec]]] = []
    entries = [(None, NODE), *attributes] if nodes else attributes
    for key, entry in reversed(entries):
        field, specs = (remaining.pop() if entry is NODE else entry), []
        if isinstance(field, NodeDef):
            kind, index, outer, count, metadata = field
            members = [stack.pop() for _ in range(count)]
            specs = [spec for _, _, inner in members for spec in inner]
            keys = tuple([x[0] for x in members])
            fields = tuple([x[1] for x in members])
            num_leaves = sum(inner[0].num_leaves for *_, inner in members if inner)
            counts = len(specs) + 1, num_leaves + sum(map(_is_leaf, fields))
            spec = NodeSpec(kind, index, outer, metadata, keys, fields, *counts)
            field, specs = NODE, [spec, *specs]
        stack.append((key, field, specs))
    ((_, root, specs),) = stack
    return root, specs


class Interned(pickling.Rebuilt):
    """Gives JAX one object for all equal static values, with a number of its own.

    JAX does not hash static data of pytree nodes; it compares it with the data that it
    compiled for, inside its cache in C++. If a comparison runs Python code, another
    thread may run and change that cache: then the process dies
    (tests/stress/static_data.py). So equal values are made the same one, with a unique
    number in front: numbers decide, and are compared in C.

    A static value that was changed in place, and so has a new hash, is not taken for
    its earlier self either.
    """

    def __init__(self) -> None:
        self._entries: weakref.WeakKeyDictionary[Any, tuple[int, weakref.ref[Any]]]
        self._entries = weakref.WeakKeyDictionary()
        # Otherwise two threads could both come first. User code compares static values.
        self._lock = threading.RLock()

    def intern(self, x: T, is_new: bool = False) -> tuple[int, T]:
        """Returns the value that equals this one and came first, after its number.

        If it ``is_new``, it has changed in a way that no comparison sees.
        """
        if is_new:
            return next(_numbers), x
        with self._lock:
            number, weak = self._entries.get(x, (0, None))
            first = None if weak is None else weak()
            if first is None:
                number, first = next(_numbers), x
                self._entries[x] = number, weakref.ref(x)
            return number, first


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
        """Nested dict of the State."""
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
    """Returns the GraphDef of a GraphState."""
    return graph_state._graphdef


def state_of(graph_state: Any) -> Any:
    """Returns the State of a GraphState; another mapping is returned as it is."""
    return graph_state._state if isinstance(graph_state, GraphState) else graph_state


def _flatten_with_keys(graph_state: GraphState) -> Any:
    children, treedef = _jax.flatten_one_level(graph_state._state)
    return children, (treedef, graph_state._graphdef)


def _unflatten(aux: Any, children: Any) -> GraphState:
    treedef, graphdef = aux
    return GraphState(graphdef, jax.tree.unflatten(treedef, children))


jax.tree_util.register_pytree_with_keys(GraphState, _flatten_with_keys, _unflatten)
