"""How leaves travel through JAX: groups of them go in, one result comes out.

    Leaves      some leaves of a signature, with their values: a pytree node
    Result      what comes back: the changes and the output, as one pytree node

A transform gives different leaves different axes, shardings or roles by putting them in
different groups. JAX prints the path of each leaf, so the entries are its names.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax

from graftree.core import paths
from graftree.core.hashable_mappings import HashableMapping
from graftree.transforms.lifting import debug_info
from graftree.transforms.lifting.signatures import LeafSpec, Signature


class Leaves(tuple[Any, ...]):
    """A pytree node that carries some leaves of a signature.

    It consists of the parts that JAX needs, its children and its static data, so JAX
    takes it apart in C.

    Attributes:
        values: The raw values.
        spec: The leaves whose values they are: the number of the signature, which JAX
            compares first, and in C; the signature, which all groups of a call share;
            their positions in it, ``None`` for all.
    """

    __slots__ = ()

    @staticmethod
    def of(
        values: Sequence[Any], signature: Signature, positions: tuple[int, ...] | None
    ) -> Leaves:
        """Makes the group of these values."""
        return Leaves((values, (signature.number, signature, positions)))

    @staticmethod
    def picked(
        values: Sequence[Any], signature: Signature, positions: Sequence[int]
    ) -> Leaves:
        """Makes the group of the leaves at these positions, of the values of all."""
        chosen = [values[position] for position in positions]
        return Leaves.of(chosen, signature, tuple(positions))

    values = property(operator.itemgetter(0))
    spec = property(operator.itemgetter(1))

    @property
    def signature(self) -> Signature:
        """Signature whose leaves these are."""
        return self.spec[1]

    def by_position(self) -> dict[int, Any]:
        """Maps the position of each leaf to its value."""
        values, (_, _, positions) = self
        if positions is None:
            return dict(enumerate(values))
        return dict(zip(positions, values, strict=True))

    def called_as(self, parameters: debug_info.Parameters) -> Leaves:
        """Names the leaves as arguments of another function, in messages."""
        values, (_, signature, positions) = self
        signature = dataclasses.replace(signature, parameters=parameters)
        return Leaves.of(values, signature, positions)

    def pairs(self) -> list[tuple[LeafSpec, Any]]:
        """Lists the leaves with their values."""
        values, (_, signature, positions) = self
        leaf_specs: Sequence[LeafSpec] = signature.leaf_specs
        if positions is not None:
            leaf_specs = [leaf_specs[position] for position in positions]
        return [*zip(leaf_specs, values, strict=True)]

    def named(self) -> list[tuple[str, Any]]:
        """Lists the values with the names that they have in the function."""
        values, (_, signature, positions) = self
        names = signature.names_in_function
        if positions is not None:
            names = [names[position] for position in positions]
        return [*zip(names, values, strict=True)]


def _flatten_leaves_with_keys(group: Leaves) -> Any:
    # Runs on errors and once per trace: names in messages, jaxprs and profiles. JAX
    # prints the entries of a path as they are.
    return group.named(), group.spec


jax.tree_util.register_pytree_with_keys(
    Leaves,
    _flatten_leaves_with_keys,
    lambda spec, values: Leaves((values, spec)),
    tuple,
)


def join(groups: Sequence[Leaves]) -> tuple[Signature, list[Any], list[int]]:
    """Finds the signature of the groups of a call, and each leaf's value and group."""
    first, (_, signature, positions) = groups[0]
    if positions is None:
        values = list(first)
        return signature, values, [0] * len(values)
    values = [None] * len(signature.leaf_specs)
    numbers = [0] * len(values)
    for number, group in enumerate(groups):
        for position, value in group.by_position().items():
            values[position] = value
            numbers[position] = number
    return signature, values, numbers


# The way out.


class ResultPart(NamedTuple):
    """A part of a result: some leaves of a signature, each in a group.

    Attributes:
        signature: That of the arguments, or of the output.
        positions: The positions of these leaves.
        groups: The number of the group of each.
        root: The name of the output; ``None`` for new values of arguments.
    """

    signature: Signature
    positions: tuple[int, ...]
    groups: tuple[int, ...]
    root: str | None = None

    def names(self) -> list[str]:
        """Names the leaves, as in ``[0].kernel`` of an output."""
        if self.root is None:
            # In quotes, as programs expect of JAX's errors about States.
            names = [self.signature.names_in_function[i] for i in self.positions]
            return [f"(new {re.sub(_ATTRIBUTE, _QUOTED, name)})" for name in names]
        roots = self.signature.entry_names(self.root)
        leaf_specs = [self.signature.leaf_specs[i] for i in self.positions]
        return [paths.below(roots[x.entry], x.path) for x in leaf_specs]

    def chosen(self, numbers: Sequence[int]) -> ResultPart:
        """Some of the leaves, by their numbers here."""
        return self._replace(
            positions=tuple([self.positions[i] for i in numbers]),
            groups=tuple([self.groups[i] for i in numbers]),
        )

    def of_group(self, group: int, values: Sequence[Any]) -> Result:
        """Takes out the leaves that are in one group, of these values."""
        numbers = [i for i, other in enumerate(self.groups) if other == group]
        return Result.of(self.chosen(numbers), [values[i] for i in numbers])


