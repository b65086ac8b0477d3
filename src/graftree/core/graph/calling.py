"""Calling a method of an object in its functional form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from graftree.core.graph import functional, graphdefs
from graftree.core.graph.graphdefs import GraphDef


class _Caller:
    """Reaches a method by attributes and items, merges, calls it and splits again."""

    def __init__(
        self, call_method: Callable[..., Any], accessors: tuple[Any, ...] = ()
    ):
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


def _caller(
    skeleton: GraphDef[Any], state_list: Sequence[Any], graph: bool | None
) -> Any:
    def call_method(accessors: Any, *args: Any, **kwargs: Any) -> Any:
        node = method = functional.merge(skeleton, *state_list)
        for access, key in accessors:
            method = access(method, key)
        out = method(*args, **kwargs)
        return out, functional.split(node, graph=graph)

    return _Caller(call_method)


# GraphDef.apply is defined below split and merge, which it needs.
graphdefs.register_caller(_caller)
