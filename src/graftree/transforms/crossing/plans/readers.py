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

# Adds the leaves of a container to a list; raises if it is not like the earlier one.
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
        add = _container(tuple, tree, lambda x: x)
    except _Unlike:
        return None
    found = read(tree) or []
    is_right = len(found) == len(leaves) and all(map(operator.is_, found, leaves))
    return read if is_right else None


def _adder(x: Any) -> _Adder | None:
    """What reads containers like this one; ``None`` if it is a leaf."""
    kind = type(x)
    if kind is State:
        return _container(kind, *_members(x.raw_mapping), _raw_of)
    if kind is dict:
        return _container(kind, *_members(x))
    if kind is list or (isinstance(x, tuple) and nodes.is_node(x)):
        return _container(kind, x, lambda x: x)
    if x is None:
        return _container(kind, (), lambda _: ())
    if isinstance(nodes.kind_of(x), (Leaf, GraphKind)):
        return None
    raise _Unlike


_raw_of = operator.attrgetter("raw_mapping")


def _members(mapping: Any) -> tuple[Sequence[Any], Callable[[Any], Sequence[Any]]]:
    """The members of a dict, and what lists those of dicts with the same keys."""
    keys, size = paths.sorted_keys(mapping), len(mapping)
    pick: Any = operator.itemgetter(*keys) if keys else lambda _: ()

    def members_of(other: Any) -> Sequence[Any]:
        if type(other) is not dict or len(other) != size:
            raise _Unlike
        try:
            picked = pick(other)
        except KeyError:
            raise _Unlike from None
        return (picked,) if size == 1 else picked

    return members_of(mapping), members_of


def _container(
    kind: type,
    members: Sequence[Any],
    members_of: Callable[[Any], Sequence[Any]],
    opened: Callable[[Any], Any] | None = None,
) -> _Adder:
    size, adders = len(members), [*map(_adder, members)]
    has_leaves_only = not any(adders)

    def add(x: Any, found: list[Any]) -> None:
        if type(x) is not kind:
            raise _Unlike
        now = members_of(x if opened is None else opened(x))
        if len(now) != size:
            raise _Unlike
        if has_leaves_only:
            found.extend(now)
            return
        for member, add_members in zip(now, adders, strict=True):
            if add_members is None:
                found.append(member)
            else:
                add_members(member, found)

    return add
