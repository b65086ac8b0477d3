"""Leaves taken out of an object in place: `pop`.

All removals are planned and checked before the first is carried out.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, overload

from graftree.annotations import Filter
from graftree.core import filters, paths
from graftree.core.graph import nodes, updates
from graftree.core.graph.nodes import GraphKind, Leaf
from graftree.core.graph.updates import Step
from graftree.core.objects import bookkeeping, classes
from graftree.core.objects.pytrees import Pytree
from graftree.core.states import states
from graftree.core.states.states import State

Path = tuple[Any, ...]


@overload
def pop(node: Any, filter: Filter, /) -> State[Any, Any]: ...
@overload
def pop(node: Any, *filter_list: Filter) -> tuple[State[Any, Any], ...]: ...
def pop(node: Any, *filter_list: Filter) -> Any:
    """Removes matching leaves from an object, in place, and returns them.

    Args:
        node: The object.
        *filter_list: One or more filters; each leaf goes to the first that matches it,
            and leaves that match none stay in the object.

    Returns:
        A State; with several filters a tuple of States.

    Raises:
        ValueError: If no filter is given, or a matching leaf is an item of a list or
            tuple; then nothing is removed.
        TraceContextError: If another trace owns the object.

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> model.loss = nnx.Intermediate(jnp.array(1.0))
        >>> nnx.pop(model, nnx.Intermediate)["loss"][...]
        Array(1., dtype=float32, weak_type=True)
        >>> hasattr(model, "loss")
        False
    """
    if not filter_list:
        raise ValueError(
            "Expected at least one filter, got none: nnx.pop(node, filter)."
        )
    predicates = [filters.to_predicate(f) for f in filter_list]
    kind = nodes.kind_of(node)
    if isinstance(kind, Leaf):
        raise updates.UnsupportedTypeError(node)
    search = _Search(predicates)
    search.visit(node, kind, None, ())
    for step in search.steps:
        step()
    popped = [*map(states.from_flat_state, search.found)]
    return tuple(popped) if len(popped) > 1 else popped[0]


class _Search:
    """Finds the leaves that match, and plans their removal.

    Attributes:
        found: For each predicate the (path, leaf) pairs that it is the first to match.
        steps: The removals, which are checked already.
    """

    def __init__(self, predicates: Sequence[Any]) -> None:
        self.found: list[list[tuple[Any, Any]]] = [[] for _ in predicates]
        self.steps: list[Step] = []
        self._groups = [*zip(self.found, predicates, strict=True)]
        self._seen: set[int] = set()

    def visit(self, node: Any, kind: Any, owner: Pytree | None, path: Path) -> None:
        """Looks through a node and all below it."""
        if isinstance(kind, GraphKind) and not self._is_new(node):
            return
        owner = node if kind is nodes.PYTREE else owner
        for key, child in _data_in(node, kind):
            child_kind = nodes.kind_of(child)
            if not isinstance(child_kind, Leaf):
                self.visit(child, child_kind, owner, (*path, key))
            elif child_kind is Leaf.ARRAY or (
                child_kind is not Leaf.STATIC and self._is_new(child)
            ):
                self._try(node, owner, child, (*path, key))

    def _is_new(self, obj: Any) -> bool:
        """Whether an object that is tracked by identity is met for the first time."""
        if id(obj) in self._seen:
            return False
        self._seen.add(id(obj))
        return True

    def _try(self, node: Any, owner: Pytree | None, leaf: Any, path: Path) -> None:
        key = path[-1]
        for group, predicate in self._groups:
            if predicate(path, leaf):
                _check_can_pop(node, key, path)
                updates.check_owned(owner, key)
                group.append((path, leaf))
                kind: Any = nodes.kind_of(node)
                self.steps.append(functools.partial(kind.pop_key, node, key))
                break


def _data_in(node: Any, kind: Any) -> list[tuple[Any, Any]]:
    """The children of a node that may be data, with their keys, in order."""
    facts = classes.facts_of(type(node)) if kind is nodes.PYTREE else None
    if facts is not None and facts.is_pytree:
        entries, table = vars(node), bookkeeping.table_of(node)
        layout = table.layout(facts.naming)
        return [(key, entries[name]) for name, key, is_data in layout if is_data]
    return [(c.key, c.value) for c in nodes.children(node) if c.is_data is not False]


def _check_can_pop(node: Any, key: Any, path: Path) -> None:
    kind: Any = nodes.kind_of(node)
    if kind.pop_key is None or (kind is nodes.PYTREE and not isinstance(key, str)):
        raise ValueError(
            f"Cannot pop key {key!r} of a {type(node).__name__} (path "
            f"{paths.to_string(path)!r}): removing an item would move the others."
        )
