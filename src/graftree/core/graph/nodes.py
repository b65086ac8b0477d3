"""Nodes, and how their children are listed, replaced and rebuilt.

    kind of value        is it tracked by identity?   example
    graph node           yes                          Module, Rngs, registered types
    Variable, array ref  yes                          Param
    tree node            no, rebuilt                  list, dict, namedtuple, State
    leaf                 no                           jax.Array, np.ndarray
    static               no                           everything else

A graph node is described by a `GraphKind`, a tree node by a `TreeKind`. Both list
children as `Child` triples in the order of their keys.

Trees have no shared references and no cycles; the checks are at the end of the file.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from graftree import _jax
from graftree.annotations import Path
from graftree.core import paths, walks
from graftree.core.graph.graphdefs import GraphState
from graftree.core.objects import attributes, bookkeeping, callables, pytrees
from graftree.core.states import flat_states
from graftree.core.states.states import Level, State
from graftree.core.variables import variables
from graftree.core.variables.variables import Variable


class Leaf(enum.Enum):
    """Kinds of values that are not nodes."""

    VARIABLE = "variable"
    REF = "ref"
    ARRAY = "array"
    STATIC = "static"


class Child(NamedTuple):
    """A child of a node; ``is_data`` is ``None`` where the value itself decides."""

    key: Any
    value: Any
    is_data: bool | None


@dataclasses.dataclass(frozen=True)
class GraphKind:
    """How to take graph nodes of one type apart and to rebuild them in place.

    Attributes:
        flatten: ``node -> (children, metadata)``; the metadata is hashable.
        create_empty: ``metadata -> node``, not yet filled.
        fill: ``(node, metadata, keys, values) -> None`` fills an empty node.
        refill: The same for a node that has children: they are replaced.
        set_key: ``(node, key, value) -> None``.
        pop_key: ``(node, key) -> value``, removed.
    """

    flatten: Callable[[Any], tuple[list[Child], Any]]
    create_empty: Callable[[Any], Any]
    fill: Callable[[Any, Any, Sequence[Any], Sequence[Any]], None]
    refill: Callable[[Any, Any, Sequence[Any], Sequence[Any]], None]
    set_key: Callable[[Any, Any, Any], None]
    pop_key: Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class TreeKind:
    """How to take tree nodes of one type apart and to rebuild them as new objects.

    Attributes:
        flatten: ``node -> (children, metadata)``.
        unflatten: ``([(key, value)], metadata) -> node``.
        set_key: As for graph nodes; ``None`` if the type is immutable.
        pop_key: As for graph nodes; ``None`` if the type is immutable.
    """

    flatten: Callable[[Any], tuple[list[Child], Any]]
    unflatten: Callable[[list[tuple[Any, Any]], Any], Any]
    set_key: Callable[[Any, Any, Any], None] | None = None
    pop_key: Callable[[Any, Any], Any] | None = None


Kind = GraphKind | TreeKind | Leaf


class DataElem(NamedTuple):
    """Forces a child, listed by a registered ``flatten``, to be data."""

    value: Any


class StaticElem(NamedTuple):
    """Forces a child, listed by a registered ``flatten``, to be static."""

    value: Any


_registered: dict[type, GraphKind | TreeKind] = {}


class _Kinds(dict[type, Kind]):
    """The kind of each type's values, looked up in C after the first time."""

    def __missing__(self, cls: type) -> Kind:
        kind: Kind
        if issubclass(cls, _jax.Tracer):
            return Leaf.ARRAY  # not kept: refs may have the same type
        if cls in _registered:
            kind = _registered[cls]
        elif issubclass(cls, pytrees.Pytree):
            kind = PYTREE
        elif issubclass(cls, Variable):
            kind = Leaf.VARIABLE
        elif issubclass(cls, _jax.Ref):
            kind = Leaf.REF
        elif _jax.is_data_type(cls):
            kind = Leaf.ARRAY
        elif issubclass(cls, tuple) and not hasattr(cls, "_fields"):
            kind = _TUPLE
        elif issubclass(cls, State):
            kind = _STATE
        elif issubclass(cls, tuple) or _jax.is_pytree_type(cls):
            kind = _OTHER
        else:
            kind = Leaf.STATIC
        self[cls] = kind
        return kind


