"""A state beside its target, key by key: which value belongs where.

`paired` walks a state together with what it is for: an object, the tree of a GraphDef,
another state. It enters what is a node in both; all else is a pair of what the target
has and the value. It knows how checkpoints change states:

    target                    state
    layers/0/kernel           layers/'0'/kernel          integer keys as strings
    kernel                    kernel/value               a level below each Variable
    nothing                   layers/_pytree__state      ``None``, which is not a leaf

`out_of_box` takes that level off a value, where one knows what the target holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from graftree.annotations import Key, Path
from graftree.core.variables import values
from graftree.core.variables.variables import MISSING

Position = tuple[Any, Any, Any]
"""Of a node of the target: its key in the node above, itself, the position of that."""

Level = tuple[Mapping[Any, Any], Mapping[Any, Any]]
"""The children of a node, by key, and the part of a state for it."""

Enter = Callable[[Any, Any, Any, Any], Level | None]
"""What is below a node, a key, its child and its value in the state, if anything."""

Pair = tuple[Position, Any, Any, Any]
"""The position of a node, a key in it, the child there or `MISSING`, and the value."""


def paired(
    target: Any, level: Level, enter: Enter, is_leaf: Mapping[type, bool]
) -> list[Pair]:
    """Lists which value of a state belongs where, in the order of the state.

    Args:
        target: What the state is for.
        level: What is in both.
        enter: Gives what is below both.
        is_leaf: Whether values of a type are never entered. It is looked up in C: for
            a leaf nothing else is called.
    """
    pairs: list[Pair] = []
    # No recursion, whose depth Python limits.
    pending: list[tuple[Position, Level]] = [((None, target, None), level)]
    while pending:
        position, (children, mapping) = pending.pop()
        entered: list[tuple[Position, Level]] = []
        for key, value in mapping.items():
            child = children.get(key, MISSING)
            if child is MISSING:
                key = present_key(key, children)
                child = children.get(key, MISSING)
            if is_leaf[type(value)]:
                pairs.append((position, key, child, value))
            elif value is not None or not is_bookkeeping(key, value):
                child_level = enter(position[1], key, child, value)
                if child_level is None:
                    pairs.append((position, key, child, value))
                else:
                    entered.append(((key, child, position), child_level))
        if entered:
            pending += entered[::-1]
    return pairs


def path_of(position: Position, *keys: Any) -> Path:
    """Returns the path of a node of the target, with keys below it."""
    key, _, above = position
    while above is not None:
        keys = (key, *keys)
        key, _, above = above
    return keys


def is_bookkeeping(key: Key, value: Any) -> bool:
    """Whether an entry says only that a Module was saved itself, not its state."""
    return value is None and isinstance(key, str) and key.startswith("_pytree__")


def present_key(key: Key, children: Mapping[Any, Any]) -> Key:
    """Returns a mapping's key for this one, which may be spelled otherwise."""
    if key in children:
        return key
    for other in (restored_key(key), str(key)):
        if other in children:
            return other
    others = (child_key for child_key in children if type(child_key) not in (str, int))
    return next((child_key for child_key in others if str(child_key) == key), key)


def restored_key(key: Key) -> Key:
    """Converts a key to an integer, if it is one that is written as a string."""
    if not isinstance(key, str):
        return key
    try:
        return int(key)
    except ValueError:
        return key


def unboxed(value: Any) -> Any:
    """Returns the array in ``{"value": array}``; anything else is returned itself.

    In this form a checkpoint holds Variables if it is restored without types.
    """
    if isinstance(value, Mapping) and len(value) == 1:
        inner = value.get("value")
        if isinstance(inner, (jax.Array, np.ndarray)) or values.is_stand_in(inner):
            return inner
    return value


def out_of_box(value: Mapping[Any, Any], current: Any) -> Any:
    """Takes a value out of a checkpoint's box; a mapping that is the value stays.

    Args:
        value: What a state has for a leaf.
        current: The raw value that the leaf has now.
    """
    if len(value) != 1 or "value" not in value:
        return value
    inner = value["value"]
    if current is None:
        return inner if inner is None else unboxed(value)
    if isinstance(current, Mapping) and (
        "value" in current or not isinstance(inner, Mapping)
    ):
        return value
    return inner
