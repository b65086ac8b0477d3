"""Object to (skeleton, leaves) and back; with sharing, or as a tree.

`flatten_graph` walks an object depth first, children in the order of their keys, and
enters each object that is tracked by identity once. A value that JAX takes apart is one
node spec: an object in tree mode, where shared ones are an error (`flatten_tree`), or
the arguments of a call (`flatten_leaves`). Tracked objects are numbered in the order of
the visit:

    RefMap     object -> number, by identity; filled by `flatten_graph`
    IndexMap   number -> object; filled by `unflatten`

A `Builder` makes objects from node specs. It may reuse existing objects: it first
builds everything new, then writes into the existing ones. So it either succeeds, or
changes nothing that existed.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import jax

from graftree import _jax, config
from graftree.annotations import Path
from graftree.core import ownership, paths, walks
from graftree.core.graph import graphdefs, nodes
from graftree.core.graph.graphdefs import LEAF, NODE, Field, GraphDef, Tree, VariableDef
from graftree.core.graph.nodes import GraphKind, Leaf, TreeKind
from graftree.core.hashable_mappings import HashableMapping
from graftree.core.objects import bookkeeping, callables, pytrees
from graftree.core.variables import values, variables
from graftree.core.variables.variables import MISSING, Variable


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
        """Inverts an `IndexMap`."""
        refmap = RefMap()
        refmap._entries = {id(obj): (obj, index) for index, obj in indexmap.items()}
        return refmap

    def __getitem__(self, key: Any) -> Any:
        return self._entries[id(key)][1]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._entries[id(key)] = (key, value)

    def __delitem__(self, key: Any) -> None:
        del self._entries[id(key)]

    def __iter__(self) -> Iterator[Any]:
        return iter([key for key, _ in self._entries.values()])

    def __len__(self) -> int:
        return len(self._entries)


class IndexMap(dict[int, Any]):
    """Objects by their number.

    Example:
        >>> nnx.graphlib.IndexMap({0: "a"})[0]
        'a'
    """

    @staticmethod
    def from_refmap(refmap: RefMap) -> IndexMap:
        """Inverts a `RefMap`."""
        return IndexMap([(index, obj) for obj, index in refmap._entries.values()])


# Flattening.


def flatten(
    node: Any, graph: bool | None, function: str
) -> tuple[GraphDef[Any], list[Any]]:
    """Returns the skeleton of an object and its leaves: Variables, refs and arrays.

    Messages name ``function`` as the one that was called.
    """
    if ownership.unread and ownership.current() is not ownership.no_trace:
        nodes.note_read(node)
    if config.graph_mode(graph):
        return flatten_graph(node)
    return flatten_tree(node, function)


def flatten_graph(
    node: Any,
    ref_index: RefMap | None = None,
    ref_outer_index: RefMap | None = None,
    members: list[Any] | None = None,
) -> tuple[GraphDef[Any], list[Any]]:
    """Graph-mode `flatten` without paths; the leaves are Variables, refs and arrays.

    Fills ``members`` with the object or container of each node spec.
    """
    kind = nodes.kind_of(node)
    if kind is Leaf.ARRAY or kind is Leaf.STATIC:
        return GraphDef.of(LEAF, (), 1), [node]
    flattener = _Flattener(ref_index, ref_outer_index, members)
    root = flattener.field_of(node, kind)
    return GraphDef.of(root, flattener.specs, len(flattener.leaves)), flattener.leaves


def flatten_leaves(
    treedef: Any,
    raw_leaves: Sequence[Any],
    sharing: bool,
    refs: RefMap,
    outer: RefMap,
    *,
    members: list[Any] | None = None,
) -> tuple[GraphDef[Any], list[Any]]:
    """Returns skeleton and leaves of a value that JAX takes apart into ``values``.

    With ``sharing`` the objects among those are taken apart, too. Fills ``members`` as
    `flatten_graph` does.
    """
    flattener = _Flattener(refs, outer, members)
    # The place of the spec of the tree, which comes first.
    flattener.specs.append(None)
    flattener.members.append(None)
    fields: list[Field] = []
    for x in raw_leaves:
        kind = nodes.kind_of(x)
        is_object = kind is Leaf.VARIABLE or kind is Leaf.REF
        if is_object or (sharing and isinstance(kind, GraphKind)):
            fields.append(flattener.field_of(x, kind))
        else:
            fields.append(LEAF)
            flattener.leaves.append(x)
    specs, leaves = flattener.specs[1:], flattener.leaves
    skeleton = graphdefs.of_tree(Tree(treedef), tuple(fields), specs, len(leaves))
    return skeleton, leaves


class _Flattener:
    """One walk over objects; collects the node specs of a skeleton, and the leaves."""

    def __init__(
        self,
        refs: RefMap | None,
        outer: RefMap | None,
        members: list[Any] | None,
    ) -> None:
        # The dicts behind the maps: using them directly saves a tenth of the walk.
        self.refs: dict[int, tuple[Any, Any]] = {} if refs is None else refs._entries
        self.outer: dict[int, tuple[Any, Any]] = {} if outer is None else outer._entries
        self.specs: list[Any] = []
        self.members = [] if members is None else members
        self.leaves: list[Any] = []
        # The nodes above, of which children remain. No recursion, whose depth Python
        # limits.
        self._open: list[_OpenNode] = []

    def field_of(self, x: Any, kind: nodes.Kind) -> Field:
        """Returns the field of a node, Variable or ref; lists it and all below it."""
        pending, leaves, definitions = self._open, self.leaves, graphdefs.DEFINITIONS
        # This runs for each attribute of a model, so each function call counts.
        kinds, statics, atoms = nodes.KINDS, graphdefs.STATICS, graphdefs.ATOMS
        method_types = callables.MAY_BE_OWN
        root = self._enter(x, kind)
        if type(root) in definitions:
            leaves.append(x)
        while pending:
            node, index, leaf_start, children, fields = pending[-1]
            for _, value, is_data in children:
                kind = kinds.get(type(value)) or nodes.kind_of(value)
                if is_data is False or (is_data is None and kind is Leaf.STATIC):
                    is_atom = type(value) in atoms
                    static = statics.get((type(value), value)) if is_atom else None
                    if type(value) in method_types:
                        value = callables.as_static(value, self.members[index])
                    fields.append(static or graphdefs.Static(value))
                elif kind is Leaf.ARRAY or kind is Leaf.STATIC:
                    fields.append(LEAF)
                    leaves.append(value)
                else:
                    field = self._enter(value, kind)
                    fields.append(field)
                    if field is NODE:
                        break
                    if type(field) in definitions:
                        leaves.append(value)
            else:
                pending.pop()
                counts = len(self.specs) - index, len(leaves) - leaf_start
                self.specs[index] = _make_node_spec((*node, tuple(fields), *counts))
        return root

    def _enter(self, x: Any, kind: nodes.Kind) -> Field:
        """Returns the field of a node, Variable or ref.

        The children of a node come later. The caller lists the leaf of a definition.
        """
        index = outer = None
        if not isinstance(kind, TreeKind):
            earlier = self.refs.get(id(x))
            if earlier is not None:
                return graphdefs.NodeRef(earlier[1])
            index = len(self.refs)
            self.refs[id(x)] = x, index
            # After that: both may be one map.
            outer = self.outer.get(id(x), _NOT_OUTSIDE)[1]
            if kind is Leaf.REF:
                return graphdefs.ArrayRefDef(index, outer)
            if not isinstance(kind, GraphKind):
                entries, raw = variables.metadata_of(x), variables.raw_value_of(x)
                if not entries.is_fixed:
                    entries = entries.snapshot()
                ref: Any = self._enter(raw, Leaf.REF) if _jax.is_ref(raw) else None
                return VariableDef(type(x), index, outer, entries, ref)
        children, metadata = kind.flatten(x)
        counts = len(self.specs), len(self.leaves)
        node = type(x), index, outer, metadata, tuple([child[0] for child in children])
        self._open.append(_OpenNode(node, *counts, iter(children), []))
        self.specs.append(None)
        self.members.append(x)
        if len(self._open) % _DEEP == 0:
            _check_for_cycles(self._open, self.members)
        return NODE


# For an object that stands for none on the caller's side.
_NOT_OUTSIDE = (None, None)

# The constructor of a named tuple is a function in Python.
_make_node_spec = functools.partial(tuple.__new__, graphdefs.NodeSpec)


class _OpenNode(NamedTuple):
    """A node spec whose fields are being listed.

    Attributes:
        node: The facts about it: type, numbers, metadata, keys.
        index: Its index among the node specs.
        leaf_start: How many leaves come before it.
        children: The rest of its children.
        fields: Its fields so far.
    """

    node: tuple[Any, ...]
    index: int
    leaf_start: int
    children: Iterator[nodes.Child]
    fields: list[Field]


# A search for cycles takes time, so it begins where an object is deeper than most.
_DEEP = 100


def _check_for_cycles(open_nodes: Sequence[_OpenNode], members: Sequence[Any]) -> None:
    """Refuses containers that contain themselves, which have no identity here."""
    above, path = walks.Above(), ()
    for spec in open_nodes:
        nodes.check_above(above, members[spec.index], path)
        *_, keys = spec.node
        path = (*path, *keys[len(spec.fields) - 1 : len(spec.fields)])


def flatten_tree(node: Any, function: str) -> tuple[GraphDef[Any], list[Any]]:
    """Tree-mode `flatten` without paths."""
    flat, treedef = nodes.flatten_with_paths(node, function)
    nodes.check_tree(flat, function)
    return _tree_of(node, treedef, paths.sorted_by_path(_with_paths(flat)))


def flatten_as_jax(node: Any) -> tuple[GraphDef[Any], list[Any]]:
    """Flattens in JAX's order, with shared objects as often as they occur."""
    ends = nodes.is_variable_or_ref
    flat, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=ends)
    return _tree_of(node, treedef, _with_paths(flat))


