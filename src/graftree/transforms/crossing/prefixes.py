"""How axes, shardings and filters are assigned to the leaves of objects.

A prefix tree has one value per object, or a `PrefixMapping`: different values for the
leaves of that object (`DiffState`, `StateAxes`, `StateSharding`). An `Assignment` is a
whole prefix tree, checked; it tells which group each leaf gets by it. `Roles` are the
same for arguments of which some are donated.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax

from graftree import _jax
from graftree.core import filters, paths
from graftree.core.graph import flattening
from graftree.core.objects.pytrees import Pytree
from graftree.core.states import flat_states
from graftree.core.states.states import State
from graftree.core.variables import variables
from graftree.core.variables.variables import Variable
from graftree.transforms.crossing import packing, propagation
from graftree.transforms.crossing.arguments import Chosen
from graftree.transforms.crossing.propagation import Propagation
from graftree.transforms.crossing.signatures import Skeleton


class PrefixMapping(abc.ABC):
    """A prefix that assigns different values to different leaves of one object.

    Example:
        >>> isinstance(nnx.DiffState(0, nnx.Param), nnx.extract.PrefixMapping)
        True
    """

    mode: ClassVar[Propagation] = propagation.GRAPH_UPDATES

    @abc.abstractmethod
    def map_prefix(self, path: Any, variable: Any) -> Any:
        """The value for the leaf at ``path`` inside the object."""

    def values_of(self) -> tuple[Any, ...]:
        """The values that it assigns."""
        return ()

    def refusal(self, argument: str) -> str:
        """What to say where another mode is in force than that of the prefix."""
        return (
            f"`{argument}` cannot contain `{type(self).__name__}` objects without "
            "graph=True and graph_updates=True (there, nnx.prefix makes a prefix)"
        )


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
        """Whether the leaf is differentiated; one that is no part of an object is."""
        return not path or filters.to_predicate(self.filter)(path, variable)

    def values_of(self) -> tuple[Any, ...]:
        """Differentiated or not."""
        return (True, False)


_Assigned = State | Mapping[Any, Any] | Iterable[Any]


class _FilterMapping(PrefixMapping):
    """A mapping from filters to prefix values; the first filter that matches counts."""

    def __init__(self, mapping: _Assigned) -> None:
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

    def __init__(self, filter_axes: _Assigned, /) -> None:
        super().__init__(filter_axes)

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

    def __init__(self, filter_sharding: _Assigned, /) -> None:
        super().__init__(filter_sharding)

    @property
    def shardings(self) -> tuple[Any, ...]:
        """The shardings, in the order of the filters."""
        return self._values


# A Variable where it occurs, or a ref: its path, itself, its prefix.
Occurrence = tuple[Any, Any, Any]

_NO_CALL: Any = object()


class Assignment:
    """A prefix of arguments or outputs, and which group each leaf gets by it.

    Args:
        prefix: A pytree prefix; each object counts as one leaf, for which a
            `PrefixMapping` may assign different values to its leaves.
        argument: The public name of the argument, for error messages.
        transform: The public name of the transform.
        mode: What propagates.
        keywords: The prefix of the keyword arguments, if ``prefix`` is that of the
            positional ones; together they are that of ``(args, kwargs)``.

    Attributes:
        values: The values of the groups; distinct, unless some groups are donated.
        prefixes: What must agree where a Variable occurs twice: the distinct values.
        donated: The numbers of the groups whose buffers are donated.
        count: How many positional arguments it is for at least.
        reads_leaves: Whether a filter in it looks at the leaves.

    Raises:
        ValueError: If the prefix contains what it can't.
    """

    donated: frozenset[int] = frozenset()

    def __init__(
        self,
        prefix: Any,
        argument: str,
        transform: str,
        mode: Propagation,
        *,
        keywords: Any = _NO_CALL,
    ) -> None:
        self._argument, self._transform = argument, transform
        # Trees may have a prefix of their own form, with objects.
        kinds = (*_KINDS, Pytree) if mode.sharing else _KINDS
        flat, _ = jax.tree_util.tree_flatten_with_path(
            prefix, is_leaf=lambda x: x is None or isinstance(x, kinds)
        )
        listed: list[Any] = [] if keywords is _NO_CALL else [keywords]
        for path, leaf in flat:
            self._check_leaf(leaf, jax.tree_util.keystr(path), mode)
            listed += leaf.values_of() if isinstance(leaf, PrefixMapping) else [leaf]
        # What JAX calls the prefix in its messages.
        self._roots = ["tree_map tree"]
        if keywords is not _NO_CALL:
            self._roots.insert(0, "tree_map tree[0]")
            prefix = (tuple(prefix) if isinstance(prefix, list) else prefix, keywords)
        self.prefix = prefix
        positional = prefix if keywords is _NO_CALL else prefix[0]
        self.count = len(positional) if isinstance(positional, tuple) else 0
        self.prefixes = self.values = self._distinct(listed)
        self._numbers = {value: number for number, value in enumerate(self.values)}
        # One value for everything; any other prefix may not fit.
        is_plain = [
            not (path or isinstance(leaf, PrefixMapping)) for path, leaf in flat
        ]
        self._is_uniform = is_plain == [True] and len(self.values) == 1
        self.reads_leaves = any(isinstance(leaf, PrefixMapping) for _, leaf in flat)

    def _distinct(self, values: list[Any]) -> tuple[Any, ...]:
        try:
            return tuple(dict.fromkeys(values)) or (None,)
        except TypeError as error:
            raise ValueError(
                f"Prefixes must be hashable, in `{self._argument}` of "
                f"nnx.{self._transform}: {error}."
            ) from error

    def _check_leaf(self, leaf: Any, path: str, mode: Propagation) -> None:
        kind, place = type(leaf).__name__, f"{self._argument}{path}"
        if isinstance(leaf, Variable):
            raise ValueError(
                f"Variables prefixes are not supported: found a {kind} at {place} of "
                f"nnx.{self._transform}. Give one prefix for the whole Variable."
            )
        if mode.sharing and isinstance(leaf, Pytree):
            raise node_error(leaf, place, self._transform)
        if isinstance(leaf, PrefixMapping) and leaf.mode != mode:
            raise ValueError(
                f"{leaf.refusal(self._argument)}: found one at {place} of "
                f"nnx.{self._transform}."
            )

    def assign(self, skeleton: Skeleton, objects: Sequence[Any]) -> list[int]:
        """The group of each leaf of a skeleton.

        Raises:
            ValueError: If the prefix doesn't fit.
        """
        if self._is_uniform:
            return [0] * len(objects)
        numbers: list[int] = []
        leaves = zip(skeleton.inner_paths(), objects, strict=True)
        for matched in self._match(skeleton):
            self._check_place(matched)
            value, entries, _ = matched
            count = sum(1 if entry is None else entry.num_leaves for entry in entries)
            numbers += [
                self._numbers[_resolve(value, path, leaf)]
                for path, leaf in itertools.islice(leaves, count)
            ]
        return numbers

    def occurrences(self, tree: Any, sharing: bool) -> Iterator[Occurrence]:
        """The Variables in a tree, each wherever it occurs."""
        is_leaf = packing.is_entry(sharing)
        flat, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
        leaves = iter(flat)
        for value, entries, _ in self._match(Skeleton(treedef, (None,) * len(flat))):
            for jax_path, x in itertools.islice(leaves, len(entries)):
                if is_leaf(x):
                    start = paths.from_jax(jax_path)
                    for inner, leaf in packing.leaves_of(x):
                        yield start + inner, leaf, _resolve(value, inner, leaf)

    def _match(self, skeleton: Skeleton) -> list[packing.Matched]:
        try:
            return packing.match(self.prefix, skeleton, _is_value)
        except ValueError as error:
            details = str(error)
            for root in self._roots:
                details = details.replace(root, self._argument)
            raise ValueError(
                f"`{self._argument}` of nnx.{self._transform} must be a tree prefix of "
                f"what it is for; an object counts as one leaf there.\n{details}"
            ) from None

    def _check_place(self, matched: packing.Matched) -> None:
        """Filters and paths start at an object, so they need one.

        A DiffState is for a whole argument, and filters each object in it.
        """
        value, entries, is_whole = matched
        if not isinstance(value, PrefixMapping) or isinstance(value, DiffState):
            return
        if entries and (not is_whole or entries[0] is None):
            raise ValueError(
                f"A `{type(value).__name__}` must be the prefix of one object, but "
                f"`{self._argument}` of nnx.{self._transform} has one for "
                f"{'an array' if is_whole else 'a container'}: {value!r}\n"
                "Put it in the place of each object, and a plain value in the place of "
                "each array."
            )


def node_error(node: Any, place: str, transform: str) -> ValueError:
    """The error for an object in the place of a prefix."""
    when = " when graph=True"
    ways_out = "Give one prefix for the whole object, or make one with nnx.prefix."
    if place.startswith("argnums"):
        when = ""
        ways_out = "Give the number of an argument, or nnx.DiffState(number, filter)."
    return ValueError(
        f"Graph nodes are not allowed as prefixes{when}: found a "
        f"{type(node).__name__} at {place} of nnx.{transform}. {ways_out}"
    )


def _is_value(x: Any) -> bool:
    return x is None or isinstance(x, PrefixMapping)


def _resolve(value: Any, path: Any, leaf: Any) -> Any:
    return value.map_prefix(path, leaf) if isinstance(value, PrefixMapping) else value


_KINDS = (PrefixMapping, Variable)


class Roles(Assignment):
    """An assignment for arguments of which some are donated.

    There is a group for each prefix value, and another one for what is donated of it.

    Args:
        prefix: See `Assignment`, like the next four.
        argument: See ``prefix``.
        transform: See ``prefix``.
        mode: See ``prefix``.
        keywords: See ``prefix``.
        donated: Which arguments are donated.
        statics: Which are static; a skeleton has them apart.
    """

    def __init__(
        self,
        prefix: Any,
        argument: str,
        transform: str,
        mode: Propagation,
        *,
        keywords: Any,
        donated: Chosen,
        statics: Chosen,
    ) -> None:
        super().__init__(prefix, argument, transform, mode, keywords=keywords)
        self._chosen = donated
        self._statics = statics
        self._keeps_arrays = mode.structure
        if donated:
            self.values = tuple(value for value in self.values for _ in range(2))
            self.donated = frozenset(range(1, len(self.values), 2))

    def assign(self, skeleton: Skeleton, objects: Sequence[Any]) -> list[int]:
        """The group of each leaf; see `Assignment.assign`."""
        numbers = super().assign(skeleton, objects)
        if not self._chosen:
            return numbers
        flags = packing.spread(self._donated_arguments(skeleton), skeleton)
        leaves = zip(objects, skeleton.inner_paths(), strict=True)
        return [
            2 * number + (flag and self._can_donate(leaf, path))
            for number, flag, (leaf, path) in zip(numbers, flags, leaves, strict=True)
        ]

    def _can_donate(self, leaf: Any, path: Any) -> bool:
        # A Variable gets a new buffer afterwards, if it may be written. An array
        # attribute doesn't: with graph updates it is kept. A ref keeps its own.
        if _jax.is_ref(flattening.raw_of(leaf)):
            return False
        if isinstance(leaf, Variable):
            return variables.is_owned(leaf)
        return path == () or not self._keeps_arrays

    def _donated_arguments(self, skeleton: Skeleton) -> Any:
        """A prefix of ``(args, kwargs)``: is it donated?"""
        args, kwargs = skeleton.treedef.children()
        by_position = [i for i, _ in skeleton.statics if isinstance(i, int)]
        total = len(args.children()) + len(by_position)
        taken = self._statics.positions(total)
        donated = self._chosen.positions(total)
        flags = [i in donated for i in range(total) if i not in taken]
        names = kwargs.node_data()[1]
        return tuple(flags), {name: name in self._chosen.argnames for name in names}


class Unchecked(Assignment):
    """An assignment for an output in which any Variable of the arguments may be.

    Args:
        prefix: See `Assignment`.
        transform: The public name of the transform.
        mode: What propagates.
    """

    def __init__(self, prefix: Any, transform: str, mode: Propagation) -> None:
        super().__init__(prefix, "out", transform, mode)
        self.prefixes = ()

    def occurrences(self, tree: Any, sharing: bool) -> Iterator[Occurrence]:
        """None: no prefix has to agree with that of an argument."""
        return iter(())
