"""Kinds of Variables, and their names: ``"params"`` is `Param`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast, overload

from graftree.core.variables import metadata, variables
from graftree.core.variables.variables import MISSING, A, Variable

V = TypeVar("V", bound=type[Variable[Any]])


class Param(Variable[A]):
    """A parameter that training changes by gradients.

    Example:
        >>> kernel = nnx.Param(jnp.ones((2, 3)))
        >>> (jnp.ones((1, 2)) @ kernel).shape
        (1, 3)
    """


class BatchStat(Variable[A]):
    """A running statistic, e.g. the mean of batch normalization.

    Example:
        >>> nnx.BatchStat(jnp.zeros(3)).shape
        (3,)
    """


class Cache(Variable[A]):
    """A cache, e.g. of keys and values while decoding.

    Example:
        >>> nnx.Cache(jnp.zeros((1, 8))).shape
        (1, 8)
    """


class Intermediate(Variable[A]):
    """A value recorded during a call, e.g. by ``Module.sow``.

    Example:
        >>> nnx.Intermediate((1.0, 2.0)).get_value()
        (1.0, 2.0)
    """


class Perturbation(Intermediate[A]):
    """A zero added to a value during a call, so that gradients reach that value.

    Example:
        >>> isinstance(nnx.Perturbation(jnp.zeros(3)), nnx.Intermediate)
        True
    """


def kind_of(variable: Variable[Any]) -> type[Variable[Any]]:
    """Returns the class of a Variable; of a frozen one the class that it had before."""
    type_before_freeze = variables.metadata_of(variable).get(metadata.FROZEN_TYPE)
    return (
        type_before_freeze if isinstance(type_before_freeze, type) else type(variable)
    )


# A type may have several names; its own is the first.
TYPES: dict[str, type[Variable[Any]]] = {
    "params": Param,
    "batch_stats": BatchStat,
    "cache": Cache,
    "intermediates": Intermediate,
    "perturbations": Perturbation,
}


def variable_type_from_name(
    name: str, /, *, base: type[Variable[Any]] = Variable, allow_register: bool = False
) -> type[Variable[Any]]:
    """Returns the Variable type that is registered under a name.

    Args:
        name: A registered name.
        base: The base class of a new type.
        allow_register: Whether to make and register a new type for an unknown name.

    Raises:
        ValueError: If the name is unknown and may not be registered.

    Example:
        >>> nnx.variable_type_from_name("params").__name__
        'Param'
    """
    if name not in TYPES:
        if not allow_register:
            raise ValueError(
                f"There is no Variable type named {name!r}; the known names are "
                f"{sorted(TYPES)}.\nRegister one with nnx.register_variable_name("
                f"{name!r}, type), or pass allow_register=True."
            )
        TYPES[name] = cast(Any, type(base))(name, (base,), {})
    return TYPES[name]


def variable_name_from_type(
    typ: type[Variable[Any]], /, *, allow_register: bool = False
) -> str:
    """Returns the first name under which a Variable type is registered.

    Args:
        typ: The type; its subclasses have their own names.
        allow_register: Whether to register an unknown type under its class name.

    Raises:
        ValueError: If the type has no name, or its class name is that of another type.

    Example:
        >>> nnx.variable_name_from_type(nnx.BatchStat)
        'batch_stats'
    """
    for name, registered in TYPES.items():
        if registered is typ:
            return name
    if not allow_register:
        raise ValueError(
            f"The Variable type {typ.__name__} has no name. Register one with "
            "nnx.register_variable_name(name, type), or pass allow_register=True."
        )
    name = typ.__name__
    if name in TYPES:
        raise ValueError(
            f"Cannot register {typ} as {name!r}: that is the name of {TYPES[name]}."
        )
    TYPES[name] = typ
    return name


@overload
def register_variable_name(name: str, *, overwrite: bool = ...) -> Callable[[V], V]: ...
@overload
def register_variable_name(name: str, typ: V, *, overwrite: bool = ...) -> V: ...
def register_variable_name(
    name: str, typ: Any = MISSING, *, overwrite: bool = False
) -> Any:
    """Registers a Variable type under a name.

    Args:
        name: The name.
        typ: The type; leave it out to get a class decorator.
        overwrite: Whether to take the name from another type that has it.

    Returns:
        ``typ``, or a decorator.

    Raises:
        ValueError: If the name is taken.

    Example:
        >>> @nnx.register_variable_name("readings")
        ... class Reading(nnx.Variable):
        ...     pass
        >>> nnx.variable_type_from_name("readings") is Reading
        True
    """
    if typ is MISSING:
        return lambda cls: register_variable_name(name, cls, overwrite=overwrite)
    if name in TYPES and not overwrite:
        raise ValueError(
            f"The name {name!r} is taken by {TYPES[name].__name__}; pass "
            "overwrite=True to give it to another type."
        )
    TYPES[name] = typ
    return typ