def _with_paths(flat: Sequence[tuple[Any, Any]]) -> list[tuple[Path, tuple[int, Any]]]:
    return [(paths.from_jax(path), (i, leaf)) for i, (path, leaf) in enumerate(flat)]


def _tree_of(
    node: Any, treedef: Any, leaf_items: Sequence[tuple[Path, tuple[int, Any]]]
) -> tuple[GraphDef[Any], list[Any]]:
    keys = tuple([path for path, _ in leaf_items])
    order = tuple([i for _, (i, _) in leaf_items])
    fields = tuple([_field_in_tree(*item) for _, item in leaf_items])
    tree, count = Tree(treedef, order), len(leaf_items)
    spec = graphdefs.NodeSpec(type(node), None, None, tree, keys, fields, 1, count)
    return GraphDef.of(NODE, (spec,), count), [leaf for _, (_, leaf) in leaf_items]


def _field_in_tree(index: int, leaf: Any) -> Field:
    if not isinstance(leaf, Variable):
        return LEAF
    metadata = variables.metadata_of(leaf).snapshot()
    return VariableDef(type(leaf), index, None, metadata, None)


def raw_of(leaf: Any) -> Any:
    """Returns the raw value of a leaf of a state: a Variable, or the value itself."""
    return variables.raw_value_of(leaf) if isinstance(leaf, Variable) else leaf


