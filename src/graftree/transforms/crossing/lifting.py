"""A JAX transform over objects, as a row of a table: prefix in, JAX call, prefix out.

The leaves of a call are parted into groups, one per distinct value of the prefix (an
axis, a sharding, a role). The traced function takes these groups. It returns static
data, and flat lists of leaves in groups again: the changed inputs and the new leaves of
their structure by the prefix of the inputs, the output by its own.

    Row       what there is to say about a transform
    Call      the outside of a call: packed arguments in, committed output out
    Inside    the inside of a call: objects for the function, its effects as a result
    lift      the two around a JAX transform
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from graftree.core.graph.graphdefs import VariableDef
from graftree.core.pickling import Rebuilt
from graftree.core.variables import partitioning
from graftree.transforms.crossing import (
    alias_reports,
    arguments,
    axis_names,
    boundary,
    decorators,
    packing,
    static_contents,
)
from graftree.transforms.crossing.alias_reports import Labels
from graftree.transforms.crossing.arguments import Chosen
from graftree.transforms.crossing.boundary import Collected, Crossing, Linked, Returned
from graftree.transforms.crossing.packing import Changes, Packed, Values
from graftree.transforms.crossing.prefixes import Assignment, Occurrence
from graftree.transforms.crossing.propagation import Propagation
from graftree.transforms.crossing.signatures import Skeleton, Skeletons


@dataclasses.dataclass(frozen=True)
class Row:
    """What is lifted, and how.

    Attributes:
        name: The public name of the transform.
        mode: What propagates.
        inputs: The prefix of ``(args, kwargs)``, without the static arguments.
        outputs: The prefix of the output.
        statics: Which arguments are static.
        takes_keywords: Whether there may be keyword arguments.
        keeps_keywords: Whether keyword arguments stay keywords with graph updates; else
            they are turned into positional ones, which have a prefix.
        axis_metadata: What is told to Variables whose axis the transform takes away
            inside: the ``transform_metadata`` of the public functions.
        returns_unchanged: Tells by the value of its prefix whether a Variable comes
            back also if the function didn't change it.
        returns_captured: Whether, with graph updates, objects of an outer trace may be
            returned, as copies.
        is_detached: Whether nothing reaches the caller's objects, and the output is
            made of new ones.
        labels: What the positional arguments are called in messages.
        skeletons: Those of earlier calls, if JAX keeps what it compiled for them.
    """

    name: str
    mode: Propagation
    inputs: Assignment
    outputs: Assignment
    statics: Chosen = Chosen()
    takes_keywords: bool = True
    keeps_keywords: bool = False
    axis_metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    returns_unchanged: Callable[[Any], bool] = lambda _: False
    returns_captured: bool = False
    is_detached: bool = False
    labels: Labels = alias_reports.ARGS
    skeletons: Skeletons | None = None

    @staticmethod
    def uniform(name: str, mode: Propagation, **options: Any) -> Row:
        """The row of a transform that treats all leaves alike."""
        both = Assignment(None, "args", name, mode)
        return Row(name, mode, both, both, **options)


def lift(
    f: Callable[..., Any],
    transform: Callable[[Callable[..., Any], Any, Any], Callable[..., Any]],
    row: Row,
) -> Callable[..., Any]:
    """Applies a JAX transform to a function over objects.

    Args:
        f: The function.
        transform: Called as ``transform(inner, in_prefix, out_prefix)``; ``inner``
            takes one group of leaves per entry of the tuple ``in_prefix``.
        row: What else there is to say.

    Returns:
        A function with the arguments of ``f``; its ``inner`` is what JAX gave.
    """
    inner = _Transformed(f, transform, row)

    @decorators.wraps(f)
    def lifted(*args: Any, **kwargs: Any) -> Any:
        call = Call(f, row, args, kwargs)
        return call.commit(inner.function(*call.groups))

    vars(lifted)["inner"] = inner
    return lifted


class _Transformed(Rebuilt):
    """What JAX gave; pickled without it."""

    def __init__(self, f: Any, transform: Callable[..., Any], row: Row) -> None:
        ins, outs = row.inputs.values, row.outputs.values
        self.function = transform(interior(f, row), ins, (None, ins, ins, outs))

    def __call__(self, *groups: Values) -> Any:
        return self.function(*groups)


def interior(f: Callable[..., Any], row: Row) -> Callable[..., Any]:
    """What JAX traces: a function of groups of leaves that returns a result."""

    def traced(*groups: Values) -> Any:
        inside = Inside(row, groups)
        return inside.leave(inside.run(f))

    return decorators.named_after(f, traced)


def returning_arrays(transformed: Callable[..., Any]) -> Callable[..., Any]:
    """Makes arrays of what a transform that JAX doesn't compile gives as scalars.

    JAX then returns the constants of a program as they are in it.
    """

    def wrapper(*groups: Values) -> Any:
        return jax.tree.map(_as_array, transformed(*groups))

    return wrapper


def _as_array(x: Any) -> Any:
    return x if isinstance(x, jax.Array) else jax.numpy.asarray(x)


# Outside.


class Call:
    """The outside of one call.

    Args:
        f: The function; tells the positions of keyword arguments.
        row: The transform.
        args: The positional arguments.
        kwargs: The keyword arguments.

    Attributes:
        packed: The arguments, taken apart.
        groups: What JAX gets: one group of leaves per value of the prefix.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        row: Row,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        if kwargs and not row.takes_keywords:
            raise TypeError(
                f"nnx.{row.name} takes no keyword arguments, got {sorted(kwargs)}. "
                "Pass them by position."
            )
        if row.mode.structure and not row.keeps_keywords:
            count = row.inputs.count
            args, kwargs = decorators.to_positions(f, args, kwargs, count), {}
        args, kwargs, statics = arguments.take(row.statics, args, kwargs, row.name)
        self.packed = packing.pack(
            (args, kwargs), row.mode, row.name, statics, row.labels
        )
        if row.skeletons is not None:
            known = row.skeletons.intern(self.packed.skeleton)
            self.packed = dataclasses.replace(self.packed, skeleton=known)
        self.groups = groups(row, self.packed, self.packed.values())

    def commit(self, result: Any) -> Any:
        """Writes a result of `Inside.leave` to the caller's objects.

        Returns:
            The output of the function.
        """
        return commit(self.packed, result)


