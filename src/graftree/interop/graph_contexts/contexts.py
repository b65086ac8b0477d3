"""The older contexts: objects split and merged several times with one numbering.

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

Array refs are shared by 1 and 2, so that what is written inside reaches the caller.
JAX returns no refs, so in 3 others stand for them, and 4 finds or makes the ref:

    NoUpdate()               a ref that exists outside
    ArrayRefOutput(array)    a ref that was made inside
    Repeated()               a ref that an earlier leaf has

New programs don't need them: the transforms do all four steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax

from graftree import _jax
from graftree.core.graph import flattening, functional, merging
from graftree.core.graph.flattening import IndexMap, RefMap
from graftree.core.graph.graphdefs import GraphDef, NodeRef, VariableDef
from graftree.core.states.flat_states import FlatState
from graftree.core.variables import variables
from graftree.core.variables.variables import Variable


@dataclasses.dataclass(frozen=True)
class NoUpdate:
    """Stands for a ref that exists outside; a pytree without leaves."""


NO_UPDATE = NoUpdate()


@dataclasses.dataclass(frozen=True)
class ArrayRefOutput:
    """Stands for a ref that was made inside, and holds its array."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Repeated:
    """Stands for a ref that an earlier leaf has; a pytree without leaves."""


_jax.register_leafless(NoUpdate)
_jax.register_leafless(Repeated)
jax.tree_util.register_dataclass(ArrayRefOutput, ["value"], [])


def _ref_of(definition: Any) -> Any:
    """What the definition of a leaf says of its ref; ``None`` if it has none."""
    is_variable = isinstance(definition, VariableDef)
    return definition.array_refdef if is_variable else definition


class UpdateContext:
    """The numbers that objects have outside and inside, in one `update_context`.

    All instances compare equal, so that one can be a static argument in JAX.

    Example:
        >>> with nnx.update_context("example"):
        ...     nnx.current_update_context("example").tag
        'example'
    """

    def __init__(self, tag: Hashable) -> None:
        self.tag = tag
        self.outer_ref_outer_index: RefMap | None = None
        self.inner_ref_outer_index: RefMap | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UpdateContext)

    def __hash__(self) -> int:
        return hash(UpdateContext)


jax.tree_util.register_static(UpdateContext)


class _Stacks(threading.local):
    def __init__(self) -> None:
        self.of: dict[Hashable, list[UpdateContext]] = {}


_stacks = _Stacks()


def current_update_context(tag: Hashable) -> UpdateContext:
    """The innermost active `update_context` with this tag in this thread.

    Args:
        tag: The tag.

    Raises:
        ValueError: If there is none.

    Example:
        >>> with nnx.update_context("example") as context:
        ...     nnx.current_update_context("example") is context
        True
    """
    stack = _stacks.of.get(tag)
    if not stack:
        raise ValueError(
            f"No update context found for tag {tag!r}: use nnx.update_context({tag!r})."
        )
    return stack[-1]


class update_context:
    """A context, or decorator, in which objects are split and merged again.

    Args:
        tag: By which `split_context` and `merge_context` find it.

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
        _stacks.of.setdefault(self.tag, []).append(context)
        return context

    def __exit__(self, *exception: object) -> None:
        stack = _stacks.of[self.tag]
        stack.pop()
        if not stack:
            del _stacks.of[self.tag]

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorates a function to run in a fresh context."""

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with update_context(self.tag):
                return function(*args, **kwargs)

        return wrapped


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

    def __init__(
        self, ctxtag: Hashable | None, ref_index: RefMap, is_inner: bool | None
    ) -> None:
        self.ctxtag = ctxtag
        self.ref_index = ref_index
        self.is_inner = is_inner
        self.inner_ref_outer_index: RefMap | None = None
        if is_inner:
            context = current_update_context(ctxtag)
            self.inner_ref_outer_index = context.inner_ref_outer_index

    def split(self, node: Any, *filters: Any) -> Any:
        """`nnx.split` in graph mode; objects split before are only referred to."""
        graphdef, flat = self._flatten(node)
        return graphdef, *functional.group_all(graphdef, flat.leaves, filters)

    def flatten(self, node: Any, *filters: Any, with_paths: bool = True) -> Any:
        """Like `split`, but returns FlatStates, or a list of leaves.

        Args:
            node: The object.
            *filters: Filters; every leaf must match one.
            with_paths: ``False`` returns the leaves as a list.

        Raises:
            ValueError: If filters are given without paths.
        """
        if not with_paths:
            if filters:
                raise ValueError("Cannot use filters with with_paths=False.")
            graphdef, flat = self._flatten(node)
            return graphdef, flat.leaves
        graphdef, flat = self._flatten(node)
        if not filters:
            return graphdef, flat
        groups = flat.split(*filters)
        return graphdef, *(groups if isinstance(groups, tuple) else (groups,))

    def _flatten(self, node: Any) -> tuple[GraphDef[Any], FlatState]:
        graphdef, flat = functional.flatten(
            node,
            ref_index=self.ref_index,
            ref_outer_index=self.inner_ref_outer_index,
            graph=True,
        )
        assert isinstance(flat, FlatState), "flatten with paths gives a FlatState"
        if self.inner_ref_outer_index is None:
            return graphdef, flat
        leaves = [
            _stand_in(definition, leaf)
            for (_, definition), leaf in zip(
                graphdef.leaves(), flat.leaves, strict=True
            )
        ]
        return graphdef, FlatState.from_sorted_keys_values(graphdef.paths(), leaves)


