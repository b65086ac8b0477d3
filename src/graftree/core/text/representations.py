"""Base classes of objects that print; what ours print, and what ``dir`` lists.

Classes derive from `Representable` and define ``__nnx_repr__``; `writing.py` turns its
items into text. The functions at the end serve Variables and Pytrees, which are
defined above this file and known here only by their methods and bookkeeping.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax

from graftree import _jax, config
from graftree.core import hooks, paths, walks
from graftree.core.text import descriptions, writing
from graftree.core.text.descriptions import Attr, Item, Object


class Representable:
    """Base of classes that print as nested text; they define ``__nnx_repr__``.

    Example:
        >>> class Point(nnx.reprlib.Representable):
        ...     def __nnx_repr__(self):
        ...         yield nnx.reprlib.Object("Point")
        ...         yield nnx.reprlib.Attr("x", 1)
        >>> Point()
        Point(
          x=1
        )
    """

    __slots__ = ()
    __nnx_repr_full__: ClassVar[bool] = False
    """Whether arrays directly in the object are written in full, even in a node."""

    def __nnx_repr__(self) -> Iterable[Item]:
        """Yields one `Object`, then one `Attr` per attribute.

        Raises:
            NotImplementedError: If the class does not define it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} derives from Representable and must define "
            "__nnx_repr__(self), which yields one Object and then Attr items."
        )

    def __repr__(self) -> str:
        return writing.get_repr(self)

    def __str__(self) -> str:
        return writing.get_repr(self, color=writing.default_color())

    def __treescope_repr__(self, path: str, subtree_renderer: Any) -> Any:
        """Shows the object in a notebook."""
        return hooks.treescope_repr.call(self, path, subtree_renderer)


class MappingReprMixin(Representable):
    """Prints a mapping as ``Type({ key: value, ... })``, one entry per line.

    Example:
        >>> class Table(nnx.reprlib.MappingReprMixin, dict):
        ...     pass
        >>> Table(a=1)
        Table({
          'a': 1
        })
    """

    __slots__ = ()
    __nnx_repr_full__ = True

    def __nnx_repr__(self) -> Iterable[Item]:
        """Yields the frame and one item per entry."""
        return mapping_items(type(self), self)  # pyright: ignore[reportArgumentType]


class SequenceReprMixin(Representable):
    """Prints a sequence as ``Type([ value, ... ])``, one element per line.

    Example:
        >>> class Row(nnx.reprlib.SequenceReprMixin, list):
        ...     pass
        >>> Row([1, 2])
        Row([
          1,
          2
        ])
    """

    __slots__ = ()
    __nnx_repr_full__ = True

    def __nnx_repr__(self) -> Iterable[Item]:
        """Yields the frame and one item per element."""
        return sequence_items(type(self), self)  # pyright: ignore[reportArgumentType]


@dataclasses.dataclass(frozen=True, repr=False)
class PrettyMapping(Representable):
    """Prints any mapping with one entry per line.

    Args:
        mapping: The mapping.

    Example:
        >>> nnx.reprlib.PrettyMapping({"a": 1})
        PrettyMapping({
          'a': 1
        })
    """

    mapping: Mapping

    def __nnx_repr__(self) -> Iterable[Item]:
        """Yields the frame and one item per entry."""
        return mapping_items(type(self), self.mapping)


@dataclasses.dataclass(frozen=True, repr=False)
class PrettySequence(Representable):
    """Prints any sequence with one element per line.

    Args:
        sequence: The sequence.

    Example:
        >>> nnx.reprlib.PrettySequence([1])
        PrettySequence([
          1
        ])
    """

    sequence: Sequence

    def __nnx_repr__(self) -> Iterable[Item]:
        """Yields the frame and one item per element."""
        return sequence_items(type(self), self.sequence)


def mapping_items(
    name: str | type, mapping: Mapping, start: str = "({", end: str = "})"
) -> Iterator[Item]:
    """Yields the items of ``__nnx_repr__`` for a mapping."""
    yield Object(name, start=start, end=end, kv_sep=": ")
    for key, value in mapping.items():
        yield Attr(descriptions.safe_repr(key), value)


def sequence_items(name: str | type, sequence: Iterable) -> Iterator[Item]:
    """Yields the items of ``__nnx_repr__`` for a sequence."""
    yield Object(name, start="([", end="])", kv_sep="")
    for value in sequence:
        yield Attr("", value)


class Size(NamedTuple):
    """How many elements arrays have, and how many bytes they take."""

    elements: int = 0
    bytes: int = 0

    def __str__(self) -> str:
        return f"{self.elements:,} ({format_bytes(self.bytes)})"


