"""How every layer makes and reads its Params.

A Param draws exactly one key from the stream ``params``, also when its initializer
ignores the key, so that switching an initializer never changes the other Params. An
absent Param is ``None`` in a *data* attribute, so that one can be assigned later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax

from graftree import errors
from graftree.annotations import Dtype, Initializer, Shape
from graftree.core.objects import attributes
from graftree.core.rng.streams import Rngs
from graftree.core.variables.kinds import Param
from graftree.nn.support import operations

NO_METADATA: Mapping[str, Any] = MappingProxyType({})
"""The default of the ``..._metadata`` arguments of layers."""


def new_param(
    rngs: Rngs,
    initializer: Initializer,
    shape: Shape,
    dtype: Dtype,
    metadata: Mapping[str, Any] = NO_METADATA,
) -> Param[jax.Array]:
    """Makes a Param, with a key from the stream ``params``.

    Args:
        rngs: Gives the key; its stream ``params`` (or ``default``) advances by one.
        initializer: Called as ``initializer(key, shape, dtype)``. It may return an
            array, or a value with metadata as ``nnx.with_partitioning`` makes.
        shape: The shape of the value.
        dtype: The dtype of the value.
        metadata: Further metadata; that of the initializer wins.

    Raises:
        AttributeError: If ``rngs`` has no stream ``params``, or is no Rngs at all.
    """
    return Param(initializer(draw_key(rngs), shape, dtype), **metadata)


def optional_param(
    is_used: bool,
    rngs: Rngs,
    initializer: Initializer,
    shape: Shape,
    dtype: Dtype,
    metadata: Mapping[str, Any] = NO_METADATA,
) -> Param[jax.Array] | None:
    """Makes a Param as `new_param` does, or what marks it as absent.

    Returns:
        The Param; or, to be assigned to an attribute, ``None`` marked as data, for
        which nothing is drawn.
    """
    if not is_used:
        return attributes.data(None)
    return new_param(rngs, initializer, shape, dtype, metadata)


def draw_key(rngs: Rngs) -> jax.Array:
    """Takes the next key of the stream ``params``.

    Raises:
        AttributeError: If ``rngs`` has no stream ``params``, or is no Rngs at all.
    """
    try:
        stream = rngs.params
    except AttributeError as error:
        if isinstance(rngs, Rngs):
            raise
        raise AttributeError(
            errors.message(
                f"{type(rngs).__name__!r} object has no attribute 'params': a layer "
                "takes its keys from an nnx.Rngs.",
                way_out="Pass `rngs=nnx.Rngs(0)`, or the `Rngs` of the outer module.",
            )
        ) from error
    return stream()


def read(param: Param[jax.Array] | None) -> jax.Array | None:
    """Returns the value of a Param, or ``None`` for an absent one."""
    return None if param is None else param[...]


def shape_along(axes: Sequence[int], shape: Shape) -> tuple[int, ...]:
    """The shape that a flat parameter needs to broadcast against an array.

    Args:
        axes: The non-negative axes along which the parameter varies.
        shape: The shape of the array.

    Returns:
        The sizes of ``shape`` along ``axes``, and one elsewhere.
    """
    return tuple([n if axis in axes else 1 for axis, n in enumerate(shape)])


def add_bias(outputs: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Adds a bias along the last axis, if there is one."""
    if bias is None:
        return outputs
    return operations.add(outputs, bias, (1,) * (outputs.ndim - 1) + (-1,))
