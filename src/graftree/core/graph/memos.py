"""Taking an unchanged object apart again costs next to nothing.

The second time that an object is flattened in a mode, the result is kept with it: its
skeleton and the places of its leaves, together with a `Survey` that tells whether they
are still right. So objects that are taken apart once, as inside a trace, pay nothing.
"""

from __future__ import annotations

from typing import Any

from graftree import config
from graftree.core import stamps
from graftree.core.graph import flattening, nodes, surveys
from graftree.core.graph.flattening import RefMap
from graftree.core.graph.graphdefs import GraphDef
from graftree.core.graph.surveys import Survey
from graftree.core.objects import bookkeeping
from graftree.core.variables.variables import Variable


class Memo:
    """The skeleton of an object, and where its leaves are."""

    __slots__ = ("_arrays", "_leaves", "_survey", "graphdef")

    def __init__(
        self, root: Any, graphdef: GraphDef[Any], leaves: list[Any], survey: Survey
    ) -> None:
        self.graphdef = graphdef
        self._leaves = leaves
        self._survey = survey
        self._arrays = []
        for number, (leaf, path) in enumerate(
            zip(leaves, graphdef.paths(), strict=True)
        ):
            if not isinstance(leaf, Variable):
                place = surveys.attribute_at(root, path)
                if place is not None:
                    self._arrays.append((number, place))
                    leaves[number] = None

    def holds(self) -> bool:
        """Whether it is still right."""
        return self._survey.holds()

    def leaves(self) -> list[Any]:
        """The leaves, in a new list."""
        leaves = self._leaves.copy()
        for number, place in self._arrays:
            leaves[number] = place.read()
        return leaves


def flatten_node(
    node: Any, graph: bool | None, function: str
) -> tuple[GraphDef[Any], list[Any]]:
    """`flattening.flatten_node`, with a memory.

    Args:
        node: Any object, container, Variable or array.
        graph: Whether to keep shared references; ``None`` takes the default.
        function: The public name to give in error messages.

    Returns:
        The skeleton, and the leaves in a new list.

    Raises:
        ValueError: See `flattening.flatten_tree`.
    """
    sharing = config.graph_mode(graph)
    if nodes.kind_of(node) is not nodes.PYTREE:
        return flattening.flatten_node(node, sharing, function)
    memos = bookkeeping.memos_of(node)
    memo = memos.get(sharing, _NEVER)
    if isinstance(memo, Memo) and memo.holds():
        return memo.graphdef, memo.leaves()
    made = stamps.clock.now
    graphdef, leaves = flattening.flatten_node(node, sharing, function)
    # Twice at the same stamp; `None` says that it was taken apart once.
    memos[sharing] = None
    if memo is not _NEVER:
        survey = Survey(_objects_in(node), made)
        if survey.is_complete:
            memos[sharing] = Memo(node, graphdef, list(leaves), survey)
    return graphdef, leaves


_NEVER: Any = object()


def _objects_in(node: Any) -> RefMap:
    refs = RefMap()
    flattening.flatten_graph(node, refs)
    return refs
