"""Writes objects as text: the engine behind ``repr`` and ``str``.

An object describes itself by yielding one `Object` and then its `Attr` items from
``__nnx_repr__``; this file decides how that looks. What always holds:

- ``repr`` is plain; only ``str`` is colored, and only on a terminal;
- in one text each node is written out once and abbreviated as ``Type(...)`` after
  that, so cycles end; objects deeper than ``config.flax_max_repr_depth`` are
  abbreviated, too;
- arrays that are attributes of a node are shortened to shape and dtype.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from graftree import _jax, config
from graftree.core.text import colors


@dataclasses.dataclass(frozen=True, slots=True)
class Object:
    """The frame of an object: the first item that ``__nnx_repr__`` yields.

    Args:
        type: The class, or the name to show.
        start: The text after the name.
        end: The last text.
        kv_sep: The text between key and value.
        indent: The indentation of the attributes.
        empty_repr: The text between ``start`` and ``end`` if there are no attributes.
        comment: The text after ``start`` on the first line.
        same_line: Whether to put all attributes on one line, without the comment.

    Example:
        >>> class Point(nnx.reprlib.Representable):
        ...     def __nnx_repr__(self):
        ...         yield nnx.reprlib.Object("Point", start="<", end=">", kv_sep=": ")
        ...         yield nnx.reprlib.Attr("x", 1)
        >>> Point()
        Point<
          x: 1
        >
    """

    type: str | type
    start: str = "("
    end: str = ")"
    kv_sep: str = "="
    indent: str = "  "
    empty_repr: str = ""
    comment: str = ""
    same_line: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Attr:
    """One attribute of an object: what ``__nnx_repr__`` yields after the `Object`.

    Args:
        key: The name to show.
        value: The value to show.
        start: The text before the key.
        end: The text after the value.
        use_raw_value: Whether ``value`` is text to be shown without quotes.
        use_raw_key: Whether ``key`` is text that already has its colors.

    Example:
        >>> class Length(nnx.reprlib.Representable):
        ...     def __nnx_repr__(self):
        ...         yield nnx.reprlib.Object("Length")
        ...         yield nnx.reprlib.Attr("x", "3 m", use_raw_value=True)
        >>> Length()
        Length(
          x=3 m
        )
    """

    key: Any
    value: Any
    start: str = ""
    end: str = ""
    use_raw_value: bool = False
    use_raw_key: bool = False


def get_repr(obj: Any, *, color: colors.Color = colors.NO_COLOR) -> str:
    """Writes an object as text.

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
    return _active.write(_Writer.object, obj, color)


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
    return _active.write(_Writer.value, x, colors.default())


def shortens_arrays() -> bool:
    """Whether arrays are abbreviated at the current position."""
    return _active.writer is not None and _active.writer.short


def described(obj: Any) -> tuple[Object, list[Attr]]:
    """What an object says about itself: its frame and its attributes."""
    frame, *attributes = [*obj.__nnx_repr__()] or [None]
    method = f"{type(obj).__name__}.__nnx_repr__"
    if not isinstance(frame, Object):
        raise TypeError(
            f"First item of {method} must be an Object, got {type(frame).__name__}."
        )
    for attribute in attributes:
        if not isinstance(attribute, Attr):
            raise TypeError(
                f"Item of {method} must be an Attr, got {type(attribute).__name__}."
            )
    return frame, attributes


# The writer at work. Part of the text may be asked for by a foreign container, which
# calls repr() on what it holds: that belongs to the text being written.


class _Active(threading.local):
    """The writer at work in this thread, if any."""

    writer: _Writer | None = None

    def write(
        self, method: Callable[[_Writer, Any], str], x: Any, color: colors.Color
    ) -> str:
        if self.writer is not None:
            return method(self.writer, x)
        self.writer = _Writer(color, config.flax_max_repr_depth)
        try:
            return method(self.writer, x)
        finally:
            self.writer = None


_active = _Active()


