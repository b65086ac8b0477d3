"""Changing an object in place: `update` writes a state into it, `pop` takes one out.

Both have two steps: plan and check the whole change, then carry it out. So a failed
call changes nothing.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import jax
import numpy as np

from graftree import errors
from graftree.annotations import Filter
from graftree.core import filters, paths, walks
from graftree.core.graph import flattening, graphdefs, matching, nodes
from graftree.core.graph.graphdefs import Path
from graftree.core.graph.matching import Match, StateEntry
from graftree.core.graph.nodes import GraphKind, Leaf, TreeKind
from graftree.core.objects import attributes, bookkeeping, pytrees
from graftree.core.objects.pytrees import Pytree
from graftree.core.states import flat_states, states
from graftree.core.text import descriptions
from graftree.core.variables import metadata as variable_metadata, values, variables
from graftree.core.variables.variables import MISSING, Variable

Step = Callable[[], None]


def update(node: Any, state: Any, /, *state_list: Any, strict: bool = False) -> None:
    """Writes a state into an object, in place.

    A Variable keeps its identity and type; it takes value and metadata from a Variable,
    only the value from anything else. Paths that the state lacks are left alone, new
    paths become new attributes (with copies of the Variables), and shapes may change,
    as in Flax. A NumPy array that replaces a JAX array is converted, and
    ``{"value": array}``, as in checkpoints restored without types, is read as the
    array.

    Args:
        node: The object.
        state: A State, mapping, FlatState, GraphState or a pytree with the structure of
            ``node`` (such as gradients).
        *state_list: Further states; of equal paths, the last one counts.
        strict: Whether the state must have every leaf of the object, with its shape and
            dtype, and nothing else. `nnx.checkpoints.load_state` allows exceptions.

    Raises:
        StateMismatchError: If ``strict`` is set and the state differs; lists all
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
    all_states = (state, *state_list)
    if isinstance(node, Variable):
        merged_state = _root_of(_single(all_states))
    else:
        check_arguments(node, all_states, "nnx.update")
        merged_state = states.merge_state(
            *map(matching.mapping_of, all_states)
        ).raw_mapping
    if not strict:
        _carry_out(matching.match(node, merged_state))
        return
    fit = matching.compare(node, merged_state)
    error = fit.error(
        f"nnx.update: the state does not fit the {type(node).__name__}. Nothing has "
        "changed.",
        "To allow some of these, use nnx.checkpoints.load_state(obj, state, "
        "missing=..., unexpected=..., cast=...).",
    )
    if error is not None:
        raise error
    write(pair.entry for pair in fit.pairs if pair.entry is not None)


def write(entries: Iterable[StateEntry]) -> None:
    """Writes values of states into the objects they belong to: all, or nothing."""
    _carry_out(Match([*entries]))


def write_at(node: Any, leaves: Mapping[Path, Any]) -> None:
    """Writes leaves, by their paths, into an object: all, or none."""
    state = leaves[()] if () in leaves else flat_states.nest(leaves.items())
    _carry_out(matching.match(node, state))


class UnsupportedTypeError(RuntimeError, TypeError):
    """An object to change is not a node. A RuntimeError for existing programs."""

    def __init__(self, node: Any) -> None:
        super().__init__(
            f"Unsupported type: a {type(node).__name__} has no state to change. Pass "
            "a Module, a Variable or a container of them."
        )


def _single(state_list: Sequence[Any]) -> Any:
    filled = [state for state in state_list if not matching.is_empty(state)]
    if len(filled) != 1 and len(state_list) != 1:
        raise ValueError(
            f"Expected exactly one non-empty state for a Variable, got {len(filled)}."
        )
    return filled[0] if filled else state_list[0]


def _root_of(state: Any) -> Any:
    """Returns the leaf at the root, where a FlatState has one."""
    if isinstance(state, flat_states.FlatState) and len(state):
        return state.leaves[0] if state.paths == ((),) else state.to_nested_state()
    return state


