"""``grad`` and ``value_and_grad``: gradients of functions over objects.

The leaves are parted into those that are differentiated and the rest. `cotangents`
gives gradients their form.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, TypedDict, TypeVar, Unpack, overload

import jax

from graftree import _jax, config
from graftree.config import Propagation
from graftree.core.graph import flattening
from graftree.core.objects.pytrees import Pytree
from graftree.core.pickling import Rebuilt
from graftree.core.variables.kinds import Param
from graftree.transforms.crossing import debug_info, decorators, guards, prefixes
from graftree.transforms.crossing.decorators import MISSING
from graftree.transforms.crossing.inside import Inside
from graftree.transforms.crossing.outside import Call
from graftree.transforms.crossing.packing import Values
from graftree.transforms.crossing.plans import RepeatedCalls
from graftree.transforms.crossing.prefixes import DiffState
from graftree.transforms.crossing.rows import Row
from graftree.transforms.derivatives import cotangents
from graftree.transforms.derivatives.cotangents import Argnums

P = ParamSpec("P")
R = TypeVar("R")
X = TypeVar("X")


class Options(TypedDict, total=False):
    """The keyword arguments of `grad` and `value_and_grad`, less ``has_aux``."""

    argnums: int | DiffState | Sequence[int | DiffState]
    holomorphic: bool
    allow_int: bool
    reduce_axes: Sequence[Any]
    graph: bool | None
    graph_updates: bool | None


@overload
def grad(
    f: Callable[P, tuple[Any, X]],
    *,
    has_aux: Literal[True],
    **options: Unpack[Options],
) -> Callable[P, tuple[Any, X]]: ...
@overload
def grad(
    f: Callable[P, Any], *, has_aux: bool = False, **options: Unpack[Options]
) -> Callable[P, Any]: ...
@overload
def grad(
    *, has_aux: Literal[True], **options: Unpack[Options]
) -> Callable[[Callable[P, tuple[Any, X]]], Callable[P, tuple[Any, X]]]: ...
@overload
def grad(
    *, has_aux: bool = False, **options: Unpack[Options]
) -> Callable[[Callable[P, Any]], Callable[P, Any]]: ...
def grad(
    f: Any = MISSING,
    *,
    argnums: int | DiffState | Sequence[int | DiffState] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: Sequence[Any] = (),
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """A function that gives the gradient of ``f``; see `value_and_grad`.

    Args:
        f: See `value_and_grad`; so are the other arguments.
        argnums: Which arguments to differentiate, and what of them.
        has_aux: Whether ``f`` returns a pair.
        holomorphic: As in ``jax.grad``.
        allow_int: As in ``jax.grad``.
        reduce_axes: Not supported any more; leave it empty.
        graph: The mode; ``None`` takes the default.
        graph_updates: Whether structural changes reach the caller's objects.

    Returns:
        A function that returns the gradients, or with ``has_aux`` a pair of them and
        the second output of ``f``.

    Raises:
        NotImplementedError: If ``reduce_axes`` is given.
        ValueError: See `value_and_grad`.

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> grads = nnx.grad(lambda m, x: jnp.mean(m(x) ** 2))(model, jnp.ones((1, 2)))
        >>> jax.tree.map(jnp.shape, grads)
        State({
          'bias': Param(
            value=(3,)
          ),
          'kernel': Param(
            value=(2, 3)
          )
        })
    """
    cotangents.refuse_axes(reduce_axes)
    mode = config.propagation(graph, graph_updates)
    options = {"holomorphic": holomorphic, "allow_int": allow_int}
    return _decorator(f, "grad", mode, argnums, has_aux, False, options)


@overload
def value_and_grad(
    f: Callable[P, R], *, has_aux: bool = False, **options: Unpack[Options]
) -> Callable[P, tuple[R, Any]]: ...
@overload
def value_and_grad(
    *, has_aux: bool = False, **options: Unpack[Options]
) -> Callable[[Callable[P, R]], Callable[P, tuple[R, Any]]]: ...
def value_and_grad(
    f: Any = MISSING,
    *,
    argnums: int | DiffState | Sequence[int | DiffState] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: Sequence[Any] = (),
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """A function that gives the value and the gradient of ``f``.

    Args:
        f: A function that returns a real scalar, or with ``has_aux`` a pair of it and
            anything else. Its arguments may contain objects.
        argnums: Which positional arguments to differentiate, and what of them: an
            integer, a `DiffState`, or a sequence of these. With graph updates, an
            integer means the `Param` Variables of objects.
        has_aux: Whether ``f`` returns a pair.
        holomorphic: As in ``jax.grad``.
        allow_int: As in ``jax.grad``.
        reduce_axes: Not supported any more; leave it empty.
        graph: Whether shared references are kept (graph mode) or refused (tree mode);
            ``None`` takes the default.
        graph_updates: Whether structural changes reach the caller's objects. Then the
            gradient of an object is a State; else all its leaves are differentiated,
            and the gradient is an object of the same type.

    Returns:
        A function with the arguments of ``f`` that returns ``(value, gradients)``, or
        a decorator if ``f`` is not given. What ``f`` writes to Variables is kept.

    Raises:
        NotImplementedError: If ``reduce_axes`` is given.
        ValueError: If ``f`` is a method bound to a Module, an argument is repeated in
            ``argnums``, or a `DiffState` is used without graph updates.

    Example:
        >>> model = nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))
        >>> loss = lambda model, x: jnp.sum(3 * model(x))
        >>> value, grads = nnx.value_and_grad(loss)(model, jnp.ones((1, 1)))
        >>> grads["kernel"][...]
        Array([[3.]], dtype=float32)
    """
    cotangents.refuse_axes(reduce_axes)
    mode = config.propagation(graph, graph_updates)
    options = {"holomorphic": holomorphic, "allow_int": allow_int}
    return _decorator(f, "value_and_grad", mode, argnums, has_aux, True, options)


def _decorator(
    f: Any,
    name: str,
    mode: Propagation,
    argnums: Any,
    has_aux: bool,
    has_value: bool,
    options: Any,
) -> Any:
    is_single = _is_single(argnums)
    chosen = _chosen(argnums, is_single, name, mode)

    def make(function: Callable[..., Any]) -> Callable[..., Any]:
        repeated = _Repeated(function, chosen)

        def differentiate(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            args, kwargs = _by_position(function, chosen, args, kwargs)
            count = len(args)
            inner = _interior_of_gradient(function, chosen.row(count), has_aux)
            gradient = jax.value_and_grad(inner, argnums=1, has_aux=True, **options)
            value: Any = None
            found: Any = None

            def transformed(*groups: Values) -> Any:
                nonlocal value, found
                _refuse_refs(name, groups)
                (value, result), found = gradient(*groups)
                return result

            _, aux = repeated.of(count).run(transformed, args, kwargs)
            positions, leaves = chosen.positions(count), found.by_position()
            grads: Any = cotangents.arguments(found.signature, leaves, mode, positions)
            grads = grads[0] if is_single else grads
            if has_value:
                return ((value, aux) if has_aux else value), grads
            return (grads, aux) if has_aux else grads

        @decorators.wraps(function)
        def differentiated(*args: Any, **kwargs: Any) -> Any:
            with _jax.hidden_frames:
                return differentiate(args, kwargs)

        return differentiated

    return decorators.decorate(f, name, make)


def crossing(
    name: str,
    f: Callable[..., Any],
    argnums: Any,
    has_aux: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Call, Callable[..., Any]]:
    """For a tool: a call, and what JAX differentiates for it.

    That is a function of its two groups, of which the second is differentiated. It
    returns the value, which may be any arrays, and what is of no concern.
    """
    chosen = _chosen_for(name, argnums)
    args, kwargs = _by_position(f, chosen, args, kwargs)
    row = chosen.row(len(args))
    call = Call(f, row, args, kwargs)
    _refuse_refs(name, call.groups)
    return call, _interior_of_gradient(f, row, has_aux)


def positions(name: str, argnums: Any, count: int) -> tuple[int, ...]:
    """For a tool: the positions, among so many arguments, of what is differentiated.

    Raises:
        TypeError: As `value_and_grad` at a call; likewise the rest.
        ValueError: If an argument is repeated, or there is none.
    """
    return _chosen_for(name, argnums).positions(count)


class _Repeated(Rebuilt):
    """The calls of one function, by the number of their arguments."""

    def __init__(self, f: Callable[..., Any], chosen: Argnums) -> None:
        self.of = functools.cache(lambda count: RepeatedCalls(f, chosen.row(count)))


def _by_position(
    f: Callable[..., Any],
    chosen: Argnums,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, with graph updates by position."""
    if not chosen.mode.structure:
        return args, kwargs
    least = max(chosen.numbers) + 1
    return decorators.to_positions(f, args, kwargs, least), {}


