"""State dicts as bytes, and back: the other half of ``flax.serialization``.

The bytes are MessagePack with three extension types, those of Flax, so files go both
ways:

    1  array            packed (shape, name of the dtype, bytes in C order)
    2  complex number   packed (real part, imaginary part)
    3  NumPy scalar     as an array without dimensions

An array of more than `MAX_CHUNK_SIZE` bytes in a dict is a dict of pieces, since an
extension holds 2**32 bytes at most. Restored arrays are read-only views of the bytes.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from graftree.interop.flax_side import state_dicts

MAX_CHUNK_SIZE = 2**30
"""The most bytes of an array that are stored in one piece."""

_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3
_CHUNKED = "__msgpack_chunked_array__"


def to_bytes(target: Any) -> bytes:
    """Turns an object into bytes.

    Args:
        target: What `state_dicts.to_state_dict` takes, with arrays, numbers, strings,
            bytes and None as leaves.

    Returns:
        The bytes.

    Raises:
        ImportError: If the package msgpack is not installed.
        TypeError: If a leaf can't be stored, such as a JAX key.
        ValueError: If an array has a dtype of objects, strings or records.

    Example:
        >>> from graftree.interop.flax_side import msgpack_bytes
        >>> data = msgpack_bytes.to_bytes({"w": jnp.ones(2)})
        >>> msgpack_bytes.from_bytes({"w": jnp.zeros(2)}, data)
        {'w': array([1., 1.], dtype=float32)}
    """
    return msgpack_serialize(state_dicts.to_state_dict(target), in_place=True)


def from_bytes(target: Any, encoded_bytes: bytes) -> Any:
    """Gives a new object like ``target`` with the leaves in the bytes.

    Args:
        target: An object of the wanted structure, or None for the state dict itself.
        encoded_bytes: What `to_bytes` returned.

    Returns:
        The new object; its arrays are NumPy's.

    Raises:
        ImportError: If the package msgpack is not installed.
        ValueError: If the structures differ; names the path.

    Example:
        >>> from graftree.interop.flax_side import msgpack_bytes
        >>> data = msgpack_bytes.to_bytes([1, (2, 3)])
        >>> msgpack_bytes.from_bytes([0, (0, 0)], data)
        [1, (2, 3)]
    """
    return state_dicts.from_state_dict(target, msgpack_restore(encoded_bytes))


def msgpack_serialize(pytree: Any, in_place: bool = False) -> bytes:
    r"""Turns nested dicts and lists of leaves into bytes.

    Args:
        pytree: Dicts and lists with arrays, numbers, strings, bytes and None.
        in_place: Whether dicts keep the order of their keys, which is else sorted. The
            tree is not changed in either case.

    Returns:
        The bytes.

    Raises:
        ImportError: If the package msgpack is not installed.
        TypeError: If a leaf or a container can't be stored, e.g. a tuple or a JAX key.
        ValueError: If an array has a dtype of objects, strings or records.

    Example:
        >>> from graftree.interop.flax_side import msgpack_bytes
        >>> msgpack_bytes.msgpack_serialize({"a": 1})
        b'\x81\xa1a\x01'
    """
    ordered = pytree if in_place else jax.tree.map(lambda leaf: leaf, pytree)
    return _msgpack().packb(_in_pieces(ordered), default=_extension, strict_types=True)


def msgpack_restore(encoded_pytree: bytes) -> Any:
    r"""Turns bytes into the nested dicts and lists that they were made from.

    Args:
        encoded_pytree: What `msgpack_serialize` or `to_bytes` returned.

    Returns:
        The tree; its arrays are NumPy's, and read-only.

    Raises:
        ImportError: If the package msgpack is not installed.

    Example:
        >>> from graftree.interop.flax_side import msgpack_bytes
        >>> msgpack_bytes.msgpack_restore(b"\x81\xa1a\x01")
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
    """What MessagePack stores for a leaf that it does not know."""
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
    # A JAX key has no item size; that it can't be stored is said later.
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
