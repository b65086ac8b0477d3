"""The functional form of objects: split and merge, state, update, pop, clone, call.

State leaves *are* the Variables of the object; nothing is copied unless it is said so.
`merge` matches a state to a skeleton by path. Each function first checks all its input
and then changes, so a failed call leaves its arguments as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from graftree import _jax, config
from graftree.core import filters, flattening, graph_states, paths, states, updating
from graftree.core import variables as variables_module
from graftree.core.flattening import IndexMap, RefMap
from graftree.core.graph_states import GraphState
from graftree.core.skeletons import GraphDef
from graftree.core.flat_states import FlatState
from graftree.core.states import State
from graftree.core.variables import MISSING, Variable

PureState = tuple[GraphDef[Any], State]


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
    if isinstance(state, list):
        leaves = _counted(graphdef, state)
    elif isinstance(state, (Mapping, FlatState, State)) or hasattr(state, "raw_mapping"):
        leaves = _match(graphdef, [state])
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


def split(node: Any, *filter_list: Any, graph: bool | None = None) -> Any:
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
    graphdef, leaves = flattening.flatten_node(node, graph, "split")
    return graphdef, *group_all(graphdef, leaves, filter_list)


def group_all(
    graphdef: GraphDef[Any], leaves: list[Any], filter_list: Sequence[Any]
) -> tuple[Any, ...]:
    """One State per filter; every leaf must match one of them."""
    groups = _group(graphdef, leaves, filter_list)
    rest = groups.pop()
    if rest:
        remainder = states.from_flat_state(rest)
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


def state(node: Any, *filter_list: Any, graph: bool | None = None) -> Any:
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
    graphdef, leaves = flattening.flatten_node(node, graph, "state")
    groups = _group(graphdef, leaves, filter_list)[:-1]
    found = tuple(map(_as_state, groups))
    return found if len(found) > 1 else found[0]


def graphdef(node: Any, /, *, graph: bool | None = None) -> GraphDef[Any]:
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
    return flattening.flatten_node(node, graph, "graphdef")[0]


def merge(
    graphdef: Any,
    /,
    *state_list: Any,
    copy: bool = False,
    recreate_variables: bool = True,
) -> Any:
    """The inverse of `split`: an object from its static half and its states.

    States are matched by path; their order does not matter. Keys that are integers may
    be given as strings.

    Args:
        graphdef: A GraphDef followed by states, or one or more GraphStates.
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
    if isinstance(graphdef, GraphState):
        graphdef, state_list = _take_apart([graphdef, *state_list])
    if not isinstance(graphdef, GraphDef):
        raise TypeError(
            "Expected a GraphDef or GraphState object as the first argument of "
            f"nnx.merge, got {type(graphdef).__name__}."
        )
    if not state_list:
        raise TypeError("merge() missing 1 required positional argument: 'state'")
    leaves = merge_leaves(graphdef, state_list)
    return flattening.unflatten_node(
        graphdef, leaves, copy_variables=copy, recreate_variables=recreate_variables
    )


def merge_leaves(graphdef: GraphDef[Any], state_list: Sequence[Any]) -> list[Any]:
    """The leaves of states in the order of the skeleton; raises if they don't fit."""
    if not any(isinstance(given, list) for given in state_list):
        return _match(graphdef, state_list)
    if len(state_list) > 1:
        raise ValueError(
            f"Only one state can be passed as a list of leaves, got {len(state_list)} "
            "states."
        )
    return _counted(graphdef, state_list[0])


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


def _counted(graphdef: GraphDef[Any], leaves: list[Any]) -> list[Any]:
    if len(leaves) != graphdef.num_leaves:
        raise _count_error(graphdef, len(leaves), [], [])
    return leaves


def _count_error(
    graphdef: GraphDef[Any], count: int, missing: Sequence[Any], extra: Sequence[Any]
) -> ValueError:
    lines = [
        f"Incorrect number of leaves: expected {graphdef.num_leaves}, got {count}."
        if count != graphdef.num_leaves
        else "The paths of the state don't fit the GraphDef."
    ]
    for word, listed in (("missing", missing), ("unexpected", extra)):
        lines += [f"  {word}: {paths.to_string(path, '<root>')}" for path in listed[:10]]
        if len(listed) > 10:
            lines.append(f"  ... and {len(listed) - 10} more")
    lines.append("Pass the states of the same model, each leaf once.")
    return ValueError("\n".join(lines))


