"""Keeps the GraphDef of an object until its structure changes: a cache.

The second time that an object is flattened in a mode, the result is kept with it: its
skeleton and where its leaves are, with a `ValidityCheck` that checks whether they are
still right. So objects that are flattened once pay nothing, and in a trace, whose
objects don't last, nothing is kept. Objects in a container, as in
``split((model, optimizer))``, have one result, found by all of them. If the static
attributes of an object alternate, as by ``train()`` and ``eval()``, several of its
results are kept.

There are two ways in: `flatten`, for `split`, `state`, `graphdef` and `clone`; and
`flatten_at_once`, for `jax.jit` over objects, which `pytrees.py` asks, and which gives
``None`` where nothing is kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from graftree import _jax, config
from graftree.core import hooks, ownership
from graftree.core.graph import flattening, graphdefs, nodes, validity_checks
from graftree.core.graph.flattening import IndexMap, RefMap
from graftree.core.graph.graphdefs import GraphDef
from graftree.core.graph.validity_checks import ValidityCheck
from graftree.core.objects import bookkeeping
from graftree.core.variables import variables
from graftree.core.variables.variables import Variable


def flatten(
    node: Any, graph: bool | None, function: str
) -> tuple[GraphDef[Any], list[Any]]:
    """Returns the skeleton of an object or container, and its leaves; if kept, those.

    Does as `flattening.flatten`. The second call for an object keeps the skeleton.
    """
    sharing = config.graph_mode(graph)
    if not config.caches.are_used or ownership.current() is not ownership.no_trace:
        return flattening.flatten(node, sharing, function)
    results, contents = _results_of(node)
    entries = results.get(sharing)
    if entries is None:
        results[sharing] = ()
        return flattening.flatten(node, sharing, function)
    for entry in entries:
        validity = entry.validity
        # Usually nothing at all has changed: then no function need be called.
        is_same = (
            ownership.versions.latest == validity.checked and not validity.has_contents
        )
        if is_same or validity.holds():
            return entry.graphdef, entry.leaves()
    version, refs, members = ownership.versions.latest, RefMap(), []
    results[sharing] = ()
    if sharing:
        graphdef, leaves = flattening.flatten_graph(node, refs, members=members)
    else:
        graphdef, leaves = flattening.flatten_tree(node, function)
    if sharing and not contents:
        validity = ValidityCheck(graphdef, members, IndexMap.from_refmap(refs), version)
    else:
        validity = ValidityCheck.over(contents or [node], version)
    if validity.is_complete and not (contents and validity.reaches(contents)):
        entry = KeptGraphDef(node, graphdef, list(leaves), validity)
        results[sharing] = validity_checks.with_newest(entry, entries)
    return graphdef, leaves


def _results_of(node: Any) -> tuple[dict[Any, Any], list[Any]]:
    """Returns an object's results by mode, or a container's, with its objects.

    New ones if there is anything else in it.
    """
    kind = nodes.KINDS.get(type(node)) or nodes.kind_of(node)
    if kind is nodes.PYTREE:
        state = node.__dict__.get(bookkeeping.STATE)
        results = state and state.results
        return bookkeeping.results_of(node) if results is None else results, []
    try:
        objects, treedef = nodes.flatten(node, ends_at_objects=True)
    except (TypeError, ValueError):  # keys that JAX can't sort, for one
        return {}, []
    is_pure = all([nodes.kind_of(x) is nodes.PYTREE for x in objects])
    if not (objects and is_pure):
        return {}, []
    # Each stands for its object as long as that lives, and has a hash of its own.
    key = treedef, *map(bookkeeping.state_of, objects)
    return _combinations.find(key, objects), objects


_combinations = validity_checks.ObjectGroups()
config.caches.add(_combinations)


class KeptGraphDef:
    """Skeleton of an object, and where its leaves are.

    Args:
        root: The object.
        graphdef: Its skeleton.
        leaves: Its leaves; changed here.
        validity: Checks whether the object is as it was.
        number: The number of the skeleton, if it was interned.

    Attributes:
        graphdef: As given, like ``number`` and ``validity``.
    """

    __slots__ = (
        "_are_variables",
        "_arrays",
        "_leaves",
        "graphdef",
        "number",
        "validity",
    )

    def __init__(
        self,
        root: Any,
        graphdef: GraphDef[Any],
        leaves: list[Any],
        validity: ValidityCheck,
        number: int = 0,
    ) -> None:
        self.graphdef, self.number = graphdef, number
        self.validity = validity
        self._leaves = leaves
        self._are_variables = all(map(variables.is_variable, leaves))
        # An array in an attribute may be replaced.
        self._arrays: dict[int, validity_checks.Attribute] = {}
        for position, path in enumerate(graphdef.paths()):
            is_box = isinstance(leaves[position], Variable)
            attribute = None if is_box else validity_checks.attribute_at(root, path)
            if attribute is not None:
                self._arrays[position], leaves[position] = attribute, None

    def leaves(self) -> list[Any]:
        """Returns the leaves in a new list."""
        leaves = self._leaves.copy()
        if self._arrays:
            arrays = validity_checks.read_all(self._arrays.values())
            for position, array in zip(self._arrays, arrays, strict=True):
                leaves[position] = array
        return leaves

    def raw_leaves(self) -> list[Any]:
        """Returns the values of Variables, and the other leaves."""
        if self._are_variables:
            return variables.read_all(self._leaves)
        return [*map(flattening.raw_of, self.leaves())]


# For plain `jax.jit`.

# One more mode of results.
_AT_ONCE: Any = "at once"
# Making one takes as long as several calls. So an object that changes all the time
# gets only a few.
_MOST_AT_ONCE = 16


@hooks.flatten_at_once.fill
def flatten_at_once(obj: Any) -> tuple[list[Any], tuple[int, GraphDef[Any]]] | None:
    """Returns JAX's leaves of an object, and its skeleton, if they are kept.

    Objects with equal skeletons get the same one, with its number in front
    (`graphdefs.Interned`).

    With these `jax.jit` finds its compiled program for such objects. So it need not
    take each object and Variable apart.
    """
    results = bookkeeping.results_of(obj)
    entries, left = results.get(_AT_ONCE, ((), _MOST_AT_ONCE + 1))
    for entry in entries:
        if entry.validity.holds():
            return entry.raw_leaves(), (entry.number, entry.graphdef)
    if _jax.is_tracing():
        return None
    # Nothing is made for an object that comes once.
    entry = _kept_at_once(obj) if 0 < left <= _MOST_AT_ONCE else None
    entries = validity_checks.with_newest(entry, entries) if entry else entries
    results[_AT_ONCE] = (entries, left - 1) if left else ((), 0)
    return entry and (entry.raw_leaves(), (entry.number, entry.graphdef))


def _kept_at_once(obj: Any) -> KeptGraphDef | None:
    counter = ownership.versions.latest
    try:
        graphdef, leaves = flattening.flatten_as_jax(obj)
        validity = ValidityCheck.over([obj], counter)
        number, graphdef = _at_once.intern(graphdef)
        entry = KeptGraphDef(obj, graphdef, leaves, validity, number)
    except Exception:  # JAX may take apart what we can't, or will raise this itself
        return None
    is_cheap = validity.is_complete and validity.has_versions
    return entry if is_cheap and validity.holds() else None


_at_once = graphdefs.Interned()


@hooks.unflatten_at_once.fill
def unflatten_at_once(static: tuple[int, GraphDef[Any]], values: Iterable[Any]) -> Any:
    """Rebuilds the object that `flatten_at_once` took apart."""
    _, graphdef = static
    (spec,) = graphdef.specs
    leaves = [
        flattening.make_variable(field, x)
        if type(field) is graphdefs.VariableDef
        else x
        for field, x in zip(spec.fields, values, strict=True)
    ]
    return jax.tree.unflatten(spec.metadata.treedef, leaves)
