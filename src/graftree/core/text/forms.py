"""Which form a text has: full, or compact where the full one is long.

- The *full form* (`writing.py`) shows every attribute. A ``repr`` has it if it is not
  longer than ``config.graftree_repr_lines``.
- The *compact form* (`condensing.py`) is for larger objects: equal siblings once, no
  defaults, arrays as ``float32[2,3]``. Its last line says how to get the full one.

A ``repr`` that is asked for while another text is written is a part of that one. Which
form it is, is found without reading an array: a large model costs no transfer. In the
full form of a ``repr`` arrays of more than `MAX_ELEMENTS` elements are shortened
everywhere, except in a Variable by itself, which prints as its array does.
"""

from __future__ import annotations

import math
from typing import Any

from graftree import _jax, config
from graftree.core.text import colors, condensing, folding, writing

MAX_ELEMENTS = 100
_HINT = " # shortened; in full: print(nnx.debugging.full_repr(...))"


def get_repr(obj: Any, *, color: colors.Color = colors.NO_COLOR) -> str:
    """Writes an object as text, in the form that ``repr`` has.

    Args:
        obj: The object.
        color: The colors; plain by default.

    Returns:
        The text, without a line break at its end.

    Raises:
        TypeError: If ``__nnx_repr__`` yields anything but one `Object` and then
            `Attr` items.

    Example:
        >>> nnx.reprlib.get_repr(nnx.reprlib.PrettyMapping({}))
        'PrettyMapping({})'
    """
    active = writing.active()
    if active is not None:
        return active.object(obj)
    limit = config.graftree_repr_lines
    if limit is None or _is_variable_of_array(obj):
        return writing.Writer(color).write(obj)
    if _has_more_lines(obj, limit):
        comment = f"{color.COMMENT}{_HINT}{color.END}"
        return condensing.Condenser(obj, color).write(obj) + comment
    return writing.Writer(color, MAX_ELEMENTS).write(obj)


def colorized(x: Any, /) -> str:
    """Writes any value as text, in color where `colors.supports_color`.

    Args:
        x: The value.

    Returns:
        Its ``repr``, with the bare name for a class.

    Example:
        >>> nnx.reprlib.colorized([int, "a"])
        "[int, 'a']"
    """
    active = writing.active()
    return full(x, colors.default()) if active is None else active.value(x)


def full(x: Any, color: colors.Color = colors.NO_COLOR) -> str:
    """Writes any value as text in the full form."""
    return writing.Writer(color).write(x)


def _is_variable_of_array(x: Any) -> bool:
    return writing.is_variable(x) and folding.is_array(x.get_raw_value())


def _has_more_lines(obj: Any, limit: int) -> bool:
    counter = _LineCounter(limit)
    return counter.write(obj).count("\n") >= limit or counter.is_over


class _LineCounter(writing.Writer):
    """Writes a text with the lines of the full form, in which no value is read.

    Args:
        limit: The number of lines after which it ends.

    Attributes:
        is_over: Whether it ended there.
    """

    reads_values = False

    def __init__(self, limit: int) -> None:
        super().__init__(max_elements=MAX_ELEMENTS)
        self.limit = limit
        self.lines = 0  # so far, or fewer
        self.is_over = False

    def object(self, x: Any) -> str:
        """The lines of an object."""
        self.lines += 1
        # Each object that is open will add a line to close it.
        if self.lines + self.depth > self.limit:
            self.is_over = True
        return "" if self.is_over else super().object(x)

    def array(self, x: Any) -> str:
        """The lines of an array."""
        if self.is_shortened(x):
            return ""
        # About as many as NumPy writes.
        *rows, columns = x.shape or (1,)
        return "\n" * (math.prod(rows) * math.ceil(columns / 8) - 1)

    def plain(self, x: Any) -> str:
        """The lines of anything else."""
        if not _jax.is_pytree_type(type(x)) or x is None:
            return super().plain(x)
        # Its repr would read the arrays in it.
        children, _ = _jax.flatten_one_level(x)
        return "".join(self.value(child) for _, child in children)
