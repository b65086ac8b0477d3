"""Initializers: functions ``(key, shape, dtype) -> array`` that make initial values.

All but the three at the end are those of ``jax.nn.initializers`` itself. Of these,
``ones`` and ``zeros`` are initializers; the others make one when called, as in
``initializers.normal(stddev=0.02)``. Layers call an initializer with three positional
arguments and do not keep it.
"""

from __future__ import annotations

import sys
import typing

from jax.nn.initializers import *  # noqa: F403
from jax.nn.initializers import ones, zeros

from graftree import namespaces
from graftree.annotations import Initializer as Initializer


def zeros_init() -> Initializer:
    """Returns the initializer ``zeros``, for symmetry with the factories.

    Example:
        >>> nnx.initializers.zeros_init() is nnx.initializers.zeros
        True
    """
    return zeros


def ones_init() -> Initializer:
    """Returns the initializer ``ones``, for symmetry with the factories.

    Example:
        >>> nnx.initializers.ones_init() is nnx.initializers.ones
        True
    """
    return ones


if not typing.TYPE_CHECKING:
    __all__ = namespaces.public_names(sys.modules[__name__])
