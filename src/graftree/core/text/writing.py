"""Writes values as text: in full or, where that is long, in the compact form.

The description of a value (`descriptions.py`) becomes a `Piece`, a text with parts, and
pieces are laid out in lines. Invariants:

- ``repr`` is plain; only ``str`` is colored, and only on a terminal;
- in one text each node is written out once and abbreviated as ``Type(...)`` after
  that, so cycles end; so are objects deeper than ``config.flax_max_repr_depth``;
- a value whose own ``repr`` fails is named by its type;
- a ``repr`` requested while another text is written becomes a part of that one.

The *full form* shows every attribute, one a line, and arrays in nodes by shape and
dtype. A ``repr`` has it if it is not longer than ``config.graftree_repr_lines``. Arrays
of more than `MAX_ELEMENTS` elements are then shortened everywhere, except in a Variable
by itself, which prints as its array does.

The *compact form* is for larger objects. Its last line says how to get the full one.

- Arrays are written as ``float32[2,3]``. Their values are never read, not even to
  choose the form of a text: a large model costs no transfer.
- Attributes that equal the defaults of the constructor are left out.
- Neighbours that would read the same are written once, with their number
  and positions; an object referred to from outside of them is ``the same``.
- A piece that fits within a width stands on one line.
- Variables, too, are written out once, and objects no deeper than `_DEEPEST`.

Two values read the same if they have the same structure: types, attribute names (also
hidden ones), shapes, dtypes and static values. The numbers in arrays don't count.
Invariants:

- an object that is also referred to from outside of a value is equal only to itself:
  siblings that share it are equal, those that have copies of it are not;
- the ``==`` of a foreign class is not trusted: its instances equal only themselves.

A value is compared by its *tokens*: its parts, in preorder. Skeletons won't do for
this. They distinguish two functions with the same code, as the key of a compiled
function must; but layers may have initializers of their own that read the same. They
also call methods of foreign classes, and compare shared objects only by position.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
import os
import re
import sys
import threading
import types
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
import numpy as np

from graftree import _jax, _python, config
from graftree.core import fingerprints
from graftree.core.text import descriptions
from graftree.core.text.descriptions import Attr, Object

MAX_ELEMENTS = 100
_HINT = " # shortened; in full: print(nnx.debugging.full_repr(...))"
_WIDTH = 88
_LONGEST_VALUE = 60
_DEEPEST = 20


class Color(NamedTuple):
    """Escape code that starts each kind of text, and the one that ends them all."""

    TYPE: str = ""
    ATTRIBUTE: str = ""
    SEP: str = ""
    PAREN: str = ""
    COMMENT: str = ""
    INT: str = ""
    STRING: str = ""
    FLOAT: str = ""
    BOOL: str = ""
    NONE: str = ""
    END: str = ""


NO_COLOR = Color()
# Of the sixteen basic colors, which every terminal shows in its own scheme.
_NUMBERS = (36, 94, 37, 33, 90, 32, 91, 32, 34, 34, 0)
COLOR = Color(*[f"\033[{code}m" for code in _NUMBERS])
_CODES = re.compile("\033\\[\\d+m")
_KINDS = {int: "INT", str: "STRING", float: "FLOAT", bool: "BOOL", type(None): "NONE"}


def supports_color() -> bool:
    """Whether ``str`` is colored: in a terminal or IPython, unless NO_COLOR is set."""
    if os.environ.get("NO_COLOR"):
        return False
    return in_ipython() or bool(getattr(sys.stdout, "isatty", bool)())


def in_ipython() -> bool:
    """Whether this runs in IPython, as notebooks do."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None


def default_color() -> Color:
    """Returns the colors for output to the user: none where they don't show."""
    return COLOR if supports_color() else NO_COLOR


# ------------------------------------------------------------------ which form


def get_repr(obj: Any, *, color: Color = NO_COLOR) -> str:
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
    writer, limit = active(), config.graftree_repr_lines
    if writer is not None:
        return writer.value(obj)
    raw = obj.get_raw_value() if descriptions.is_variable(obj) else None
    if limit is None or descriptions.is_array(raw):
        return full(obj, color)
    counter = Writer(NO_COLOR, MAX_ELEMENTS, limit)
    if counter.write(obj).count("\n") < limit and counter.count <= limit:
        return Writer(color, MAX_ELEMENTS).write(obj)
    compact = Writer(color, siblings=Siblings(obj))
    return compact.write(obj) + compact.painted("COMMENT", _HINT)