KINDS = _Kinds()
LEAF_TYPES = walks.ByType(lambda kind: isinstance(KINDS[kind], Leaf))
"""The types of values that are not nodes."""


def kind_of(x: Any) -> Kind:
    """Returns the kind of a value."""
    kind = KINDS.get(type(x))
    if kind is not None:
        return kind
    if isinstance(x, _jax.Tracer):
        return Leaf.REF if _jax.is_ref(x) else Leaf.ARRAY
    return KINDS[type(x)]


def children(x: Any) -> list[Child]:
    """Lists a node's children, sorted by key; a value that is not a node has none."""
    kind = kind_of(x)
    return [] if isinstance(kind, Leaf) else kind.flatten(x)[0]


def all_in(node: Any) -> list[Any]:
    """Yields a value and all in it, each once."""
    is_new = walks.Once()

    def below(x: Any, _: Any) -> list[tuple[Any, Any]] | None:
        return [child[:2] for child in children(x)] if is_new(x) else None

    return [x for _, x in walks.walk(node, below)]


def note_read(node: Any) -> None:
    """Has all writes into a value count as read, where a lost one is reported."""
    for x in all_in(node):
        if isinstance(x, Variable):
            variables.note_read(x)
        elif isinstance(x, pytrees.Pytree):
            pytrees.note_read(x)


def items(
    node: Any, kind: GraphKind | TreeKind, *, only_data: bool = False
) -> list[tuple[Any, Any]]:
    """Lists the children of a node by key, perhaps only those that may be data.

    It takes a third of the time of `children`.
    """
    if kind is PYTREE:
        entries, facts = vars(node), attributes.facts_of(type(node))
        wants_all = not (only_data and facts.is_pytree)
        layout = bookkeeping.table_of(node).layout(facts.naming)
        try:
            return [(k, entries[name]) for name, k, data in layout if data or wants_all]
        except KeyError:
            pass  # `_flatten_pytree` settles it
    elif type(node) in (list, tuple):
        return [*enumerate(node)]
    child_list, _ = kind.flatten(node)
    return [
        (k, x) for k, x, is_data in child_list if is_data is not False or not only_data
    ]


# Predicates, as clients of the graph protocol know them.


def is_node(x: Any) -> bool:
    """Whether ``x`` has children: a graph node or a tree node.

    Example:
        >>> nnx.graphlib.is_node([1]), nnx.graphlib.is_node(jnp.ones(2))
        (True, False)
    """
    return not isinstance(kind_of(x), Leaf)


def is_graph_node(x: Any) -> bool:
    """Whether graph mode tracks ``x`` by identity: a graph node, Variable or ref."""
    kind = kind_of(x)
    return isinstance(kind, GraphKind) or kind in (Leaf.VARIABLE, Leaf.REF)


def is_node_module(x: Any) -> bool:
    """Whether ``x`` is a graph node with children (no Variable, no ref)."""
    return isinstance(kind_of(x), GraphKind)


def is_node_leaf(x: Any) -> bool:
    """Whether ``x`` is a leaf of the state: a Variable, ref or array."""
    kind = kind_of(x)
    return isinstance(kind, Leaf) and kind is not Leaf.STATIC


def is_node_type(kind: type) -> bool:
    """Whether the instances of a type are nodes."""
    return not isinstance(KINDS[kind], Leaf)


def is_pytree_node(x: Any, *, check_graph_registry: bool = True) -> bool:
    """Whether ``x`` is a container that JAX, or a registration here, takes apart.

    Args:
        x: Any value.
        check_graph_registry: Whether to answer False for graph nodes.
    """
    kind = kind_of(x)
    if isinstance(kind, GraphKind):
        return not check_graph_registry and _jax.is_pytree_type(type(x))
    return isinstance(kind, TreeKind)


