"""Writes objects as text, in the compact form (see `forms.py`).

What always holds:

- arrays are written as ``float32[2,3]``, and no value of one is read;
- attributes that equal the defaults of the constructor are left out;
- neighbours that would read the same (see `folding.py`) are written once, with their
  number and places; what is referred to from outside of them is ``the same``;
- in one text each node and Variable is written out once, as ``Type(...)`` after that;
- what fits stands on one line (see `layouts.py`);
- objects deeper than `_DEEPEST` are abbreviated, too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from graftree import _jax
from graftree.core.text import (
    colors,
    constructors,
    folding,
    layouts,
    short_forms,
    writing,
)
from graftree.core.text.layouts import Block, Part

# Of a mapping or sequence with more entries than this, the middle is left out.
_MOST_ENTRIES = 40
_FIRST, _LAST = 20, 5
_LONGEST_VALUE = 60
_DEEPEST = 20

Text = str | Block


class Condenser(writing.Writer):
    """Writes one text in the compact form.

    Args:
        root: The object to write.
        color: The colors.
    """

    reads_values = False

    def __init__(self, root: Any, color: colors.Color = colors.NO_COLOR):
        super().__init__(color)
        self.max_depth = _DEEPEST if self.max_depth is None else self.max_depth
        self._siblings = folding.Siblings(root)
        # The ids of what all of the values that are folded here refer to.
        self._same: set[int] = set()

    def object(self, x: Any) -> str:
        """The text of any part, laid out."""
        text = self._text(x)
        return text if isinstance(text, str) else layouts.lines(text)

    def value(self, x: Any) -> str:
        """The text of any part, laid out."""
        return self.object(x)

    def array(self, x: Any) -> str:
        """An array as its dtype and shape."""
        c, kind = self.color, folding.array_kind(x)
        shape = short_forms.describe_shape(x.shape)[1:-1]
        text = f"{c.TYPE}{x.dtype}{c.END}{c.PAREN}[{c.END}{shape}{c.PAREN}]{c.END}"
        return self._marked(x, f"{kind} {text}" if kind else text)

    def plain(self, x: Any) -> str:
        """A function by its name; of a long text the beginning."""
        if name := _name_of(x):
            return f"{self.color.TYPE}{name}{self.color.END}"
        text = str(x) if isinstance(x, np.dtype) else writing.safe_repr(x)
        if "\n" in text or len(text) > _LONGEST_VALUE:
            first = layouts.without_colors(text).partition("\n")[0]
            return first[:_LONGEST_VALUE] + "..."
        return text if isinstance(x, np.dtype) else super().plain(x)

    def _marked(self, x: Any, text: str) -> str:
        return f"the same {text}" if id(x) in self._same else text

    def _text(self, x: Any) -> Text:
        """The text of any part, not yet laid out."""
        if hasattr(type(x), "__nnx_repr__"):
            return self._described(x)
        if folding.is_array(x):
            return self.array(x)
        frame, entries = _as_container(x)
        if frame is None:
            return self.plain(x)
        if id(x) in self.open:
            return self.framed(frame, "..." + frame.end)
        return self._block(x, frame, entries)

    def _described(self, x: Any) -> Text:
        frame, items = writing.described(x)
        if self.is_abbreviated(x):
            return self.framed(frame, "..." + frame.end)
        if folding.is_object(x):
            self.nodes[id(x)] = x
        if writing.is_node(x):
            defaults = constructors.defaults_of(type(x))
            items = [
                item
                for item in items
                if not constructors.is_default(item.value, defaults, item.key)
            ]
        entries = [_Entry(str(item.key), item.value, item) for item in items]
        if writing.is_variable(x) and entries and entries[0].key == "value":
            entries[0] = entries[0]._replace(key="")
        return self._block(x, frame, entries)

    def _block(self, x: Any, frame: writing.Object, entries: list[_Entry]) -> Block:
        c = self.color
        start = self._marked(x, self.opening(frame))
        self.open[id(x)] = x
        self.depth += 1
        try:
            parts = list(self._parts(frame, entries))
        finally:
            self.depth -= 1
            del self.open[id(x)]
        comment = f"{c.COMMENT}{frame.comment}{c.END}" if frame.comment else ""
        return Block(start, parts, f"{c.PAREN}{frame.end}{c.END}", comment)

    def _parts(self, frame: writing.Object, entries: list[_Entry]) -> Iterator[Part]:
        groups = folding.groups(self._siblings, [entry[:2] for entry in entries])
        is_numbered = any(len(group) > 1 for group in groups)
        left_out = 0
        if frame.kv_sep != "=" and len(groups) > _MOST_ENTRIES:
            left_out = sum(map(len, groups[_FIRST:-_LAST]))
            groups[_FIRST:-_LAST] = []
        for number, group in enumerate(groups):
            if left_out and number == _FIRST:
                yield Part("", f"... {left_out:,} more ...")
            members = [entries[index] for index in group]
            place = folding.places(group, [member.key for member in members])
            if not members[0].key:
                prefix = f"({place}) " if is_numbered else ""
            else:
                prefix = self._prefix(frame, members[0], place)
            yield self._part(prefix, members)

    def _prefix(self, frame: writing.Object, entry: _Entry, place: str) -> str:
        c, item = self.color, entry.item
        if not (item and item.use_raw_key):
            place = f"{c.ATTRIBUTE}{place}{c.END}"
        return f"{place}{c.SEP}{frame.kv_sep}{c.END}"

    def _part(self, prefix: str, members: list[_Entry]) -> Part:
        (_, value, item), count = members[0], len(members)
        if item is not None:
            prefix = item.start + prefix
            if item.use_raw_value:
                return Part(prefix, f"{item.value}{item.end}", is_packed=True)
        if count == 1:
            text = self._text(value)
        else:
            prefix += f"{count} x "
            text = self._text_of_all(value)
        if item is not None and item.end:
            text = self._ended(text, item.end)
        is_object = hasattr(type(value), "__nnx_repr__") or folding.is_array(value)
        return Part(prefix, text, is_packed=isinstance(text, str) and not is_object)

    def _text_of_all(self, value: Any) -> Text:
        """The text of a value that stands for several."""
        outer = self._same
        self._same = outer | self._siblings.external(value)
        try:
            text = self._text(value)
        finally:
            self._same = outer
        if isinstance(text, Block):
            text.comment = text.comment.replace(" # ", " # each ", 1)
        return text

    def _ended(self, text: Text, end: str) -> Text:
        if isinstance(text, str):
            return text + end
        return Block(text.start, text.parts, text.end + end, text.comment)


def _name_of(x: Any) -> str:
    """The name of a class or function; empty for anything else."""
    try:
        name = x.__name__ if callable(x) else ""
    except Exception:  # what a foreign class raises; it has no name then
        return ""
    return name if isinstance(name, str) else ""


class _Entry(NamedTuple):
    """An entry of an object or container; its key is empty in a sequence."""

    key: str
    value: Any
    item: writing.Attr | None = None


def _as_container(x: Any) -> tuple[writing.Object | None, list[_Entry]]:
    """The frame and the entries of a value that is no object of ours, if it has any."""
    cls = type(x)
    if isinstance(x, Mapping):
        start, end = ("{", "}") if cls is dict else ("({", "})")
        frame = writing.Object("" if cls is dict else cls, start, end, ": ")
        items = list(x.items())
        return frame, [_Entry(writing.safe_repr(key), value) for key, value in items]
    if cls in (list, tuple):
        start, end = "[]" if cls is list else "()"
        end = ",)" if cls is tuple and len(x) == 1 else end
        return writing.Object("", start, end, ""), [_Entry("", value) for value in x]
    if isinstance(x, functools.partial):
        entries = [_Entry("", value) for value in (x.func, *x.args)]
        entries += [_Entry(key, value) for key, value in x.keywords.items()]
        return writing.Object(cls), entries
    if isinstance(x, tuple) and hasattr(cls, "_fields"):
        fields = zip(cls._fields, x, strict=False)
        return writing.Object(cls), [_Entry(name, value) for name, value in fields]
    if _jax.is_pytree_type(cls) and _holds_arrays(x):
        children, _ = _jax.flatten_one_level(x)
        names = [str(key).strip(".[]") for key, _ in children]
        values = [child for _, child in children]
        return writing.Object(cls), list(map(_Entry, names, values))
    return None, []


def _holds_arrays(x: Any) -> bool:
    def is_shown(leaf: Any) -> bool:
        return folding.is_array(leaf) or hasattr(type(leaf), "__nnx_repr__")

    try:
        return any(map(is_shown, jax.tree.leaves(x, is_leaf=is_shown)))
    except Exception:  # keys that JAX can't sort, or the code of a foreign class
        return False
