"""Pooling as layers, for use in `Sequential`: the functions of ``pooling``, and more.

``MaxPool``, ``AvgPool`` and ``MinPool`` reduce sliding windows; ``GlobalMaxPool``,
``GlobalAvgPool`` and ``GlobalMinPool`` reduce all of the spatial axes. Inputs are
``[*batch, *spatial, features]``. No layer has Params or needs ``rngs``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from graftree import errors
from graftree.annotations import PaddingLike
from graftree.core.modules.modules import Module
from graftree.nn import pooling
from graftree.nn.support import arguments, checks

if TYPE_CHECKING:
    from jaxtyping import Array, Inexact, Num


class _WindowPool(Module):
    """The arguments that pooling over windows has in common."""

    def __init__(
        self,
        window_shape: int | Sequence[int],
        strides: int | Sequence[int] | None = None,
        padding: PaddingLike = "VALID",
    ):
        self.window_shape = _frozen(window_shape)
        self.strides = _frozen(strides)
        self.padding = _frozen(padding)


def _frozen(value: Any) -> Any:
    """Sizes or padding with tuples for lists, to be compared and hashed."""
    if value is None or isinstance(value, str):
        return value
    if arguments.is_int(value):
        return int(value)
    return tuple(map(_frozen, value))


class MaxPool(_WindowPool):
    """Takes the maximum of each window, as `max_pool` does.

    Args:
        window_shape: The extent of the windows per axis; an int means as much along all
            axes but the first and the last (along the only one, if there is one).
        strides: Step between windows: an int for all axes, or one each; ``None``: 1.
        padding: ``"SAME"``, ``"VALID"``, an int for all sides, or a sequence with an
            int or a ``(low, high)`` pair per window axis. It never is the maximum.

    Example:
        >>> model = nnx.Sequential(nnx.MaxPool(2, strides=2), jnp.ravel)
        >>> model(jnp.array([1.0, 4.0, 2.0, 3.0]).reshape(1, 4, 1))
        Array([4., 3.], dtype=float32)
    """

    def __call__(
        self, inputs: Num[Array, "*batch_spatial features"]
    ) -> Num[Array, "*batch_out_spatial features"]:
        """Pools ``inputs``.

        Args:
            inputs: ``[*batch, *window axes, features]``.

        Returns:
            An array ``[*batch, *out axes, features]`` of the dtype of ``inputs``.

        Raises:
            AssertionError: If ``inputs`` have too few axes, or if the lengths of
                ``window_shape``, ``strides`` and ``padding`` differ.
        """
        return pooling.max_pool(inputs, self.window_shape, self.strides, self.padding)


class MinPool(_WindowPool):
    """Takes the minimum of each window, as `min_pool` does.

    Args:
        window_shape: As for `MaxPool`.
        strides: As for `MaxPool`.
        padding: As for `MaxPool`. It never is the minimum.

    Example:
        >>> pool = nnx.MinPool((2,), strides=(2,))
        >>> pool(jnp.array([1.0, 4.0, 2.0, 3.0]).reshape(1, 4, 1)).ravel()
        Array([1., 2.], dtype=float32)
    """

    def __call__(
        self, inputs: Num[Array, "*batch_spatial features"]
    ) -> Num[Array, "*batch_out_spatial features"]:
        """Pools ``inputs``.

        Args:
            inputs: ``[*batch, *window axes, features]``.

        Returns:
            An array ``[*batch, *out axes, features]`` of the dtype of ``inputs``.

        Raises:
            AssertionError: As `MaxPool`.
        """
        return pooling.min_pool(inputs, self.window_shape, self.strides, self.padding)


class AvgPool(_WindowPool):
    """Averages each window, as `avg_pool` does.

    Args:
        window_shape: As for `MaxPool`.
        strides: As for `MaxPool`.
        padding: As for `MaxPool`. It counts as zeros.
        count_include_pad: Whether padding counts in the number that the sum of a window
            is divided by.

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
        self, inputs: Num[Array, "*batch_spatial features"]
    ) -> Inexact[Array, "*batch_out_spatial features"]:
        """Pools ``inputs``.

        Args:
            inputs: ``[*batch, *window axes, features]``.

        Returns:
            An array ``[*batch, *out axes, features]`` of the dtype of ``inputs``; that
            of integers is the default float.

        Raises:
            AssertionError: As `MaxPool`.
        """
        return pooling.avg_pool(
            inputs,
            self.window_shape,
            self.strides,
            self.padding,
            self.count_include_pad,
        )


class _GlobalPool(Module):
    """Which axes global pooling reduces."""

    def __init__(self, num_spatial_axes: int | None = None):
        if num_spatial_axes is not None and num_spatial_axes < 1:
            raise ValueError(
                f"{checks.name(self)} needs a positive num_spatial_axes, or None, "
                f"got {num_spatial_axes}."
            )
        self.num_spatial_axes = num_spatial_axes

    def _spatial_axes(self, inputs: jax.Array) -> tuple[int, ...]:
        """The axes before the last, as many as there should be."""
        spatial = self.num_spatial_axes
        if spatial is None:
            spatial = inputs.ndim - 2
        if spatial < 1 or inputs.ndim < spatial + 1:
            raise ValueError(
                errors.message(
                    f"{checks.name(self)} with "
                    f"num_spatial_axes={self.num_spatial_axes} found no spatial axes "
                    "to reduce: it takes inputs [*batch, *spatial, features], with one "
                    "batch axis if num_spatial_axes is None.",
                    where=f"inputs: {checks.describe(inputs)}",
                    way_out="Say how many axes before the last are spatial: "
                    f"{checks.name(self)}(num_spatial_axes=...).",
                )
            )
        return tuple(range(-1 - spatial, -1))


class GlobalMaxPool(_GlobalPool):
    """Takes the maximum over all spatial axes.

    Args:
        num_spatial_axes: How many axes, those before the last, are spatial; all before
            them are batch axes. ``None``: all but the first and the last.

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

    def __call__(
        self, inputs: Num[Array, "*batch_spatial features"]
    ) -> Num[Array, "*batch features"]:
        """Pools ``inputs``.

        Args:
            inputs: ``[*batch, *spatial, features]``.

        Returns:
            An array ``[*batch, features]`` of the dtype of ``inputs``.

        Raises:
            ValueError: If ``inputs`` have too few axes.
            TypeError: If they are no numbers.
        """
        inputs = checks.as_array(self, inputs)
        return jnp.max(inputs, self._spatial_axes(inputs))


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

    def __call__(
        self, inputs: Num[Array, "*batch_spatial features"]
    ) -> Num[Array, "*batch features"]:
        """Pools ``inputs``.

        Args:
            inputs: ``[*batch, *spatial, features]``.

        Returns:
            An array ``[*batch, features]`` of the dtype of ``inputs``.

        Raises:
            ValueError: If ``inputs`` have too few axes.
            TypeError: If they are no numbers.
        """
        inputs = checks.as_array(self, inputs)
        return jnp.min(inputs, self._spatial_axes(inputs))


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

    def __call__(
        self, inputs: Num[Array, "*batch_spatial features"]
    ) -> Inexact[Array, "*batch features"]:
        """Pools ``inputs``.

        Args:
            inputs: ``[*batch, *spatial, features]``.

        Returns:
            An array ``[*batch, features]`` of the dtype of ``inputs``; that of integers
            is the default float.

        Raises:
            ValueError: If ``inputs`` have too few axes.
            TypeError: If they are no numbers.
        """
        inputs = checks.as_array(self, inputs)
        return jnp.mean(inputs, self._spatial_axes(inputs))
