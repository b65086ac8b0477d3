"""Trees have no shared references and no cycles: the checks, and their reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax

from graftree import _jax
from graftree.annotations import Path
from graftree.core import paths, walks
from graftree.core.objects.attributes import DataObject
from graftree.core.objects.pytrees import Pytree
from graftree.core.variables.variables import Variable


def is_variable_or_ref(x: Any) -> bool:
    """Whether ``x`` is what must not occur twice in a tree."""
    # JAX asks it of all that is in a tree. Tracers of arrays and of refs may share a
    # type.
    known = _known.get(type(x))
    if known is None:
        kind = type(x)
        if issubclass(kind, _jax.Tracer):
            return _jax.is_ref(x)
        known = _known[kind] = issubclass(kind, (Variable, _jax.Ref))
    return known


_known: dict[type, bool] = {}


def flatten(
    node: Any, is_end: Callable[[Any], bool] | None = None
) -> tuple[list[Any], Any]:
    """JAX's flatten, with Variables, refs and perhaps other ends as leaves."""
    walk = _Walk(node, is_end)
    leaves, treedef = jax.tree.flatten(node, is_leaf=walk.stops_at)
    if walk.cycle is not None:
        raise walk.cycle
    return leaves, treedef


def flatten_with_paths(node: Any, function: str) -> tuple[list[tuple[Any, Any]], Any]:
    """`flatten` with the paths of the leaves."""
    walk = _Walk(node, None)
    flat, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=walk.stops_at)
    if walk.cycle is not None:
        raise walk.cycle
    for path, leaf in flat:
        if isinstance(leaf, Pytree):
            raise not_a_pytree_error(leaf, paths.keystr(path), function)
    return flat, treedef


# Not Pytree itself: its metaclass would be asked, at ten times the cost.
_CONTAINERS = (DataObject, list, dict)

_UNWATCHED = 200


class _Walk:
    """Stops JAX's flatten at its ends, and at cycles.

    JAX overflows the stack in a cycle, and loses a little of the stack with every
    exception that passes through it. So the cycle is kept here and raised afterwards.
    A node that is met twice is rare; only then the object is searched. To note each
    takes time, so it begins where a tree is larger than most: JAX is then not deep yet.
    """

    def __init__(self, root: Any, is_end: Callable[[Any], bool] | None) -> None:
        self.root = root
        self.is_end = is_end
        self.first = iter(range(_UNWATCHED))
        self.met: set[int] = set()
        self.is_searched = False
        self.cycle: ValueError | None = None

    def stops_at(self, x: Any) -> bool:
        known = _known.get(type(x))
        if is_variable_or_ref(x) if known is None else known:
            return True
        if self.is_end is not None and self.is_end(x):
            return True
        if next(self.first, None) is not None:
            return False
        if isinstance(x, _CONTAINERS):
            if id(x) in self.met and not self.is_searched:
                self.is_searched = True
                self.cycle = find_cycle(self.root)
            self.met.add(id(x))
        return self.cycle is not None


class NotAPytreeError(TypeError, ValueError):
    """An object in a tree that is not a pytree; in JAX this is a ``TypeError``."""


def not_a_pytree_error(obj: Any, path: str, function: str) -> NotAPytreeError:
    """The error for an object of a class declared with ``pytree=False``."""
    place = f" Found at path: {path}." if path else ""
    return NotAPytreeError(
        f"nnx.{function} got a {type(obj).__name__}, which has pytree=False.{place}\n"
        f"So it is not a valid JAX type: pass graph=True to nnx.{function}, or declare "
        "the class without pytree=False."
    )


def find_duplicate(flat: Iterable[tuple[Any, Any]]) -> tuple[Any, Any, Any] | None:
    """The first Variable or ref that occurs twice."""
    seen: dict[int, Any] = {}
    for path, leaf in flat:
        if is_variable_or_ref(leaf):
            if id(leaf) in seen:
                return leaf, seen[id(leaf)], path
            seen[id(leaf)] = path
    return None


def duplicate_report(obj: Any, first: str, second: str) -> str:
    """The lines that say what occurs where."""
    return f"Duplicate {obj!r}\nfound at paths:\n\n  - {first}\n  - {second}\n"


def check_tree(flat: Iterable[tuple[Any, Any]], function: str) -> None:
    """Refuses a Variable or ref that occurs twice."""
    found = find_duplicate(flat)
    if found is not None:
        obj, first, second = found
        raise ValueError(
            duplicate_report(obj, _text(first), _text(second))
            + f"\nnnx.{function} with graph=False does not support shared references.\n"
            "Remove the duplicates (nnx.clone makes copies),\n" + _ways_out(function)
        )


_in_compat: set[str] = set()


def register_compat(names: Iterable[str]) -> None:
    """Says which functions and transforms `nnx.compat` has too, as a way out."""
    _in_compat.update(names)


def is_in_compat(function: str) -> bool:
    """Whether `nnx.compat` is a way out for a function or transform."""
    return function in _in_compat


def _ways_out(function: str) -> str:
    if not is_in_compat(function):
        return "or use graph mode: graph=True, or nnx.set_graph_mode(True)."
    return (
        f"or keep them shared with nnx.{function}(..., graph=True),\n"
        f"or use nnx.compat.{function}."
    )


def _text(path: Any) -> str:
    return path if isinstance(path, str) else paths.keystr(path)


def find_cycle(node: Any) -> ValueError | None:
    """The error for a node of a tree that contains itself, if there is one."""
    above = walks.Above()

    def below(x: Any, _: Any) -> list[tuple[Any, Any]]:
        is_node = _jax.is_pytree_type(type(x)) and not isinstance(x, Variable)
        return _jax.flatten_one_level(x)[0] if is_node else []

    for path, x in walks.walk(node, below):
        first = above(x, path)
        if first is not None:
            return cycle_error(x, *map(paths.keystr, (first, path)))
    return None


def check_above(above: walks.Above, x: Any, path: Path) -> None:
    """Refuses a container that contains itself, on a walk that enters it."""
    first = above(x, path)
    if first is not None:
        raise cycle_error(x, *map(paths.to_string, (first, path)))


def cycle_error(x: Any, first: str, second: str) -> ValueError:
    """The error for a node that occurs below itself, at the second path."""
    way_out = (
        "Trees can't have cycles; use graph=True."
        if isinstance(x, Pytree)
        else "Containers can't have cycles; hold an nnx.List or nnx.Dict instead."
    )
    return ValueError(
        f"Cycle detected: a {type(x).__name__} contains itself, found at paths:\n\n"
        f"  - {first or '<root>'}\n  - {second}\n\n{way_out}"
    )
