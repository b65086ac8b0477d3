"""Finds the path to an object from the running functions, for error messages."""

from __future__ import annotations

from types import FrameType
from typing import Any

from graftree import _python
from graftree.annotations import Path
from graftree.core import paths, walks

# Frames of these packages hold the object under names that say nothing.
_INTERNAL = ("graftree.core", "graftree.transforms", "jax.", "jax._src")
_MOST = 10_000


def find(wanted: Any) -> str:
    """The longest path to an object from a local name of a running function.

    Returns:
        For example ``model.layers[0].weight``; empty if it isn't found.
    """
    best: tuple[int, str] = (0, "")
    frames = _running(_python.frame_above(1))
    # What runs a program (runpy, a notebook) holds its names in a dict of its own, and
    # `run_globals['model']` is no name of the program's.
    namespaces = {id(frame.f_globals) for frame in frames}
    for frame in frames:
        if not frame.f_globals.get("__name__", "").startswith(_INTERNAL):
            for name, value in [*_python.locals_of(frame).items()]:
                found = _path_in(value, name, wanted, namespaces)
                best = max(best, found, key=lambda x: x[0])
    return best[1]


def _running(frame: FrameType | None) -> list[FrameType]:
    """A frame and those that called it, innermost first."""
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _path_in(
    root: Any, name: str, wanted: Any, namespaces: set[int]
) -> tuple[int, str]:
    """The depth and the path of an object below a root; depth 0 if it isn't there."""
    seen = set(namespaces)

    def below(x: Any, _: Path) -> list[tuple[str, Any]] | None:
        if x is not wanted and (id(x) in seen or len(seen) > _MOST):
            return None
        seen.add(id(x))
        return _children(x)

    for steps, x in walks.walk(root, below, (name,)):
        if x is wanted:
            return len(steps), "".join(map(str, steps))
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
        (paths.key_text(int(name) if str(name).isdecimal() else name), child)
        for name, child in attributes.items()
        if not str(name).startswith("_pytree")
    ]
