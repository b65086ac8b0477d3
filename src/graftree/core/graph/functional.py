"""Functional form of objects: split and merge, state, clone, call.

The leaves of a State *are* the Variables of the object; only `clone` copies them, and
functions with an argument that asks for it. `merge` matches a state to a skeleton by
path. The result of `call` finds a method by attributes and items. Functions that change
an object in place are in `updates.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, overload

import jax

from graftree import _jax, config
from graftree.annotations import Filter
from graftree.core import filters, hooks
from graftree.core.graph import flattening, graphdefs, kept, matching
from graftree.core.graph.graphdefs import GraphDef, GraphState
from graftree.core.states import flat_states, states
from graftree.core.states.flat_states import FlatState
from graftree.core.states.states import State
from graftree.core.variables import values, variables as variables_module
from graftree.core.variables.variables import Variable

Node = TypeVar("Node")
N = TypeVar("N")

PureState = tuple[GraphDef[Node], State]


def flatten(
    node: Any,
    /,
    *,
    with_paths: bool = True,
    ref_index: flattening.RefMap | None = None,
    ref_outer_index: flattening.RefMap | None = None,
    graph: bool | None = None,
) -> tuple[GraphDef[Any], FlatState | list[Any]]:
    """Splits an object into its GraphDef and its leaves.

    Args:
        node: Any object, container, Variable or array.
        with_paths: Whether to return the leaves with their paths. If False, graph mode
            returns raw values instead of Variables.
        ref_index: The numbers of objects seen earlier, extended in place. Objects in it
            become references and are not entered. Ignored in tree mode, like
            ``ref_outer_index``.
        ref_outer_index: The numbers that objects have on the caller's side of a
            transform, recorded in the GraphDef.
        graph: Whether to keep shared references; ``None`` takes the default.

    Returns:
        The GraphDef, and a FlatState sorted by path or the list of leaves.

    Raises:
        ValueError: In tree mode, for shared references, cycles and objects that are not
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
        leaves = [*map(flattening.raw_of, leaves)]
    return graphdef, leaves


def unflatten(
    graphdef: GraphDef[Any],
    state: Any,
    /,
    *,
    index_ref: flattening.IndexMap | None = None,
    outer_index_outer_ref: flattening.IndexMap | None = None,
    copy_variables: bool = False,
    recreate_variables: bool = True,
) -> Any:
    """Builds an object from its GraphDef and its leaves; the inverse of `flatten`.

    Args:
        graphdef: The structure.
        state: A State, mapping or FlatState (matched by path), or a list of leaves in
            order.
        index_ref: Objects by number, extended in place; pass the same one to several
            calls to share objects between them.
        outer_index_outer_ref: Existing objects by number, to reuse: once all checks
            have passed, they are updated in place.
        copy_variables: Whether to copy the Variables of the state.
        recreate_variables: Whether to wrap raw values in Variables where the GraphDef
            has one.

    Returns:
        The object.

    Raises:
        ValueError: If the leaves do not match the GraphDef, the type of ``state`` is
            not supported, or a reused object has a different type.

    Example:
        >>> graphdef, flat = nnx.flatten(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> nnx.unflatten(graphdef, flat).kernel.shape
        (2, 3)
    """
    if isinstance(state, list) or matching.is_mapping(state):
        leaves = matching.match_leaves(graphdef, [state])
    elif graphdef.paths() == ((),):
        leaves = [state]
    else:
        raise ValueError(
            f"Unsupported state type: {type(state).__name__}. Expected a State, a "
            "mapping, a FlatState or a list of leaves."
        )
    return flattening.unflatten(
        graphdef,
        _copied(leaves) if copy_variables else leaves,
        index_ref=index_ref,
        outer_index_outer_ref=outer_index_outer_ref,
        recreate_variables=recreate_variables,
    )


def _copied(leaves: Sequence[Any]) -> list[Any]:
    return [leaf.copy() if isinstance(leaf, Variable) else leaf for leaf in leaves]


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
    """Splits an object into its structure and its state.

    Args:
        node: Any object, container, Variable or array.
        *filter_list: Filters; each leaf goes to the first that matches it. Without
            filters, all leaves go to one State.
        graph: Whether to keep shared references; ``None`` takes the default.

    Returns:
        ``(graphdef, state, ...)``, one State per filter. The leaves of the States are
        the Variables and arrays of ``node``. The state of a Variable or array is the
        object itself.

    Raises:
        ValueError: If a leaf matches no filter; in tree mode also for shared
            references, cycles and objects that are not pytrees.

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        >>> params["kernel"] is model.kernel, len(rest)
        (True, 0)
    """
    graphdef, leaves = kept.flatten(node, graph, "split")
    return graphdef, *group_all(graphdef, leaves, filter_list)


