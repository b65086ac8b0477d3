"""What Variables do with the values they hold."""

from __future__ import annotations

from typing import Any

import jax

from graftree import _jax
from graftree.core import operators

_is_array_type: dict[type, bool] = {}


def is_array(value: Any) -> bool:
    """Whether a value is a JAX array or a tracer of one."""
    kind = type(value)
    known = _is_array_type.get(kind)
    if known is None:
        # A traced ref has the type of a traced array, so tracers are asked one by one.
        if issubclass(kind, jax.core.Tracer):
            return not _jax.is_ref(value)
        known = _is_array_type[kind] = issubclass(kind, jax.Array)
    return known


def contains_ref(value: Any) -> bool:
    """Whether there is a ref in a value."""
    if is_array(value):
        return False
    kind = type(value)
    # Not left to JAX, which wants the keys of a dict to be sortable.
    if kind is dict:
        return any(map(contains_ref, value.values()))
    if kind is list or kind is tuple:
        return any(map(contains_ref, value))
    return any(map(_jax.is_ref, jax.tree.leaves(value)))


def copy_containers(value: Any) -> Any:
    """Copies lists, dicts and tuples, of subclasses too; what they hold is shared."""
    kind = type(value)
    if kind is dict:
        return {key: copy_containers(item) for key, item in value.items()}
    if kind is list:
        return [copy_containers(item) for item in value]
    if kind is tuple:
        return tuple([copy_containers(item) for item in value])
    if isinstance(value, (dict, tuple)):
        items, treedef = jax.tree.flatten(value, is_leaf=lambda x: x is not value)
        if len(items) != 1 or items[0] is not value:
            return treedef.unflatten(map(copy_containers, items))
    return value


def unwrap(value: Any) -> Any:
    """The value of a Variable; any other value as it is."""
    return value.get_value() if isinstance(value, operators.ValueOperators) else value


def can_be_ref(value: Any) -> bool:
    """Whether a value can be stored in a ref; stand-ins for arrays can't."""
    return not isinstance(value, (jax.ShapeDtypeStruct, jax.sharding.PartitionSpec))


def write_at(raw: Any, index: Any, value: Any) -> Any:
    """The array with a part of it replaced; its shape, dtype and sharding stay."""
    if index is Ellipsis and is_array(value) and _jax.same_type(raw, value):
        return value
    return raw.at[index].set(value)
