"""Describes a value: a frame, and its contents by name.

Objects of this library describe themselves in ``__nnx_repr__``, which yields one
`Object` and then its `Attr` items; containers and other values are described here. All
code that prints or compares values (`writing.py`) uses these descriptions.

Reports and messages are made of arrays in short, and of tables of plain text. An array
is described by its dtype and its shape, ``float32[2,3]``, as JAX does it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from graftree import _jax


@dataclasses.dataclass(frozen=True, slots=True)
class Object:
    """Frame of an object: the first item that ``__nnx_repr__`` yields.

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
    """One attribute of an object; ``__nnx_repr__`` yields them after the `Object`.

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


Item = Object | Attr


def described(obj: Any) -> tuple[Object, list[Attr]]:
    """Describes an object: its frame and its attributes."""
    frame, *attributes = [*obj.__nnx_repr__()] or [None]
    for index, item in enumerate([frame, *attributes]):
        kind, which = (Attr, "Item") if index else (Object, "First item")
        if not isinstance(item, kind):
            raise TypeError(
                f"{which} of {type(obj).__name__}.__nnx_repr__ must be an "
                f"{kind.__name__}, got {type(item).__name__}."
            )
    return frame, attributes


def contents(x: Any) -> tuple[Object | None, list[Attr]]:
    """Returns the frame and the entries of any value; no frame if nothing is in it."""
    cls = type(x)
    frame = Object(cls, same_line=True)
    if describes_itself(x):
        return described(x)
    if isinstance(x, Mapping):
        name, start, end = ("", "{", "}") if cls is dict else (cls, "({", "})")
        frame = Object(name, start, end, kv_sep=": ", indent="", same_line=True)
        named = [
            (key.__name__ if isinstance(key, type) else safe_repr(key), value)
            for key, value in x.items()
        ]
    elif cls in (list, tuple):
        start, end = "[]" if cls is list else "()"
        end = "," + end if cls is tuple and len(x) == 1 else end
        frame = Object("", start, end, kv_sep="", indent="", same_line=True)
        named = [("", value) for value in x]
    elif isinstance(x, functools.partial):
        named = [("", x.func), *[("", value) for value in x.args], *x.keywords.items()]
    elif isinstance(x, tuple) and hasattr(cls, "_fields"):
        named = [*zip(cls._fields, x, strict=False)]
    elif _jax.is_pytree_type(cls) and any(map(is_object, leaves(x, is_object))):
        children, _ = _jax.flatten_one_level(x)
        named = [(str(key).strip(".[]"), child) for key, child in children]
    else:
        return None, []
    return frame, [Attr(name, value) for name, value in named]


def describes_itself(x: Any) -> bool:
    """Whether a value has a ``__nnx_repr__``."""
    return hasattr(type(x), "__nnx_repr__")


def is_object(x: Any) -> bool:
    """Whether a value is an array, or describes itself."""
    return is_array(x) or describes_itself(x)


def leaves(x: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """Lists the leaves of a pytree; none if JAX can't take it apart."""
    try:
        return jax.tree.leaves(x, is_leaf=is_leaf)
    except Exception:  # keys that can't be sorted, or the code of a foreign class
        return []


def safe_repr(x: Any, write: Callable[[Any], str] = repr) -> str:
    """Returns the ``repr`` of a foreign value, of a function its name, no address.

    It names the type if that fails. It may be the ``str`` instead.
    """
    if inspect.ismethod(x):  # its repr shows the whole object
        return callable_name(x)
    try:
        text = write(x)
    except Exception as error:
        way = write.__name__
        return f"<{type(x).__name__}, whose {way} raises {type(error).__name__}>"
    return (" at 0x" in text and callable_name(x)) or text


# Functions are known by name.


def callable_name(x: Any) -> str:
    """Names a function, a lambda with file and line; empty for other values."""
    name = _name_of(x)
    return callable_and_place(x) if name.endswith("<lambda>") else name


def callable_and_place(x: Any) -> str:
    """Names a function with its file and line, if it is one of Python."""
    name = _name_of(x)
    code = getattr(x, "__code__", None) if name else None
    if not isinstance(code, types.CodeType):
        return name
    return f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


def _name_of(x: Any) -> str:
    try:
        name = getattr(x, "__qualname__", None) or x.__name__ if callable(x) else ""
    except Exception:  # a foreign class may raise anything; it has no name then
        return ""
    return name.rpartition("<locals>.")[2] if isinstance(name, str) else ""


# Arrays, which are known by shape and dtype.


def is_array(x: Any) -> bool:
    """Whether ``x`` is an array, a ref, or stands for an array."""
    kinds = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
    return isinstance(x, kinds) or _jax.is_ref(x)


