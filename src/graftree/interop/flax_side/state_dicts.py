"""Objects as nested dicts of leaves, those as bytes, and back: ``flax.serialization``.

A state dict has string keys only: lists and tuples become dicts of indices, and named
tuples and pytree dataclasses dicts of fields. An object without a handler is a leaf.
A leaf takes any value on the way back: neither its shape nor its dtype is compared.

The bytes are MessagePack with three extension types, those of Flax, so files go both
ways:

    1  array            packed (shape, name of the dtype, bytes in C order)
    2  complex number   packed (real part, imaginary part)
    3  NumPy scalar     as an array without dimensions

An array of more than `MAX_CHUNK_SIZE` bytes in a dict is a dict of pieces, since an
extension holds 2**32 bytes at most. Restored arrays are read-only views of the bytes.
"""

from __future__ import annotations

import contextvars
import math
import types
from collections.abc import Callable, Iterable, KeysView, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from graftree import errors
from graftree.core.states.states import State
from graftree.core.variables.variables import Variable

ToStateDict = Callable[[Any], Any]
FromStateDict = Callable[[Any, Any], Any]

_handlers: dict[type, tuple[ToStateDict, FromStateDict]] = {}


# The steps to the part that is restored now.
_path = contextvars.ContextVar[tuple[str, ...]]("path", default=())


def register_serialization_state(
    ty: type,
    ty_to_state_dict: ToStateDict,
    ty_from_state_dict: FromStateDict,
    override: bool = False,
) -> None:
    """Registers how objects of a type become state dicts, and come back.

    Args:
        ty: The type; its subclasses need handlers of their own.
        ty_to_state_dict: A function from an object to its state dict.
        ty_from_state_dict: A function of a target object and a state dict, which
            returns a new object.
        override: Whether to replace the handler that the type has.

    Raises:
        ValueError: If the type has a handler and ``override`` is False.

    Example:
        >>> class Scale:
        ...     def __init__(self, factor):
        ...         self.factor = factor
        >>> register_serialization_state(
        ...     Scale, lambda one: {"factor": one.factor}, lambda _, d: Scale(**d)
        ... )
        >>> to_state_dict({"scale": Scale(2.0)})
        {'scale': {'factor': 2.0}}
    """
    if ty in _handlers and not override:
        raise ValueError(
            f'A serialization handler for "{ty.__name__}" is already registered; '
            "pass override=True to replace it."
        )
    _handlers[ty] = ty_to_state_dict, ty_from_state_dict


def to_state_dict(target: Any) -> Any:
    """Turns an object into nested dicts with string keys.

    Args:
        target: A pytree of dicts, lists, tuples, dataclasses, States and leaves.

    Returns:
        New dicts that hold the leaves themselves; a leaf is returned as it is.

    Raises:
        ValueError: If two keys of a dict are the same as strings.

    Example:
        >>> to_state_dict({"layers": [1, 2], "empty": None})
        {'layers': {'0': 1, '1': 2}, 'empty': None}
    """
    handler = _handler(target)
    return target if handler is None else handler[0](target)


def from_state_dict(target: Any, state: Any, name: str = ".") -> Any:
    """Returns a new object like ``target`` with the leaves of a state dict.

    Args:
        target: An object of the wanted structure; it stays as it is. A leaf, or None,
            takes whatever the state dict has.
        state: The result of `to_state_dict` for such an object. Entries of dicts that
            ``target`` lacks are ignored.
        name: The name of the root in error messages.

    Returns:
        The new object.

    Raises:
        ValueError: If ``target`` has an entry that the state dict lacks, or they differ
            in length or in the fields of a dataclass; names the path.

    Example:
        >>> from_state_dict({"a": (0, 0)}, {"a": {"0": 1, "1": 2}})
        {'a': (1, 2)}
    """
    handler = _handler(target)
    if handler is None:
        return state
    token = _path.set((*_path.get(), name))
    try:
        return handler[1](target, state)
    finally:
        _path.reset(token)


def current_path() -> str:
    """Returns the path of the object being restored, for messages of handlers.

    Example:
        >>> current_path()
        ''
    """
    return "/".join(_path.get())


def _handler(target: Any) -> tuple[ToStateDict, FromStateDict] | None:
    if handler := _handlers.get(type(target)):
        return handler
    if isinstance(target, tuple) and hasattr(target, "_fields"):
        return _named_tuple_to, _named_tuple_from
    if isinstance(target, Variable):
        return _variable_to, _variable_from
    return None


# Handlers of Python's containers.


def _dict_to(xs: Mapping[Any, Any]) -> dict[str, Any]:
    state = {str(key): to_state_dict(value) for key, value in xs.items()}
    if len(state) != len(xs):
        raise ValueError(
            f"Keys of a state dict are strings, and some of {list(xs)} are the same as "
            "strings; rename them."
        )
    return state


