"""Older contexts: objects split and merged several times with one numbering.

    with update_context(tag):
        with split_context(tag) as ctx:                  # 1, outside
            graphdef, state = ctx.split(model)
        with merge_context(tag, inner=True) as ctx:      # 2, inside a JAX transform
            model = ctx.merge(graphdef, state)
            ...                                          #    any change
        with split_context(tag) as ctx:                  # 3, inside
            graphdef, state = ctx.split(model)
        with merge_context(tag, inner=False) as ctx:     # 4, outside
            model = ctx.merge(graphdef, state)           #    the model of 1, changed

Steps 1 and 2 leave their numbers in the `UpdateContext`; 3 and 4 look them up there.
Array refs are shared by 1 and 2, so that writes inside reach the caller. JAX returns
no refs, so 3 puts stand-ins in their place, which 4 turns into refs again:

    NoUpdate()               a ref that exists outside
    ArrayRefOutput(array)    a ref that was made inside
    Repeated()               a ref that an earlier leaf holds too

New programs don't need any of this: the transforms do all four steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import jax

from graftree.core.graph import flattening, functional, matching
from graftree.core.graph.flattening import IndexMap, RefMap
from graftree.core.graph.graphdefs import GraphDef, NodeRef, VariableDef
from graftree.core.states.flat_states import FlatState
from graftree.core.variables import variables


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class NoUpdate:
    """Stands for a ref that exists outside; a pytree without leaves."""


NO_UPDATE = NoUpdate()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ArrayRefOutput:
    """Stands for a ref that was made inside, and holds its array."""

    value: Any


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Repeated:
    """Stands for a ref that an earlier leaf holds too; a pytree without leaves."""


def _refs(graphdef: GraphDef[Any]) -> list[Any]:
    """Returns the definition of the ref of each leaf, or ``None``."""
    return [
        definition.array_refdef if isinstance(definition, VariableDef) else definition
        for _, definition in graphdef.leaves()
    ]


@jax.tree_util.register_static
@dataclasses.dataclass(eq=False)
class UpdateContext:
    """Numbers of objects on the caller's and the traced side of an `update_context`.

    All instances compare equal, so that one can be a static argument in JAX.

    Example:
        >>> with nnx.update_context("example"):
        ...     nnx.current_update_context("example").tag
        'example'
    """

    tag: Hashable
    outer_ref_outer_index: RefMap = dataclasses.field(default_factory=RefMap)
    inner_ref_outer_index: RefMap | None = None  # until step 2

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UpdateContext)

    def __hash__(self) -> int:
        return hash(UpdateContext)


class GraphContext(threading.local):
    """Active contexts of a thread: for each tag a list, the innermost last.

    Example:
        >>> with nnx.update_context("example"):
        ...     list(nnx.graphlib.GRAPH_CONTEXT.update_context_stacks)
        ['example']
    """

    def __init__(self) -> None:
        self.update_context_stacks: dict[Hashable, list[UpdateContext]] = {}


GRAPH_CONTEXT = GraphContext()
"""The only one."""


def current_update_context(tag: Hashable) -> UpdateContext:
    """Returns the innermost active `update_context` with this tag in this thread.

    Args:
        tag: The tag.

    Raises:
        ValueError: If there is none.

    Example:
        >>> with nnx.update_context("example") as context:
        ...     nnx.current_update_context("example") is context
        True
    """
    if tag not in GRAPH_CONTEXT.update_context_stacks:
        raise ValueError(
            f"No update context found for tag {tag!r}: use nnx.update_context({tag!r})."
        )
    return GRAPH_CONTEXT.update_context_stacks[tag][-1]


def _context_of(tag: Hashable | None) -> UpdateContext:
    """Returns the active context with a tag; without one, a context of its own."""
    return UpdateContext(None) if tag is None else current_update_context(tag)


class update_context(contextlib.ContextDecorator):
    """Lets the splits and merges with one tag update the caller's own objects.

    A context manager; as a decorator it runs each call in a fresh context.

    Args:
        tag: Names the context for `split_context` and `merge_context`.

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> with nnx.update_context("example"):
        ...     with nnx.split_context("example") as ctx:
        ...         graphdef, state = ctx.split(model)
        ...     with nnx.merge_context("example", inner=True) as ctx:
        ...         inner = ctx.merge(graphdef, state)
        ...     inner.extra = 1
        ...     with nnx.split_context("example") as ctx:
        ...         graphdef, state = ctx.split(inner)
        ...     with nnx.merge_context("example", inner=False) as ctx:
        ...         same = ctx.merge(graphdef, state)
        >>> same is model, model.extra
        (True, 1)
    """

    def __init__(self, tag: Hashable) -> None:
        self.tag = tag

    def __enter__(self) -> UpdateContext:
        context = UpdateContext(self.tag)
        GRAPH_CONTEXT.update_context_stacks.setdefault(self.tag, []).append(context)
        return context

    def __exit__(self, *exception: object) -> None:
        stack = GRAPH_CONTEXT.update_context_stacks[self.tag]
        stack.pop()
        if not stack:
            del GRAPH_CONTEXT.update_context_stacks[self.tag]


@dataclasses.dataclass(eq=False, repr=False)
class SplitContext:
    """Splits several objects with one numbering; made by `split_context`.

    Example:
        >>> shared = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> with nnx.split_context() as ctx:
        ...     first, state = ctx.split(shared)
        ...     second, rest = ctx.split([shared])
        >>> len(jax.tree.leaves(rest))
        0
    """

    ctxtag: Hashable | None
    ref_index: RefMap
    is_inner: bool
    inner_ref_outer_index: RefMap | None = None

    def split(self, node: Any, *filters: Any) -> Any:
        """`nnx.split` in graph mode; only refers to objects that were split before."""
        graphdef, leaves = self._flatten(node)
        return graphdef, *functional.group_all(graphdef, leaves, filters)

    def flatten(self, node: Any, *filters: Any, with_paths: bool = True) -> Any:
        """Like `split`, but returns FlatStates, or a list of leaves.

        Args:
            node: The object.
            *filters: Filters; every leaf must match one.
            with_paths: ``False`` returns the leaves as a list, with the raw value of
                each Variable, as `nnx.flatten` does.

        Raises:
            ValueError: If filters are given without paths.
        """
        if filters and not with_paths:
            raise ValueError("Cannot use filters with with_paths=False.")
        graphdef, leaves = self._flatten(node)
        if not with_paths:
            return graphdef, [*map(flattening.raw_of, leaves)]
        flat = FlatState.from_sorted_keys_values(graphdef.paths(), leaves)
        groups = flat.split(*filters) if filters else flat
        return graphdef, *(groups if len(filters) > 1 else (groups,))

    def _flatten(self, node: Any) -> tuple[GraphDef[Any], list[Any]]:
        graphdef, leaves = flattening.flatten_graph(
            node, self.ref_index, self.inner_ref_outer_index
        )
        if self.is_inner:
            leaves = [*map(_stand_in, _refs(graphdef), leaves)]
        return graphdef, leaves


def _stand_in(ref: Any, leaf: Any) -> Any:
    """Returns the leaf, or the stand-in that leaves the trace for one with a ref."""
    if ref is None:
        return leaf
    if isinstance(ref, NodeRef):
        value = Repeated()
    elif ref.outer_index is not None:
        value = NO_UPDATE
    else:
        value = ArrayRefOutput(flattening.raw_of(leaf)[...])
    if isinstance(leaf, variables.Variable):
        return variables.rebuild(type(leaf), value, variables.metadata_of(leaf))
    return value


@contextlib.contextmanager
def split_context(ctxtag: Hashable | None = None) -> Iterator[SplitContext]:
    """Opens a context whose splits share one numbering; see the top of this file.

    Args:
        ctxtag: The tag of the `update_context` it belongs to, if any.

    Raises:
        ValueError: If there is no context with that tag.

    Example:
        >>> with nnx.split_context() as ctx:
        ...     graphdef, state = ctx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    """
    context = _context_of(ctxtag)
    outer_indices = context.inner_ref_outer_index
    ctx = SplitContext(ctxtag, RefMap(), outer_indices is not None, outer_indices)
    try:
        yield ctx
        if outer_indices is None:
            context.outer_ref_outer_index = ctx.ref_index
    finally:
        vars(ctx).clear()


@dataclasses.dataclass(eq=False, repr=False)
class MergeContext:
    """Merges several objects that were split with one numbering.

    Example:
        >>> shared = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> with nnx.split_context() as ctx:
        ...     pairs = ctx.split(shared), ctx.split(shared)
        >>> with nnx.merge_context() as ctx:
        ...     a, b = [ctx.merge(*pair) for pair in pairs]
        >>> a is b
        True
    """

    ctxtag: Hashable | None
    index_ref: IndexMap
    is_inner: bool | None
    outer_index_outer_ref: IndexMap = dataclasses.field(default_factory=IndexMap)

    def merge(self, graphdef: GraphDef[Any], state: Any, /, *states: Any) -> Any:
        """`nnx.merge` with copies of the Variables; finds known objects again.

        The copy of a Variable with a ref has the same ref.
        """
        leaves = self._match(graphdef, (state, *states))
        copies = [
            leaf.copy(_copy_ref=False) if isinstance(leaf, variables.Variable) else leaf
            for leaf in leaves
        ]
        return self._build(graphdef, copies)

    def unflatten(
        self, graphdef: GraphDef[Any], flat_state: Any, /, *flat_states: Any
    ) -> Any:
        """Like `merge`, from FlatStates or a list of leaves, without copies.

        Raises:
            ValueError: If a list is given together with other states.
        """
        if isinstance(flat_state, list) and flat_states:
            raise ValueError("Cannot use multiple flat_states with a list of leaves.")
        return self._build(graphdef, self._match(graphdef, (flat_state, *flat_states)))

    def _match(self, graphdef: GraphDef[Any], states: Sequence[Any]) -> list[Any]:
        """Returns the leaves in order, with refs again where stand-ins were."""
        leaves = matching.match_leaves(graphdef, states)
        if self.is_inner is not False:
            return leaves
        return [*map(self._with_ref, _refs(graphdef), leaves)]

    def _with_ref(self, ref: Any, leaf: Any) -> Any:
        match flattening.raw_of(leaf):
            case NoUpdate():
                new_ref = self.outer_index_outer_ref[ref.outer_index]
            case ArrayRefOutput(value):
                new_ref = jax.new_ref(value)
            case Repeated():
                new_ref = self.index_ref[ref.index]
            case _:
                return leaf
        self.index_ref[ref.index] = new_ref
        return new_ref

    def _build(self, graphdef: GraphDef[Any], leaves: list[Any]) -> Any:
        return flattening.unflatten(
            graphdef,
            leaves,
            index_ref=self.index_ref,
            outer_index_outer_ref=self.outer_index_outer_ref,
        )


@contextlib.contextmanager
def merge_context(
    ctxtag: Hashable | None = None, inner: bool | None = None
) -> Iterator[MergeContext]:
    """Opens a context whose merges share one numbering; see the top of this file.

    Args:
        ctxtag: The tag of the `update_context` it belongs to, if any.
        inner: With a tag, whether this is step 2 (``True``) or step 4 (``False``).

    Raises:
        ValueError: If there is no context with that tag, or ``inner`` is missing.

    Example:
        >>> pair = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> with nnx.merge_context() as ctx:
        ...     model = ctx.merge(*pair)
    """
    if ctxtag is not None and inner is None:
        raise ValueError("inner_merge must be specified when using ctxtag.")
    context = _context_of(ctxtag)
    outer = context.outer_ref_outer_index if inner is False else RefMap()
    ctx = MergeContext(ctxtag, IndexMap(), inner, IndexMap.from_refmap(outer))
    try:
        yield ctx
        if inner:
            context.inner_ref_outer_index = RefMap.from_indexmap(ctx.index_ref)
    finally:
        vars(ctx).clear()