_ATTRIBUTE, _QUOTED = r"\.(\w+)", r"['\1']"


@dataclasses.dataclass(frozen=True)
class ResultSpec:
    """Static part of a result.

    JAX has it in its cache, so a cached call needs no bookkeeping.

    Attributes:
        parts: The leaves of the arguments whose Variables changed; those that are new
            in the arguments, if their structure changed; those of the output that don't
            exist outside.
        structure: The signature of the arguments, if their structure changed.
        out: The signature of the output.
        metadata: New metadata of Variables, with the positions of their leaves.
        kept: The positions of changed leaves that came back without a change.
        keeps_structure: Whether ``structure`` came back without a change.
    """

    parts: tuple[ResultPart, ResultPart, ResultPart]
    structure: Signature | None
    out: Signature
    metadata: tuple[tuple[int, HashableMapping], ...] = ()
    kept: tuple[int, ...] = ()
    keeps_structure: bool = False

    @property
    def changed(self) -> tuple[int, ...]:
        """Positions of the leaves whose Variables changed."""
        return self.parts[0].positions


class Result(tuple[Any, ...]):
    """What a traced function returns: a pytree node, which JAX takes apart in C.

    A transform with prefixes wants the leaves of each part in groups (`grouped`). The
    nodes of these are results, too; they have no `ResultSpec`, which is among them.

    Attributes:
        leaves: The raw values, in the order of the parts.
        spec: Their meaning.
    """

    __slots__ = ()

    leaves = property(operator.itemgetter(0))
    spec = property(operator.itemgetter(1))

    @staticmethod
    def of(spec: ResultSpec | ResultPart | None, leaves: Iterable[Any]) -> Result:
        """Makes the result with these leaves."""
        return Result(((*leaves,), spec))

    def parts(self) -> list[Sequence[Any]]:
        """Divides the leaves: those that changed, of the structure, of the output."""
        leaves, spec = self
        changed, structure, _ = [len(part.positions) for part in spec.parts]
        end = changed + structure
        return [leaves[:changed], leaves[changed:end], leaves[end:]]

    def with_changes(self, numbers: Sequence[int]) -> Result:
        """Leaves out the others of the leaves that changed; takes numbers of those."""
        (part, *others), (changed, *rest) = self.spec.parts, self.parts()
        spec = dataclasses.replace(self.spec, parts=(part.chosen(numbers), *others))
        return Result.of(spec, [changed[i] for i in numbers] + [*rest[0], *rest[1]])

    def with_spec(self, **changes: Any) -> Result:
        """Gives the leaves another meaning."""
        leaves, spec = self
        return Result((leaves, dataclasses.replace(spec, **changes)))

    def grouped(self, counts: Sequence[int]) -> Result:
        """Divides each part into so many groups, for a prefix by `prefix`."""
        parts = [
            Result.of(None, [part.of_group(number, values) for number in range(count)])
            for part, values, count in zip(
                self.spec.parts, self.parts(), counts, strict=True
            )
        ]
        return Result.of(None, [Result.of(self.spec, ()), *parts])

    @staticmethod
    def prefix(values: Iterable[Sequence[Any]]) -> Result:
        """JAX's prefix for `grouped` results, of the values for the groups of parts."""
        return Result.of(None, [None, *[Result.of(None, part) for part in values]])

    def ungrouped(self) -> Result:
        """Puts the groups together again."""
        if self.spec is not None:
            return self
        (_, spec), *parts = self.leaves
        leaves: list[Any] = []
        for part, groups in zip(spec.parts, parts, strict=True):
            iterators = [iter(group.leaves) for group in groups.leaves]
            leaves += [next(iterators[number]) for number in part.groups]
        return Result.of(spec, leaves)


def _flatten_result_with_keys(result: Result) -> Any:
    leaves, spec = result
    if not leaves:  # no names to make; or the spec among groups
        return [], spec
    if spec is None:  # groups, whose leaves have names
        return [("", group) for group in leaves], spec
    parts = spec.parts if isinstance(spec, ResultSpec) else [spec]
    names = [name for part in parts for name in part.names()]
    return [*zip(names, leaves, strict=True)], spec


jax.tree_util.register_pytree_with_keys(
    Result,
    _flatten_result_with_keys,
    lambda spec, leaves: Result((leaves, spec)),
    tuple,
)
