"""Warnings about changes that don't reach the caller, where nothing else tells."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from graftree import errors
from graftree.core.graph import differences, flattening, nodes
from graftree.core.graph.flattening import IndexMap
from graftree.transforms.crossing import packing
from graftree.transforms.crossing.signatures import Signature


def pytrees_in(tree: Any) -> list[Any]:
    """The distinct objects with a structure of their own in a tree of arguments.

    Containers around them don't count: what is put into these is never seen outside.
    """
    leaves = jax.tree.leaves(tree, is_leaf=nodes.is_graph_node)
    found = {id(x): x for x in leaves if nodes.is_node_module(x)}
    return [*found.values()]


def warn(
    transform: str, signature: Signature, leaves: Sequence[Any], objects: Iterable[Any]
) -> None:
    """Warns about objects whose structure is not what it was."""
    before, _ = packing.unpack(signature, leaves, IndexMap())
    for old, new in zip(pytrees_in(before), objects, strict=True):
        found = differences.between(
            *(differences.facts(*flattening.flatten_graph(x)) for x in (old, new))
        )
        if found:
            listed = "\n  ".join(differences.in_words(found, "before", "now"))
            warnings.warn(
                f"nnx.{transform} without graph updates drops a change of a "
                f"{type(new).__name__}. Only the values of Variables reach the caller."
                f"\n  {listed}\nPass graph=True, graph_updates=True, or keep what "
                "changes in a Variable.",
                errors.LostUpdateWarning,
                stacklevel=2,
            )


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