def _match(graphdef: GraphDef[Any], state_list: Sequence[Any]) -> list[Any]:
    """The leaves of the states in the order of the skeleton, found by path."""
    wanted = graphdef.paths()
    if wanted == ((),):
        return _match_root(graphdef, state_list)
    mappings = [_as_mapping(given) for given in state_list]
    found = [_look_up(mappings, path) for path in wanted]
    missing = [path for path, leaf in zip(wanted, found, strict=True) if leaf is MISSING]
    taken = {id(leaf) for leaf in found if _is_mapping(leaf)}
    if missing or sum(_count(m, taken) for m in mappings) != len(wanted):
        given = [path for m in mappings for path in _leaf_paths(m, taken)]
        accounted = {_normal(path) for path in wanted}
        extra = [path for path in given if _normal(path) not in accounted]
        raise _count_error(graphdef, len(given), missing, extra)
    return found


def _match_root(graphdef: GraphDef[Any], state_list: Sequence[Any]) -> list[Any]:
    leaves = [s for s in state_list if not (_is_mapping(s) and not len(s))]
    if len(leaves) != 1:
        raise _count_error(graphdef, len(leaves), [], [])
    return leaves


def _is_mapping(x: Any) -> bool:
    return isinstance(x, (Mapping, FlatState)) or hasattr(x, "raw_mapping")


def _as_mapping(given: Any) -> Mapping[Any, Any]:
    if isinstance(given, FlatState):
        given = given.to_nested_state()
    if hasattr(given, "raw_mapping"):
        return given.raw_mapping
    if isinstance(given, Mapping):
        return given
    raise TypeError(
        f"Expected a State or another mapping of paths to leaves, got "
        f"{type(given).__name__}."
    )


def _look_up(mappings: Sequence[Mapping[Any, Any]], path: Any) -> Any:
    for mapping in mappings:
        found: Any = mapping
        for key in path:
            if not _is_mapping(found):
                found = MISSING
                break
            if isinstance(found, State):
                found = found.raw_mapping
            # Integer keys come back from checkpoints as strings.
            found = found.get(key, found.get(str(key), MISSING))
        if found is not MISSING:
            return found
    return MISSING


def _count(node: Any, taken: set[int]) -> int:
    """How many leaves a nested mapping has; mappings in ``taken`` are leaves."""
    if not _is_mapping(node) or id(node) in taken:
        return 1
    return sum([_count(child, taken) for child in _as_mapping(node).values()])


def _leaf_paths(mapping: Mapping[Any, Any], taken: set[int]) -> list[Any]:
    listed: list[Any] = []

    def walk(node: Any, path: tuple[Any, ...]) -> None:
        if not _is_mapping(node) or id(node) in taken:
            listed.append(path)
            return
        for key, child in _as_mapping(node).items():
            walk(child, (*path, key))

    walk(mapping, ())
    return listed


def _normal(path: Any) -> tuple[str, ...]:
    return tuple(map(str, path))


# Changing an object in place.


def update(node: Any, state: Any, /, *state_list: Any) -> None:
    """Writes a state into an object, in place.

    Variables keep their identity and type; they take over the value and metadata (or,
    from a raw value, the value). Only the paths of the state are touched. New paths
    make new attributes, for which Variables are copied.

    Args:
        node: The object.
        state: A State, mapping, FlatState, GraphState or a pytree with the structure of
            ``node`` (such as gradients).
        *state_list: Further states; later ones win.

    Raises:
        ValueError: If the state doesn't fit the object.
        TypeError: If the state is no mapping.
        TraceContextError: If another trace owns an object that would change.

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> nnx.update(model, {"bias": jnp.ones(3)})
        >>> model.bias[...]
        Array([1., 1., 1.], dtype=float32)
    """
    updating.update(node, (state, *state_list))


