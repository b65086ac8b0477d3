"""First values of Params: what initializers give, with less thought.

Eagerly, JAX's ``lecun_normal()`` takes 90 us for 64 numbers: 20 for the two programs
that draw and scale them, 70 to find the scale, which depends on the shape alone. And
``zeros`` takes 35, of which its last program takes 12. So the scale is kept, and what
is spread over the array. Another version of JAX may compute otherwise. So the second
time that a shape is asked for, both are computed and compared bit by bit; where they
differ, the initializer is called from then on.

So it is for `lecun_normal`, the default of our layers, and for JAX's ``zeros`` and
``ones``. Other initializers, and all in a trace or on a mesh, are called as they are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from graftree import _jax
from graftree.annotations import Dtype, Initializer, Shape
from graftree.nn.support import computation

# Where there are more numbers, drawing them takes longer than all else.
_MOST_NUMBERS = 2**16
# Of how many initializers and shapes something is kept: an array of one number.
_MOST_KNOWN = 512

lecun_normal: Any = jax.nn.initializers.lecun_normal()
"""The default initializer of weights; it is known by its identity."""
# The module of the distributions that it draws from.
_random: Any = lecun_normal.__globals__.get("random", jax.random)

_FILLINGS = {jax.nn.initializers.zeros: 0, jax.nn.initializers.ones: 1}


def make(
    initializer: Initializer, key: jax.Array, shape: Shape | int, dtype: Dtype
) -> Any:
    """What ``initializer(key, shape, dtype)`` gives."""
    if not _is_known(initializer) or not _is_plain(shape) or not _is_as_imported():
        return initializer(key, shape, dtype)
    context = _jax.eager_context()
    if context is None or _jax.concrete_mesh() is not None:
        return initializer(key, shape, dtype)
    try:
        known = _known(initializer, shape, dtype, context)
    except TypeError:  # what is given as the dtype has no hash, or is none
        return initializer(key, shape, dtype)
    if known.is_checked:
        return known.make(key)
    values = initializer(key, shape, dtype)
    known.check(key, values)
    return values


def _is_known(initializer: Any) -> bool:
    # By identity: others may be equal, or have no hash.
    return initializer is lecun_normal or initializer is _ZEROS or initializer is _ONES


_ZEROS, _ONES = _FILLINGS


def _is_plain(shape: Any) -> bool:
    # What is known of 2 would hold for 2.0 and True, too, which JAX may refuse.
    return type(shape) is tuple and _INT.issuperset(map(type, shape))


_INT = frozenset([int])


_is_as_imported = computation.watched("numpy.ones", "numpy.sqrt", "numpy.zeros")


class _Known:
    """How the values of one initializer, shape and dtype are made.

    Args:
        make: Makes them of a key; ``None`` if only the initializer can.

    Attributes:
        make: The same.
        is_checked: Whether the values are those of the initializer.
    """

    def __init__(self, make: Callable[[jax.Array], jax.Array] | None) -> None:
        self.make: Any = make
        self.is_checked = False
        self._uses = 0

    def check(self, key: jax.Array, values: jax.Array) -> None:
        """Compares its values with those of the initializer, the second time."""
        self._uses += 1
        if self._uses == 2 and self.make is not None:
            self.is_checked = _are_same(self.make(key), values)


@functools.lru_cache(_MOST_KNOWN)
def _known(initializer: Any, shape: Any, dtype: Any, _: Any) -> _Known:
    """What is known of an initializer under some settings of JAX."""
    if not 0 < math.prod(shape) <= _MOST_NUMBERS or np.dtype(dtype) not in _DTYPES:
        return _Known(None)
    if initializer in _FILLINGS:
        filling = jnp.array(_FILLINGS[initializer], dtype)
        return _Known(lambda _: jax.lax.broadcast(filling, shape))
    if len(shape) < 2:
        return _Known(None)  # it has no scale: the initializer raises
    scale = _scale(shape, dtype)
    return _Known(
        lambda key: _random.truncated_normal(key, -2, 2, shape, dtype) * scale
    )


_DTYPES = {np.dtype(kind) for kind in (jnp.float32, jnp.bfloat16, jnp.float16)}
# Of a standard normal distribution that is cut off at -2 and 2.
_DEVIATION = 0.87962566103423978


def _scale(shape: Shape, dtype: Dtype) -> jax.Array:
    """What `lecun_normal` multiplies truncated normal numbers by."""
    *_, ins, outs = shape
    field = math.prod(shape) / ins / outs
    variance = jnp.array(1.0 / (ins * field), dtype)
    return jnp.sqrt(variance) / jnp.array(_DEVIATION, dtype)


def _are_same(some: jax.Array, others: jax.Array) -> bool:
    return (
        (some.aval, some.sharding, some.committed)
        == (others.aval, others.sharding, others.committed)
    ) and np.asarray(some).tobytes() == np.asarray(others).tobytes()
