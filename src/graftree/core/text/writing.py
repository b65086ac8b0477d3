"""Writes objects as text, in the full form (see `forms.py`).

An object describes itself by yielding one `Object` and then its `Attr` items from
``__nnx_repr__``; this file decides how that looks. What always holds:

- ``repr`` is plain; only ``str`` is colored, and only on a terminal;
- in one text each node is written out once and abbreviated as ``Type(...)`` after
  that, so cycles end; objects deeper than ``config.flax_max_repr_depth`` are
  abbreviated, too;
- arrays that are attributes of a node are shortened to shape and dtype;
- a value whose own ``repr`` fails is named by its type.
"""

from __future__ import annotations

import dataclasses
import threading
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


def shortens_arrays() -> bool:
    """Whether arrays are abbreviated at the current position."""
    return _active.writer is not None and _active.writer.short


def reads_values() -> bool:
    """Whether the text being written shows values, which have to be computed."""
    return _active.writer is None or _active.writer.reads_values


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

    writer: Writer | None = None


_active = _Active()


def active() -> Writer | None:
    """The writer at work in this thread, if any."""
    return _active.writer


class Writer:
    """Writes one text; knows what it has written and where it is.

    Args:
        color: The colors.
        max_elements: Arrays with more elements are shortened wherever they are, except
            by themselves; ``None`` for no limit.

    Attributes:
        reads_values: Whether it shows values, and not only shapes.
        short: Whether the arrays at the current place are shortened.
    """

    reads_values = True

    def __init__(
        self, color: colors.Color = colors.NO_COLOR, max_elements: int | None = None
    ):
        self.color = color
        self.max_elements = max_elements
        self.max_depth = config.flax_max_repr_depth
        self.short = False
        self.depth = 0
        # By identity; the objects are kept alive, so that no other takes their id.
        self.nodes: dict[int, Any] = {}
        self.open: dict[int, Any] = {}

    def write(self, x: Any) -> str:
        """The text of an object or value, which is no part of another text."""
        outer, _active.writer = _active.writer, self
        try:
            return self.value(x)
        finally:
            _active.writer = outer

    def is_abbreviated(self, x: Any) -> bool:
        """Whether an object is written as dots: it is too deep, or was written."""
        too_deep = self.max_depth is not None and self.depth >= self.max_depth
        return too_deep or id(x) in self.nodes or id(x) in self.open

    def object(self, x: Any) -> str:
        """The text of a part that has a ``__nnx_repr__``."""
        frame, attributes = described(x)
        if self.is_abbreviated(x):
            return self.framed(frame, "..." + frame.end)
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
            return self.framed(frame, frame.empty_repr + frame.end)
        if frame.same_line:
            return self.framed(frame, frame.end, ", ".join(lines))
        c = self.color
        comment = f"{c.COMMENT}{frame.comment}{c.END}" if frame.comment else ""
        body = ",\n".join(frame.indent + line for line in lines)
        return self.framed(frame, frame.end, f"{comment}\n{body}\n")

    def framed(self, frame: Object, end: str, body: str = "") -> str:
        """The frame of an object around a text."""
        c = self.color
        return f"{self.opening(frame)}{body}{c.PAREN}{end}{c.END}"

    def opening(self, frame: Object) -> str:
        """The name of an object and what follows it."""
        c, kind = self.color, frame.type
        name = kind if isinstance(kind, str) else kind.__name__
        colored = f"{c.TYPE}{name}{c.END}" if name else ""
        return f"{colored}{c.PAREN}{frame.start}{c.END}"

    def value(self, x: Any) -> str:
        """The text of any part."""
        if hasattr(type(x), "__nnx_repr__"):
            return self.object(x)
        if type(x) in (list, tuple, dict):
            return self._container(x)
        if isinstance(x, (jax.Array, np.ndarray)) or _jax.is_ref(x):
            return self.array(x)
        return self.plain(x)

    def plain(self, x: Any) -> str:
        """The text of a part in which nothing is known."""
        if isinstance(x, type):
            return f"{self.color.TYPE}{x.__name__}{self.color.END}"
        name = _COLOR_NAMES.get(type(x))
        code = getattr(self.color, name) if name else ""
        return f"{code}{x!r}{self.color.END}" if code else safe_repr(x)

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

    def array(self, x: Any) -> str:
        """The text of an array or ref."""
        if not self.is_shortened(x):
            try:
                return repr(x)
            except Exception:  # a donated array has a shape but no values
                pass
        c = self.color
        name = "ArrayRef" if _jax.is_ref(x) else "Array"
        facts = ", ".join(
            f"{c.ATTRIBUTE}{key}{c.END}{c.SEP}={c.END}{self.value(fact)}"
            for key, fact in (("shape", x.shape), ("dtype", x.dtype))
        )
        return f"{c.TYPE}{name}{c.END}{c.PAREN}({c.END}{facts}{c.PAREN}){c.END}"

    def is_shortened(self, x: Any) -> bool:
        """Whether an array is written as its shape and dtype."""
        if self.short and x.size > 1:
            return True
        # A traced array has no values to show.
        limit = None if isinstance(x, _jax.Tracer) else self.max_elements
        return limit is not None and x.size > limit


def safe_repr(x: Any) -> str:
    """The ``repr`` of a foreign value; it names the type if that fails."""
    try:
        return repr(x)
    except Exception as error:
        return f"<{type(x).__name__}, whose repr raises {type(error).__name__}>"


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
