"""Tells apart static values that Python considers equal.

``1``, ``True`` and ``1.0`` are equal, and so are ``0.0`` and ``-0.0``, but a program
may treat them differently. And a list or a configuration equals itself after a change
in place. So wherever a static value is part of a key, or is compared with its earlier
self, its *imprint* stands beside it: a hashable value that differs in such cases.

    value                                  imprint
    int, str, function, enum, dtype, ...   its type
    float, complex, NumPy scalar           its type, and the signs or the bytes
    tuple, frozenset                       its type, and the imprints of its members
    list, dict, set, dataclass, object     the same, and their present content
      with a hash of its own

A `HashableMapping` compares its values in this way. Where one is kept to be compared
later, as in a skeleton, a value may have changed in place by then, so the mapping is
kept as it is `noted`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Self

import jax
import numpy as np

from graftree import _jax

Rule = Callable[[Any, int], Any]

# Values of these types, and of their subclasses, don't change, and equality tells them
# apart if their types are equal. The same holds for types that JAX and NumPy define.
_IMMUTABLE = (str, bytes, int, type, enum.Enum, BuiltinFunctionType, MethodType)
_IMMUTABLE_PACKAGES = ("jax", "jaxlib", "numpy")

# How deep to inspect a value; it may contain itself.
_DEPTH = 12


def told_apart(values: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The imprints of some static values, and the values.

    The imprints come first: values of different types need not be comparable.
    """
    kinds = tuple(map(type, values))
    # Almost always: then it runs in C.
    is_plain = PLAIN.issuperset(kinds)
    return kinds if is_plain else tuple(map(imprint, values)), values


def imprint(value: Any, depth: int = 0) -> Any:
    """The key that tells a static value from its equals and from its earlier self."""
    kind = type(value)
    rule = _rule_of(kind)
    return kind if rule is None or depth > _DEPTH else rule(value, depth + 1)


def may_change(value: Any) -> bool:
    """Whether the imprint of a static value may change."""
    rule = _rule_of(type(value))
    if rule is _of_members:
        return any(map(may_change, value))
    if isinstance(value, HashableMapping):
        return value.noted() is not value
    if rule is _of_fields and type(value).__dataclass_params__.frozen:
        return any(may_change(x) for _, x in _compared_fields(value))
    return rule in (_of_items, _of_fields, _of_attributes)


def any_may_change(values: tuple[Any, ...]) -> bool:
    """Whether the imprint of one of some static values may change."""
    return not PLAIN.issuperset(map(type, values)) and any(map(may_change, values))


def unchanged(values: Iterable[Any]) -> Callable[[], bool]:
    """Makes a check whether some static values still have the same content.

    What is in a list, dict, set or dataclass is compared by identity, which takes a
    tenth of the time: each thing in it either doesn't change or is checked as well.
    Other values are compared by their imprints.
    """
    listed: dict[int, tuple[Any, Callable[[Any], list[Any]], list[Any]]] = {}
    others: dict[int, tuple[Any, Any]] = {}
    pending = [*values]
    for x in pending:
        if id(x) in listed or id(x) in others or not may_change(x):
            continue
        list_inside = _lister_of(x)
        if list_inside is None:
            others[id(x)] = x, imprint(x)
        else:
            inside = list_inside(x)
            listed[id(x)] = x, list_inside, inside
            pending += inside if any_may_change(tuple(inside)) else ()

    def check() -> bool:
        for x, list_inside, inside in listed.values():
            now = list_inside(x)
            if len(now) != len(inside) or not all(map(operator.is_, now, inside)):
                return False
        return all(imprint(x) == before for x, before in others.values())

    return check


def _lister_of(value: Any) -> Callable[[Any], list[Any]] | None:
    """A function that lists all that the imprint of a value depends on."""
    rule = _rule_of(type(value))
    if rule in (_of_members, _of_items):
        return _entries if isinstance(value, dict) else lambda x: [type(x), *x]
    if rule is _of_mapping:
        return lambda x: _entries(x._entries)
    if rule is _of_fields and _has_fields_in_dict(value):
        names = [name for name, _ in _compared_fields(value)]
        missing = itertools.repeat(dataclasses.MISSING)
        return lambda x: [type(x), *map(vars(x).get, names, missing)]
    # Its own hash may depend on anything.
    has_no_hash = rule is _of_attributes and type(value).__hash__ is None
    if has_no_hash and hasattr(value, "__dict__"):
        return lambda x: [type(x), *_entries(vars(x))]
    return None


