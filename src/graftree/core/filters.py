"""Filters select the leaves of an object.

A predicate is a function ``(path, leaf) -> bool``. A filter is a predicate or a short
form of one (a class, a tag, ``...``); `to_predicate` turns every filter into a
predicate. The predicates of this file are immutable, hashable and equal by content, so
they can be keys of a dict and part of a cache key. With several filters, a leaf goes to
the first that matches it.
"""

from __future__ import annotations

import dataclasses
import itertools
import types
import typing
from collections.abc import Iterable

from graftree import errors
from graftree.annotations import Filter, Key, Path, Predicate

L = typing.TypeVar("L")


def to_predicate(filter: Filter) -> Predicate:
    """Turns a filter into a predicate.

    Args:
        filter: A string (`WithTag`), a class, parametrized generic or union of
            classes (`OfType`), ``...`` or ``True`` (`Everything`), ``None`` or
            ``False`` (`Nothing`), a list or tuple of filters (`Any`), or any other
            callable, which is the predicate.

    Returns:
        A function ``(path, leaf) -> bool``.

    Raises:
        TypeError: If ``filter`` is none of these.

    Example:
        >>> nnx.filterlib.to_predicate(["dropout", True])
        Any(WithTag('dropout'), Everything())
    """
    if isinstance(filter, str):
        return WithTag(filter)
    classes = _classes(filter)
    if classes is not None:
        return OfType(classes)
    if filter is ... or filter is True:
        return Everything()
    if filter is None or filter is False:
        return Nothing()
    if callable(filter):
        return filter
    if isinstance(filter, (list, tuple)):
        return Any(*filter)
    raise TypeError(
        errors.message(
            f"Invalid collection filter: {filter!r} of type {type(filter).__name__}.",
            way_out="A filter is a class, a tag, `...`, a bool, None, a function of "
            "path and leaf, or a list or tuple of filters.",
        )
    )


def _classes(filter: Filter) -> type | tuple[type, ...] | None:
    """Lists the classes that a type expression stands for; ``None`` for others."""
    if isinstance(filter, type) and not isinstance(filter, types.GenericAlias):
        return filter
    origin = typing.get_origin(filter)
    if origin in (typing.Union, types.UnionType):
        members = [_classes(member) for member in typing.get_args(filter)]
        classes = tuple(member for member in members if isinstance(member, type))
        return classes if len(classes) == len(members) else None
    # Param[jax.Array] is callable, so it would pass for a predicate that matches all.
    return origin if isinstance(origin, type) else None


def filters_to_predicates(filters: Iterable[Filter]) -> tuple[Predicate, ...]:
    """Turns filters that group leaves into predicates.

    Args:
        filters: Filters; each leaf goes to the first that matches it.

    Returns:
        One predicate per filter.

    Raises:
        TypeError: If one of them is not a filter.
        ValueError: If ``...`` or ``True`` comes before another filter, which could then
            never match.

    Example:
        >>> nnx.filterlib.filters_to_predicates([nnx.Param, ...])[1]
        Everything()
    """
    filters = tuple(filters)
    take_all = [x is ... or x is True for x in filters]
    for i, (takes_all, next_does) in enumerate(itertools.pairwise(take_all)):
        if takes_all and not next_does:
            raise ValueError(
                errors.message(
                    "`...` or `True` can only be used as the last filters, "
                    f"got {filters[i]!r} at index {i} before {filters[i + 1]!r}.",
                    way_out=f"Move it to the end of the {len(filters)} filters.",
                )
            )
    return tuple(map(to_predicate, filters))


def group(
    items: Iterable[tuple[Path, L]], filters: Iterable[Filter], /
) -> list[list[tuple[Path, L]]]:
    """Lists the (path, leaf) pairs of each filter, and last those of no filter."""
    predicates = filters_to_predicates(filters)
    groups: list[list[tuple[Path, L]]] = [[] for _ in range(len(predicates) + 1)]
    choices = [*zip(predicates, groups, strict=False)]
    for item in items:
        for predicate, chosen in choices:
            if predicate(*item):
                chosen.append(item)
                break
        else:
            groups[-1].append(item)
    return groups


@dataclasses.dataclass(frozen=True, repr=False)
class WithTag:
    """Matches leaves whose attribute ``tag`` equals the given one.

    Args:
        tag: The tag; for a random key or count, the name of its stream.

    Example:
        >>> nnx.WithTag("dropout")((), nnx.Variable(0, tag="dropout"))
        True
    """

    tag: str

    def __call__(self, path: Path, x: typing.Any) -> bool:
        """Whether the leaf has the tag."""
        return hasattr(x, "tag") and bool(x.tag == self.tag)

    def __repr__(self) -> str:
        return f"WithTag({self.tag!r})"


