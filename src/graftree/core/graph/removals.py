"""Leaves taken out of an object in place: `pop`.

All removals are planned and checked before the first is carried out.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, overload

from graftree.annotations import Filter
from graftree.core import filters, paths, walks
from graftree.core.graph import nodes, tree_checks, updates
from graftree.core.graph.nodes import Leaf, TreeKind
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
    if isinstance(nodes.kind_of(node), Leaf):
        raise updates.UnsupportedTypeError(node)
    groups: list[tuple[Any, list[tuple[Path, Any]]]] = [(p, []) for p in predicates]
    steps: list[Step] = []
    for path, leaf, above in _leaves_of(node):
        for predicate, group in groups:
            if predicate(path, leaf):
                group.append((path, leaf))
                steps.append(_removal(path, *above))
                break
    for step in steps:
        step()
    popped = [states.from_flat_state(group) for _, group in groups]
    return tuple(popped) if len(popped) > 1 else popped[0]


def _leaves_of(root: Any) -> Iterator[tuple[Path, Any, tuple[Any, Pytree | None]]]:
    """The leaves of an object, each with the node that has it and the object around."""
    is_new, above = walks.Once(), walks.Above()
    around: dict[Path, tuple[Any, Pytree | None]] = {(): (None, None)}

    def below(x: Any, path: Path) -> Sequence[tuple[Any, Any]] | None:
        kind = nodes.kind_of(x)
        if nodes.is_graph_node(x) and not is_new(x):
            return None
        if isinstance(kind, Leaf):
            return None if kind is Leaf.STATIC else ()
        if isinstance(kind, TreeKind):
            tree_checks.check_above(above, x, path)
        around[path] = x, x if kind is nodes.PYTREE else around[path[:-1]][1]
        return _data_in(x, kind)

    for path, x in walks.walk(root, below):
        if nodes.is_node_leaf(x):
            yield path, x, around[path[:-1]]


def _removal(path: Path, node: Any, owner: Pytree | None) -> Step:
    """What takes a leaf out of the node that has it, which may be done."""
    key = path[-1]
    kind: Any = nodes.kind_of(node)
    if kind.pop_key is None or (kind is nodes.PYTREE and not isinstance(key, str)):
        raise ValueError(
            f"Cannot pop key {key!r} of a {type(node).__name__} (path "
            f"{paths.to_string(path)!r}): removing an item would move the others."
        )
    updates.check_owned(owner, key)
    return functools.partial(kind.pop_key, node, key)


def _data_in(node: Any, kind: Any) -> list[tuple[Any, Any]]:
    """The children of a node that may be data, with their keys, in order."""
    facts = classes.facts_of(type(node)) if kind is nodes.PYTREE else None
    if facts is not None and facts.is_pytree:
        entries, table = vars(node), bookkeeping.table_of(node)
        layout = table.layout(facts.naming)
        return [(key, entries[name]) for name, key, is_data in layout if is_data]
    return [(c.key, c.value) for c in nodes.children(node) if c.is_data is not False]
