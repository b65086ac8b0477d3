"""Finds the path to an object from the running functions, for error messages."""

from __future__ import annotations

import sys
from typing import Any

# Frames of these packages hold the object under names that say nothing.
_INTERNAL = ("graftree.core", "graftree.transforms", "jax.", "jax._src")
_MOST = 10_000


def find(wanted: Any) -> str:
    """The longest path to an object from a local name of a running function.

    Returns:
        For example ``model.layers[0].weight``; empty if it isn't found.
    """
    best: tuple[int, str] = (0, "")
    frame = sys._getframe(1)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(_INTERNAL):
            for name, value in [*frame.f_locals.items()]:
                best = max(best, _path_in(value, name, wanted), key=lambda x: x[0])
        frame = frame.f_back
    return best[1]


def _path_in(root: Any, name: str, wanted: Any) -> tuple[int, str]:
    """The depth and the path of an object below a root; depth 0 if it isn't there."""
    if root is wanted:
        return 1, name
    seen, pending = {id(root)}, [(root, name, 1)]
    while pending and len(seen) < _MOST:
        node, path, depth = pending.pop()
        for step, child in _children(node):
            if child is wanted:
                return depth + 1, path + step
            if id(child) not in seen:
                seen.add(id(child))
                pending.append((child, path + step, depth + 1))
    return 0, ""


def _children(x: Any) -> list[tuple[str, Any]]:
    if isinstance(x, (list, tuple)):
        return [(f"[{i}]", child) for i, child in enumerate(x)]
    if isinstance(x, dict):
        return [(f"[{key!r}]", child) for key, child in x.items()]
    attributes = {} if hasattr(x, "get_raw_value") else getattr(x, "__dict__", {})
    if "_pytree__nodes" not in attributes:
        return []
    # The items of a List are attributes named by their index.
    return [
        (f"[{name}]" if str(name).isdecimal() else f".{name}", child)
        for name, child in attributes.items()
        if not str(name).startswith("_pytree")
    ]
