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
from graftree.core import paths
from graftree.core.text import colors, writing


class Representable:
    """Base of the classes whose text this file writes; they define ``__nnx_repr__``.

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
        return writing.get_repr(self)

    def __str__(self) -> str:
        return writing.get_repr(self, color=colors.default())

    def __treescope_repr__(self, path: str, subtree_renderer: Any) -> Any:
        """Shows the object in a notebook, if a renderer for treescope is registered."""
        render = writing.renderer("treescope")
        return (
            NotImplemented if render is None else render(self, path, subtree_renderer)
        )


class MappingReprMixin(Representable):
    """Gives a mapping the form ``Type({ key: value, ... })``.

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
    """Gives a sequence the form ``Type([ value, ... ])``.

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
    """Shows a mapping with one entry per line.

    Args:
        mapping: What to show.

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
    """Shows a sequence with one element per line.

    Args:
        sequence: What to show.

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
    """Yields what ``__nnx_repr__`` of a mapping yields.

    Args:
        name: The class, or the name to show.
        mapping: What to show.
        start: What follows the name.
        end: What comes last.

    Example:
        >>> from graftree.core.text import representations
        >>> next(iter(representations.mapping_items("Table", {}))).kv_sep
        ': '
    """
    yield writing.Object(name, start=start, end=end, kv_sep=": ")
    for key, value in mapping.items():
        yield writing.Attr(repr(key), value)


def sequence_items(
    name: str | type, sequence: Iterable
) -> Iterator[writing.Object | writing.Attr]:
    """Yields what ``__nnx_repr__`` of a sequence yields.

    Args:
        name: The class, or the name to show.
        sequence: What to show.

    Example:
        >>> from graftree.core.text import representations
        >>> next(iter(representations.sequence_items("Row", []))).start
        '(['
    """
    yield writing.Object(name, start="([", end="])", kv_sep="")
    for value in sequence:
        yield writing.Attr("", value)


# Required metadata is shown only where it differs from the default; value: the flag.
_DEFAULTS = {
    "hijax": "flax_hijax_variable",
    "eager_sharding": "flax_always_shard_variable",
}


class Size(NamedTuple):
    """How many elements arrays have, and how many bytes these take.

    Example:
        >>> from graftree.core.text import representations
        >>> str(representations.Size(2002, 8008))
        '2,002 (8.0 KB)'
    """

    elements: int
    bytes: int

    def __str__(self) -> str:
        return f"{self.elements:,} ({format_bytes(self.bytes)})"


def size_of(value: Any) -> Size:
    """Adds up the arrays in a value.

    Args:
        value: Any pytree; leaves without shape and dtype count nothing.

    Returns:
        The number of elements and of bytes.

    Example:
        >>> from graftree.core.text import representations
        >>> representations.size_of({"a": jnp.ones((2, 3)), "b": "text"})
        Size(elements=6, bytes=24)
    """
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
    """Prints a number of bytes in powers of 1000.

    Args:
        count: The number.

    Returns:
        For example ``"24 B"`` or ``"8.0 KB"``.

    Example:
        >>> from graftree.core.text import representations
        >>> representations.format_bytes(1_234_567)
        '1.2 MB'
    """
    if count <= 1000:
        return f"{count:,} B"
    size, unit = count / 1000, "KB"
    for larger in ("MB", "GB"):
        if size > 1000:
            size, unit = size / 1000, larger
    return f"{size:,.1f} {unit}"


def variable_comment(raw_value: Any) -> str:
    """Prints the size of the raw value of a Variable.

    Args:
        raw_value: Any pytree.

    Returns:
        For example ``"6 (24 B)"``; empty if it holds no array elements.

    Example:
        >>> from graftree.core.text import representations
        >>> representations.variable_comment(jnp.ones((2, 3)))
        '6 (24 B)'
    """
    size = size_of(raw_value)
    return str(size) if size.bytes else ""


def pytree_comment(variables: Iterable[Any]) -> str:
    """Prints the sizes of Variables by type.

    Args:
        variables: Variables, each once; the types are listed in this order.

    Returns:
        For example ``"Param: 2,002 (8.0 KB)"``; empty without array elements. The
        kinds of random state count as one type, ``RngState``.

    Example:
        >>> from graftree.core.text import representations
        >>> variables = [nnx.Param(jnp.ones(2)), nnx.Cache(jnp.ones(1))]
        >>> representations.pytree_comment(variables)
        'Param: 2 (8 B), Cache: 1 (4 B), Total: 3 (12 B)'
    """
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
    variable: Any, value: Any, metadata: Mapping[str, Any]
) -> Iterator[writing.Object | writing.Attr]:
    """Yields what ``__nnx_repr__`` of a Variable yields.

    Args:
        variable: The Variable.
        value: What is shown as its value.
        metadata: Its metadata, of which entries at their default are left out.

    Example:
        >>> nnx.Param(2, tag="x")
        Param(
          value=2,
          tag='x'
        )
    """
    raw = variable.get_raw_value()
    comment = variable_comment(raw)
    yield writing.Object(type(variable), comment=f" # {comment}" if comment else "")
    # Shortened, a ref says that it is one; in full, its elements say more.
    shows_ref = _jax.is_ref(raw) and writing.shortens_arrays() and raw.size > 1
    yield writing.Attr("value", raw if shows_ref else value)
    for name, entry in metadata.items():
        if name in _DEFAULTS and entry == getattr(config, _DEFAULTS[name]):
            continue
        if name == "ref" and not entry:
            continue
        yield writing.Attr(name, entry)


def pytree_repr(
    obj: Any, attributes: Iterable[tuple[str, Any]], is_data: Mapping[str, bool]
) -> Iterator[writing.Object | writing.Attr]:
    """Yields what ``__nnx_repr__`` of a Pytree yields.

    Args:
        obj: The object.
        attributes: Its attributes by name; static ones whose name begins with an
            underscore are left out.
        is_data: For each name whether the attribute is data.

    Example:
        >>> model = nnx.Module()
        >>> model.width = 2
        >>> model
        Module(
          width=2
        )
    """
    comment = pytree_comment(variables_in(obj))
    yield writing.Object(type(obj), comment=f" # {comment}" if comment else "")
    for name, value in attributes:
        if not name.startswith("_") or is_data.get(name, False):
            yield writing.Attr(name, value)


def variables_in(root: Any) -> list[Any]:
    """Lists the Variables of an object, each once, in the order of their paths.

    Args:
        root: A Pytree, a Variable or a container of such; cycles are allowed.

    Returns:
        A new list.

    Example:
        >>> from graftree.core.text import representations
        >>> found = representations.variables_in([nnx.Param(1), nnx.Cache(2)])
        >>> [v.get_value() for v in found]
        [1, 2]
    """
    found: list[Any] = []
    _collect_variables(root, found, {})
    return found


def _collect_variables(x: Any, found: list[Any], seen: dict[int, Any]) -> None:
    if isinstance(x, (list, tuple, Mapping)) or _is_end(x):
        if id(x) in seen:
            return
        seen[id(x)] = x
    if writing.is_variable(x):
        found.append(x)
        return
    if writing.is_node(x):
        children = [child for _, child in paths.sorted_items(vars(x))]
    elif isinstance(x, (list, tuple)):
        children = x
    elif isinstance(x, Mapping):
        children = x.values()
    else:
        children = [leaf for leaf in _leaves(x, _is_end) if leaf is not x]
    for child in children:
        _collect_variables(child, found, seen)


def _is_end(x: Any) -> bool:
    return writing.is_variable(x) or writing.is_node(x)
