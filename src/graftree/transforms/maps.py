"""Functions mapped over an axis of objects and arrays, or over devices.

`vmap` and `pmap` map them over an axis, and `shard_map` runs them on each device, on
its part of the arguments. `transform_metadata` handles the names of axes as the first
two do, for the mapping transforms of JAX.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from graftree import _jax, config, errors
from graftree.core.graph.graphdefs import Interned
from graftree.core.rng.streams import RngState
from graftree.core.variables.partitioning import PARTITION_NAME
from graftree.transforms.lifting import (
    caller,
    debug_info,
    decorators,
    dispatch,
    tracer_leaks,
)
from graftree.transforms.lifting.leaves import Leaves
from graftree.transforms.lifting.prefixes import Donation, Prefix
from graftree.transforms.lifting.specs import Keywords, TransformSpec

_NO_METADATA: Mapping[str, Any] = {}


@decorators.keeps_type
def vmap(
    f: Any = decorators.MISSING,
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

    The function sees mapped Variables without their axis. Values that it writes to them
    come back on the same axis; Variables with the axis ``None`` are shared by all
    elements, and the values written to them must not depend on the element.

    Args:
        f: The function.
        in_axes: The axis of each positional argument: an integer, ``None``, a pytree
            prefix of these or, for an object, a `StateAxes`. Keyword arguments are
            mapped over axis 0.
        out_axes: The axis of the output; new objects in it are stacked there.
        axis_name: A name for the axis, for collectives.
        axis_size: Its size, if no argument is mapped.
        spmd_axis_name: As in ``jax.vmap``.
        transform_metadata: ``{nnx.PARTITION_NAME: name}`` tells the annotations of the
            Variables about the axis.
        graph: The mode; ``None`` takes the default.
        graph_updates: Whether structural changes reach the caller's objects.

    Returns:
        The mapped function, or a decorator if ``f`` is not given.

    Raises:
        ValueError: If a prefix contains something that it can't, or ``f`` is a method
            bound to a Module; at a call, for aliases with different axes.

    Example:
        >>> @nnx.vmap(in_axes=0, out_axes=0)
        ... def make(key):
        ...     return nnx.Linear(2, 3, rngs=nnx.Rngs(key))
        >>> make(jax.random.split(jax.random.key(0), 5)).kernel.shape
        (5, 2, 3)
    """
    mode = config.propagation(graph, graph_updates)
    spec = TransformSpec(
        "vmap",
        mode,
        Prefix(in_axes, "in_axes", "vmap", mode, keywords=0),
        Prefix(out_axes, "out_axes", "vmap", mode),
        axis_metadata=transform_metadata,
    )

    def transform(inner: Callable[..., Any], ins: Any, outs: Any) -> Any:
        mapped = jax.vmap(
            inner,
            in_axes=ins,
            out_axes=outs,
            axis_name=axis_name,
            axis_size=axis_size,
            spmd_axis_name=spmd_axis_name,
        )

        def with_hints(*groups: Leaves) -> Any:
            try:
                return mapped(*groups)
            except Exception as error:
                _hint_at_rngs(error, groups, ins)
                if out_axes is not None:
                    _hint_at_shared_writes(error, axis_name)
                tracer_leaks.hint(error, groups, ins)
                raise

        return with_hints

    def make(function: Callable[..., Any]) -> Callable[..., Any]:
        function_spec = spec.holding(function)
        calls = dispatch.Calls(function, function_spec)
        return caller.lift(function, transform, function_spec, calls.run)

    return decorators.decorate(f, "vmap", make)