@dataclasses.dataclass(frozen=True, repr=False)
class PathContains:
    """Matches leaves that have a key somewhere in their path.

    Args:
        key: The key to look for.
        exact: Whether a key of the path must equal ``key``; otherwise it is enough that
            ``str(key)`` is a substring of one.

    Example:
        >>> nnx.PathContains("kernel")(("linear", "kernel"), None)
        True
        >>> nnx.PathContains("lin", exact=False)(("linear", "kernel"), None)
        True
    """

    key: Key
    exact: bool = True

    def __call__(self, path: Path, x: typing.Any) -> bool:
        """Whether a key of the path is, or contains, the wanted one."""
        if self.exact:
            return self.key in path
        wanted = str(self.key)
        return any(wanted in str(key) for key in path)

    def __repr__(self) -> str:
        return f"PathContains({self.key!r}, exact={self.exact!r})"


class PathIn:
    """Matches the leaves at the given paths.

    Args:
        *paths: Whole paths, as tuples of keys.

    Example:
        >>> nnx.filterlib.PathIn(("linear", "bias"))(("linear", "bias"), None)
        True
    """

    def __init__(self, *paths: Path):
        self.paths = dict.fromkeys(paths)  # a set that keeps its order, for the repr

    def __call__(self, path: Path, x: typing.Any) -> bool:
        """Whether the path is one of the given ones."""
        return path in self.paths

    def __repr__(self) -> str:
        return f"PathIn({','.join(map(repr, self.paths))})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PathIn) and self.paths.keys() == other.paths.keys()

    def __hash__(self) -> int:
        return hash((PathIn, frozenset(self.paths)))


@dataclasses.dataclass(frozen=True, repr=False)
class OfType:
    """Matches leaves that are instances of a class.

    Args:
        type: A class, or a tuple of classes.

    Example:
        >>> nnx.OfType(nnx.Variable)((), nnx.Param(jnp.ones(2)))
        True
    """

    type: type | tuple[type, ...]

    def __call__(self, path: Path, x: typing.Any) -> bool:
        """Whether the leaf is an instance of the class."""
        return isinstance(x, self.type)

    def __repr__(self) -> str:
        return f"OfType({self.type!r})"


class _Combination:
    """A predicate made of others; equal to one of the same kind with equal members."""

    def __init__(self, *filters: Filter):
        self.predicates = tuple(map(to_predicate, filters))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.predicates))})"

    def __eq__(self, other: typing.Any) -> bool:
        return type(self) is type(other) and self.predicates == other.predicates

    def __hash__(self) -> int:
        return hash((type(self), self.predicates))


class Any(_Combination):
    """Matches if at least one of its filters matches; without filters, never.

    Args:
        *filters: The filters, tried in order until one matches.

    Raises:
        TypeError: If one of them is not a filter.

    Example:
        >>> nnx.Any(nnx.Param, nnx.BatchStat)((), nnx.BatchStat(0))
        True
    """

    def __call__(self, path: Path, x: typing.Any) -> bool:
        """Whether one of the filters matches."""
        return any(predicate(path, x) for predicate in self.predicates)


class All(_Combination):
    """Matches if each of its filters matches; without filters, always.

    Args:
        *filters: The filters, tried in order until one does not match.

    Raises:
        TypeError: If one of them is not a filter.

    Example:
        >>> nnx.All(nnx.Param, nnx.PathContains("bias"))(("bias",), nnx.Param(0))
        True
    """

    def __call__(self, path: Path, x: typing.Any) -> bool:
        """Whether all of the filters match."""
        return all(predicate(path, x) for predicate in self.predicates)


class Not(_Combination):
    """Matches if its filter does not match.

    Args:
        collection_filter: The filter to negate.

    Raises:
        TypeError: If ``collection_filter`` is not a filter.

    Example:
        >>> nnx.Not(nnx.Param)((), nnx.BatchStat(0))
        True
    """

    def __init__(self, collection_filter: Filter, /):
        super().__init__(collection_filter)

    @property
    def predicate(self) -> Predicate:
        """Negated predicate."""
        return self.predicates[0]

    def __call__(self, path: Path, x: typing.Any) -> bool:
        """Whether the filter does not match."""
        return not self.predicate(path, x)


@dataclasses.dataclass(frozen=True)
class Everything:
    """Matches every leaf.

    Example:
        >>> nnx.Everything()(("any", "path"), None)
        True
    """

    def __call__(self, path: Path, x: typing.Any) -> bool:
        """Always True."""
        return True


@dataclasses.dataclass(frozen=True)
class Nothing:
    """Matches no leaf.

    Example:
        >>> nnx.Nothing()(("any", "path"), None)
        False
    """

    def __call__(self, path: Path, x: typing.Any) -> bool:
        """Always False."""
        return False