def colorized(x: Any, /) -> str:
    """Writes any value as text, in color where `supports_color`.

    Args:
        x: The value.

    Returns:
        Its ``repr``, with the bare name for a class.

    Example:
        >>> nnx.reprlib.colorized([int, "a"])
        "[int, 'a']"
    """
    writer = active()
    return full(x, default_color()) if writer is None else writer.value(x)


def full(x: Any, color: Color = NO_COLOR) -> str:
    """Writes any value as text in the full form."""
    return Writer(color).write(x)


# ------------------------------------------------------------------------ lines


@dataclasses.dataclass
class Piece:
    """Text to be laid out: a start, parts, each with its comma, and an end.

    Attributes:
        start: The text before the parts, or all of it.
        parts: The parts.
        end: The text after the parts.
        comment: The text after the start where the parts are on lines of their own.
        indent: The indentation of these lines.
        is_small: Whether it may share a line with its neighbours.
    """

    start: str
    parts: Sequence[Piece] = ()
    end: str = ""
    comment: str = ""
    indent: str = "  "
    is_small: bool = False

    @property
    def flat(self) -> str:
        """All of it on one line, but for line breaks in the text."""
        return self.start + " ".join(piece.flat for piece in self.parts) + self.end

    def lines(
        self, width: int, margin: str = "", *, is_inner: bool = False
    ) -> list[str]:
        """Lays it out in lines; an inner piece gets one if it fits within a width."""
        if not self.parts:
            return [margin + self.flat.replace("\n", "\n" + margin)]
        if is_inner and width and (short := self._short(width - len(margin))):
            return [margin + line for line in short]
        lines, inner = [margin + self.start + self.comment], margin + self.indent
        for row in _join_small(self.parts, width - len(inner)):
            lines += row.lines(width, inner, is_inner=True)
        return [*lines, margin + self.end]

    def joined(self) -> Piece:
        """Puts its parts side by side, even if they have several lines."""
        text = " ".join("\n".join(piece.lines(0)) for piece in self.parts)
        return Piece(self.start + text.replace("\n", "\n" + self.indent) + self.end)

    def _short(self, room: int) -> list[str]:
        """Writes a small piece on one or two lines; nothing if it is larger."""
        pieces = [Piece(piece.flat, is_small=True) for piece in self.parts]
        pieces[0].start = self.start + pieces[0].start
        pieces[-1].start += self.end
        first, *others = [row.start for row in _join_small(pieces, room)]
        rows = [first, *["    " + row for row in others]]
        return rows if len(rows) <= 2 and all(_fits(row, room) for row in rows) else []


def _join_small(pieces: Sequence[Piece], room: int) -> list[Piece]:
    """Joins small neighbours, as many as fit on a line."""
    rows: list[Piece] = []
    for piece in pieces:
        if rows and rows[-1].is_small and piece.is_small:
            joined = Piece(f"{rows[-1].flat} {piece.flat}", is_small=True)
            if _fits(joined.flat, room):
                rows[-1] = joined
                continue
        rows.append(piece)
    return rows


def _fits(text: str, room: int) -> bool:
    """Whether a text is one line and not too long; color codes don't count."""
    return "\n" not in text and len(_CODES.sub("", text)) <= room


# ----------------------------------------------------------------------- writer

# A foreign container may ask for part of the text by calling repr() on its members:
# that belongs to the text being written.


_active = threading.local()


def active() -> Writer | None:
    """Returns the writer at work in this thread, if any."""
    return getattr(_active, "writer", None)


