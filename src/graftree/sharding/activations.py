"""Values inside of a model, placed by the names of their axes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from graftree import errors
from graftree.core import paths
from graftree.core.variables import sharding
from graftree.sharding import misfits

T = TypeVar("T")


def constrain(x: T, names: Sequence[Any]) -> T:
    """Places a value on the mesh in force by the names of its axes.

    Call it where a model should say how its activations are divided, as in
    ``x = nnx.sharding.constrain(x, ("batch", None, "embed"))``. Without a mesh it does
    nothing. On axes of type Auto it is ``jax.lax.with_sharding_constraint``, on
    Explicit ones ``jax.sharding.reshard``; axes that `jax.shard_map` has taken (Manual)
    are left out. Gradients are placed alike. Functions that are compiled are traced
    anew where other rules or another mesh are in force.

    Args:
        x: An array, or a pytree of arrays, all with axes of these names.
        names: What each axis is: a name that `logical_axis_rules` know or an axis of
            the mesh, a tuple of such names, or ``None`` for an axis that is not
            divided. Axes at the end may be left out, they are not divided either.

    Returns:
        The same values, placed.

    Raises:
        ValueError: If a name stands for no axis of the mesh, or two for the same; if an
            array has fewer axes than there are names, or its size along one can't be
            divided.
        TypeError: If ``names`` is a string.

    Example:
        >>> mesh = jax.make_mesh((4,), ("data",))
        >>> with jax.set_mesh(mesh), nnx.logical_axis_rules([("batch", "data")]):
        ...     x = nnx.sharding.constrain(jnp.ones((8, 3)), ("batch", None))
        >>> x.sharding.shard_shape(x.shape)
        (2, 3)
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    spec = sharding.get_pspec(names)
    leaves, treedef = jax.tree.flatten_with_path(x)
    for path, leaf in leaves:
        _check(paths.from_jax(path), np.shape(leaf), names, spec, mesh)
    return treedef.unflatten([_place(leaf, spec, mesh) for _, leaf in leaves])


def _check(
    path: Any, shape: tuple[int, ...], names: Sequence[Any], spec: Any, mesh: Any
) -> None:
    problem = misfits.between(names, spec, shape, mesh)
    if problem is not None:
        place = f"at {paths.dotted(path)}\n" if path else ""
        raise ValueError(
            errors.message(
                f"nnx.sharding.constrain: {problem}.",
                where=f"{place}array of shape {shape}\n{misfits.surroundings(mesh)}",
                way_out=misfits.WAY_OUT,
            )
        )


def _place(leaf: Any, spec: PartitionSpec, mesh: Any) -> Any:
    kinds = {*mesh.axis_types} & _PUT.keys()
    places = {kind: NamedSharding(mesh, _only(kind, spec, mesh)) for kind in kinds}
    for place in places.values():
        leaf = sharding.on_mesh(leaf, place)
    if len(places) > 1:
        return _place_both(leaf, places[AxisType.Explicit], places[AxisType.Auto])
    for kind, place in places.items():
        leaf = _PUT[kind](leaf, place)
    return leaf


_PUT = {
    AxisType.Auto: jax.lax.with_sharding_constraint,
    AxisType.Explicit: jax.sharding.reshard,
}


@functools.partial(jax.jit, static_argnums=(1, 2))
def _place_both(x: jax.Array, explicit: NamedSharding, auto: NamedSharding) -> Any:
    """Compiled, because one of them alone would forget what the other one did."""
    return jax.lax.with_sharding_constraint(jax.sharding.reshard(x, explicit), auto)


def _only(kind: AxisType, spec: PartitionSpec, mesh: Any) -> PartitionSpec:
    """The spec without axes of the mesh that are of another type."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))

    def entry(of: Any) -> Any:
        if isinstance(of, tuple):
            return tuple(axis for axis in of if kinds[axis] == kind) or None
        return of if kinds.get(of, kind) == kind else None

    return PartitionSpec(*map(entry, spec))