def group_all(
    graphdef: GraphDef[Any],
    leaves: list[Any],
    filter_list: Sequence[Any],
    *,
    may_leave: bool = False,
) -> tuple[Any, ...]:
    """Makes one State per filter; each leaf must match one, unless ``may_leave``."""
    pairs = zip(graphdef.paths(), leaves, strict=True)
    *groups, rest = filters.group(pairs, filter_list) if filter_list else [[*pairs], []]
    if rest and not may_leave:
        raise flat_states.remainder_error(rest)
    # The state of a Variable or array is the object itself.
    if graphdef.paths() == ((),):
        return tuple([group[0][1] if group else State({}) for group in groups])
    return tuple(map(states.from_flat_state, groups))


@overload
def state(
    node: Any, first: Filter = ..., /, *, graph: bool | None = None
) -> State[Any, Any]: ...
@overload
def state(
    node: Any, *filter_list: Filter, graph: bool | None = None
) -> tuple[State[Any, Any], ...]: ...
def state(node: Any, *filter_list: Filter, graph: bool | None = None) -> Any:
    """Returns the state of an object: its Variables and arrays by path.

    Args:
        node: Any object, container, Variable or array.
        *filter_list: Filters; each leaf goes to the first that matches it, and leaves
            that match none are left out.
        graph: Whether to keep shared references; ``None`` takes the default.

    Returns:
        A State; with several filters, a tuple of States. The leaves are those of
        ``node``, not copies.

    Raises:
        ValueError: In tree mode, for shared references, cycles and objects that are not
            pytrees.

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> nnx.state(model, nnx.PathContains("kernel"))["kernel"] is model.kernel
        True
    """
    graphdef, leaves = kept.flatten(node, graph, "state")
    groups = group_all(graphdef, leaves, filter_list, may_leave=True)
    return groups[0] if len(groups) == 1 else groups


def graphdef(node: N, /, *, graph: bool | None = None) -> GraphDef[N]:
    """Returns the structure of an object, without its state.

    Args:
        node: Any object, container, Variable or array.
        graph: Whether to keep shared references; ``None`` takes the default.

    Returns:
        Its GraphDef; objects of the same structure have equal ones.

    Raises:
        ValueError: In tree mode, for shared references, cycles and objects that are not
            pytrees.

    Example:
        >>> a, b = nnx.BatchStat(jnp.ones(2)), nnx.BatchStat(jnp.zeros(3))
        >>> nnx.graphdef(a) == nnx.graphdef(b)
        True
    """
    return kept.flatten(node, graph, "graphdef")[0]


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
    """Builds an object from its structure and its states; the inverse of `split`.

    States are matched by path, so their order does not matter. Integer keys may be
    strings. Shapes and dtypes are not compared: a GraphDef has none.
    `nnx.checkpoints.load_state` compares those of an object.

    Args:
        graphdef_or_graphstate: A GraphDef followed by states, or one or more
            GraphStates.
        *state_list: States, mappings, FlatStates, a bare leaf, or a list of leaves in
            order.
        copy: Whether to copy the Variables; by default the object shares them.
        recreate_variables: Whether to wrap raw values in Variables where the GraphDef
            has one.

    Returns:
        A new object, owned by the current trace. No ``__init__`` runs.

    Raises:
        ValueError: If leaves are missing or unexpected; the message lists their paths.
        TypeError: If no state is given, or the first argument is neither a GraphDef nor
            a GraphState.

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
    leaves = matching.match_leaves(graphdef, state_list)
    return flattening.unflatten(
        graphdef,
        _copied(leaves) if copy else leaves,
        recreate_variables=recreate_variables,
    )


def _take_apart(graph_states: Sequence[Any]) -> tuple[GraphDef[Any], tuple[Any, ...]]:
    first = graphdefs.graphdef_of(graph_states[0])
    for other in graph_states[1:]:
        if not isinstance(other, GraphState):
            raise ValueError(
                "Expected GraphState object after a GraphState, got "
                f"{type(other).__name__}."
            )
        if graphdefs.graphdef_of(other) != first:
            raise ValueError(
                "GraphDef must be the same in all GraphStates: they come from "
                "different models."
            )
    return first, tuple(map(graphdefs.state_of, graph_states))


@overload
def unpack(
    node: Any, first: Filter = ..., /, *, graph: bool | None = None
) -> GraphState: ...
@overload
def unpack(
    node: Any, *filter_list: Filter, graph: bool | None = None
) -> tuple[GraphState, ...]: ...
def unpack(node: Any, *filter_list: Filter, graph: bool | None = None) -> Any:
    """Splits an object into states that carry their GraphDef with them.

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
    skeleton, *state_list = split(node, *filter_list, graph=graph)
    packed = [GraphState(skeleton, s) for s in state_list]
    return tuple(packed) if len(packed) > 1 else packed[0]


