"""``jit``: compiled functions over objects.

The arguments are packed into groups of leaves, one per distinct pair of sharding and
donation; ``jax.jit`` compiles the function of these groups. The signature is static
data of the groups, so it is part of JAX's own cache key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

import jax

from graftree import _jax, config
from graftree.config import Propagation
from graftree.core import ownership
from graftree.core.graph.graphdefs import Interned
from graftree.core.objects import running
from graftree.core.pickling import Rebuilt
from graftree.transforms.compiled.stages import Lowered, Traced
from graftree.transforms.crossing import decorators, inside, outside, traces
from graftree.transforms.crossing.decorators import MISSING, Chosen, Statics
from graftree.transforms.crossing.outside import Call
from graftree.transforms.crossing.plans import NO_PLAN, Plan, Plans
from graftree.transforms.crossing.prefixes import Donation, Keywords, Prefix, Row
from graftree.transforms.crossing.traces import Traces

P = ParamSpec("P")
R = TypeVar("R")
Options = ParamSpec("Options")


class JitWrapped(Rebuilt, decorators.Method[P, R]):
    """A function compiled by `jit`; call it like the function.

    Args:
        name: The public name of the transform.
        fun: The function.
        mode: What propagates.
        bound: The first arguments, if they are the same at each call.
        shardings: The shardings of the arguments and of the output.
        statics: Positions and names of static arguments.
        donated: Those of arguments whose buffers may be reused.
        **options: Other options of ``jax.jit``.

    Attributes:
        fun: The function that was given.
        jitted_fn: The function of groups of leaves that ``jax.jit`` compiles; its
            ``_cache_size()`` is the number of programs.
        in_shardings: What was given, like ``out_shardings`` and ``static_argnums``.
        graph: Whether shared references are kept.
        partial_args: The arguments that are bound to it.
        traces: What is known of its traces.
    """

    def __init__(
        self,
        name: str,
        fun: Callable[P, R],
        mode: Propagation,
        bound: tuple[Any, ...] = (),
        *,
        shardings: tuple[Any, Any],
        statics: tuple[Any, Any],
        donated: tuple[Any, Any],
        **options: Any,
    ) -> None:
        self.traces = Traces()
        traces.follow(JitWrapped.__call__.__code__, Plan.call.__code__)
        static = decorators.choose(fun, "static", *statics)
        donate = decorators.choose(fun, "donate", *donated)
        decorators.check_disjoint(static, donate)
        row = _row_of_compiled(name, mode, shardings, static, donate, self.traces)
        decorators.wraps(fun)(self)
        self.fun = fun
        self.in_shardings, self.out_shardings = shardings
        self.static_argnums, _ = statics
        self.graph = mode.sharing
        self.partial_args = bound
        self._row = row
        given = {name: value for name, value in options.items() if value is not None}
        self._jax_options = given | _group_options(row)
        self.jitted_fn = self._compiled()
        self._plans = Plans(row, bound)

    def interior(self, row: Row) -> Callable[..., Any]:
        """What JAX traces."""
        return inside.interior(self.fun, row)

    def _compiled(self) -> Any:
        return jax.jit(self.interior(self._row), **self._jax_options)

    def _called(self) -> Any:
        """What JAX compiles; where observers watch, only for them."""
        apart = running.stack.apart
        return self.jitted_fn if apart is None else apart.function(self, self._compiled)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        try:  # not `_jax.hidden_frames`, which costs calls
            out = self._plans.call(self.jitted_fn, args, kwargs)
            if out is not NO_PLAN:
                return out
            if self.is_unseen(args):
                return self.seen(args, kwargs)
            made = ownership.clock.now
            call = self.prepare(args, kwargs)
            self._plans.learn(args, kwargs, call.packed, made)
            groups = call.groups  # `compilations` looks for them here
            return call.commit(self._called()(*groups))
        except Exception as error:
            _jax.hide_frames(error)
            if outside.is_of_donation(error):
                with _jax.hidden_frames:
                    self.prepare(args, kwargs).explain(error)
            raise

    def prepare(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        statics: Statics | None = None,
    ) -> Call:
        """The outside of a call; its static arguments may have been taken out."""
        taken = dict(statics or ())
        bound = [x for number, x in enumerate(self.partial_args) if number not in taken]
        return Call(self.fun, self._row, (*bound, *args), kwargs, statics)

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Traced[R]:
        """Traces the function for arguments, which do not change.

        Args:
            *args: Arguments of the function; ``jax.ShapeDtypeStruct`` may stand for
                arrays, also in Variables.
            **kwargs: Its keyword arguments.
        """
        with _jax.hidden_frames:
            call = self.prepare(args, kwargs)
            traced = self._called().trace(*call.groups)
            taken = {where for where, _ in call.packed.signature.statics}
            bound = len({*range(len(self.partial_args))} - taken)
            return Traced(traced, self, bound)

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Lowered[R]:
        """Traces the function and lowers it to the language of the compiler.

        Args:
            *args: See `trace`.
            **kwargs: See `trace`.
        """
        with _jax.hidden_frames:
            return self.trace(*args, **kwargs).lower()

    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The output with ``jax.ShapeDtypeStruct`` instead of arrays.

        Args:
            *args: See `trace`.
            **kwargs: See `trace`.
        """
        with _jax.hidden_frames:
            return self.trace(*args, **kwargs).out_info


