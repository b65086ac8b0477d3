"""GraphState: a State that carries its GraphDef."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import jax

from graftree.core.graph.graphdefs import GraphDef
from graftree.core.states.states import State
from graftree.core.text import representations


class GraphState(representations.MappingReprMixin, MutableMapping[Any, Any]):
    """A State together with the GraphDef it fills; made by `unpack`.

    Reads and writes go to the State. As a JAX pytree, it has the paths of the State,
    and the GraphDef is static.

    Args:
        graphdef: The structure.
        state: The State.

    Raises:
        ValueError: If ``state`` is not a State.

    Example:
        >>> graph_state = nnx.unpack(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> graph_state.kernel.shape
        (2, 3)
    """

    __slots__ = ("_graphdef", "_state")

    def __init__(self, graphdef: GraphDef[Any], state: State) -> None:
        if not isinstance(state, State):
            raise ValueError(f"Expected a State object, got {type(state).__name__}.")
        object.__setattr__(self, "_graphdef", graphdef)
        object.__setattr__(self, "_state", state)

    @property
    def raw_mapping(self) -> Any:
        """The nested dict of the State."""
        return self._state.raw_mapping

    def __getitem__(self, key: Any) -> Any:
        return self._state[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._state[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._state[key]

    def __dir__(self) -> list[str]:
        return representations.names_of_object(self, dir(self._state))

    def __getattr__(self, name: str) -> Any:
        if name in GraphState.__slots__:
            raise AttributeError(name)
        return getattr(self._state, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._state[name] = value

    def __iter__(self) -> Iterator[Any]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GraphState):
            return NotImplemented
        return self._graphdef == other._graphdef and self._state == other._state

    __hash__ = None

    def __or__(self, other: Any) -> GraphState:
        return GraphState(self._graphdef, self._state | state_of(other))

    def __reduce__(self) -> Any:
        return GraphState, (self._graphdef, self._state)


def graphdef_of(graph_state: GraphState) -> GraphDef[Any]:
    """The GraphDef of a GraphState."""
    return graph_state._graphdef


def state_of(graph_state: Any) -> Any:
    """The State; another mapping is returned as it is."""
    return graph_state._state if isinstance(graph_state, GraphState) else graph_state


def _flatten(graph_state: GraphState) -> Any:
    keyed, (keys, _) = _flatten_with_keys(graph_state)
    return [child for _, child in keyed], (keys, graph_state._graphdef)


def _flatten_with_keys(graph_state: GraphState) -> Any:
    flat, treedef = jax.tree_util.tree_flatten_with_path(
        graph_state._state, is_leaf=lambda x: x is not graph_state._state
    )
    keyed = [(path[0], child) for path, child in flat]
    return keyed, (treedef, graph_state._graphdef)


def _unflatten(aux: Any, children: Any) -> GraphState:
    treedef, graphdef = aux
    graph_state = object.__new__(GraphState)
    object.__setattr__(graph_state, "_graphdef", graphdef)
    object.__setattr__(graph_state, "_state", jax.tree.unflatten(treedef, children))
    return graph_state


jax.tree_util.register_pytree_with_keys(
    GraphState, _flatten_with_keys, _unflatten, _flatten
)