def pop(node: Any, filter: Any = MISSING, /, *filter_list: Any) -> Any:  # noqa: A002
    """Removes the leaves that match from an object, and returns them.

    Args:
        node: The object.
        filter: The first filter.
        *filter_list: Further filters; the first that matches takes a leaf.

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
    if filter is MISSING:
        raise ValueError("Expected at least one filter, got none: nnx.pop(node, filter).")
    predicates = [filters.to_predicate(f) for f in (filter, *filter_list)]
    popped = [states.from_flat_state(p) for p in updating.pop(node, predicates)]
    return tuple(popped) if len(popped) > 1 else popped[0]


def clone(
    node: Any, variables: bool = True, *, arrays: bool = False, graph: bool | None = None
) -> Any:
    """A copy of an object with the same sharing inside.

    Args:
        node: Any object, container, Variable or array.
        variables: Whether to copy the Variables too; without, they are shared.
        arrays: Whether to copy the arrays too, into buffers of their own. Without, the
            copy shares them.
        graph: Whether to keep shared references; ``None`` takes the default.

    Returns:
        The copy.

    Raises:
        ValueError: If ``arrays`` is set without ``variables``; in tree mode also for
            shared references.

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> copied = nnx.clone(model)
        >>> copied.kernel is model.kernel, copied.kernel[...] is model.kernel[...]
        (False, True)
    """
    if arrays and not variables:
        raise ValueError(
            "If arrays is True, variables should be also True: a copied array needs a "
            "Variable of its own."
        )
    graphdef, leaves = flattening.flatten_node(node, graph, "clone")
    if arrays:
        leaves = [_copy_arrays(leaf) for leaf in leaves]
    elif variables:
        leaves = [_copy_variable(leaf) for leaf in leaves]
    return flattening.unflatten_node(graphdef, leaves)


def _copy_variable(leaf: Any) -> Any:
    if isinstance(leaf, Variable):
        return leaf.copy()
    return jax.new_ref(leaf[...]) if _jax.is_ref(leaf) else leaf


def _copy_arrays(leaf: Any) -> Any:
    if _jax.is_ref(leaf):
        return jax.new_ref(_jax.copy_array(leaf[...]))
    if not isinstance(leaf, Variable):
        return _jax.copy_array(leaf) if isinstance(leaf, jax.Array) else leaf
    raw = leaf.get_raw_value()
    if _jax.is_ref(raw):
        return leaf.copy()
    copied = jax.tree.map(
        lambda x: _jax.copy_array(x) if isinstance(x, jax.Array) else x, raw
    )
    return variables_module.rebuild(
        type(leaf), copied, variables_module.metadata_of(leaf)
    )


# Calling through the functional form.


class _Caller:
    """Reaches a method by attributes and items, merges, calls it and splits again."""

    def __init__(self, call_method: Callable[..., Any], accessors: tuple[Any, ...] = ()):
        self._call_method = call_method
        self._accessors = accessors

    def __getattr__(self, name: str) -> _Caller:
        step = (getattr, name)
        return _Caller(self._call_method, (*self._accessors, step))

    def __getitem__(self, key: Any) -> _Caller:
        step = (lambda obj, k: obj[k], key)
        return _Caller(self._call_method, (*self._accessors, step))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call_method(self._accessors, *args, **kwargs)


def call(graphdef_state: Any, /) -> Any:
    """Calls methods of an object in its functional form.

    Args:
        graphdef_state: A tuple ``(GraphDef, State, ...)``.

    Returns:
        A proxy. Attributes and items of it reach a method; calling it returns the
        output and the new ``(graphdef, state)``.

    Example:
        >>> pair = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> y, pair = nnx.call(pair)(jnp.ones((1, 2)))
        >>> y.shape
        (1, 3)
    """
    skeleton, *state_list = graphdef_state
    return _caller(skeleton, state_list, None)


def _caller(skeleton: GraphDef[Any], state_list: Sequence[Any], graph: bool | None) -> Any:
    def call_method(accessors: Any, *args: Any, **kwargs: Any) -> Any:
        node = method = merge(skeleton, *state_list)
        for access, key in accessors:
            method = access(method, key)
        out = method(*args, **kwargs)
        return out, split(node, graph=graph)

    return _Caller(call_method)


def _apply(
    self: GraphDef[Any], state: Any, *state_list: Any, graph: bool | None = None
) -> Any:
    """Calls methods of the object that this GraphDef and the states make.

    Args:
        state: The state, or the first of several.
        *state_list: Further states.
        graph: The mode of the split afterwards; ``None`` takes the default.

    Returns:
        A proxy as `call` returns it.
    """
    return _caller(self, (state, *state_list), graph)


# GraphDef is defined below split and merge, which its method needs.
GraphDef.apply = _apply  # type: ignore[attr-defined]


def unpack(node: Any, *filter_list: Any, graph: bool | None = None) -> Any:
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


def set_metadata(node: Any, /, *, only: Any = Variable, **metadata: Any) -> None:
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
    skeleton, leaves = flattening.flatten_node(node, None, "set_metadata")
    for path, leaf in zip(skeleton.paths(), leaves, strict=True):
        if isinstance(leaf, Variable) and predicate(path, leaf):
            leaf.set_metadata(**metadata)


def as_pure(tree: Any) -> Any:
    """Replaces each Variable by its raw value, and each ref by its array.

    Args:
        tree: Any pytree: a State, an object, a Variable.

    Returns:
        The same structure with plain values.

    Example:
        >>> pure = nnx.as_pure(nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0))))
        >>> pure["bias"]
        Array([0., 0., 0.], dtype=float32)
    """
    return jax.tree.map(_pure, tree, is_leaf=lambda x: isinstance(x, Variable))


def _pure(x: Any) -> Any:
    if isinstance(x, Variable):
        return as_pure(x.get_raw_value())
    return x[...] if _jax.is_ref(x) else x
