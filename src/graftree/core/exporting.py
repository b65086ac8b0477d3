"""Our objects in the files of exported functions, which ``jax.export`` writes.

Such a file has the treedefs of a function's arguments and output. Our nodes in them are
written under one of four names, with static data as JSON; files contain these names, so
they never change:

    graftree.State       the class, the keys
    graftree.Level       the keys
    graftree.FlatState   the paths
    graftree.Variable    the class, the metadata

A class is written by its name (`name_of`). Objects with code are refused; the message
says what to export instead.

JAX accepts each type only once. Flax NNX registers none, so programs for it register
Param themselves; to let them, the drop-in takes all this back (`withdraw`).
"""

from __future__ import annotations

import functools
import json
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from graftree import _jax, _jax_registries, errors
from graftree.core import hooks
from graftree.core.graph.graphdefs import GraphDef, GraphState
from graftree.core.hashable_mappings import HashableMapping, Snapshot
from graftree.core.objects.pytrees import Pytree
from graftree.core.states.flat_states import FlatState
from graftree.core.states.states import Level, State
from graftree.core.variables import kinds
from graftree.core.variables.variables import Variable


def install() -> None:
    """Tells JAX how to write and read our objects; the public namespace calls it."""
    hooks.class_defined.fill(_register)
    for cls in (Pytree, State, Variable):
        _register_all(cls)
    for kind in (GraphDef, GraphState):
        refuse = types.MethodType(_refuse, kind)
        _jax_registries.write_nodes(kind, f"graftree.{kind.__name__}", refuse)
    for kind in (Level, FlatState):
        name = f"graftree.{kind.__name__}"
        _jax_registries.write_nodes(kind, name, functools.partial(_write, kind))
        _jax_registries.read_nodes(name, _read, functools.partial(_rebuild, kind))
    for name in ("graftree.State", "graftree.Variable"):
        _jax_registries.read_nodes(name, _read_typed, _rebuild_typed)


def withdraw() -> None:
    """Lets the program itself tell JAX how objects are written."""
    hooks.class_defined.fill(lambda _: None)
    _jax_registries.forget_nodes(_OURS)


_OURS = "graftree."

# The classes by their names in files; of two with one name, the one defined last.
_types: dict[str, type] = {}


def _register_all(cls: type) -> None:
    """Registers a class that was defined before, and those below it."""
    if _jax.is_pytree_type(cls):
        _register(cls)
    for kind in type.__subclasses__(cls):
        _register_all(kind)


def _register(cls: type) -> None:
    for base in (State, Variable):
        if issubclass(cls, base):
            _types[_qualified_name(cls)] = cls
            write = functools.partial(_write_typed, cls)
            _jax_registries.write_nodes(cls, f"graftree.{base.__name__}", write)
            return
    refuse = types.MethodType(_refuse, cls)
    _jax_registries.write_nodes(cls, "graftree.Module", refuse)


def _qualified_name(cls: type) -> str:
    """Joins module and name of a class; ours are all in the public namespace."""
    module = cls.__module__
    package = "graftree" if module.startswith(_OURS) else module
    return f"{package}.{cls.__qualname__}"


def name_of(cls: type) -> str:
    """Names a class in files: as the user registered it, or by its module."""
    registered = [name for name, kind in kinds.TYPES.items() if kind is cls]
    is_ours = cls.__module__.startswith(_OURS)
    return registered[0] if registered and not is_ours else _qualified_name(cls)


def type_of(name: str) -> type:
    """Finds the class that has a name in files.

    Raises:
        ValueError: If there is none in this process.
    """
    cls = kinds.TYPES.get(name) or _types.get(name)
    if cls is None:
        raise ValueError(
            errors.message(
                "An exported function takes or returns objects of a type that this "
                "process does not know.",
                where=f"type {name}",
                way_out="Import the module that defines it before you load the "
                "function. If its name differs here, register one name in both "
                "programs with\nnnx.register_variable_name, or export a function of "
                "dicts of arrays.",
            )
        )
    return cls


# ---------------------------------------------------------------------- static data


def _write(cls: type, static: Any) -> bytes:
    try:
        return json.dumps(_encode(static)).encode()
    except _UnwritableError as error:
        raise TypeError(
            errors.message(
                f"A function that takes or returns this {cls.__name__} can't be "
                "saved: its keys and metadata must be plain values in the file.",
                where=str(error),
                way_out="Remove that (variable.del_metadata), or export a function "
                "of dicts of arrays.",
            )
        ) from None


def _write_typed(cls: type, static: Any) -> bytes:
    return _write(cls, (name_of(cls), static))


def _read(text: bytes) -> Any:
    return _decode(json.loads(text))


def _read_typed(text: bytes) -> Any:
    name, static = _read(text)
    return type_of(name), static


def _rebuild_typed(static: tuple[type, Any], children: Any) -> Any:
    return _rebuild(*static, children)


def _rebuild(kind: type, static: Any, children: Any) -> Any:
    """Rebuilds the node of a pytree type with this static data and these children."""
    children = [*children]
    leaves = [jax.tree.structure(0)] * len(children)
    registry: Any = jax.tree_util.default_registry
    build: Any = jax.tree_util.PyTreeDef.from_node_data_and_children
    return build(registry, (kind, static), leaves).unflatten(children)


def _refuse(cls: type, _: Any) -> bytes:
    raise TypeError(
        errors.message(
            f"A function that takes or returns a {cls.__name__} can't be saved: "
            "the file contains arrays and programs, but no objects with code.",
            way_out="Either let the function close over the model, so that the file "
            "contains the weights. Or split the model,\n"
            "graphdef, state = nnx.split(model), and export a function of the "
            "state that begins with nnx.merge(graphdef, state).",
        )
    )


# --------------------------------------------------------------------------- values


class _UnwritableError(TypeError):
    """A value that has no form in JSON here."""


def _encode(value: Any) -> Any:
    """Writes a value as JSON; kinds that JSON lacks are lists that name their kind."""
    kind: Any = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return ["float", value.hex()]
    if kind in (tuple, list):
        return [kind.__name__, *map(_encode, value)]
    if kind is Snapshot:
        return _encode(value.live)
    if kind in (dict, HashableMapping):
        return [kind.__name__, *[_encode_entry(*entry) for entry in value.items()]]
    if isinstance(value, np.dtype):
        return ["dtype", value.name]
    if kind is jax.P and jax.P(*value) == value:
        return ["P", *map(_encode, value)]
    if isinstance(value, type) and issubclass(value, Variable):
        return ["type", name_of(value)]
    raise _UnwritableError(repr(value))


def _encode_entry(key: Any, value: Any) -> Any:
    try:
        return [_encode(key), _encode(value)]
    except _UnwritableError as error:
        raise _UnwritableError(f"{key!r}: {error}") from None


def _decode(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, *parts = value
    return _DECODERS[kind](parts)


def _pairs(parts: list[Any]) -> dict[Any, Any]:
    return {_decode(key): _decode(value) for key, value in parts}


_DECODERS: Mapping[str, Callable[[list[Any]], Any]] = {
    "float": lambda parts: float.fromhex(parts[0]),
    "tuple": lambda parts: tuple(map(_decode, parts)),
    "list": lambda parts: [*map(_decode, parts)],
    "dict": _pairs,
    "HashableMapping": lambda parts: HashableMapping(_pairs(parts)),
    "dtype": lambda parts: jax.numpy.dtype(parts[0]),
    "type": lambda parts: type_of(parts[0]),
    "P": lambda parts: jax.P(*map(_decode, parts)),
}
