"""What is known of a class of Pytrees.

It is kept here, not on the class, whose attributes all belong to the user. It is found
when first needed, and again after a change of what it depends on: the bases of a class,
a property, ``__setattr__``.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
import warnings
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from graftree import config
from graftree.core import stamps
from graftree.core.objects.attributes import AttributeTable, Naming

F = TypeVar("F", bound=Callable[..., Any])


class Facts:
    """What is known of one class.

    Attributes:
        is_pytree: Whether its instances are JAX pytrees.
        descriptors: The names of its properties and descriptors that take assignments.
        statuses: The statuses that it declares: name -> is it data?
        naming: How attributes are named in paths.
        empty_table: Where the tables of its instances begin. One per class: a table
            remembers one extension, which is that of the class.
        is_stamping: Whether setting and deleting attributes always stamps the object.
        checks_itself: Whether it has a ``_check_valid_context`` of its own, to be asked
            before each change of an instance.
    """

    __slots__ = (
        "checks_itself",
        "descriptors",
        "empty_table",
        "is_pytree",
        "is_stamping",
        "naming",
        "statuses",
    )

    def __init__(self, cls: type) -> None:
        self.is_pytree = _first(_are_pytrees, cls, config.flax_pytree_module)
        self.descriptors = _data_descriptors(cls)
        self.statuses = declared_statuses(cls, warn=False)
        self.naming = _first(_namings, cls, _PLAIN)
        self.empty_table = AttributeTable({})
        self.is_stamping = _OURS.issuperset((cls.__setattr__, cls.__delattr__))
        check = getattr(cls, "_check_valid_context", None)
        self.checks_itself = check is not None and check not in _OURS


# To be asked before `facts_of` where a call would count.
known: dict[type, Facts] = {}

# What a class statement says, for all classes below it that say nothing.
_are_pytrees: dict[type, bool] = {}
_namings: dict[type, Naming] = {}
_PLAIN = Naming()

# Methods of ours in the place of which a class may have its own.
_OURS: set[Any] = set()


def facts_of(cls: type) -> Facts:
    """What is known of a class."""
    try:
        return known[cls]
    except KeyError:
        facts = known[cls] = Facts(cls)
        return facts


def _first(entries: dict[type, Any], cls: type, default: Any) -> Any:
    return next((entries[base] for base in cls.__mro__ if base in entries), default)


# Stamped when a class changes in a way that instances made before depend on.
changes: Any = types.SimpleNamespace(stamp=0)


def forget() -> None:
    """Forgets what is known, as a class changes, and with it those below it."""
    known.clear()
    stamps.touch(changes)


def declare_pytree(cls: type, is_pytree: bool) -> None:
    """Says whether instances of a class, and of those below it, are JAX pytrees."""
    _are_pytrees[cls] = is_pytree


def named_by(naming: Naming) -> Callable[[F], F]:
    """Gives a class, and those below it, names of attributes in paths."""

    def decorate(cls: Any) -> Any:
        _namings[cls] = naming
        known.clear()
        return cls

    return decorate


def of_ours(method: F) -> F:
    """Declares a method to be ours: it stamps the object, or checks its trace."""
    _OURS.add(method)
    return method


def name_of(cls: type, key: Any) -> str:
    """The attribute that a key of a path stands for."""
    return facts_of(cls).naming.name_of(cls, key)


def _data_descriptors(cls: type) -> frozenset[str]:
    """The names of the properties and descriptors of ``cls`` that take assignments."""
    # Not by getattr: it would run the descriptor, which may want an instance.
    found: dict[str, bool] = {}
    for base in cls.__mro__:
        for name, attribute in vars(base).items():
            found.setdefault(name, hasattr(type(attribute), "__set__"))
    return frozenset(name for name, is_one in found.items() if is_one)


def declared_statuses(cls: type, warn: bool) -> dict[str, bool]:
    """The statuses that the class bodies of ``cls`` and all its bases declare."""
    statuses: dict[str, bool] = {}
    for base in reversed(cls.__mro__):
        for name, status in _own_statuses(base, warn=warn and base is cls):
            if statuses.setdefault(name, status) != status:
                first, second = _word(statuses[name]), _word(status)
                raise ValueError(
                    f"Conflicting pytree annotation for {cls.__qualname__}.{name}: "
                    f"it is declared {first} and cannot also be {second}."
                )
    return statuses


def _word(is_data_status: bool) -> str:
    return "data" if is_data_status else "static"


def _own_statuses(cls: type, warn: bool) -> list[tuple[str, bool]]:
    found: list[tuple[str, bool]] = []
    for name, annotation in inspect.get_annotations(cls).items():
        status = _annotated_status(annotation)
        if status is not None:
            found.append((name, status))
            if warn:
                word = _word(status)
                warnings.warn(
                    f"{cls.__qualname__}.{name}: the annotation nnx.{word.title()} is "
                    f"deprecated, use `{name}: T = nnx.{word}()`.",
                    DeprecationWarning,
                    stacklevel=6,
                )
    fields = dict(cls.__dict__.get("__dataclass_fields__", {}))
    # Before the decorator runs, fields stand in the class body.
    fields.update(
        {k: v for k, v in vars(cls).items() if isinstance(v, dataclasses.Field)}
    )
    for name, field in fields.items():
        if "static" in field.metadata:
            status = field.metadata["static"]
            if not isinstance(status, bool):
                raise ValueError(
                    f"Invalid 'static' metadata of {cls.__qualname__}.{name}: expected "
                    f"a bool, got {status!r}."
                )
            found.append((name, not status))
    return found


def _annotated_status(annotation: Any) -> bool | None:
    if isinstance(annotation, str):
        if annotation.startswith("nnx.Data"):
            return True
        return False if annotation.startswith("nnx.Static") else None
    if typing.get_origin(annotation) is Annotated:
        tag = annotation.__metadata__[0]
        return (
            {"data": True, "static": False}.get(tag) if isinstance(tag, str) else None
        )
    return None