class Writer:
    """Writes one text; remembers what it has written and where it is.

    Args:
        color: The colors.
        max_elements: Arrays with more elements are shortened wherever they are.
        limit: For a caller that only wants the number of lines, and whether it is
            larger than this.
        siblings: For the compact form: finds the values that read the same.

    Attributes:
        only_counts: Whether the caller only wants the number of lines.
        reads_values: Whether it shows values, and not only shapes.
        short: Whether arrays are shortened where it writes now.
        count: How many objects it has come to.
    """

    def __init__(
        self,
        color: Color = NO_COLOR,
        max_elements: float = math.inf,
        limit: float = math.inf,
        siblings: Siblings | None = None,
    ):
        self.color, self.siblings = color, siblings
        self.max_elements, self.limit = max_elements, limit
        self.only_counts = limit < math.inf
        self.reads_values = siblings is None and not self.only_counts
        self.width = _WIDTH if siblings else 0
        most, deepest = _DEEPEST if siblings else math.inf, config.flax_max_repr_depth
        self.deepest = most if deepest is None else deepest
        # Where it is; the ids of objects that all of the values folded here refer to.
        self.short, self.depth, self.same = False, 0, frozenset[int]()
        self.count = 0
        self.sizes: Any = None  # of Variables; see `representations.Sizes`
        # By identity; the objects stay alive, so that no other takes their id.
        self.written: dict[int, Any] = {}
        self.open: dict[int, Any] = {}

    def write(self, x: Any) -> str:
        """Writes an object or value that is not part of another text."""
        outer, _active.writer = active(), self
        try:
            return self.value(x)
        finally:
            _active.writer = outer

    def value(self, x: Any) -> str:
        """Writes any value, as a text."""
        return "\n".join(self._piece(x).lines(self.width))

    def painted(self, kind: str, text: str) -> str:
        """Writes a text in the color of its kind."""
        return f"{getattr(self.color, kind)}{text}{self.color.END}" if text else ""

    def _piece(self, x: Any) -> Piece:
        """Describes any value as a piece, not yet laid out."""
        frame, entries = self._contents(x)
        if frame is None:
            return Piece(self._leaf(x), is_small=not descriptions.is_array(x))
        name = frame.type if isinstance(frame.type, str) else frame.type.__name__
        start = self.painted("TYPE", name) + self.painted("PAREN", frame.start)
        if self._is_abbreviated(x):
            return Piece(start + self.painted("PAREN", "..." + frame.end))
        start = self._mark_same(x, start) + ("" if entries else frame.empty_repr)
        parts, end = self._parts(x, frame, entries), self.painted("PAREN", frame.end)
        piece = Piece(start, parts, end, self.painted("COMMENT", frame.comment))
        if self.siblings:
            return piece
        piece.indent = frame.indent
        return piece.joined() if frame.same_line else piece

    def _contents(self, x: Any) -> tuple[Object | None, list[Attr]]:
        """Returns the frame and the entries of a value that is written by its parts."""
        if _has_values(x) and self._is_shortened(x) and not self.siblings:
            name = "ArrayRef" if _jax.is_ref(x) else "Array"
            facts = [Attr("shape", x.shape), Attr("dtype", x.dtype)]
            return Object(name, same_line=True), facts
        # The repr of a foreign container reads the arrays in it.
        is_open = descriptions.describes_itself(x) or not self.reads_values
        if is_open or type(x) in (list, tuple, dict, functools.partial):
            return descriptions.contents(x)
        return None, []

    def _is_shortened(self, x: Any) -> bool:
        """Whether the values of an array are left out."""
        if (self.short and x.size > 1) or descriptions.is_deleted(x):
            return True
        return x.size > self.max_elements and not isinstance(x, _jax.Tracer)

    def _is_abbreviated(self, x: Any) -> bool:
        """Whether a value is written as dots: it is too deep, or was written."""
        is_object = descriptions.describes_itself(x)
        self.count += is_object
        if is_object and (self.depth >= self.deepest or self.count > self.limit):
            return True
        return id(x) in self.written or id(x) in self.open

    def _parts(self, x: Any, frame: Object, entries: list[Attr]) -> list[Piece]:
        """Writes the entries of a value."""
        is_node = descriptions.is_node(x)
        if is_node or (self.siblings and descriptions.is_variable(x)):
            self.written[id(x)] = x
        groups = [Fold(str(entry.key), entry) for entry in entries]
        if self.siblings:
            groups = self.siblings.groups(entries, may_omit=frame.kv_sep != "=")
        outer = self.short, self.depth
        is_full = getattr(type(x), "__nnx_repr_full__", False)
        self.short = (self.short or is_node) and not is_full
        self.depth += descriptions.describes_itself(x)
        self.open[id(x)] = x
        try:
            pieces = [self._part(frame, group) for group in groups]
        finally:
            self.short, self.depth = outer
            del self.open[id(x)]
        for piece in pieces[:-1]:
            piece.end += ","
        return pieces

    def _part(self, frame: Object, group: Fold) -> Piece:
        """Writes one entry, which may stand for several."""
        label, entry, count, shared = group
        if entry.use_raw_value:
            piece = Piece(str(entry.value))
        else:
            outer, self.same = self.same, self.same | shared
            piece = self._piece(entry.value)
            self.same = outer
        if count > 1:
            piece.start = f"{count} x {piece.start}"
            piece.comment = piece.comment.replace(" # ", " # each ", 1)
        is_bare = self.siblings or frame.type is functools.partial
        if str(entry.key) or not is_bare:
            label = label if entry.use_raw_key else self.painted("ATTRIBUTE", label)
            label += self.painted("SEP", frame.kv_sep)
        piece.start = entry.start + label + piece.start
        piece.end += entry.end
        return piece

    def _mark_same(self, x: Any, text: str) -> str:
        return f"the same {text}" if id(x) in self.same else text

    def _leaf(self, x: Any) -> str:
        """Writes a value as a whole, without parts."""
        if self.siblings and descriptions.is_array(x):
            return self._mark_same(x, self.painted("TYPE", descriptions.array_form(x)))
        if _has_values(x) and not self.reads_values:
            *rows, columns = x.shape or (1,)  # about as many lines as NumPy writes
            return "\n" * (math.prod(rows) * math.ceil(columns / 8) - 1)
        is_class = isinstance(x, type)
        name = x.__name__ if is_class else descriptions.callable_name(x)
        if is_class or (self.siblings and name):
            return self.painted("TYPE", name)
        text = descriptions.safe_repr(x)
        if self.siblings:
            text = str(x) if isinstance(x, np.dtype) else text
            if "\n" in text or len(text) > _LONGEST_VALUE:
                text = _CODES.sub("", text).partition("\n")[0][:_LONGEST_VALUE] + "..."
        return self.painted(_KINDS[type(x)], text) if type(x) in _KINDS else text


