"""Changing an object in place: `update` writes a state into it.

This has two steps: the whole change is planned and checked, then it is carried out. So
a failed call changes nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from graftree import errors
from graftree.annotations import Filter
from graftree.core import filters, paths
from graftree.core.graph import (
    fits,
    flattening,
    freshness,
    graph_states,
    merging,
    nodes,
)
from graftree.core.graph.nodes import GraphKind, Leaf
from graftree.core.objects import bookkeeping, classes, pytrees
from graftree.core.objects.pytrees import Pytree
from graftree.core.states import flat_states, nested, pure_dicts, states
from graftree.core.states.states import State
from graftree.core.variables import metadata as variable_metadata
from graftree.core.variables import values, variables
from graftree.core.variables.variables import MISSING, Variable

Path = tuple[Any, ...]
Step = Callable[[], None]
# A node, its kind, the Pytree it belongs to, its part of the state, and its path.
_Visit = tuple[Any, Any, Pytree | None, Mapping[Any, Any], Path]


def update(node: Any, state: Any, /, *state_list: Any, strict: bool = False) -> None:
    """Writes a state into an object, in place.

    A Variable keeps its identity and type; from a Variable it takes the value and the
    metadata, from anything else the value. Paths that the state lacks are left alone,
    new paths become new attributes (with copies of the Variables), and shapes may
    change, as in Flax. A NumPy array that replaces a JAX array is converted, and
    ``{"value": array}``, as in checkpoints restored without types, is read as the
    array.

    Args:
        node: The object.
        state: A State, mapping, FlatState, GraphState or a pytree with the structure of
            ``node`` (such as gradients).
        *state_list: Further states; of equal paths the last one counts.
        strict: Whether the state must have every leaf of the object, with its shape and
            dtype, and nothing else. `nnx.checkpoints.load_state` takes exceptions.

    Raises:
        StateMismatchError: If ``strict`` is set and the state differs; it lists all
            differences by path. It is a ValueError.
        ValueError: If the state does not fit the object, e.g. has a mapping where the
            object has an array. Like the other errors, it leaves the object unchanged.
        TypeError: If the state is neither a mapping nor a pytree of that structure.
        TraceContextError: If another trace owns an object that would change.

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> nnx.update(model, {"bias": jnp.ones(3)})
        >>> model.bias[...]
        Array([1., 1., 1.], dtype=float32)
    """
    given = (state, *state_list)
    plan = _Plan()
    if isinstance(node, Variable):
        value = _root_of(_single(given))
        plan.write(node, _fitting(node, value).get((), value) if strict else value, ())
    else:
        check_arguments(node, given, "nnx.update")
        merged = states.merge_state(*[_as_mapping(x) for x in given]).raw_mapping
        if strict:
            merged = nested.nest(_fitting(node, merged).items())
        plan.visit(node, nodes.kind_of(node), None, merged, ())
    plan.carry_out()


def _fitting(node: Any, state: Any) -> dict[Path, Any]:
    """The leaves of a state by the paths of the object, all of which they fit."""
    fit = fits.compare(node, state)
    error = fit.error(
        f"nnx.update: the state does not fit the {type(node).__name__}. Nothing has "
        "changed.",
        "nnx.checkpoints.load_state(obj, state, missing=..., unexpected=..., cast=...) "
        "says which of these may be.",
    )
    if error is not None:
        raise error
    return fit.given()


class UnsupportedTypeError(RuntimeError, TypeError):
    """The object to change is not a node. A RuntimeError for existing programs."""

    def __init__(self, node: Any) -> None:
        super().__init__(
            f"Unsupported type: a {type(node).__name__} has no state to change. Pass "
            "a Module, a Variable or a container of them."
        )


def _single(state_list: Sequence[Any]) -> Any:
    given = [s for s in state_list if not _is_empty(s)]
    if len(given) != 1 and len(state_list) != 1:
        raise ValueError(
            f"Expected exactly one non-empty state for a Variable, got {len(given)}."
        )
    return given[0] if given else state_list[0]


def _root_of(state: Any) -> Any:
    """The leaf at the root, where a FlatState has one."""
    if isinstance(state, flat_states.FlatState) and len(state):
        return state.leaves[0] if state.paths == ((),) else state.to_nested_state()
    return state


def _is_empty(state: Any) -> bool:
    return merging.is_mapping(state) and not len(state)


def write(node: Any, leaves: Mapping[Path, Any]) -> None:
    """Writes leaves that are given by their paths into an object: all, or none."""
    update(node, leaves[()] if () in leaves else nested.nest(leaves.items()))


def check_arguments(node: Any, state_list: Sequence[Any], function: str) -> None:
    """Raises a TypeError if an object can't be updated, or not from these states.

    Messages name ``function`` as the one that was called.
    """
    if isinstance(nodes.kind_of(node), Leaf):
        raise UnsupportedTypeError(node)
    for state in state_list:
        if not merging.is_mapping(state) and (
            state is None or isinstance(nodes.kind_of(state), Leaf)
        ):
            raise TypeError(
                f"{function} expects a State, a mapping or an object with the "
                "structure of the node as the state, got "
                f"{type(state).__name__}."
            )


def _as_mapping(given: Any) -> Any:
    """The nested mapping that a state of any accepted form stands for."""
    if isinstance(given, flat_states.FlatState):
        return given.to_nested_state()
    if isinstance(given, graph_states.GraphState):
        return graph_states.state_of(given)
    if isinstance(given, Mapping):
        return given
    # An object of the same structure, e.g. gradients in the form of a Module.
    skeleton, leaves = flattening.flatten_graph(given)
    return states.from_flat_state(zip(skeleton.paths(), leaves, strict=True))


class _Plan:
    """What an update will do; nothing is changed before `carry_out`."""

    def __init__(self) -> None:
        # Variables that are written; for each a Variable or a raw value, and its path.
        self._boxes: list[Variable[Any]] = []
        self._leaves: list[Any] = []
        self._paths: list[Path] = []
        # The other changes. They are checked already.
        self._steps: list[Step] = []
        # Mappings for Variables that hold an array, in words.
        self._misfits: list[str] = []

    def carry_out(self) -> None:
        """Applies the whole plan, or raises before changing anything."""
        if self._misfits:
            raise ValueError(
                errors.message(
                    "nnx.update: a mapping can't take the place of an array.",
                    where="\n".join(self._misfits),
                    way_out="Pass the array at that path; or, to store a mapping, "
                    "assign a new Variable.",
                )
            )
        boxes = self._boxes
        raw = [*map(_raw_for, boxes, self._leaves)]
        if variables.may_replace_all(boxes, raw):
            variables.replace_all(boxes, raw)
        else:
            for variable, value, path in zip(boxes, raw, self._paths, strict=True):
                variables.check_write(variable, value, paths.to_string(path))
            variables.store_all(boxes, raw)
        for variable, leaf in zip(boxes, self._leaves, strict=True):
            if isinstance(leaf, Variable):
                variables.take_metadata(variable, leaf)
        for step in self._steps:
            step()

    def visit(
        self,
        node: Any,
        kind: Any,
        owner: Pytree | None,
        state: Mapping[Any, Any],
        path: Path,
    ) -> None:
        """Plans what a state does to a node and all below it."""
        # What remains to be done at each node above. No recursion, whose depth Python
        # limits.
        pending = [self._visit_one(node, kind, owner, state, path)]
        while pending:
            below = next(pending[-1], None)
            if below is None:
                pending.pop()
            else:
                pending.append(self._visit_one(*below))

    def _visit_one(
        self,
        node: Any,
        kind: Any,
        owner: Pytree | None,
        state: Mapping[Any, Any],
        path: Path,
    ) -> Iterator[_Visit]:
        """Plans for the children of a node; yields those that are to be visited."""
        owner = node if kind is nodes.PYTREE else owner
        entries, statuses, name_of = _content(node, kind)
        items = {}
        for key, value in state.items():
            name = key if name_of is None else name_of(key)
            child = entries.get(name, MISSING)
            if child is MISSING and name_of is None:
                key = name = pure_dicts.own_key(key, entries)
                child = entries.get(name, MISSING)
            where = (*path, key)
            if isinstance(child, Variable):
                self.write(child, value, where)
            elif child is MISSING:
                index = _item_index(node, key)
                if index is None:
                    self._add(node, owner, value, where)
                else:
                    items[index] = value
            elif statuses.get(name) is False:
                self._set(node, owner, value, where)
            else:
                below = self._change(node, owner, child, value, where)
                if below is not None:
                    yield below
        for number, index in enumerate(sorted(items), len(node) if items else 0):
            if index != number:  # the List would put it at its end
                raise _out_of_range(node, index, (*path, index))
            self._add(node, owner, items[index], (*path, index))

    def write(self, variable: Variable[Any], value: Any, path: Path) -> None:
        """Plans that a Variable gets a value."""
        if not isinstance(value, Variable) and not values.is_array(value):
            if merging.is_mapping(value):
                if _is_empty(value):
                    return
                name = type(variable).__name__
                value = self._taken_out(variable.get_raw_value(), value, name, path)
            elif isinstance(value, Pytree) and _holds_leaf(variable.get_raw_value()):
                self._refuse(type(variable).__name__, variable, value, path)
        self._boxes.append(variable)
        self._leaves.append(value)
        self._paths.append(path)

    def _taken_out(
        self, held: Any, value: Mapping[Any, Any], name: str, path: Path
    ) -> Any:
        """What a mapping gives to what holds a value: what is in its boxes."""
        if isinstance(value, State):
            value = pure_dicts.to_pure_dict(value)
        value = _unboxed(value, held)
        if not merging.is_mapping(value):
            return value
        if _holds_leaf(held):
            self._refuse(name, held, value, path)
        if not isinstance(held, Mapping) or not isinstance(value, Mapping):
            return value
        given: dict[Any, Any] = {}
        for key, inner in value.items():
            own = pure_dicts.own_key(key, held)
            if own in held and isinstance(inner, Mapping):
                inner = self._taken_out(held[own], inner, name, (*path, own))
            given[own] = inner
        is_same = given.keys() == value.keys() and all(
            given[key] is value[key] for key in given
        )
        return value if is_same else given

    def _refuse(self, name: str, held: Any, value: Any, path: Path) -> None:
        """Notes that there is something with parts for what holds an array."""
        keys = [*map(repr, _as_mapping(value))]
        listed = ", ".join(keys[:3]) + (", ..." if len(keys) > 3 else "")
        self._misfits.append(
            f"{paths.to_string(path, '<root>')}: the {name} holds "
            f"{fits.describe(flattening.raw_of(held))}, got a {type(value).__name__} "
            f"with the keys {listed}"
        )

    def _change(
        self, node: Any, owner: Pytree | None, child: Any, value: Any, path: Path
    ) -> _Visit | None:
        """Plans what a value does to a child that is data but not a Variable.

        Returns:
            The child with its part of the state, if it is a node to be visited.
        """
        kind = nodes.kind_of(child)
        if kind in (Leaf.ARRAY, Leaf.REF) and merging.is_mapping(value):
            value = self._taken_out(child, value, "attribute", path)
        is_node = not isinstance(kind, Leaf)
        if is_node and type(value) is dict:
            return child, kind, owner, value, path
        if is_node and not isinstance(nodes.kind_of(value), Leaf):
            return child, kind, owner, _as_mapping(value), path
        if isinstance(kind, GraphKind) or (is_node and nodes.is_node_leaf(value)):
            raise ValueError(
                f"Expected a subgraph for {path[-1]!r}, got a {type(value).__name__} "
                f"at path {paths.to_string(path)!r}."
            )
        elif kind is Leaf.REF:
            new = flattening.raw_of(value)
            values.check_fits(child, new, paths.to_string(path))
            self._steps.append(functools.partial(values.write_ref, child, ..., new))
        else:
            self._set(node, owner, value, path)
        return None

    def _add(self, node: Any, owner: Pytree | None, value: Any, path: Path) -> None:
        if isinstance(node, list):
            raise _out_of_range(node, path[-1], path)
        if isinstance(value, Variable):
            value = value.copy()
        elif isinstance(value, (State, graph_states.GraphState)):
            value = jax.tree.map(
                lambda x: x.copy() if isinstance(x, Variable) else x,
                value,
                is_leaf=lambda x: isinstance(x, Variable),
            )
        self._set(node, owner, value, path)

    def _set(self, node: Any, owner: Pytree | None, value: Any, path: Path) -> None:
        kind: Any = nodes.kind_of(node)
        key = path[-1]
        if kind is nodes.PYTREE and key in (bookkeeping.STATE, bookkeeping.NODES):
            if pure_dicts.is_bookkeeping(key, value):
                return
            raise ValueError(
                f"Cannot set {paths.to_string(path)!r}: it is bookkeeping of the "
                f"{type(node).__name__}, and not its state. Remove the entry."
            )
        if kind.set_key is None:
            raise ValueError(
                f"Cannot set key {key!r} of a {type(node).__name__} (path "
                f"{paths.to_string(path)!r}): its items can't be replaced.\n"
                "Hold Variables there; or make a new object of the state: "
                "nnx.merge(nnx.graphdef(obj), state)."
            )
        check_owned(owner, key)
        if isinstance(node, Pytree):
            pytrees.check_assignment(node, classes.name_of(type(node), key), value)
        self._steps.append(functools.partial(kind.set_key, node, key, value))


def _item_index(node: Any, key: Any) -> int | None:
    """The index that a key of a `List` stands for."""
    if not (isinstance(node, Pytree) and isinstance(node, Sequence)):
        return None
    is_index = isinstance(key, int) or (isinstance(key, str) and key.isdecimal())
    return int(key) if is_index else None


def _out_of_range(node: Sequence[Any], index: Any, path: Path) -> IndexError:
    return IndexError(
        f"list index {index!r} is out of range at {paths.to_string(path)!r}: the "
        f"{type(node).__name__} has {len(node)} items."
    )


def _raw_for(variable: Variable[Any], leaf: Any) -> Any:
    """What a leaf of a state gives to a Variable: an array for an array."""
    raw = flattening.raw_of(leaf)
    if isinstance(raw, _NUMPY):
        held = variable.get_raw_value()
        if _holds_array(held) and not isinstance(held, _NUMPY):
            return values.as_jax(raw)
    return raw


_NUMPY = (np.ndarray, np.generic)


def _holds_array(raw: Any) -> bool:
    return nodes.kind_of(raw) in (Leaf.ARRAY, Leaf.REF) or values.is_stand_in(raw)


def _holds_leaf(raw: Any) -> bool:
    return _holds_array(raw) or isinstance(raw, (bool, int, float, complex, str))


def _unboxed(value: Mapping[Any, Any], held: Any) -> Any:
    """What is in the box of a checkpoint; a mapping that is the value itself stays."""
    if len(value) != 1 or "value" not in value:
        return value
    inner = value["value"]
    if held is None:
        return inner if inner is None else pure_dicts.unboxed(value)
    if isinstance(held, Mapping) and (
        "value" in held or not isinstance(inner, Mapping)
    ):
        return value
    return inner


def _content(
    node: Any, kind: Any
) -> tuple[Mapping[Any, Any], Mapping[Any, Any], Callable[[Any], Any] | None]:
    """The children of a node by name, are they data?, and the name for a key.

    ``None`` says that the names are the keys.
    """
    # The usual nodes are not listed: most of what they have is not meant.
    if kind is nodes.PYTREE:
        facts = classes.facts_of(type(node))
        # Classes that are not pytrees are not checked, so there the values decide.
        statuses = bookkeeping.table_of(node) if facts.is_pytree else {}
        name_of = functools.partial(facts.naming.name_of, type(node))
        return vars(node), statuses, name_of
    if type(node) is dict or isinstance(node, State):
        return nested.raw_mapping(node), {}, None
    listed = nodes.children(node)
    entries = {child.key: child.value for child in listed}
    return entries, {child.key: child.is_data for child in listed}, None


def check_owned(owner: Pytree | None, key: Any) -> None:
    """Checks the node that is changed, or that holds the container that is."""
    if owner is not None:
        bookkeeping.check_owned(owner, str(key))


def set_metadata(node: Any, /, *, only: Filter = Variable, **metadata: Any) -> None:
    """Sets metadata entries of all matching Variables, in place.

    Args:
        node: Any object, container or Variable.
        only: A filter for the Variables to change.
        **metadata: The entries to set; the others are kept.

    Raises:
        ValueError: If ``hijax`` or ``ref`` would change.
        TypeError: If no entry is given.
        TraceContextError: If another trace owns one of the Variables.

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> nnx.set_metadata(model, only=nnx.PathContains("bias"), frozen=True)
        >>> model.bias.frozen, model.kernel.has_metadata("frozen")
        (True, False)
    """
    predicate = filters.to_predicate(only)
    skeleton, leaves = freshness.flatten_node(node, None, "set_metadata")
    chosen = [
        (leaf, variable_metadata.changed(variables.metadata_of(leaf), (), metadata))
        for path, leaf in zip(skeleton.paths(), leaves, strict=True)
        if isinstance(leaf, Variable) and predicate(path, leaf)
    ]
    # All or nothing: whatever one of them refuses is found before the first changes.
    for variable, _ in chosen:
        variables.check_writable(variable)
    for variable, entries in chosen:
        variables.replace_metadata(variable, entries)
