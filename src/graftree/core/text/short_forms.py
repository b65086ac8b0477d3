"""What an array is, in short: its dtype and its shape, as in ``float32[2,3]``.

JAX writes it so in its messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def describe(x: Any) -> str:
    """The dtype and the shape of an array, or of what stands for one."""
    return describe_form(x.dtype, x.shape)


def describe_form(dtype: Any, shape: Sequence[Any]) -> str:
    """The same of a dtype and a shape."""
    return f"{dtype}{describe_shape(shape)}"


def describe_shape(shape: Sequence[Any]) -> str:
    """A shape alone, as in ``[2,3]``."""
    return f"[{','.join(map(str, shape))}]"
