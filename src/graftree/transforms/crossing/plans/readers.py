"""Reads the leaves of trees that have the containers and keys of an earlier one.

`jax.tree.flatten` asks Python what each thing in a tree is. A reader was told by the
earlier tree, and asks only whether the containers are still the same ones.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from graftree.core import paths
from graftree.core.graph import nodes
from graftree.core.graph.nodes import GraphKind, Leaf
from graftree.core.states.states import State

# Lists the members of a container; adds its leaves to a list. Both raise if it is not
# like the earlier one.
_Opener = Callable[[Any], Sequence[Any]]
_Adder = Callable[[Any, list[Any]], None]


class _Unlike(Exception):
    """A tree is not like the one that a reader was made for, or is for no reader."""


def make(
    tree: tuple[Any, ...], leaves: Sequence[Any]
) -> Callable[[Any], list[Any] | None] | None:
    """What reads tuples like this one, which has these leaves in this order.

    It gives the leaves of another one, whatever they are, or ``None`` if its containers
    differ. There is no reader for containers that only JAX can take apart.
    """

    def read(other: Any) -> list[Any] | None:
        found: list[Any] = []
        try:
            add(other, found)
        except _Unlike:
            return None
        return found

    try:
        add = _container(tree, _sequence(tuple, len(tree)))
    except _Unlike:
        return None
    found = read(tree) or []
    is_right = len(found) == len(leaves) and all(map(operator.is_, found, leaves))
    return read if is_right else None


def _adder(x: Any) -> _Adder | None:
    """What reads containers like this one; ``None`` if it is a leaf."""
    kind = type(x)
    if kind is State:
        return _container(x, _state(x))
    if kind is dict:
        return _container(x, _dict(x))
    if kind is list or (isinstance(x, tuple) and nodes.is_node(x)):
        return _container(x, _sequence(kind, len(x)))
    if x is None:
        return _container(x, _nothing)
    if isinstance(nodes.kind_of(x), (Leaf, GraphKind)):
        return None
    raise _Unlike


def _container(x: Any, members_of: _Opener) -> _Adder:
    """What reads containers like this one, whose members these are."""
    adders = [*map(_adder, members_of(x))]

    def extend(x: Any, found: list[Any]) -> None:
        found.extend(members_of(x))

    def add(x: Any, found: list[Any]) -> None:
        for member, add_members in zip(members_of(x), adders, strict=True):
            if add_members is None:
                found.append(member)
            else:
                add_members(member, found)

    return add if any(adders) else extend


# What lists the members of containers like some container.


def _sequence(kind: type, size: int) -> _Opener:
    def members_of(x: Any) -> Sequence[Any]:
        if type(x) is not kind or len(x) != size:
            raise _Unlike
        return x

    return members_of


def _dict(like: dict[Any, Any]) -> _Opener:
    keys, size = paths.sorted_keys(like), len(like)
    pick: Any = operator.itemgetter(*keys) if size > 1 else None

    def members_of(x: Any) -> Sequence[Any]:
        if type(x) is not dict or len(x) != size:
            raise _Unlike
        try:
            return pick(x) if size > 1 else [x[key] for key in keys]
        except KeyError:
            raise _Unlike from None

    return members_of


def _state(like: State) -> _Opener:
    members_of_mapping = _dict(like.raw_mapping)

    def members_of(x: Any) -> Sequence[Any]:
        if type(x) is not State:
            raise _Unlike
        return members_of_mapping(x.raw_mapping)

    return members_of


def _nothing(x: None) -> Sequence[Any]:
    if x is not None:
        raise _Unlike
    return ()