def _has_values(x: Any) -> bool:
    """Whether a value is an array, and not an abstract one."""
    return descriptions.is_array(x) and not isinstance(x, jax.ShapeDtypeStruct)


ATOMS = {bool, int, float, complex, str, bytes, type(None)}
# Names are listed if they take no more characters.
_LONGEST_NAMES = 40
# A sequence with more runs than this may be one that alternates.
_MANY_RUNS = 8
# Of a mapping or sequence with more entries than this, the middle is left out.
_MOST_ENTRIES = 40
_FIRST, _LAST = 20, 5


class Fold(NamedTuple):
    """Entries of an object or container that read the same.

    Attributes:
        label: Their keys, or in a sequence indices, if some are folded.
        entry: The first of them.
        size: How many there are.
        shared: The ids of the objects that all of them refer to, with others.
    """

    label: str
    entry: Attr
    size: int = 1
    shared: Set[int] = frozenset()


def parts(x: Any) -> tuple[Any, Sequence[Any]]:
    """Splits a value into a label, which is safe to compare, and its parts.

    The label has their number. They are a list if the value has an identity.
    """
    kind: Any = type(x)
    if kind in ATOMS:
        return (kind, repr(x)), ()  # as text: NaN equals itself then
    if descriptions.is_array(x):
        return descriptions.array_form(x), [] if _jax.is_ref(x) else ()
    if descriptions.is_variable(x):
        named = {"": x.get_raw_value(), **x.get_metadata()}
    elif descriptions.is_node(x):
        named = attributes_of(x)
    elif isinstance(x, types.FunctionType):
        # The same lines that captured equal values, such as an initializer of a layer.
        captured = [*_python.contents_of(x), x.__defaults__, x.__kwdefaults__]
        kind, named = id(x.__code__), dict(enumerate(captured))
    elif isinstance(x, (list, tuple)):
        return (kind, len(x)), x
    elif dataclasses.is_dataclass(kind):
        fields = dataclasses.fields(kind)
        named = {field.name: getattr(x, field.name, None) for field in fields}
    else:
        return _parts_by_text(x)
    return (kind, *named), [*named.values()]


