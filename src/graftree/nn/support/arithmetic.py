"""Sums and products of arrays of any dtypes, in the dtype that holds both.

Users can forbid JAX to promote dtypes: ``jax.numpy_dtype_promotion("strict")``. A layer
decides on dtypes itself, by the standard rules.
"""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp

from graftree.annotations import Dtype


def wide_dtype(*dtypes: Dtype) -> Dtype:
    """Finds the dtype that holds all of these, by the standard rules of JAX."""
    if len({*dtypes}) == 1:
        return dtypes[0]
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jnp.promote_types, dtypes)


def alike(*arrays: jax.Array) -> list[jax.Array]:
    """Casts arrays to the dtype that holds all of them."""
    dtype = wide_dtype(*[x.dtype for x in arrays])
    return [x if x.dtype == dtype else x.astype(dtype) for x in arrays]


def plus(x: jax.Array, y: jax.Array | None) -> jax.Array:
    """Computes ``x + y``; what is absent adds nothing."""
    return x if y is None else operator.add(*alike(x, y))


def minus(x: jax.Array, y: jax.Array) -> jax.Array:
    """Computes ``x - y``."""
    return operator.sub(*alike(x, y))


def times(x: jax.Array, y: jax.Array | None) -> jax.Array:
    """Computes ``x * y``; what is absent counts as one."""
    return x if y is None else operator.mul(*alike(x, y))


def over(x: jax.Array, y: jax.Array) -> jax.Array:
    """Computes ``x / y``."""
    return operator.truediv(*alike(x, y))
