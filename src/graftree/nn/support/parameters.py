"""How every layer makes its Params.

A Param draws exactly one key from the stream ``params``, also when its initializer
ignores the key, so that switching an initializer never changes the other Params. An
absent Param is ``None`` in a *data* attribute, so that one can be assigned later.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax

from graftree.annotations import Dtype, Initializer, Shape
from graftree.core.objects import attributes
from graftree.core.rng.streams import Rngs
from graftree.core.variables.kinds import Param
from graftree.nn.support import first_values

NO_METADATA: Mapping[Any, Any] = MappingProxyType({})
"""The default of the ``..._metadata`` arguments of layers: nothing."""


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
    return Param(first_values.make(initializer, key, shape, dtype), **metadata)


def optional_param(
    is_used: bool,
    rngs: Rngs,
    initializer: Initializer,
    shape: Shape,
    dtype: Dtype,
    metadata: Mapping[str, Any],
) -> Param[jax.Array] | None:
    """Makes a Param as `new_param` does, or else the mark of an absent one."""
    if not is_used:
        return attributes.data(None)
    return new_param(rngs, initializer, shape, dtype, metadata)


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
