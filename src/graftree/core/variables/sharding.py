"""Partition annotations of Variables: axis rules, specs, and placement at creation.

A Variable may name, per dimension, the mesh axis that splits it (metadata
``out_sharding``). Names may be logical: rules map them to mesh axes. Metadata keeps the
logical names; only specs and placed arrays see the mesh axes.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from graftree import _jax, config

AxisRules = Sequence[tuple[str, Any]]


class use_eager_sharding(config.ScopedDefault):
    """Sets whether annotated Variables are placed on the mesh when they are made.

    Args:
        value: ``True`` to place them at creation.

    Example:
        >>> with nnx.use_eager_sharding(False):
        ...     nnx.using_eager_sharding()
        False
    """

    flag = "flax_always_shard_variable"


def using_eager_sharding() -> bool:
    """Whether annotated Variables are placed on the mesh when they are made.

    Example:
        >>> nnx.using_eager_sharding()
        True
    """
    return use_eager_sharding.current_value()


class _ThreadRules(threading.local):
    in_force: AxisRules = ()


_rules: Any = _ThreadRules()


def keep_rules_in(store: Any) -> Any:
    """Keeps the rules in another object, as ``in_force``; returns the former one."""
    global _rules
    former, _rules = _rules, store
    return former


def get_logical_axis_rules() -> AxisRules:
    """Returns the rules in force in this thread."""
    return _rules.in_force


def set_logical_axis_rules(rules: AxisRules) -> None:
    """Puts rules in force in this thread, within the innermost context."""
    _rules.in_force = rules
    config.trace_under("logical_axis_rules", _hashable(rules) or None)


def _hashable(x: Any) -> Any:
    return tuple(map(_hashable, x)) if isinstance(x, (list, tuple)) else x


@contextlib.contextmanager
def logical_axis_rules(rules: AxisRules) -> Iterator[None]:
    """Maps logical axis names to mesh axes within a context.

    The rules replace those of an outer context.

    Args:
        rules: Pairs of a logical name and a mesh axis, a tuple of mesh axes or
            ``None``.

    Raises:
        TypeError: If they are not pairs.

    Example:
        >>> kernel = nnx.Param(
        ...     jnp.ones((2, 3)), out_sharding=("embed", None), eager_sharding=False
        ... )
        >>> with nnx.logical_axis_rules([("embed", "model")]):
        ...     tuple(nnx.spmd.get_var_pspec(kernel))
        ('model', None)
    """
    outer = _rules.in_force
    rules = _checked_pairs(rules)
    set_logical_axis_rules(rules)
    try:
        yield
    finally:
        set_logical_axis_rules(outer)


def _checked_pairs(rules: Any) -> AxisRules:
    pairs = rules if isinstance(rules, Mapping) else tuple(rules)
    if isinstance(pairs, Mapping) or not all(
        isinstance(rule, (tuple, list)) and len(rule) == 2 for rule in pairs
    ):
        raise TypeError(
            f"Logical axis rules are pairs of a name and an axis of the mesh, got "
            f"{pairs!r}.\nWrite [('embed', 'model'), ...]; for a dict, pass its "
            ".items()."
        )
    return pairs


def composite_rules(first: AxisRules, second: AxisRules) -> AxisRules:
    """Joins two lists of rules; the same name must not mean two things."""
    merged = dict(first)
    for name, axis in second:
        if merged.setdefault(name, axis) != axis:
            raise ValueError(
                f"Inconsistent logical axis annotations for {name!r}: "
                f"{merged[name]!r} and {axis!r}."
            )
    return tuple(merged.items())


def from_sharding_rules(sharding: Any, rules: AxisRules) -> PartitionSpec:
    """Renames the axes of an annotation by ``rules``; other names stay as they are."""
    table = dict(rules)
    return PartitionSpec(*(_rename(entry, table) for entry in sharding))


def _rename(entry: Any, table: Mapping[str, Any]) -> Any:
    if isinstance(entry, (tuple, list)):
        return tuple(table.get(name, name) for name in entry)
    return table.get(entry, entry)


def get_pspec(sharding: Any, rules: AxisRules | None = None) -> PartitionSpec:
    """Returns an annotation's PartitionSpec under the rules in force and ``rules``."""
    if isinstance(sharding, NamedSharding):
        sharding = sharding.spec
    if isinstance(sharding, str):
        raise TypeError(
            f"A partition annotation is a tuple with an entry per dimension, "
            f"got the string {sharding!r}; write ({sharding!r},)."
        )
    in_force = composite_rules(_rules.in_force, _checked_pairs(rules or ()))
    return from_sharding_rules(sharding, in_force)