def check_arguments(node: Any, state_list: Sequence[Any], function: str) -> None:
    """Raises a TypeError if an object can't be updated, or not from these states.

    Messages name ``function`` as the one that was called.
    """
    if isinstance(nodes.kind_of(node), Leaf):
        raise UnsupportedTypeError(node)
    for state in state_list:
        if not matching.is_mapping(state) and (
            state is None or isinstance(nodes.kind_of(state), Leaf)
        ):
            raise TypeError(
                f"{function} expects a State, a mapping or an object with the "
                "structure of the node as the state, got "
                f"{type(state).__name__}."
            )


def _carry_out(match: Match) -> None:
    """Writes all of a state, or raises before changing anything."""
    writes: list[StateEntry] = []
    set_at: list[StateEntry] = []
    items: dict[int, list[StateEntry]] = collections.defaultdict(list)
    refused = [_describe_refusal(*refusal) for refusal in match.refused]
    for entry in match.entries:
        _, _, current, value = entry
        if isinstance(current, Variable):
            if isinstance(value, Variable):
                writes.append(entry)
                continue
            if nodes.kind_of(value) is nodes.PYTREE:
                raw = current.get_raw_value()
                if matching.holds_leaf(raw):
                    refused.append(_describe_refusal(entry, entry.path, raw))
            # An empty mapping has no value for a Variable.
            if not matching.is_empty(value):
                writes.append(entry)
        elif current is MISSING and _index_of(entry) is not None:
            items[id(entry.node)].append(entry)
        else:
            set_at.append(entry)
    # An error names the first path in their order, whatever order states have.
    in_order = sorted(set_at, key=lambda entry: paths.path_sort_key(entry.path))
    setting = {id(entry): _prepare_setting(entry) for entry in in_order}
    # New attributes have the order of the state.
    steps = [setting[id(entry)] for entry in set_at]
    for appended in items.values():
        steps += _prepare_appending(appended)
    if refused:
        raise ValueError(
            errors.message(
                "nnx.update: a mapping can't take the place of an array.",
                where="\n".join(refused),
                way_out="Pass the array at that path; or, to store a mapping, "
                "assign a new Variable.",
            )
        )
    _write_all(writes)
    for step in steps:
        step()


def _write_all(writes: Sequence[StateEntry]) -> None:
    boxes, news = [x.current for x in writes], [x.value for x in writes]
    are_boxed = [nodes.kind_of(x) is Leaf.VARIABLE for x in news]
    raw = (
        variables.read_all(news) if all(are_boxed) else [*map(flattening.raw_of, news)]
    )
    if any([issubclass(kind, _NUMPY) for kind in {*map(type, raw)}]):
        raw = [*map(_as_current, boxes, raw)]
    variables.write_all(boxes, raw, lambda n: paths.to_string(writes[n].path))
    for variable, new, is_boxed in zip(boxes, news, are_boxed, strict=True):
        if is_boxed:
            variables.take_metadata(variable, new)


def _describe_refusal(entry: StateEntry, path: Path, content: Any) -> str:
    """Says that a value with parts is meant for a holder of an array."""
    keys = [*map(repr, matching.mapping_of(entry.value))]
    keys_text = ", ".join(keys[:3]) + (", ..." if len(keys) > 3 else "")
    is_box = isinstance(entry.current, Variable)
    name = type(entry.current).__name__ if is_box else "attribute"
    return (
        f"{paths.to_string(path, '<root>')}: the {name} holds "
        f"{descriptions.describe_leaf(content)}, got a "
        f"{type(entry.value).__name__} with the keys {keys_text}"
    )


