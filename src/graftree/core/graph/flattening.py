"""Object to (skeleton, leaves) and back; with sharing, or as a tree.

`flatten` walks an object depth first, children in the order of their keys. In graph
mode each object that is tracked by identity is entered once; in tree mode JAX flattens
the object with Variables as leaves, and shared ones are an error. `unflatten` is the
inverse. Both number the tracked objects in the order of the visit:

    RefMap     object -> number, by identity; filled by `flatten`
    IndexMap   number -> object; filled by `unflatten`

With ``outer_index_outer_ref``, `unflatten` reuses objects that exist: it first builds
everything new, then writes into the existing ones. So it either succeeds, or changes
nothing that existed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import jax

from graftree import _jax, config
from graftree.core import ownership, paths
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
from graftree.core.imprints import HashableMapping
from graftree.core.objects import bookkeeping, pytrees
from graftree.core.variables import values, variables
from graftree.core.variables.variables import Variable

MISSING: Any = variables.MISSING


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
            ref = self._ref_of(x)
            self.nodes.append(VariableDef(type(x), index, outer, entries, ref))
        self.leaves.append(x)
        return ()

    def _number(self, x: Any) -> tuple[int, int | None]:
        """Gives an object that is new the next number, and tells its outer one."""
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


def flatten_tree(node: Any, function: str) -> tuple[GraphDef[Any], list[Any]]:
    """Tree-mode `flatten` without paths.

    Args:
        node: A pytree of Variables, arrays and other leaves.
        function: The public name to give in error messages.

    Raises:
        ValueError: If a Variable or ref occurs twice, there is a cycle, or an object
            is no pytree.
    """
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
            metadata = variables.metadata_of(leaf)
            entries.append(VariableDef(type(leaf), i, None, metadata, None))
        else:
            attributes.append((path, LEAF))
    return GraphDef(entries, attributes, len(leaves)), leaves


def flatten_node(
    node: Any, graph: bool | None, function: str
) -> tuple[GraphDef[Any], list[Any]]:
    """`flatten` without paths, in the given or ambient mode."""
    if config.graph_mode(graph):
        return flatten_graph(node)
    return flatten_tree(node, function)


# Unflattening.


def unflatten_graph(
    graphdef: GraphDef[Any],
    leaves: Sequence[Any],
    *,
    index_ref: MutableMapping[int, Any] | None = None,
    outer_index_outer_ref: Mapping[int, Any] | None = None,
    copy_variables: bool = False,
    recreate_variables: bool = True,
) -> Any:
    """Graph-mode `unflatten` from the leaves in order."""
    if not graphdef.nodes:
        return leaves[0]
    builder = Builder(
        IndexMap() if index_ref is None else index_ref,
        outer_index_outer_ref or {},
        copy_variables=copy_variables,
        recreate_variables=recreate_variables,
    )
    root = builder.build(graphdef, leaves)
    builder.check()
    builder.commit()
    return root


# A leaf that stands for "the existing Variable keeps what it has".
KEEP: Any = object()


class Builder:
    """One reconstruction of one or several objects that share references.

    `build` makes new objects and puts off all writes into existing ones; `check` raises
    if one of them is not allowed; `commit` carries them out.

    Args:
        found: Objects by number; it is filled, and later skeletons may refer to it.
        existing: Objects to reuse, by the ``outer_index`` of the skeleton.
        copy_variables: Whether to copy Variables that are given as leaves.
        recreate_variables: Whether raw leaves become Variables.
    """

    def __init__(
        self,
        found: MutableMapping[int, Any],
        existing: Mapping[Any, Any],
        *,
        copy_variables: bool = False,
        recreate_variables: bool = True,
    ) -> None:
        self.found = found
        self.existing = existing
        self.copy_variables = copy_variables
        self.recreate_variables = recreate_variables
        self.fills: list[tuple[Any, GraphKind, Any, Sequence[Any], Sequence[Any]]] = []
        self.updates: list[tuple[Variable[Any], Any, Any]] = []

    def build(self, graphdef: GraphDef[Any], leaves: Sequence[Any]) -> Any:
        """The object of a skeleton; what is reused in it is complete after `commit`."""
        blueprint = graphdef.blueprint()
        values = blueprint.values.copy()
        # Objects first: what is below them may refer back to them.
        for node in blueprint.objects:
            self._make_object(node)
        for (definition, place), leaf in zip(blueprint.leaves, leaves, strict=True):
            values[place] = leaf if definition is None else self._leaf(definition, leaf)
        for index, place in blueprint.references:
            values[place] = self.found[index]
        for node, place, keys, start, stop in blueprint.nodes:
            values[place] = self._fill(node, keys, values[start:stop])
        return values[0]

    def _make_object(self, node: NodeDef) -> None:
        obj = self._existing(node)
        if obj is MISSING:
            kind: Any = nodes.kind_of_type(node.type)
            obj = kind.create_empty(node.metadata)
        self.found[node.index] = obj

    def _fill(self, node: NodeDef, keys: Sequence[Any], values: Sequence[Any]) -> Any:
        kind = nodes.kind_of_type(node.type)
        if isinstance(kind, TreeKind):
            return kind.unflatten([*zip(keys, values, strict=True)], node.metadata)
        obj = self.found[node.index]
        if obj is self.existing.get(node.outer_index, MISSING):
            self.fills.append((obj, kind, node.metadata, keys, values))
        else:
            # At once: a container around it may look into it.
            kind.fill(obj, node.metadata, keys, values)
        return obj

    def _leaf(self, definition: Any, leaf: Any) -> Any:
        if isinstance(definition, ArrayRefDef):
            # A frozen array in the place of a ref is allowed and stays an array.
            kept = leaf is KEEP
            ref = self.existing[definition.outer_index] if kept else leaf
            self.found[definition.index] = ref
            return ref
        variable = self._existing(definition)
        if variable is MISSING:
            variable = self._make_variable(definition, leaf)
        elif leaf is not KEEP:
            self.updates.append((variable, leaf, definition.metadata))
        self.found[definition.index] = variable
        if isinstance(definition.array_refdef, ArrayRefDef):
            self.found[definition.array_refdef.index] = variable.get_raw_value()
        return variable

    def _make_variable(self, node: VariableDef, leaf: Any) -> Any:
        if isinstance(leaf, Variable):
            return leaf.copy() if self.copy_variables else leaf
        return make_variable(node, leaf) if self.recreate_variables else leaf

    def _existing(self, node: NodeDef | VariableDef) -> Any:
        """The object that is reused for an entry of a skeleton, or `MISSING`."""
        obj = self.existing.get(node.outer_index, MISSING)
        if obj is not MISSING and type(obj) is not node.type:
            raise ValueError(
                f"Expected an object of type {node.type.__name__} to reuse for index "
                f"{node.outer_index}, got {type(obj).__name__}."
            )
        return obj

    def check(self) -> None:
        """Raises if a write that was put off is not allowed.

        Raises:
            TraceContextError: If another trace owns an existing object that changes.
        """
        self.fills = [fill for fill in self.fills if _differs(*fill)]
        for obj, *_ in self.fills:
            if (
                isinstance(obj, pytrees.Pytree)
                and not bookkeeping.state_of(obj).is_owned()
            ):
                raise ownership.object_error(obj)
        for variable, leaf, _ in self.updates:
            variables.check_write(variable, raw_of(leaf))

    def commit(self) -> None:
        """Carries out the writes that were put off."""
        for obj, kind, *content in self.fills:
            kind.refill(obj, *content)
        for variable, leaf, entries in self.updates:
            write_leaf(variable, leaf)
            if isinstance(leaf, Variable):
                continue
            if entries != variables.metadata_of(variable):
                variables.replace_metadata(variable, entries)


def _differs(
    obj: Any,
    kind: GraphKind,
    metadata: Any,
    keys: Sequence[Any],
    values: Sequence[Any],
) -> bool:
    children, current = kind.flatten(obj)
    return (
        current != metadata
        or len(children) != len(keys)
        or any(
            child.key != key or child.value is not value
            for child, key, value in zip(children, keys, values, strict=True)
        )
    )


def make_variable(node: VariableDef, leaf: Any) -> Any:
    """The Variable that a skeleton describes, around a value.

    Its ``ref`` metadata says what it holds, also if a ref was recorded and an array
    came, or the other way round. What stands in for an array may become a ref later.
    """
    entries = node.metadata
    if entries["ref"] is not _jax.is_ref(leaf) and not values.is_stand_in(leaf):
        entries = HashableMapping({**entries, "ref": _jax.is_ref(leaf)})
    return variables.rebuild(node.type, leaf, entries)


def write_leaf(variable: Variable[Any], leaf: Any) -> None:
    """Writes a leaf of a state into a Variable, where `check_write` allows it.

    A Variable gives its value and its metadata, any other leaf is the value.
    """
    variables.store(variable, raw_of(leaf))
    if isinstance(leaf, Variable):
        variables.take_metadata(variable, leaf)


def raw_of(leaf: Any) -> Any:
    """The raw value of a leaf of a state, which is a Variable or the value itself."""
    return leaf.get_raw_value() if isinstance(leaf, Variable) else leaf


def unflatten_tree(
    graphdef: GraphDef[Any],
    leaves: Sequence[Any],
    *,
    copy_variables: bool = False,
    recreate_variables: bool = True,
) -> Any:
    """Tree-mode `unflatten` from the leaves in order."""
    root: TreeNodeDef = graphdef.nodes[0]
    definitions = iter(graphdef.nodes[1:])
    placed: list[Any] = [None] * len(leaves)
    entries = zip(root.path_index, graphdef.attributes, leaves, strict=True)
    for (_, position), (_, attribute), leaf in entries:
        if attribute is NODE:
            definition = next(definitions)
            if not isinstance(leaf, Variable):
                leaf = make_variable(definition, leaf) if recreate_variables else leaf
            elif copy_variables:
                leaf = leaf.copy()
        placed[position] = leaf
    return jax.tree.unflatten(root.treedef, placed)


def unflatten_node(
    graphdef: GraphDef[Any],
    leaves: Sequence[Any],
    *,
    copy_variables: bool = False,
    recreate_variables: bool = True,
) -> Any:
    """The object of a skeleton of either mode, from its leaves in order."""
    build = unflatten_tree if graphdef.is_tree else unflatten_graph
    return build(
        graphdef,
        leaves,
        copy_variables=copy_variables,
        recreate_variables=recreate_variables,
    )