def attributes_of(node: Any) -> dict[str, Any]:
    """Lists the attributes of a node without its bookkeeping."""
    entries = list(vars(node).items())  # another thread may be writing
    return {k: v for k, v in entries if not k.startswith("_pytree__")}


def _parts_by_text(x: Any) -> tuple[Any, Sequence[Any]]:
    """Splits a value of which only the printed text is known."""
    frame, entries = descriptions.contents(x)
    if frame is not None:
        is_ours = isinstance(x, (Mapping, functools.partial))
        is_whole = is_ours or descriptions.describes_itself(x)
        # A foreign class may hold more than its text shows.
        names = [str(entry.key) for entry in entries] if is_whole else [id(x)]
        return (type(x), frame.type, *names), [entry.value for entry in entries]
    # And it may call different values equal, also within a treedef.
    is_foreign = fingerprints.may_change(x) or isinstance(x, jax.tree_util.PyTreeDef)
    if is_foreign or not isinstance(x, Hashable):
        return (type(x), id(x)), ()
    return (fingerprints.fingerprint(x), x), ()


class Siblings:
    """Compares the values of one text.

    Args:
        root: The object that is written.
    """

    def __init__(self, root: Any) -> None:
        # Each value, which so stays alive, with its label and its parts, by id.
        self._parts: dict[int, tuple[Any, Any, Sequence[Any]]] = {}
        self._references = self._count(root)

    def tokens(self, x: Any) -> tuple[Any, ...]:
        """Returns the tokens of ``x``: equal tokens mean equal values."""
        return tuple(token for _, token in self._list(x, self.external(x)))

    def external(self, x: Any) -> Set[int]:
        """Returns the ids of the objects in ``x`` that others refer to, too."""
        counts = self._count(x).items()
        return {key for key, count in counts if count < self._references[key]}

    def _count(self, root: Any) -> collections.Counter[int]:
        """Counts the references to each object."""
        return collections.Counter(key for key, _ in self._list(root) if key)

    def _list(
        self, root: Any, external: Set[int] = frozenset()
    ) -> Iterator[tuple[int, Any]]:
        """Yields the parts of a value: an id if it can be shared, or 0, and a token."""
        numbers: dict[int, int] = {}
        pending = [root]
        while pending:
            x = pending.pop()
            _, label, children = self._take_apart(x)
            key = id(x) if isinstance(children, list) else 0
            if key in external or key in numbers:
                yield key, numbers.get(key, key)
                continue
            if key:
                numbers[key] = -len(numbers)  # no id
            yield key, label
            pending += reversed(children)

    def _take_apart(self, x: Any) -> tuple[Any, Any, Sequence[Any]]:
        entry = self._parts.get(id(x))
        if entry is None:
            entry = self._parts[id(x)] = x, *parts(x)
        return entry

    def groups(self, entries: Sequence[Attr], *, may_omit: bool) -> list[Fold]:
        """Groups the entries that read the same; of many, omits those in the middle."""
        keys = [str(entry.key) for entry in entries]
        runs = self._runs(entries, keys)
        is_folded = len(runs) < len(entries)
        groups: list[Fold] = []
        for run in runs:
            entry, label = entries[run[0]], _label(run, keys, is_folded)
            shared = self.external(entry.value) if len(run) > 1 else frozenset[int]()
            groups.append(Fold(label, entry, len(run), shared))
        if may_omit and len(groups) > _MOST_ENTRIES:
            count = sum(map(len, runs[_FIRST:-_LAST]))
            omitted = Attr("", f"... {count:,} more ...", use_raw_value=True)
            groups[_FIRST:-_LAST] = [Fold("", omitted)]
        return groups

    def _runs(self, entries: Sequence[Attr], keys: list[str]) -> list[list[int]]:
        """Returns indices of equal entries: neighbours, or in a long sequence all."""
        values = [entry.value for entry in entries]
        lines = [*map(_takes_a_line, values)]
        pairs = enumerate(zip(values, lines, strict=True))
        labels = [self._take_apart(x)[1] if line else i for i, (x, line) in pairs]

        # A value has as many tokens as parts, and often its label is enough.
        @functools.cache
        def tokens(i: int) -> Any:
            return self.tokens(values[i]) if lines[i] else i

        runs: list[list[int]] = []
        for i, x in enumerate(values):
            is_same = i and labels[i] == labels[i - 1] and tokens(i) == tokens(i - 1)
            if is_same and _may_join(x, keys, runs[-1]):
                runs[-1].append(i)
            else:
                runs.append([i])
        if len(runs) <= _MANY_RUNS or any(keys):
            return runs
        regrouped: dict[Any, list[int]] = {}
        for run in runs:
            regrouped.setdefault(tokens(run[0]), []).extend(run)
        return [*regrouped.values()]