def restore_dict(xs: Mapping[Any, Any], state: Mapping[str, Any]) -> dict[Any, Any]:
    """Restores the entries of ``xs`` from the leaves of a state dict; for handlers.

    Args:
        xs: A mapping of the wanted structure.
        state: Its state dict.

    Returns:
        A new dict.

    Raises:
        ValueError: If the state dict lacks an entry; names the path.

    Example:
        >>> restore_dict({1: 0}, {"1": 5})
        {1: 5}
    """
    missing = {str(key) for key in xs}.difference(_keys(state))
    if missing:
        raise ValueError(
            "The target dict keys and state dict keys do not match, target dict "
            f"contains keys {missing} which are not present in state dict at path "
            f"{current_path()}"
        )
    return {
        key: from_state_dict(value, state[str(key)], name=str(key))
        for key, value in xs.items()
    }


def _keys(state: Any) -> KeysView[str]:
    if not isinstance(state, Mapping):
        raise ValueError(
            errors.message(
                f"Expected a dict at path {current_path()} of the state dict, got "
                f"{type(state).__name__}.",
                way_out="Give the state dict of an object with this structure.",
            )
        )
    return state.keys()


def _sequence_to(xs: Iterable[Any]) -> dict[str, Any]:
    return {str(index): to_state_dict(value) for index, value in enumerate(xs)}


def _list_from(xs: list[Any], state: Mapping[str, Any]) -> list[Any]:
    if len(_keys(state)) != len(xs):
        raise ValueError(
            "The size of the list and the state dict do not match, got "
            f"{len(xs)} and {len(state)} at path {current_path()}"
        )
    return list(restore_dict(dict(enumerate(xs)), state).values())


def _named_tuple_to(xs: Any) -> dict[str, Any]:
    return {name: to_state_dict(getattr(xs, name)) for name in xs._fields}


def _named_tuple_from(xs: Any, state: Mapping[str, Any]) -> Any:
    if set(_keys(state)) == {"name", "fields", "values"}:  # as old checkpoints have it
        names = state["fields"].values()
        state = dict(zip(names, state["values"].values(), strict=True))
    if set(state) != set(xs._fields):
        raise ValueError(
            "The field names of the state dict and the named tuple do not match, got "
            f"{set(state)} and {set(xs._fields)} at path {current_path()}"
        )
    return type(xs)(**restore_dict(xs._asdict(), state))


def _partial_to(xs: jax.tree_util.Partial) -> dict[str, Any]:
    return {"args": to_state_dict(xs.args), "keywords": to_state_dict(xs.keywords)}


def _partial_from(xs: jax.tree_util.Partial, state: Mapping[str, Any]) -> Any:
    args = from_state_dict(xs.args, state["args"], name="args")
    keywords = from_state_dict(xs.keywords, state["keywords"], name="keywords")
    return jax.tree_util.Partial(xs.func, *args, **keywords)


# Handlers of this library's objects, which Flax does not have.


def _variable_to(variable: Variable[Any]) -> Any:
    return to_state_dict(variable.get_value())


def _variable_from(variable: Variable[Any], state: Any) -> Variable[Any]:
    return variable.replace(from_state_dict(variable.get_value(), state, name="value"))


def _state_from(xs: State, state: Mapping[str, Any]) -> State:
    return State(restore_dict(dict(xs.items()), state))


register_serialization_state(dict, _dict_to, restore_dict)
register_serialization_state(list, _sequence_to, _list_from)
register_serialization_state(
    tuple, _sequence_to, lambda xs, state: tuple(_list_from(list(xs), state))
)
register_serialization_state(jax.tree_util.Partial, _partial_to, _partial_from)
register_serialization_state(State, lambda xs: _dict_to(dict(xs.items())), _state_from)


MAX_CHUNK_SIZE = 2**30
"""The most bytes of an array that are stored in one piece."""

_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3
_CHUNKED = "__msgpack_chunked_array__"


def to_bytes(target: Any) -> bytes:
    """Turns an object into bytes.

    Args:
        target: An object as for `to_state_dict`, with arrays, numbers, strings,
            bytes and None as leaves.

    Returns:
        The bytes.

    Raises:
        ImportError: If the package msgpack is not installed.
        TypeError: If a leaf can't be stored, such as a JAX key.
        ValueError: If an array has a dtype of objects, strings or records.

    Example:
        >>> data = to_bytes({"w": jnp.ones(2)})
        >>> from_bytes({"w": jnp.zeros(2)}, data)
        {'w': array([1., 1.], dtype=float32)}
    """
    return msgpack_serialize(to_state_dict(target), in_place=True)


def from_bytes(target: Any, encoded_bytes: bytes) -> Any:
    """Returns a new object like ``target`` with the leaves in the bytes.

    Args:
        target: An object of the wanted structure, or None for the state dict itself.
        encoded_bytes: The result of `to_bytes`.

    Returns:
        The new object; its arrays are NumPy's.

    Raises:
        ImportError: If the package msgpack is not installed.
        ValueError: If the structures differ; names the path.

    Example:
        >>> data = to_bytes([1, (2, 3)])
        >>> from_bytes([0, (0, 0)], data)
        [1, (2, 3)]
    """
    return from_state_dict(target, msgpack_restore(encoded_bytes))


