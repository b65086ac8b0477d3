"""What is a node, and how its children are listed, replaced and rebuilt.

    kind of value        is it tracked by identity?   example
    graph node           yes                          Module, Rngs, registered types
    Variable, array ref  yes                          Param
    tree node            no, rebuilt                  list, dict, namedtuple, State
    leaf                 no                           jax.Array, np.ndarray
    static               no                           everything else

A graph node is described by a `GraphKind`, a tree node by a `TreeKind`. Both list
children as `Child` triples in the order of their keys.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from graftree import _jax
from graftree.core import paths
from graftree.core.objects import bookkeeping, classes, pytrees
from graftree.core.objects.attributes import AttributeTable
from graftree.core.objects.pytrees import Pytree
from graftree.core.states.states import State
from graftree.core.variables.variables import Variable


class Leaf(enum.Enum):
    """The kinds of values that are not nodes."""

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
    """How graph nodes of one type are taken apart and rebuilt in place.

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
    """How tree nodes of one type are taken apart and rebuilt as new objects.

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
# The kinds of the values of a type, as far as they are known; not of tracers, since
# those of arrays and of refs may share a type.
KINDS: dict[type, Kind] = {}


def kind_of(x: Any) -> Kind:
    """The kind of a value."""
    known = KINDS.get(type(x))
    if known is not None:
        return known
    if isinstance(x, _jax.Tracer):
        return Leaf.REF if _jax.is_ref(x) else Leaf.ARRAY
    return kind_of_type(type(x))


def kind_of_type(kind: type) -> Kind:
    """The kind of the instances of a type (of tracers: of traced arrays)."""
    known = KINDS.get(kind)
    if known is None:
        if issubclass(kind, _jax.Tracer):
            return Leaf.ARRAY
        known = KINDS[kind] = _classify(kind)
    return known


def _classify(kind: type) -> Kind:
    if kind in _registered:
        return _registered[kind]
    if issubclass(kind, Pytree):
        return PYTREE
    if issubclass(kind, Variable):
        return Leaf.VARIABLE
    if issubclass(kind, _jax.Ref):
        return Leaf.REF
    if _jax.is_data_type(kind):
        return Leaf.ARRAY
    if issubclass(kind, tuple) and not hasattr(kind, "_fields"):
        return _TUPLE
    if issubclass(kind, State):
        return _STATE
    if issubclass(kind, tuple) or _jax.is_pytree_type(kind):
        return _OTHER
    return Leaf.STATIC


def children(x: Any) -> list[Child]:
    """The children of a node, sorted by key; a value that is not a node has none."""
    kind = kind_of(x)
    return [] if isinstance(kind, Leaf) else kind.flatten(x)[0]


def items(node: Any, kind: GraphKind | TreeKind) -> list[tuple[Any, Any]]:
    """The keys and values of the children of a node, in the same order."""
    if kind is PYTREE:
        entries = vars(node)
        layout = bookkeeping.table_of(node).layout(classes.facts_of(type(node)).naming)
        try:
            return [(key, entries[name]) for name, key, _ in layout]
        except KeyError:
            pass  # `_flatten_pytree` settles it
    elif type(node) in (list, tuple):
        return [*enumerate(node)]
    return [(key, value) for key, value, _ in kind.flatten(node)[0]]


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
    return not isinstance(kind_of_type(kind), Leaf)


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
    """How ``x`` is taken apart and rebuilt, or ``None`` if it is not a node."""
    kind = kind_of(x)
    return None if isinstance(kind, Leaf) else kind


def get_node_impl_for_type(kind: type) -> GraphKind | TreeKind | None:
    """How instances of a type are taken apart, or ``None`` if they are not nodes."""
    known = kind_of_type(kind)
    return None if isinstance(known, Leaf) else known


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

    listed = _listing(flatten)
    _register(type, GraphKind(listed, create_empty, fill, refill, set_key, pop_key))


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
    if kind in _registered or issubclass(kind, Pytree):
        raise ValueError(f"The node type {kind.__name__} is already registered.")
    _registered[kind] = impl
    KINDS.clear()


def registered_types() -> list[type]:
    """The types that were registered here."""
    return [*_registered]


def _listing(flatten: Callable[[Any], Any]) -> Callable[[Any], tuple[list[Child], Any]]:
    def listed(node: Any) -> tuple[list[Child], Any]:
        items, metadata = flatten(node)
        return [
            _child(key, value) for key, value in paths.sorted_items(dict(items))
        ], metadata

    return listed


def _child(key: Any, value: Any) -> Child:
    if isinstance(value, DataElem):
        return Child(key, value.value, True)
    if isinstance(value, StaticElem):
        return Child(key, value.value, False)
    return Child(key, value, None)


# Pytrees.


class PytreeMetadata(NamedTuple):
    """The static part of a Pytree that is not an attribute."""

    type: type
    table: AttributeTable
    initializing: bool
    is_setup: bool


def _flatten_pytree(obj: Pytree) -> tuple[list[Child], PytreeMetadata]:
    cls, entries = type(obj), vars(obj)
    table, state = bookkeeping.table_of(obj), bookkeeping.state_of(obj)
    facts = classes.facts_of(cls)
    # Classes that are not pytrees are not checked, so there the values decide.
    checked = facts.is_pytree
    try:
        listed = [
            _make_child((key, entries[name], status if checked else None))
            for name, key, status in table.layout(facts.naming)
        ]
    except KeyError:  # one was taken out of `vars`, and another one put there
        bookkeeping.settle(obj)
        return _flatten_pytree(obj)
    return listed, PytreeMetadata(cls, table, *state.flags)


_TABLE = bookkeeping.NAMES[0]


# The constructor of a named tuple is a function in Python, which would cost as much as
# all the rest.
_make_child: Callable[[tuple[Any, Any, bool | None]], Child]
_make_child = functools.partial(tuple.__new__, Child)


def _create_pytree(metadata: PytreeMetadata) -> Any:
    kind, table, *flags = metadata
    return pytrees.rebuild(kind, {_TABLE: table}, flags)


def _fill_pytree(
    obj: Any, metadata: PytreeMetadata, _: Sequence[Any], values: Sequence[Any]
) -> None:
    # New, so there is nothing to stamp. The layout has the order of the keys.
    names, _, _ = metadata.table.names(classes.facts_of(metadata.type).naming)
    vars(obj).update(zip(names, values, strict=True))


def _refill_pytree(
    obj: Any, metadata: PytreeMetadata, keys: Sequence[Any], values: Sequence[Any]
) -> None:
    names = [classes.name_of(type(obj), key) for key in keys]
    pytrees.replace_attributes(obj, metadata.table, zip(names, values, strict=True))


def _set_pytree_key(obj: Any, key: Any, value: Any) -> None:
    setattr(obj, classes.name_of(type(obj), key), value)


def _pop_pytree_key(obj: Any, key: Any) -> Any:
    name = classes.name_of(type(obj), key)
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


# Containers. The metadata says which type to rebuild.


def _flatten_sequence(node: Any) -> tuple[list[Child], Any]:
    return [Child(i, value, None) for i, value in enumerate(node)], type(node)


def _flatten_dict(node: dict[Any, Any]) -> tuple[list[Child], Any]:
    return [Child(key, node[key], None) for key in sorted(node)], dict


def _set_item(node: Any, key: Any, value: Any) -> None:
    node[key] = value


def _pop_item(node: Any, key: Any) -> Any:
    return node.pop(key)


def _unflatten_sequence(items: list[tuple[Any, Any]], kind: Any) -> Any:
    return kind([value for _, value in items])


def _flatten_other(node: Any) -> tuple[list[Child], Any]:
    """Any registered pytree: its children are sorted by key, their places kept."""
    listed, treedef = _jax.flatten_one_level(node)
    keyed = [
        (paths.key_from_jax(entry), i, value) for i, (entry, value) in enumerate(listed)
    ]
    keyed.sort(key=lambda item: paths.sort_key(item[0]))
    order = tuple(i for _, i, _ in keyed)
    return [Child(key, value, None) for key, _, value in keyed], (treedef, order)


def _unflatten_other(items: list[tuple[Any, Any]], metadata: Any) -> Any:
    treedef, order = metadata
    in_place = sorted(zip(order, items, strict=True), key=lambda pair: pair[0])
    return treedef.unflatten([value for _, (_, value) in in_place])


_TUPLE = TreeKind(_flatten_sequence, _unflatten_sequence)
_OTHER = TreeKind(_flatten_other, _unflatten_other)
_STATE = TreeKind(_flatten_other, _unflatten_other, _set_item, _pop_item)
_registered[list] = TreeKind(_flatten_sequence, _unflatten_sequence, _set_item, None)
_registered[dict] = TreeKind(
    _flatten_dict, lambda items, _: dict(items), _set_item, _pop_item
)
_registered[type(None)] = TreeKind(lambda _: ([], None), lambda _items, _: None)
