"""Operations that JAX differentiates once per shape, not at each use.

It takes the derivative of a bare primitive anew wherever that stands, which is most of
what tracing the gradient of a layer costs; under `jax.jit` it takes it once. Inlined,
the program is the same, equation for equation.

Each function rounds once: compiled together, two operations may round otherwise than
one after the other, and layers give the same bits inside a program and outside.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from graftree.annotations import DotGeneralT, Shape

_inlined = functools.partial(jax.jit, inline=True)

dot_general = _inlined(
    jax.lax.dot_general,
    static_argnames=(
        "dimension_numbers",
        "precision",
        "preferred_element_type",
        "out_sharding",
    ),
)
"""``jax.lax.dot_general``."""
rsqrt = _inlined(jax.lax.rsqrt)
"""``1 / sqrt(x)``."""


def contraction(given: DotGeneralT) -> DotGeneralT:
    """The given function, or for ``jax.lax.dot_general`` that of this file."""
    return dot_general if given is jax.lax.dot_general else given


@functools.partial(_inlined, static_argnames="shape")
def add(x: Any, parameter: Any, shape: Shape) -> jax.Array:
    """Computes ``x + parameter``.

    Args:
        x: An array.
        parameter: The parameter.
        shape: The shape that the parameter is given, to broadcast against ``x``. Layers
            may not lean on implicit rank promotion, which users can forbid.
    """
    return x + jnp.reshape(parameter, shape)


@functools.partial(_inlined, static_argnames="shape")
def multiply(x: Any, parameter: Any, shape: Shape) -> jax.Array:
    """Computes ``x * parameter``; see `add`."""
    return x * jnp.reshape(parameter, shape)


@functools.partial(_inlined, static_argnames="out_sharding")
def look_up(table: Any, numbers: Any, out_sharding: Any) -> jax.Array:
    """The rows of a table with these numbers; NaN where it has no such row.

    Args:
        table: An array.
        numbers: Integers; negative ones count from the end.
        out_sharding: The sharding of the result, or ``None``.
    """
    return table.at[numbers].get(mode="fill", out_sharding=out_sharding)
