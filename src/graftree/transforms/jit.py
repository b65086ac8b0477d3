"""``jit``: compiled functions over objects.

The arguments are packed into groups of leaves, one per distinct pair of sharding and
donation; ``jax.jit`` compiles the function of these groups. The skeleton is static data
of the groups, so it is part of JAX's own cache key.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, overload

import jax

from graftree.transforms import boundary, decorators, packing, propagation
from graftree.transforms.boundary import Crossing
from graftree.transforms.decorators import MISSING
from graftree.transforms.packing import Values
from graftree.transforms.propagation import Propagation

P = ParamSpec("P")
R = TypeVar("R")


class Roles(NamedTuple):
    """Which arguments are static and which are donated.

    Attributes:
        static_argnums: Positions of static arguments.
        static_argnames: Names of static keyword arguments.
        donate_argnums: Positions of donated arguments.
        donate_argnames: Names of donated keyword arguments.
    """

    static_argnums: tuple[int, ...]
    static_argnames: tuple[str, ...]
    donate_argnums: tuple[int, ...]
    donate_argnames: tuple[str, ...]


class JitWrapped(Generic[P, R]):
    """A function compiled by `jit`; call it like the function.

    Attributes:
        fun: The function that was given.
    """

    def __init__(
        self, fun: Callable[P, R], roles: Roles, mode: Propagation, options: Any
    ) -> None:
        decorators.wraps(fun)(self)
        self.fun = fun
        self._roles = roles
        self._mode = mode
        self._jitted = jax.jit(_interior(fun, mode), donate_argnums=(1,), **options)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        packed, groups = self._pack(args, kwargs)
        returned, changed, structure, out = self._jitted(*groups)
        return boundary.commit(packed, returned, changed, structure, out)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def _pack(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[packing.Packed, list[Values]]:
        roles = self._roles
        args, kwargs, statics = _take_static(args, kwargs, roles)
        packed = packing.pack((args, kwargs), self._mode, "jit", statics)
        donated = _donated_leaves(packed, args, kwargs, roles, len(statics))
        return packed, packing.part(packed, donated, 2)


@overload
def jit(
    fun: Callable[P, R],
    *,
    static_argnums: int | Sequence[int] | None = ...,
    static_argnames: str | Sequence[str] | None = ...,
    donate_argnums: int | Sequence[int] | None = ...,
    donate_argnames: str | Sequence[str] | None = ...,
    keep_unused: bool = ...,
    device: Any = ...,
    backend: str | None = ...,
    inline: bool = ...,
    graph: bool | None = ...,
    graph_updates: bool | None = ...,
) -> JitWrapped[P, R]: ...
@overload
def jit(
    *,
    static_argnums: int | Sequence[int] | None = ...,
    static_argnames: str | Sequence[str] | None = ...,
    donate_argnums: int | Sequence[int] | None = ...,
    donate_argnames: str | Sequence[str] | None = ...,
    keep_unused: bool = ...,
    device: Any = ...,
    backend: str | None = ...,
    inline: bool = ...,
    graph: bool | None = ...,
    graph_updates: bool | None = ...,
) -> Callable[[Callable[P, R]], JitWrapped[P, R]]: ...
def jit(
    fun: Any = MISSING,
    *,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    keep_unused: bool = False,
    device: Any = None,
    backend: str | None = None,
    inline: bool = False,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Compiles a function over objects with ``jax.jit``.

    Changes that the function makes to its arguments reach the caller's objects after
    the call: the values of Variables always, attributes with ``graph_updates``. A
    function that raises changes nothing.

    Args:
        fun: The function. Its arguments and outputs may contain Modules, Variables,
            arrays and containers of them.
        static_argnums: Positions of arguments that are compile-time constants.
        static_argnames: Names of such arguments.
        donate_argnums: Positions of arguments whose buffers may be reused. Donated
            Variables stay readable; donated arrays don't.
        donate_argnames: Names of such arguments.
        keep_unused: As in ``jax.jit``, like the next three.
        device: See ``jax.jit``.
        backend: See ``jax.jit``.
        inline: See ``jax.jit``.
        graph: Whether shared references are kept (graph mode) or refused (tree mode);
            ``None`` takes the default.
        graph_updates: Whether structural changes reach the caller's objects.

    Returns:
        The compiled function, or a decorator if ``fun`` is not given.

    Raises:
        ValueError: If ``fun`` is a method bound to a Module; at a call, for aliases
            that the mode doesn't allow.
        TraceContextError: At a call, if another trace owns an object that changed.

    Example:
        >>> @nnx.jit
        ... def double(model):
        ...     model.kernel[...] *= 2
        >>> model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
        >>> before = model.kernel[...]
        >>> double(model)
        >>> bool((model.kernel[...] == 2 * before).all())
        True
    """
    mode = propagation.resolve(graph, graph_updates)
    options = {"keep_unused": keep_unused, "inline": inline}
    options |= {k: v for k, v in {"device": device, "backend": backend}.items() if v}

    def decorate(function: Callable[..., Any]) -> JitWrapped:
        decorators.check_not_bound(function, "jit")
        static = _complete(function, static_argnums, static_argnames)
        donate = _complete(function, donate_argnums, donate_argnames)
        return JitWrapped(function, Roles(*static, *donate), mode, options)

    return decorate if fun is MISSING else decorate(fun)


