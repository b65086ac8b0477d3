"""Functions of earlier releases of Flax NNX, and small ones of its files.

Today they are one call, or none: older modes of a model, numbers that identify things
(``nnx.ids``), helpers for aliases and prefixes, the registries of types. `deprecated`
wraps a function that now has another name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast

import jax

from graftree.annotations import Filter
from graftree.core.graph import nodes, updates
from graftree.core.modules import modules
from graftree.core.objects.pytrees import Pytree
from graftree.core.states.states import State
from graftree.core.variables import variables
from graftree.nn import conv
from graftree.transforms.lifting import argument_errors

F = TypeVar("F", bound=Callable[..., Any])


def deprecated(new_fn: F) -> F:
    """Wraps a function for use under an older name.

    Args:
        new_fn: The function to call instead.

    Returns:
        A function with the name, signature and docstring of ``new_fn``, which it calls
        after a ``DeprecationWarning`` at the line of the caller.

    Example:
        >>> import warnings
        >>> old_split = nnx.deprecations.deprecated(nnx.split)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     graphdef, state = old_split(nnx.Param(1))
        >>> print(caught[0].message)
        This function is deprecated. Use split instead.
    """
    name = new_fn.__qualname__

    @functools.wraps(new_fn)
    def older(*args: Any, **kwargs: Any) -> Any:
        warnings.warn(
            f"This function is deprecated. Use {name} instead.",
            DeprecationWarning,
            stacklevel=2,
        )
        return new_fn(*args, **kwargs)

    note = f".. deprecated::\n   Use :func:`{name}` instead."
    older.__doc__ = f"{note}\n\n{inspect.getdoc(new_fn) or ''}".rstrip()
    return cast(F, older)


A = TypeVar("A")


def train_mode(node: A, /, *, only: Filter = ..., **kwargs: Any) -> A:
    """Makes a view of a model for training; today: ``nnx.view``.

    Args:
        node: The model; it stays as it is.
        only: Which of its modules to change.
        **kwargs: More attributes to set.

    Returns:
        A view with ``deterministic=False`` and ``use_running_average=False`` where
        modules have them.

    Example:
        >>> model = nnx.Dropout(0.5, deterministic=True)
        >>> nnx.train_mode(model).deterministic, model.deterministic
        (False, True)
    """
    return _view(node, only, False, kwargs)


def eval_mode(node: A, /, *, only: Filter = ..., **kwargs: Any) -> A:
    """Makes a view of a model for evaluation; today: ``nnx.view``.

    Args:
        node: The model; it stays as it is.
        only: Which of its modules to change.
        **kwargs: More attributes to set.

    Returns:
        A view with ``deterministic=True`` and ``use_running_average=True`` where
        modules have them.

    Example:
        >>> nnx.eval_mode(nnx.Dropout(0.5)).deterministic
        True
    """
    return _view(node, only, True, kwargs)


def _view(node: A, only: Filter, evaluates: bool, attributes: dict[str, Any]) -> A:
    preset = {"deterministic": evaluates, "use_running_average": evaluates}
    return modules.view(
        node, only=only, raise_if_not_found=False, **preset | attributes
    )


def graph_pop(node: Any, filters: tuple[Filter, ...]) -> tuple[State, ...]:
    """Takes Variables out of an object; today: ``nnx.pop``.

    Args:
        node: The object, which loses them.
        filters: Which ones.

    Returns:
        A State for each filter.

    Example:
        >>> model = nnx.Dict(a=nnx.Param(1), b=nnx.Cache(2))
        >>> (caches,) = nnx.graphlib.graph_pop(model, (nnx.Cache,))
        >>> sorted(caches), hasattr(model, "b")
        (['b'], False)
    """
    # With one filter there is no tuple around its State.
    popped: Any = updates.pop(node, *filters)
    return (popped,) if len(filters) == 1 else popped


def conv_dimension_numbers(input_shape: Sequence[int]) -> jax.lax.ConvDimensionNumbers:
    """Returns where batch, channels and spatial axes are in a convolution.

    Args:
        input_shape: ``[batch, *spatial, channels]``.

    Example:
        >>> nnx.nn.linear._conv_dimension_numbers((1, 8, 8, 3)).rhs_spec
        (3, 2, 0, 1)
    """
    return conv.channels_last(len(input_shape) - 2)


@contextlib.contextmanager
def static_cache(cache: Any) -> Iterator[None]:
    """Does nothing: skeletons are cached without being asked for.

    Example:
        >>> with nnx.graphlib.static_cache({}):
        ...     graphdef = nnx.graphdef(nnx.Param(1))
    """
    yield


with_sharding_constraint = jax.lax.with_sharding_constraint


# next() on it is one step of the interpreter, so no two threads get the same number.
_numbers = itertools.count(1)


@dataclasses.dataclass(frozen=True, slots=True)
class UUID:
    """A number as a name: hashable, equal if the numbers are.

    Args:
        id: The number.

    Example:
        >>> from graftree import ids
        >>> UUID(3), UUID(3) == UUID(4)
        (UUID(3), False)
    """

    id: int

    def __repr__(self) -> str:
        return f"UUID({self.id})"

    def __copy__(self) -> UUID:
        return uuid()

    def __deepcopy__(self, memo: dict[int, Any]) -> UUID:
        return uuid()


def uuid() -> UUID:
    """Returns a number that nothing else in this process has.

    Returns:
        A new `UUID` with a higher number than all before.

    Example:
        >>> from graftree import ids
        >>> first, second = uuid(), uuid()
        >>> first.id < second.id
        True
    """
    return UUID(next(_numbers))


class HasTag(Protocol):
    """An object with a ``tag``, such as a Variable with that metadata.

    Example:
        >>> def name(x: nnx.filterlib.HasTag) -> str:
        ...     return x.tag
        >>> name(nnx.Param(1, tag="x"))
        'x'
    """

    tag: str


def check_no_aliases(
    fn_name: str, /, *, check: Iterable[str] = (), **kwargs: Any
) -> dict[tuple[Any, ...], variables.Variable[Any]]:
    """Lists the Variables in trees, and refuses any that occur twice.

    Args:
        fn_name: The transform that the message names.
        check: Is ignored: all are checked.
        **kwargs: The trees by name.

    Returns:
        The Variables by their paths.

    Raises:
        ValueError: If a Variable occurs twice; names both paths.

    Example:
        >>> v = nnx.Param(1)
        >>> len(nnx.extract.check_no_aliases("f", a=v, b=[nnx.Param(2)]))
        2
        >>> nnx.extract.check_no_aliases("f", a=v, b=[v])
        Traceback (most recent call last):
        ValueError: Duplicate Param...
    """
    argument_errors.check_none_twice(kwargs, fn_name)
    flat = jax.tree.leaves_with_path(kwargs, is_leaf=variables.is_variable)
    return {
        (jax.tree_util.GetAttrKey(path[0].key), *path[1:]): leaf
        for path, leaf in flat
        if variables.is_variable(leaf)
    }


def broadcast_prefix(
    prefix_tree: Any,
    full_tree: Any,
    prefix_is_leaf: Callable[[Any], bool] | None = None,
    tree_is_leaf: Callable[[Any], bool] | None = None,
) -> list[Any]:
    """Lists, for each leaf of a tree, the leaf of a prefix above it.

    Args:
        prefix_tree: A tree prefix of ``full_tree``.
        full_tree: The tree.
        prefix_is_leaf: Which values are leaves of the prefix, besides JAX's leaves.
        tree_is_leaf: Which values are leaves of the tree.

    Raises:
        ValueError: If it is not a prefix.

    Example:
        >>> nnx.extract.broadcast_prefix((0, 1), ({"a": 5, "b": 6}, 7))
        [0, 0, 1]
    """
    prefix_leaves: list[Any] = []

    def repeat(leaf: Any, subtree: Any) -> None:
        count = jax.tree.structure(subtree, is_leaf=tree_is_leaf).num_leaves
        prefix_leaves.extend([leaf] * count)

    jax.tree.map(repeat, prefix_tree, full_tree, is_leaf=prefix_is_leaf)
    return prefix_leaves


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
        is_leaf: Which values are leaves of the tree.
        prefix_leaf: Which values are leaves of the prefix.

    Returns:
        A tree like ``full_tree`` with the results of ``f``.

    Raises:
        ValueError: If it is not a prefix, or a tree has another structure.

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


def variable_changed(
    post: variables.Variable[Any], pre: variables.Variable[Any]
) -> bool:
    """Whether a Variable holds another value, or has other metadata, than before.

    Example:
        >>> v = nnx.Param(jnp.ones(1))
        >>> nnx.extract.variable_changed(v, v.copy())
        False
    """
    old_metadata, new_metadata = variables.metadata_of(pre), variables.metadata_of(post)
    return (
        post.get_raw_value() is not pre.get_raw_value() or old_metadata != new_metadata
    )


def filter_kwargs(f: Callable[..., Any], **kwargs: Any) -> dict[str, Any]:
    """Returns the keyword arguments that a function takes.

    Example:
        >>> nnx.extract.filter_kwargs(lambda a: a, a=1, b=2)
        {'a': 1}
    """
    parameters = inspect.signature(f).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return kwargs
    return {name: value for name, value in kwargs.items() if name in parameters}


class Registry(Mapping[type, nodes.GraphKind | nodes.TreeKind]):
    """Maps the types whose instances are nodes of one sort to how these are handled.

    It shows the types registered by `register_graph_node_type`,
    `register_pytree_node_type` and class statements, and can't be written.

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
        self,
        sort: type[nodes.GraphKind] | type[nodes.TreeKind],
        builtin_types: Sequence[type],
    ) -> None:
        self._sort, self._builtin_types = sort, builtin_types

    def __getitem__(self, kind: type) -> nodes.GraphKind | nodes.TreeKind:
        node_kind = nodes.KINDS[kind]
        if isinstance(node_kind, self._sort):
            return node_kind
        raise KeyError(kind)

    def __iter__(self) -> Iterator[type]:
        pending = [*self._builtin_types, *nodes.registered_types()]
        visited = set[type]()
        while pending:
            kind = pending.pop(0)
            if kind not in visited and kind in self:
                visited.add(kind)
                pending += type.__subclasses__(kind)
                yield kind

    def __len__(self) -> int:
        return sum(1 for _ in self)


GRAPH_REGISTRY = Registry(nodes.GraphKind, [Pytree])
PYTREE_REGISTRY = Registry(nodes.TreeKind, [list, tuple, dict, State])