def _has_fields_in_dict(value: Any) -> bool:
    """Whether no field is a property, or what a special method computes."""
    entries = getattr(value, "__dict__", {})
    return type(value).__getattribute__ is object.__getattribute__ and all(
        entries.get(name, dataclasses.MISSING) is x
        for name, x in _compared_fields(value)
    )


def _entries(x: Mapping[Any, Any]) -> list[Any]:
    return [type(x), *x, *x.values()]


# Types whose imprint is the type itself, as far as they are known; others have a rule.
PLAIN: set[type] = {int, bool, str, bytes, type(None), FunctionType}


@functools.cache
def _rule_of(kind: type) -> Rule | None:
    if issubclass(kind, np.generic):
        return _of_bytes
    if issubclass(kind, (float, complex)):
        return _of_signs
    if issubclass(kind, (tuple, frozenset)):
        return _of_members
    if issubclass(kind, (list, dict, set)):
        return _of_items
    if issubclass(kind, HashableMapping):
        return _of_mapping
    # Equality of other objects is that of their identity, unless they define it.
    is_plain = kind.__eq__ is object.__eq__ or issubclass(kind, _IMMUTABLE)
    is_known = kind in PLAIN or kind.__module__.partition(".")[0] in _IMMUTABLE_PACKAGES
    if not (is_plain or is_known):
        if getattr(getattr(kind, "__dataclass_params__", None), "eq", False):
            return _of_fields
        if kind.__hash__ is not object.__hash__:
            return _of_attributes
    PLAIN.add(kind)
    return None


def _of_bytes(value: np.generic, _: int) -> Any:
    return type(value), value.tobytes()


def _of_signs(value: complex, _: int) -> Any:
    signs = math.copysign(1.0, value.real), math.copysign(1.0, value.imag)
    return type(value), signs


def _of_members(value: Iterable[Any], depth: int) -> Any:
    if isinstance(value, tuple):
        return (type(value), *[imprint(x, depth) for x in value])
    return type(value), frozenset([(x, imprint(x, depth)) for x in value])


def _of_items(value: Any, depth: int) -> Any:
    if isinstance(value, dict):
        keys, values = _contents(value, depth), _contents(value.values(), depth)
        return type(value), keys, values
    if isinstance(value, list):
        return type(value), _contents(value, depth)
    return type(value), frozenset([_content(x, depth) for x in value])


# Plain values that are their own content, if their types are equal.
_NAMES = frozenset({int, bool, str, bytes, type(None)})


def _contents(values: Iterable[Any], depth: int) -> tuple[Any, ...]:
    """The content of each of some values, in order."""
    kinds = tuple(map(type, values))
    # A vocabulary has many names, and each plain `jax.jit` looks at all of them: in C.
    if _NAMES.issuperset(kinds):
        return kinds, tuple(values)
    return tuple([_content(x, depth) for x in values])


def _of_mapping(value: HashableMapping, depth: int) -> Any:
    # Equal mappings may have their entries in any order.
    return frozenset([(key, _content(x, depth)) for key, x in value.items()])


def _of_fields(value: Any, depth: int) -> Any:
    content = [(name, _content(x, depth)) for name, x in _compared_fields(value)]
    return type(value), tuple(content)


def _compared_fields(value: Any) -> Iterable[tuple[str, Any]]:
    fields = [field.name for field in dataclasses.fields(value) if field.compare]
    return [(name, getattr(value, name, None)) for name in fields]


def _of_attributes(value: Any, depth: int) -> Any:
    try:
        number = hash(value)
    except TypeError:
        number = None
    entries = getattr(value, "__dict__", {})
    content = [(name, _content(x, depth)) for name, x in entries.items()]
    return type(value), number, tuple(content)