def place(value: Any, metadata: Mapping[str, Any]) -> Any:
    """Places a new Variable's value according to its annotation."""
    annotation = metadata.get("out_sharding")
    if not annotation:
        return value
    if _jax.is_format(annotation):
        return jax.tree.map(lambda leaf: _place_format(leaf, annotation), value)
    sharding = named_sharding(annotation, metadata)
    return jax.tree.map(lambda leaf: _place_leaf(leaf, sharding), value)


def place_named(value: Any, metadata: Mapping[str, Any], axis: Any) -> Any:
    """Places a value according to its annotation, if the new axis divides the mesh.

    On axes of type Explicit it stays: JAX doesn't loop over an axis that is divided
    there, nor map values if only some are divided.
    """
    annotation = metadata.get("out_sharding")
    if (
        isinstance(annotation, tuple | list | PartitionSpec)
        and axis in annotation
        and metadata["eager_sharding"]
        # The name may be a logical one, without a rule for it.
        and _splits_mesh(axis, metadata)
    ):
        if jax.tree_util.all_leaves([value]):
            return place(value, metadata)
        # The numbers and scales of a quantized kernel: these have axes of size 1.
        layout = named_sharding(annotation, metadata)
        return jax.tree.map(lambda x: _place_leaf(x, _divisible(layout, x)), value)
    return value


def _divisible(layout: NamedSharding, leaf: Any) -> NamedSharding:
    """Leaves out what can't divide a leaf."""
    shape = np.shape(leaf)
    spec: list[Any] = [None] * len(shape)
    for i, entry in enumerate(layout.spec[: len(shape)]):
        names = entry if isinstance(entry, tuple) else (entry,)
        if shape[i] % math.prod(layout.mesh.shape.get(x, 1) for x in names) == 0:
            spec[i] = entry
    return layout.update(spec=PartitionSpec(*spec))


def _splits_mesh(axis: Any, metadata: Mapping[str, Any]) -> bool:
    """Whether an axis of an annotation stands for one of a mesh with Auto axes."""
    mesh = metadata.get("mesh") or jax.sharding.get_abstract_mesh()
    if {*mesh.axis_types} != {AxisType.Auto}:
        return False
    (entry,) = get_pspec((axis,), metadata.get("sharding_rules"))
    names = entry if isinstance(entry, tuple) else (entry,)
    return {*names} <= {*mesh.axis_names}


def kept(new: Any, old: Any) -> Any:
    """Places the next value of a Variable like the previous one if that is on a mesh.

    With Auto axes the compiler places the outputs of a program, and of each operation
    outside of one: a parameter that is on all devices would be divided like the
    gradients, and the next call would recompile.
    """
    are_traced = isinstance(new, _jax.Tracer), isinstance(old, _jax.Tracer)
    if not any(are_traced):
        return moved(new, old)
    if not all(are_traced) or not new.ndim or new.shape != old.shape:
        return new
    kinds = {*jax.sharding.get_abstract_mesh().axis_types}
    return _jax.placed_alike(new, old) if kinds == {AxisType.Auto} else new


