"""Objects whose results come in a dtype of their own: the last part of a policy.

An object has it in the static attribute `DTYPE`, so that it goes wherever the object
goes: through transforms, copies and pickles. The wrapper of methods (`methods.py`) asks
for it on each ``__call__``; of an object without one it learns that in 30 ns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from graftree.core.objects.attributes import DataObject
from graftree.core.variables.variables import Variable

# The attribute: a floating dtype.
DTYPE = "_output_dtype"


def casting(method: Callable[..., Any], dtype: Any) -> Callable[..., Any]:
    """A method whose results are cast to a dtype."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return cast(method(*args, **kwargs), dtype)

    return call


def cast(outputs: Any, dtype: Any) -> Any:
    """Casts the floating arrays in a result; objects and all else stay as they are."""
    return jax.tree.map(
        lambda x: x.astype(dtype) if _differs(x, dtype) else x,
        outputs,
        is_leaf=lambda x: isinstance(x, (DataObject, Variable)),
    )


def _differs(x: Any, dtype: Any) -> bool:
    return (
        isinstance(x, (jax.Array, np.ndarray))
        and jnp.issubdtype(x.dtype, jnp.floating)
        and x.dtype != dtype
    )
