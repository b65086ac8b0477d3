"""The outside of the crossing: arguments in, and after success all changes at once.

    Call      packs the arguments of one call into groups of leaves for JAX
    commit    writes a result of `Inside.leave` to the caller's objects
    lift      a whole transform: both sides around a function that JAX gives

The caller's objects are written only after everything is checked; then nothing fails.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from graftree import _jax
from graftree.core import imprints
from graftree.core.graph.flattening import KEEP, Builder, IndexMap
from graftree.core.graph.graphdefs import ArrayRefDef
from graftree.core.objects import callables, running
from graftree.core.pickling import Rebuilt
from graftree.core.variables import partitioning, sharding, variables
from graftree.transforms.crossing import decorators, inside, packing, refusals, rows
from graftree.transforms.crossing.packing import Packed, Parts, Values
from graftree.transforms.crossing.signatures import Slot


class Call:
    """The outside of one call.

    Args:
        f: The function.
        row: Its transform.
        args: The positional arguments.
        kwargs: The keyword arguments.
        statics: The static ones, if they have been taken out of these already.

    Attributes:
        packed: The arguments, taken apart.
        groups: JAX's arguments: one group of leaves per value of the prefix.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        row: rows.Row,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        statics: decorators.Statics | None = None,
    ) -> None:
        if kwargs and row.keyword_rule is rows.Keywords.REFUSED:
            raise TypeError(
                f"nnx.{row.name} takes no keyword arguments, got {sorted(kwargs)}. "
                "Pass them by position."
            )
        if row.keyword_rule is rows.Keywords.BECOME_POSITIONAL:
            count = row.inputs.count
            args, kwargs = decorators.to_positions(f, args, kwargs, count), {}
        running.note_arguments(row, args, kwargs, row.given_functions)
        if statics is None:
            args, kwargs, statics = decorators.take(row.statics, args, kwargs, row.name)
        self._row, self._axis, unseen = row, None, imprints.latest_unseen()
        if row.maps_axis:
            self._axis = row.axis_metadata.get(partitioning.PARTITION_NAME)
        self.packed = packing.pack(
            row.tree(args, kwargs),
            row.mode,
            row.name,
            statics,
            row.labels,
            f,
        )
        if row.signatures is not None:
            is_new = imprints.latest_unseen() is not unseen
            number, known = row.signatures.intern(self.packed.signature, is_new)
            known.number = number
            self.packed = dataclasses.replace(self.packed, signature=known)
        self.groups = groups(row, self.packed, self.packed.values())
        if donates_twice(row, self.groups):
            self.explain()
        # Before the function runs: it can't if its values have different axes.
        if row.may_differ(self.packed.signature):
            found = row.occurrences(self.packed.tree)
            refusals.check_consistent(row.name, found)

    def run(self, transformed: Callable[..., Any], *leading: Any) -> Any:
        """The output of JAX's transformed function of ``leading`` and then groups."""
        return self.commit(transformed(*leading, *self.groups))

    def commit(self, result: Any) -> Any:
        """Writes a result of `Inside.leave` to the caller's objects."""
        return commit(self.packed, result, self._axis)

    def explain(self, error: Exception | None = None) -> None:
        """Raises an error about buffers that can't be donated, with their paths.

        On one device JAX finds this out before it donates anything, and raises one
        without paths. A check here would cost time in each call.
        """
        inputs, packed = self._row.inputs, self.packed
        groups = inputs.group(packed.signature, packed.leaves)
        donated = [group in inputs.donated for group in groups]
        slots = packed.signature.slots
        found = refusals.shared_buffer(packed.values(), slots, donated, self._row.name)
        if found is not None:
            raise found from error


def donates_twice(row: rows.Row, groups: Sequence[Values]) -> bool:
    """Whether an array over several devices would be donated twice.

    JAX finds this out on one device while another one donates its part, and older
    versions crash.
    """
    if not row.inputs.donated:
        return False
    given = [x for number in row.inputs.donated for x in groups[number].values]
    arrays = [x for x in given if _jax.is_concrete(type(x))]
    return len({*map(id, arrays)}) < len(arrays) and any(map(is_spread, arrays))


def is_spread(x: Any) -> bool:
    """Whether it is an array over several devices."""
    return _jax.is_concrete(type(x)) and len(x.sharding.device_set) > 1


def is_of_donation(error: Exception) -> bool:
    """Whether JAX refused a call because a buffer would be donated and used again."""
    is_of_jax = isinstance(error, (ValueError, RuntimeError))
    return is_of_jax and _DONATION.search(str(error)) is not None


_DONATION = re.compile("Attempt to (donate|use) (the same|a) buffer")


def groups(row: rows.Row, packed: Packed, values: Sequence[Any]) -> list[Values]:
    """JAX's arguments: one group of leaves per value of the prefix."""
    numbers = row.inputs.group(packed.signature, packed.leaves)
    if len(row.inputs.values) == 1:
        return [Values.of(values, packed.signature, None)]
    positions: list[list[int]] = [[] for _ in row.inputs.values]
    for position, number in enumerate(numbers):
        positions[number].append(position)
    return [Values.picked(values, packed.signature, listed) for listed in positions]


