"""``jit``: compiled functions over objects; ``jit_partial``, ``cached_partial``.

The arguments are packed into groups of leaves, one per distinct pair of sharding and
donation; ``jax.jit`` compiles the function of these groups. The signature is static
data of the groups, so it is part of JAX's own cache key. The partial forms bind
arguments to a function.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Protocol, cast, overload

import jax

from graftree import _jax, config
from graftree.core import hooks, ownership, pickling
from graftree.core.graph import flattening, functional, graphdefs, validity_checks
from graftree.core.objects import callables, running
from graftree.core.text.descriptions import is_deleted
from graftree.core.variables.variables import Variable
from graftree.transforms.compiled.stages import Lowered, Traced
from graftree.transforms.lifting import argument_trees, caller, debug_info, decorators
from graftree.transforms.lifting.argument_errors import labeled
from graftree.transforms.lifting.argument_trees import Arguments
from graftree.transforms.lifting.decorators import Options, P, R
from graftree.transforms.lifting.dispatch import MISS, DispatchCache
from graftree.transforms.lifting.prefixes import Donation, Prefix
from graftree.transforms.lifting.specs import Keywords, TransformSpec
from graftree.transforms.lifting.traced import interior


class JitWrapped(pickling.Rebuilt, callables.Holder, decorators.Method[P, R]):
    """A function compiled by `jit`; call it like the function.

    Args:
        name: The public name of the transform.
        fun: The function.
        mode: The changes that propagate.
        bound: The first arguments, if they are the same at each call.
        shardings: The shardings of the arguments and of the output.
        statics: Positions and names of static arguments.
        donated: Positions and names of arguments whose buffers may be reused.
        **options: Other options of ``jax.jit``.

    Attributes:
        fun: The function that was given.
        jitted_fn: The function of groups of leaves that ``jax.jit`` compiles; its
            ``_cache_size()`` is the number of programs.
        in_shardings: As given, like ``out_shardings`` and ``static_argnums``.
        graph: Whether shared references are kept.
        partial_args: The arguments that are bound to it.
        traces: The record of its traces; see `hooks.record_of_traces`.
    """

    def __init__(
        self,
        name: str,
        fun: Callable[P, R],
        mode: config.Propagation,
        bound: tuple[Any, ...] = (),
        *,
        shardings: tuple[Any, Any],
        statics: tuple[Any, Any],
        donated: tuple[Any, Any],
        **options: Any,
    ) -> None:
        self.traces: Any = hooks.record_of_traces.call()
        static = decorators.choose(fun, "static", *statics)
        donate = decorators.choose(fun, "donate", *donated)
        decorators.check_disjoint(static, donate)
        donation = Donation(donate, keeps_arrays=mode.structure)
        ins, outs = shardings
        spec = TransformSpec(
            name,
            mode,
            Prefix(ins, "in_shardings", name, mode, keywords=None, donation=donation),
            Prefix(outs, "out_shardings", name, mode),
            statics=static or None,
            keywords=(Keywords.STAY, Keywords.STAY),
            signatures=graphdefs.Interned(),
            traces=self.traces,
            returns_placed=True,
        ).holding(fun)
        decorators.wraps(fun)(self)
        self.fun = fun
        self.in_shardings, self.out_shardings = shardings
        self.static_argnums, _ = statics
        self.graph = mode.sharing
        self.partial_args = bound
        self._spec = spec
        jax_options = {name: x for name, x in options.items() if x is not None}
        jax_options["donate_argnums"] = sorted(spec.inputs.donated)
        if spec.has_prefixes:
            jax_options["in_shardings"] = spec.inputs.values
            jax_options["out_shardings"] = spec.result_prefix
        self._jax_options = jax_options
        self.jitted_fn = self._compiled()
        self._cache = DispatchCache(spec, bound)

    def interior(self) -> Callable[..., Any]:
        """Makes the function that JAX traces."""
        return interior(self.fun, self._spec)

    def _compiled(self) -> Any:
        return jax.jit(self.interior(), **self._jax_options)

    def _called(self, *groups: Any) -> Any:
        """Calls the function that JAX compiles; for observers, one of their own."""
        return self._function()(*groups)

    def _function(self) -> Any:
        namespace = running.stack.trace_namespace
        if namespace is None:
            return self.jitted_fn
        return namespace.function(self, self._compiled)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        try:  # not `_jax.hidden_frames`, which costs calls
            out = self._cache.repeat(self.jitted_fn, args, kwargs)
            if out is not MISS:
                return out
            if running.stack.observers and self.is_unseen(args):
                return self.seen(args, kwargs)
            is_usual = running.stack.trace_namespace is None
            transformed = self.jitted_fn if is_usual else self._called
            if config.caches.are_used:
                return self._cache.run(transformed, args, kwargs, self.prepare)
            return self.prepare(args, kwargs).run(transformed)
        except Exception as error:
            _jax.hide_frames(error)
            if caller.is_of_donation(error):
                with _jax.hidden_frames:
                    self.prepare(args, kwargs).explain(error)
            raise

    def prepare(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        statics: decorators.Statics | None = None,
    ) -> caller.Call:
        """Prepares a call, on the caller's side.

        Args:
            args: Arguments of the function.
            kwargs: Its keyword arguments.
            statics: Static arguments that are not among these.
        """
        static_arguments = dict(statics or ())
        bound = [
            x for i, x in enumerate(self.partial_args) if i not in static_arguments
        ]
        return caller.Call(self.fun, self._spec, (*bound, *args), kwargs, statics)

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Traced[R]:
        """Traces the function for arguments, which do not change.

        Args:
            *args: Arguments of the function; ``jax.ShapeDtypeStruct`` may stand for
                arrays, even in Variables.
            **kwargs: Its keyword arguments.
        """
        with _jax.hidden_frames:
            call = self.prepare(args, kwargs)
            traced = self._function().trace(*call.groups)
            static_keys = {key for key, _ in call.arguments.signature.statics}
            bound = len({*range(len(self.partial_args))} - static_keys)
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
        """Returns the output with ``jax.ShapeDtypeStruct`` instead of arrays.

        Args:
            *args: See `trace`.
            **kwargs: See `trace`.
        """
        with _jax.hidden_frames:
            return self.trace(*args, **kwargs).out_info


class _Jit(Protocol[Options]):
    """Type of `jit`; see `decorators.Transform`."""

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
    fun: Any = decorators.MISSING,
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


def jit_partial(
    fun: Callable[..., R],
    *partial_args: Any,
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
) -> JitWrapped[..., R]:
    """Compiles a function, like `jit`, with the objects that it uses bound to it.

    The values of their Variables may change between calls, and calls update them. Any
    other change in them makes the next call trace again.

    Args:
        fun: The function.
        *partial_args: Its first arguments.
        in_shardings: See `jit`; one entry per bound argument, then one per argument of
            a call.
        out_shardings: See `jit`, as for all that follow. Positions are those of the
            arguments of ``fun``.
        static_argnums: See ``out_shardings``.
        static_argnames: See ``out_shardings``.
        donate_argnums: See ``out_shardings``.
        donate_argnames: See ``out_shardings``.
        keep_unused: See ``out_shardings``.
        device: See ``out_shardings``.
        backend: See ``out_shardings``.
        inline: See ``out_shardings``.
        graph: The mode; ``None`` takes the default.
        graph_updates: Must be false, here or by default: structural changes don't reach
            the bound objects.

    Returns:
        The compiled function of the other arguments.

    Raises:
        ValueError: If graph updates are on, ``fun`` is a method bound to a Module, or a
            Variable occurs twice in tree mode; at a call, if an argument contains a
            Variable, or the function changes the metadata of one.

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> predict = nnx.jit_partial(nnx.Linear.__call__, model, graph=False)
        >>> predict(jnp.ones((1, 2))).shape
        (1, 3)
    """
    mode = config.propagation(graph, graph_updates)
    if mode.structure:
        raise ValueError(
            "`graph_updates` not supported by `jit_partial`: pass graph=False or "
            "graph_updates=False, or use nnx.jit."
        )
    decorators.check_not_bound(fun, "jit_partial")
    tree = argument_trees.flatten((partial_args, {}), mode, "jit_partial", of_call=True)
    Arguments.of(*tree, mode, "jit_partial")

    def make(fun_and_args: tuple[Any, ...]) -> JitWrapped[..., R]:
        function, *bound = fun_and_args
        return _JitPartial(
            "jit_partial",
            function,
            mode,
            tuple(bound),
            shardings=(in_shardings, out_shardings),
            statics=(static_argnums, static_argnames),
            donated=(donate_argnums, donate_argnames),
            keep_unused=keep_unused,
            device=device,
            backend=backend,
            inline=inline,
        )

    fun_and_args = fun, *partial_args
    return callables.remember(make(fun_and_args), make, fun_and_args)


class _JitPartial(JitWrapped):
    """A compiled function that has all its objects bound to it."""

    def interior(self) -> Callable[..., Any]:
        interior = super().interior()

        def traced(*groups: Any) -> Any:
            result = interior(*groups)
            for position, _ in result.ungrouped().spec.metadata:
                name = groups[0].signature.leaf_specs[position].name
                raise ValueError(
                    f"Variable metadata changed inside jit: that of {name}.\n"
                    "Use nnx.jit, which passes such changes on, or change the metadata "
                    "outside."
                )
            return result

        return debug_info.named_after(interior, traced)

    def prepare(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        statics: decorators.Statics | None = None,
    ) -> caller.Call:
        for path, leaf in labeled({"args": args, "kwargs": kwargs}):
            if isinstance(leaf, Variable):
                raise ValueError(
                    f"Found Variable in non-partial arguments: {path} of a call of "
                    f"nnx.jit_partial({debug_info.name_of(self)}, ...) is a "
                    f"{type(leaf).__name__}.\nBind the object that has it when the "
                    "function is made, or use nnx.jit."
                )
        return super().prepare(args, kwargs, statics)


def cached_partial(
    f: Callable[..., R],
    *cached_args: Any,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Callable[..., R]:
    """Binds the first arguments of a function, as copies that keep their structure.

    The copies share their Variables with the originals, so both see all updates. When
    anything else changes in the originals (``model.eval()``, a replaced layer), the
    next call makes new copies. The function may change the structure of the copies, but
    must restore it before it returns.

    Args:
        f: The function, such as one made by `jit`.
        *cached_args: Its first arguments.
        graph: Must be true, here or by default, like ``graph_updates``.
        graph_updates: See ``graph``.

    Returns:
        The function of the other arguments. Where ``f`` returns a bound object, it
        returns the copy: the same one at each call while the originals don't change.

    Raises:
        ValueError: If graph updates are off; at a call, if the structure of a copy
            differs afterwards. Then the call is undone.

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> @nnx.jit
        ... def shift(model, by):
        ...     model.bias[...] += by
        >>> nnx.cached_partial(shift, model)(1.0)
        >>> model.bias[...]
        Array([1., 1., 1.], dtype=float32)
    """
    if not config.propagation(graph, graph_updates).structure:
        raise ValueError(
            "cached_partial is a graph-mode-only API and requires graph_updates=True. "
            "In other modes, use functools.partial."
        )
    copies = _Copies(cached_args)

    def make(fun_and_args: tuple[Any, ...]) -> Callable[..., R]:
        function, *bound = fun_and_args
        return cached_partial(function, *bound, graph=True, graph_updates=True)

    @decorators.wraps(f)
    def call(*args: Any, **kwargs: Any) -> R:
        copied, snapshot = copies.current()
        values = snapshot.values()
        out = f(*copied, *args, **kwargs)
        if not snapshot.is_same():
            snapshot.restore(values)
            raise ValueError(
                "The graph structure of a node added to cached_partial was mutated "
                "inside the transformation, this is not allowed: attributes, types and "
                f"metadata must be the same after a call of {debug_info.name_of(f)}.\n"
                "Pass the object to the call, or undo the change before the end."
            )
        return out

    return callables.remember(call, make, (f, *cached_args))


class _Copies(pickling.Rebuilt):
    """Copies of unchanged objects, with which they share their Variables."""

    def __init__(self, originals: tuple[Any, ...]) -> None:
        self._originals = originals
        self._owner = ownership.current()
        self._latest = self._make()

    def current(self) -> tuple[tuple[Any, ...], _PartialSnapshot]:
        """Returns the copies, and how they are built."""
        originals, copied, snapshot = self._latest
        if not originals.is_same(with_arrays=True):
            originals, copied, snapshot = self._make()
        elif not snapshot.holds():
            snapshot = _PartialSnapshot(copied)
        if ownership.current() is self._owner:  # else they belong to a trace that ends
            self._latest = originals, copied, snapshot
        return copied, snapshot

    def _make(self) -> tuple[_PartialSnapshot, tuple[Any, ...], _PartialSnapshot]:
        originals = _PartialSnapshot(self._originals)
        copied = functional.clone(self._originals, variables=False, graph=True)
        return originals, copied, _PartialSnapshot(copied)


class _PartialSnapshot(pickling.Rebuilt):
    """Structure of an object, and the data needed to restore it."""

    def __init__(self, node: Any) -> None:
        version, numbers, members = ownership.versions.latest, flattening.RefMap(), []
        self._node = node
        self._numbers = numbers
        # With one map for both, each object gets its number as its outer number, too.
        self._graphdef, self._leaves = flattening.flatten_graph(
            node, numbers, numbers, members
        )
        by_number = flattening.IndexMap.from_refmap(numbers)
        self._validity = validity_checks.ValidityCheck(
            self._graphdef, members, by_number, version
        )
        self._is_checkable = self._validity.is_complete and all(
            isinstance(leaf, Variable) for leaf in self._leaves
        )

    def holds(self) -> bool:
        """Whether a validity check shows that the object is built as it was."""
        return self._is_checkable and self._validity.holds()

    def is_same(self, *, with_arrays: bool = False) -> bool:
        """Whether it is built as it was, of the same objects, perhaps also arrays."""
        if self.holds():
            return True
        graphdef, leaves = flattening.flatten_graph(
            self._node, flattening.RefMap(), self._numbers
        )
        are_same = map(operator.is_, leaves, self._leaves)
        return graphdef == self._graphdef and (not with_arrays or all(are_same))

    def values(self) -> list[Any]:
        """Lists the current raw values of all leaves."""
        return [*map(flattening.raw_of, self._leaves)]

    def restore(self, values: list[Any]) -> None:
        """Restores the object, except for values with donated buffers."""
        leaves = zip(self.values(), values, strict=True)
        restored = [
            x if any(map(is_deleted, jax.tree.leaves(v))) else v for x, v in leaves
        ]
        refs = flattening.IndexMap.from_refmap(self._numbers)
        flattening.unflatten(self._graphdef, restored, outer_index_outer_ref=refs)
