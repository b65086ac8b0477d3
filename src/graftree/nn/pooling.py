"""Pooling: reduces windows, or whole images, to their average, maximum or minimum.

The functions come first; the layers with the same names do the same, for `Sequential`,
and the global ones reduce all spatial axes. Inputs are ``[*batch, *spatial, features]``
with any number of batch axes, or none. No layer has Params or takes ``rngs``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from graftree.annotations import Array, ArrayLike, Inexact, LaxPadding, Num, PaddingLike
from graftree.core.modules.modules import Module
from graftree.core.text import descriptions
from graftree.nn.support import arguments, eager


def pool(
    inputs: Num[ArrayLike, "*batch_spatial features"],
    init: Any,
    reduce_fn: Callable[[Any, Any], Any],
    window_shape: int | Sequence[int],
    strides: int | Sequence[int] | None,
    padding: PaddingLike,
) -> Num[Array, "*batch_out_spatial features"]:
    """Reduces each window of ``inputs`` to one value.

    Args:
        inputs: ``[*batch, *window axes, features]``.
        init: The initial value of the reduction, and the value of padding.
        reduce_fn: Reduces two arrays to one, elementwise: ``jax.lax.add``, for example.
        window_shape: The extent of the windows per axis; an int is that of all axes
            but the first and the last, or of the first, if there are only two.
        strides: Step between windows: an int for all axes, or one each; ``None``: 1.
        padding: ``"SAME"``, ``"VALID"``, an int for all sides, or a sequence with an
            int or a ``(low, high)`` pair per window axis.

    Returns:
        An array ``[*batch, *out axes, features]``. Differentiable if ``reduce_fn`` is
        ``jax.lax.add``, ``max`` or ``min``.

    Raises:
        AssertionError: If ``inputs`` has too few axes, or if the lengths of
            ``window_shape``, ``strides`` and ``padding`` differ.
        ValueError: If no window fits into the padded inputs.

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
            f"{descriptions.describe(inputs)}."
        )
    steps = arguments.per_axis(strides, rank)
    if len(steps) != rank:
        raise AssertionError(
            f"Pooling needs one entry of strides per entry of window_shape, {rank}, "
            f"got {strides}."
        )
    outputs = jax.lax.reduce_window(
        inputs,
        init,
        reduce_fn,
        (1,) * batch + window + (1,),
        (1,) * batch + steps + (1,),
        _pads(padding, batch, rank),
    )
    arguments.check_not_empty(
        f"Pooling with window_shape={window_shape}, strides={strides}, "
        f"padding={padding!r}",
        inputs,
        outputs,
        'Pad the inputs, e.g. with padding="SAME", or pool over a whole axis with '
        "nnx.GlobalAvgPool.",
    )
    return outputs


