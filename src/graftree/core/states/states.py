"""State: the leaves of an object in nested mappings, without its structure.

A State wraps plain nested dicts: reading a sub-mapping gives a view of the inner dict,
so writes go through, and storing a State stores its dict. Leaves are passed on as they
are, so the Variables in the state of an object are the object's own. Listings and JAX
follow the order of `paths.sort_key`. The functions of this file take any mapping where
they take a State; their results have no empty sub-mappings.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from typing import Any, TypeVar

import jax

from graftree.annotations import Filter, Key, Path
from graftree.core import hooks, paths
from graftree.core.states import flat_states
from graftree.core.states.pure_dicts import replace_by_pure_dict, to_pure_dict
from graftree.core.text import descriptions, representations

K = TypeVar("K")
V = TypeVar("V")
S = TypeVar("S", bound="State")
N = TypeVar("N", bound=Mapping)


def _deprecated(method: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a method warn and name the function that its docstring refers to."""

    @functools.wraps(method)
    def warning(*args: Any, **kwargs: Any) -> Any:
        function = str(method.__doc__).split("`")[1]
        warnings.warn(
            f"State.{method.__name__} is deprecated, because plain dicts will replace "
            f"State: use {function} instead.",
            DeprecationWarning,
            # This line, so that Python shows it only to users who enable warnings:
            # programs that run without warnings elsewhere stay silent here.
            stacklevel=1,
        )
        return method(*args, **kwargs)

    return warning


