"""``jit``: compiled functions over objects.

The arguments are packed into groups of leaves, one per distinct pair of sharding and
donation; ``jax.jit`` compiles the function of these groups. The skeleton is static data
of the groups, so it is part of JAX's own cache key.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, overload

import jax

from graftree.transforms import arguments, decorators, lifting, packing, propagation
from graftree.transforms.arguments import Chosen
from graftree.transforms.decorators import MISSING
from graftree.transforms.lifting import Call, Row
from graftree.transforms.packing import Skeleton
from graftree.transforms.prefixes import Assignment
from graftree.transforms.propagation import Propagation

P = ParamSpec("P")
R = TypeVar("R")


class JitWrapped(Generic[P, R]):
    """A function compiled by `jit`; call it like the function.

    Attributes:
        fun: The function that was given.
    """

    def __init__(self, fun: Callable[P, R], row: Row, options: Any) -> None:
        decorators.wraps(fun)(self)
        self.fun = fun
        self._row = row
        self._jitted = jax.jit(lifting.interior(fun, row), **options)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        call = Call(self.fun, self._row, args, kwargs)
        return call.commit(self._jitted(*call.groups))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)


@overload
def jit(
    fun: Callable[P, R],
    *,
    in_shardings: Any = ...,
    out_shardings: Any = ...,
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
    in_shardings: Any = ...,
    out_shardings: Any = ...,
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
    in_shardings: Any = None,
    out_shardings: Any = None,
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
        in_shardings: The sharding of each positional argument that is not static: a
            pytree prefix of shardings, ``None`` for "as it comes"; for an object it may
            be a `StateSharding`. With graph updates all Variables take theirs on, also
            those that don't change.
        out_shardings: The sharding of the output.
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
        statics = arguments.choose(function, static_argnums, static_argnames)
        donated = arguments.choose(function, donate_argnums, donate_argnames)
        roles = _Roles(_prefix("in_shardings", in_shardings, mode), statics, donated)
        outputs = _prefix("out_shardings", out_shardings, mode)
        reshards = mode.structure and in_shardings is not None
        row = Row(
            "jit",
            mode,
            roles,
            outputs,
            statics=statics,
            keeps_keywords=True,
            # A donated buffer is gone after the call, so its Variable needs a new one.
            returns_unchanged=lambda role: role.is_donated or reshards,
        )
        return JitWrapped(function, row, options | roles.options(outputs))

    return decorate if fun is MISSING else decorate(fun)


def _prefix(argument: str, shardings: Any, mode: Propagation) -> Assignment:
    if isinstance(shardings, list):
        shardings = tuple(shardings)
    if argument == "in_shardings":
        shardings = (shardings, None)  # keyword arguments have none
    return Assignment(shardings, argument, "jit", mode)


class _Role(NamedTuple):
    """What is said of a group of leaves."""

    sharding: Any
    is_donated: bool


class _Roles:
    """The prefix of the arguments of `jit`: shardings by pytree, donation by position.

    Attributes:
        values: The distinct roles, one per group; see `Assignment`.
        prefixes: The distinct shardings.
    """

    def __init__(self, shardings: Assignment, statics: Chosen, donated: Chosen) -> None:
        self.prefixes = shardings.values
        flags = (False, True) if donated else (False,)
        self.values = tuple(
            _Role(sharding, flag) for sharding in shardings.values for flag in flags
        )
        self._shardings = shardings
        self._statics = statics
        self._donated = donated

    def assign(self, skeleton: Skeleton, objects: Sequence[Any]) -> list[int]:
        """The group of each leaf; see `Assignment.assign`."""
        numbers = self._shardings.assign(skeleton, objects)
        if not self._donated:
            return numbers
        flags = packing.spread(self._donated_arguments(skeleton), skeleton)
        return [2 * number + flag for number, flag in zip(numbers, flags, strict=True)]

    def occurrences(self, tree: Any, sharing: bool) -> Iterator[tuple[Any, Any, Any]]:
        """The sharding of each Variable; see `Assignment.occurrences`."""
        return self._shardings.occurrences(tree, sharing)

    def options(self, outputs: Assignment) -> dict[str, Any]:
        """What ``jax.jit`` is told of the groups and of the result."""
        numbers = [i for i, role in enumerate(self.values) if role.is_donated]
        ins = tuple(role.sharding for role in self.values)
        if not any(s is not None for s in (*ins, *outputs.values)):
            return {"donate_argnums": numbers}
        return {
            "donate_argnums": numbers,
            "in_shardings": ins,
            "out_shardings": (None, ins, ins, outputs.values),
        }

    def _donated_arguments(self, skeleton: Skeleton) -> Any:
        """A prefix of ``(args, kwargs)``: is it donated?"""
        args, kwargs = skeleton.treedef.children()
        by_position = [i for i, _ in skeleton.statics if isinstance(i, int)]
        total = len(args.children()) + len(by_position)
        taken = self._statics.positions(total)
        donated = self._donated.positions(total)
        flags = [i in donated for i in range(total) if i not in taken]
        names = kwargs.node_data()[1]
        return tuple(flags), {name: name in self._donated.argnames for name in names}
