"""``grad`` and ``value_and_grad``: gradients of functions over objects; ``remat``.

The leaves are split into those that are differentiated and the rest. `cotangents` gives
gradients their form. Values that a gradient needs from the forward pass are kept or,
with `remat`, computed again.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, Unpack, overload

import jax

from graftree import _jax, config
from graftree.core.graph import flattening, graphdefs
from graftree.core.variables import sharding
from graftree.core.variables.kinds import Param
from graftree.transforms.derivatives import cotangents
from graftree.transforms.derivatives.cotangents import Argnums, DerivativeOptions
from graftree.transforms.lifting import (
    debug_info,
    decorators,
    dispatch,
    programs,
    tracer_leaks,
)
from graftree.transforms.lifting.caller import Call, lift, returning_arrays
from graftree.transforms.lifting.decorators import P, R
from graftree.transforms.lifting.leaves import Leaves, join
from graftree.transforms.lifting.prefixes import DiffState
from graftree.transforms.lifting.specs import TransformSpec
from graftree.transforms.lifting.traced import TracedCall

X = TypeVar("X")


class GradOptions(DerivativeOptions, total=False):
    """Keyword arguments of `grad` and `value_and_grad`, less ``has_aux``."""

    argnums: int | DiffState | Sequence[int | DiffState]
    holomorphic: bool
    allow_int: bool


@overload
def grad(
    f: Callable[P, tuple[Any, X]],
    *,
    has_aux: Literal[True],
    **options: Unpack[GradOptions],
) -> Callable[P, tuple[Any, X]]: ...
@overload
def grad(
    f: Callable[P, Any], *, has_aux: bool = False, **options: Unpack[GradOptions]
) -> Callable[P, Any]: ...
@overload
def grad(
    *, has_aux: Literal[True], **options: Unpack[GradOptions]
) -> Callable[[Callable[P, tuple[Any, X]]], Callable[P, tuple[Any, X]]]: ...
@overload
def grad(
    *, has_aux: bool = False, **options: Unpack[GradOptions]
) -> Callable[[Callable[P, Any]], Callable[P, Any]]: ...
def grad(
    f: Any = decorators.MISSING,
    *,
    argnums: int | DiffState | Sequence[int | DiffState] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: Sequence[Any] = (),
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Makes a function that gives the gradient of ``f``; see `value_and_grad`.

    Args:
        f: See `value_and_grad`; so are the other arguments.
        argnums: The arguments to differentiate, or parts of them.
        has_aux: Whether ``f`` returns a pair.
        holomorphic: As in ``jax.grad``.
        allow_int: As in ``jax.grad``.
        reduce_axes: No longer supported; leave it empty.
        graph: The mode; ``None`` takes the default.
        graph_updates: Whether structural changes reach the caller's objects.

    Returns:
        A function that returns the gradients or, with ``has_aux``, a pair of them and
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
    return _decorator(f, "grad", mode, argnums, _reader(has_aux), options)


@overload
def value_and_grad(
    f: Callable[P, R], *, has_aux: bool = False, **options: Unpack[GradOptions]
) -> Callable[P, tuple[R, Any]]: ...
@overload
def value_and_grad(
    *, has_aux: bool = False, **options: Unpack[GradOptions]
) -> Callable[[Callable[P, R]], Callable[P, tuple[R, Any]]]: ...
def value_and_grad(
    f: Any = decorators.MISSING,
    *,
    argnums: int | DiffState | Sequence[int | DiffState] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: Sequence[Any] = (),
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Makes a function that gives the value and the gradient of ``f``.

    Args:
        f: A function that returns a real scalar or, with ``has_aux``, a pair of it and
            anything else. Its arguments may contain objects.
        argnums: The positional arguments to differentiate, or parts of them: an
            integer, a `DiffState`, or a sequence of these. With graph updates, an
            integer means the `Param` Variables of objects.
        has_aux: Whether ``f`` returns a pair.
        holomorphic: As in ``jax.grad``.
        allow_int: As in ``jax.grad``.
        reduce_axes: No longer supported; leave it empty.
        graph: Whether shared references are kept (graph mode) or are an error (tree
            mode); ``None`` takes the default.
        graph_updates: Whether structural changes reach the caller's objects. If so, the
            gradient of an object is a State; otherwise all its leaves are
            differentiated, and the gradient is an object of the same type.

    Returns:
        A function with the arguments of ``f`` that returns ``(value, gradients)``, or
        a decorator if ``f`` is not given. Writes of ``f`` to Variables are kept.

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
    return _decorator(f, "value_and_grad", mode, argnums, _reader(has_aux), options)


# Splits the output of a function into what is differentiated and the rest.
Reader = Callable[[Any], tuple[Any, Any]]


def _reader(has_aux: bool) -> Reader | None:
    return cotangents.pair if has_aux else None


def read_value_and_grad(
    f: Callable[..., Any], read: Reader, argnums: Any
) -> Callable[..., Any]:
    """Makes `value_and_grad`, in the default mode, for outputs that a tool reads.

    The function returns ``((value, rest), gradients)`` of what ``read`` makes of the
    output of ``f``; ``read`` is traced with ``f``.
    """
    mode = config.propagation(None, None)
    return _decorator(f, "value_and_grad", mode, argnums, read, {})


def _decorator(
    f: Any,
    name: str,
    mode: config.Propagation,
    argnums: Any,
    read: Reader | None,
    options: Any,
) -> Any:
    selection = parse_argnums(name, argnums, mode)

    def make(function: Callable[..., Any]) -> Callable[..., Any]:
        calls: dict[int, dispatch.Calls] = {}  # by the number of arguments

        @decorators.wraps(function)
        def differentiated(*args: Any, **kwargs: Any) -> Any:
            with _jax.hidden_frames:
                value_and_group: Any = None
                args, kwargs = _by_position(function, selection, args, kwargs)
                count = len(args)
                if count not in calls:
                    spec = selection.spec(count).holding(function)
                    calls[count] = dispatch.Calls(function, spec)
                spec = calls[count].spec
                inner = _interior_of_gradient(function, spec, read, is_scalar=True)
                gradient = jax.value_and_grad(inner, argnums=1, has_aux=True, **options)

                # The group of False comes first, then that of True.
                def transformed(*groups: Leaves) -> Any:
                    nonlocal value_and_group
                    tracer_leaks.refuse(groups[1:], name, tracer_leaks.NO_GRADIENT)
                    try:
                        (value, result), group = gradient(*groups)
                    except Exception as error:
                        sharding.explain(error)
                        raise
                    value_and_group = value, group
                    return result

                _, aux = calls[count].run(transformed, args, kwargs)
                value, group = value_and_group
                positions, leaves = selection.positions(count), group.by_position()
                grads = cotangents.arguments(group.signature, leaves, mode, positions)
                grads = grads[0] if selection.is_single else grads
                if name == "value_and_grad":
                    return ((value, aux) if read else value), grads
                return (grads, aux) if read else grads

        return differentiated

    return decorators.decorate(f, name, make)


def parse_argnums(
    name: str, argnums: Any, mode: config.Propagation | None = None
) -> Argnums:
    """Reads ``argnums``; for a tool, in the default mode.

    Raises:
        ValueError: If an argument is repeated, or there is none.
    """
    mode = mode or config.propagation(None, None)
    named = DiffState(0, Param) if mode.structure else True
    selection = Argnums(argnums, "argnums", name, mode, named=named, others=False)
    if not selection.argnums:
        raise ValueError(f"argnums of nnx.{name} is empty.")
    return selection


def both_sides(
    name: str,
    f: Callable[..., Any],
    argnums: Any,
    has_aux: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Call, Callable[..., Any]]:
    """Prepares a call for a tool, and the function that JAX differentiates for it.

    The function takes the call's two groups, of which the second is differentiated. It
    returns the value, which may be any arrays, and a rest to ignore.
    """
    selection = parse_argnums(name, argnums)
    args, kwargs = _by_position(f, selection, args, kwargs)
    spec = selection.spec(len(args))
    call = Call(f, spec, args, kwargs)
    tracer_leaks.refuse(call.groups[1:], name, tracer_leaks.NO_GRADIENT)
    return call, _interior_of_gradient(f, spec, _reader(has_aux))


def _by_position(
    f: Callable[..., Any],
    selection: Argnums,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Puts the arguments into positions, with graph updates."""
    if not selection.mode.structure:
        return args, kwargs
    least = max(selection.argnums) + 1
    return decorators.to_positions(f, args, kwargs, least), {}


