"""Initializers: functions ``(key, shape, dtype) -> array`` that make first values.

All but the three at the end are the very objects of ``jax.nn.initializers``. Of these,
``ones`` and ``zeros`` are initializers themselves; the others make one when called, as
in ``initializers.normal(stddev=0.02)``. Layers call an initializer with three
positional arguments and do not keep it.
"""

from __future__ import annotations

import jax

from graftree.annotations import Initializer

__all__ = [
    "Initializer",
    "constant",
    "delta_orthogonal",
    "glorot_normal",
    "glorot_uniform",
    "he_normal",
    "he_uniform",
    "kaiming_normal",
    "kaiming_uniform",
    "lecun_normal",
    "lecun_uniform",
    "normal",
    "ones",
    "ones_init",
    "orthogonal",
    "truncated_normal",
    "uniform",
    "variance_scaling",
    "xavier_normal",
    "xavier_uniform",
    "zeros",
    "zeros_init",
]

constant = jax.nn.initializers.constant
delta_orthogonal = jax.nn.initializers.delta_orthogonal
glorot_normal = jax.nn.initializers.glorot_normal
glorot_uniform = jax.nn.initializers.glorot_uniform
he_normal = jax.nn.initializers.he_normal
he_uniform = jax.nn.initializers.he_uniform
kaiming_normal = jax.nn.initializers.kaiming_normal
kaiming_uniform = jax.nn.initializers.kaiming_uniform
lecun_normal = jax.nn.initializers.lecun_normal
lecun_uniform = jax.nn.initializers.lecun_uniform
normal = jax.nn.initializers.normal
ones = jax.nn.initializers.ones
orthogonal = jax.nn.initializers.orthogonal
truncated_normal = jax.nn.initializers.truncated_normal
uniform = jax.nn.initializers.uniform
variance_scaling = jax.nn.initializers.variance_scaling
xavier_normal = jax.nn.initializers.xavier_normal
xavier_uniform = jax.nn.initializers.xavier_uniform
zeros = jax.nn.initializers.zeros


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
