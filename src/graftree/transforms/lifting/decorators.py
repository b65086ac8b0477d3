"""Common parts of transforms as decorators: forms of use, and chosen arguments.

Signatures and bound methods stay as they are. Arguments are chosen by position or by
name: the static and the donated ones.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

import jax

from graftree import errors
from graftree.core.graph.graphdefs import Static
from graftree.core.modules.modules import Module
from graftree.core.objects import attributes, callables, methods, pytrees, running
from graftree.core.pickling import Rebuilt
from graftree.transforms.lifting.debug_info import name_of

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
Options = ParamSpec("Options")

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "<required>"})()


class Method(Generic[P, R]):
    """Base of transformed functions that a class may hold as its methods."""

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> typing.Self: ...
    @overload
    def __get__(
        self: Method[Concatenate[Any, Q], R], instance: Any, owner: type | None = None
    ) -> Callable[Q, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        function: Any = self
        return self if instance is None else functools.partial(function, instance)

    def seen(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Calls it in view of the observers, as a method of an object."""
        return methods.TrackedMethod(self, name_of(self))(*args, **kwargs)

    def is_unseen(self, args: tuple[Any, ...]) -> bool:
        """Whether observers don't know yet that it runs, as a method of an object."""
        stack, name = running.stack, name_of(self)
        if not (stack.observers and args and methods.is_public(name)):
            return False
        obj, above = args[0], stack.top
        return (
            isinstance(obj, attributes.DataObject)
            and inspect.getattr_static(type(obj), name, None) is self
            and not (above and above.module is obj and above.method == name)
        )


class Transform(Protocol[Options]):
    """Type of a transform that keeps the type of its function.

    It takes the function first, or is a decorator without it.
    """

    @overload
    def __call__(
        self, f: Callable[P, R], /, *args: Options.args, **options: Options.kwargs
    ) -> Callable[P, R]: ...
    @overload
    def __call__(
        self, *args: Options.args, **options: Options.kwargs
    ) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def keeps_type(
    transform: Callable[Concatenate[Any, Options], Any],
) -> Transform[Options]:
    """Declares a transform to be a `Transform`, with the options that it has."""
    return typing.cast("Transform[Options]", transform)


def decorate(
    f: Any, transform: str, make: Callable[[Any], Any], takes_methods: bool = False
) -> Any:
    """Applies a transform that is used with parentheses or without."""
    if f is MISSING:
        return functools.partial(
            decorate, transform=transform, make=make, takes_methods=takes_methods
        )
    if not takes_methods:
        check_not_bound(f, transform)
    result = make(f)
    if callables.holds_objects(f):
        callables.remember(result, make, f)
    return result


def split_bound(f: Any) -> tuple[Any, Module | None, bool]:
    """Takes a method that is bound to a Module apart, also within partials.

    Args:
        f: A callable.

    Returns:
        The function without its instance, in the same partials; the instance; ``True``.
        For other callables ``(f, None, False)``.

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> function, instance, is_bound = (
        ...     nnx.transforms.transforms._resolve_bound_callable(model.__call__)
        ... )
        >>> function is nnx.Linear.__call__, instance is model, is_bound
        (True, True, True)
    """
    if isinstance(f, functools.partial):
        function, instance, is_bound = split_bound(f.func)
        bound = functools.partial(function, *f.args, **f.keywords) if is_bound else f
        return bound, instance, is_bound
    if inspect.ismethod(f) and isinstance(f.__self__, Module):
        return f.__func__, f.__self__, True
    return f, None, False


def check_not_bound(function: Any, transform: str) -> None:
    """Refuses methods that are bound to a Module."""
    unbound, instance, is_bound = split_bound(function)
    if is_bound:
        while isinstance(unbound, functools.partial):
            unbound = unbound.func
        method = f"{type(instance).__name__}.{unbound.__name__}"
        options = _OPTIONS.get(transform, "")
        comma = ", " if options else ""
        call = f"nnx.{transform}({method}{comma}{options})(instance, ...)"
        call = _CALLS.get(transform, call).format(method=method)
        decorator = f"@nnx.{transform}" + f"({options})" * bool(options)
        raise ValueError(
            f"nnx.{transform} does not support bound methods, got {method} of an "
            "instance.\n"
            f"Pass the instance as the first argument: {call},\n"
            f"or decorate the method with {decorator}. To keep the positions of the "
            "other arguments,\n"
            f"write functools.partial({method}, instance) instead of the method."
            + "\nThe instance is argument 0, for derivatives by its weights."
            * ("argnums" in options)
        )


