"""Stores the states of data iterators as JSON: what ``get_state`` returns.

No pickle: reading a checkpoint runs no code. A value that JSON lacks becomes an object
with one key that begins with ``$``:

    bytes                 {"$bytes": base64}
    NumPy arrays          {"$array": base64, "dtype": "float32", "shape": [2, 3]}
    tuples                {"$tuple": [...]}
    dicts with other keys than strings, or with keys that begin with ``$``
                          {"$dict": [[key, value], ...]}
    nan, inf              {"$float": "nan"}
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from graftree import errors
from graftree.core.graph import nodes

# Where Orbax puts JSON, in the folder of the item.
FILE = "metadata"
_PROCESSES, _SUM = "processes", "crc32"


def is_iterator(obj: Any) -> bool:
    """Whether an object is saved by ``get_state``: it is not one of our own objects."""
    if nodes.is_node(obj) or nodes.is_node_leaf(obj):
        return False
    return all(callable(getattr(obj, n, None)) for n in ("get_state", "set_state"))


def to_json(name: str, iterator: Any) -> Any:
    """Returns the state of an iterator in this process, as JSON.

    Raises:
        TypeError: If it holds a value that can't be stored.
    """
    return json.loads(json.dumps(encoded(iterator.get_state(), name)))


def joined(states: list[Any]) -> dict[str, Any]:
    """Makes the content of the file, from the states of all processes as JSON."""
    return {_PROCESSES: states, _SUM: _sum_of(states)}


def from_json(name: str, folder: Any, index: int, count: int) -> Any:
    """Reads the state of the iterator of one process.

    Args:
        name: Of the iterator.
        folder: Of the item.
        index: Index of this process.
        count: How many processes there are now.

    Raises:
        CheckpointError: If the states belong to another number of processes, or are
            missing or damaged.
    """
    states = _read(name, folder)
    if len(states) != count:
        if any(state != states[0] for state in states):
            raise errors.CheckpointError(
                f"{name} was saved by {len(states)} processes, each at its own "
                f"position, but {count} are running now.\nRestore with {len(states)} "
                f"processes; or skip it with {name}=None, and set its position "
                "yourself."
            )
        index = 0
    return decoded(states[index])


def _read(name: str, folder: Any) -> list[Any]:
    """Reads the states of all processes."""
    file = folder / FILE
    if not file.exists():
        raise errors.CheckpointError(
            f"{name} was not saved as a data iterator: there is no {file}.\nRestore it "
            f"into an object with Variables; or skip it with {name}=None; or restore "
            "another step."
        )
    try:
        content = json.loads(file.read_bytes())
        states = content[_PROCESSES]
        if not states or content.get(_SUM, _sum_of(states)) != _sum_of(states):
            raise ValueError("its checksum does not match")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise errors.CheckpointError(
            f"The state of {name} in {file} is damaged: {error}.\nRestore another "
            f"step; or skip it with {name}=None, and set its position yourself."
        ) from error
    return states


def _sum_of(states: list[Any]) -> int:
    return zlib.crc32(json.dumps(states, sort_keys=True).encode())


def encoded(x: Any, path: str) -> Any:
    """Converts a value to the form that JSON stores."""
    if x is None or type(x) in (bool, int, str):
        return x
    if type(x) is float:
        return x if math.isfinite(x) else {"$float": repr(x)}
    if type(x) in (bytes, bytearray):
        return {"$bytes": base64.b64encode(x).decode()}
    if isinstance(x, (np.ndarray, np.generic)) and x.dtype.kind in "biufc":
        x = np.asarray(x)
        data = base64.b64encode(np.ascontiguousarray(x).tobytes()).decode()
        return {"$array": data, "dtype": x.dtype.str, "shape": [*x.shape]}
    if type(x) is list:
        return [encoded(item, f"{path}[{i}]") for i, item in enumerate(x)]
    if type(x) is tuple:
        return {"$tuple": [encoded(item, f"{path}[{i}]") for i, item in enumerate(x)]}
    if type(x) is dict:
        return _encoded_dict(x, path)
    raise TypeError(
        f"nnx.checkpoints can't store the state of a data iterator: {path} is a "
        f"{type(x).__module__}.{type(x).__qualname__}.\nA state can contain numbers, "
        "strings, bytes, NumPy arrays, and lists, tuples and dicts of these."
    )


def _encoded_dict(x: Mapping[Any, Any], path: str) -> dict[str, Any]:
    items = [(key, encoded(value, f"{path}[{key!r}]")) for key, value in x.items()]
    if all(type(key) is str and not key.startswith("$") for key in x):
        return dict(items)
    return {"$dict": [[encoded(k, f"{path}, key {k!r}"), v] for k, v in items]}


def decoded(x: Any) -> Any:
    """Converts a value back: the inverse of `encoded`."""
    if isinstance(x, list):
        return [*map(decoded, x)]
    if not isinstance(x, dict):
        return x
    match x:
        case {"$float": text}:
            return float(text)
        case {"$bytes": text}:
            return base64.b64decode(text)
        case {"$array": text, "dtype": dtype, "shape": shape}:
            flat = np.frombuffer(base64.b64decode(text), np.dtype(dtype))
            return flat.reshape(shape).copy()
        case {"$tuple": items}:
            return tuple(map(decoded, items))
        case {"$dict": items}:
            return {decoded(key): decoded(value) for key, value in items}
    return {key: decoded(value) for key, value in x.items()}
