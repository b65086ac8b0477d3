"""Which numbers of an array are not finite, and where: small programs, and their words.

What is asked of every array is one of four codes. What people read about the few arrays
of a finding, `describe` writes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from graftree import _jax
from graftree.core.text import short_forms

# The bits of a code.
NAN, INF = 1, 2


def code_of(x: Any) -> int:
    """Whether an array has NaN, infinities, both or none: a sum of `NAN` and `INF`."""
    if _jax.is_ref(x):
        x = x[...]
    if not is_inexact(x):
        return 0
    if isinstance(x, jax.Array) and not _is_on_host(x):
        return int(jax.device_get(_code(x)))
    # No program to compile, for each shape.
    numbers = np.asarray(x)
    if np.isfinite(numbers).all():
        return 0
    return NAN * int(np.isnan(numbers).any()) + INF * int(np.isinf(numbers).any())


def _is_on_host(x: jax.Array) -> bool:
    return x.is_fully_addressable and all(d.platform == "cpu" for d in x.devices())


def is_inexact(x: Any) -> bool:
    """Whether it has floating or complex numbers."""
    return jnp.issubdtype(_dtype(x), jnp.inexact)


def _dtype(x: Any) -> Any:
    return getattr(x, "dtype", None) or np.asarray(x).dtype


@jax.jit
def _code(x: Any) -> Any:
    return jnp.where(jnp.isnan(x).any(), NAN, 0) + jnp.where(jnp.isinf(x).any(), INF, 0)


def arising(out: Any, inputs: list[Any]) -> bool:
    """Whether a number of an output is infinite where all of the inputs are finite.

    The inputs have the shape of the output, or none.
    """
    return bool(jax.device_get(_arising(out, [x for x in inputs if is_inexact(x)])))


@jax.jit
def _arising(out: Any, inputs: list[Any]) -> Any:
    found = jnp.isinf(out)
    for x in inputs:
        found &= jnp.isfinite(x)
    return found.any()


def form_of(x: Any) -> str:
    """The dtype and the shape of an array, as in ``float32[2,3]``."""
    if _jax.is_ref(x):
        x = x[...]
    return short_forms.describe_form(_dtype(x), np.shape(x))


def describe(x: Any, kind: int = 0) -> str:
    """What is in an array: its form, its range, and what isn't finite in it.

    Of one kind, NaN or infinities, it tells the first place.
    """
    form, numbers = form_of(x), _numbers(x)
    if numbers is None or not numbers.size:
        return form
    if not numbers.ndim:
        return f"{form} {_text(numbers[()])}"
    finite = numbers[np.isfinite(numbers)]
    if finite.size == numbers.size:
        known = ", all finite" if is_inexact(x) else ""
        return f"{form} in [{_text(finite.min())}, {_text(finite.max())}]{known}"
    counts = {
        "nan": np.isnan(numbers).sum(),
        "+inf": np.isposinf(numbers).sum(),
        "-inf": np.isneginf(numbers).sum(),
    }
    text = ", ".join([f"{count:,} {name}" for name, count in counts.items() if count])
    first = f", first {_WORDS[kind]} at {[*first_place(x, kind)]}" if kind else ""
    return f"{form}: {text} of {numbers.size:,}{first}"


_WORDS = {NAN: "nan", INF: "inf"}


def first_place(x: Any, kind: int) -> tuple[int, ...]:
    """The index of the first NaN, or of the first infinity."""
    numbers = np.asarray(_numbers(x))
    found = np.isnan(numbers) if kind == NAN else np.isinf(numbers)
    return tuple(map(int, np.unravel_index(np.argmax(found), found.shape)))


def number_at(x: Any, place: tuple[int, ...]) -> str:
    """The number at an index; an axis of size one, or none, is that of all numbers."""
    numbers = np.asarray(_numbers(x))
    index = np.minimum(place[: numbers.ndim], np.subtract(numbers.shape, 1))
    return _text(numbers[tuple(index.astype(int))])


def _numbers(x: Any) -> np.ndarray | None:
    """The numbers of an array; sizes instead of complex ones. ``None`` without any."""
    if _jax.is_ref(x):
        x = x[...]
    is_here = getattr(x, "is_fully_addressable", True)
    if not is_here or not jnp.issubdtype(_dtype(x), jnp.number):
        return None
    numbers = np.asarray(x)
    if np.iscomplexobj(numbers):
        return np.abs(numbers)
    # NumPy does little with the smallest types of others.
    is_own = numbers.dtype.kind in "iuf" and numbers.dtype.itemsize > 2
    return numbers if is_own else numbers.astype(np.float32)


def _text(number: Any) -> str:
    return f"{number:.4g}" if abs(number) < 1e6 else f"{number:.3g}"
