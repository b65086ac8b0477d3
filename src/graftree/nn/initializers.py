"""Initializers: functions ``(key, shape, dtype) -> array`` that make initial values.

All but the three at the end are those of ``jax.nn.initializers`` itself. Of these,
``ones`` and ``zeros`` are initializers; the others make one when called, as in
``initializers.normal(stddev=0.02)``. Layers call an initializer with three positional
arguments and do not keep it.
"""

from __future__ import annotations

import sys
import typing

from jax.nn.initializers import (
    constant as constant,
    delta_orthogonal as delta_orthogonal,
    glorot_normal as glorot_normal,
    glorot_uniform as glorot_uniform,
    he_normal as he_normal,
    he_uniform as he_uniform,
    kaiming_normal as kaiming_normal,
    kaiming_uniform as kaiming_uniform,
    lecun_normal as lecun_normal,
    lecun_uniform as lecun_uniform,
    normal as normal,
    ones as ones,
    orthogonal as orthogonal,
    truncated_normal as truncated_normal,
    uniform as uniform,
    variance_scaling as variance_scaling,
    xavier_normal as xavier_normal,
    xavier_uniform as xavier_uniform,
    zeros as zeros,
)

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