def commit(packed: Packed, result: Any, axis: Any = None) -> Any:
    """Writes the function's changes into the caller's objects: all, or nothing.

    Args:
        packed: The arguments.
        result: The result of `Inside.leave`.
        axis: The name of the axis that new Variables got from the transform, if any.
    """
    returned, changed, structure, out = in_order(result)
    leaves, objects, slots = packed.leaves, packed.objects, packed.signature.slots
    for position, _ in returned.metadata:
        variables.check_owned(leaves[position], slots[position].name)
    # Unchanged values need no write where none is allowed.
    writes = [
        (position, value)
        for position, value in zip(returned.changed, changed, strict=True)
        if position not in returned.kept or variables.may_write(leaves[position])
    ]
    if returned.structure is None or returned.keeps_structure:
        builder = Builder(IndexMap(objects), objects, takes_raw=True)
    else:
        builder = Builder(IndexMap(), objects, takes_raw=True)
        # Nothing can change a plain argument, so there is no value for it.
        changed_slots = [x for x in returned.structure.slots if not x.is_plain]
        given = iter(_filled(changed_slots, structure, objects, axis))
        filled = [
            KEEP if slot.is_plain else next(given) for slot in returned.structure.slots
        ]
        builder.members(returned.structure.skeleton, filled)
    filled = _filled(returned.out.slots, out, objects, axis)
    built = builder.build(returned.out.skeleton, filled)
    builder.check()
    variables.write_all(
        [leaves[position] for position, _ in writes],
        [value for _, value in writes],
        lambda number: slots[writes[number][0]].name,
    )
    for position, entries in returned.metadata:
        variables.replace_metadata(leaves[position], entries)
    builder.commit()
    return callables.closed(built) if returned.out.has_callables else built


def in_order(result: Any) -> tuple[inside.Returned, Any, Any, Any]:
    """A result of `Inside.leave` with flat lists instead of groups."""
    returned, *parts = result
    changed, structure, out = map(joined, parts, returned.groups)
    return returned, changed, structure, out


def joined(part: Any, numbers: Sequence[int]) -> Sequence[Any]:
    """The leaves of a part of a result, by the number of the group of each."""
    if type(part) is not Parts:
        return part
    groups: Sequence[Any] = part
    filled = [group for group in groups if len(group)]
    if len(filled) == 1:
        return filled[0]
    iterators = [iter(group) for group in groups]
    return [next(iterators[number]) for number in numbers]


def _filled(
    slots: Sequence[Slot],
    leaves: Sequence[Any],
    existing: Mapping[int, Any],
    axis: Any,
) -> list[Any]:
    """The leaves for a builder: KEEP where a Variable exists outside; new refs."""
    given = iter(leaves)
    refs: dict[int, Any] = {}
    filled: list[Any] = []
    for slot in slots:
        definition = slot.definition
        value = next(given) if slot.outer_index is None else KEEP
        if axis is not None and value is not KEEP:
            # When it was made, the value lacked the axis that is named now.
            metadata = getattr(definition, "metadata", {})
            value = sharding.place_named(value, metadata, axis)
        ref = getattr(definition, "array_refdef", definition)
        filled.append(value if ref is None else _opened(ref, value, refs, existing))
    return filled


def _opened(
    definition: Any, value: Any, refs: dict[int, Any], existing: Mapping[int, Any]
) -> Any:
    """The ref outside for one that is in the output: its own, or a new one."""
    if isinstance(definition, ArrayRefDef):
        if definition.outer_index is not None:
            refs[definition.index] = existing[definition.outer_index]
        elif isinstance(value, (jax.Array, np.ndarray)):
            refs[definition.index] = _jax.new_ref(value)
    return value if value is KEEP else refs.get(definition.index, value)


# Both sides around a JAX transform.


def lift(
    f: Callable[..., Any],
    transform: Callable[[Callable[..., Any], Any, Any], Callable[..., Any]],
    row: rows.Row,
    run: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Applies a JAX transform to a function over objects.

    It is called as ``transform(inner, in_prefix, out_prefix)``; ``inner`` takes a group
    of leaves per entry of the tuple ``in_prefix``. The function returned has its result
    as ``inner``. A call is ``run(inner, args, kwargs)``, by default of a new `Call`.
    """
    inner = _Transformed(f, transform, row)

    def run_once(inner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return Call(f, row, args, kwargs).run(inner)

    run = run or run_once

    @decorators.wraps(f)
    def lifted(*args: Any, **kwargs: Any) -> Any:
        with _jax.hidden_frames:
            return run(inner.called(), args, kwargs)

    vars(lifted)["inner"] = inner
    return lifted


class _Transformed(Rebuilt):
    """A function transformed by JAX; pickled without JAX's part."""

    def __init__(self, f: Any, transform: Callable[..., Any], row: rows.Row) -> None:
        self._given = f, transform, row
        self.function = self._made()

    def _made(self) -> Callable[..., Any]:
        f, transform, row = self._given
        interior = inside.interior(f, row)
        return transform(interior, row.inputs.values, row.result_prefix)

    def called(self) -> Callable[..., Any]:
        """The function to call; for observers, made in the call: see `__call__`."""
        return self.function if running.stack.apart is None else self

    def __call__(self, *groups: Values) -> Any:
        apart = running.stack.apart
        function = self.function if apart is None else apart.function(self, self._made)
        return function(*groups)


def returning_arrays(transformed: Callable[..., Any]) -> Callable[..., Any]:
    """Makes arrays of scalars from a transform that JAX doesn't compile.

    JAX then returns the constants of a program as they are in it.
    """

    def as_array(x: Any) -> Any:
        return x if isinstance(x, jax.Array) else jax.numpy.asarray(x)

    return lambda *groups: jax.tree.map(as_array, transformed(*groups))