def groups(row: Row, packed: Packed, values: Sequence[Any]) -> list[Values]:
    """What JAX gets: one group of leaves per value of the prefix.

    Args:
        row: The transform.
        packed: The arguments, taken apart.
        values: The raw values of all leaves.
    """
    roles = row.inputs.assign(packed.skeleton, packed.leaves)
    return packing.part(values, packed.skeleton, roles, len(row.inputs.values))


def commit(packed: Packed, result: Any) -> Any:
    """Writes a result of `Inside.leave` to the objects of packed arguments.

    Returns:
        The output of the function.
    """
    return boundary.commit(packed, *parts_of(result))


def parts_of(result: Any) -> tuple[Any, ...]:
    """What `boundary.commit` takes, from a result of `Inside.leave`.

    Returns:
        The static part, and the changes, the structure and the output as flat lists.
    """
    places, changed, structure, out = result
    return (
        places.returned,
        in_order(changed, places.changed),
        in_order(structure, places.structure),
        in_order(out, places.out),
    )


def in_order(groups: Sequence[Any], numbers: Sequence[int]) -> Sequence[Any]:
    """The leaves of some groups in one list, by the number of the group of each."""
    if len(groups) == 1:
        return groups[0]
    filled = [group for group in groups if len(group)]
    if len(filled) == 1:
        return filled[0]
    iterators = [iter(group) for group in groups]
    return [next(iterators[number]) for number in numbers]


# Inside.


@dataclasses.dataclass(frozen=True)
class Places:
    """The static part of a result, and the group of each leaf in it."""

    returned: Returned
    changed: tuple[int, ...]
    structure: tuple[int, ...]
    out: tuple[int, ...]

    @functools.cached_property
    def is_plain(self) -> bool:
        """Whether all that happened is: Variables got values, arrays were returned."""
        returned = self.returned
        has_objects = any(entry is not None for entry in returned.out.entries)
        return not (returned.metadata or returned.structure or has_objects)

    @functools.cached_property
    def unflatten(self) -> Callable[[Sequence[Any]], Any]:
        """Makes the output of its leaves, if it is plain."""
        return self.returned.out.treedef.unflatten


jax.tree_util.register_static(Places)


