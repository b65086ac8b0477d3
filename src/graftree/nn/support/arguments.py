"""What layers are given: inputs, settings, and sizes, axes and padding to normalize.

A layer computes before it writes: a call that fails leaves running statistics, caches
and the counts of random streams as they were. What JAX refuses it need not check, since
every error in a layer gets a note that says where and given what (`failures.py`). It
checks what JAX would broadcast or stack, and so compute something else in silence; such
checks read shapes and dtypes only. Where an int is taken, a NumPy integer is, too;
where a tuple, a list.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from graftree.annotations import Axes, LaxPadding, PaddingLike
from graftree.core.rng.streams import Rngs, RngStream
from graftree.core.variables import values


def as_array(inputs: Any) -> jax.Array:
    """Makes an array of the inputs of a layer, if they are not one yet.

    Objects of other kinds that have a shape, as quantization hooks take, stay as they
    are.
    """
    if values.is_array(inputs):
        return inputs
    try:
        return jnp.asarray(inputs)
    except (TypeError, ValueError):
        if hasattr(inputs, "shape") and not isinstance(inputs, np.ndarray):
            return inputs
        raise


def setting(layer: Any, attribute: str, given: bool | None) -> bool:
    """What holds for a call: its argument, or else the attribute of the same name."""
    if given is None:
        given = getattr(layer, attribute)
    if given is None:
        name = type(layer).__name__
        raise ValueError(
            f"No `{attribute}` argument was provided to {name}, as argument of the "
            "call or as attribute.\n"
            f"Pass it to the constructor: {name}(..., {attribute}=False)\n"
            f"or to the call: layer(x, {attribute}=False)\n"
            f"or to a view: nnx.view(model, {attribute}=False)"
        )
    return given


def stream(layer: Any, given: Any, tag: str) -> RngStream | None:
    """The stream a call draws from: that of its argument, or else the layer's own."""
    rngs = layer.rngs if given is None else given
    if isinstance(rngs, Rngs):
        return getattr(rngs, tag)
    if rngs is None or isinstance(rngs, RngStream):
        return rngs
    raise TypeError(f"rngs must be a Rngs, RngStream or None, but got {type(rngs)}.")


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