def _interior_of_gradient(
    f: Callable[..., Any],
    spec: TransformSpec,
    read: Reader | None,
    is_scalar: bool = False,
) -> Callable[..., Any]:
    def traced(*groups: Leaves) -> Any:
        call = TracedCall(spec, *join(groups))
        out = call.run(f)
        if is_scalar and read is None:
            cotangents.refuse_several(spec.name, out)
        value, aux = read(out) if read else (out, None)
        return flattening.raw_of(value), call.collect((None, aux))

    return debug_info.named_after(f, traced)


# Values kept for the backward pass.


@decorators.keeps_type
def remat(
    f: Any = decorators.MISSING,
    *,
    prevent_cse: bool = True,
    static_argnums: int | Sequence[int] = (),
    policy: Callable[..., bool] | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Saves memory in gradients by computing a function twice, with ``jax.checkpoint``.

    Values and gradients are those of the function. It runs twice, but its writes to its
    arguments reach the caller's objects once. `nnx.memory.saved` lists the values kept.

    Args:
        f: The function; also a method, as a decorator.
        prevent_cse: Whether to keep the compiler from merging the two computations into
            one. In a `scan` it can't merge them; ``False`` is faster there.
        static_argnums: Positions of arguments that are compile-time constants.
        policy: Which intermediate values to keep anyway: by names and modules, made by
            `nnx.memory.save` or `nnx.memory.offload`; or one of
            ``jax.checkpoint_policies``; ``None`` keeps none.
        graph: The mode; ``None`` takes the default.
        graph_updates: Whether structural changes reach the caller's objects.

    Returns:
        A function with the arguments of ``f``, or a decorator if ``f`` is not given.

    Raises:
        ValueError: If ``f`` is a method bound to a Module, or a position is out of
            range; at a call, for aliases that the mode doesn't allow, and if the policy
            names something that isn't there.

    Example:
        >>> class Block(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.linear = nnx.Linear(2, 2, rngs=rngs)
        ...     @nnx.remat
        ...     def __call__(self, x):
        ...         return jnp.sin(self.linear(x))
        >>> block = Block(nnx.Rngs(0))
        >>> grads = nnx.grad(lambda block, x: block(x).sum())(block, jnp.ones((1, 2)))
        >>> grads["linear"]["kernel"].shape
        (2, 2)
    """
    mode = config.propagation(graph, graph_updates)
    checkpoint = functools.partial(jax.checkpoint, prevent_cse=prevent_cse)

    def make(function: Callable[..., Any]) -> Callable[..., Any]:
        def checkpointed(f: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                # JAX recognizes a function and reuses the values it captured.
                new = debug_info.named_after(f, lambda *args: f(*args))
                if isinstance(policy, RematPolicy):
                    transformed = policy.apply(checkpoint, new, function)
                else:
                    transformed = checkpoint(new, policy=policy)
                return programs.run(function, transformed, *args)

            return call

        def transform(inner: Callable[..., Any], _ins: Any, _outs: Any) -> Any:
            return returning_arrays(tracer_leaks.by_content(inner, checkpointed))

        statics = decorators.choose(function, "static", static_argnums)
        spec = TransformSpec.uniform(
            "remat",
            mode,
            statics=statics or None,
            returns_captured=True,
            signatures=graphdefs.Interned(),
        ).holding(function)
        return lift(function, transform, spec)

    return decorators.decorate(f, "remat", make)


class RematPolicy(abc.ABC):
    """A policy of `remat` that needs more than JAX gives it; see `graftree.memory`."""

    @abc.abstractmethod
    def apply(
        self,
        checkpoint: Callable[..., Any],
        inner: Callable[..., Any],
        function: Callable[..., Any],
    ) -> Callable[..., Any]:
        """Returns ``checkpoint(inner, policy=...)``, and records the values it keeps.

        Args:
            checkpoint: A transform of JAX, which traces ``inner`` when it is called.
            inner: It takes groups of leaves.
            function: The user's.
        """
