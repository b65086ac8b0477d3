"""``shard_map``: functions that run on each device, on its part of the arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from graftree import _jax, config, errors
from graftree.transforms.crossing import decorators, guards, outside
from graftree.transforms.crossing.decorators import MISSING
from graftree.transforms.crossing.packing import Values
from graftree.transforms.crossing.prefixes import Prefix
from graftree.transforms.crossing.rows import Keywords, Row


@decorators.keeps_type
def shard_map(
    f: Any = MISSING,
    *,
    mesh: Any,
    in_specs: Any,
    out_specs: Any,
    axis_names: Any = frozenset(),
    check_vma: bool = True,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Runs a function on each device of a mesh with ``jax.shard_map``.

    Inside, Variables and arrays have the shapes of the parts that their specs give to
    one device. What the function writes to a Variable comes back with its spec. With
    graph updates all Variables that have a spec come back sharded by it, also those
    that it did not write.

    Args:
        f: The function; it takes positional arguments only.
        mesh: The devices.
        in_specs: The spec of each argument: a ``PartitionSpec``, or a pytree prefix of
            them; for an object it may be a `StateSharding`.
        out_specs: The specs of the output; ``None`` is the empty spec.
        axis_names: The axes of the mesh over which ``f`` is split; none for all.
        check_vma: As in ``jax.shard_map``.
        graph: The mode; ``None`` takes the default.
        graph_updates: Whether structural changes reach the caller's objects.

    Returns:
        The sharded function, or a decorator if ``f`` is not given. Its ``inner`` is
        what ``jax.shard_map`` gave.

    Raises:
        ValueError: If a prefix contains what it can't, or ``f`` is a method bound to a
            Module; at a call, for aliases with different specs.
        TypeError: At a call, for keyword arguments.

    Example:
        >>> P = jax.sharding.PartitionSpec
        >>> mesh = jax.sharding.Mesh(jax.devices(), ("data",))
        >>> @nnx.shard_map(mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
        ... def apply(model, x):
        ...     return model(x)
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> tuple(apply(model, jnp.ones((8, 2))).sharding.spec)
        ('data',)
    """
    mode = config.propagation(graph, graph_updates)
    row = Row(
        "shard_map",
        mode,
        Prefix(in_specs, "in_specs", "shard_map", mode, keywords=None),
        Prefix(out_specs, "out_specs", "shard_map", mode),
        keywords=(Keywords.REFUSED, Keywords.REFUSED),
        returns_placed=True,
    )

    def transform(inner: Callable[..., Any], ins: Any, outs: Any) -> Any:
        mapped = jax.shard_map(
            inner,
            mesh=mesh,
            in_specs=ins,
            out_specs=jax.tree.map(_or_empty, outs, is_leaf=lambda spec: spec is None),
            axis_names=axis_names,
            check_vma=check_vma,
        )

        def sharded(*groups: Any) -> Any:
            if _jax.is_staging() is False:  # `None` where nobody knows: JAX may refuse
                reason = "takes array refs under jax.jit only"
                guards.refuse(groups, "shard_map", reason)
            _check_parts(groups, ins, mesh)
            return mapped(*groups)

        return sharded

    return decorators.decorate(
        f, "shard_map", lambda f: outside.lift(f, transform, row)
    )


def _check_parts(groups: Sequence[Values], specs: Sequence[Any], mesh: Any) -> None:
    """Refuses arrays that can't be split; JAX would name them by their group."""
    for group, spec in zip(groups, specs, strict=True):
        for slot, value in group.slots() if isinstance(spec, PartitionSpec) else ():
            for x in jax.tree.leaves(value):
                problem = _problem(jnp.shape(x), spec, getattr(mesh, "shape", {}))
                if problem:
                    raise ValueError(
                        errors.message(
                            f"nnx.shard_map can't split an argument: {problem}.",
                            where=f"{slot.name_in_function}: "
                            f"{jax.typeof(x).str_short()}, by {spec}",
                            way_out="Change the spec in in_specs or the mesh, or pad "
                            "the array.",
                        )
                    )


def _problem(
    shape: tuple[int, ...], spec: PartitionSpec, sizes: Mapping[Any, int]
) -> str:
    if len(spec) > len(shape):
        return f"its rank {len(shape)} is less than the {len(spec)} entries of its spec"
    for axis, entry in enumerate(spec):
        names = entry if isinstance(entry, tuple) else (entry,)
        count = math.prod(sizes.get(name, 1) for name in names)
        if shape[axis] % count:
            return (
                f"its axis {axis} of size {shape[axis]} is not evenly divisible by "
                f"{count}, the size of {entry!r} in the mesh"
            )
    return ""


def _or_empty(spec: PartitionSpec | None) -> PartitionSpec:
    # For JAX, None is an output without leaves.
    return PartitionSpec() if spec is None else spec
