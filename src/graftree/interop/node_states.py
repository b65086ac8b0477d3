"""Objects as plain pytrees, to take them through a JAX transform by hand.

    to_tree     turns every object in a tree into a `NodeStates`: GraphDef and states
    from_tree   turns them back; objects shared in the tree are shared again

    split_inputs(jax_transform(merge_inputs(f)))     wraps both around any JAX transform

`split_inputs` and `merge_inputs` are the four steps of `graph_contexts.py`: with them
the caller's own objects are updated. New programs don't need any of this: the
transforms of this library use `transforms/lifting`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax

from graftree import config
from graftree.core import paths
from graftree.core.graph import nodes
from graftree.core.graph.graphdefs import GraphDef
from graftree.interop import graph_contexts, older_functions
from graftree.interop.graph_contexts import MergeContext, SplitContext
from graftree.transforms.lifting import argument_errors, decorators
from graftree.transforms.lifting.decorators import MISSING
from graftree.transforms.lifting.prefixes import Prefix

_TAG = "split_merge_inputs"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NodeStates:
    """One object in a tree: its GraphDef and one or several states.

    A pytree whose leaves are those of the states. With axes in the place of states, it
    is a pytree prefix of one.

    Args:
        _graphdef: The GraphDef; ``None`` in prefixes.
        states: The states.
        metadata: Any hashable value that goes with it; static.

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> node = nnx.NodeStates.from_split(*nnx.split(model))
        >>> list(node.state)
        ['bias', 'kernel']
    """

    _graphdef: GraphDef[Any] | None
    states: tuple[Any, ...]
    metadata: Any = dataclasses.field(metadata={"static": True})

    @property
    def graphdef(self) -> GraphDef[Any]:
        """GraphDef of the object.

        Raises:
            ValueError: If there is none.
        """
        if self._graphdef is None:
            raise ValueError(
                "No graphdef available: this NodeStates was made from states or "
                "prefixes alone. Use NodeStates.from_split(graphdef, state)."
            )
        return self._graphdef

    @property
    def state(self) -> Any:
        """State, if there is just one.

        Raises:
            ValueError: If there is not exactly one.
        """
        if len(self.states) != 1:
            raise ValueError(
                f"Expected exactly one state, got {len(self.states)}. "
                "Use `NodeStates.states`."
            )
        return self.states[0]

    @classmethod
    def from_split(
        cls, graphdef: GraphDef[Any], state: Any, /, *states: Any, metadata: Any = None
    ) -> NodeStates:
        """Makes one from the result of ``split``."""
        return cls(graphdef, (state, *states), metadata)

    @classmethod
    def from_states(cls, state: Any, *states: Any) -> NodeStates:
        """Makes one only from states."""
        return cls(None, (state, *states), None)

    @classmethod
    def from_prefixes(
        cls, prefixes: Iterable[Any], /, *, metadata: Any = None
    ) -> NodeStates:
        """Makes the prefix that has one entry per state, such as an axis.

        Args:
            prefixes: The entries.
            metadata: The metadata of the NodeStates that it is a prefix of.
        """
        return cls(None, tuple(prefixes), metadata)

    def replace(self, **changes: Any) -> NodeStates:
        """Returns a copy with some fields changed."""
        return dataclasses.replace(self, **changes)


def _is_node_states(x: Any) -> bool:
    return isinstance(x, NodeStates)


def _split(ctx: SplitContext, path: Any, prefix: Any, leaf: Any) -> NodeStates:
    return NodeStates.from_split(*ctx.split(leaf))


def _merge(ctx: MergeContext, path: Any, prefix: Any, leaf: Any) -> Any:
    if not isinstance(leaf, NodeStates):
        raise ValueError(
            f"from_tree expected NodeStates, got {type(leaf).__name__} at path "
            f"{paths.keystr(path) or '()'}. Pass a merge_fn that takes it."
        )
    return ctx.merge(leaf.graphdef, *leaf.states)


def to_tree(
    tree: Any,
    /,
    *,
    prefix: Any = MISSING,
    split_fn: Callable[[SplitContext, Any, Any, Any], Any] = _split,
    map_non_graph_nodes: bool = False,
    ctxtag: Hashable | None = None,
    check_aliasing: bool = True,
) -> Any:
    """Replaces every object in a tree, Variables and refs included, by a `NodeStates`.

    All are split with one numbering: a repeated object has an empty state.
    Nothing is copied; other leaves stay as they are.

    Args:
        tree: Any pytree with objects in it.
        prefix: A pytree prefix of ``tree`` for ``split_fn``; objects count as leaves.
            ``None`` means no prefix.
        split_fn: ``(ctx, path, prefix, leaf) -> replacement``. The path is JAX's, and
            ``()`` without a prefix.
        map_non_graph_nodes: Whether to call ``split_fn`` for all other leaves too.
        ctxtag: The tag of the `update_context` to work in, if any.
        check_aliasing: Whether to refuse a Variable with two different prefixes.

    Returns:
        The new tree.

    Raises:
        ValueError: If a Variable has two different prefixes, the prefix doesn't fit, or
            there is no context with that tag.

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> first, again, one = nnx.to_tree((model, model, 1))
        >>> list(first.state), list(again.state), one
        (['bias', 'kernel'], [], 1)
    """
    if check_aliasing and _is_given(prefix):
        check_consistent_aliasing(tree, prefix)
    with graph_contexts.split_context(ctxtag) as ctx:

        def replace(path: Any, value: Any, leaf: Any) -> Any:
            is_chosen = map_non_graph_nodes or nodes.is_graph_node(leaf)
            return split_fn(ctx, path, value, leaf) if is_chosen else leaf

        return _map(replace, tree, prefix, nodes.is_graph_node)


def from_tree(
    tree: Any,
    /,
    *,
    prefix: Any = MISSING,
    merge_fn: Callable[[MergeContext, Any, Any, Any], Any] = _merge,
    is_node_leaf: Callable[[Any], bool] = _is_node_states,
    is_leaf: Callable[[Any], bool] = _is_node_states,
    map_non_graph_nodes: bool = False,
    is_inner: bool | None = None,
    ctxtag: Hashable | None = None,
) -> Any:
    """Makes new objects, shared as they were: the inverse of `to_tree`.

    Refs stay the same refs. In an `update_context` the outer call returns the caller's
    own objects, updated.

    Args:
        tree: The result of `to_tree`.
        prefix: A pytree prefix of ``tree`` for ``merge_fn``; see `to_tree`.
        merge_fn: ``(ctx, path, prefix, leaf) -> replacement``; see `to_tree`.
        is_node_leaf: Which leaves to call ``merge_fn`` for.
        is_leaf: Which values count as leaves besides the leaves of JAX.
        map_non_graph_nodes: Whether to call ``merge_fn`` for all leaves.
        is_inner: With a tag, whether this is inside the JAX transform.
        ctxtag: The tag of the `update_context` to work in, if any.

    Returns:
        The new tree.

    Raises:
        ValueError: If the prefix doesn't fit, there is no context with that tag, or
            ``is_inner`` is missing.

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> a, b = nnx.from_tree(nnx.to_tree((model, model)))
        >>> a is b, a is model
        (True, False)
    """
    with graph_contexts.merge_context(ctxtag, is_inner) as ctx:

        def replace(path: Any, value: Any, leaf: Any) -> Any:
            is_chosen = map_non_graph_nodes or is_node_leaf(leaf)
            return merge_fn(ctx, path, value, leaf) if is_chosen else leaf

        return _map(replace, tree, prefix, is_leaf)


def _map(
    replace: Callable[[Any, Any, Any], Any],
    tree: Any,
    prefix: Any,
    is_leaf: Callable[[Any], bool],
) -> Any:
    """Replaces each leaf of a tree by ``replace(path, prefix, leaf)``."""
    if not _is_given(prefix):
        return jax.tree.map(lambda x: replace((), prefix, x), tree, is_leaf=is_leaf)
    return older_functions.broadcast_prefix_map(
        replace,
        prefix,
        tree,
        is_leaf=is_leaf,
        prefix_leaf=lambda x: x is None or is_leaf(x),
    )


def _is_given(prefix: Any) -> bool:
    return prefix is not MISSING and prefix is not None


def check_consistent_aliasing(
    node: Any,
    prefix: Any,
    /,
    *,
    node_prefixes: dict[int, list[tuple[Any, Any, Any]]] | None = None,
) -> None:
    """Refuses a Variable that occurs with different prefixes.

    Args:
        node: An object, or a tree of objects.
        prefix: A pytree prefix of it.
        node_prefixes: The findings of earlier calls, checked with this one; is filled.

    Raises:
        ValueError: If there is such a Variable; names its type, the paths and the
            prefixes.
    """
    occurrences = {} if node_prefixes is None else node_prefixes
    checked = Prefix(prefix, "prefix", "to_tree", config.GRAPH_UPDATES)
    for occurrence in checked.occurrences(node, True):
        occurrences.setdefault(id(occurrence[1]), []).append(occurrence)
    argument_errors.check_consistent("to_tree", itertools.chain(*occurrences.values()))


def clear_non_graph_nodes(tree: Any) -> Any:
    """Puts ``None`` in the place of every leaf that is not an object."""
    is_node = nodes.is_graph_node
    return jax.tree.map(lambda x: x if is_node(x) else None, tree, is_leaf=is_node)


def split_inputs(f: Any = MISSING, *, ctxtag: Hashable = _TAG) -> Any:
    """Adds the outer half of a transform over objects; see `merge_inputs`.

    Args:
        f: A JAX transform of a function made by `merge_inputs`, or one that takes such
            functions as arguments. It returns ``(arguments, output)``.
        ctxtag: The tag of the pair.

    Returns:
        A function that takes objects by position, updates them in place and returns
        the output; or a decorator if ``f`` is not given. If ``f`` raises, nothing is
        updated.

    Raises:
        TypeError: When called, if ``f`` does not return a pair.

    Example:
        >>> from graftree.transforms.general import merge_inputs, split_inputs
        >>> @split_inputs
        ... @jax.jit
        ... @merge_inputs
        ... def add_one(model):
        ...     model.count[...] += 1
        >>> model = nnx.Dict(count=nnx.Variable(jnp.array(0)))
        >>> add_one(model)
        >>> int(model.count[...])
        1
    """
    if f is MISSING:
        return functools.partial(split_inputs, ctxtag=ctxtag)

    @decorators.wraps(f)
    def split_call(*args: Any) -> Any:
        with graph_contexts.update_context(ctxtag):
            returned = f(*to_tree(args, ctxtag=ctxtag))
            if not isinstance(returned, (tuple, list)) or len(returned) != 2:
                raise TypeError(
                    "split_inputs needs a function that returns the pair "
                    f"(arguments, output), got {type(returned).__name__}.\n"
                    "Wrap the innermost function with merge_inputs."
                )
            _, out = from_tree(returned, ctxtag=ctxtag, is_inner=False)
            return out

    return split_call


def merge_inputs(f: Any = MISSING, *, ctxtag: Hashable = _TAG) -> Any:
    """Adds the inner half: ``split_inputs(jax_transform(merge_inputs(f)))``.

    This lifts any JAX transform that leaves the form of the output free (not ``grad``
    or ``scan``). The transform sees ``(arguments, output)``, with ``None`` for each
    argument that is not an object; so for ``jax.vmap`` pass
    ``out_axes=(in_axes, out_axes)``. For ``jax.lax.cond`` wrap each branch with
    `merge_inputs` and ``cond`` itself with `split_inputs`.

    Args:
        f: A function that takes objects by position.
        ctxtag: The tag of the pair.

    Returns:
        A function that takes the arguments as `to_tree` converts them; or a decorator
        if ``f`` is not given.

    Raises:
        ValueError: When called outside of a `split_inputs` with the same tag.

    Example:
        >>> from graftree.transforms.general import merge_inputs, split_inputs
        >>> axes = (0, None)
        >>> def scale(model, x):
        ...     return model.w * x
        >>> scaled = jax.vmap(merge_inputs(scale), in_axes=axes, out_axes=(axes, 0))
        >>> model = nnx.Dict(w=nnx.Param(jnp.arange(3.0)))
        >>> split_inputs(scaled)(model, 2.0)
        Array([0., 2., 4.], dtype=float32)
    """
    if f is MISSING:
        return functools.partial(merge_inputs, ctxtag=ctxtag)

    @decorators.wraps(f)
    def merge_call(*trees: Any) -> Any:
        args = from_tree(trees, ctxtag=ctxtag, is_inner=True)
        out = f(*args)
        return to_tree((clear_non_graph_nodes(args), out), ctxtag=ctxtag)

    return merge_call
