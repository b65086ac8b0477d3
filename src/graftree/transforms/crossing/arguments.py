"""Arguments chosen by position or name: the static and the donated ones."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from graftree import errors
from graftree.core.graph.graphdefs import Static
from graftree.core.objects import attributes
from graftree.core.objects.pytrees import Pytree
from graftree.transforms.crossing import decorators

Statics = tuple[tuple[int | str, Static], ...]


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Some of the arguments of a function.

    Attributes:
        argnums: Their positions; negative ones count from the end.
        argnames: The names of keyword arguments.
    """

    argnums: tuple[int, ...] = ()
    argnames: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.argnums or self.argnames)

    def positions(self, count: int) -> set[int]:
        """The positions, counted from the start."""
        for number in self.argnums:
            if number < -count:
                raise ValueError(
                    f"The argument index {number} is out of range: there are {count} "
                    "positional arguments."
                )
        numbers = {n + count if n < 0 else n for n in self.argnums}
        return {n for n in numbers if n < count}


def choose(
    function: Callable[..., Any],
    role: str,
    argnums: int | Sequence[int] | None,
    argnames: str | Sequence[str] | None = None,
) -> Chosen:
    """Arguments by position and name; those not given are found by the signature."""
    numbers, names = _as_tuple(argnums), _as_tuple(argnames)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):
        return Chosen(numbers, names)
    kinds = {p.kind for p in parameters}
    positional = [p.name for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD]
    count = len(positional)
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        if any(not -count <= number < count for number in numbers):
            raise ValueError(
                f"{decorators.name_of(function)} has {role}_argnums={numbers}, but "
                f"only accepts {count} positional arguments: an index is out of range."
            )
    unknown = set(names).difference(p.name for p in parameters)
    if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
        raise ValueError(
            f"{decorators.name_of(function)} has invalid argnames {sorted(unknown)} in "
            f"{role}_argnames: it has no such arguments."
        )
    if names and not numbers:
        numbers = tuple(i for i, name in enumerate(positional) if name in names)
    elif numbers and not names:
        names = tuple(positional[i] for i in numbers if -count <= i < count)
    return Chosen(numbers, names)


def check_disjoint(static: Chosen, donated: Chosen) -> None:
    """Refuses to donate static arguments."""
    for kind in ("argnums", "argnames"):
        both = set(getattr(static, kind)) & set(getattr(donated, kind))
        if both:
            raise ValueError(
                f"static_{kind} and donate_{kind} cannot intersect: {sorted(both)} in "
                "both. Static arguments have no buffers to donate."
            )


def _as_tuple(given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, (int, str)) else tuple(given)


def take(
    chosen: Chosen, args: tuple[Any, ...], kwargs: dict[str, Any], transform: str
) -> tuple[tuple[Any, ...], dict[str, Any], Statics]:
    """Takes the chosen arguments out of a call, as static ones."""
    if not chosen:
        return args, kwargs, ()
    numbers = chosen.positions(len(args))
    given: list[tuple[int | str, Any]] = [(i, args[i]) for i in sorted(numbers)]
    given += [(name, kwargs[name]) for name in chosen.argnames if name in kwargs]
    for where, value in given:
        _check_static(where, value, transform)
    rest = tuple(x for i, x in enumerate(args) if i not in numbers)
    named = {k: v for k, v in kwargs.items() if k not in chosen.argnames}
    return rest, named, tuple([(where, Static(value)) for where, value in given])


def _check_static(where: int | str, value: Any, transform: str) -> None:
    if type(value) in attributes.ATOMS:
        return
    place = f"argument {where!r}: {type(value).__name__}"
    held = _data_in(value)
    if held is not None:
        inside = "" if held is value else f", which contains {type(held).__name__}"
        raise errors.StaticArgumentError(
            errors.message(
                f"Data can't be static in nnx.{transform}: the compiled function would "
                "go on with the values of its first call.",
                where=place + inside,
                way_out="Pass it as an ordinary argument: leave it out of "
                "static_argnums and static_argnames.",
            )
        )
    try:
        hash(value)
    except TypeError as error:
        raise errors.StaticArgumentError(
            errors.message(
                f"Non-hashable static arguments are not supported in nnx.{transform}.",
                where=place,
                way_out="Pass a hashable value, such as a tuple instead of a "
                "list, or pass it as an ordinary argument.",
            )
        ) from error


def _data_in(value: Any) -> Any:
    """An array, Variable or mutable object that a static argument leads to."""
    if isinstance(value, functools.partial):
        pending = [value.func, *value.args, *value.keywords.values()]
    elif inspect.ismethod(value):
        pending = [value.__self__]
    elif attributes.is_data(value):
        # A Pytree without data in it, and with a hash of its content, is a constant.
        is_constant = isinstance(value, Pytree) and _has_own_hash(type(value))
        return next(iter(jax.tree.leaves(value)), None) if is_constant else value
    else:
        return next(iter(attributes.has_data(value)), None)
    return next((x for x in map(_data_in, pending) if x is not None), None)


def _has_own_hash(kind: type) -> bool:
    return kind.__hash__ not in (None, object.__hash__)


def put(tree: Any, statics: Statics) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, with the static ones back in their places."""
    if not statics:
        return tree
    args, kwargs = list(tree[0]), dict(tree[1])
    for where, static in statics:
        if isinstance(where, int):
            args.insert(where, static.value)
        else:
            kwargs[where] = static.value
    return tuple(args), kwargs
