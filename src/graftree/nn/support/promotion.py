"""The dtype in which a layer computes.

A layer has a *parameter dtype*, in which its Params are stored, and a computation
dtype, to which inputs and Params are brought before they meet. The latter is what the
layer's ``dtype`` says or, where that is ``None``, what JAX's promotion of all of them
gives; integers become floats on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from graftree.annotations import Dtype
from graftree.core.variables import values


def canonicalize_dtype(
    *args: Any, dtype: Dtype | None = None, inexact: bool = True
) -> Dtype:
    """Finds the dtype in which a computation on ``args`` is done.

    Args:
        *args: Arrays or Python scalars; ``None`` entries don't count.
        dtype: The answer, if already known; returned as it is.
        inexact: Whether the result must be a floating or complex dtype. An inferred
            integer or bool dtype is then promoted with float32.

    Returns:
        ``dtype`` itself (the same object) if given, else the promoted dtype of
        ``args``.

    Raises:
        ValueError: If ``inexact`` and the given ``dtype`` is not; or if there is
            neither an array nor a dtype.

    Example:
        >>> from graftree.nn.support import promotion
        >>> promotion.canonicalize_dtype(jnp.ones(2, jnp.bfloat16), 1.0)
        dtype(bfloat16)
        >>> promotion.canonicalize_dtype(jnp.ones(2, jnp.int32), None)
        dtype('float32')
    """
    if dtype is None:
        dtype = jnp.result_type(*[_as_array(x) for x in args if x is not None])
        if inexact and not jnp.issubdtype(dtype, jnp.inexact):
            dtype = jnp.promote_types(jnp.float32, dtype)
    if inexact and not jnp.issubdtype(dtype, jnp.inexact):
        raise ValueError(
            f"Dtype must be inexact: {dtype}\n"
            "Pass a floating or complex dtype, or None to infer one from the inputs."
        )
    return dtype


def promote_dtype(
    args: Sequence[Any], /, *, dtype: Dtype | None = None, inexact: bool = True
) -> tuple[jax.Array | None, ...]:
    """Converts several arrays to one dtype.

    This is the default of every layer's ``promote_dtype`` argument. A replacement takes
    the same arguments and may do something else, such as quantize.

    Args:
        args: Arrays, Python scalars, lists of numbers, or ``None``.
        dtype: The wanted dtype; ``None`` takes what `canonicalize_dtype` infers.
        inexact: Whether integers become floats.

    Returns:
        A tuple with one entry per entry of ``args``: a JAX array of the common dtype,
        or ``None`` where the entry was ``None``.

    Raises:
        ValueError: As `canonicalize_dtype`.

    Example:
        >>> from graftree.nn.support import promotion
        >>> x, kernel, bias = promotion.promote_dtype(
        ...     (jnp.ones(2, jnp.bfloat16), jnp.ones((2, 3)), None)
        ... )
        >>> x.dtype, kernel.dtype, bias
        (dtype('float32'), dtype('float32'), None)
    """
    dtype = canonicalize_dtype(*args, dtype=dtype, inexact=inexact)
    return tuple([None if x is None else _converted(x, dtype) for x in args])


# Mostly there is nothing to convert. `jnp.asarray` takes long to find that out: more
# than half of the time of an eager `Linear`.


def _as_array(x: Any) -> jax.Array:
    return x if values.is_array(x) else jnp.asarray(x)


def _converted(x: Any, dtype: Dtype) -> jax.Array:
    if values.is_array(x) and x.dtype == dtype and not x.weak_type:
        return x
    return jnp.asarray(x, dtype)
