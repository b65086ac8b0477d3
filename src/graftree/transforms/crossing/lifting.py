"""A JAX transform over objects: the two sides of the crossing around a JAX call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from graftree.core.pickling import Rebuilt
from graftree.transforms.crossing import decorators
from graftree.transforms.crossing.inside import Inside
from graftree.transforms.crossing.outside import Call
from graftree.transforms.crossing.packing import Values
from graftree.transforms.crossing.rows import Row


def lift(
    f: Callable[..., Any],
    transform: Callable[[Callable[..., Any], Any, Any], Callable[..., Any]],
    row: Row,
) -> Callable[..., Any]:
    """Applies a JAX transform to a function over objects.

    It is called as ``transform(inner, in_prefix, out_prefix)``; ``inner`` takes a group
    of leaves per entry of the tuple ``in_prefix``. What it gave is ``inner`` of the
    result.
    """
    inner = _Transformed(f, transform, row)

    @decorators.wraps(f)
    def lifted(*args: Any, **kwargs: Any) -> Any:
        call = Call(f, row, args, kwargs)
        return call.commit(inner.function(*call.groups))

    vars(lifted)["inner"] = inner
    return lifted


class _Transformed(Rebuilt):
    """What JAX gave; pickled without it."""

    def __init__(self, f: Any, transform: Callable[..., Any], row: Row) -> None:
        ins, outs = row.inputs.values, row.outputs.values
        self.function = transform(interior(f, row), ins, (None, ins, ins, outs))

    def __call__(self, *groups: Values) -> Any:
        return self.function(*groups)


def interior(f: Callable[..., Any], row: Row) -> Callable[..., Any]:
    """What JAX traces: a function of groups of leaves that returns a result."""

    def traced(*groups: Values) -> Any:
        inside = Inside(row, groups)
        return inside.leave(inside.run(f))

    return decorators.named_after(f, traced)


def returning_arrays(transformed: Callable[..., Any]) -> Callable[..., Any]:
    """Makes arrays of what a transform that JAX doesn't compile gives as scalars.

    JAX then returns the constants of a program as they are in it.
    """

    def wrapper(*groups: Values) -> Any:
        return jax.tree.map(_as_array, transformed(*groups))

    return wrapper


def _as_array(x: Any) -> Any:
    return x if isinstance(x, jax.Array) else jax.numpy.asarray(x)