def is_deleted(x: Any) -> bool:
    """Whether an array was donated: it has a shape, but no values."""
    is_concrete = isinstance(x, jax.Array) and not isinstance(x, _jax.Tracer)
    return is_concrete and not _jax.is_ref(x) and x.is_deleted()


def array_form(x: Any) -> str:
    """Writes an array in short, with a word for anything special about it."""
    word = "ref " if _jax.is_ref(x) else "deleted " if is_deleted(x) else ""
    if isinstance(x, (np.ndarray, jax.ShapeDtypeStruct)):
        word = "numpy " if isinstance(x, np.ndarray) else "abstract "
    return word + describe(x)


# Leaves, which may be Python scalars or anything else.

SCALARS = (bool, int, float, complex)


def form_of(x: Any) -> tuple[tuple[int, ...] | None, Any]:
    """Shape and dtype; of a Python scalar the type, of anything else no shape."""
    if type(x) in SCALARS:
        return (), type(x)
    try:
        shape, dtype = x.shape, x.dtype
    except Exception:  # a foreign class may raise anything
        return None, type(x)
    return (shape, dtype) if type(shape) is tuple else (None, type(x))


def has_form(x: Any) -> bool:
    """Whether a value has a shape and a dtype, as an array has."""
    return type(x) not in SCALARS and form_of(x)[0] is not None


def describe_leaf(x: Any, is_plain: bool = False) -> str:
    """Writes a leaf as in ``float32[2,3]``; ``is_plain`` treats arrays alike."""
    shape, dtype = form_of(x)
    if x is None:
        return "None"
    if shape is None:
        return f"a {dtype.__name__}"
    if type(x) in SCALARS:
        return f"a Python {dtype.__name__}"
    text = describe_form(dtype, shape)
    is_plain = is_plain or not isinstance(x, jax.ShapeDtypeStruct)
    return text if is_plain else f"only {text}, abstract"


# Pytrees and Variables are built on this file: it knows them by these bases of theirs.


class PrintedNode:
    """A Pytree."""

    __slots__ = ()


class PrintedVariable:
    """A Variable."""

    __slots__ = ()


def is_node(x: Any) -> bool:
    """Whether ``x`` is a Pytree."""
    return issubclass(type(x), PrintedNode)


def is_variable(x: Any) -> bool:
    """Whether ``x`` is a Variable."""
    return issubclass(type(x), PrintedVariable)


Row = tuple[str, ...]
_INDEX = re.compile(r"\[(\d+)\]")


def describe(x: Any) -> str:
    """Writes the dtype and the shape of an array, or of a stand-in for one."""
    return describe_form(x.dtype, x.shape)


def describe_form(dtype: Any, shape: Sequence[Any]) -> str:
    """Writes a dtype and a shape, as `describe` does."""
    return f"{dtype}{describe_shape(shape)}"


def describe_shape(shape: Sequence[Any]) -> str:
    """Only a shape, as in ``[2,3]``."""
    return f"[{','.join(map(str, shape))}]"


def aligned(rows: Sequence[Sequence[str]], indent: str = "") -> list[str]:
    """Lays out a table, with columns as wide as they need to be.

    Args:
        rows: At least one; the first, the header, sets the number of columns. A row
            with fewer cells is a remark, for which no column is made wider.
        indent: The start of each line.
    """
    full_rows = [row for row in rows if len(row) == len(rows[0])]
    widths = [max(map(len, column)) for column in zip(*full_rows, strict=True)]
    return [indent + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def folded_rows(rows: Sequence[Row]) -> list[Row]:
    """Writes one row for those that differ only in the indices of their first cell.

    These become one range, as in ``blocks[0-11].mlp``, or a star.
    """
    return [row for row, _ in groups_of_rows(rows)]


def groups_of_rows(rows: Sequence[Row]) -> list[tuple[Row, list[int]]]:
    """Returns the rows of `folded_rows`, each with the indices that it stands for."""
    groups: dict[Row, list[int]] = {}
    for index, row in enumerate(rows):
        key = (_INDEX.sub("[*]", row[0]), *row[1:])
        groups.setdefault(key, []).append(index)
    return [
        ((_path([rows[index][0] for index in indices]), *key[1:]), indices)
        for key, indices in groups.items()
    ]


def _path(paths: list[str]) -> str:
    """Writes one path for several that differ in indices."""
    columns = [*zip(*[map(int, _INDEX.findall(path)) for path in paths], strict=True)]
    ranges = iter([_range(sorted({*column}), len(paths)) for column in columns])
    return _INDEX.sub(lambda _: f"[{next(ranges)}]", paths[0])


def _range(indices: list[int], count: int) -> str:
    first, last = indices[0], indices[-1]
    if first == last:
        return str(first)
    # With gaps, or where two indices vary and not all pairs are there: a star.
    is_whole = len(indices) == last - first + 1 and count % len(indices) == 0
    return f"{first}-{last}" if is_whole else "*"
