"""How the constructors of layers make Params and keep settings.

A Param draws exactly one key from the stream ``params``, even when its initializer
ignores the key, so switching an initializer never changes the other Params. An absent
Param is ``None`` in a *data* attribute, so that you can assign one later.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
from jax.nn import initializers

from graftree import _jax
from graftree.annotations import Dtype, Initializer, Shape
from graftree.core.objects import attributes
from graftree.core.rng.streams import Rngs
from graftree.core.variables.kinds import Param
from graftree.nn.support import eager

NO_METADATA: Mapping[Any, Any] = MappingProxyType({})
"""The default of the ``..._metadata`` arguments of layers: nothing."""

lecun_normal: Any = eager.known(initializers.lecun_normal())
"""The default initializer of weights."""


def new_param(
    rngs: Rngs,
    initializer: Initializer,
    shape: Shape | int,
    dtype: Dtype,
    metadata: Mapping[str, Any],
) -> Param[jax.Array]:
    """Makes a Param, with a key from the stream ``params``.

    The initializer is called as ``initializer(key, shape, dtype)``. It may return a
    value with metadata, as ``nnx.with_partitioning`` makes; this metadata wins.
    """
    key = draw_key(rngs)
    return Param(first_value(initializer, key, shape, dtype), **metadata)


def first_value(
    initializer: Initializer, key: jax.Array, shape: Shape | int, dtype: Dtype
) -> Any:
    """What ``initializer(key, shape, dtype)`` gives."""
    # By identity: others may have no hash, or be equal to all.
    is_default = any(initializer is x for x in _DEFAULTS)
    if is_default and isinstance(shape, tuple) and _jax.concrete_mesh() is None:
        if all(type(n) is int for n in shape):
            return _initialized(key, initializer=initializer, shape=shape, dtype=dtype)
    return initializer(key, shape, dtype)


# They compute again what depends only on the shape: 70 of 90 us.
_DEFAULTS = (*map(eager.known, (initializers.zeros, initializers.ones)), lecun_normal)


@eager.fast("numpy.ones", "numpy.sqrt", "numpy.zeros", "draws.truncated_normal")
def _initialized(
    key: jax.Array, *, initializer: Initializer, shape: Shape, dtype: Dtype
) -> Any:
    return initializer(key, shape, dtype)


def draw_key(rngs: Rngs) -> jax.Array:
    """Takes the next key of the stream ``params``."""
    try:
        stream = rngs.params
    except AttributeError:
        if isinstance(rngs, Rngs):
            raise
        raise AttributeError(
            f"{type(rngs).__name__!r} object has no attribute 'params': a layer takes "
            "its keys from an nnx.Rngs.\nPass `rngs=nnx.Rngs(0)`, or the `Rngs` of the "
            "outer module."
        ) from None
    return stream()


def make(layer: Any, given: Mapping[str, Any], **shapes: Shape | int | None) -> None:
    """Makes Params of these shapes, from the arguments of a constructor.

    Args:
        layer: The layer that is constructed.
        given: The ``locals()`` of the constructor: ``rngs``, ``param_dtype``, and for
            each name ``name_init`` and ``name_metadata``.
        **shapes: By the name of the Param; ``None``: it is absent.
    """
    for name, shape in shapes.items():
        param = attributes.data(None)
        if shape is not None:
            initializer, metadata = given[f"{name}_init"], given[f"{name}_metadata"]
            rngs, dtype = given["rngs"], given["param_dtype"]
            param = new_param(rngs, initializer, shape, dtype, metadata)
        setattr(layer, name, param)


def keep(layer: Any, given: Mapping[str, Any]) -> None:
    """Makes attributes of the arguments of a constructor, in their order.

    Not of random streams, initializers and metadata, which others are made from, nor
    of what is a property.

    Args:
        layer: The layer that is constructed.
        given: The ``locals()`` of the constructor.
    """
    for name, value in given.items():
        is_used = name in _USED or name.endswith(("_init", "_metadata"))
        if not is_used and not _is_property(layer, name):
            setattr(layer, name, value)


_USED = ("self", "rngs", "keep_rngs")


def _is_property(layer: Any, name: str) -> bool:
    return isinstance(getattr(type(layer), name, None), property)
