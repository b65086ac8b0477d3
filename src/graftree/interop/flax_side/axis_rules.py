"""Rules from logical axis names to mesh axes: ``flax.core.spmd``.

The rules in force are those of ``nnx.logical_axis_rules``; only the forms in which Flax
takes and returns annotations are added here.
"""

from __future__ import annotations

from typing import Any

from jax.sharding import PartitionSpec

from graftree.core.variables import sharding as shardings

AxisRules = shardings.AxisRules

logical_axis_rules = shardings.logical_axis_rules
set_logical_axis_rules = shardings.set_logical_axis_rules
get_logical_axis_rules = shardings.get_logical_axis_rules
composite_rules = shardings.composite_rules


def from_sharding_rules(sharding: Any, sharding_rules: AxisRules) -> tuple[Any, ...]:
    """Renames the axes of an annotation by rules.

    Args:
        sharding: An entry per dimension: a name, a tuple of names, or None.
        sharding_rules: Pairs of a logical name and what it stands for.

    Returns:
        A tuple with an entry per dimension; names without a rule stay as they are.

    Example:
        >>> from graftree.interop.flax_side import axis_rules
        >>> axis_rules.from_sharding_rules(("batch", None), [("batch", "data")])
        ('data', None)
    """
    return tuple(shardings.from_sharding_rules(sharding, sharding_rules))


def apply_rules(sharding: Any, sharding_rules: AxisRules | None) -> PartitionSpec:
    """The PartitionSpec of an annotation under some rules and those in force.

    Example:
        >>> from graftree.interop.flax_side import axis_rules
        >>> axis_rules.apply_rules(("batch",), [("batch", "data")])
        P('data',)
    """
    return shardings.get_pspec(sharding, sharding_rules)


def get_pspec(
    sharding: Any, sharding_rules: AxisRules | None = None
) -> PartitionSpec | None:
    """The PartitionSpec of an annotation under some rules and those in force.

    Args:
        sharding: A tuple, PartitionSpec or NamedSharding, or None.
        sharding_rules: Further rules, or None.

    Returns:
        The spec; None if there is no annotation.

    Raises:
        ValueError: If the rules contradict those in force.

    Example:
        >>> from graftree.interop.flax_side import axis_rules
        >>> with nnx.logical_axis_rules([("batch", "data")]):
        ...     axis_rules.get_pspec(("batch", None))
        P('data', None)
    """
    if sharding is None:
        return None
    return shardings.get_pspec(sharding, sharding_rules)


def shard_value(
    value: Any, out_sharding: Any, sharding_rules: AxisRules | None, mesh: Any
) -> Any:
    """Puts a pytree of arrays where an annotation says.

    Args:
        value: The arrays.
        out_sharding: An entry per dimension, or None for no change.
        sharding_rules: Further rules, or None.
        mesh: The mesh, or None for the one in force.

    Returns:
        The arrays on their devices.

    Raises:
        ValueError: If there is no mesh.

    Example:
        >>> from graftree.interop.flax_side import axis_rules
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> axis_rules.shard_value(jnp.ones(2), ("data",), None, mesh).sharding.spec
        P('data',)
    """
    metadata = {
        "out_sharding": out_sharding,
        "sharding_rules": sharding_rules,
        "mesh": mesh,
    }
    return shardings.place(value, metadata)
