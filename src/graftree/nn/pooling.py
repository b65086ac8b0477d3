"""Reductions over sliding windows: average, maximum, minimum, or any other.

Inputs are ``[*batch, *window axes, features]``, with one window axis per entry of
``window_shape`` and any number of batch axes, also none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from graftree.annotations import PaddingLike
from graftree.nn.support import arguments

if TYPE_CHECKING:
    from jaxtyping import Array, Inexact, Num


def pool(
    inputs: Num[Array, "*batch_spatial features"],
    init: Any,
    reduce_fn: Callable[[Any, Any], Any],
    window_shape: int | Sequence[int],
    strides: int | Sequence[int] | None,
    padding: PaddingLike,
) -> Num[Array, "*batch_out_spatial features"]:
    """Reduces each window of ``inputs`` to one value.

    Args:
        inputs: ``[*batch, *window axes, features]``.
        init: The value that the reduction starts with, and that padding consists of.
        reduce_fn: Reduces two arrays to one, elementwise: ``jax.lax.add``, for example.
        window_shape: The extent of the windows per axis; an int means as much along all
            axes but the first and the last (along the only one, if there is one).
        strides: Step between windows: an int for all axes, or one each; ``None``: 1.
        padding: ``"SAME"``, ``"VALID"``, an int for all sides, or a sequence with an
            int or a ``(low, high)`` pair per window axis.

    Returns:
        An array ``[*batch, *out axes, features]``. Differentiable if ``reduce_fn`` is
        ``jax.lax.add``, ``max`` or ``min``.

    Raises:
        AssertionError: If ``inputs`` have too few axes, or if the lengths of
            ``window_shape``, ``strides`` and ``padding`` differ.

    Example:
        >>> x = jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 4, 1)
        >>> nnx.pool(x, 1.0, jax.lax.mul, (2,), (2,), "VALID").ravel()
        Array([ 2., 12.], dtype=float32)
    """
    inputs = jnp.asarray(inputs)
    window = _window(window_shape, inputs.ndim)
    rank = len(window)
    batch = inputs.ndim - rank - 1
    if batch < 0:
        raise AssertionError(
            f"Pooling with window_shape={window_shape} needs inputs with at least "
            f"{rank + 1} axes, [*batch, *window axes, features], got "
            f"{inputs.dtype}{list(inputs.shape)}."
        )
    strides = _per_axis("strides", 1 if strides is None else strides, rank)
    if not isinstance(padding, str):
        pads = _pads(padding, rank)
        padding = [(0, 0)] * batch + pads + [(0, 0)]
    return jax.lax.reduce_window(
        inputs,
        init,
        reduce_fn,
        (1,) * batch + window + (1,),
        (1,) * batch + strides + (1,),
        padding,
    )


def _window(window_shape: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    """One extent per window axis."""
    window = arguments.sizes(window_shape)
    return window * max(ndim - 2, 1) if arguments.is_int(window_shape) else window


def _per_axis(name: str, values: int | Sequence[int], rank: int) -> tuple[int, ...]:
    """One entry per window axis, repeating an int."""
    entries = arguments.sizes(values)
    if arguments.is_int(values):
        return entries * rank
    if len(entries) != rank:
        raise AssertionError(
            f"Pooling needs one entry of {name} per entry of window_shape, {rank}, got "
            f"{values}."
        )
    return entries


def _pads(padding: Any, rank: int) -> list[tuple[int, int]]:
    """A pair of widths per window axis."""
    try:
        return arguments.canonicalize_padding(padding, rank)
    except ValueError as error:
        raise AssertionError(
            "Pooling needs as padding a name, an int, or an int or a pair (low, high) "
            f"per entry of window_shape, {rank}, got {padding}."
        ) from error


def avg_pool(
    inputs: Num[Array, "*batch_spatial features"],
    window_shape: int | Sequence[int],
    strides: int | Sequence[int] | None = None,
    padding: PaddingLike = "VALID",
    count_include_pad: bool = True,
) -> Inexact[Array, "*batch_out_spatial features"]:
    """Averages each window of ``inputs``.

    Args:
        inputs: ``[*batch, *window axes, features]``.
        window_shape: As for `pool`.
        strides: As for `pool`.
        padding: As for `pool`; padding counts as zeros.
        count_include_pad: Whether padding counts in the number that the sum of a window
            is divided by.

    Returns:
        An array ``[*batch, *out axes, features]`` of the dtype of ``inputs``; that of
        integers is the default float.

    Raises:
        AssertionError: As `pool`.

    Example:
        >>> x = jnp.array([1.0, 2.0, 3.0]).reshape(1, 3, 1)
        >>> nnx.avg_pool(x, (2,), strides=(2,), padding="SAME").ravel()
        Array([1.5, 1.5], dtype=float32)
        >>> nnx.avg_pool(x, 2, 2, "SAME", count_include_pad=False).ravel()
        Array([1.5, 3. ], dtype=float32)
    """
    inputs = jnp.asarray(inputs)
    if not jnp.issubdtype(inputs.dtype, jnp.inexact):
        # Before the sum, which small integers would not hold.
        inputs = inputs.astype(float)
    total = pool(inputs, 0.0, jax.lax.add, window_shape, strides, padding)
    if count_include_pad:
        return total / math.prod(_window(window_shape, inputs.ndim))
    # The same for all batches and features, so counted once.
    spatial = len(_window(window_shape, inputs.ndim))
    shape = inputs.shape[inputs.ndim - spatial - 1 : -1]
    ones = jnp.ones((1,) * (inputs.ndim - spatial - 1) + shape + (1,), jnp.float32)
    count = pool(ones, 0.0, jax.lax.add, window_shape, strides, padding)
    return total / count.astype(total.dtype)


def max_pool(
    inputs: Num[Array, "*batch_spatial features"],
    window_shape: int | Sequence[int],
    strides: int | Sequence[int] | None = None,
    padding: PaddingLike = "VALID",
) -> Num[Array, "*batch_out_spatial features"]:
    """Takes the maximum of each window of ``inputs``.

    Args:
        inputs: ``[*batch, *window axes, features]``.
        window_shape: As for `pool`.
        strides: As for `pool`.
        padding: As for `pool`; padding never is the maximum.

    Returns:
        An array ``[*batch, *out axes, features]`` of the dtype of ``inputs``.

    Raises:
        AssertionError: As `pool`.

    Example:
        >>> x = jnp.arange(16.0).reshape(1, 4, 4, 1)
        >>> nnx.max_pool(x, (2, 2), strides=(2, 2)).reshape(2, 2)
        Array([[ 5.,  7.],
               [13., 15.]], dtype=float32)
    """
    return pool(inputs, -jnp.inf, jax.lax.max, window_shape, strides, padding)


def min_pool(
    inputs: Num[Array, "*batch_spatial features"],
    window_shape: int | Sequence[int],
    strides: int | Sequence[int] | None = None,
    padding: PaddingLike = "VALID",
) -> Num[Array, "*batch_out_spatial features"]:
    """Takes the minimum of each window of ``inputs``.

    Args:
        inputs: ``[*batch, *window axes, features]``.
        window_shape: As for `pool`.
        strides: As for `pool`.
        padding: As for `pool`; padding never is the minimum.

    Returns:
        An array ``[*batch, *out axes, features]`` of the dtype of ``inputs``.

    Raises:
        AssertionError: As `pool`.

    Example:
        >>> x = jnp.arange(16.0).reshape(1, 4, 4, 1)
        >>> nnx.min_pool(x, (2, 2), strides=(2, 2)).reshape(2, 2)
        Array([[ 0.,  2.],
               [ 8., 10.]], dtype=float32)
    """
    return pool(inputs, jnp.inf, jax.lax.min, window_shape, strides, padding)
