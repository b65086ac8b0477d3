"""What survives the way back out of a transform: two booleans."""

from __future__ import annotations

import dataclasses

from graftree import config


@dataclasses.dataclass(frozen=True)
class Propagation:
    """What survives the way back out of a transform.

    Attributes:
        sharing: Whether shared references stay shared (graph mode); else objects are
            trees and aliases are errors.
        structure: Whether added, removed and replaced attributes reach the caller's
            objects; else only the values of Variables do.
    """

    sharing: bool
    structure: bool


TREE = Propagation(sharing=False, structure=False)
GRAPH = Propagation(sharing=True, structure=False)
GRAPH_UPDATES = Propagation(sharing=True, structure=True)


def resolve(graph: bool | None, graph_updates: bool | None) -> Propagation:
    """The propagation that the arguments of a transform ask for."""
    if not config.graph_mode(graph):
        return TREE
    return GRAPH_UPDATES if config.graph_updates(graph_updates) else GRAPH