def msgpack_serialize(pytree: Any, in_place: bool = False) -> bytes:
    r"""Turns nested dicts and lists of leaves into bytes.

    Args:
        pytree: Dicts and lists with arrays, numbers, strings, bytes and None.
        in_place: Whether dicts keep the order of their keys; otherwise it is sorted.
            The tree is not changed in either case.

    Returns:
        The bytes.

    Raises:
        ImportError: If the package msgpack is not installed.
        TypeError: If a leaf or a container can't be stored, e.g. a tuple or a JAX key.
        ValueError: If an array has a dtype of objects, strings or records.

    Example:
        >>> msgpack_serialize({"a": 1})
        b'\x81\xa1a\x01'
    """
    ordered = pytree if in_place else jax.tree.map(lambda leaf: leaf, pytree)
    return _msgpack().packb(_in_pieces(ordered), default=_extension, strict_types=True)


def msgpack_restore(encoded_pytree: bytes) -> Any:
    r"""Turns bytes into the nested dicts and lists that they were made from.

    Args:
        encoded_pytree: The result of `msgpack_serialize` or `to_bytes`.

    Returns:
        The tree; its arrays are NumPy's, and read-only.

    Raises:
        ImportError: If the package msgpack is not installed.

    Example:
        >>> msgpack_restore(b"\x81\xa1a\x01")
        {'a': 1}
    """
    unpacked = _msgpack().unpackb(
        encoded_pytree, ext_hook=_from_extension, raw=False, strict_map_key=False
    )
    return _joined(unpacked)


def _msgpack() -> types.ModuleType:
    try:
        import msgpack
    except ImportError:
        raise ImportError(
            "flax.serialization stores bytes with the package msgpack, which is not "
            "installed.\nInstall it: pip install msgpack"
        ) from None
    return msgpack


def _extension(value: Any) -> Any:
    """Converts a leaf that MessagePack does not know to a form that it stores."""
    msgpack = _msgpack()
    if isinstance(value, np.generic):
        return msgpack.ExtType(_SCALAR, _array_bytes(np.asarray(value)))
    if isinstance(value, (np.ndarray, jax.Array)):
        return msgpack.ExtType(_ARRAY, _array_bytes(np.asarray(value)))
    if isinstance(value, complex):
        return msgpack.ExtType(_COMPLEX, msgpack.packb((value.real, value.imag)))
    return value  # MessagePack says which type it can't store


def _array_bytes(array: np.ndarray[Any, Any]) -> bytes:
    dtype = array.dtype
    if dtype.hasobject or dtype.names is not None or dtype.kind in "US":
        raise ValueError(
            "Object and structured dtypes not supported for serialization of ndarrays, "
            f"nor those of strings: got {dtype}."
        )
    return _msgpack().packb((array.shape, dtype.name, array.tobytes()))


def _from_extension(code: int, data: bytes) -> Any:
    if code == _ARRAY:
        return _array(data)
    if code == _SCALAR:
        return _array(data)[()]
    if code == _COMPLEX:
        return complex(*_msgpack().unpackb(data))
    return _msgpack().ExtType(code, data)


def _array(data: bytes) -> np.ndarray[Any, Any]:
    shape, name, content = _msgpack().unpackb(data, raw=True)
    dtype = jnp.dtype(name.decode())
    return np.frombuffer(content, dtype).reshape(shape)


# Arrays in pieces.


def _in_pieces(tree: Any) -> Any:
    if type(tree) is dict:
        return {key: _in_pieces(value) for key, value in tree.items()}
    if isinstance(tree, (np.ndarray, jax.Array)) and _size(tree) > MAX_CHUNK_SIZE:
        return _pieces(np.asarray(tree))
    return tree


def _size(array: Any) -> int:
    # A JAX key has no item size; the error that it can't be stored comes later.
    return math.prod(array.shape) * getattr(array.dtype, "itemsize", 0)


def _pieces(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    flat, step = array.reshape(-1), max(1, MAX_CHUNK_SIZE // array.dtype.itemsize)
    starts = range(0, flat.size, step)
    return {
        _CHUNKED: True,
        "shape": {str(axis): size for axis, size in enumerate(array.shape)},
        "chunks": {str(i): flat[at : at + step] for i, at in enumerate(starts)},
    }


def _joined(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    if _CHUNKED in tree:
        flat = np.concatenate(_in_order(tree["chunks"]))
        return flat.reshape(_in_order(tree["shape"]))
    return {key: _joined(value) for key, value in tree.items()}


def _in_order(indexed: Mapping[str, Any]) -> list[Any]:
    return [indexed[str(index)] for index in range(len(indexed))]