def _interior(fun: Callable[..., Any], mode: Propagation) -> Callable[..., Any]:
    @decorators.wraps(fun)
    def traced(kept: Values, donated: Values) -> Any:
        skeleton, values = packing.join([kept, donated])
        crossing = Crossing(skeleton, values, mode, "jit")
        args, kwargs = _put_static(crossing.tree, skeleton.statics)
        out = fun(*args, **kwargs)
        # A donated buffer is gone after the call, so its Variable needs a new one.
        found = crossing.collect(out, frozenset(donated.positions or ()))
        return (
            found.returned,
            found.changed,
            found.structure.values(),
            found.out.values(),
        )

    # `wraps` lets JAX see the signature of `fun`, which is not that of the groups.
    del traced.__wrapped__
    return traced


def _as_tuple(given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, (int, str)) else tuple(given)


def _complete(
    function: Callable[..., Any], argnums: Any, argnames: Any
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Positions and names; the ones not given are found by the signature."""
    numbers, names = _as_tuple(argnums), _as_tuple(argnames)
    if bool(numbers) == bool(names):
        return numbers, names
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):
        return numbers, names
    positional = [
        p.name
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if names:
        numbers = tuple(i for i, name in enumerate(positional) if name in names)
    else:
        inside = [i for i in numbers if -len(positional) <= i < len(positional)]
        names = tuple(positional[i] for i in inside)
    return numbers, names


def _take_static(
    args: tuple[Any, ...], kwargs: dict[str, Any], roles: Roles
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[tuple[Any, Any], ...]]:
    if not roles.static_argnums and not roles.static_argnames:
        return args, kwargs, ()
    numbers = sorted({_positive(i, len(args)) for i in roles.static_argnums})
    # A static argument with a default, or given by name, has no position.
    numbers = [i for i in numbers if i < len(args)]
    statics = [(i, args[i]) for i in numbers]
    statics += [
        (name, kwargs[name]) for name in roles.static_argnames if name in kwargs
    ]
    for where, value in statics:
        try:
            hash(value)
        except TypeError as error:
            raise ValueError(
                f"Non-hashable static arguments are not supported in nnx.jit: argument "
                f"{where!r} is of type {type(value).__name__}."
            ) from error
    rest = tuple(x for i, x in enumerate(args) if i not in numbers)
    named = {k: v for k, v in kwargs.items() if k not in roles.static_argnames}
    return rest, named, tuple(statics)


def _positive(number: int, count: int) -> int:
    if number < -count:
        raise ValueError(
            f"The argument index {number} is out of range: there are {count} "
            "positional arguments."
        )
    return number + count if number < 0 else number


def _put_static(
    tree: Any, statics: tuple[tuple[Any, Any], ...]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = list(tree[0]), dict(tree[1])
    for where, value in statics:
        if isinstance(where, int):
            args.insert(where, value)
        else:
            kwargs[where] = value
    return tuple(args), kwargs


def _donated_leaves(
    packed: packing.Packed,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    roles: Roles,
    static_count: int,
) -> list[int]:
    """1 for each leaf of a donated argument, 0 for the others."""
    if not roles.donate_argnums and not roles.donate_argnames:
        return [0] * len(packed.leaves)
    total = len(args) + static_count
    donated = {_positive(i, total) for i in roles.donate_argnums}
    static = {_positive(i, total) for i in roles.static_argnums}
    order = [i for i in range(total) if i not in static]
    flags = tuple(int(i in donated) for i in order[: len(args)])
    named = {name: int(name in roles.donate_argnames) for name in kwargs}
    return packing.spread((flags, named), packed.skeleton)