def clone(
    node: N,
    variables: bool = True,
    *,
    arrays: bool = False,
    graph: bool | None = None,
) -> N:
    """Copies an object; objects shared inside it are shared inside the copy.

    Args:
        node: Any object, container, Variable or array.
        variables: Whether to copy the Variables; if False, the copy shares them.
        arrays: Whether to copy the arrays into new buffers; by default the copy shares
            them, and loses them if a function donates the original.
        graph: Whether to keep shared references; ``None`` takes the default.

    Returns:
        A new object, owned by the current trace.

    Raises:
        ValueError: If ``arrays`` is True and ``variables`` False; in tree mode, for
            shared references, cycles and objects that are not pytrees.

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
    graphdef, leaves = kept.flatten(node, graph, "clone")
    if variables:
        leaves = list(map(_copier(arrays), leaves))
    return flattening.unflatten(graphdef, leaves)


def _copier(arrays: bool) -> Callable[[Any], Any]:
    """Copies leaves one by one; those with the same ref share one afterwards."""
    refs = flattening.RefMap()

    def copy_value(x: Any) -> Any:
        if _jax.is_ref(x):
            if x not in refs:
                refs[x] = jax.new_ref(copy_value(x[...]))
            return refs[x]
        return _copied_array(x) if arrays and isinstance(x, jax.Array) else x

    def copy_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, Variable):
            return copy_value(leaf)
        raw = leaf.get_raw_value()
        if arrays or _jax.is_ref(raw):
            copied = jax.tree.map(copy_value, raw)
        else:
            copied = values.copy_containers(raw)
        return variables_module.rebuild(
            type(leaf), copied, variables_module.metadata_of(leaf)
        )

    return copy_leaf


def _copied_array(x: jax.Array) -> jax.Array:
    """Copies an array to its own buffer: value, dtype, weak type and sharding."""
    return jax.numpy.array(x, copy=True) if isinstance(x, _jax.Tracer) else x.copy()


def call(graphdef_state: Any, /) -> Any:
    """Calls a method of an object in its functional form.

    Args:
        graphdef_state: A tuple ``(GraphDef, State, ...)``.

    Returns:
        A proxy for the object: its attributes and items select a method, and a call
        returns the output and the new ``(graphdef, state)``.

    Example:
        >>> pair = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> y, pair = nnx.call(pair)(jnp.ones((1, 2)))
        >>> y.shape
        (1, 3)
    """
    skeleton, *state_list = graphdef_state
    return _caller(skeleton, state_list, None)


def _caller(
    skeleton: GraphDef[Any], state_list: Sequence[Any], graph: bool | None
) -> Any:
    def call(accessor: DelayedAccessor, *args: Any, **kwargs: Any) -> Any:
        node = merge(skeleton, *state_list)
        out = accessor(node)(*args, **kwargs)
        return out, split(node, graph=graph)

    return CallableProxy(call)


hooks.apply_graphdef.fill(_caller)


A = TypeVar("A", covariant=True)


@dataclasses.dataclass(frozen=True)
class GetItem:
    """Takes the item of a key."""

    key: Any

    def __call__(self, x: Any) -> Any:
        return x[self.key]


@dataclasses.dataclass(frozen=True)
class GetAttr:
    """Takes the attribute of a name."""

    name: str

    def __call__(self, x: Any) -> Any:
        return getattr(x, self.name)


@dataclasses.dataclass(frozen=True)
class DelayedAccessor:
    """A chain of accesses; its attributes and items are longer chains.

    Attributes:
        actions: The accesses, the first one first.

    Example:
        >>> bias = nnx.proxy_caller.DelayedAccessor().layers[0].bias
        >>> model = nnx.Dict(layers=nnx.List([nnx.Dict(bias=1.0)]))
        >>> bias(model)
        1.0
    """

    actions: tuple[GetItem | GetAttr, ...] = ()

    def __call__(self, x: Any) -> Any:
        for action in self.actions:
            x = action(x)
        return x

    def __getattr__(self, name: str) -> DelayedAccessor:
        return DelayedAccessor((*self.actions, GetAttr(name)))

    def __getitem__(self, key: Any) -> DelayedAccessor:
        return DelayedAccessor((*self.actions, GetItem(key)))


class ApplyCaller(Protocol[A]):
    """Result of `nnx.call`: reaches a method and gives its output and the state."""

    def __getattr__(self, name: str, /) -> ApplyCaller[A]: ...
    def __getitem__(self, key: Any, /) -> ApplyCaller[A]: ...
    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, A]: ...


class CallableProxy:
    """A function of an accessor, called like the method that the accessor reaches.

    Args:
        callable: Called with the accessor, then the arguments.
        accessor: The accesses so far.

    Example:
        >>> def call(accessor, *args):
        ...     return accessor("abc")(*args)
        >>> nnx.proxy_caller.CallableProxy(call).upper()
        'ABC'
    """

    def __init__(
        self, callable: Callable[..., Any], accessor: DelayedAccessor | None = None
    ):
        self._callable = callable
        self._accessor = DelayedAccessor() if accessor is None else accessor

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._callable(self._accessor, *args, **kwargs)

    def __getattr__(self, name: str) -> CallableProxy:
        return CallableProxy(self._callable, getattr(self._accessor, name))

    def __getitem__(self, key: Any) -> CallableProxy:
        return CallableProxy(self._callable, self._accessor[key])