def size_of(value: Any) -> Size:
    """Adds up the arrays in a value."""
    leaves = descriptions.leaves(value)
    arrays = [*filter(descriptions.has_form, leaves)]
    counts = [math.prod(x.shape) for x in arrays]
    sizes = [x.dtype.itemsize for x in arrays]
    return Size(sum(counts), sum(map(operator.mul, counts, sizes)))


def total(sizes: Iterable[Size]) -> Size:
    """Adds sizes."""
    return Size(*map(sum, zip(*sizes, Size(), strict=True)))


def format_bytes(count: int) -> str:
    """Prints a number of bytes in powers of 1000, as in ``8.0 KB``."""
    for power, unit in ((3, "GB"), (2, "MB"), (1, "KB")):
        if count > 1000**power:
            return f"{count / 1000**power:,.1f} {unit}"
    return f"{count:,} B"


# The items of our objects depend on the form: the compact one omits values, defaults.


def variable_repr(variable: Any, metadata: Mapping[str, Any]) -> Iterator[Item]:
    """Yields the items of ``__nnx_repr__`` for a Variable."""
    raw, writer = variable.get_raw_value(), writing.active()
    size = size_of(raw)
    yield _frame(variable, str(size) if size.elements else "")
    name = "" if writer and writer.siblings else "value"
    yield Attr(name, _shown_value(variable, raw, writer))
    for name, entry in metadata.items():
        is_default = name in _DEFAULTS and entry == getattr(config, _DEFAULTS[name])
        if not is_default and (name != "ref" or entry):
            yield Attr(name, entry)


# Required metadata is shown only where it differs from the default; value: the flag.
_DEFAULTS = {
    "hijax": "flax_hijax_variable",
    "eager_sharding": "flax_always_shard_variable",
}


def _frame(obj: Any, comment: str) -> Object:
    return Object(type(obj), comment=f" # {comment}" if comment else "")


def _shown_value(variable: Any, raw: Any, writer: writing.Writer | None) -> Any:
    if writer and not writer.reads_values:
        return raw
    if _jax.is_ref(raw):
        # Reading a traced ref would add an equation to the program. The short form
        # shows that it is a ref; the full form shows its elements instead.
        is_short = writer is not None and writer.short and raw.size > 1
        if is_short or isinstance(raw, _jax.Tracer):
            return raw
    try:
        return variable.get_value()
    except Exception:  # a hook of the user's, or the buffer of a ref is gone
        return raw


def pytree_repr(
    obj: Any, attributes: Iterable[tuple[str, Any]], is_data: Mapping[str, bool]
) -> Iterator[Item]:
    """Yields the items of ``__nnx_repr__`` for a Pytree."""
    writer = writing.active()
    has_sizes = writer is None or not writer.only_counts
    yield _frame(obj, _sizes_by_type(_sizes(writer).of(obj)) if has_sizes else "")
    defaults = writing.defaults_of(type(obj)) if writer and writer.siblings else {}
    for name, value in attributes:
        is_shown = not name.startswith("_") or is_data.get(name, False)
        if is_shown and not writing.is_default(name, value, defaults):
            yield Attr(name, value)


def _sizes_by_type(variables: Iterable[tuple[type, Size]]) -> str:
    """Prints the sizes of Variables by type; random state counts as one type."""
    sizes: dict[type, Size] = {}
    for kind, size in variables:
        if size.elements:
            sizes[kind] = total([size, sizes[kind]]) if kind in sizes else size
    parts = [f"{kind.__name__}: {size}" for kind, size in sizes.items()]
    if len(parts) > 1:
        parts.append(f"Total: {total(sizes.values())}")
    return ", ".join(parts)


def _sizes(writer: writing.Writer | None) -> Sizes:
    if writer is None:
        return Sizes()
    writer.sizes = writer.sizes or Sizes()
    return writer.sizes


