"""What layers are given: inputs to check, and sizes, axes and padding to normalize.

A layer checks before it computes, and computes before it writes: a call that fails
leaves running statistics, caches and the counts of random streams as they were. The
checks read shapes and dtypes only, so they cost no operation and work on tracers. Where
an int is taken, a NumPy integer is, too; where a tuple, a list.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from graftree import errors
from graftree.annotations import Axes, LaxPadding, PaddingLike
from graftree.core.rng.streams import Rngs, RngStream
from graftree.core.variables import values


def as_array(layer: Any, inputs: Any) -> jax.Array:
    """Makes an array of the inputs of a layer, if they are not one yet.

    Objects of other kinds that have a shape, as quantization hooks take, stay as they
    are. What is not numeric is a TypeError.
    """
    if not values.is_array(inputs):
        try:
            inputs = jnp.asarray(inputs)
        except (TypeError, ValueError) as error:
            if hasattr(inputs, "shape") and not isinstance(inputs, np.ndarray):
                return inputs
            raise _not_numeric(layer, inputs) from error
    # Random keys are arrays for JAX, but have a dtype of another kind.
    if not isinstance(inputs.dtype, np.dtype):
        raise _not_numeric(layer, inputs)
    return inputs


def _not_numeric(layer: Any, inputs: Any) -> TypeError:
    return TypeError(misfit(layer, "needs an array of numbers.", inputs=inputs))


def misfit(layer: Any, what: str, way_out: str = "", **shown: Any) -> str:
    """Says what does not fit a layer, with dtype and shape of what is ``shown``."""
    where = "\n".join([f"{key}: {describe(value)}" for key, value in shown.items()])
    return errors.message(f"{name(layer)} {what}", where=where, way_out=way_out)


def setting(layer: Any, attribute: str, given: bool | None) -> bool:
    """What holds for a call: its argument, or else the attribute of the same name."""
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


def stream(layer: Any, given: Any, tag: str) -> RngStream | None:
    """The stream a call draws from: that of its argument, or else the layer's own."""
    rngs = layer.rngs if given is None else given
    if isinstance(rngs, Rngs):
        return getattr(rngs, tag)
    if rngs is None or isinstance(rngs, RngStream):
        return rngs
    raise TypeError(
        f"rngs must be a Rngs, RngStream or None, but {name(layer)} got {type(rngs)}."
    )


def axes(layer: Any, attribute: str, inputs: Any) -> tuple[int, ...]:
    """The axes that an attribute means, as `canonical_axes`; errors name the layer."""
    given: Axes = getattr(layer, attribute)
    try:
        return canonical_axes(given, inputs.ndim)
    except np.exceptions.AxisError as error:
        raise np.exceptions.AxisError(
            misfit(layer, f"with {attribute}={given}: {error}.", inputs=inputs)
        ) from error


def name(layer: Any) -> str:
    """The name of the class of a layer, as messages give it."""
    return type(layer).__name__


def describe(value: Any) -> str:
    """Dtype and shape of an array, ``float32[2, 3]``; the type of anything else."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    return type(value).__name__


def sizes(values: int | Sequence[int]) -> tuple[int, ...]:
    """Normalizes one size or several to a tuple."""
    if isinstance(values, int | np.integer):
        return (int(values),)
    return tuple(operator.index(value) for value in values)


def is_int(value: Any) -> TypeGuard[int]:
    """Whether ``value`` is a Python or NumPy integer."""
    return isinstance(value, int | np.integer)


def per_axis(value: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Gives one entry per spatial axis, from one for all, or from ``None`` for ones."""
    if value is None:
        return (1,) * rank
    values = sizes(value)
    return values * rank if is_int(value) else values


def if_set(**options: Any) -> dict[str, Any]:
    """The keywords that are not ``None``: for functions that may not have them."""
    return {key: value for key, value in options.items() if value is not None}


def canonical_axes(axes: Axes, ndim: int) -> tuple[int, ...]:
    """Lists axes as non-negative numbers in ascending order, without repeats."""
    entries = sizes(axes)
    return tuple(sorted({normalize_axis_index(axis, ndim) for axis in entries}))


def canonicalize_padding(padding: PaddingLike, rank: int) -> LaxPadding:
    """Brings the accepted forms of padding to those of ``jax.lax``.

    Args:
        padding: A name; an int; or a sequence with an int or a pair (tuple or list of
            two ints) per spatial axis.
        rank: The number of spatial axes.

    Returns:
        A name unchanged, else a list of ``rank`` pairs ``(low, high)``.

    Raises:
        ValueError: If ``padding`` has another form.

    Example:
        >>> from graftree.nn.support import arguments
        >>> arguments.canonicalize_padding(2, 2)
        [(2, 2), (2, 2)]
        >>> arguments.canonicalize_padding([1, (0, 2)], 2)
        [(1, 1), (0, 2)]
    """
    if isinstance(padding, str):
        return padding
    if is_int(padding):
        padding = [int(padding)] * rank
    if isinstance(padding, Sequence | np.ndarray):
        pairs = [pair for entry in padding if (pair := _pair(entry)) is not None]
        if len(pairs) == len(padding) == rank:
            return pairs
    raise ValueError(
        f"Invalid padding format: {padding}, should be str, int, or a sequence of "
        f"len {rank} where each element is an int or pair of ints."
    )


def _pair(entry: Any) -> tuple[int, int] | None:
    """Reads the padding of one axis; ``None`` if it cannot be read."""
    if is_int(entry):
        return (int(entry), int(entry))
    is_sequence = isinstance(entry, tuple | list | np.ndarray)
    if is_sequence and len(entry) == 2 and all(map(is_int, entry)):
        return (int(entry[0]), int(entry[1]))
    return None
