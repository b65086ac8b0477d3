"""Calls of JAX's functions, as they are at that moment.

Libraries that quantize, count or record put functions of their own in the place of
JAX's, for a while. So a layer looks a function up when it calls it, also the default of
an argument, and it calls it bare. A `jax.jit` around it would save some time in tracing
gradients, but keep what it met first, and trace that in a place of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from graftree.annotations import Shape

# What arguments of layers are by default, and where JAX has it.
_DEFAULTS: tuple[tuple[Any, Any, str], ...] = (
    (jax.lax.dot_general, jax.lax, "dot_general"),
    (jax.lax.conv_general_dilated, jax.lax, "conv_general_dilated"),
    (jnp.einsum, jnp, "einsum"),
    (jnp.multiply, jnp, "multiply"),
    (jnp.tanh, jnp, "tanh"),
    (jax.nn.sigmoid, jax.nn, "sigmoid"),
)


def current(function: Any) -> Any:
    """What JAX has now in the place of a default; any other function as it is."""
    for default, module, name in _DEFAULTS:
        if function is default:
            return getattr(module, name)
    return function


def contract(
    function: Any, check: Callable[[], None], *operands: Any, **options: Any
) -> Any:
    """Calls the contraction of a layer.

    Args:
        function: The contraction that the layer was given.
        check: Raises if the operands are none for JAX's contraction, in terms of the
            layer. It is asked only after that has refused them: what is in its place
            may take others.
        *operands: The positional arguments of the contraction.
        **options: Its keywords.

    Returns:
        What the contraction does.
    """
    is_default = any([function is default for default, _, _ in _DEFAULTS])
    try:
        return current(function)(*operands, **options)
    except Exception:
        if is_default:
            check()
        raise


def add(x: Any, parameter: Any, shape: Shape) -> jax.Array:
    """Computes ``x + parameter``.

    Args:
        x: An array.
        parameter: The parameter.
        shape: The shape that the parameter is given, to broadcast against ``x``. Layers
            may not lean on implicit rank promotion, which users can forbid.
    """
    return x + jnp.reshape(parameter, shape)


def multiply(x: Any, parameter: Any, shape: Shape) -> jax.Array:
    """Computes ``x * parameter``; see `add`."""
    return x * jnp.reshape(parameter, shape)