def _stand_in(definition: Any, leaf: Any) -> Any:
    """What leaves the trace instead of a leaf."""
    ref = _ref_of(definition)
    if ref is None:
        return leaf
    if isinstance(ref, NodeRef):
        value = Repeated()
    elif ref.outer_index is not None:
        value = NoUpdate()
    else:
        value = ArrayRefOutput(flattening.raw_of(leaf)[...])
    if isinstance(leaf, Variable):
        return variables.rebuild(type(leaf), value, definition.metadata)
    return value


@contextlib.contextmanager
def split_context(ctxtag: Hashable | None = None) -> Iterator[SplitContext]:
    """A context whose splits share one numbering; see the top of this file.

    Args:
        ctxtag: The tag of the `update_context` it belongs to, if any.

    Raises:
        ValueError: If there is no context with that tag.

    Example:
        >>> with nnx.split_context() as ctx:
        ...     graphdef, state = ctx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    """
    context = None if ctxtag is None else current_update_context(ctxtag)
    is_inner = None
    if context is not None:
        is_inner = context.inner_ref_outer_index is not None
    split = SplitContext(ctxtag, RefMap(), is_inner)
    try:
        yield split
        if context is not None and not is_inner:
            context.outer_ref_outer_index = split.ref_index
    finally:
        vars(split).clear()


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

    def __init__(
        self, ctxtag: Hashable | None, index_ref: IndexMap, is_inner: bool | None
    ) -> None:
        self.ctxtag = ctxtag
        self.index_ref = index_ref
        self.is_inner = is_inner
        self.outer_index_outer_ref: IndexMap | None = None
        if is_inner is False:
            refs = current_update_context(ctxtag).outer_ref_outer_index
            self.outer_index_outer_ref = IndexMap.from_refmap(refs or RefMap())

    def merge(self, graphdef: GraphDef[Any], state: Any, /, *states: Any) -> Any:
        """`nnx.merge` with copies of the Variables; known objects are found again.

        A copy of a Variable with a ref has the same ref.
        """
        leaves = self._with_refs(graphdef, merging.match(graphdef, (state, *states)))
        copies = [
            leaf.copy(_copy_ref=False) if isinstance(leaf, Variable) else leaf
            for leaf in leaves
        ]
        return self._unflatten(graphdef, copies)

    def unflatten(
        self, graphdef: GraphDef[Any], flat_state: Any, /, *flat_states: Any
    ) -> Any:
        """Like `merge`, from FlatStates or a list of leaves, without copies.

        Raises:
            ValueError: If a list is given together with other states.
        """
        if isinstance(flat_state, list) and flat_states:
            raise ValueError("Cannot use multiple flat_states with a list of leaves.")
        leaves = merging.match(graphdef, (flat_state, *flat_states))
        return self._unflatten(graphdef, self._with_refs(graphdef, leaves))

    def _with_refs(self, graphdef: GraphDef[Any], leaves: list[Any]) -> list[Any]:
        """The leaves, with refs again where others stood for them."""
        outer = self.outer_index_outer_ref
        if outer is None:
            return leaves
        return [
            leaf if definition is None else self._with_ref(definition, leaf, outer)
            for (_, definition), leaf in zip(graphdef.leaves(), leaves, strict=True)
        ]

    def _with_ref(self, definition: Any, leaf: Any, outer: IndexMap) -> Any:
        value, ref = flattening.raw_of(leaf), _ref_of(definition)
        if isinstance(value, NoUpdate):
            found = outer[ref.outer_index]
        elif isinstance(value, ArrayRefOutput):
            found = jax.new_ref(value.value)
        elif isinstance(value, Repeated):
            found = self.index_ref[ref.index]
        else:
            return leaf
        self.index_ref[ref.index] = found
        return found

    def _unflatten(self, graphdef: GraphDef[Any], leaves: list[Any]) -> Any:
        return functional.unflatten(
            graphdef,
            leaves,
            index_ref=self.index_ref,
            outer_index_outer_ref=self.outer_index_outer_ref,
        )


@contextlib.contextmanager
def merge_context(
    ctxtag: Hashable | None = None, inner: bool | None = None
) -> Iterator[MergeContext]:
    """A context whose merges share one numbering; see the top of this file.

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
    context = None if ctxtag is None else current_update_context(ctxtag)
    if context is not None and inner is None:
        raise ValueError("inner_merge must be specified when using ctxtag.")
    fresh = MergeContext(ctxtag, IndexMap(), None if context is None else inner)
    try:
        yield fresh
        if context is not None and inner:
            context.inner_ref_outer_index = RefMap.from_indexmap(fresh.index_ref)
    finally:
        vars(fresh).clear()
