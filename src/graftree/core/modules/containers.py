"""List and Dict: containers that are Modules.

Unlike a Python list or dict in an attribute, they are nodes: their items are
attributes, each with its own status, and a shared container is recognized. An item is
kept in ``vars`` under a name, and appears in paths under a key:

    container   item                 name     key
    List        items[3]             "3"      3
    Dict        items["a"]           "a"      "a"
    Dict        items["items"]       "@items" "items"    (the name is a method's)

A structural change of a `List` (insert, pop, reverse, ...) moves items with their
status, and happens completely or not at all.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, MutableSequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from graftree import _jax, _python, errors
from graftree.core import fingerprints
from graftree.core.modules import capturing, modules
from graftree.core.objects import attributes, bookkeeping, pytrees
from graftree.core.objects.attributes import Naming
from graftree.core.text import descriptions, representations
from graftree.core.variables.variables import Variable

A = TypeVar("A")

_LENGTH = "_length"


def _is_index(name: str) -> bool:
    return name.isascii() and name.isdigit()


def _index_order(name: str) -> tuple[int, int, str]:
    return (0, int(name), "") if _is_index(name) else (1, 0, name)


def _item_key(name: str) -> int | str:
    return int(name) if _is_index(name) else name


@attributes.named_by(Naming(_index_order, _item_key, lambda _, key: str(key)))
class List(representations.SequenceReprMixin, modules.Module, MutableSequence[A]):
    """A list of Modules, Variables, arrays and static values.

    Args:
        it: The items; ``None`` for an empty List. The rules for attributes decide
            whether an item is data or static, unless you mark it with ``nnx.data`` or
            ``nnx.static``.

    Raises:
        ValueError: If an item is a container that holds data, such as a list of
            arrays, and is not marked.

    Example:
        >>> layers = nnx.List([nnx.Param(jnp.zeros(2)), "relu"])
        >>> layers.append(nnx.Param(jnp.ones(2)))
        >>> len(layers), list(nnx.state(layers))
        (3, [0, 2])
    """

    def __init__(self, it: Iterable[A] | None = None, /) -> None:
        self._length = 0
        self.extend(() if it is None else it)

    # Attributes named by an index are items, however they are set.

    @attributes.of_ours
    def __setattr__(self, name: str, value: Any) -> None:
        if not _is_index(name) or int(name) < self._length:
            super().__setattr__(name, value)
            return
        length = self._length
        super().__setattr__(str(length), value)
        pytrees.store_attribute(self, _LENGTH, length + 1, status=False)

    @attributes.of_ours
    def __delattr__(self, name: str) -> None:
        if _is_index(name):
            del self[int(name)]
        else:
            super().__delattr__(name)

    # Reading.

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[A]:
        index = 0
        while index < self._length:
            yield vars(self)[str(index)]
            index += 1

    @overload
    def __getitem__(self, index: int) -> A: ...
    @overload
    def __getitem__(self, index: slice) -> list[A]: ...

    def __getitem__(self, index: int | slice) -> A | list[A]:
        if isinstance(index, slice):
            return [vars(self)[str(i)] for i in range(self._length)[index]]
        return vars(self)[str(_position(self, index))]

    def __contains__(self, value: object) -> bool:
        return any(_same(item, value) for item in self)

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """Returns the index of the first item that equals ``value``.

        Args:
            value: The item to find; arrays and Variables are compared by value.
            start: The first index to look at.
            stop: The index to stop at; ``None`` for the length.

        Raises:
            ValueError: If there is no such item.
        """
        for i in range(self._length)[slice(start, stop)]:
            if _same(self[i], value):
                return i
        text = descriptions.safe_repr(value)
        raise ValueError(f"{text} is not in this List of {self._length} items.")

    def count(self, value: Any) -> int:
        """Returns how many items equal ``value``."""
        return sum(_same(item, value) for item in self)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, (List, list)):
            return NotImplemented
        return len(self) == len(other) and all(map(_same, self, other))

    # Items may be arrays, so that only the identity can be hashed.
    __hash__ = object.__hash__

    # Writing.

    @overload
    def __setitem__(self, index: int, value: A) -> None: ...
    @overload
    def __setitem__(self, index: slice, value: Iterable[A]) -> None: ...

    def __setitem__(self, index: int | slice, value: Any) -> None:
        if not isinstance(index, slice):
            setattr(self, str(_position(self, index)), value)
            return
        if not isinstance(value, Iterable):
            raise TypeError(
                "Expected an iterable to assign to a slice of a List, got "
                f"{type(value).__name__}."
            )
        positions, values = range(self._length)[index], list(value)
        if len(positions) != len(values):
            raise ValueError(
                f"Length mismatch: the slice of the List has {len(positions)} items, "
                f"the value {len(values)}. Use insert, extend or del to change the "
                "length."
            )
        _assign(self, zip(positions, values, strict=True))

    def __delitem__(self, index: int | slice) -> None:
        items = _items(self)
        del items[index if isinstance(index, slice) else _position(self, index)]
        _replace(self, items)

    def append(self, value: A) -> None:
        """Adds an item at the end.

        Args:
            value: The item.

        Raises:
            ValueError: If it is a container that holds data and is not marked.
        """
        setattr(self, str(self._length), value)

    def extend(self, values: Iterable[A]) -> None:
        """Adds items at the end: all of them, or none.

        Args:
            values: The items.

        Raises:
            ValueError: If one is a container that holds data and is not marked.
        """
        _assign(self, enumerate(list(values), start=self._length))

    def insert(self, index: int, value: A) -> None:
        """Adds an item in front of the one at ``index``.

        Args:
            index: The index it will have; an index beyond either end means that end.
            value: The item.

        Raises:
            ValueError: If it is a container that holds data and is not marked.
        """
        self.append(value)
        *items, new = _items(self)
        # In front of the items at `index`, which are counted without the new one.
        items.insert(index, new)
        _replace(self, items)

    def reverse(self) -> None:
        """Reverses the order of the items, in place."""
        _replace(self, _items(self)[::-1])

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name != _LENGTH]

    def clear(self) -> None:
        """Removes all items."""
        _replace(self, [])


# Not methods: their names belong to the classes of users.


def _position(x: List[Any], index: Any) -> int:
    if not isinstance(index, (int, np.integer)):
        raise TypeError(
            "Invalid index type: the items of a List have integer indices and "
            f"slices, got {type(index).__name__}."
        )
    position = int(index) + x._length if index < 0 else int(index)
    if not 0 <= position < x._length:
        raise IndexError(
            f"Index out of bounds: {index} in a List of length {x._length}."
        )
    return position


def _items(x: List[Any]) -> list[tuple[Any, bool]]:
    """Lists the items with their status."""
    table, entries = bookkeeping.table_of(x), vars(x)
    names = map(str, range(x._length))
    return [(entries[name], table[name]) for name in names]


def _replace(x: List[Any], items: list[tuple[Any, bool]]) -> None:
    bookkeeping.check_owned(x)
    values = dict(bookkeeping.attribute_items(x))
    statuses = dict(bookkeeping.table_of(x))
    for name in map(str, range(x._length)):
        del values[name], statuses[name]
    for i, (value, status) in enumerate(items):
        values[str(i)], statuses[str(i)] = value, status
    values[_LENGTH] = len(items)
    table = attributes.AttributeTable(statuses)
    pytrees.replace_attributes(x, table, values.items())


def _assign(x: List[A], values: Iterable[tuple[int, A]]) -> None:
    """Sets items one by one; none of them if one is refused."""
    bookkeeping.check_owned(x)
    former = bookkeeping.table_of(x), bookkeeping.attribute_items(x)
    try:
        for position, value in values:
            setattr(x, str(position), value)
    except BaseException:
        pytrees.replace_attributes(x, *former)
        raise


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Variable) and type(a) is type(b):
        a, b = a.get_value(), b.get_value()
    try:
        return fingerprints.same_value(a, b)
    except ValueError:
        # A container whose elements compare to arrays; only identity could decide.
        return False


# Entries of `vars` that are not items of a Dict.
_HIDDEN = frozenset({*bookkeeping.NAMES, capturing.BUFFERS})
# The first character of names of items whose key can't be their name.
_MARK = "@"


def _key_of(name: str) -> str:
    return name.removeprefix(_MARK)


def _name_of(cls: type, key: Any) -> str:
    """Returns the name under which the item ``key`` is kept."""
    if key.startswith(_MARK) or _is_method(cls, key):
        return _MARK + key
    return key


@attributes.named_by(Naming(_key_of, _key_of, _name_of))
class Dict(representations.MappingReprMixin, modules.Module, MutableMapping[str, A]):
    """A dict with string keys of Modules, Variables, arrays and static values.

    Items are also attributes: ``d["a"]`` is ``d.a``. The exception is a key that is the
    name of a method, such as ``d["items"]``.

    Items are in the order of insertion. A transform, `clone` or `merge` makes a Dict
    with sorted items, like the State. Where the order matters, as for layers that
    are applied one after the other, use a `List`.

    Args:
        items: A mapping or pairs, as for ``dict``.
        **kwargs: Further items.

    Raises:
        TypeError: If a key is not a string.
        ValueError: If an item is a container that holds data, such as a list of
            arrays, and is not marked with ``nnx.data``.

    Example:
        >>> heads = nnx.Dict(mean=nnx.Param(jnp.zeros(2)), name="normal")
        >>> heads["scale"] = nnx.Param(jnp.ones(2))
        >>> list(heads), list(nnx.state(heads))
        (['mean', 'name', 'scale'], ['mean', 'scale'])
    """

    def __init__(
        self, items: Mapping[str, A] | Iterable[tuple[str, A]] = (), /, **kwargs: A
    ) -> None:
        entries = dict(items, **kwargs)
        for key in entries:
            _check_key(key)
        for key, value in entries.items():
            self[key] = value

    @attributes.of_ours
    def __setattr__(self, name: str, value: Any) -> None:
        attribute = getattr(type(self), name, None)
        if callable(attribute) and not hasattr(type(attribute), "__set__"):
            name = _MARK + name
        super().__setattr__(name, value)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> A: ...

    def __getitem__(self, key: str) -> A:
        _check_key(key)
        if key not in self:
            raise KeyError(key)
        return vars(self)[_name_of(type(self), key)]

    def __setitem__(self, key: str, value: A) -> None:
        _check_key(key)
        if key in _HIDDEN:
            raise ValueError(f"The key {key!r} is reserved by Dict; use another one.")
        setattr(self, _name_of(type(self), key), value)

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise KeyError(key)
        delattr(self, _name_of(type(self), key))

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, str) or key in _HIDDEN:
            return False
        return _name_of(type(self), key) in vars(self)

    def __iter__(self) -> Iterator[str]:
        names = [name for name in vars(self) if name not in _HIDDEN]
        if _jax.is_tracing():
            _warn_of_order(self, names)
        return map(_key_of, names)

    def __len__(self) -> int:
        return len(vars(self).keys() - _HIDDEN)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Mapping):
            return NotImplemented
        # Not by iteration: the order does not count.
        keys = {*map(_key_of, vars(self).keys() - _HIDDEN)}
        return len(keys) == len(other) and all(
            key in other and _same(self[key], other[key]) for key in keys
        )

    def __hash__(self) -> int:
        return object.__hash__(self)  # as for `List`


def _warn_of_order(x: Dict[Any], names: list[str]) -> None:
    """Warns a user whose loop over a Dict, which was rebuilt, has another order.

    The table of statuses is that of the Dict which it was made of.
    """
    present = set(names)
    inserted = [name for name in bookkeeping.table_of(x) if name in present]
    level = 0 if inserted == names else _level_of_user()
    if not level:
        return
    orders = {"here": names, "as inserted": inserted}
    warnings.warn(
        errors.message(
            "Iteration over an nnx.Dict in a transform: the items come in sorted "
            "order.",
            where="\n".join(
                [f"{k}: {', '.join(map(_key_of, v))}" for k, v in orders.items()]
            ),
            way_out="If the order matters, keep it: in an nnx.List, or as a tuple of "
            "keys (for key in self.order: self.layers[key]).\nIf it doesn't, insert "
            "the items in sorted order, or ignore nnx.errors.OrderWarning.",
        ),
        errors.OrderWarning,
        stacklevel=level,
    )


def _level_of_user() -> int:
    """Finds the level of the loop above the caller; 0 if it is ours, as in a repr.

    `Mapping.items` and its like have frames of their own.
    """
    for level, frame in enumerate(_python.frames_above(1), 1):
        module = _python.module_of(frame)
        if module not in _FRAMES:
            return 0 if module.startswith("graftree.") else level
    return 0


_FRAMES = (__name__, "_collections_abc", "collections.abc")


def _check_key(key: Any) -> None:
    if not isinstance(key, str):
        raise TypeError(
            f"Expected a string as the key of a Dict, whose items are attributes; got "
            f"{key!r} of type {type(key).__name__}."
        )


def _is_method(cls: type, name: str) -> bool:
    attribute = getattr(cls, name, None)
    return callable(attribute) or hasattr(type(attribute), "__set__")