def _refuse_refs(name: str, groups: Sequence[Values]) -> None:
    # The group of False comes first, then that of True.
    guards.refuse(groups[1:], name, guards.NO_GRADIENT)


def _chosen_for(name: str, argnums: Any) -> Argnums:
    """What a tool differentiates, in the mode that is the default."""
    is_single = _is_single(argnums)
    return _chosen(argnums, is_single, name, config.propagation(None, None))


def _is_single(argnums: Any) -> bool:
    return isinstance(argnums, DiffState) or hasattr(argnums, "__index__")


def _chosen(argnums: Any, is_single: bool, name: str, mode: Propagation) -> Argnums:
    if isinstance(argnums, Pytree):
        # Before it is taken for a sequence; it is not a prefix in any mode.
        raise prefixes.node_error(argnums, "argnums", name)
    given = (argnums,) if is_single else tuple(argnums)
    if not given:
        raise ValueError(f"argnums of nnx.{name} is empty.")
    named = DiffState(0, Param) if mode.structure else True
    return Argnums(given, "argnums", name, mode, named=named, others=False)


def _interior_of_gradient(
    f: Callable[..., Any], row: Row, has_aux: bool
) -> Callable[..., Any]:
    def traced(*groups: Values) -> Any:
        inside = Inside(row, groups)
        out = inside.run(f)
        value, aux = cotangents.pair(out) if has_aux else (out, None)
        return flattening.raw_of(value), inside.leave((None, aux))

    return debug_info.named_after(f, traced)
