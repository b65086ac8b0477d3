"""Helpers in the files of Flax NNX: about aliases and prefixes, registries of types."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax

from graftree.core.graph import nodes
from graftree.core.graph.nodes import GraphKind, TreeKind
from graftree.core.objects.pytrees import Pytree
from graftree.core.states.states import State
from graftree.core.variables import variables
from graftree.core.variables.variables import Variable
from graftree.transforms.crossing import reports


class HasTag(Protocol):
    """Something with a ``tag``, as a Variable with that metadata.

    Example:
        >>> def name(x: nnx.filterlib.HasTag) -> str:
        ...     return x.tag
        >>> name(nnx.Param(1, tag="x"))
        'x'
    """

    tag: str


def check_no_aliases(
    fn_name: str, /, *, check: Iterable[str] = (), **kwargs: Any
) -> dict[tuple[Any, ...], Variable[Any]]:
    """Lists the Variables in trees, and refuses those that are there twice.

    Args:
        fn_name: The transform that the message names.
        check: Is ignored: all are checked.
        **kwargs: The trees by name.

    Returns:
        The Variables by their paths.

    Raises:
        ValueError: If a Variable is there twice; names both paths.

    Example:
        >>> v = nnx.Param(1)
        >>> len(nnx.extract.check_no_aliases("f", a=v, b=[nnx.Param(2)]))
        2
        >>> nnx.extract.check_no_aliases("f", a=v, b=[v])
        Traceback (most recent call last):
        ValueError: Duplicate Param...
    """
    reports.check_none_twice(kwargs, fn_name)
    flat, _ = jax.tree_util.tree_flatten_with_path(kwargs, is_leaf=_is_variable)
    return {
        (jax.tree_util.GetAttrKey(path[0].key), *path[1:]): leaf
        for path, leaf in flat
        if _is_variable(leaf)
    }


def _is_variable(x: Any) -> bool:
    return isinstance(x, Variable)


def broadcast_prefix(
    prefix_tree: Any,
    full_tree: Any,
    prefix_is_leaf: Callable[[Any], bool] | None = None,
    tree_is_leaf: Callable[[Any], bool] | None = None,
) -> list[Any]:
    """Gives for each leaf of a tree the leaf of a prefix above it.

    Args:
        prefix_tree: A tree prefix of ``full_tree``.
        full_tree: The tree.
        prefix_is_leaf: What is a leaf of the prefix, besides JAX's leaves.
        tree_is_leaf: What is a leaf of the tree.

    Raises:
        ValueError: If it is not a prefix.

    Example:
        >>> nnx.extract.broadcast_prefix((0, 1), ({"a": 5, "b": 6}, 7))
        [0, 0, 1]
    """
    found: list[Any] = []

    def repeat(leaf: Any, below: Any) -> None:
        count = jax.tree.structure(below, is_leaf=tree_is_leaf).num_leaves
        found.extend([leaf] * count)

    jax.tree.map(repeat, prefix_tree, full_tree, is_leaf=prefix_is_leaf)
    return found


def broadcast_prefix_map(
    f: Callable[..., Any],
    prefix_tree: Any,
    full_tree: Any,
    *rest: Any,
    is_leaf: Callable[[Any], bool] | None = None,
    prefix_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """Maps a function over the leaves of trees and of a prefix of them.

    Args:
        f: Called with the path, the leaf of the prefix, and a leaf of each tree.
        prefix_tree: A tree prefix of ``full_tree``.
        full_tree: The tree.
        *rest: More trees like it.
        is_leaf: What is a leaf of the tree.
        prefix_leaf: What is a leaf of the prefix.

    Returns:
        A tree like ``full_tree`` of what ``f`` returned.

    Raises:
        ValueError: If it is not a prefix, or a tree is another one.

    Example:
        >>> nnx.extract.broadcast_prefix_map(
        ...     lambda path, axis, x: (axis, x), (0, 1), ({"a": 5}, 7)
        ... )
        ({'a': (0, 5)}, (1, 7))
    """
    prefixes = broadcast_prefix(prefix_tree, full_tree, prefix_leaf, is_leaf)
    flat, treedef = jax.tree_util.tree_flatten_with_path(full_tree, is_leaf=is_leaf)
    others = [treedef.flatten_up_to(tree) for tree in rest]
    paths, leaves = [path for path, _ in flat], [leaf for _, leaf in flat]
    return treedef.unflatten(map(f, paths, prefixes, leaves, *others))


def variable_changed(post: Variable[Any], pre: Variable[Any]) -> bool:
    """Whether a Variable holds another value, or has other metadata, than before.

    Example:
        >>> v = nnx.Param(jnp.ones(1))
        >>> nnx.extract.variable_changed(v, v.copy())
        False
    """
    before, now = variables.metadata_of(pre), variables.metadata_of(post)
    return post.get_raw_value() is not pre.get_raw_value() or before != now


def filter_kwargs(f: Callable[..., Any], **kwargs: Any) -> dict[str, Any]:
    """The keyword arguments that a function takes.

    Example:
        >>> nnx.extract.filter_kwargs(lambda a: a, a=1, b=2)
        {'a': 1}
    """
    parameters = inspect.signature(f).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return kwargs
    return {name: value for name, value in kwargs.items() if name in parameters}


class Registry(Mapping[type, GraphKind | TreeKind]):
    """The types whose instances are nodes of one sort, with how they are taken apart.

    It shows what `register_graph_node_type`, `register_pytree_node_type` and class
    statements have registered, and can't be written.

    Args:
        sort: `GraphKind` or `TreeKind`.
        known: Types that need no registration; types below them are of the same sort.

    Example:
        >>> nnx.Linear in nnx.graphlib.GRAPH_REGISTRY
        True
        >>> dict in nnx.graphlib.PYTREE_REGISTRY
        True
    """

    def __init__(
        self, sort: type[GraphKind] | type[TreeKind], known: Sequence[type]
    ) -> None:
        self._sort, self._known = sort, known

    def __getitem__(self, kind: type) -> GraphKind | TreeKind:
        found = nodes.kind_of_type(kind)
        if isinstance(found, self._sort):
            return found
        raise KeyError(kind)

    def __iter__(self) -> Iterator[type]:
        pending, seen = [*self._known, *nodes.registered_types()], set[type]()
        while pending:
            kind = pending.pop(0)
            if kind not in seen and kind in self:
                seen.add(kind)
                pending += type.__subclasses__(kind)
                yield kind

    def __len__(self) -> int:
        return sum(1 for _ in self)


GRAPH_TYPES = Registry(GraphKind, [Pytree])
TREE_TYPES = Registry(TreeKind, [list, tuple, dict, State])


GRAPH_REGISTRY = Registry(GraphKind, [Pytree])
PYTREE_REGISTRY = Registry(TreeKind, [list, tuple, dict, State])