class _Writer:
    """Writes one text; knows what it has written and where it is.

    Attributes:
        short: Whether the arrays at the current place are shortened.
    """

    def __init__(self, color: colors.Color, max_depth: int | None):
        self.color = color
        self.max_depth = max_depth
        self.short = False
        self.depth = 0
        # By identity; the objects are kept alive, so that no other takes their id.
        self.nodes: dict[int, Any] = {}
        self.open: dict[int, Any] = {}

    def object(self, x: Any) -> str:
        frame, attributes = described(x)
        too_deep = self.max_depth is not None and self.depth >= self.max_depth
        if too_deep or id(x) in self.nodes or id(x) in self.open:
            return self._framed(frame, "..." + frame.end)
        if is_node(x):
            self.nodes[id(x)] = x
        self.open[id(x)] = x
        outer_short = self.short
        self.short = (outer_short or is_node(x)) and not getattr(
            type(x), "__nnx_repr_full__", False
        )
        self.depth += 1
        try:
            lines = [self._attribute(frame, attribute) for attribute in attributes]
        finally:
            self.depth -= 1
            self.short = outer_short
            del self.open[id(x)]
        return self._joined(frame, lines)

    def _attribute(self, frame: Object, attribute: Attr) -> str:
        key, c = str(attribute.key), self.color
        if key and not attribute.use_raw_key:
            key = f"{c.ATTRIBUTE}{key}{c.END}"
        if frame.kv_sep:
            key += f"{c.SEP}{frame.kv_sep}{c.END}"
        value = attribute.value
        text = str(value) if attribute.use_raw_value else self.value(value)
        text = text.replace("\n", "\n" + frame.indent)
        return f"{attribute.start}{key}{text}{attribute.end}"

    def _joined(self, frame: Object, lines: list[str]) -> str:
        if not lines:
            return self._framed(frame, frame.empty_repr + frame.end)
        if frame.same_line:
            return self._framed(frame, frame.end, ", ".join(lines))
        c = self.color
        comment = f"{c.COMMENT}{frame.comment}{c.END}" if frame.comment else ""
        body = ",\n".join(frame.indent + line for line in lines)
        return self._framed(frame, frame.end, f"{comment}\n{body}\n")

    def _framed(self, frame: Object, end: str, body: str = "") -> str:
        c, kind = self.color, frame.type
        name = kind if isinstance(kind, str) else kind.__name__
        opening = f"{c.TYPE}{name}{c.END}" if name else ""
        return f"{opening}{c.PAREN}{frame.start}{c.END}{body}{c.PAREN}{end}{c.END}"

    def value(self, x: Any) -> str:
        if hasattr(type(x), "__nnx_repr__"):
            return self.object(x)
        if type(x) in (list, tuple, dict):
            return self._container(x)
        if isinstance(x, type):
            return f"{self.color.TYPE}{x.__name__}{self.color.END}"
        if isinstance(x, (jax.Array, np.ndarray)) or _jax.is_ref(x):
            return self._array(x)
        name = _COLOR_NAMES.get(type(x))
        code = getattr(self.color, name) if name else ""
        return f"{code}{x!r}{self.color.END}" if code else repr(x)

    def _container(self, x: list | tuple | dict) -> str:
        if id(x) in self.open:
            return "{...}" if isinstance(x, dict) else "[...]"
        self.open[id(x)] = x
        c = self.color
        if isinstance(x, dict):
            start, end = "{", "}"
            parts = [
                f"{self.value(k)}{c.SEP}: {c.END}{self.value(v)}" for k, v in x.items()
            ]
        else:
            start, end = "()" if isinstance(x, tuple) else "[]"
            parts = [self.value(element) for element in x]
        del self.open[id(x)]
        comma = "," if isinstance(x, tuple) and len(x) == 1 else ""
        return f"{c.PAREN}{start}{c.END}{', '.join(parts)}{comma}{c.PAREN}{end}{c.END}"

    def _array(self, x: Any) -> str:
        if not (self.short and x.size > 1):
            try:
                return repr(x)
            except RuntimeError:  # a donated array has a shape but no values
                pass
        c = self.color
        name = "ArrayRef" if _jax.is_ref(x) else "Array"
        facts = ", ".join(
            f"{c.ATTRIBUTE}{key}{c.END}{c.SEP}={c.END}{self.value(fact)}"
            for key, fact in (("shape", x.shape), ("dtype", x.dtype))
        )
        return f"{c.TYPE}{name}{c.END}{c.PAREN}({c.END}{facts}{c.PAREN}){c.END}"


_COLOR_NAMES = {
    int: "INT",
    str: "STRING",
    float: "FLOAT",
    bool: "BOOL",
    type(None): "NONE",
}


def is_node(x: Any) -> bool:
    """Whether ``x`` is a Pytree."""
    # Any attribute of a class may be the user's, also one of this name in a Variable.
    return not is_variable(x) and hasattr(type(x), "_pytree__nodes")


def is_variable(x: Any) -> bool:
    """Whether ``x`` is a Variable."""
    return isinstance(x, tuple(_variable_types))


# The class Variable, which puts itself here: it is made of what stands in this file.
_variable_types: list[type] = []


def register_variable_type(cls: type) -> None:
    """Makes the instances of a class Variables for `is_variable`."""
    _variable_types.append(cls)