def _takes_a_line(x: Any) -> bool:
    is_container = isinstance(x, (Mapping, list, tuple))
    return is_container or descriptions.is_object(x) or callable(x)


def _may_join(value: Any, keys: list[str], run: list[int]) -> bool:
    """Whether the next key may join those of a run: numbered, or few and short."""
    last, key = keys[run[-1]], keys[run[-1] + 1]
    if not key or _is_next(last, key):
        return True
    names = ", ".join(keys[run[0] : run[-1] + 2])
    if descriptions.is_variable(value) or len(names) > _LONGEST_NAMES:
        return False  # it takes no more room than its key
    return isinstance(value, Mapping) or descriptions.describes_itself(value)


def _is_next(key: str, following: str) -> bool:
    """Whether a key follows another, as ``layer_1`` follows ``layer_0``."""

    def next_number(match: re.Match[str]) -> str:
        return str(int(match[0]) + 1).zfill(len(match[0]))

    return following != key and following == re.sub(r"\d+(?=\D*$)", next_number, key)


def _label(run: list[int], keys: list[str], is_folded: bool) -> str:
    """Writes the keys of the entries of a run, or in a sequence their indices."""
    names = [keys[i] for i in run]
    if names[0]:
        is_row = len(run) > 2 and all(map(_is_next, names, names[1:]))
        return f"{names[0]} to {names[-1]}" if is_row else ", ".join(names)
    if not is_folded:
        return ""
    steps = {later - i for i, later in itertools.pairwise(run)}
    if len(run) > 3 and len(steps) == 1 and steps != {1}:
        return f"({run[0]}, {run[1]}, ..., {run[-1]}) "
    indices = set(run)
    firsts = [i for i in run if i - 1 not in indices]
    lasts = [i for i in run if i + 1 not in indices]
    ends = zip(firsts, lasts, strict=True)
    return f"({', '.join(f'{i}-{j}' if i < j else f'{i}' for i, j in ends)}) "


def defaults_of(cls: type) -> dict[str, Any]:
    """Returns the defaults of the constructors of a class and its bases by parameter.

    The first class that has a parameter counts.
    """
    defaults: dict[str, Any] = {}
    for base in cls.__mro__[:-1]:
        # It may have no constructor, or none in Python.
        with contextlib.suppress(KeyError, TypeError, ValueError):
            constructor = inspect.signature(vars(base)["__init__"])
            for name, parameter in constructor.parameters.items():
                defaults.setdefault(name, parameter.default)
    return defaults


def is_default(name: str, value: Any, defaults: Mapping[str, Any]) -> bool:
    """Whether an attribute has the default of the parameter of its name."""
    default = defaults.get(name)
    # A constructor that takes one axis or several keeps a tuple.
    axes = (default,) if type(default) is int else default
    return name in defaults and (_equal(value, default) or _equal(value, axes))


def _equal(a: Any, b: Any) -> bool:
    """Whether two values are the same, as far as one sees without reading arrays."""
    if a is b or descriptions.is_array(a):
        return a is b
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        a, b = dict(a), dict(b)  # a constructor may keep another kind of mapping
    (label, members), (other_label, other_members) = parts(a), parts(b)
    return label == other_label and all(map(_equal, members, other_members))
