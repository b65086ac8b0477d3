"""Arguments chosen by position or name: the static and the donated ones."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

Statics = tuple[tuple[int | str, Any], ...]


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
        """The positions, counted from the start.

        Args:
            count: How many positional arguments there are. One that has a default, or
                is given by name, is not among them.

        Raises:
            ValueError: If one is out of range.
        """
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
    argnums: int | Sequence[int] | None,
    argnames: str | Sequence[str] | None = None,
) -> Chosen:
    """Arguments by position and name; those not given are found by the signature.

    Raises:
        ValueError: If a position is out of range.
    """
    numbers, names = _as_tuple(argnums), _as_tuple(argnames)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):
        return Chosen(numbers, names)
    positional = [
        p.name
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    count = len(positional)
    if not any(p.kind == p.VAR_POSITIONAL for p in parameters):
        for number in numbers:
            if not -count <= number < count:
                name = getattr(function, "__name__", repr(function))
                raise ValueError(
                    f"The argument index {number} is out of range: {name} takes "
                    f"{count} positional arguments."
                )
    if names and not numbers:
        numbers = tuple(i for i, name in enumerate(positional) if name in names)
    elif numbers and not names:
        names = tuple(positional[i] for i in numbers if -count <= i < count)
    return Chosen(numbers, names)


def _as_tuple(given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, (int, str)) else tuple(given)


def take(
    chosen: Chosen, args: tuple[Any, ...], kwargs: dict[str, Any], transform: str
) -> tuple[tuple[Any, ...], dict[str, Any], Statics]:
    """Takes the chosen arguments out of a call, as static ones.

    Args:
        chosen: Which.
        args: The positional arguments.
        kwargs: The keyword arguments.
        transform: The public name to give in error messages.

    Returns:
        The others, and the static ones as pairs of a position or name and a value.

    Raises:
        ValueError: If one is not hashable.
    """
    if not chosen:
        return args, kwargs, ()
    numbers = chosen.positions(len(args))
    statics: list[tuple[int | str, Any]] = [(i, args[i]) for i in sorted(numbers)]
    statics += [(name, kwargs[name]) for name in chosen.argnames if name in kwargs]
    for where, value in statics:
        try:
            hash(value)
        except TypeError as error:
            raise ValueError(
                f"Non-hashable static arguments are not supported in nnx.{transform}: "
                f"argument {where!r} is of type {type(value).__name__}."
            ) from error
    rest = tuple(x for i, x in enumerate(args) if i not in numbers)
    named = {k: v for k, v in kwargs.items() if k not in chosen.argnames}
    return rest, named, tuple(statics)


def put(tree: Any, statics: Statics) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, with the static ones back in their places.

    Args:
        tree: ``(args, kwargs)`` without them.
        statics: From `take`.
    """
    if not statics:
        return tree
    args, kwargs = list(tree[0]), dict(tree[1])
    for where, value in statics:
        if isinstance(where, int):
            args.insert(where, value)
        else:
            kwargs[where] = value
    return tuple(args), kwargs
