"""``vmap`` and ``pmap``: functions mapped over an axis of objects and arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from graftree.transforms import decorators, lifting, propagation
from graftree.transforms.decorators import MISSING
from graftree.transforms.lifting import Row
from graftree.transforms.prefixes import Assignment

_NO_METADATA: Mapping[str, Any] = {}


def vmap(
    f: Any = MISSING,
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: Any = None,
    axis_size: int | None = None,
    spmd_axis_name: Any = None,
    transform_metadata: Mapping[str, Any] = _NO_METADATA,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Maps a function over axes of its arguments with ``jax.vmap``.

    Inside, mapped Variables lack their axis. What the function writes to them comes
    back on the same axis; Variables with the axis ``None`` are shared by all elements,
    and what is written to them must not depend on the element.

    Args:
        f: The function.
        in_axes: The axis of each positional argument: an integer, ``None``, a pytree
            prefix of these, or for an object a `StateAxes`. Keyword arguments are
            mapped over axis 0.
        out_axes: The axis of the output; new objects in it are stacked there.
        axis_name: A name of the axis, for collectives.
        axis_size: Its size, if no argument is mapped.
        spmd_axis_name: As in ``jax.vmap``.
        transform_metadata: ``{nnx.PARTITION_NAME: name}`` tells the annotations of the
            Variables about the axis.
        graph: The mode; ``None`` takes the default.
        graph_updates: Whether structural changes reach the caller's objects.

    Returns:
        The mapped function, or a decorator if ``f`` is not given.

    Raises:
        ValueError: If a prefix contains what it can't, or ``f`` is a method bound to a
            Module; at a call, for aliases with different axes.

    Example:
        >>> @nnx.vmap(in_axes=0, out_axes=0)
        ... def make(key):
        ...     return nnx.Linear(2, 3, rngs=nnx.Rngs(key))
        >>> make(jax.random.split(jax.random.key(0), 5)).kernel.shape
        (5, 2, 3)
    """
    options = {
        "axis_name": axis_name,
        "axis_size": axis_size,
        "spmd_axis_name": spmd_axis_name,
    }
    return _decorator(
        f,
        "vmap",
        functools.partial(jax.vmap, **options),
        (in_axes, out_axes, transform_metadata),
        (graph, graph_updates),
    )


def pmap(
    f: Any = MISSING,
    *,
    axis_name: Any = None,
    in_axes: Any = 0,
    out_axes: Any = 0,
    devices: Any = None,
    backend: str | None = None,
    axis_size: int | None = None,
    transform_metadata: Mapping[str, Any] = _NO_METADATA,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Maps a function over devices with ``jax.pmap``; otherwise like `vmap`.

    Args:
        f: The function.
        axis_name: A name of the axis, for collectives.
        in_axes: See `vmap`.
        out_axes: See `vmap`.
        devices: As in ``jax.pmap``, like the next two.
        backend: See ``devices``.
        axis_size: See ``devices``.
        transform_metadata: See `vmap`.
        graph: The mode; ``None`` takes the default.
        graph_updates: Whether structural changes reach the caller's objects.

    Returns:
        The mapped function, or a decorator if ``f`` is not given.

    Raises:
        ValueError: See `vmap`.

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> apply = nnx.pmap(lambda m, x: m(x), in_axes=(None, 0))
        >>> apply(model, jnp.ones((1, 4, 2))).shape
        (1, 4, 3)
    """
    options = {"axis_name": axis_name, "devices": devices, "backend": backend}
    return _decorator(
        f,
        "pmap",
        functools.partial(jax.pmap, axis_size=axis_size, **options),
        (in_axes, out_axes, transform_metadata),
        (graph, graph_updates),
    )


def _decorator(
    f: Any,
    name: str,
    jax_transform: Callable[..., Any],
    axes: tuple[Any, Any, Mapping[str, Any]],
    modes: tuple[bool | None, bool | None],
) -> Any:
    mode = propagation.resolve(*modes)
    in_axes, out_axes, axis_metadata = axes
    if isinstance(in_axes, list):
        in_axes = tuple(in_axes)
    row = Row(
        name,
        mode,
        Assignment((in_axes, 0), "in_axes", name, mode),
        Assignment(out_axes, "out_axes", name, mode),
        axis_metadata=axis_metadata,
    )

    def transform(inner: Callable[..., Any], ins: Any, outs: Any) -> Any:
        return jax_transform(inner, in_axes=ins, out_axes=outs)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        decorators.check_not_bound(function, name)
        return lifting.lift(function, transform, row)

    return decorate if f is MISSING else decorate(f)
