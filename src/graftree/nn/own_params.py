"""Params of a module's own that count as something else than what they store.

Their module computes with them in code that nobody else knows: it reads ``self.w``. To
have it compute with a low-rank change, or in another dtype, its class is replaced by a
subclass in which these attributes are descriptors. Reading one gives a read-only
`CountedParam`; what is stored stays in ``vars``, as the same Variable at the same path.
PyTorch does the same in ``torch.nn.utils.parametrize``.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from graftree import errors
from graftree.core.modules import containers
from graftree.core.modules.modules import Module
from graftree.core.objects import pytrees
from graftree.core.variables import metadata as variable_metadata, values, variables
from graftree.core.variables.kinds import Param
from graftree.core.variables.variables import A, Variable
from graftree.nn import compute_dtypes


class AdaptedParams(containers.Dict[Any]):
    """The attribute ``lora`` of a module: the changes of its own Params, by name."""


class CountedParam(Param[A]):
    """What a Param counts as in the code of its module; it can't be written."""

    def _check_valid_context(self, error_msg: Any) -> None:
        raise errors.ImmutableVariableError(
            errors.message(
                "This Param can't be written: it is computed from a stored one, with a "
                "low-rank adaptation or in the dtype of a policy.",
                way_out="Write to the stored Param: vars(module)['name'][...] = value, "
                "or replace it: module.name = nnx.Param(value).",
            )
        )


def adaptations_of(module: Any) -> Mapping[str, Any]:
    """Reads the low-rank changes of a module's own Params, by name."""
    changes = vars(module).get("lora")
    return changes if isinstance(changes, AdaptedParams) else {}


def names_in(module: Any) -> list[str]:
    """Lists attributes of a module that are Params, which its code reads by name."""
    if not isinstance(module, Module) or isinstance(
        module, (containers.List, containers.Dict)
    ):
        return []
    return [name for name, x in vars(module).items() if compute_dtypes.is_param(x)]


def update(module: Any) -> None:
    """Gives a module the class for its adaptations and its dtype, or its own back."""
    names = {*adaptations_of(module)}
    if compute_dtypes.PARAMS_DTYPE in vars(module):
        names.update(names_in(module))
    plain = plain_class(type(module))
    cls = _reading_class(plain, frozenset(names)) if names else plain
    if type(module) is not cls:
        module.__class__ = cls


def plain_class(cls: type) -> type:
    """Finds the class that a module had before `update`."""
    return cls.__bases__[0] if isinstance(cls, _ReadingMeta) else cls


# Classes.


class _Reading:
    """An attribute that gives what the Param that it holds counts as.

    Args:
        name: The name of the attribute.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        if module is None:
            return self
        if self._name not in vars(module):
            kind = type(module).__name__
            raise AttributeError(f"{kind!r} object has no attribute {self._name!r}")
        stored = vars(module)[self._name]
        return _counted(module, self._name, stored)

    def __set__(self, module: Any, value: Any) -> None:
        module.__class__ = plain_class(type(module))
        setattr(module, self._name, value)
        update(module)

    def __delete__(self, module: Any) -> None:
        module.__class__ = plain_class(type(module))
        delattr(module, self._name)
        update(module)


class _PlainSubclass:
    """In the MRO before the user's class, whose hooks must not see the subclass."""

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        pytrees.Pytree.__init_subclass__.__func__(cls, **options)


class _ReadingMeta(type):
    """Puts `_PlainSubclass` into the MRO; as a base it would change the layout."""

    def mro(cls) -> list[type]:
        return [cls, _PlainSubclass, *super().mro()[1:]]


@functools.cache
def _reading_class(cls: type, names: frozenset[str]) -> type:
    """A subclass whose attributes of these names are read as what they count as."""
    namespace = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        **{name: _Reading(name) for name in sorted(names)},
    }
    reading = _reading_metaclass(type(cls))(cls.__name__, (cls,), namespace)
    reading._reads = names
    return reading


@functools.cache
def _reading_metaclass(metaclass: type) -> Any:
    reading = type(metaclass.__name__, (_ReadingMeta, metaclass), {})
    # Such a class is not the one that its module has under its name.
    copyreg.pickle(reading, _reduced)
    return reading


def _reduced(cls: Any) -> tuple[Any, ...]:
    return _reading_class, (plain_class(cls), cls._reads)


# Values.


def _counted(module: Any, name: str, stored: Any) -> Any:
    """What an attribute counts as; the Variable itself if nothing differs."""
    if not isinstance(stored, Variable):
        return stored
    read = value = stored.get_value()
    change = adaptations_of(module).get(name)
    if change is not None and not values.is_stand_in(value):
        value = change.added_to(value)
    dtype = vars(module).get(compute_dtypes.PARAMS_DTYPE)
    if dtype is not None:
        value = in_dtype(value, dtype)
    if value is read:
        return stored
    entries = {
        key: x
        for key, x in variables.metadata_of(stored).items()
        if key not in (*variable_metadata.HOOKS, variable_metadata.FROZEN_TYPE)
    }
    flags = {"ref": False, "hijax": False}
    return CountedParam.from_metadata(value, entries | flags)


def in_dtype(value: Any, dtype: Any) -> Any:
    """A value with its floating arrays in a dtype; the same object if unchanged."""
    leaves = jax.tree.leaves(value)
    if all(_array_in_dtype(x, dtype) is x for x in leaves):
        return value
    return jax.tree.map(lambda x: _array_in_dtype(x, dtype), value)


def _array_in_dtype(x: Any, dtype: Any) -> Any:
    is_array = isinstance(x, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))
    if not is_array or not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype == dtype:
        return x
    return (
        x.update(dtype=dtype)
        if isinstance(x, jax.ShapeDtypeStruct)
        else x.astype(dtype)
    )