# How a function is transformed whose first argument is the instance.
_OPTIONS = {
    "vmap": "in_axes=(None, 0)",
    "pmap": "in_axes=(None, 0)",
    "scan": "in_axes=(None, nnx.Carry, 0)",
    "shard_map": "in_specs=(PartitionSpec(), ...)",
    "grad": "argnums=1",
    "value_and_grad": "argnums=1",
}
_CALLS = {
    "vjp": "nnx.vjp({method}, instance, ...)",
    "jvp": "nnx.jvp({method}, (instance, ...), tangents)",
    "eval_shape": "nnx.eval_shape({method}, instance, ...)",
    "jit_partial": "nnx.jit_partial({method}, instance)",
}


def to_positions(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    count: int = 0,
) -> tuple[Any, ...]:
    """Turns keyword arguments into positional ones, defaults included.

    Args:
        function: Its signature has the positions.
        args: The positional arguments.
        kwargs: The keyword arguments.
        count: How many a prefix is for; defaults fill up to that without keywords, too.

    Returns:
        All arguments by position; ``args`` if there is nothing to add.

    Raises:
        TypeError: If a keyword argument has no position.
    """
    if not kwargs and len(args) >= count:
        return args
    if isinstance(function, functools.partial):
        if kwargs:
            raise _unresolvable(function, kwargs)
        return args
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    if bound.kwargs.keys() & kwargs.keys():
        raise _unresolvable(function, bound.kwargs)
    return bound.args


def _unresolvable(function: Any, kwargs: Mapping[str, Any]) -> TypeError:
    return TypeError(
        f"The keyword arguments could not be resolved to positions: {sorted(kwargs)} "
        f"of {name_of(function)}. Pass them by position."
    )


def wraps(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """``functools.wraps``; only public attributes if it is transformed already."""

    def decorate(wrapper: Any) -> Any:
        functools.update_wrapper(wrapper, function, updated=())
        is_ours = isinstance(function, Rebuilt)
        if is_ours or inspect.isfunction(function):
            for name, value in vars(function).items():
                is_inner = is_ours and name.startswith("_")
                if not is_inner and name not in vars(wrapper):
                    setattr(wrapper, name, value)
        return wrapper

    return decorate


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
        """Counts the positions from the start."""
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
                f"{name_of(function)} has {role}_argnums={numbers}, but "
                f"only accepts {count} positional arguments: an index is out of range."
            )
    unknown = set(names).difference(p.name for p in parameters)
    if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
        raise ValueError(
            f"{name_of(function)} has invalid argnames {sorted(unknown)} in "
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


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    is_single = isinstance(value, str) or hasattr(value, "__index__")
    members = (value,) if is_single else tuple(value)
    # Positions may be integers of NumPy.
    return tuple([int(x) if hasattr(x, "__index__") else x for x in members])


def take(
    chosen: Chosen, args: tuple[Any, ...], kwargs: dict[str, Any], transform: str
) -> tuple[tuple[Any, ...], dict[str, Any], Statics]:
    """Takes the chosen arguments out of a call, as static ones."""
    numbers = chosen.positions(len(args))
    statics: list[tuple[int | str, Any]] = [(i, args[i]) for i in sorted(numbers)]
    statics += [(name, kwargs[name]) for name in chosen.argnames if name in kwargs]
    for position, value in statics:
        _check_static(position, value, transform)
    rest = tuple(x for i, x in enumerate(args) if i not in numbers)
    named = {k: v for k, v in kwargs.items() if k not in chosen.argnames}
    return rest, named, tuple([(key, Static(value)) for key, value in statics])


def _check_static(position: int | str, value: Any, transform: str) -> None:
    if type(value) in attributes.ATOMS:
        return
    argument = f"argument {position!r}: {type(value).__name__}"
    data = _data_in(value)
    if data is not None:
        contained = "" if data is value else f", which contains {type(data).__name__}"
        raise errors.StaticArgumentError(
            errors.message(
                f"Data can't be static in nnx.{transform}: the compiled function would "
                "keep using the values of its first call.",
                where=argument + contained,
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
                where=argument,
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
        has_hash = type(value).__hash__ not in (None, object.__hash__)
        is_constant = isinstance(value, pytrees.Pytree) and has_hash
        return next(iter(jax.tree.leaves(value)), None) if is_constant else value
    else:
        return next(iter(attributes.has_data(value)), None)
    return next((x for x in map(_data_in, pending) if x is not None), None)


def put(
    args: Sequence[Any], kwargs: Mapping[str, Any], statics: Statics
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Puts the static arguments of a call back in their positions."""
    positional, named = list(args), dict(kwargs)
    for position, static in statics:
        if isinstance(position, int):
            positional.insert(position, static.value)
        else:
            named[position] = static.value
    return tuple(positional), named
