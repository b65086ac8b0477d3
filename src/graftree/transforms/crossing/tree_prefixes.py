"""``prefix``: prefix trees by filters, for transforms that take no filters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from graftree import config, errors
from graftree.core import filters, paths
from graftree.core.graph import flattening, nodes, tree_checks
from graftree.core.graph.graphdefs import GraphDef
from graftree.core.states import states
from graftree.transforms.crossing.prefixes import PrefixMapping

Value = Callable[[Any, Any], Any]


def prefix(
    node: Any,
    filter_map: Mapping[Any, Any] | Callable[[Any, Any], Any],
    /,
    *,
    graph: bool | None = None,
) -> Any:
    """Makes a prefix of axes, shardings or specs for objects, by filters.

    Use it for ``in_axes``, ``out_axes``, ``in_shardings``, ``in_specs`` and so on where
    there are no graph updates. With them, `StateAxes` and `StateSharding` do that.

    Args:
        node: An object or a pytree of them; ``jax.ShapeDtypeStruct`` may stand for
            arrays. For several arguments of a call give a tuple of all of them.
        filter_map: A mapping from filters to values, of which the first match counts;
            or a function of path and leaf that returns the value. Paths start at
            ``node``.
        graph: Whether the prefix is for graph mode or for tree mode; ``None`` takes the
            mode in force.

    Returns:
        ``node`` with a value instead of each Variable and each other leaf; in
        graph mode with a `TreeState` instead of each object.

    Raises:
        ValueError: If no filter matches a leaf; in tree mode, if a Variable occurs
            twice; in graph mode, if it has different values where it occurs.

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> by_name = {nnx.PathContains("bias"): None, ...: 0}
        >>> axes = nnx.prefix(model, by_name, graph=False)
        >>> axes.kernel, axes.bias
        (0, None)
    """
    value = _by_filters(filter_map) if isinstance(filter_map, Mapping) else filter_map
    make = _graph_prefix if config.graph_mode(graph) else _tree_prefix
    return make(node, value)


class TreeState(PrefixMapping):
    """The prefix of one object, by the paths of its leaves; made by `prefix`.

    It is a pytree of the values.

    Args:
        graphdef: The skeleton of the object.
        values: The values of its leaves, in order.

    Attributes:
        graphdef: As given.

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> axes = nnx.prefix(model, {nnx.Param: 0}, graph=True)
        >>> isinstance(axes, nnx.extract.TreeState), jax.tree.leaves(axes)
        (True, [0, 0])
    """

    mode = config.GRAPH

    def __init__(self, graphdef: GraphDef[Any], values: Iterable[Any]) -> None:
        self.graphdef = graphdef
        self._values = dict(zip(graphdef.paths(), values, strict=True))

    @property
    def state(self) -> states.State[Any, Any]:
        """The values by path, as a new State."""
        return states.from_flat_state(self._values.items())

    def map_prefix(self, path: Any, variable: Any) -> Any:
        """The value for the leaf at ``path``.

        Raises:
            ValueError: If there was none when the prefix was made.
        """
        if path not in self._values:
            raise ValueError(
                f"There is no prefix for the {type(variable).__name__} at {path!r}: "
                "nnx.prefix was given an object without it."
            )
        return self._values[path]

    def values_of(self) -> tuple[Any, ...]:
        """The prefix values."""
        return tuple(self._values.values())

    def paths(self) -> tuple[Any, ...]:
        """The paths, in the order of the values."""
        return tuple(self._values)

    def refusal(self, argument: str) -> str:
        """What to say where another mode is in force."""
        return (
            "`TreeState` objects are only allowed as prefixes "
            "when graph=True and graph_updates=False"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TreeState) and self._values == other._values

    def __hash__(self) -> int:
        return hash(tuple(self._values.items()))

    def __repr__(self) -> str:
        return f"TreeState({self._values!r})"


jax.tree_util.register_pytree_node(
    TreeState, lambda tree: (tree.values_of(), tree.graphdef), TreeState
)


def _by_filters(filter_map: Mapping[Any, Any]) -> Value:
    predicates = [(filters.to_predicate(f), value) for f, value in filter_map.items()]

    def value_of(path: Any, leaf: Any) -> Any:
        for matches, value in predicates:
            if matches(path, leaf):
                return value
        raise ValueError(
            f"No filter matched leaf at path {path!r} with value {leaf!r}. "
            f"Filters: {list(filter_map)}.\n"
            "Add `...` as the last one to match the rest."
        )

    return value_of


def _tree_prefix(node: Any, value_of: Value) -> Any:
    flat, treedef = tree_checks.flatten_with_paths(node, "prefix")
    tree_checks.check_tree(flat, "prefix")
    return treedef.unflatten(
        [value_of(paths.from_jax(path), leaf) for path, leaf in flat]
    )


def _graph_prefix(node: Any, value_of: Value) -> Any:
    # By identity: of the Variables and refs met so far.
    known: dict[int, tuple[Any, Any]] = {}

    def value_at(path: Any, leaf: Any) -> Any:
        value = value_of(path, leaf)
        if tree_checks.is_variable_or_ref(leaf):
            first, first_value = known.setdefault(id(leaf), (path, value))
            if value != first_value:
                raise _inconsistent_error(leaf, (first, first_value), (path, value))
        return value

    def of_object(path: Any, x: Any) -> TreeState:
        graphdef, leaves = flattening.flatten_graph(x)
        pairs = zip(graphdef.paths(), leaves, strict=True)
        return TreeState(graphdef, [value_at(path + end, x) for end, x in pairs])

    is_leaf = nodes.is_graph_node
    flat, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=is_leaf)
    located = [(paths.from_jax(path), x) for path, x in flat]
    return treedef.unflatten(
        [of_object(path, x) if is_leaf(x) else value_of(path, x) for path, x in located]
    )


def _inconsistent_error(leaf: Any, *places: tuple[Any, Any]) -> ValueError:
    lines = [f"{paths.to_string(path, '<root>')}: {value}" for path, value in places]
    return ValueError(
        errors.message(
            f"Inconsistent aliasing detected in nnx.prefix: one {type(leaf).__name__} "
            "has different values.",
            where="\n".join(lines),
            way_out="Give all its paths the same value, or pass nnx.clone(...) of one "
            "of them.",
        )
    )