def _prepare_setting(entry: StateEntry) -> Step:
    """Prepares the step that replaces a value other than a Variable, and checks it."""
    path, current, value, node = entry.path, entry.current, entry.value, entry.node
    kind: Any = nodes.kind_of(current)
    if current is MISSING:
        if isinstance(node, list):
            raise _out_of_range(entry)
        return _set(node, entry.owner, _copy_value(value), path)
    if isinstance(kind, GraphKind) or (
        not isinstance(kind, Leaf) and nodes.is_node_leaf(value)
    ):
        raise ValueError(
            f"Expected a subgraph for {path[-1]!r}, got a {type(value).__name__} "
            f"at path {paths.to_string(path)!r}."
        )
    if kind is Leaf.REF:
        new = flattening.raw_of(value)
        values.check_fits(current, new, paths.to_string(path))
        return functools.partial(values.write_ref, current, ..., new)
    return _set(node, entry.owner, value, path)


def _copy_value(value: Any) -> Any:
    """Copies a value for a new attribute, with Variables of its own."""
    if isinstance(value, Variable):
        return value.copy()
    if not isinstance(value, (states.State, graphdefs.GraphState)):
        return value
    return jax.tree.map(
        lambda x: x.copy() if isinstance(x, Variable) else x,
        value,
        is_leaf=variables.is_variable,
    )


def _set(node: Any, owner: Pytree | None, value: Any, path: Path) -> Step:
    kind: Any = nodes.kind_of(node)
    key = path[-1]
    if kind is nodes.PYTREE and key in bookkeeping.NAMES:
        raise ValueError(
            f"Cannot set {paths.to_string(path)!r}: it is bookkeeping of the "
            f"{type(node).__name__}, not part of its state. Remove the entry."
        )
    if kind.set_key is None:
        raise ValueError(
            f"Cannot set key {key!r} of a {type(node).__name__} (path "
            f"{paths.to_string(path)!r}): its items can't be replaced.\n"
            "Use Variables there; or make a new object from the state: "
            "nnx.merge(nnx.graphdef(obj), state)."
        )
    check_owned(owner, key)
    if isinstance(node, Pytree):
        if not isinstance(key, str) and not isinstance(node, Sequence):
            raise ValueError(
                f"Cannot set key {key!r} of a {type(node).__name__} (path "
                f"{paths.to_string(path)!r}): its items are attributes, whose names "
                "are strings. Use strings as its keys in the state."
            )
        pytrees.check_assignment(node, attributes.name_of(type(node), key), value)
    return functools.partial(kind.set_key, node, key, value)


def _index_of(entry: StateEntry) -> Any:
    """Returns the index that a key of a `List` stands for; ``None`` elsewhere."""
    node, key = entry.node, entry.key
    if not (isinstance(node, Pytree) and isinstance(node, Sequence)):
        return None
    is_index = isinstance(key, int) or (isinstance(key, str) and key.isdecimal())
    return int(key) if is_index else None


def _prepare_appending(appended: Sequence[StateEntry]) -> Iterator[Step]:
    """Yields the steps that append items to a `List`, in the order of indices."""
    in_order = sorted(appended, key=_index_of)
    for index, entry in enumerate(in_order, len(appended[0].node)):
        if index != _index_of(entry):  # the List would put it at its end
            raise _out_of_range(entry)
        path = (*entry.path[:-1], index)
        yield _set(entry.node, entry.owner, _copy_value(entry.value), path)


def _out_of_range(entry: StateEntry) -> IndexError:
    return IndexError(
        f"list index {entry.key!r} is out of range at "
        f"{paths.to_string(entry.path)!r}: the {type(entry.node).__name__} has "
        f"{len(entry.node)} items."
    )


def _as_current(variable: Variable[Any], raw: Any) -> Any:
    """Converts a raw value to an array of JAX, if the Variable holds one."""
    current = variable.get_raw_value()
    if isinstance(raw, _NUMPY) and not isinstance(current, _NUMPY):
        return values.as_jax(raw) if matching.holds_array(current) else raw
    return raw


_NUMPY = (np.ndarray, np.generic)


