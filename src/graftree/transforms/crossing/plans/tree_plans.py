"""Planned calls in tree mode, with objects that never came before.

In tree mode an object is to JAX what it holds: its Variables and arrays are leaves, the
rest is in the treedef. So a call with objects that are all new is known by the treedefs
of its arguments and by what the Variables are like. The plan of such a call knows no
objects; each call flattens its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graftree.core.graph import nodes, tree_checks
from graftree.core.graph.nodes import Leaf
from graftree.core.objects import classes
from graftree.transforms.crossing.packing import Packed
from graftree.transforms.crossing.plans.loose_variables import LooseVariables
from graftree.transforms.crossing.plans.planned_calls import (
    GIVEN,
    NO_PLAN,
    Arguments,
    Plan,
)
from graftree.transforms.crossing.rows import Row

# How many structures a function remembers.
LIMIT = 64

_BOX = Leaf.VARIABLE
_LEAVES = (_BOX, Leaf.ARRAY, Leaf.STATIC)
# A treedef can be compared with anything but None.
_NO_TREEDEF = ()


class TreePlans:
    """The plans of one compiled function for objects by their structure.

    Args:
        row: Its transform.

    Attributes:
        known: The plans.
    """

    def __init__(self, row: Row) -> None:
        self._row = row
        # Reading, adding and removing an entry are atomic, so threads need no lock.
        self.known: dict[Any, Plan] = {}
        self._latest: tuple[Any, Plan | None] = (None, None)

    def call(self, jitted: Callable[..., Any], arguments: Arguments) -> Any:
        """What a call gives if there is a plan for it, else `NO_PLAN`."""
        flat = _flatten(arguments)
        if flat is None:
            return NO_PLAN
        key, leaves = flat
        latest, plan = self._latest
        # Equality of the treedefs costs less than their hash.
        if plan is None or key != latest:
            plan = self._find(key)
            if plan is None:
                return NO_PLAN
            self._latest = key, plan
        if [*map(type, leaves)] != plan.types:
            return NO_PLAN
        return plan.call(jitted, leaves)

    def learn(self, arguments: Arguments, packed: Packed) -> None:
        """Makes a plan of what a call found out."""
        flat = _flatten(arguments)
        if flat is None:
            return
        key, leaves = flat
        boxes = [x for x in leaves if nodes.kind_of(x) is _BOX]
        loose = LooseVariables(boxes, (), bool(self._row.inputs.donated))
        if not (loose.may_be_planned and _are_leaves_of(packed, leaves)):
            return
        given = [
            n for n, x in enumerate(leaves) if nodes.kind_of(x) is not Leaf.VARIABLE
        ]
        sources = dict.fromkeys(given, GIVEN)
        plan = Plan(self._row, leaves, packed, _Classes(), loose, sources)
        for oldest in [*self.known][: 1 - LIMIT]:
            self.known.pop(oldest, None)
        try:
            self.known[key] = plan
        except TypeError:
            return  # a static value without a hash
        self._latest = key, plan

    def _find(self, key: Any) -> Plan | None:
        try:
            return self.known.get(key)
        except TypeError:
            return None  # a static value without a hash


def _flatten(arguments: Arguments) -> tuple[Any, list[Any]] | None:
    """The treedefs of a call and its leaves; ``None`` if an object contains itself."""
    key, leaves = [_NO_TREEDEF if x is None else x for x in arguments.key[:2]], []
    for x in arguments.leaves:
        if nodes.kind_of(x) is nodes.PYTREE:
            try:
                found, treedef = tree_checks.flatten(x)
            except ValueError:
                return None
            leaves += found
            key.append(treedef)
        else:
            leaves.append(x)
            key.append(_NO_TREEDEF)
    return tuple(key), leaves


def _are_leaves_of(packed: Packed, leaves: list[Any]) -> bool:
    """Whether these are what the call took its arguments apart into, and can plan."""
    return (
        len(leaves) == len(packed.leaves)
        and all(x is y for x, y in zip(leaves, packed.leaves, strict=True))
        and all(nodes.kind_of(x) in _LEAVES for x in leaves)
    )


class _Classes:
    """Whether the classes of objects are as they were."""

    def __init__(self) -> None:
        self._stamp = classes.changes.stamp

    def holds(self) -> bool:
        """Whether none has changed in a way that objects depend on."""
        return classes.changes.stamp == self._stamp
