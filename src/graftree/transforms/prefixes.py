"""How axes, shardings and filters are assigned to the leaves of objects."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from graftree.core import filters, flat_states, paths
from graftree.core.pytrees import Pytree
from graftree.core.states import State
from graftree.core.variables import Variable
from graftree.transforms import packing
from graftree.transforms.packing import Skeleton
from graftree.transforms.propagation import Propagation


class PrefixMapping(abc.ABC):
    """A prefix that assigns different values to different leaves of one object.

    Example:
        >>> isinstance(nnx.DiffState(0, nnx.Param), nnx.extract.PrefixMapping)
        True
    """

    @abc.abstractmethod
    def map_prefix(self, path: Any, variable: Any) -> Any:
        """The value for the leaf at ``path`` inside the object."""


@dataclasses.dataclass(frozen=True)
class DiffState(PrefixMapping):
    """Selects what is differentiated in one argument.

    Args:
        argnum: The position of the argument.
        filter: Which leaves of the objects there are differentiated.

    Example:
        >>> bias = nnx.DiffState(0, nnx.PathContains("bias"))
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> loss = lambda model: jnp.sum(model(jnp.ones((1, 2))))
        >>> list(nnx.grad(loss, argnums=bias)(model))
        ['bias']
    """

    argnum: int
    filter: Any

    def map_prefix(self, path: Any, variable: Any) -> bool:
        """Whether the leaf is differentiated."""
        return filters.to_predicate(self.filter)(path, variable)


class _FilterMapping(PrefixMapping):
    """A mapping from filters to prefix values; the first filter that matches counts."""

    def __init__(self, mapping: State | Mapping[Any, Any] | Iterable[Any], /) -> None:
        if isinstance(mapping, State):
            mapping = flat_states.create_path_filters(mapping)
        pairs = list(mapping.items() if isinstance(mapping, Mapping) else mapping)
        self._filters = tuple(filter_ for filter_, _ in pairs)
        self._values = tuple(value for _, value in pairs)
        self._predicates = tuple(map(filters.to_predicate, self._filters))

    @property
    def filters(self) -> tuple[Any, ...]:
        """The filters, in order."""
        return self._filters

    def values_of(self) -> tuple[Any, ...]:
        """The prefix values, in the order of the filters."""
        return self._values

    def map_prefix(self, path: Any, variable: Any) -> Any:
        """The value of the first filter that matches the leaf.

        Raises:
            ValueError: If none matches.
        """
        for predicate, value in zip(self._predicates, self._values, strict=True):
            if predicate(path, variable):
                return value
        raise ValueError(
            f"No axis found for the {type(variable).__name__} at "
            f"{paths.to_string(path, '<root>')!r} in {self!r}.\n"
            "Add `...: value` as the last entry to match all that remains."
        )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _FilterMapping)
            and type(self) is type(other)
            and self._filters == other._filters
            and self._values == other._values
        )

    def __hash__(self) -> int:
        return hash((type(self), self._filters, self._values))

    def __repr__(self) -> str:
        entries = zip(self._filters, self._values, strict=True)
        body = ", ".join(f"{filter_!r}: {value!r}" for filter_, value in entries)
        return f"{type(self).__name__}({{{body}}})"


class StateAxes(_FilterMapping, Mapping[Any, Any]):
    """Assigns an axis to each leaf of an object, by filters.

    Args:
        filter_axes: A mapping or pairs ``filter -> axis`` (an integer, ``None``, or
            `Carry` in a scan), or a State of axes.

    Example:
        >>> axes = nnx.StateAxes({nnx.Param: 0, ...: None})
        >>> axes[nnx.Param]
        0
    """

    @property
    def axes(self) -> tuple[Any, ...]:
        """The axes, in the order of the filters."""
        return self._values

    def __getitem__(self, key: Any) -> Any:
        for filter_, value in zip(self._filters, self._values, strict=True):
            if filter_ == key:
                return value
        raise KeyError(key)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._filters)

    def __len__(self) -> int:
        return len(self._filters)

    __eq__ = _FilterMapping.__eq__
    __hash__ = _FilterMapping.__hash__


class StateSharding(_FilterMapping):
    """Assigns a sharding to each leaf of an object, by filters.

    Args:
        filter_sharding: A mapping or pairs ``filter -> sharding``, or a State of
            shardings.

    Example:
        >>> P = jax.sharding.PartitionSpec
        >>> shardings = nnx.StateSharding({nnx.OfType(nnx.Param): P("x"), ...: P()})
        >>> shardings.shardings == (P("x"), P())
        True
    """

    @property
    def shardings(self) -> tuple[Any, ...]:
        """The shardings, in the order of the filters."""
        return self._values


class Assignment:
    """A prefix of arguments or outputs, and which group each leaf gets by it.

    Args:
        prefix: A pytree prefix; each object counts as one leaf, for which a
            `PrefixMapping` may assign different values to its leaves.
        argument: The public name of the argument, for error messages.
        transform: The public name of the transform.
        mode: What propagates.

    Attributes:
        values: The distinct values, one per group.
        prefixes: What must agree where a Variable occurs twice: the same values.

    Raises:
        ValueError: If the prefix contains what it can't.
    """

    def __init__(
        self, prefix: Any, argument: str, transform: str, mode: Propagation
    ) -> None:
        self.prefix = prefix
        # Trees may have a prefix of their own form, with objects.
        kinds = (PrefixMapping, Variable, Pytree) if mode.sharing else _KINDS
        leaves = jax.tree.leaves(
            prefix, is_leaf=lambda x: x is None or isinstance(x, kinds)
        )
        for leaf in leaves:
            _check_leaf(leaf, argument, transform, mode)
        listed: list[Any] = []
        for leaf in leaves:
            listed += leaf.values_of() if isinstance(leaf, _FilterMapping) else [leaf]
        self.values = tuple(dict.fromkeys(listed)) or (None,)
        self.prefixes = self.values
        self._numbers = {value: number for number, value in enumerate(self.values)}
        has_mapping = any(isinstance(leaf, PrefixMapping) for leaf in leaves)
        self._is_uniform = len(self.values) == 1 and not has_mapping

    def assign(self, skeleton: Skeleton, objects: Sequence[Any]) -> list[int]:
        """The group of each leaf of a skeleton.

        Raises:
            ValueError: If the prefix doesn't fit.
        """
        if self._is_uniform:
            return [0] * len(objects)
        return [
            self._numbers[_resolve(value, path, leaf)]
            for value, path, leaf in zip(
                packing.spread(self.prefix, skeleton),
                skeleton.inner_paths(),
                objects,
                strict=True,
            )
        ]

    def occurrences(self, tree: Any, sharing: bool) -> Iterator[tuple[Any, Any, Any]]:
        """For each Variable in a tree, wherever it occurs: path, itself, its prefix."""
        is_leaf = packing.is_entry(sharing)
        flat, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
        skeleton = Skeleton(treedef, (None,) * len(flat))
        given = packing.spread(self.prefix, skeleton)
        for (jax_path, x), value in zip(flat, given, strict=True):
            if is_leaf(x):
                start = paths.from_jax(jax_path)
                for inner, leaf in packing.leaves_of(x):
                    yield start + inner, leaf, _resolve(value, inner, leaf)


def _resolve(value: Any, path: Any, leaf: Any) -> Any:
    return value.map_prefix(path, leaf) if isinstance(value, PrefixMapping) else value


_KINDS = (PrefixMapping, Variable)


def _check_leaf(leaf: Any, argument: str, transform: str, mode: Propagation) -> None:
    if isinstance(leaf, Variable):
        raise ValueError(
            f"Variables prefixes are not supported: found a {type(leaf).__name__} in "
            f"`{argument}` of nnx.{transform}. Give its axis in its place."
        )
    if mode.sharing and isinstance(leaf, Pytree):
        raise ValueError(
            f"Graph nodes are not allowed as prefixes with graph=True: found a "
            f"{type(leaf).__name__} in `{argument}` of nnx.{transform}."
        )
    if isinstance(leaf, PrefixMapping) and not mode.structure:
        raise ValueError(
            f"`{argument}` cannot contain `{type(leaf).__name__}` objects in "
            f"nnx.{transform} without graph updates: pass graph=True, "
            "graph_updates=True, or a prefix made by nnx.prefix."
        )