def unflatten(
    graphdef: GraphDef[Any],
    leaves: Sequence[Any],
    *,
    index_ref: MutableMapping[int, Any] | None = None,
    outer_index_outer_ref: Mapping[int, Any] | None = None,
    recreate_variables: bool = True,
) -> Any:
    """Builds the object of a skeleton of either mode from its leaves in order."""
    builder = Builder(
        IndexMap() if index_ref is None else index_ref,
        outer_index_outer_ref or {},
        recreate_variables=recreate_variables,
    )
    root = builder.build(graphdef, leaves)
    builder.check()
    builder.commit()
    return root


# A leaf that stands for "the existing Variable keeps its value".
KEEP: Any = object()


class Builder:
    """One reconstruction of one or several objects that share references.

    `build` makes new objects and puts off all writes into existing ones; `check` raises
    if one of them is not allowed; `commit` carries them out.

    Args:
        built: Objects by number; it is filled, and later skeletons may refer to it.
        existing: Objects to reuse, by the ``outer_index`` of the skeleton.
        recreate_variables: Whether raw leaves become Variables.
        takes_raw: Whether all leaves are raw values: a Variable among them is the value
            of another one, and not the Variable itself.
    """

    def __init__(
        self,
        built: MutableMapping[int, Any],
        existing: Mapping[Any, Any],
        *,
        recreate_variables: bool = True,
        takes_raw: bool = False,
    ) -> None:
        self.built = built
        self.existing = existing
        self.recreate_variables = recreate_variables
        self.takes_raw = takes_raw
        self.fills: list[tuple[Any, GraphKind, Any, Sequence[Any], Sequence[Any]]] = []
        self.updates: list[tuple[Variable[Any], Any, Any]] = []

    def build(self, graphdef: GraphDef[Any], leaves: Sequence[Any]) -> Any:
        """Builds the object of a skeleton; reused parts are complete after `commit`."""
        if graphdef.root is not NODE:
            return self._value(graphdef.root, iter(leaves))
        return self._build_node(graphdef.specs[0], self.members(graphdef, leaves))

    def members(self, graphdef: GraphDef[Any], leaves: Sequence[Any]) -> list[Any]:
        """Builds the contents of the fields of the root, as `build` does."""
        unread, specs = iter(leaves), graphdef.specs
        blank, fields, order = graphdef.blueprint()
        contents = [values.copy() for values in blank]
        # Objects come before the values below them, which may refer to them.
        for spec in specs:
            if spec.index is not None:
                obj = (
                    MISSING if spec.outer_index is None else self._existing_object(spec)
                )
                if obj is MISSING:
                    kind: Any = nodes.KINDS[spec.type]
                    obj = kind.create_empty(spec.metadata)
                self.built[spec.index] = obj
        for index, position, field in fields:
            if type(field) is graphdefs.Static:
                contents[index][position] = self._own_method(field.value, specs[index])
            else:
                contents[index][position] = self._value(field, unread)
        for index, above, position in order[:-1]:
            contents[above][position] = self._build_node(specs[index], contents[index])
        return contents[0]

    def _build_node(self, spec: graphdefs.NodeSpec, values: list[Any]) -> Any:
        """Builds the object or container of a node spec from its fields' values."""
        if type(spec.metadata) is Tree:
            treedef, order = spec.metadata
            if order is not None:
                by_position = dict(zip(order, values, strict=True))
                values = [by_position[position] for position in range(len(values))]
            return jax.tree.unflatten(treedef, values)
        kind: Any = nodes.KINDS[spec.type]
        if spec.index is None:
            return kind.unflatten([*zip(spec.keys, values, strict=True)], spec.metadata)
        obj = self.built[spec.index]
        if self.existing and obj is self.existing.get(spec.outer_index, MISSING):
            self.fills.append((obj, kind, spec.metadata, spec.keys, values))
        else:
            # At once: a container around it may read it.
            kind.fill(obj, spec.metadata, spec.keys, values)
        return obj

    def _value(self, field: Any, unread: Iterator[Any]) -> Any:
        """Returns the value of a field that is not a node, usually of the next leaf."""
        if type(field) is graphdefs.NodeRef:
            return self.built[field.index]
        leaf = next(unread)
        if field is LEAF:
            return leaf
        if type(field) is not VariableDef:
            # A frozen array instead of a ref is allowed and stays an array.
            ref = self.existing[field.outer_index] if leaf is KEEP else leaf
            self.built[field.index] = ref
            return ref
        outer = field.outer_index
        variable = MISSING if outer is None else self._existing_object(field)
        if variable is MISSING:
            variable = leaf
            if isinstance(leaf, Variable) and not self.takes_raw:
                if type(variables.owner_of(leaf)) is ownership.RebuiltArguments:
                    variables.take_over(leaf)
            elif self.recreate_variables:
                variable = make_variable(field, leaf)
        elif leaf is not KEEP:
            self.updates.append((variable, leaf, field.metadata))
        self.built[field.index] = variable
        if type(field.array_refdef) is graphdefs.ArrayRefDef:
            self.built[field.array_refdef.index] = variable.get_raw_value()
        return variable

    def _own_method(self, method: callables.OwnMethod, spec: graphdefs.NodeSpec) -> Any:
        """Returns the method that the object of a spec has, or a new one."""
        obj: Any = None if spec.index is None else self.built[spec.index]
        for attribute in vars(obj).values():
            if callables.as_static(attribute, obj) == method:
                return attribute
        return method.bound_to(obj)

    def _existing_object(self, node: graphdefs.NodeSpec | VariableDef) -> Any:
        """Returns the object that is reused for a field or spec, or `MISSING`."""
        obj = self.existing.get(node.outer_index, MISSING)
        if obj is not MISSING and type(obj) is not node.type:
            raise ValueError(
                f"Expected an object of type {node.type.__name__} to reuse for index "
                f"{node.outer_index}, got {type(obj).__name__}."
            )
        return obj

    def check(self) -> None:
        """Raises if a write that was put off is not allowed."""
        self.fills = [fill for fill in self.fills if _differs(*fill)]
        for obj, *_ in self.fills:
            if isinstance(obj, pytrees.Pytree):
                bookkeeping.check_owned(obj)
        for variable, leaf, _ in self.updates:
            variables.check_write(variable, raw_of(leaf))

    def commit(self) -> None:
        """Carries out the writes that were put off."""
        for obj, kind, *content in self.fills:
            kind.refill(obj, *content)
        for variable, leaf, entries in self.updates:
            variables.store(variable, raw_of(leaf))
            if isinstance(leaf, Variable):
                variables.take_metadata(variable, leaf)
            elif entries != variables.metadata_of(variable):
                variables.replace_metadata(variable, entries)


def _differs(obj: Any, kind: GraphKind, metadata: Any, keys: Any, values: Any) -> bool:
    children, current = kind.flatten(obj)
    if current != metadata or [child.key for child in children] != [*keys]:
        return True
    members = [child.value for child in children]
    return not all(map(operator.is_, members, values))


def make_variable(node: VariableDef, leaf: Any) -> Any:
    """Makes the Variable that a skeleton describes, around a value.

    Its ``ref`` metadata is right for the value it holds, even if a ref was recorded
    and an array came, or vice versa. A stand-in for an array may become a ref later.
    """
    entries, is_ref = node.metadata, _jax.is_ref(leaf)
    if entries.get("ref") is not is_ref and not values.is_stand_in(leaf):
        entries = HashableMapping({**entries, "ref": is_ref})
    return variables.rebuild(node.type, leaf, entries)