def moved(new: Any, old: Any) -> Any:
    """Gives a value the sharding of another of its shape, if that is on a mesh."""
    if not isinstance(new, jax.Array) or new.shape != np.shape(old):
        return new
    if isinstance(new, _jax.Tracer):
        wanted, present = jax.typeof(old).sharding, jax.typeof(new).sharding
        if wanted.mesh.empty:  # then it is whole on each device
            wanted = present.update(spec=PartitionSpec(*(None,) * new.ndim))
        explicit = AxisType.Explicit in wanted.mesh.axis_types
        if not explicit or present == wanted:
            return new
        return jax.sharding.reshard(new, wanted)
    wanted = getattr(old, "sharding", None)
    # An array on a single device may move to the device of its gradients.
    if not isinstance(wanted, NamedSharding):
        return new
    if new.sharding.is_equivalent_to(wanted, new.ndim):
        return new
    return jax.device_put(new, wanted)


_SET_THE_MESH = (
    "No mesh is set, so JAX does not know where to put the arrays that it makes by "
    "itself, as in a gradient.\nSet it around the call: with jax.set_mesh(mesh): ..."
)


def explain(error: Exception) -> None:
    """Adds the way out to JAX's errors on Explicit axes, if no mesh is set."""
    is_typed = type(error).__name__ == "ShardingTypeError"
    if not is_typed and "into a mesh context" not in str(error):
        return
    notes = getattr(error, "__notes__", ())
    if jax.sharding.get_abstract_mesh().empty and _SET_THE_MESH not in notes:
        error.add_note(_SET_THE_MESH)


def named_sharding(annotation: Any, metadata: Mapping[str, Any]) -> NamedSharding:
    """Returns the NamedSharding that an annotation means on the mesh in force."""
    mesh = metadata.get("mesh")
    if mesh is None:
        mesh = jax.sharding.get_abstract_mesh()
        mesh = None if mesh.empty else mesh
    own_mesh = annotation.mesh if isinstance(annotation, NamedSharding) else None
    if own_mesh is not None and mesh is not None:
        if own_mesh.abstract_mesh != getattr(mesh, "abstract_mesh", mesh):
            raise ValueError(
                f"The mesh {own_mesh} of the annotation {annotation} differs from "
                f"the mesh {mesh} that is set; use the same mesh for both."
            )
    chosen = own_mesh or mesh
    if chosen is None:
        raise ValueError(
            "An auto mesh context or metadata is required to place the annotation "
            f"{annotation!r}: enter jax.set_mesh(mesh), give mesh=... as metadata, or "
            "pass eager_sharding=False."
        )
    return NamedSharding(chosen, get_pspec(annotation, metadata.get("sharding_rules")))


def _place_format(leaf: Any, annotation: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(sharding=annotation)
    on_devices = on_mesh(leaf, annotation.sharding)
    return jax.lax.with_sharding_constraint(on_devices, annotation)


def _place_leaf(leaf: Any, sharding: NamedSharding) -> Any:
    kinds = set(sharding.mesh.axis_types)
    auto, explicit = AxisType.Auto, AxisType.Explicit
    if kinds not in ({auto}, {explicit}):
        raise ValueError(
            "A mesh must have all axes as Explicit or all axes as Auto to place "
            f"Variables at creation, got {sharding.mesh.axis_types}."
        )
    if len(sharding.spec) > np.ndim(leaf):
        raise ValueError(
            f"The annotation {sharding.spec} has {len(sharding.spec)} entries, but the "
            f"value has {np.ndim(leaf)} dimensions; give one entry per dimension."
        )
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(sharding=sharding)
    leaf = on_mesh(leaf, sharding)
    if kinds == {explicit}:
        return jax.sharding.reshard(leaf, sharding)
    return jax.lax.with_sharding_constraint(leaf, sharding)


def on_mesh(leaf: Any, sharding: NamedSharding) -> Any:
    """Moves a value of other devices: JAX constrains only values on the mesh."""
    if isinstance(leaf, _jax.Tracer):
        return leaf
    mesh = sharding.mesh
    if isinstance(mesh, jax.sharding.AbstractMesh):
        mesh = _jax.concrete_mesh()
    return leaf if mesh is None else jax.device_put(leaf, sharding.update(mesh=mesh))