@decorators.keeps_type
def pmap(
    f: Any = decorators.MISSING,
    *,
    axis_name: Any = None,
    in_axes: Any = 0,
    out_axes: Any = 0,
    static_broadcasted_argnums: int | Sequence[int] = (),
    devices: Any = None,
    backend: str | None = None,
    axis_size: int | None = None,
    donate_argnums: int | Sequence[int] = (),
    transform_metadata: Mapping[str, Any] = _NO_METADATA,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Maps a function over devices with ``jax.pmap``; otherwise like `vmap`.

    With graph updates it takes no keyword arguments.

    Args:
        f: The function.
        axis_name: A name for the axis, for collectives.
        in_axes: See `vmap`.
        out_axes: See `vmap`.
        static_broadcasted_argnums: Positions of arguments that are compile-time
            constants; they have entries in a tuple ``in_axes``, which don't count.
        devices: As in ``jax.pmap``, like the next two.
        backend: See ``devices``.
        axis_size: See ``devices``.
        donate_argnums: Positions of arguments whose buffers may be reused. Donated
            Variables stay readable; donated arrays don't.
        transform_metadata: See `vmap`.
        graph: The mode; ``None`` takes the default.
        graph_updates: Whether structural changes reach the caller's objects.

    Returns:
        The mapped function, or a decorator if ``f`` is not given.

    Raises:
        ValueError: See `vmap`.
        TypeError: At a call, for keyword arguments with graph updates.

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> apply = nnx.pmap(lambda m, x: m(x), in_axes=(None, 0))
        >>> apply(model, jnp.ones((1, 4, 2))).shape
        (1, 4, 3)
    """
    mode = config.propagation(graph, graph_updates)
    outputs = Prefix(out_axes, "out_axes", "pmap", mode)

    def make(function: Callable[..., Any]) -> Callable[..., Any]:
        statics = decorators.choose(function, "static", static_broadcasted_argnums)
        donated = decorators.choose(function, "donate", donate_argnums)
        decorators.check_disjoint(statics, donated)
        inputs = Prefix(
            _without(statics, in_axes),
            "in_axes",
            "pmap",
            mode,
            keywords=0,
            donation=Donation(donated, keeps_arrays=mode.structure),
        )
        spec = TransformSpec(
            "pmap",
            mode,
            inputs,
            outputs,
            statics=statics or None,
            keywords=(Keywords.STAY, Keywords.REFUSED),
            axis_metadata=transform_metadata,
            signatures=Interned(),
        ).holding(function)

        def transform(inner: Callable[..., Any], ins: Any, outs: Any) -> Any:
            # JAX takes a tuple of plain axes for those of single leaves if there are as
            # many leaves as arguments. So groups and axes go in tuples of their own.
            def unwrapped(*singletons: Any) -> Any:
                return inner(*[group for (group,) in singletons])

            mapped = jax.pmap(
                debug_info.named_after(inner, unwrapped),
                axis_name,
                in_axes=tuple([(_or_front(axis),) for axis in ins]),
                out_axes=jax.tree.map(_or_front, outs),
                devices=devices,
                backend=backend,
                axis_size=axis_size,
                donate_argnums=sorted(spec.inputs.donated),
            )

            def moved(*groups: Any) -> Any:
                tracer_leaks.refuse(groups, "pmap", "takes no array refs")
                singletons = [(x,) for x in _move(groups, ins, lambda axis: (axis, 0))]
                return _move(mapped(*singletons), outs, lambda axis: (0, axis))

            return moved

        calls = dispatch.Calls(function, spec)
        return caller.lift(function, transform, spec, calls.run)

    return decorators.decorate(f, "pmap", make)


def _hint_at_rngs(error: Exception, groups: Sequence[Leaves], axes: Any) -> None:
    """Adds the way out to JAX's error about random streams that have no axis."""
    streams = [
        leaf_spec.name
        for group, axis in zip(groups, axes, strict=True)
        for leaf_spec, value in group.pairs()
        if axis is not None and getattr(value, "shape", None) == ()
        if leaf_spec.variable and issubclass(leaf_spec.variable.type, RngState)
    ]
    if streams and isinstance(error, ValueError):
        error.add_note(
            f"These random streams have no axis: {', '.join(streams)}.\n"
            "Split them first: rngs.split(n), or @nnx.split_rngs(splits=n) on top of "
            "nnx.vmap; or give them the axis None."
        )


# JAX's words for a map without a name of its axis, and with one.
_SHARED_WRITE = r"out_axes\(new .* None but|mapped output .* out_axes is None"


def _hint_at_shared_writes(error: Exception, axis_name: Any) -> None:
    """Adds the ways out to JAX's error about a write to a Variable without an axis."""
    if re.search(_SHARED_WRITE, str(error)):
        name = "batch" if axis_name is None else axis_name
        error.add_note(
            "Each mapped call writes a different value to a Variable that all calls "
            "share: its object has the axis None.\nA BatchNorm averages over the calls "
            f"if it knows the axis: BatchNorm(..., axis_name={name!r}) and\n"
            f"nnx.vmap(..., axis_name={name!r}). Average other values with "
            f"jax.lax.pmean(x, {name!r}) before\nyou write them; or give the object "
            "an axis, so that each call has its own."
        )


# For jax.pmap, negative axes differ from those of jax.vmap. They are in front there,
# and moved outside of it.


def _or_front(axis: Any) -> Any:
    return None if axis is None else max(axis, 0)


def _move(
    groups: Any, axes: Any, source_and_target: Callable[[int], tuple[int, int]]
) -> Any:
    def move(axis: Any, group: Any) -> Any:
        if axis is None or axis >= 0:
            return group
        return jax.tree.map(lambda x: jnp.moveaxis(x, *source_and_target(axis)), group)

    return jax.tree.map(move, axes, groups, is_leaf=lambda axis: axis is None)


def _without(statics: decorators.Chosen, in_axes: Any) -> Any:
    """Leaves out the axes of static arguments."""
    if not statics or not isinstance(in_axes, (tuple, list)):
        return in_axes
    static_positions = statics.positions(len(in_axes))
    return tuple(x for i, x in enumerate(in_axes) if i not in static_positions)


@decorators.keeps_type
def transform_metadata(
    f: Any = decorators.MISSING,
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    partition: str | None,
    graph: bool | None = None,
) -> Any:
    """Keeps the sharding annotations of Variables correct in a mapped function.

    `vmap` does that itself if you pass it ``transform_metadata``; this is for any
    transform that removes an axis, such as ``jax.vmap`` and ``jax.lax.scan``. Wrap the
    function inside it, with the same axes. The function sees Variables without the name
    of the axis; its writes to them are kept, and new Variables that it returns get the
    name.

    Args:
        f: The function. Its keyword arguments become positional ones.
        in_axes: See `vmap`. Other axes have no name to change.
        out_axes: See ``in_axes``.
        partition: The name of the axis in ``out_sharding``; ``None`` if it has none.
        graph: The mode; ``None`` takes the default.

    Returns:
        The wrapped function, or a decorator if ``f`` is not given.

    Raises:
        ValueError: If a prefix contains something that it can't; at a call, if the
            annotation of a Variable has another name, or if an argument is returned.

    Example:
        >>> @jax.vmap
        ... @nnx.transform_metadata(partition="layers")
        ... def make(key):
        ...     return nnx.Param(
        ...         jax.random.normal(key, 2), out_sharding=("a",), eager_sharding=False
        ...     )
        >>> make(jax.random.split(jax.random.key(0), 3)).out_sharding
        ('layers', 'a')
    """
    name, mode = "transform_metadata", config.propagation(graph, False)
    spec = TransformSpec(
        name,
        mode,
        Prefix(in_axes, "in_axes", name, mode, keywords=None),
        Prefix(out_axes, "out_axes", name, mode),
        keywords=(Keywords.BECOME_POSITIONAL, Keywords.BECOME_POSITIONAL),
        axis_metadata={PARTITION_NAME: partition},
        maps_axis=False,
    )

    def make(function: Callable[..., Any]) -> Callable[..., Any]:
        return caller.lift(
            function, lambda inner, ins, outs: inner, spec.holding(function)
        )

    # It takes methods bound to a Module, which are arguments.
    return decorators.decorate(f, name, make, takes_methods=True)


@decorators.keeps_type
def shard_map(
    f: Any = decorators.MISSING,
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

    The function sees Variables and arrays with the shapes of the parts that their specs
    give to one device. A value that it writes to a Variable comes back with its spec.
    With graph updates, all Variables with a spec come back sharded by it, even those
    that the function did not write.

    Args:
        f: The function; it takes only positional arguments.
        mesh: The devices.
        in_specs: The spec of each argument: a ``PartitionSpec``, or a pytree prefix of
            them; for an object it may be a `StateSharding`.
        out_specs: The specs of the output; ``None`` is the empty spec.
        axis_names: The axes of the mesh over which ``f`` is split; none for all.
        check_vma: As in ``jax.shard_map``.
        graph: The mode; ``None`` takes the default.
        graph_updates: Whether structural changes reach the caller's objects.

    Returns:
        The sharded function, or a decorator if ``f`` is not given. Its ``inner`` is the
        result of ``jax.shard_map``.

    Raises:
        ValueError: If a prefix contains something that it can't, or ``f`` is a method
            bound to a Module; at a call, for aliases with different specs.
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
    spec = TransformSpec(
        "shard_map",
        mode,
        Prefix(in_specs, "in_specs", "shard_map", mode, keywords=None),
        Prefix(out_specs, "out_specs", "shard_map", mode),
        keywords=(Keywords.REFUSED, Keywords.REFUSED),
        returns_placed=True,
    )

    def transform(inner: Callable[..., Any], ins: Any, outs: Any) -> Any:
        # For JAX, None is an output without leaves.
        in_specs, out_specs = jax.tree.map(
            lambda x: PartitionSpec() if x is None else x,
            (ins, outs),
            is_leaf=lambda x: x is None,
        )
        mapped = jax.shard_map(
            inner,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=axis_names,
            check_vma=check_vma,
        )

        def sharded(*groups: Any) -> Any:
            if _jax.is_staging() is False:  # `None` where nobody knows: JAX may refuse
                reason = "takes array refs under jax.jit only"
                tracer_leaks.refuse(groups, "shard_map", reason)
            _check_parts(groups, ins, mesh)
            return mapped(*groups)

        return sharded

    return decorators.decorate(
        f, "shard_map", lambda f: caller.lift(f, transform, spec.holding(f))
    )


def _check_parts(groups: Sequence[Leaves], specs: Sequence[Any], mesh: Any) -> None:
    """Refuses arrays that can't be split; JAX would name them by their group."""
    for group, spec in zip(groups, specs, strict=True):
        for name, value in group.named() if isinstance(spec, PartitionSpec) else ():
            for x in jax.tree.leaves(value):
                problem = _problem(jnp.shape(x), spec, getattr(mesh, "shape", {}))
                if problem:
                    raise ValueError(
                        errors.message(
                            f"nnx.shard_map can't split an argument: {problem}.",
                            where=f"{name}: {jax.typeof(x).str_short()}, by {spec}",
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