class _Jit(Protocol[Options]):
    """The type of `jit`; see `decorators.Transform`."""

    @overload
    def __call__(
        self, fun: Callable[P, R], /, *args: Options.args, **options: Options.kwargs
    ) -> JitWrapped[P, R]: ...
    @overload
    def __call__(
        self, *args: Options.args, **options: Options.kwargs
    ) -> Callable[[Callable[P, R]], JitWrapped[P, R]]: ...


def _typed(transform: Callable[Concatenate[Any, Options], Any]) -> _Jit[Options]:
    return cast("_Jit[Options]", transform)


@_typed
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
    the call: values of Variables always, attributes with ``graph_updates``. A function
    that raises changes nothing.

    Args:
        fun: The function. Its arguments and outputs may contain Modules, Variables,
            arrays and containers of them.
        in_shardings: The sharding of each positional argument that is not static: a
            pytree prefix of shardings, ``None`` for "as it comes"; for an object it may
            be a `StateSharding`. With graph updates, all Variables get theirs, even
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
        graph: Whether shared references are kept (graph mode) or are an error (tree
            mode); ``None`` takes the default.
        graph_updates: Whether structural changes reach the caller's objects.

    Returns:
        The compiled function, with the methods ``eval_shape``, ``trace`` and ``lower``
        of ``jax.jit``; or a decorator if ``fun`` is not given.

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
    mode = config.propagation(graph, graph_updates)

    def make(function: Callable[..., Any]) -> JitWrapped[..., Any]:
        return JitWrapped(
            "jit",
            function,
            mode,
            shardings=(in_shardings, out_shardings),
            statics=(static_argnums, static_argnames),
            donated=(donate_argnums, donate_argnames),
            keep_unused=keep_unused,
            device=device,
            backend=backend,
            inline=inline,
        )

    return decorators.decorate(fun, "jit", make)


def _row_of_compiled(
    name: str,
    mode: Propagation,
    shardings: tuple[Any, Any],
    static: Chosen,
    donate: Chosen,
    traces: Traces,
) -> Row:
    ins, outs = shardings
    donation = Donation(donate, static, keeps_arrays=mode.structure)
    return Row(
        name,
        mode,
        Prefix(ins, "in_shardings", name, mode, keywords=None, donation=donation),
        Prefix(outs, "out_shardings", name, mode),
        statics=static,
        keywords=(Keywords.STAY, Keywords.STAY),
        signatures=Interned(),
        traces=traces,
        returns_placed=True,
    )


def _group_options(row: Row) -> dict[str, Any]:
    """The options of ``jax.jit`` for the groups of leaves and the result."""
    options: dict[str, Any] = {"donate_argnums": sorted(row.inputs.donated)}
    if row.has_prefixes:
        options["in_shardings"] = row.inputs.values
        options["out_shardings"] = row.result_prefix
    return options
