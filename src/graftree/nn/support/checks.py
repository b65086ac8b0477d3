"""What layers demand of their inputs, and errors that name the layer.

A layer checks before it computes, and computes before it writes: a call that fails
leaves running statistics, caches and the counts of random streams as they were. The
checks read shapes and dtypes only, so they cost no operation and work on tracers.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from graftree import errors
from graftree.annotations import Axes
from graftree.core.variables import values
from graftree.nn.support import arguments


def as_array(layer: Any, inputs: Any) -> Any:
    """Makes an array of the inputs of a layer, if they are not one yet.

    Args:
        layer: Is named in the message.
        inputs: An array; or what JAX makes one of, such as a list. Objects of other
            kinds that have a shape, as quantization hooks take, stay as they are.

    Returns:
        ``inputs`` itself if it is a JAX array, else a new one.

    Raises:
        TypeError: If ``inputs`` are no numbers.
    """
    if not values.is_array(inputs):
        try:
            inputs = jnp.asarray(inputs)
        except (TypeError, ValueError) as error:
            if hasattr(inputs, "shape") and not isinstance(inputs, np.ndarray):
                return inputs
            raise _no_numbers(layer, inputs) from error
    # Random keys are arrays for JAX, but have a dtype of another kind.
    if not isinstance(inputs.dtype, np.dtype):
        raise _no_numbers(layer, inputs)
    return inputs


def _no_numbers(layer: Any, inputs: Any) -> TypeError:
    return TypeError(
        errors.message(
            f"{name(layer)} needs an array of numbers.",
            where=f"inputs: {describe(inputs)}",
        )
    )


def setting(layer: Any, attribute: str, given: bool | None) -> bool:
    """Says what holds for a call: its argument, or else the attribute of the layer.

    Args:
        layer: The layer.
        attribute: The name of both.
        given: The argument of the call; ``None`` if it was left out.

    Raises:
        ValueError: If the attribute is ``None``, too.
    """
    if given is None:
        given = getattr(layer, attribute)
    if given is None:
        raise ValueError(
            errors.message(
                f"No `{attribute}` argument was provided to {name(layer)}, as argument "
                "of the call or as attribute.",
                way_out=(
                    f"Pass it to the constructor: {name(layer)}(..., "
                    f"{attribute}=False)\n"
                    f"or to the call: layer(x, {attribute}=False)\n"
                    f"or to a view: nnx.view(model, {attribute}=False)"
                ),
            )
        )
    return given


def axes(layer: Any, attribute: str, inputs: Any) -> tuple[int, ...]:
    """Lists the axes of the inputs that an attribute of a layer means.

    Args:
        layer: The layer.
        attribute: The name of the attribute that holds the axes.
        inputs: The array that has them.

    Returns:
        Non-negative axes in ascending order.

    Raises:
        ValueError: If an axis does not exist. It is an IndexError, too.
    """
    given: Axes = getattr(layer, attribute)
    try:
        return arguments.canonical_axes(given, inputs.ndim)
    except np.exceptions.AxisError as error:
        raise np.exceptions.AxisError(
            errors.message(
                f"{name(layer)} with {attribute}={given}: {error}.",
                where=f"inputs: {describe(inputs)}",
            )
        ) from error


def name(layer: Any) -> str:
    """The name of the class of a layer, as messages give it."""
    return type(layer).__name__


def describe(value: Any) -> str:
    """Dtype and shape of an array as in ``float32[2, 3]``; the type of anything else.

    Example:
        >>> from graftree.nn.support import checks
        >>> checks.describe(jnp.ones((2, 3))), checks.describe(None)
        ('float32[2, 3]', 'NoneType')
    """
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    return type(value).__name__