class Inside:
    """The inside of one call: the arguments as fresh objects of the current trace.

    Args:
        row: The transform.
        groups: What JAX gives: groups of leaves, in the order of the prefix values.

    Attributes:
        skeleton: The static part of the arguments.
        roles: For each leaf the number of its group.
        crossing: The arguments, and what they were made of.
    """

    def __init__(self, row: Row, groups: Sequence[Values]) -> None:
        self.row = row
        self.skeleton, values = packing.join(groups)
        self.roles = packing.roles(groups, len(values))
        self.crossing = Crossing(
            self.skeleton,
            values,
            row.mode,
            row.name,
            returns_captured=row.returns_captured,
            is_detached=row.is_detached,
        )
        # Before the function runs: it can't if its values have different axes.
        self._is_uniform = len({*row.inputs.prefixes, *row.outputs.prefixes}) == 1
        if self._may_differ(self.skeleton):
            alias_reports.check_consistent(row.name, self._given)

    @functools.cached_property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and the keyword arguments, static ones included."""
        return arguments.put(self.crossing.tree, self.skeleton.statics)

    def run(self, f: Callable[..., Any]) -> Any:
        """The output of the function for these arguments."""
        with static_contents.guarded(self.crossing.tree, self.row.name):
            return self._run(f)

    def _run(self, f: Callable[..., Any]) -> Any:
        args, kwargs = self.arguments
        if partitioning.PARTITION_NAME not in self.row.axis_metadata:
            return f(*args, **kwargs)
        names = axis_names.Hidden(self._given, self.row.axis_metadata)
        out = f(*args, **kwargs)
        names.put_back(self._occurrences(out))
        return out

    def leave(self, out: Any, forced: frozenset[int] = frozenset()) -> Any:
        """The result: what the function did to its arguments, and its output.

        Args:
            out: The output.
            forced: Positions of leaves that are returned even if they didn't change.

        Returns:
            A pytree ``(places, changed, structure, out)``. All but `Places` are groups
            of raw values: the first two by the prefix of the inputs, the third by that
            of the output.

        Raises:
            ValueError: If the output contains what can't leave the trace, or an object
                with different prefixes.
        """
        found, (changed, structure, outputs) = self.collect(out, forced=forced)
        ins, outs = len(self.row.inputs.values), len(self.row.outputs.values)
        names = self.skeleton.names() if changed else []
        changes = zip(found.returned.changed, found.changed, strict=True)
        return (
            Places(found.returned, changed, structure, outputs),
            tuple(
                Changes([value for _, value in group], [names[i] for i, _ in group])
                for group in _in_groups(changes, changed, ins)
            ),
            _in_groups(found.structure.values(), structure, ins),
            _in_groups(found.out.values(), outputs, outs),
        )

    def collect(
        self,
        out: Any,
        linked: Linked | None = None,
        forced: frozenset[int] = frozenset(),
    ) -> tuple[Collected, tuple[tuple[int, ...], ...]]:
        """What leaves, and the group of each leaf of it: changes, structure, output.

        Args:
            out: The output.
            linked: What of it stands for arguments; see `Crossing.collect`.
            forced: See `leave`.
        """
        forced |= self._returned_unchanged()
        found = self.crossing.collect(out, forced, linked)
        returned = found.returned
        if self._may_differ(self.skeleton, returned.structure, returned.out):
            alias_reports.check_consistent(self.row.name, self._occurrences(out))
        return found, self._groups_of(found)

    def _may_differ(self, *skeletons: Skeleton | None) -> bool:
        """Whether a Variable could occur twice in these, with different prefixes."""
        return (
            self.row.mode.sharing
            and not self._is_uniform
            and any(x is not None and x.has_references() for x in skeletons)
        )

    def _returned_unchanged(self) -> frozenset[int]:
        # A donated buffer is gone after the call, so its Variable needs a new one.
        flags = [
            group in self.row.inputs.donated or self.row.returns_unchanged(value)
            for group, value in enumerate(self.row.inputs.values)
        ]
        if not any(flags):
            return frozenset()
        definitions = self.skeleton.definitions()
        return frozenset(
            i
            for i, role in enumerate(self.roles)
            if flags[role] and isinstance(definitions[i], VariableDef)
        )

    def _groups_of(self, found: Collected) -> tuple[tuple[int, ...], ...]:
        row, returned = self.row, found.returned
        changed = [self.roles[position] for position in returned.changed]
        structure: Sequence[int] = ()
        if returned.structure is not None:
            structure = row.inputs.assign(returned.structure, found.structure.objects)
        outputs = row.outputs.assign(returned.out, found.out.objects)
        return (
            tuple(changed),
            tuple(itertools.compress(structure, found.structure.is_new)),
            tuple(itertools.compress(outputs, found.out.is_new)),
        )

    @functools.cached_property
    def _given(self) -> list[Occurrence]:
        """The Variables in the arguments as they came."""
        return [*self._inputs()]

    def _inputs(self) -> Iterator[Occurrence]:
        inputs, sharing = self.row.inputs, self.row.mode.sharing
        for path, leaf, prefix in inputs.occurrences(self.crossing.tree, sharing):
            yield path[1:], leaf, prefix  # without the index of args or kwargs

    def _occurrences(self, out: Any) -> list[Occurrence]:
        """The Variables in the arguments as they are now, and in the output."""
        # A changed structure that doesn't propagate needs no prefix, and may lack one.
        inputs = self._inputs() if self.row.mode.structure else self._given
        return [*inputs, *self.row.outputs.occurrences(out, self.row.mode.sharing)]


def _in_groups(
    leaves: Iterable[Any], numbers: Sequence[int], count: int
) -> tuple[list[Any], ...]:
    groups: tuple[list[Any], ...] = tuple([] for _ in range(count))
    for leaf, number in zip(leaves, numbers, strict=True):
        groups[number].append(leaf)
    return groups
