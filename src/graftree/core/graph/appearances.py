"""Tells whether an object that was changed is what it was, as after a change back.

A stamp says that an object was changed, not how. ``model.train()`` stamps all dropouts,
also those that are in training already; and after ``eval()`` and ``train()`` they are
what they were before. So what an object was like is remembered: which attributes it
had, and what was in them.

    what is in an attribute        what is compared
    a graph node                   which one it is; it isn't kept alive
    an array                       that it is one: another one is no structure
    a number, a string, None, ...  its value, as two `Static` are compared
    all else                       which object it is

An object whose appearance is the same has the same entry in a skeleton. What can change
in place, containers and some static values, is for `freshness.Survey` to compare.
"""

from __future__ import annotations

import weakref
from typing import Any

from graftree.core.graph import nodes
from graftree.core.graph.graphdefs import Static
from graftree.core.graph.nodes import Leaf
from graftree.core.objects import attributes, bookkeeping, classes


class Appearance:
    """What a Pytree is like now.

    Args:
        obj: The Pytree; neither it nor a Pytree or array in it is kept alive.
    """

    __slots__ = (
        "_dict",
        "_fixed",
        "_flags",
        "_kind",
        "_others",
        "_others_beside",
        "_owner",
        "_state",
        "_table",
        "_tokens",
    )

    def __init__(self, obj: Any) -> None:
        self._owner = weakref.ref(obj)
        self._table = table = bookkeeping.table_of(obj)
        self._state = state = bookkeeping.state_of(obj)
        self._flags = state.initializing, state.is_setup
        self._kind, entries = type(obj), vars(obj)
        self._dict = type(entries)
        self._tokens = tokens = {name: _token(entries.get(name)) for name in table}
        # Most attributes are compared at once.
        others = tuple([name for name, token in tokens.items() if _is_other(token)])
        fixed = tuple([name for name in tokens if name not in others])
        self._others_beside = attributes.values_beside(others, fixed)
        self._fixed = tuple([tokens[name] for name in fixed])
        self._others = tuple([tokens[name] for name in others])

    def is_same(self) -> bool:
        """Whether the object is like that now."""
        entries = self._entries()
        if entries is None:
            return False
        try:
            others = self._others_beside(entries, self._fixed)
        except KeyError:
            return False  # an attribute was put in the place of another one
        if others is not None:
            return all(map(_is_alike, others, self._others))
        return all(
            name in entries and _is_alike(entries[name], token)
            for name, token in self._tokens.items()
        )

    def is_same_but_for_statics(self) -> bool:
        """Whether it would be, if static attributes had the values that they had."""
        # In classes that are no pytrees the values decide what is static.
        if not classes.facts_of(self._kind).is_pytree:
            return self.is_same()
        entries, table = self._entries(), self._table
        return entries is not None and all(
            name in entries and (not table[name] or _is_alike(entries[name], token))
            for name, token in self._tokens.items()
        )

    def _entries(self) -> dict[str, Any] | None:
        """The ``vars`` of the object; ``None`` if it is gone, or has other attributes.

        What has another dict or bookkeeping than before may be changed unseen.
        """
        obj: Any = self._owner()
        if type(obj) is not self._kind:
            return None
        entries, state, table = obj.__dict__, self._state, self._table
        is_same = (
            type(entries) is self._dict
            and entries.get(_NODES) is table
            and entries.get(_STATE) is state
            and len(entries) == table.size + 2
            and (state.initializing, state.is_setup) == self._flags
        )
        return entries if is_same else None


_NODES, _STATE = bookkeeping.NAMES


class Listing:
    """What an object of a registered type is like now: what the type lists of it.

    Such objects have no stamps, so this is compared at each call.

    Args:
        obj: The object; neither it nor a graph node or array in it is kept alive.
    """

    __slots__ = ("_kind", "_metadata", "_names", "_owner", "_tokens")

    def __init__(self, obj: Any) -> None:
        self._owner = weakref.ref(obj)
        self._kind: Any = nodes.kind_of(obj)
        children, self._metadata = self._kind.flatten(obj)
        self._names = [(child.key, child.is_data) for child in children]
        self._tokens = [_token(child.value) for child in children]

    def is_same(self) -> bool:
        """Whether the object is like that now."""
        obj = self._owner()
        if obj is None:
            return False
        children, metadata = self._kind.flatten(obj)
        return (
            [(child.key, child.is_data) for child in children] == self._names
            and all(map(_is_alike, [child.value for child in children], self._tokens))
            and Static(metadata) == Static(self._metadata)
        )


def may_be_weak(node: Any) -> bool:
    """Whether there are weak references to an object: not if it has slots alone."""
    return type(node).__weakrefoffset__ != 0


class _Weak(weakref.ref[Any]):
    """Stands for a graph node. No attribute holds one of these."""

    __slots__ = ()


# Stands for any array.
_ARRAY: Any = object()


def _token(value: Any) -> Any:
    """What is remembered of the value of an attribute."""
    kind = nodes.kind_of(value)
    if isinstance(kind, nodes.GraphKind) and may_be_weak(value):
        return _Weak(value)
    return _ARRAY if kind is Leaf.ARRAY else value


def _is_other(token: Any) -> bool:
    """Whether it stands for something else."""
    return token is _ARRAY or type(token) is _Weak


def _is_alike(now: Any, then: Any) -> bool:
    """Whether a value is what a token was made of."""
    if now is then:
        return True
    if type(then) is _Weak:
        return now is not None and then() is now  # not what is gone
    if then is _ARRAY:
        return nodes.kind_of(now) is Leaf.ARRAY
    # Comparing values of these types runs no code of the user's.
    is_atom = type(now) is type(then) and type(now) in attributes.ATOMS
    return is_atom and Static(now) == Static(then)