class State(MutableMapping[K, V], representations.Representable):
    """A nested mapping of leaves, with access by item and by attribute.

    A JAX pytree whose children are sorted by key. Subclasses are registered too;
    reading a sub-mapping of one returns an instance of it.

    Args:
        mapping: A mapping or an iterable of pairs. Sub-mappings are shared, not copied.
        _copy: Whether to copy the top level; False wraps the very dict given.

    Raises:
        ValueError: If ``_copy=False`` and ``mapping`` is not a dict.

    Example:
        >>> state = nnx.State({"linear": {"bias": 1}})
        >>> state.linear.bias = 2
        >>> state["linear"]["bias"]
        2
    """

    __slots__ = ("__weakref__", "_mapping")

    def __init__(
        self,
        mapping: Mapping[K, Any] | Iterable[tuple[K, Any]],
        /,
        *,
        _copy: bool = True,
    ):
        if _copy:
            if isinstance(mapping, Mapping):
                mapping = flat_states.raw_mapping(mapping)
            mapping = {key: _unwrapped(value) for key, value in dict(mapping).items()}
        elif not isinstance(mapping, dict):
            raise ValueError(
                "Expected a dictionary when `_copy=False`, got "
                f"{type(mapping).__name__} instead."
            )
        _set_mapping(self, mapping)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _register(cls)

    @property
    def raw_mapping(self) -> dict[K, Any]:
        """Wrapped nested dicts: no copy."""
        return self._mapping

    def __getitem__(self, key: K) -> Any:
        value = self._mapping[key]
        return _view(type(self), value) if isinstance(value, dict) else value

    def __setitem__(self, key: K, value: Any) -> None:
        self._mapping[key] = _unwrapped(value)

    def __delitem__(self, key: K) -> None:
        del self._mapping[key]

    def __contains__(self, key: object) -> bool:
        return key in self._mapping

    def __iter__(self) -> Iterator[K]:
        return iter(self._mapping)

    def __len__(self) -> int:
        return len(self._mapping)

    def __getattr__(self: State[Any, V], name: str) -> Any:
        if name == "_mapping":  # asked for before __init__: not by way of itself
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"No attribute '{name}' in State") from None

    def __setattr__(self: State[Any, V], name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        if name not in self._mapping:
            raise AttributeError(f"No attribute '{name}' in State")
        del self._mapping[name]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, State):
            return self._mapping == other._mapping
        return self._mapping == other if isinstance(other, dict) else NotImplemented

    def __or__(self: S, other: Mapping) -> S:
        if not isinstance(other, Mapping):
            return NotImplemented
        return merge_state(self, other, cls=type(self)) if other else self

    def __ror__(self: S, other: Mapping) -> S:
        if not isinstance(other, Mapping):
            return NotImplemented
        return merge_state(type(self)(other), self, cls=type(self))

    def __reduce__(self) -> Any:
        return type(self), (self._mapping,)

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Takes over the nested dicts in a pickle of Flax NNX."""
        _set_mapping(self, state["_mapping"])

    def __nnx_repr__(self) -> Iterable[descriptions.Item]:
        """Yields one entry per item; sub-mappings stand without a class name."""
        return _items_repr(type(self), self._mapping, "({", "})")

    def __dir__(self) -> list[str]:
        keys = [key for key in self._mapping if isinstance(key, str)]
        return representations.names_of_object(self, keys)

    # The methods of older programs.

    @_deprecated
    def map(self, f: Callable[[Path, V], Any]) -> State:
        """Older form of `nnx.map_state`."""
        return map_state(f, self)

    @_deprecated
    def flat_state(self) -> flat_states.FlatState[V]:
        """Older form of `nnx.to_flat_state`."""
        return to_flat_state(self)

    @classmethod
    @_deprecated
    def from_flat_path(cls, flat_state: Any, /) -> State:
        """Older form of `nnx.from_flat_state`."""
        return from_flat_state(flat_state, cls=cls)

    @_deprecated
    def to_pure_dict(
        self, extract_fn: Callable[[Any], Any] | None = None
    ) -> dict[Key, Any]:
        """Older form of `nnx.to_pure_dict`."""
        return to_pure_dict(self, extract_fn)

    @_deprecated
    def replace_by_pure_dict(
        self, pure_dict: Mapping, replace_fn: Callable[[Any, Any], Any] | None = None
    ) -> None:
        """Older form of `nnx.replace_by_pure_dict`."""
        replace_by_pure_dict(self, pure_dict, replace_fn)

    @_deprecated
    def split(self, first: Filter, /, *filters: Filter) -> Any:
        """Older form of `nnx.split_state`."""
        return split_state(self, first, *filters)

    @_deprecated
    def filter(self, first: Filter, /, *filters: Filter) -> Any:
        """Older form of `nnx.filter_state`."""
        return filter_state(self, first, *filters)

    @staticmethod
    @_deprecated
    def merge(state: Mapping, /, *states: Mapping) -> State:
        """Older form of `nnx.merge_state`."""
        return merge_state(state, *states)

    @_deprecated
    def __sub__(self, other: Mapping) -> State:
        """Older form of `nnx.statelib.diff`."""
        return diff(self, other)


_set_mapping = State._mapping.__set__


def _unwrapped(value: Any) -> Any:
    return value._mapping if isinstance(value, State) else value


def _view(cls: type[S], mapping: dict) -> S:
    """Makes a State over a dict, without the checks of the constructor."""
    state = cls.__new__(cls)
    _set_mapping(state, mapping)
    return state


def _items_repr(
    name: str | type, mapping: Mapping, start: str, end: str
) -> Iterator[descriptions.Item]:
    shown = {
        key: _NestedRepr(value) if isinstance(value, (dict, State)) else value
        for key, value in mapping.items()
    }
    return representations.mapping_items(name, shown, start, end)


class _NestedRepr(representations.Representable):
    """A sub-mapping of a State in its text."""

    def __init__(self, mapping: Mapping):
        self._mapping = flat_states.raw_mapping(mapping)

    def __nnx_repr__(self) -> Iterable[descriptions.Item]:
        return _items_repr("", self._mapping, "{", "}")


# ----------------------------------------------------------------- State as a pytree


def _register(cls: type[State]) -> None:
    jax.tree_util.register_pytree_with_keys(
        cls, _with_entries, functools.partial(_unflatten, cls), _children
    )
    hooks.class_defined.call(cls)


def _unflatten(cls: type[S], keys: tuple[Key, ...], children: Iterable[Any]) -> S:
    pairs = zip(keys, children, strict=True)
    return _view(cls, {key: _unwrapped(c) if type(c) is cls else c for key, c in pairs})


class Level(dict[Any, Any]):
    """A sub-mapping of a State as JAX sees it, if not all of its keys are strings.

    JAX sorts no keys of different types, and writes only strings into the file of an
    exported function. Dicts with strings are left to it, which is much faster.

    Attributes:
        raw_mapping: The sub-mapping itself; this one is a copy.
    """

    __slots__ = ("raw_mapping",)

    def __init__(self, raw_mapping: dict[Any, Any]) -> None:
        super().__init__(raw_mapping)
        self.raw_mapping = raw_mapping


def _children(node: Any) -> tuple[list[Any], tuple[Key, ...]]:
    mapping = node if type(node) is Level else node._mapping
    keys = tuple(paths.sorted_keys(mapping))
    children = [mapping[key] for key in keys]
    return [_as_node(x) if isinstance(x, dict) else x for x in children], keys


def _as_node(value: dict[Any, Any]) -> dict[Any, Any]:
    """Returns a sub-mapping with a `Level` for each one in it that needs it."""
    if type(value) is not dict:
        return Level(value)
    levels: dict[Any, Any] = {}
    for key, child in value.items():
        if type(key) is not str:
            return Level(value)
        if isinstance(child, dict) and (node := _as_node(child)) is not child:
            levels[key] = node
    return {**value, **levels} if levels else value


def _with_entries(node: Any) -> Any:
    children, keys = _children(node)
    entries = map(jax.tree_util.DictKey, keys)
    return list(zip(entries, children, strict=True)), keys


jax.tree_util.register_pytree_with_keys(
    Level,
    _with_entries,
    lambda keys, children: dict(zip(keys, children, strict=True)),
    _children,
)
_register(State)
hooks.nested_state.fill(functools.partial(_view, State))


class Containers:
    """Containers of a tree, in which each State stands for its dicts.

    JAX takes these apart and builds them in C, but a State in Python.

    Args:
        tree: The tree.
        is_leaf: Whether a value in it is a leaf that JAX would take apart.
        content_of: What JAX takes apart instead of another value; ``None``: the value.

    Raises:
        ValueError: If there are keys that only a State can sort.
    """

    def __init__(
        self,
        tree: Any,
        is_leaf: Callable[[Any], bool],
        content_of: Callable[[Any], Any] = lambda _: None,
    ) -> None:
        self._content_of = content_of
        members, self._treedef = jax.tree.flatten(
            tree,
            is_leaf=lambda x: (
                type(x) is State or content_of(x) is not None or is_leaf(x)
            ),
        )
        contents = [x._mapping if type(x) is State else content_of(x) for x in members]
        self._treedefs_by_index = [
            (index, jax.tree.structure(content, is_leaf=is_leaf))
            for index, content in enumerate(contents)
            if content is not None
        ]

    def leaves(self, tree: Any) -> list[Any] | None:
        """Returns the leaves of another tree; ``None`` if its containers differ."""
        try:
            leaves = self._treedef.flatten_up_to(tree)
            for index, treedef in reversed(self._treedefs_by_index):
                x = leaves[index]
                content = x._mapping if type(x) is State else self._content_of(x)
                if content is None:
                    return None
                leaves[index : index + 1] = treedef.flatten_up_to(content)
        except ValueError:
            return None
        return leaves

    def tree(self, leaves: Iterable[Any]) -> Any:
        """Builds a new tree of leaves, if only States stand for other containers."""
        members = [*leaves]
        for index, treedef in self._treedefs_by_index:
            stop = index + treedef.num_leaves
            mapping = treedef.unflatten(members[index:stop])
            members[index:stop] = [_view(State, mapping)]
        return self._treedef.unflatten(members)


def builder(treedef: Any) -> Callable[[Sequence[Any]], Any]:
    """``treedef.unflatten``, or the same function in less time."""
    if not _has_state(treedef):
        return treedef.unflatten
    marks = [object() for _ in range(treedef.num_leaves)]
    tree = treedef.unflatten(marks)
    try:
        containers = Containers(tree, lambda _: False)
    except ValueError:
        return treedef.unflatten
    return containers.tree if containers.leaves(tree) == marks else treedef.unflatten


def _has_state(treedef: Any) -> bool:
    kind, _ = treedef.node_data() or (None, None)
    return kind is State or any(map(_has_state, treedef.children()))


# --------------------------------------------------------------------- functions


def to_flat_state(state: Mapping) -> flat_states.FlatState:
    """Lists the leaves of a state, sorted by path.

    Args:
        state: A State, a GraphState or another nested mapping.

    Returns:
        A new FlatState of the same leaves.

    Raises:
        TypeError: If ``state`` is not a mapping.

    Example:
        >>> nnx.to_flat_state(nnx.State({"b": {"c": 1}, "a": 2})).paths
        (('a',), ('b', 'c'))
    """
    return flat_states.FlatState(flat_states.sorted_leaves(state), sort=False)


def from_flat_state(
    flat_state: flat_states.FlatState | Mapping[Path, Any] | Iterable[tuple[Path, Any]],
    *,
    cls: type[S] = State,
) -> S:
    """Builds a state from paths and leaves.

    Args:
        flat_state: A FlatState, a mapping from paths to leaves, or an iterable of
            ``(path, leaf)`` pairs; of equal paths the last one counts.
        cls: The class of the result.

    Returns:
        A new state of the same leaves.

    Raises:
        ValueError: If a path is empty, or leads through the leaf of another path.

    Example:
        >>> nnx.from_flat_state({("a", "b"): 1})
        State({
          'a': {
            'b': 1
          }
        })
    """
    if isinstance(flat_state, Mapping):
        flat_state = flat_state.items()
    return _view(cls, flat_states.nest(flat_state))


def map_state(f: Callable[[Path, Any], Any], state: Mapping) -> State:
    """Applies a function to every leaf of a state.

    Args:
        f: A function of path and leaf, which may be a Variable.
        state: A State, a GraphState or another nested mapping.

    Returns:
        A new State of the results.

    Raises:
        TypeError: If ``state`` is not a mapping.

    Example:
        >>> nnx.map_state(lambda path, leaf: leaf + 1, nnx.State({"a": 1}))
        State({
          'a': 2
        })
    """
    return from_flat_state(
        [(path, f(path, leaf)) for path, leaf in flat_states.sorted_leaves(state)]
    )


def split_state(state: Mapping, first: Filter, /, *filters: Filter) -> Any:
    """Divides the leaves of a state into groups; each leaf must match a filter.

    Args:
        state: A State, a GraphState or another nested mapping.
        first: The filter of the first group.
        *filters: The filters of further groups. A leaf goes to the first group whose
            filter matches.

    Returns:
        A new State, or with several filters a tuple with one per filter; the leaves
        are shared.

    Raises:
        TypeError: If ``state`` is not a mapping, or a filter is invalid.
        ValueError: If a leaf matches no filter, or ``...`` is not the last one.

    Example:
        >>> state = nnx.State({"a": nnx.Param(1), "b": nnx.Cache(2)})
        >>> params, rest = nnx.split_state(state, nnx.Param, ...)
        >>> list(params), list(rest)
        (['a'], ['b'])
    """
    return _nested(to_flat_state(state).split(first, *filters))


def filter_state(state: Mapping, first: Filter, /, *filters: Filter) -> Any:
    """Divides the leaves of a state into groups; drops those that match no filter.

    Args:
        state: A State, a GraphState or another nested mapping.
        first: The filter of the first group.
        *filters: The filters of further groups. A leaf goes to the first group whose
            filter matches.

    Returns:
        A new State, or with several filters a tuple with one per filter; the leaves
        are shared.

    Raises:
        TypeError: If ``state`` is not a mapping, or a filter is invalid.
        ValueError: If ``...`` is not the last filter.

    Example:
        >>> state = nnx.State({"a": nnx.Param(1), "b": nnx.Cache(2)})
        >>> list(nnx.filter_state(state, nnx.Param))
        ['a']
    """
    return _nested(to_flat_state(state).filter(first, *filters))


def _nested(groups: flat_states.FlatState | tuple[flat_states.FlatState, ...]) -> Any:
    if isinstance(groups, tuple):
        return tuple(map(from_flat_state, groups))
    return from_flat_state(groups)


def merge_state(state: Mapping, /, *states: Mapping, cls: type[S] = State) -> S:
    """Merges states recursively.

    Args:
        state: The first state: a State, a GraphState or another nested mapping.
        *states: Further states; of equal paths, the last one counts.
        cls: The class of the result.

    Returns:
        A new state of the same leaves; a single State of class ``cls`` is returned as
        it is.

    Raises:
        TypeError: If one of the states is not a mapping.
        ValueError: If a state has a leaf where a later one has a sub-mapping.

    Example:
        >>> nnx.merge_state(nnx.State({"a": 1, "b": 2}), {"b": 3})
        State({
          'a': 1,
          'b': 3
        })
    """
    if not states:
        return state if isinstance(state, cls) else cls(flat_states.raw_mapping(state))
    merged: dict = {}
    for mapping in (state, *states):
        _merge_into(merged, flat_states.raw_mapping(mapping), ())
    return _view(cls, merged)


def _merge_into(merged: dict, mapping: Mapping, path: Path) -> None:
    for key, value in mapping.items():
        if not isinstance(value, Mapping):
            merged[key] = value
            continue
        earlier = merged.get(key, {})
        if type(earlier) is dict:
            _merge_into(earlier, flat_states.raw_mapping(value), (*path, key))
            if earlier:
                merged[key] = earlier
        elif flat_states.leaves(value):
            raise flat_states.conflict((*path, key), earlier)


def diff(state: N, other: Mapping) -> N | State:
    """Keeps those leaves of a state whose paths another state lacks.

    Args:
        state: A State, a GraphState or another nested mapping.
        other: The other one; only its paths matter.

    Returns:
        A new State of the same leaves; ``state`` itself if ``other`` is empty.

    Raises:
        TypeError: If one of them is not a mapping.

    Example:
        >>> nnx.statelib.diff(nnx.State({"a": 1, "b": 2}), nnx.State({"a": 3}))
        State({
          'b': 2
        })
    """
    if not flat_states.raw_mapping(other):
        return state
    other_paths = {path for path, _ in flat_states.sorted_leaves(other)}
    return from_flat_state(
        [
            item
            for item in flat_states.sorted_leaves(state)
            if item[0] not in other_paths
        ]
    )
