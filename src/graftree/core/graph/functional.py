"""The functional form of objects: split and merge, state, update, pop, clone, call.

State leaves *are* the Variables of the object; nothing is copied unless it is said so.
`merge` matches a state to a skeleton by path. Each function first checks all its input
and then changes, so a failed call leaves its arguments as they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, overload

from graftree import config
from graftree.annotations import Filter
from graftree.core import filters
from graftree.core.graph import flattening, graph_states, matching, memos, updating
from graftree.core.graph.flattening import IndexMap, RefMap
from graftree.core.graph.graph_states import GraphState
from graftree.core.graph.graphdefs import GraphDef
from graftree.core.states import states
from graftree.core.states.flat_states import FlatState
from graftree.core.states.states import State
from graftree.core.variables import metadata as variable_metadata
from graftree.core.variables import variables
from graftree.core.variables.variables import Variable

Node = TypeVar("Node")
N = TypeVar("N")

PureState = tuple[GraphDef[Node], State]


def flatten(
    node: Any,
    /,
    *,
    with_paths: bool = True,
    ref_index: RefMap | None = None,
    ref_outer_index: RefMap | None = None,
    graph: bool | None = None,
) -> tuple[GraphDef[Any], FlatState | list[Any]]:
    """Takes an object apart into its skeleton and its leaves.

    Args:
        node: Any object, container, Variable or array.
        with_paths: Whether to return the leaves with paths. Without, graph mode gives
            raw values.
        ref_index: Numbers of the objects met before; it is filled. Objects in it are
            referred to, not entered. Ignored in tree mode, like the next one.
        ref_outer_index: Numbers of objects known outside, recorded in the skeleton.
        graph: Whether to keep shared references; ``None`` takes the default.

    Returns:
        The GraphDef, and a FlatState sorted by path or the list of leaves.

    Raises:
        ValueError: In tree mode, for shared references, cycles and objects that are no
            pytrees.

    Example:
        >>> graphdef, flat = nnx.flatten(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> flat.paths
        (('bias',), ('kernel',))
    """
    is_graph = config.graph_mode(graph)
    if is_graph:
        graphdef, leaves = flattening.flatten_graph(node, ref_index, ref_outer_index)
    else:
        graphdef, leaves = flattening.flatten_tree(node, "flatten")
    if with_paths:
        return graphdef, FlatState.from_sorted_keys_values(graphdef.paths(), leaves)
    if is_graph:
        leaves = [
            leaf.get_raw_value() if isinstance(leaf, Variable) else leaf
            for leaf in leaves
        ]
    return graphdef, leaves


def unflatten(
    graphdef: GraphDef[Any],
    state: Any,
    /,
    *,
    index_ref: IndexMap | None = None,
    outer_index_outer_ref: IndexMap | None = None,
    copy_variables: bool = False,
    recreate_variables: bool = True,
) -> Any:
    """The inverse of `flatten`.

    Args:
        graphdef: The skeleton.
        state: A State, mapping or FlatState (matched by path), or a list of leaves in
            order.
        index_ref: Objects by number, shared between several calls; it is filled.
        outer_index_outer_ref: Existing objects by number. They are reused: nodes are
            refilled in place, Variables updated in place, after all checks.
        copy_variables: Whether to copy the Variables of the state.
        recreate_variables: Whether raw values become Variables where the skeleton has
            one.

    Returns:
        The object.

    Raises:
        ValueError: If the leaves don't fit the skeleton, the type of ``state`` is not
            supported, or a reused object has another type.

    Example:
        >>> graphdef, flat = nnx.flatten(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> nnx.unflatten(graphdef, flat).kernel.shape
        (2, 3)
    """
    if isinstance(state, list) or matching.is_mapping(state):
        leaves = matching.match(graphdef, [state])
    elif not graphdef.nodes or graphdef.paths() == ((),):
        leaves = [state]
    else:
        raise ValueError(
            f"Unsupported state type: {type(state).__name__}. Expected a State, a "
            "mapping, a FlatState or a list of leaves."
        )
    if graphdef.is_tree:
        return flattening.unflatten_tree(
            graphdef,
            leaves,
            copy_variables=copy_variables,
            recreate_variables=recreate_variables,
        )
    return flattening.unflatten_graph(
        graphdef,
        leaves,
        index_ref=index_ref,
        outer_index_outer_ref=outer_index_outer_ref,
        copy_variables=copy_variables,
        recreate_variables=recreate_variables,
    )


@overload
def split(
    node: N, first: Filter = ..., /, *, graph: bool | None = None
) -> tuple[GraphDef[N], State[Any, Any]]: ...
@overload
def split(
    node: N, first: Filter, second: Filter, /, *, graph: bool | None = None
) -> tuple[GraphDef[N], State[Any, Any], State[Any, Any]]: ...
@overload
def split(
    node: N, a: Filter, b: Filter, c: Filter, /, *, graph: bool | None = None
) -> tuple[GraphDef[N], State[Any, Any], State[Any, Any], State[Any, Any]]: ...
@overload
def split(
    node: N, *filter_list: Filter, graph: bool | None = None
) -> tuple[GraphDef[N], *tuple[State[Any, Any], ...]]: ...
def split(node: Any, *filter_list: Filter, graph: bool | None = None) -> Any:
    """Parts an object into its static half and its state.

    Args:
        node: Any object, container, Variable or array.
        *filter_list: Filters; each leaf goes to the first that matches it. None means
            one State with everything.
        graph: Whether to keep shared references; ``None`` takes the default.

    Returns:
        ``(graphdef, state, ...)``, one State per filter. The leaves of the States are
        the Variables and arrays of ``node``. The state of a Variable or array is that
        object itself.

    Raises:
        ValueError: If a leaf matches no filter; in tree mode also for shared
            references, cycles and objects that are no pytrees.

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        >>> params["kernel"] is model.kernel, len(rest)
        (True, 0)
    """
    graphdef, leaves = memos.flatten_node(node, graph, "split")
    return graphdef, *group_all(graphdef, leaves, filter_list)


def group_all(
    graphdef: GraphDef[Any], leaves: list[Any], filter_list: Sequence[Any]
) -> tuple[Any, ...]:
    """One State per filter; every leaf must match one of them."""
    groups = _group(graphdef, leaves, filter_list)
    rest = groups.pop()
    if rest:
        remainder = _as_state(rest)
        raise ValueError(
            "Non-exhaustive filters, got a non-empty remainder: "
            f"{remainder}.\nUse `...` as the last filter to match all that remains."
        )
    return tuple(map(_as_state, groups))


def _group(
    graphdef: GraphDef[Any], leaves: list[Any], filter_list: Sequence[Any]
) -> list[list[tuple[Any, Any]]]:
    """The (path, leaf) pairs of each filter; those of no filter come last."""
    pairs = list(zip(graphdef.paths(), leaves, strict=True))
    if not filter_list:
        return [pairs, []]
    predicates = filters.filters_to_predicates(filter_list)
    groups: list[list[tuple[Any, Any]]] = [[] for _ in range(len(predicates) + 1)]
    for path, leaf in pairs:
        for i, predicate in enumerate(predicates):
            if predicate(path, leaf):
                groups[i].append((path, leaf))
                break
        else:
            groups[-1].append((path, leaf))
    return groups


def _as_state(pairs: list[tuple[Any, Any]]) -> Any:
    if len(pairs) == 1 and pairs[0][0] == ():
        return pairs[0][1]
    return states.from_flat_state(pairs)


@overload
def state(
    node: Any, first: Filter = ..., /, *, graph: bool | None = None
) -> State[Any, Any]: ...
@overload
def state(
    node: Any, *filter_list: Filter, graph: bool | None = None
) -> tuple[State[Any, Any], ...]: ...
def state(node: Any, *filter_list: Filter, graph: bool | None = None) -> Any:
    """The state of an object: its Variables and arrays by path.

    Args:
        node: Any object, container, Variable or array.
        *filter_list: Filters; leaves that match none are left out.
        graph: Whether to keep shared references; ``None`` takes the default.

    Returns:
        A State; with several filters a tuple of States. The leaves are those of
        ``node``, not copies.

    Raises:
        ValueError: In tree mode, for shared references, cycles and objects that are no
            pytrees.

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> nnx.state(model, nnx.PathContains("kernel"))["kernel"] is model.kernel
        True
    """
    graphdef, leaves = memos.flatten_node(node, graph, "state")
    groups = _group(graphdef, leaves, filter_list)[:-1]
    found = tuple(map(_as_state, groups))
    return found if len(found) > 1 else found[0]


def graphdef(node: N, /, *, graph: bool | None = None) -> GraphDef[N]:
    """The static half of an object.

    Args:
        node: Any object, container, Variable or array.
        graph: Whether to keep shared references; ``None`` takes the default.

    Returns:
        Its GraphDef, equal for objects that are built alike.

    Raises:
        ValueError: In tree mode, for shared references, cycles and objects that are no
            pytrees.

    Example:
        >>> a, b = nnx.BatchStat(jnp.ones(2)), nnx.BatchStat(jnp.zeros(3))
        >>> nnx.graphdef(a) == nnx.graphdef(b)
        True
    """
    return memos.flatten_node(node, graph, "graphdef")[0]


@overload
def merge(
    graphdef_or_graphstate: GraphDef[N],
    /,
    *state_list: Any,
    copy: bool = ...,
    recreate_variables: bool = ...,
) -> N: ...
@overload
def merge(
    graphdef_or_graphstate: GraphState,
    /,
    *state_list: GraphState,
    copy: bool = ...,
    recreate_variables: bool = ...,
) -> Any: ...
def merge(
    graphdef_or_graphstate: Any,
    /,
    *state_list: Any,
    copy: bool = False,
    recreate_variables: bool = True,
) -> Any:
    """The inverse of `split`: an object from its static half and its states.

    States are matched by path; their order does not matter. Keys that are integers may
    be given as strings.

    Args:
        graphdef_or_graphstate: A GraphDef followed by states, or one or more
            GraphStates.
        *state_list: States, mappings, FlatStates, a bare leaf, or one list of leaves
            in order.
        copy: Whether to copy the Variables; without, the object shares them.
        recreate_variables: Whether raw values become Variables where the skeleton has
            one.

    Returns:
        A new object that belongs to the current trace. No ``__init__`` is run.

    Raises:
        ValueError: If leaves are missing or superfluous; the message names the paths.
        TypeError: If there is no state, or the first argument is no GraphDef.

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> graphdef, state = nnx.split(model)
        >>> nnx.merge(graphdef, state).kernel is model.kernel
        True
    """
    graphdef = graphdef_or_graphstate
    if isinstance(graphdef, GraphState):
        graphdef, state_list = _take_apart([graphdef, *state_list])
    if not isinstance(graphdef, GraphDef):
        raise TypeError(
            "Expected a GraphDef or GraphState object as the first argument of "
            f"nnx.merge, got {type(graphdef).__name__}."
        )
    if not state_list:
        raise TypeError("merge() missing 1 required positional argument: 'state'")
    leaves = matching.match(graphdef, state_list)
    return flattening.unflatten_node(
        graphdef, leaves, copy_variables=copy, recreate_variables=recreate_variables
    )


def _take_apart(given: Sequence[Any]) -> tuple[GraphDef[Any], list[Any]]:
    first = graph_states.graphdef_of(given[0])
    for other in given[1:]:
        if not isinstance(other, GraphState):
            raise ValueError(
                "Expected GraphState object after a GraphState, got "
                f"{type(other).__name__}."
            )
        if graph_states.graphdef_of(other) != first:
            raise ValueError(
                "GraphDef must be the same in all GraphStates: they come from "
                "different models."
            )
    return first, [graph_states.state_of(graph_state) for graph_state in given]


# Changing an object in place.


def update(node: Any, state: Any, /, *state_list: Any) -> None:
    """Writes a state into an object, in place.

    Variables keep their identity and type; they take over the value and metadata (or,
    from a raw value, the value). Only the paths of the state are touched. As in Flax,
    new paths make new attributes, for which Variables are copied, and shapes may
    change. A NumPy array for a JAX array becomes one; ``{"value": array}``, of which
    checkpoints without types consist, gives its array.

    Args:
        node: The object.
        state: A State, mapping, FlatState, GraphState or a pytree with the structure of
            ``node`` (such as gradients).
        *state_list: Further states; later ones win.

    Raises:
        ValueError: If the state doesn't fit the object, e.g. has a mapping for an
            array. Nothing has changed then.
        TypeError: If the state is no mapping.
        TraceContextError: If another trace owns an object that would change.

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> nnx.update(model, {"bias": jnp.ones(3)})
        >>> model.bias[...]
        Array([1., 1., 1.], dtype=float32)
    """
    updating.update(node, (state, *state_list))


@overload
def pop(node: Any, filter: Filter, /) -> State[Any, Any]: ...
@overload
def pop(node: Any, *filter_list: Filter) -> tuple[State[Any, Any], ...]: ...
def pop(node: Any, *filter_list: Filter) -> Any:
    """Removes the leaves that match from an object, and returns them.

    Args:
        node: The object.
        *filter_list: Filters, at least one; the first that matches takes a leaf.

    Returns:
        A State, or one State per filter.

    Raises:
        ValueError: If no filter is given, or a leaf is in a list or tuple.
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
    popped = [states.from_flat_state(p) for p in updating.pop(node, predicates)]
    return tuple(popped) if len(popped) > 1 else popped[0]


@overload
def unpack(
    node: Any, first: Filter = ..., /, *, graph: bool | None = None
) -> GraphState: ...
@overload
def unpack(
    node: Any, *filter_list: Filter, graph: bool | None = None
) -> tuple[GraphState, ...]: ...
def unpack(node: Any, *filter_list: Filter, graph: bool | None = None) -> Any:
    """`split` in one value: the state together with its GraphDef.

    Args:
        node: Any object or container.
        *filter_list: Filters; every leaf must match one.
        graph: Whether to keep shared references; ``None`` takes the default.

    Returns:
        A GraphState; with several filters a tuple of GraphStates.

    Raises:
        ValueError: If a leaf matches no filter, or the node is a single leaf.

    Example:
        >>> graph_state = nnx.unpack(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> nnx.merge(graph_state).kernel.shape
        (2, 3)
    """
    skeleton, *found = split(node, *filter_list, graph=graph)
    packed = tuple(GraphState(skeleton, s) for s in found)
    return packed if len(packed) > 1 else packed[0]


def set_metadata(node: Any, /, *, only: Filter = Variable, **metadata: Any) -> None:
    """Sets metadata entries of all Variables that match, in place.

    Args:
        node: Any object, container or Variable.
        only: A filter on (path, Variable).
        **metadata: The entries; others are kept.

    Raises:
        ValueError: If ``hijax`` or ``ref`` would change.
        TypeError: If no entry is given.

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> nnx.set_metadata(model, only=nnx.PathContains("bias"), frozen=True)
        >>> model.bias.frozen, model.kernel.has_metadata("frozen")
        (True, False)
    """
    predicate = filters.to_predicate(only)
    skeleton, leaves = memos.flatten_node(node, None, "set_metadata")
    chosen = [
        (leaf, variable_metadata.changed(variables.metadata_of(leaf), (), metadata))
        for path, leaf in zip(skeleton.paths(), leaves, strict=True)
        if isinstance(leaf, Variable) and predicate(path, leaf)
    ]
    # All or nothing: whatever one of them refuses is found before the first changes.
    for variable, _ in chosen:
        variables.check_writable(variable)
    for variable, entries in chosen:
        variables.replace_metadata(variable, entries)