def _content(value: Any, depth: int) -> Any:
    """The imprint of a value, and the value itself if its imprint doesn't say it."""
    rule = _rule_of(type(value))
    if rule is _of_members and isinstance(value, tuple) and depth <= _DEPTH:
        return (type(value), *[_content(x, depth + 1) for x in value])
    # A traced array has a hash by identity in some versions; it must not be kept.
    is_hashable = type(value).__hash__ is not None and not isinstance(value, jax.Array)
    if rule in (None, _of_signs, _of_members) and is_hashable:
        return value, imprint(value, depth)
    return imprint(value, depth)


class HashableMapping(Mapping[Any, Any]):
    """An immutable mapping that compares by content and can be hashed.

    Hashing needs hashable values. Values that are arrays compare element-wise, others
    by type and value: ``1`` is not ``True`` here.

    Example:
        >>> from graftree.core.imprints import HashableMapping
        >>> HashableMapping({"a": 1, "b": 2}) == HashableMapping({"b": 2, "a": 1})
        True
    """

    __slots__ = ("__weakref__", "_entries", "_hash", "get", "is_fixed")

    def __init__(self, entries: Mapping[Any, Any], /) -> None:
        self._entries = dict(entries)
        self._hash: int | None = None
        # Whether it is known that no value changes in place.
        self.is_fixed = False
        # The dict's own, in C: each read and write of a Variable calls it.
        self.get = self._entries.get

    def __getitem__(self, key: str) -> Any:
        return self._entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(self._entries.items()))
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, HashableMapping):
            return NotImplemented
        mine, theirs = self._entries, other._entries
        return mine.keys() == theirs.keys() and all(
            value is theirs[key]
            or (
                imprint(value) == imprint(theirs[key])
                and same_value(value, theirs[key])
            )
            for key, value in mine.items()
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._entries!r})"

    def __reduce__(self) -> Any:
        return type(self), (self._entries,)

    def as_dict(self) -> dict[Any, Any]:
        """The entries as a new dict, made in C."""
        return self._entries.copy()

    def noted(self) -> HashableMapping:
        """The mapping as it is now: itself, if none of its values changes in place."""
        if not self.is_fixed:
            if any_may_change(tuple(self._entries.values())):
                return Noted(self)
            self.is_fixed = True
        return self

    def with_entry(self, key: str, value: Any) -> Self:
        """A mapping of the same type in which ``key`` has this value."""
        return type(self)({**self._entries, key: value})

    def without(self, key: str) -> Self:
        """A mapping of the same type that lacks ``key``."""
        return type(self)({k: v for k, v in self._entries.items() if k != key})


class Noted(HashableMapping):
    """A mapping as it was at one time, although its values change in place.

    Equal to a mapping, or a noted one, whose values are or were equal to these.

    Args:
        live: The mapping.

    Attributes:
        live: The same.

    Example:
        >>> from graftree.core.imprints import HashableMapping
        >>> sizes = HashableMapping({"sizes": [1, 2]})
        >>> before = sizes.noted()
        >>> sizes["sizes"].append(3)
        >>> sizes == before
        False
    """

    __slots__ = ("_content", "live")

    def __init__(self, live: HashableMapping, /) -> None:
        super().__init__(live)
        self.live = live
        self._content = imprint(live)

    def __hash__(self) -> int:
        hash(self.live)  # an error if a value has no hash; it may have changed by now
        return hash(self._content)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, HashableMapping):
            return NotImplemented
        theirs = other._content if isinstance(other, Noted) else imprint(other)
        return self._content == theirs and all(
            same_value(value, other[key]) for key, value in self.items()
        )

    def __reduce__(self) -> Any:
        return Noted, (self.live,)

    def noted(self) -> HashableMapping:
        """The mapping as it is now."""
        return self.live.noted()


def same_value(a: Any, b: Any) -> bool:
    """Whether two static values are equal; arrays (whose ``==`` is not a bool) too."""
    if a is b:
        return True
    if isinstance(a, (jax.Array, np.ndarray)) or isinstance(b, (jax.Array, np.ndarray)):
        if isinstance(a, _jax.Tracer) or isinstance(b, _jax.Tracer):
            return False
        return np.array_equal(np.asarray(a), np.asarray(b))
    try:
        return bool(a == b)
    except ValueError:
        # A container whose elements compare to arrays; only identity could decide.
        return False