def get_node_impl(x: Any) -> GraphKind | TreeKind | None:
    """Returns how to take ``x`` apart and rebuild it; ``None`` if it isn't a node."""
    kind = kind_of(x)
    return None if isinstance(kind, Leaf) else kind


def get_node_impl_for_type(cls: type) -> GraphKind | TreeKind | None:
    """Returns the functions for instances of a type; ``None`` if they are not nodes."""
    kind = KINDS[cls]
    return None if isinstance(kind, Leaf) else kind


# Registration of further types.


def register_graph_node_type(
    type: type,
    flatten: Callable[[Any], tuple[Sequence[tuple[Any, Any]], Any]],
    set_key: Callable[[Any, Any, Any], None],
    pop_key: Callable[[Any, Any], Any],
    create_empty: Callable[[Any], Any],
    clear: Callable[[Any], None],
    init: Callable[[Any, Iterable[tuple[Any, Any]]], None],
) -> None:
    """Registers a type as graph nodes: tracked by identity and rebuilt in place.

    Args:
        type: The type; subclasses are not included.
        flatten: ``node -> ([(key, value)], metadata)``; a value may be wrapped in
            `DataElem` or `StaticElem`.
        set_key: ``(node, key, value) -> None``.
        pop_key: ``(node, key) -> value``, removed from the node.
        create_empty: ``metadata -> node``.
        clear: ``node -> None``, removes all children.
        init: ``(node, [(key, value)]) -> None``, fills an empty node.

    Raises:
        ValueError: If the type is registered already.
    """

    def fill(node: Any, _: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        init(node, [*zip(keys, values, strict=True)])

    def refill(
        node: Any, metadata: Any, keys: Sequence[Any], values: Sequence[Any]
    ) -> None:
        clear(node)
        fill(node, metadata, keys, values)

    list_children = _listing(flatten)
    _register(
        type, GraphKind(list_children, create_empty, fill, refill, set_key, pop_key)
    )


def register_pytree_node_type(
    type: type,
    flatten: Callable[[Any], tuple[Sequence[tuple[Any, Any]], Any]],
    unflatten: Callable[[Sequence[tuple[Any, Any]], Any], Any],
    *,
    set_key: Callable[[Any, Any, Any], None] | None = None,
    pop_key: Callable[[Any, Any], Any] | None = None,
) -> None:
    """Registers a type as containers, which are rebuilt as new objects.

    Args:
        type: The type; subclasses are not included.
        flatten: ``node -> ([(key, value)], metadata)``.
        unflatten: ``([(key, value)], metadata) -> node``.
        set_key: ``(node, key, value) -> None``; without it the type is immutable.
        pop_key: ``(node, key) -> value``; without it the type is immutable.

    Raises:
        ValueError: If the type is registered already.
    """
    _register(type, TreeKind(_listing(flatten), unflatten, set_key, pop_key))


def _register(kind: type, impl: GraphKind | TreeKind) -> None:
    if kind in _registered or issubclass(kind, pytrees.Pytree):
        raise ValueError(f"The node type {kind.__name__} is already registered.")
    _registered[kind] = impl
    if isinstance(impl, GraphKind):
        callables.NODE_TYPES.add(kind)
    KINDS.clear()
    LEAF_TYPES.clear()


def registered_types() -> list[type]:
    """Returns the types that were registered here."""
    return [*_registered]


def _listing(flatten: Callable[[Any], Any]) -> Callable[[Any], tuple[list[Child], Any]]:
    def listed(node: Any) -> tuple[list[Child], Any]:
        items, metadata = flatten(node)
        pairs = paths.sorted_items(dict(items))
        return [_child(key, value) for key, value in pairs], metadata

    return listed


def _child(key: Any, value: Any) -> Child:
    if isinstance(value, DataElem):
        return Child(key, value.value, True)
    if isinstance(value, StaticElem):
        return Child(key, value.value, False)
    return Child(key, value, None)


# Pytrees.


class PytreeMetadata(NamedTuple):
    """Static part of a Pytree that is not an attribute."""

    type: type
    table: attributes.AttributeTable
    initializing: bool
    is_setup: bool


def _flatten_pytree(obj: pytrees.Pytree) -> tuple[list[Child], PytreeMetadata]:
    cls, entries = type(obj), vars(obj)
    facts = attributes.facts_of(cls)
    # Classes that are not pytrees are not checked, so there the values decide.
    checked = facts.is_pytree
    try:
        table, state = entries[bookkeeping.NODES], entries[bookkeeping.STATE]
        if len(entries) == table.size + len(bookkeeping.NAMES):
            child_list = [
                _make_child((key, entries[name], status if checked else None))
                for name, key, status in table.layout(facts.naming)
            ]
            return child_list, PytreeMetadata(cls, table, *state.flags)
    except KeyError:
        pass  # one was taken out of `vars`, and another one put there
    bookkeeping.settle(obj)
    return _flatten_pytree(obj)


# The constructor of a named tuple is a Python function, which would cost as much as
# all the rest.
_make_child = functools.partial(tuple.__new__, Child)


def _create_pytree(metadata: PytreeMetadata) -> Any:
    cls, table, *flags = metadata
    obj = object.__new__(cls)
    entries = vars(obj)
    entries[bookkeeping.NODES] = table
    entries[bookkeeping.STATE] = bookkeeping.PytreeState(*flags)
    return obj


def _fill_pytree(
    obj: Any, metadata: PytreeMetadata, _: Sequence[Any], values: Sequence[Any]
) -> None:
    # New, so there is nothing to version. The layout has the order of the keys.
    layout = metadata.table.layout(attributes.facts_of(metadata.type).naming)
    names = [name for name, _, _ in layout]
    vars(obj).update(zip(names, values, strict=True))


def _refill_pytree(
    obj: Any, metadata: PytreeMetadata, keys: Sequence[Any], values: Sequence[Any]
) -> None:
    names = [attributes.name_of(type(obj), key) for key in keys]
    pytrees.replace_attributes(obj, metadata.table, zip(names, values, strict=True))


def _set_pytree_key(obj: Any, key: Any, value: Any) -> None:
    setattr(obj, attributes.name_of(type(obj), key), value)


def _pop_pytree_key(obj: Any, key: Any) -> Any:
    name = attributes.name_of(type(obj), key)
    value = vars(obj)[name]
    delattr(obj, name)
    return value


PYTREE = GraphKind(
    _flatten_pytree,
    _create_pytree,
    _fill_pytree,
    _refill_pytree,
    _set_pytree_key,
    _pop_pytree_key,
)


# Containers. The metadata has the type to rebuild.


def _flatten_sequence(node: Any) -> tuple[list[Child], Any]:
    return [Child(i, value, None) for i, value in enumerate(node)], type(node)


def _flatten_dict(node: dict[Any, Any]) -> tuple[list[Child], Any]:
    return [Child(key, node[key], None) for key in sorted(node)], dict


def _pop_item(node: Any, key: Any) -> Any:
    return node.pop(key)


def _unflatten_sequence(items: list[tuple[Any, Any]], kind: Any) -> Any:
    return kind([value for _, value in items])


def _flatten_other(node: Any) -> tuple[list[Child], Any]:
    """Any registered pytree: its children are sorted by key, their positions kept."""
    items, treedef = _jax.flatten_one_level(node)
    keys = [paths.key_from_jax(entry) for entry, _ in items]
    ranks = [*map(paths.sort_key, keys)]
    order = tuple(sorted(range(len(keys)), key=ranks.__getitem__))
    return [Child(keys[i], items[i][1], None) for i in order], (treedef, order)


def _unflatten_other(items: list[tuple[Any, Any]], metadata: Any) -> Any:
    treedef, order = metadata
    in_place = sorted(zip(order, items, strict=True), key=operator.itemgetter(0))
    return treedef.unflatten([value for _, (_, value) in in_place])


def _flatten_state(node: Any) -> tuple[list[Child], Any]:
    """Lists the children of a State or a mapping in it, with mappings in it.

    JAX gets copies of some of these (`Level`), which don't see later changes.
    """
    children, metadata = _flatten_other(node)
    contents = flat_states.raw_mapping(node)
    with_levels = [
        child
        if child.value is contents[child.key]
        else child._replace(value=Level(contents[child.key]))
        for child in children
    ]
    return with_levels, metadata


def _set_in_level(node: Level, key: Any, value: Any) -> None:
    node.raw_mapping[key] = value


def _pop_from_level(node: Level, key: Any) -> Any:
    return node.raw_mapping.pop(key)


_TUPLE = TreeKind(_flatten_sequence, _unflatten_sequence)
_OTHER = TreeKind(_flatten_other, _unflatten_other)
_STATE = TreeKind(_flatten_state, _unflatten_other, operator.setitem, _pop_item)
_registered[GraphState] = TreeKind(_flatten_state, _unflatten_other)
_registered[Level] = TreeKind(
    _flatten_state, _unflatten_other, _set_in_level, _pop_from_level
)
_registered[list] = TreeKind(_flatten_sequence, _unflatten_sequence, operator.setitem)
_registered[dict] = TreeKind(
    _flatten_dict, lambda items, _: dict(items), operator.setitem, _pop_item
)
_registered[type(None)] = TreeKind(lambda _: ([], None), lambda _items, _: None)


def is_variable_or_ref(x: Any) -> bool:
    """Whether ``x`` is a value that must not occur twice in a tree."""
    kind = KINDS.get(type(x)) or kind_of(x)
    return kind is Leaf.VARIABLE or kind is Leaf.REF


def flatten(
    node: Any,
    ends_at_objects: bool = False,
    by: Callable[..., tuple[list[Any], Any]] = jax.tree.flatten,
) -> tuple[list[Any], Any]:
    """JAX's flatten, with Variables, refs and perhaps objects as leaves.

    JAX overflows the stack in a cycle, and loses a little of the stack with every
    exception that passes through it. So a cycle is raised only afterwards.
    """
    unchecked, is_new = iter(range(_UNCHECKED)), walks.Once()
    searched: list[Any] = []  # then the cycle, or None

    def stops_at(x: Any) -> bool:
        kind = KINDS.get(type(x)) or kind_of(x)
        if kind is Leaf.VARIABLE or kind is Leaf.REF:
            return True
        if ends_at_objects and isinstance(kind, GraphKind):
            return True
        if next(unchecked, None) is None and isinstance(x, _CONTAINERS):
            # A node rarely comes twice; only then is the object searched.
            if not is_new(x) and not searched:
                searched.append(find_cycle(node))
        return any(searched)

    leaves, treedef = by(node, is_leaf=stops_at)
    if any(searched):
        raise searched[0]
    return leaves, treedef


def flatten_with_paths(node: Any, function: str) -> tuple[list[tuple[Any, Any]], Any]:
    """Flattens as `flatten` does, with the paths of the leaves."""
    flat, treedef = flatten(node, by=jax.tree_util.tree_flatten_with_path)
    for path, leaf in flat:
        if isinstance(leaf, pytrees.Pytree):
            raise not_a_pytree_error(leaf, paths.keystr(path), function)
    return flat, treedef


# Not Pytree itself: its metaclass would be asked, at ten times the cost.
_CONTAINERS = (attributes.DataObject, list, dict)

# Noting each node takes time, so it begins where a tree is larger than most: JAX is
# then not deep yet.
_UNCHECKED = 200


class NotAPytreeError(TypeError, ValueError):
    """An object in a tree that is not a pytree; in JAX this is a ``TypeError``."""


def not_a_pytree_error(obj: Any, path: str, function: str) -> NotAPytreeError:
    """Builds the error for an object of a class declared with ``pytree=False``."""
    hint = f" Found at path: {path}." if path else ""
    return NotAPytreeError(
        f"nnx.{function} got a {type(obj).__name__}, which has pytree=False.{hint}\n"
        f"It is therefore not a valid JAX type: pass graph=True to nnx.{function}, or "
        "declare the class without pytree=False."
    )


def find_duplicate(flat: Iterable[tuple[Any, Any]]) -> tuple[Any, Any, Any] | None:
    """Finds the first Variable or ref that occurs twice."""
    first_paths: dict[int, Any] = {}
    for path, leaf in flat:
        if is_variable_or_ref(leaf):
            if id(leaf) in first_paths:
                return leaf, first_paths[id(leaf)], path
            first_paths[id(leaf)] = path
    return None


def duplicate_report(obj: Any, first: str, second: str) -> str:
    """Reports a duplicate and its paths."""
    return f"Duplicate {obj!r}\nfound at paths:\n\n  - {first}\n  - {second}\n"


def check_tree(flat: Iterable[tuple[Any, Any]], function: str) -> None:
    """Refuses a Variable or ref that occurs twice."""
    duplicate = find_duplicate(flat)
    if duplicate is not None:
        obj, first, second = duplicate
        raise ValueError(
            duplicate_report(obj, _text(first), _text(second))
            + f"\nnnx.{function} with graph=False does not support shared references.\n"
            "Remove the duplicates (nnx.clone makes copies),\n" + _ways_out(function)
        )


# The functions that follow references with ``graph=True``, and the transforms that
# carry changes of structure with ``graph_updates=True``: `nnx.compat` has each with
# that on.
WITH_GRAPH = (
    "split state clone graphdef flatten iter_graph iter_modules iter_children "
    "recursive_map view view_info reseed get_abstract_model backup_keys"
).split()
WITH_UPDATES = (
    "split_rngs fork_rngs jit cached_partial grad pmap vmap shard_map value_and_grad "
    "custom_vjp scan while_loop fori_loop cond switch remat checkify eval_shape"
).split()
IN_COMPAT = frozenset([*WITH_GRAPH, *WITH_UPDATES])


def _ways_out(function: str) -> str:
    if function not in IN_COMPAT:
        return "or use graph mode: graph=True, or nnx.set_graph_mode(True)."
    return (
        f"or keep them shared with nnx.{function}(..., graph=True),\n"
        f"or use nnx.compat.{function}."
    )


def _text(path: Any) -> str:
    return path if isinstance(path, str) else paths.keystr(path)


def find_cycle(node: Any) -> ValueError | None:
    """Returns the error for a node of a tree that contains itself, if there is one."""
    above = walks.Above()

    def below(x: Any, _: Any) -> list[tuple[Any, Any]]:
        is_node = _jax.is_pytree_type(type(x)) and not isinstance(x, Variable)
        return _jax.flatten_one_level(x)[0] if is_node else []

    for path, x in walks.walk(node, below):
        first = above(x, path)
        if first is not None:
            return cycle_error(x, *map(paths.keystr, (first, path)))
    return None


def check_above(above: walks.Above, x: Any, path: Path) -> None:
    """Refuses a container that contains itself, on a walk that enters it."""
    first = above(x, path)
    if first is not None:
        raise cycle_error(x, *map(paths.to_string, (first, path)))


def cycle_error(x: Any, first: str, second: str) -> ValueError:
    """Builds the error for a node that occurs below itself, at the second path."""
    way_out = (
        "Trees can't have cycles; use graph=True."
        if isinstance(x, pytrees.Pytree)
        else "Containers can't have cycles; use an nnx.List or nnx.Dict instead."
    )
    return ValueError(
        f"Cycle detected: a {type(x).__name__} contains itself, found at paths:\n\n"
        f"  - {first or '<root>'}\n  - {second}\n\n{way_out}"
    )
