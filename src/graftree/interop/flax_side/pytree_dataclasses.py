"""Dataclasses that are JAX pytrees: ``flax.struct``.

Fields are children of the pytree (at paths ``GetAttrKey(name)``); those declared with
``field(pytree_node=False)`` are part of its structure, so they must be hashable where
JAX compares structures. Instances are frozen unless asked otherwise, have `replace`,
and convert to state dicts, which hold the children only.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Self, dataclass_transform

import jax

from graftree.interop.flax_side import state_dicts

_MARK = "_flax_dataclass"


def field(
    pytree_node: bool = True,
    *,
    metadata: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Declares a field of a pytree dataclass.

    Args:
        pytree_node: Whether its value is a child of the pytree; else it is static.
        metadata: More metadata of the field.
        **kwargs: Those of `dataclasses.field`, such as ``default``.

    Returns:
        The field.

    Example:
        >>> from graftree.interop.flax_side import pytree_dataclasses
        >>> pytree_dataclasses.field(pytree_node=False).metadata["pytree_node"]
        False
    """
    entry = {"pytree_node": pytree_node}
    return dataclasses.field(metadata={**(metadata or {}), **entry}, **kwargs)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def dataclass(clz: Any = None, **kwargs: Any) -> Any:
    """Turns a class into a dataclass that is a JAX pytree.

    Args:
        clz: The class; without it, a decorator is returned.
        **kwargs: Those of `dataclasses.dataclass`; ``frozen`` is True by default.

    Returns:
        The class (a new one with ``slots=True``). A class that is already decorated
        is returned as it is.

    Raises:
        TypeError: If ``clz`` is not a class.

    Example:
        >>> from graftree.interop.flax_side import pytree_dataclasses as struct
        >>> @struct.dataclass
        ... class Moments:
        ...     mean: float
        ...     name: str = struct.field(pytree_node=False, default="x")
        >>> jax.tree.leaves(Moments(2.0)), Moments(2.0).replace(mean=3.0)
        ([2.0], Moments(mean=3.0, name='x'))
    """
    if clz is None:
        return functools.partial(dataclass, **kwargs)
    if not isinstance(clz, type):
        raise TypeError(f"A dataclass is made from a class, got {clz!r}.")
    if _MARK in vars(clz):
        return clz
    data_class = dataclasses.dataclass(**{"frozen": True, **kwargs})(clz)
    names: dict[bool, list[str]] = {True: [], False: []}
    for one in dataclasses.fields(data_class):
        names[one.metadata.get("pytree_node", True)].append(one.name)
    jax.tree_util.register_dataclass(data_class, names[True], names[False])
    children = names[True]
    state_dicts.register_serialization_state(
        data_class,
        functools.partial(_to_state_dict, children),
        functools.partial(_from_state_dict, children),
    )
    setattr(data_class, "replace", _replace)  # noqa: B010
    setattr(data_class, _MARK, True)
    return data_class


def _replace(self: Any, **updates: Any) -> Any:
    """Returns a new object with new values of some fields."""
    return dataclasses.replace(self, **updates)


_replace.__name__ = "replace"


def _to_state_dict(names: list[str], target: Any) -> dict[str, Any]:
    return {name: state_dicts.to_state_dict(getattr(target, name)) for name in names}


def _from_state_dict(names: list[str], target: Any, state: Mapping[str, Any]) -> Any:
    kind, path = type(target).__name__, state_dicts.current_path()
    if missing := [name for name in names if name not in state]:
        raise ValueError(
            f"Missing field {', '.join(missing)} in state dict while restoring an "
            f"instance of {kind}, at path {path}"
        )
    if unknown := [key for key in state if key not in names]:
        raise ValueError(
            f'Unknown field(s) "{", ".join(unknown)}" in state dict while restoring an '
            f"instance of {kind} at path {path}"
        )
    children = {name: getattr(target, name) for name in names}
    return target.replace(**state_dicts.restore_dict(children, state))


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class PyTreeNode:
    """A base class whose subclasses are pytree dataclasses without a decorator.

    Keywords of the class statement are those of `dataclasses.dataclass`.

    Example:
        >>> from graftree.interop.flax_side import pytree_dataclasses as struct
        >>> class Point(struct.PyTreeNode, kw_only=True):
        ...     x: float
        ...     y: float
        >>> jax.tree.map(lambda value: 2 * value, Point(x=1, y=2))
        Point(x=2, y=4)
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__()
        dataclass(cls, **kwargs)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("PyTreeNode has no fields: make a subclass of it.")

    def replace(self, **overrides: Any) -> Self:
        """Returns a new object with new values of some fields."""
        raise NotImplementedError("PyTreeNode has no fields: make a subclass of it.")
