"""Sizes, axes and padding, as users may write them and as layers want them.

Wherever an int is taken, a NumPy integer is, too; wherever a tuple, a list.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from graftree.annotations import Axes, LaxPadding, PaddingLike


def sizes(values: int | Sequence[int]) -> tuple[int, ...]:
    """Normalizes one size or several, also NumPy integers and lists, to a tuple."""
    if is_int(values):
        return (int(values),)
    return tuple(operator.index(value) for value in values)


def is_int(value: Any) -> bool:
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
    """Lists axes as non-negative numbers in ascending order, without repeats.

    Raises:
        ValueError: If an axis does not exist. It is an IndexError, too.
    """
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
        return [(int(padding),) * 2] * rank
    if isinstance(padding, Sequence | np.ndarray) and len(padding) == rank:
        pairs = [_pair(entry) for entry in padding]
        if None not in pairs:
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
