"""What objects say about themselves in ``repr`` and ``str``.

Classes derive from `Representable` and define ``__nnx_repr__``; `writing.py` turns what
it yields into text. The functions at the end serve Variables and Pytrees, which are
defined above this file and known here by their methods and bookkeeping only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax

from graftree import _jax, config
from graftree.core import paths, walks
from graftree.core.text import colors, forms, writing


class Representable:
    """The base of classes that print as nested text; they define ``__nnx_repr__``.

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
    """Whether arrays directly in the object are written in full, also in a node."""

    def __nnx_repr__(self) -> Iterable[writing.Object | writing.Attr]:
        """Yields one `Object`, then one `Attr` per attribute.

        Raises:
            NotImplementedError: If the class does not define it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} derives from Representable and must define "
            "__nnx_repr__(self), which yields one Object and then Attr items."
        )

    def __repr__(self) -> str:
        return forms.get_repr(self)

    def __str__(self) -> str:
        return forms.get_repr(self, color=colors.default())

    def __treescope_repr__(self, path: str, subtree_renderer: Any) -> Any:
        """Shows the object in a notebook, if a renderer for treescope is registered."""
        if not _treescope:
            return NotImplemented
        return _treescope[0](self, path, subtree_renderer)


_treescope: list[Callable[..., Any]] = []


def register_treescope(render: Callable[..., Any]) -> None:
    """Registers a function of object, path and subtree renderer that draws objects."""
    _treescope[:] = [render]


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

    def __nnx_repr__(self) -> Iterable[writing.Object | writing.Attr]:
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

    def __nnx_repr__(self) -> Iterable[writing.Object | writing.Attr]:
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

    def __nnx_repr__(self) -> Iterable[writing.Object | writing.Attr]:
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

    def __nnx_repr__(self) -> Iterable[writing.Object | writing.Attr]:
        """Yields the frame and one item per element."""
        return sequence_items(type(self), self.sequence)


def mapping_items(
    name: str | type, mapping: Mapping, start: str = "({", end: str = "})"
) -> Iterator[writing.Object | writing.Attr]:
    """Yields what ``__nnx_repr__`` of a mapping yields."""
    yield writing.Object(name, start=start, end=end, kv_sep=": ")
    for key, value in mapping.items():
        yield writing.Attr(repr(key), value)


def sequence_items(
    name: str | type, sequence: Iterable
) -> Iterator[writing.Object | writing.Attr]:
    """Yields what ``__nnx_repr__`` of a sequence yields."""
    yield writing.Object(name, start="([", end="])", kv_sep="")
    for value in sequence:
        yield writing.Attr("", value)


# Required metadata is shown only where it differs from the default; value: the flag.
_DEFAULTS = {
    "hijax": "flax_hijax_variable",
    "eager_sharding": "flax_always_shard_variable",
}


class Size(NamedTuple):
    """How many elements arrays have, and how many bytes these take."""

    elements: int
    bytes: int

    def __str__(self) -> str:
        return f"{self.elements:,} ({format_bytes(self.bytes)})"


def size_of(value: Any) -> Size:
    """Adds up the arrays in a value."""
    elements = size = 0
    for leaf in _leaves(value):
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            count = math.prod(leaf.shape)
            elements += count
            size += count * leaf.dtype.itemsize
    return Size(elements, size)


def _leaves(value: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    try:
        return jax.tree.leaves(value, is_leaf=is_leaf)
    except (TypeError, ValueError):
        return []  # keys that JAX can't sort: no reason for repr to fail


def format_bytes(count: int) -> str:
    """Prints a number of bytes in powers of 1000, as in ``8.0 KB``."""
    if count <= 1000:
        return f"{count:,} B"
    size, unit = count / 1000, "KB"
    for larger in ("MB", "GB"):
        if size > 1000:
            size, unit = size / 1000, larger
    return f"{size:,.1f} {unit}"


def variable_comment(raw_value: Any) -> str:
    """Prints the size of a raw value, as in ``6 (24 B)``; empty if it has none."""
    size = size_of(raw_value)
    return str(size) if size.bytes else ""


def pytree_comment(variables: Iterable[Any]) -> str:
    """Prints the sizes of Variables by type; random state counts as one type."""
    sizes: dict[type, Size] = {}
    for variable in variables:
        size = size_of(variable.get_raw_value())
        if size.bytes:
            kind = _kind(type(variable))
            known = sizes.get(kind, Size(0, 0))
            sizes[kind] = Size(known.elements + size.elements, known.bytes + size.bytes)
    parts = [f"{kind.__name__}: {size}" for kind, size in sizes.items()]
    if len(sizes) > 1:
        parts.append(f"Total: {Size(*map(sum, zip(*sizes.values(), strict=True)))}")
    return ", ".join(parts)


def _kind(cls: type) -> type:
    # By name, since random state is defined above this file.
    return next((base for base in cls.__mro__ if base.__name__ == "RngState"), cls)


def variable_repr(
    variable: Any, metadata: Mapping[str, Any]
) -> Iterator[writing.Object | writing.Attr]:
    """Yields what ``__nnx_repr__`` of a Variable yields."""
    raw = variable.get_raw_value()
    comment = variable_comment(raw)
    yield writing.Object(type(variable), comment=f" # {comment}" if comment else "")
    yield writing.Attr("value", _shown_value(variable, raw))
    for name, entry in metadata.items():
        if name in _DEFAULTS and entry == getattr(config, _DEFAULTS[name]):
            continue
        if name == "ref" and not entry:
            continue
        yield writing.Attr(name, entry)


def _shown_value(variable: Any, raw: Any) -> Any:
    if not writing.reads_values():
        return raw
    if _jax.is_ref(raw):
        # Reading a traced ref would add an equation to the program. And shortened, a
        # ref says that it is one; in full, its elements say more.
        is_short = writing.shortens_arrays() and raw.size > 1
        if is_short or isinstance(raw, _jax.Tracer):
            return raw
    try:
        return variable.get_value()
    except Exception:  # a hook of the user's, or the buffer of a ref is gone
        return raw


def pytree_repr(
    obj: Any, attributes: Iterable[tuple[str, Any]], is_data: Mapping[str, bool]
) -> Iterator[writing.Object | writing.Attr]:
    """Yields what ``__nnx_repr__`` of a Pytree yields."""
    comment = pytree_comment(variables_in(obj))
    yield writing.Object(type(obj), comment=f" # {comment}" if comment else "")
    for name, value in attributes:
        if not name.startswith("_") or is_data.get(name, False):
            yield writing.Attr(name, value)


def variables_in(root: Any) -> list[Any]:
    """Lists the distinct Variables of an object, in the order of their paths."""
    is_new = walks.Once()

    def below(x: Any, _: Any) -> list[tuple[Any, Any]] | None:
        if not is_new(x):
            return None
        if writing.is_variable(x):
            return []
        if writing.is_node(x):
            return paths.sorted_items(vars(x))
        if isinstance(x, Mapping):
            return [*x.items()]
        is_sequence = isinstance(x, (list, tuple))
        return [*enumerate(x if is_sequence else _leaves(x, _is_end))]

    return [x for _, x in walks.walk(root, below) if writing.is_variable(x)]


def _is_end(x: Any) -> bool:
    return writing.is_variable(x) or writing.is_node(x)
