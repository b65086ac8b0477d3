"""Changing an object by a state: `update` writes one into it, `pop` takes one out.

Both work in two steps. First the whole change is planned, and everything that can be
wrong with it is found; then it is carried out. So a failed call changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from graftree import _jax
from graftree.core import (
    flat_states,
    flattening,
    graph_states,
    nodes,
    ownership,
    paths,
    pure_dicts,
    pytrees,
    states,
    values,
    variables,
)
from graftree.core.nodes import GraphKind, Leaf
from graftree.core.pytrees import Pytree
from graftree.core.variables import Variable

Step = Callable[[], None]


def update(node: Any, state_list: Sequence[Any]) -> None:
    """Carries out `functional.update`."""
    steps: list[Step] = []
    if isinstance(node, Variable):
        _plan_variable(node, _single(state_list), "", steps)
    else:
        if isinstance(nodes.kind_of(node), Leaf):
            raise UnsupportedTypeError(node)
        merged = states.merge_state(*[_as_mapping(given) for given in state_list])
        _plan_node(node, None, merged.raw_mapping, (), steps)
    for step in steps:
        step()


class UnsupportedTypeError(RuntimeError, TypeError):
    """The object to change is no node. A RuntimeError for existing programs."""

    def __init__(self, node: Any) -> None:
        super().__init__(
            f"Unsupported type: {type(node).__name__} is no object whose state can be "
            "changed. Pass a Module, a Variable or a container of them."
        )


def _single(state_list: Sequence[Any]) -> Any:
    given = [s for s in state_list if not _is_empty(s)]
    if len(given) != 1 and len(state_list) != 1:
        raise ValueError(
            f"Expected exactly one non-empty state for a Variable, got {len(given)}."
        )
    return given[0] if given else state_list[0]


def _is_mapping(x: Any) -> bool:
    return isinstance(x, (Mapping, flat_states.FlatState))


def _is_empty(state: Any) -> bool:
    return _is_mapping(state) and not len(state)


def _as_mapping(given: Any) -> Any:
    """The nested mapping that a state of any accepted form stands for."""
    if isinstance(given, flat_states.FlatState):
        return given.to_nested_state()
    if isinstance(given, graph_states.GraphState):
        return graph_states.state_of(given)
    if isinstance(given, Mapping):
        return given
    if given is None or isinstance(nodes.kind_of(given), Leaf):
        raise TypeError(
            "nnx.update expects a State, a mapping or an object with the structure of "
            f"the node as the state, got {type(given).__name__}."
        )
    # An object of the same structure, e.g. gradients in the form of a Module.
    skeleton, leaves = flattening.flatten_graph(given)
    return states.from_flat_state(zip(skeleton.paths(), leaves, strict=True))


def _plan_node(
    node: Any,
    owner: Pytree | None,
    state: Mapping[Any, Any],
    path: tuple[Any, ...],
    steps: list[Step],
) -> None:
    owner = node if isinstance(node, Pytree) else owner
    children = {child.key: child for child in nodes.children(node)}
    for given_key, value in state.items():
        key = _own_key(given_key, children)
        where = (*path, key)
        if key not in children:
            _plan_new(node, owner, key, value, where, steps)
            continue
        child = children[key].value
        kind = nodes.kind_of(child)
        if children[key].is_data is False:
            _plan_set(node, owner, key, value, where, steps)
        elif kind is Leaf.VARIABLE:
            if not _is_empty(value):
                _plan_variable(child, value, paths.to_string(where), steps)
        elif kind is Leaf.REF:
            new = flattening.raw_of(value)
            values.check_fits(child, new, paths.to_string(where))
            steps.append(_writing_ref(child, new))
        elif isinstance(kind, Leaf):
            _plan_set(node, owner, key, value, where, steps)
        elif not isinstance(nodes.kind_of(value), Leaf):
            _plan_node(child, owner, _as_mapping(value), where, steps)
        elif isinstance(kind, GraphKind) or nodes.is_node_leaf(value):
            raise ValueError(
                f"Expected a subgraph for {key!r}, got a {type(value).__name__} at "
                f"path {paths.to_string(where)!r}."
            )
        else:
            _plan_set(node, owner, key, value, where, steps)


def _own_key(key: Any, children: Mapping[Any, Any]) -> Any:
    """The key of the node; integers may be given as strings."""
    if key not in children and isinstance(key, str):
        try:
            return int(key) if int(key) in children else key
        except ValueError:
            return key
    return key


def _plan_variable(
    variable: Variable[Any], value: Any, path: str, steps: list[Step]
) -> None:
    if isinstance(value, states.State) and not len(value):
        return
    if isinstance(value, states.State):
        value = pure_dicts.to_pure_dict(value)
    variables.check_write(variable, flattening.raw_of(value), path)
    steps.append(lambda: flattening.write_leaf(variable, value))


def _writing_ref(ref: Any, value: Any) -> Step:
    def write() -> None:
        ref[...] = value[...] if _jax.is_ref(value) else value

    return write


def _plan_new(
    node: Any,
    owner: Pytree | None,
    key: Any,
    value: Any,
    path: tuple[Any, ...],
    steps: list[Step],
) -> None:
    if isinstance(node, list):
        raise IndexError(
            f"list index {key!r} is out of range at {paths.to_string(path)!r}: the "
            f"list has {len(node)} items."
        )
    if isinstance(value, Variable):
        value = value.copy()
    elif isinstance(value, (states.State, graph_states.GraphState)):
        value = jax.tree.map(
            lambda x: x.copy() if isinstance(x, Variable) else x,
            value,
            is_leaf=lambda x: isinstance(x, Variable),
        )
    _plan_set(node, owner, key, value, path, steps)


def _plan_set(
    node: Any,
    owner: Pytree | None,
    key: Any,
    value: Any,
    path: tuple[Any, ...],
    steps: list[Step],
) -> None:
    kind: Any = nodes.kind_of(node)
    if kind.set_key is None:
        raise ValueError(
            f"Cannot set key {key!r} of a {type(node).__name__} (path "
            f"{paths.to_string(path)!r}): its items can't be replaced."
        )
    _check_owned(owner, key)
    if isinstance(node, Pytree):
        pytrees.check_assignment(node, type(node).attribute_name(key), value)
    steps.append(lambda: kind.set_key(node, key, value))


def _check_owned(owner: Pytree | None, key: Any) -> None:
    """Checks the node that is changed, or that holds the container that is."""
    if owner is not None and not pytrees.state_of(owner).is_owned():
        raise ownership.object_error(owner, str(key))


# pop


def pop(node: Any, predicates: Sequence[Any]) -> list[list[tuple[Any, Any]]]:
    """Removes the matching leaves; the (path, leaf) pairs of each predicate."""
    if isinstance(nodes.kind_of(node), Leaf):
        raise UnsupportedTypeError(node)
    popped: list[list[tuple[Any, Any]]] = [[] for _ in predicates]
    steps: list[Step] = []
    _plan_pop(node, None, (), set(), predicates, popped, steps)
    for step in steps:
        step()
    return popped


def _plan_pop(
    node: Any,
    owner: Pytree | None,
    path: tuple[Any, ...],
    seen: set[int],
    predicates: Sequence[Any],
    popped: list[list[tuple[Any, Any]]],
    steps: list[Step],
) -> None:
    kind: Any = nodes.kind_of(node)
    if isinstance(kind, GraphKind):
        if id(node) in seen:
            return
        seen.add(id(node))
    owner = node if isinstance(node, Pytree) else owner
    for key, child, is_data in nodes.children(node):
        where = (*path, key)
        if is_data is False:
            continue
        if not isinstance(nodes.kind_of(child), Leaf):
            _plan_pop(child, owner, where, seen, predicates, popped, steps)
            continue
        if not nodes.is_node_leaf(child):
            continue
        if nodes.is_graph_node(child):
            if id(child) in seen:
                continue
            seen.add(id(child))
        for group, predicate in zip(popped, predicates, strict=True):
            if predicate(where, child):
                _check_can_pop(node, kind, key, where)
                _check_owned(owner, key)
                group.append((where, child))
                steps.append(_popping(kind, node, key))
                break


def _popping(kind: Any, node: Any, key: Any) -> Step:
    return lambda: kind.pop_key(node, key)


def _check_can_pop(node: Any, kind: Any, key: Any, path: tuple[Any, ...]) -> None:
    if kind.pop_key is None or (isinstance(node, Pytree) and not isinstance(key, str)):
        raise ValueError(
            f"Cannot pop key {key!r} of a {type(node).__name__} (path "
            f"{paths.to_string(path)!r}): removing an item would move the others."
        )
