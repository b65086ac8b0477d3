"""Warnings about changes that don't reach the caller, where nothing else tells."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import jax

from graftree import errors
from graftree.core import flattening, nodes, paths
from graftree.core.skeletons import GraphDef
from graftree.core.variables import Variable

_Form = tuple[GraphDef[Any], list[Any]]


class Watch:
    """The structure of the objects in a tree of arguments, to be compared later.

    Args:
        tree: The arguments. Containers around objects are not watched: what is put
            into them is never seen outside.
    """

    def __init__(self, tree: Any) -> None:
        leaves = jax.tree.leaves(tree, is_leaf=nodes.is_graph_node)
        found = {id(x): x for x in leaves if nodes.is_graph_node(x)}
        self._before: list[tuple[Any, _Form]] = [
            (x, flattening.flatten_graph(x))
            for x in found.values()
            if not isinstance(x, Variable)
        ]

    def warn(self, transform: str) -> None:
        """Warns if the structure of an object is not what it was."""
        for obj, before in self._before:
            change = _first_change(before, flattening.flatten_graph(obj))
            if change is not None:
                warnings.warn(
                    f"nnx.{transform} without graph updates drops a change of a "
                    f"{type(obj).__name__}: {change}. Only the values of Variables "
                    "reach the caller.\nPass graph=True, graph_updates=True, or keep "
                    "what changes in a Variable.",
                    errors.LostUpdateWarning,
                    stacklevel=2,
                )


def _first_change(before: _Form, after: _Form) -> str | None:
    (old, old_leaves), (new, new_leaves) = before, after
    old_named = dict(zip(old.paths(), old_leaves, strict=True))
    new_named = dict(zip(new.paths(), new_leaves, strict=True))
    for path in {**old_named, **new_named}:
        if old_named.get(path) is not new_named.get(path):
            return f"{paths.to_string(path)!r} was set or deleted"
    if old.attributes != new.attributes:
        static = [
            key
            for key, value in new.attributes
            if (key, value) not in old.attributes and not isinstance(key, int)
        ]
        return f"static attributes changed ({', '.join(map(str, static)) or 'deleted'})"
    return None


def warn_about_broadcasts(names: Iterable[str]) -> None:
    """Warns about writes to Variables that are the same for all steps of a scan."""
    listed = ", ".join(names)
    if listed:
        warnings.warn(
            f"nnx.scan with graph updates drops writes to broadcast Variables: "
            f"{listed}.\nCarry them, give them an axis, or assign None by an "
            "nnx.StateAxes to say that this is meant.",
            errors.LostUpdateWarning,
            stacklevel=2,
        )