def check_owned(owner: Pytree | None, key: Any) -> None:
    """Checks the changed node, or the one that holds the changed container."""
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
    skeleton, leaves = flattening.flatten(node, None, "set_metadata")
    chosen = [
        (leaf, variable_metadata.changed(variables.metadata_of(leaf), (), metadata))
        for path, leaf in zip(skeleton.paths(), leaves, strict=True)
        if isinstance(leaf, Variable) and predicate(path, leaf)
    ]
    # All or nothing: any refusal is found before the first one changes.
    for variable, _ in chosen:
        variables.check_write(variable)
    for variable, entries in chosen:
        variables.replace_metadata(variable, entries)


@overload
def pop(node: Any, filter: Filter, /) -> states.State[Any, Any]: ...
@overload
def pop(node: Any, *filter_list: Filter) -> tuple[states.State[Any, Any], ...]: ...
def pop(node: Any, *filter_list: Filter) -> Any:
    """Removes matching leaves from an object, in place, and returns them.

    Args:
        node: The object.
        *filter_list: One or more filters; each leaf goes to the first that matches it,
            and leaves that match none stay in the object.

    Returns:
        A State; with several filters, a tuple of States.

    Raises:
        ValueError: If no filter is given, or a matching leaf is an item of a list or
            tuple; then nothing is removed.
        TraceContextError: If another trace owns the object.

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> model.loss = nnx.Intermediate(jnp.array(1.0))
        >>> nnx.pop(model, nnx.Intermediate)["loss"][...]
        Array(1., dtype=float32, weak_type=True)
        >>> hasattr(model, "loss")
        False
    """
    if not filter_list:
        raise ValueError(
            "Expected at least one filter, got none: nnx.pop(node, filter)."
        )
    predicates = [filters.to_predicate(f) for f in filter_list]
    if isinstance(nodes.kind_of(node), Leaf):
        raise UnsupportedTypeError(node)
    groups: list[tuple[Any, list[tuple[Path, Any]]]] = [(p, []) for p in predicates]
    steps: list[Step] = []
    for path, leaf, above in _leaves_of(node):
        for predicate, group in groups:
            if predicate(path, leaf):
                group.append((path, leaf))
                steps.append(_prepare_removal(path, *above))
                break
    for step in steps:
        step()
    popped = [states.from_flat_state(group) for _, group in groups]
    return tuple(popped) if len(popped) > 1 else popped[0]


def _leaves_of(root: Any) -> Iterator[tuple[Path, Any, tuple[Any, Pytree | None]]]:
    """Yields the leaves of an object, each with its node and the Pytree around that."""
    is_new, above = walks.Once(), walks.Above()
    holders: dict[Path, tuple[Any, Pytree | None]] = {(): (None, None)}

    def children_of(x: Any, path: Path) -> Sequence[tuple[Any, Any]] | None:
        kind = nodes.kind_of(x)
        if nodes.is_graph_node(x) and not is_new(x):
            return None
        if isinstance(kind, Leaf):
            return None if kind is Leaf.STATIC else ()
        if isinstance(kind, TreeKind):
            nodes.check_above(above, x, path)
        holders[path] = x, x if kind is nodes.PYTREE else holders[path[:-1]][1]
        return nodes.items(x, kind, only_data=True)

    for path, x in walks.walk(root, children_of):
        if nodes.is_node_leaf(x):
            yield path, x, holders[path[:-1]]


def _prepare_removal(path: Path, node: Any, owner: Pytree | None) -> Step:
    """Prepares the step that takes a leaf out of its node, if that is allowed."""
    key = path[-1]
    kind: Any = nodes.kind_of(node)
    if kind.pop_key is None or (kind is nodes.PYTREE and not isinstance(key, str)):
        raise ValueError(
            f"Cannot pop key {key!r} of a {type(node).__name__} (path "
            f"{paths.to_string(path)!r}): removing an item would move the others."
        )
    check_owned(owner, key)
    return functools.partial(kind.pop_key, node, key)
