"""Functions with arguments bound to them: ``jit_partial``, ``cached_partial``."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from graftree import _jax, config
from graftree.core import ownership
from graftree.core.graph import flattening, functional
from graftree.core.graph.flattening import IndexMap, RefMap
from graftree.core.graph.watches import StructureWatch
from graftree.core.pickling import Rebuilt
from graftree.core.variables.variables import Variable
from graftree.transforms.compiled.jit import JitWrapped
from graftree.transforms.crossing import (
    debug_info,
    decorators,
    packing,
    refusals,
)
from graftree.transforms.crossing.decorators import Statics
from graftree.transforms.crossing.outside import Call
from graftree.transforms.crossing.prefixes import Row

R = TypeVar("R")


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
    """`jit` with the first arguments bound: all the objects that the function uses.

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
    packing.pack((partial_args, {}), mode, "jit_partial")
    return _JitPartial(
        "jit_partial",
        fun,
        mode,
        partial_args,
        shardings=(in_shardings, out_shardings),
        statics=(static_argnums, static_argnames),
        donated=(donate_argnums, donate_argnames),
        keep_unused=keep_unused,
        device=device,
        backend=backend,
        inline=inline,
    )


class _JitPartial(JitWrapped):
    """A compiled function that has all its objects bound to it."""

    def interior(self, row: Row) -> Callable[..., Any]:
        interior = super().interior(row)

        def traced(*groups: Any) -> Any:
            result = interior(*groups)
            for position, _ in result[0].metadata:
                raise ValueError(
                    "Variable metadata changed inside jit: that of "
                    f"{groups[0].signature.slots[position].name}.\nUse nnx.jit, which "
                    "passes such changes on, or change the metadata outside."
                )
            return result

        return debug_info.named_after(interior, traced)

    def prepare(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        statics: Statics | None = None,
    ) -> Call:
        for path, leaf in refusals.labeled({"args": args, "kwargs": kwargs}):
            if isinstance(leaf, Variable):
                raise ValueError(
                    f"Found Variable in non-partial arguments: {path} of a call of "
                    f"nnx.jit_partial({decorators.name_of(self)}, ...) is a "
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
            "Other modes need nothing of the kind: use functools.partial."
        )
    copies = _Copies(cached_args)

    @decorators.wraps(f)
    def call(*args: Any, **kwargs: Any) -> R:
        copied, snapshot = copies.now()
        values = snapshot.values()
        out = f(*copied, *args, **kwargs)
        if not snapshot.is_same():
            snapshot.restore(values)
            raise ValueError(
                "The graph structure of a node added to cached_partial was mutated "
                "inside the transformation, this is not allowed: attributes, types and "
                f"metadata must be the same after a call of {decorators.name_of(f)}.\n"
                "Pass the object to the call, or undo the change before the end."
            )
        return out

    return call


class _Copies(Rebuilt):
    """Copies of objects that share their Variables, for as long as they are right."""

    def __init__(self, originals: tuple[Any, ...]) -> None:
        self._originals = originals
        self._owner = ownership.current()
        self._latest = self._make()

    def now(self) -> tuple[tuple[Any, ...], _Snapshot]:
        """The copies, and how they are built."""
        before, copied, snapshot = self._latest
        if not before.is_same(with_arrays=True):
            before, copied, snapshot = self._make()
        elif not snapshot.holds():
            snapshot = _Snapshot(copied)
        if ownership.current() is self._owner:  # else they belong to a trace that ends
            self._latest = before, copied, snapshot
        return copied, snapshot

    def _make(self) -> tuple[_Snapshot, tuple[Any, ...], _Snapshot]:
        before = _Snapshot(self._originals)
        copied = functional.clone(self._originals, variables=False, graph=True)
        return before, copied, _Snapshot(copied)


class _Snapshot(Rebuilt):
    """How an object is built, and what is needed to make it so again."""

    def __init__(self, node: Any) -> None:
        made, numbers, members = ownership.clock.now, RefMap(), []
        self._node = node
        self._numbers = numbers
        # With one map for both, each object gets its number as its outer number, too.
        self._graphdef, self._leaves = flattening.flatten_graph(
            node, numbers, numbers, members
        )
        by_number = numbers.by_number()
        self._watch = StructureWatch(self._graphdef, members, by_number, made)
        self._is_watched = self._watch.is_complete and all(
            isinstance(leaf, Variable) for leaf in self._leaves
        )

    def holds(self) -> bool:
        """Whether the object is known to be built as it was."""
        return self._is_watched and self._watch.holds()

    def is_same(self, *, with_arrays: bool = False) -> bool:
        """Whether it is built as it was, of the same objects, perhaps also arrays."""
        if self.holds():
            return True
        now, leaves = flattening.flatten_graph(self._node, RefMap(), self._numbers)
        are_same = map(operator.is_, leaves, self._leaves)
        return now == self._graphdef and (not with_arrays or all(are_same))

    def values(self) -> list[Any]:
        """The raw values of all leaves, as they are now."""
        return [*map(flattening.raw_of, self._leaves)]

    def restore(self, values: list[Any]) -> None:
        """Makes the object what it was, except for values with donated buffers."""
        leaves = zip(self._leaves, values, strict=True)
        flattening.unflatten(
            self._graphdef,
            [flattening.raw_of(x) if _is_deleted(v) else v for x, v in leaves],
            outer_index_outer_ref=IndexMap.from_refmap(self._numbers),
        )


def _is_deleted(value: Any) -> bool:
    return any(
        isinstance(x, jax.Array) and not isinstance(x, _jax.Tracer) and x.is_deleted()
        for x in jax.tree.leaves(value)
    )