class Sizes:
    """Types and sizes of the Variables in each object of one text.

    One walk over the outermost object finds those of all objects in it: they follow
    each other, unless an object occurs twice.
    """

    def __init__(self) -> None:
        self._variables: list[tuple[type, Size]] = []
        self._spans: dict[int, slice] = {}
        self._alive: Any = None  # the objects, so that no other takes their id

    def of(self, obj: Any) -> list[tuple[type, Size]]:
        """Lists the types and sizes of the distinct Variables in an object."""
        if id(obj) not in self._spans:
            self._walk(obj)
        return self._variables[self._spans[id(obj)]]

    def _walk(self, root: Any) -> None:
        self._alive, children_of = _once_below()
        self._variables, self._spans = [], {}
        # Depth, id, and how many Variables came before.
        above = list[tuple[int, int, int]]()
        is_shared = False

        def children_and_sharing(x: Any, path: Any) -> Any:
            nonlocal is_shared
            values = children_of(x, path)
            if values is None and type(x) not in writing.ATOMS:
                span = self._spans.get(id(x), slice(0, 1))
                is_shared |= span.start < span.stop
            return values

        for path, x in walks.walk(root, children_and_sharing):
            self._close(above, len(path))
            above.append((len(path), id(x), len(self._variables)))
            if descriptions.is_variable(x):
                self._variables.append(_kind_and_size(x))
        self._close(above, 0)
        if is_shared:
            self._spans = {id(root): slice(len(self._variables))}

    def _close(self, above: list[tuple[int, int, int]], depth: int) -> None:
        while above and above[-1][0] >= depth:
            _, key, start = above.pop()
            self._spans[key] = slice(start, len(self._variables))


class CountedAsOne:
    """Base of a type of Variables that counts for all types below it.

    Random state is one.
    """

    __slots__ = ()


def _kind_and_size(variable: Any) -> tuple[type, Size]:
    bases = (cls for cls in type(variable).__mro__ if CountedAsOne in cls.__bases__)
    return next(bases, type(variable)), size_of(variable.get_raw_value())


def variables_in(root: Any) -> list[Any]:
    """Lists the distinct Variables of an object, in the order of their paths."""
    _, children_of = _once_below()
    return [x for _, x in walks.walk(root, children_of) if descriptions.is_variable(x)]


def _once_below() -> tuple[walks.Once, Callable[[Any, Any], Any]]:
    """Returns, for a walk, the objects so far, and a lister of what is in a value."""
    is_new = walks.Once()

    def children_of(x: Any, _: Any) -> list[tuple[Any, Any]] | None:
        if type(x) in writing.ATOMS or not is_new(x):
            return None
        if descriptions.is_variable(x):
            return []
        if descriptions.is_node(x):
            return paths.sorted_items(writing.attributes_of(x))
        if isinstance(x, Mapping):
            return [*x.items()]
        is_sequence = isinstance(x, (list, tuple))
        members = x if is_sequence else descriptions.leaves(x, _is_end)
        is_leaf = len(members) == 1 and members[0] is x
        return [] if is_leaf else [*enumerate(members)]

    return is_new, children_of


def _is_end(x: Any) -> bool:
    return descriptions.is_variable(x) or descriptions.is_node(x)


# The names that ``dir`` lists, and so a notebook or shell offers on Tab: all that users
# can call, read or set. Left out are the private names of this library and of the
# standard library, and attributes that are not identifiers, such as the numbers under
# which a List keeps its items. These three are ``__dir__`` methods.


def names_of_class(self: type) -> list[str]:
    """Lists the names of a class that are for users."""
    return _sorted_names(type.__dir__(self), self, attribute_names=())


def names_of_object(self: Any, further: Iterable[str] = ()) -> list[str]:
    """Lists the names of an object that are for users, with further ones."""
    attribute_names = getattr(self, "__dict__", ())
    return _sorted_names({*object.__dir__(self), *further}, type(self), attribute_names)


def names_of_variable(self: Any) -> list[str]:
    """Lists a Variable's names for users, with those of its metadata and value."""
    raw = self.get_raw_value()
    # A ref and a tracer show those of the array that they stand for.
    is_array = isinstance(raw, jax.Array) or _jax.is_ref(raw)
    of_value = [name for name in dir(jax.Array if is_array else raw) if name[:1] != "_"]
    return names_of_object(self, [*self.get_metadata(), *of_value])


def _sorted_names(
    names: Iterable[str], cls: type, attribute_names: Collection[str]
) -> list[str]:
    def is_internal(name: str) -> bool:
        if not name.startswith("_") or name.startswith("__"):
            return False
        owner = next((base for base in cls.__mro__ if name in vars(base)), type)
        is_ours = owner.__module__.partition(".")[0] in _NOT_THE_USERS
        return name.startswith(_INTERNAL) or (name not in attribute_names and is_ours)

    return sorted(x for x in names if x.isidentifier() and not is_internal(x))


_INTERNAL = ("_pytree__", "_object__", "_abc_")
_NOT_THE_USERS = frozenset({"graftree", "abc", "typing", "collections"})