def _window(window_shape: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    """One extent per window axis."""
    window = arguments.sizes(window_shape)
    return window * max(ndim - 2, 1) if arguments.is_int(window_shape) else window


def _pads(padding: PaddingLike, batch: int, rank: int) -> LaxPadding:
    """Extends padding to all axes; only window axes have any."""
    try:
        pads = arguments.canonicalize_padding(padding, rank)
    except ValueError as error:
        raise AssertionError(
            "The padding of pooling must be a name, an int, or an int or a pair (low, "
            f"high) per entry of window_shape, {rank}, got {padding}."
        ) from error
    return pads if isinstance(pads, str) else [(0, 0)] * batch + [*pads, (0, 0)]


def avg_pool(
    inputs: Num[ArrayLike, "*batch_spatial features"],
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
        count_include_pad: Whether the number by which a window's sum is divided counts
            padding.

    Returns:
        An array ``[*batch, *out axes, features]`` of the dtype of ``inputs``; integers
        give the default float.

    Raises:
        AssertionError: As `pool`.
        ValueError: As `pool`.

    Example:
        >>> x = jnp.array([1.0, 2.0, 3.0]).reshape(1, 3, 1)
        >>> nnx.avg_pool(x, (2,), strides=(2,), padding="SAME").ravel()
        Array([1.5, 1.5], dtype=float32)
        >>> nnx.avg_pool(x, 2, 2, "SAME", count_include_pad=False).ravel()
        Array([1.5, 3. ], dtype=float32)
    """
    return _averages(
        jnp.asarray(inputs),
        window_shape=window_shape,
        strides=strides,
        padding=padding,
        count_include_pad=count_include_pad,
    )


@eager.compiled
def _averages(
    inputs: jax.Array,
    *,
    window_shape: int | Sequence[int],
    strides: int | Sequence[int] | None,
    padding: PaddingLike,
    count_include_pad: bool,
) -> jax.Array:
    if not jnp.issubdtype(inputs.dtype, jnp.inexact):
        # Before the sum, which small integers would not hold.
        inputs = inputs.astype(float)
    total = pool(inputs, 0.0, jax.lax.add, window_shape, strides, padding)
    window = _window(window_shape, inputs.ndim)
    if count_include_pad:
        return total / math.prod(window)
    # The same for all batches and features, so counted once.
    batch = inputs.ndim - len(window) - 1
    ones = jnp.ones((1,) * batch + inputs.shape[batch:-1] + (1,), jnp.float32)
    count = pool(ones, 0.0, jax.lax.add, window_shape, strides, padding)
    return total / count.astype(total.dtype)


def max_pool(
    inputs: Num[ArrayLike, "*batch_spatial features"],
    window_shape: int | Sequence[int],
    strides: int | Sequence[int] | None = None,
    padding: PaddingLike = "VALID",
) -> Num[Array, "*batch_out_spatial features"]:
    """Takes the maximum of each window of ``inputs``.

    Args:
        inputs: ``[*batch, *window axes, features]``.
        window_shape: As for `pool`.
        strides: As for `pool`.
        padding: As for `pool`; padding is never the maximum.

    Returns:
        An array ``[*batch, *out axes, features]`` of the dtype of ``inputs``.

    Raises:
        AssertionError: As `pool`.
        ValueError: As `pool`.

    Example:
        >>> x = jnp.arange(16.0).reshape(1, 4, 4, 1)
        >>> nnx.max_pool(x, (2, 2), strides=(2, 2)).reshape(2, 2)
        Array([[ 5.,  7.],
               [13., 15.]], dtype=float32)
    """
    return pool(inputs, -jnp.inf, jax.lax.max, window_shape, strides, padding)


def min_pool(
    inputs: Num[ArrayLike, "*batch_spatial features"],
    window_shape: int | Sequence[int],
    strides: int | Sequence[int] | None = None,
    padding: PaddingLike = "VALID",
) -> Num[Array, "*batch_out_spatial features"]:
    """Takes the minimum of each window of ``inputs``.

    Args:
        inputs: ``[*batch, *window axes, features]``.
        window_shape: As for `pool`.
        strides: As for `pool`.
        padding: As for `pool`; padding is never the minimum.

    Returns:
        An array ``[*batch, *out axes, features]`` of the dtype of ``inputs``.

    Raises:
        AssertionError: As `pool`.
        ValueError: As `pool`.

    Example:
        >>> x = jnp.arange(16.0).reshape(1, 4, 4, 1)
        >>> nnx.min_pool(x, (2, 2), strides=(2, 2)).reshape(2, 2)
        Array([[ 0.,  2.],
               [ 8., 10.]], dtype=float32)
    """
    return pool(inputs, jnp.inf, jax.lax.min, window_shape, strides, padding)


class _WindowPool(Module):
    """Reduces each window; a subclass defines how."""

    _pool: ClassVar[Callable[..., jax.Array]]

    def __init__(
        self,
        window_shape: int | Sequence[int],
        strides: int | Sequence[int] | None = None,
        padding: PaddingLike = "VALID",
    ):
        arguments.check_sizes(self, window_shape=window_shape)
        self.window_shape = _hashable(window_shape)
        self.strides = _hashable(strides)
        self.padding = _hashable(padding)

    def __call__(
        self, inputs: Num[ArrayLike, "*batch_spatial features"]
    ) -> Num[Array, "*batch_out_spatial features"]:
        """Pools ``inputs``; results and errors are those of the layer's function."""
        return self._pool(inputs, self.window_shape, self.strides, self.padding)


def _hashable(value: Any) -> Any:
    """Sizes or padding with tuples for lists."""
    if value is None or isinstance(value, str):
        return value
    if arguments.is_int(value):
        return int(value)
    return tuple(map(_hashable, value))


class MaxPool(_WindowPool):
    """Takes the maximum of each window, as `max_pool` does.

    Args:
        window_shape: The extent of the windows per axis; an int is that of all axes
            but the first and the last, or of the first, if there are only two.
        strides: Step between windows: an int for all axes, or one each; ``None``: 1.
        padding: ``"SAME"``, ``"VALID"``, an int for all sides, or a sequence with an
            int or a ``(low, high)`` pair per window axis. It is never the maximum.

    Example:
        >>> model = nnx.Sequential(nnx.MaxPool(2, strides=2), jnp.ravel)
        >>> model(jnp.array([1.0, 4.0, 2.0, 3.0]).reshape(1, 4, 1))
        Array([4., 3.], dtype=float32)
    """

    _pool = staticmethod(max_pool)


class MinPool(_WindowPool):
    """Takes the minimum of each window, as `min_pool` does.

    Args:
        window_shape: As for `MaxPool`.
        strides: As for `MaxPool`.
        padding: As for `MaxPool`. It is never the minimum.

    Example:
        >>> pool = nnx.MinPool((2,), strides=(2,))
        >>> pool(jnp.array([1.0, 4.0, 2.0, 3.0]).reshape(1, 4, 1)).ravel()
        Array([1., 2.], dtype=float32)
    """

    _pool = staticmethod(min_pool)


class AvgPool(_WindowPool):
    """Averages each window, as `avg_pool` does.

    Args:
        window_shape: As for `MaxPool`.
        strides: As for `MaxPool`.
        padding: As for `MaxPool`. It counts as zeros.
        count_include_pad: Whether the number by which a window's sum is divided counts
            padding.

    Example:
        >>> x = jnp.array([1.0, 2.0, 3.0]).reshape(1, 3, 1)
        >>> nnx.AvgPool(2, 2, "SAME")(x).ravel()
        Array([1.5, 1.5], dtype=float32)
        >>> nnx.AvgPool(2, 2, "SAME", count_include_pad=False)(x).ravel()
        Array([1.5, 3. ], dtype=float32)
    """

    def __init__(
        self,
        window_shape: int | Sequence[int],
        strides: int | Sequence[int] | None = None,
        padding: PaddingLike = "VALID",
        count_include_pad: bool = True,
    ):
        super().__init__(window_shape, strides, padding)
        self.count_include_pad = count_include_pad

    def __call__(
        self, inputs: Num[ArrayLike, "*batch_spatial features"]
    ) -> Inexact[Array, "*batch_out_spatial features"]:
        """Pools ``inputs``; results and errors are those of `avg_pool`."""
        window = (self.window_shape, self.strides, self.padding)
        return avg_pool(inputs, *window, self.count_include_pad)


class _GlobalPool(Module):
    """Reduces all spatial axes; a subclass defines how."""

    _reduce: ClassVar[Callable[..., jax.Array]]

    def __init__(self, num_spatial_axes: int | None = None):
        if num_spatial_axes is not None and num_spatial_axes < 1:
            raise ValueError(
                f"{type(self).__name__} needs a positive num_spatial_axes, or None, "
                f"got {num_spatial_axes}."
            )
        self.num_spatial_axes = num_spatial_axes

    def __call__(
        self, inputs: Num[ArrayLike, "*batch_spatial features"]
    ) -> Num[Array, "*batch features"]:
        """Pools ``inputs``.

        Args:
            inputs: ``[*batch, *spatial, features]``.

        Returns:
            An array ``[*batch, features]`` of the dtype of ``inputs``; an average of
            integers has the default float.

        Raises:
            ValueError: If ``inputs`` has too few axes.
            TypeError: If ``inputs`` is not numeric.
        """
        inputs = arguments.as_array(inputs)
        num_axes = self.num_spatial_axes
        spatial = inputs.ndim - 2 if num_axes is None else num_axes
        if spatial < 1 or inputs.ndim < spatial + 1:
            raise ValueError(
                f"num_spatial_axes={num_axes} found no spatial axes to "
                "reduce: pass inputs [*batch, *spatial, features], with one batch axis "
                "if num_spatial_axes is None."
            )
        return self._reduce(inputs, tuple(range(-1 - spatial, -1)))


class GlobalMaxPool(_GlobalPool):
    """Takes the maximum over all spatial axes.

    Args:
        num_spatial_axes: How many axes before the last are spatial; all before these
            are batch axes. ``None``: all but the first and the last.

    Raises:
        ValueError: If ``num_spatial_axes`` is less than one.

    Example:
        >>> images = jnp.arange(16.0).reshape(2, 2, 2, 2)
        >>> nnx.GlobalMaxPool()(images)
        Array([[ 6.,  7.],
               [14., 15.]], dtype=float32)
        >>> nnx.GlobalMaxPool(num_spatial_axes=2)(images[0])
        Array([6., 7.], dtype=float32)
    """

    _reduce = staticmethod(jnp.max)


class GlobalMinPool(_GlobalPool):
    """Takes the minimum over all spatial axes.

    Args:
        num_spatial_axes: As for `GlobalMaxPool`.

    Raises:
        ValueError: If ``num_spatial_axes`` is less than one.

    Example:
        >>> nnx.GlobalMinPool()(jnp.arange(16.0).reshape(2, 2, 2, 2))
        Array([[0., 1.],
               [8., 9.]], dtype=float32)
    """

    _reduce = staticmethod(jnp.min)


class GlobalAvgPool(_GlobalPool):
    """Averages over all spatial axes.

    Args:
        num_spatial_axes: As for `GlobalMaxPool`.

    Raises:
        ValueError: If ``num_spatial_axes`` is less than one.

    Example:
        >>> nnx.GlobalAvgPool()(jnp.arange(16.0).reshape(2, 2, 2, 2))
        Array([[ 3.,  4.],
               [11., 12.]], dtype=float32)

    References:
        Lin, Chen and Yan, 2013, "Network In Network", section 3.2.
    """

    _reduce = staticmethod(jnp.mean)
