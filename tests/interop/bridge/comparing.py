"""Programs for the bridge, run with this library and with Flax NNX, and compared.

A program is a function of the namespace ``nnx`` alone. It returns arrays, Variables,
States, boxes of Linen, names: `plain` makes of them what can be compared.
"""

import dataclasses
import inspect

import jax
import numpy as np

import graftree as nnx

REQUIRED = ("hijax", "ref", "eager_sharding", "mutable")


def programs_of(module):
    """The programs that a file defines."""
    own = [f for f in vars(module).values() if inspect.isfunction(f)]
    own = [f for f in own if f.__module__ == module.__name__]
    return [f for f in own if [*inspect.signature(f).parameters] == ["nnx"]]


def catch(f, *args, **kwargs):
    """Calls a function; gives what it raised, for comparison, else its result."""
    try:
        return f(*args, **kwargs)
    except Exception as error:
        return error


def plain(x):
    """What ``x`` consists of, in types that both libraries share."""
    if isinstance(x, type):
        return x.__name__
    if hasattr(x, "get_metadata"):
        return type(x).__name__, plain(x.get_value()), own_metadata(x.get_metadata())
    if isinstance(x, Exception):
        return type(x).__name__
    if hasattr(x, "unbox"):
        fields = {f.name: getattr(x, f.name) for f in dataclasses.fields(x)}
        metadata = own_metadata(fields.pop("metadata", {}))
        return type(x).__name__, plain(fields), metadata
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(x))
    if isinstance(x, (jax.Array, np.ndarray)):
        return np.asarray(x)
    if hasattr(x, "items"):
        return {key: plain(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [plain(value) for value in x]
    return x


def own_metadata(metadata):
    """Metadata without the flags, which early releases put into boxes too."""
    return plain({k: v for k, v in metadata.items() if k not in REQUIRED})


def differences(ours, theirs, path=""):
    """Where two results differ, in words."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if ours.keys() != theirs.keys():
            return [f"{path}: names {list(ours)}, the peer {list(theirs)}"]
        pairs = [(f"{path}/{key}", ours[key], theirs[key]) for key in ours]
    elif isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
        if len(ours) != len(theirs):
            return [f"{path}: {len(ours)} items, the peer {len(theirs)}"]
        pairs = [
            (f"{path}/{i}", *pair)
            for i, pair in enumerate(zip(ours, theirs, strict=False))
        ]
    elif isinstance(ours, np.ndarray) and isinstance(theirs, np.ndarray):
        same = ours.shape == theirs.shape and ours.dtype == theirs.dtype
        close = same and np.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
        return [] if close else [f"{path}: {ours}, the peer {theirs}"]
    else:
        same = type(ours) is type(theirs) and ours == theirs
        return [] if same else [f"{path}: {ours!r}, the peer {theirs!r}"]
    return [line for p, x, y in pairs for line in differences(x, y, p)]


def compare(program, peer):
    """All differences of a program's results."""
    return differences(plain(program(nnx)), plain(program(peer)))
