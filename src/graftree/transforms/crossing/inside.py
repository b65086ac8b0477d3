"""The inside of the crossing: new objects for the function, and its changes to them.

    Inside      one call: objects of the inner trace, owned by it
    Returned    the static part of the result that leaves the trace
    Outgoing    a value that leaves it

A result of `Inside.leave` is ``(Returned, changed, structure, out)``: groups of raw
values for each of the last three, one group per value of the prefix (`packing.part_of`
puts them together). Their meaning is static data, part of JAX's own cache key; so a
cached call needs no bookkeeping.

A Variable whose value is still the object that came in was not changed, is not returned
and not written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from graftree import _jax, errors
from graftree.core.graph import flattening
from graftree.core.graph.graphdefs import LEAF, Cell, VariableDef
from graftree.core.imprints import HashableMapping
from graftree.core.objects import bookkeeping, callables, pytrees, running
from graftree.core.states import states
from graftree.core.variables import partitioning, values, variables
from graftree.core.variables.variables import Variable
from graftree.transforms.crossing import debug_info, decorators, packing, refusals
from graftree.transforms.crossing.guards import guarded, note
from graftree.transforms.crossing.packing import Named, Names, Parts, Values, Whole
from graftree.transforms.crossing.prefixes import Occurrence, Prefix
from graftree.transforms.crossing.rows import HiddenAxisNames, Row
from graftree.transforms.crossing.signatures import FUNCTIONS, Signature


@dataclasses.dataclass(frozen=True)
class Returned:
    """The static part of the result that leaves a trace.

    Attributes:
        changed: The positions of the input leaves whose Variables changed.
        metadata: New metadata of Variables, with the positions of their leaves.
        structure: The signature of the arguments, if their structure changed.
        out: The signature of the output.
        groups: The number of the group of each leaf that is changed, of the structure,
            of the output.
        kept: Those of ``changed`` that came back without a change.
        keeps_structure: Whether ``structure`` came back without a change.
        names: The names of the leaves of each of the three.
    """

    changed: tuple[int, ...]
    metadata: tuple[tuple[int, HashableMapping], ...]
    structure: Signature | None
    out: Signature
    groups: tuple[tuple[int, ...], ...]
    kept: tuple[int, ...] = ()
    keeps_structure: bool = False
    names: tuple[Names, ...] = dataclasses.field(default=(), compare=False, repr=False)

    @functools.cached_property
    def is_plain(self) -> bool:
        """Whether nothing happened but new values of Variables and returned leaves."""
        has_leaves_only = all(map(_is_new_leaf, self.out.entries))
        has_more = self.metadata or self.structure or self.out.has_callables
        return has_leaves_only and not has_more

    @functools.cached_property
    def unflatten(self) -> Callable[[Sequence[Any]], Any]:
        """Makes the output of its leaves."""
        treedef = self.out.treedef
        if treedef.num_nodes == treedef.num_leaves == 1:
            return operator.itemgetter(0)
        return states.builder(treedef)

    @functools.cached_property
    def build(self) -> Callable[[Sequence[Any]], Any]:
        """Makes the output of its arrays, if it is plain and has no `links`."""
        if not self.variables:
            return self.unflatten
        make, unflatten = flattening.maker(self.variables), self.unflatten
        return lambda arrays: unflatten(make(arrays))

    @functools.cached_property
    def links(self) -> bool:
        """Whether the output has Variables that exist outside, if it is plain."""
        return any(
            [x is not None and x.outer_index is not None for x in self.variables]
        )

    @functools.cached_property
    def variables(self) -> tuple[VariableDef | None, ...]:
        """The kinds of leaves of the output, if it is plain; empty for only arrays."""
        definitions = [slot.variable for slot in self.out.slots]
        return tuple(definitions) if any(definitions) else ()


def _is_new_leaf(entry: Cell) -> bool:
    """Whether an entry is an array, or a Variable that was not met before."""
    return entry is LEAF or (
        isinstance(entry, VariableDef) and entry.array_refdef is None
    )


def _as_static(returned: Returned) -> Any:
    # JAX compares static data and does not hash it.
    return (), {(): returned}


# As by `register_static`; but static data leaves a cached call without Python code: it
# is looked up by its children, of which there are none.
jax.tree_util.register_pytree_with_keys(Returned, _as_static, operator.getitem)


class Outgoing(NamedTuple):
    """A leaf that leaves a trace.

    Attributes:
        position: Its number: that of the input which it changes, or in the signature of
            the structure or output.
        group: The number of its group.
        value: Its raw value.
    """

    position: int
    group: int
    value: Any


class Collected(NamedTuple):
    """The result that leaves a trace: the static part, and the leaves."""

    returned: Returned
    changed: list[Outgoing]
    structure: list[Outgoing]
    out: list[Outgoing]

    def whole(self) -> Whole:
        """The result of `Inside.leave` where JAX has no prefix for it."""
        returned, *parts = self
        return Whole((returned, *[[leaf.value for leaf in part] for part in parts]))


class Linked(NamedTuple):
    """A part of an output that stands for arguments, as the carry of a loop does.

    Attributes:
        objects: The Variables in it; outside they are the caller's own.
        others: The rest of the output, which is checked for aliases.
    """

    objects: list[Any]
    others: Any


class Inside:
    """The inside of one call: the arguments as fresh objects of the current trace.

    Attributes:
        signature: The static part of the arguments.
        values: Their raw values.
        roles: For each leaf the number of its group.
        objects: The fresh objects by number.
        tree: ``(args, kwargs)``, rebuilt, without the static arguments; third, what the
            functions hold. Callables in it are taken apart.
    """

    def __init__(
        self,
        row: Row,
        signature: Signature,
        given: Sequence[Any],
        roles: Sequence[int],
    ) -> None:
        self.row = row
        self.signature, self.roles = signature, roles
        # JAX leaves arrays of NumPy where it traces nothing of them. Then a write to a
        # Variable would reach the caller's array at once, also if the function fails,
        # and could not be traced.
        self.values = [
            values.as_jax(x) if isinstance(x, np.ndarray) and slot.variable else x
            for slot, x in zip(signature.slots, given, strict=True)
        ]
        # In-place writes to a list or dict would change the values to compare with.
        self._contents = {
            position: jax.tree.flatten(value)
            for position, value in enumerate(self.values)
            if not values.is_array(value)
        }
        self.objects = flattening.IndexMap()
        self.tree, self._roots = packing.unpack(
            self.signature, self.values, self.objects
        )
        self._loses_structure = not (row.mode.structure or row.is_detached)
        if self._loses_structure:
            self._pytrees = refusals.pytrees_in(self.tree)

    def run(
        self,
        f: Callable[..., Any],
        number: int = 0,
        around: Callable[[Any], Callable[..., Any]] = lambda f: f,
    ) -> Any:
        """The output of the function for these arguments.

        Args:
            f: The function.
            number: The one in the tree that stands for it if it holds objects.
            around: Makes the function to call of it.
        """
        tree: Any = self.tree
        if self.signature.has_callables:
            tree = callables.closed(tree)
        args, kwargs = decorators.put(tree[:2], self.signature.statics)
        functions = tree[2] if len(tree) > 2 else ()
        if functions and functions[number] is not None:
            f = functions[number]
        f = around(f)
        names = functools.partial(debug_info.named, f)
        with self._guard(), running.inside(self.row, names, args, kwargs, functions):
            if partitioning.PARTITION_NAME not in self.row.axis_metadata:
                return f(*args, **kwargs)
            hidden = HiddenAxisNames(self._given, self.row.axis_metadata)
            out = f(*args, **kwargs)
            hidden.put_back(self._occurrences(out))
            return out

    def argument(self, number: int) -> Any:
        """A positional argument, or what the functions hold."""
        return self.tree[2] if number == FUNCTIONS else self.tree[0][number]

    def _guard(self) -> contextlib.AbstractContextManager[None]:
        # Most objects have nothing to guard, which stays so each time they are built.
        signature = self.signature
        if signature.has_no_contents and not self._contents:
            return contextlib.nullcontext()
        noted = note(self.tree)
        if not noted and not self._contents:
            signature.has_no_contents = True
        return guarded(noted, self.row.name)

    # The way out.

    def leave(self, out: Any, forced: frozenset[int] = frozenset()) -> Any:
        """The result: the function's changes to its arguments, and its output."""
        collected = self.collect(out, forced=forced)
        if not self.row.has_prefixes:
            return collected.whole()
        returned, *parts = collected
        ins, outs = len(self.row.inputs.values), len(self.row.outputs.values)
        grouped = map(_in_groups, parts, (ins, ins, outs), returned.names)
        return Parts((returned, *grouped))

    def collect(
        self,
        out: Any,
        linked: Linked | None = None,
        forced: frozenset[int] = frozenset(),
    ) -> Collected:
        """Finds the function's changes to its arguments, and takes its output apart.

        Leaves at ``forced`` positions are returned even if they didn't change: of
        Variables, and of arrays in objects, with the structure around them. ``linked``
        parts of the output stand for arguments.
        """
        row, mode = self.row, self.row.mode
        forced |= self._returned_unchanged()
        refs, known = flattening.RefMap(), flattening.RefMap()
        changed, metadata = [], ()
        structure, held, keeps = None, [], False
        if not row.is_detached:
            changed, metadata = self._find_changes(forced)
            if mode.structure:
                structure, held, keeps = self._find_structure(refs, forced)
                known = self._numbers
        if self._loses_structure and linked is None:
            self._warn_of_lost_structure()
        if linked is not None:
            numbers = self._numbers
            pairs = [(x, numbers[x]) for x in linked.objects if x in numbers]
            known = flattening.RefMap([*known.items(), *pairs])
        skeleton, leaves = packing.take_apart(out, mode, refs, known, row.name)
        self._check_output(out if linked is None else linked.others, refs)
        output = Signature(skeleton)
        if row.may_differ(self.signature, structure, output):
            refusals.check_consistent(row.name, self._occurrences(out))
        parts = (
            changed,
            [] if structure is None else self._new_in_arguments(structure, held),
            self._new(row.outputs, output, leaves, known, mode.structure),
        )
        kept = [p for p, _, x in changed if p in forced and self._is_same(x, p)]
        returned = Returned(
            changed=_positions(changed),
            metadata=metadata,
            structure=structure,
            out=output,
            groups=tuple([tuple([leaf.group for leaf in part]) for part in parts]),
            kept=tuple(kept),
            keeps_structure=keeps,
            names=(
                Names(self.signature, _positions(changed)),
                Names(structure or self.signature, _positions(parts[1])),
                Names(output, _positions(parts[2]), row.labels.output),
            ),
        )
        return Collected(returned, *parts)

    def _returned_unchanged(self) -> frozenset[int]:
        # A donated buffer is gone after the call, so its Variable needs a new one.
        row, placed = self.row, self.row.returns_placed and self.row.mode.structure
        flags = [
            group in row.inputs.donated or (placed and value is not None)
            for group, value in enumerate(row.inputs.values)
        ]
        if not any(flags):
            return frozenset()
        return frozenset(
            position
            for position, slot in enumerate(self.signature.slots)
            if flags[self.roles[position]] and slot.variable
        )

    def _new_in_arguments(
        self, structure: Signature, leaves: Sequence[Any]
    ) -> list[Outgoing]:
        found = self._new(self.row.inputs, structure, leaves, self._numbers, True)
        # Nothing can change a plain argument.
        return [leaf for leaf in found if not structure.slots[leaf.position].is_plain]

    def _new(
        self,
        prefix: Prefix,
        signature: Signature,
        leaves: Sequence[Any],
        known: flattening.RefMap,
        opens_refs: bool,
    ) -> list[Outgoing]:
        """The leaves of a signature that are not known outside, in their groups.

        JAX doesn't let refs out; with ``opens_refs`` their content travels.
        """
        found = []
        groups = prefix.group(signature, leaves)
        for position, (leaf, group) in enumerate(zip(leaves, groups, strict=True)):
            if leaf not in known:
                raw = flattening.raw_of(leaf)
                value = raw[...] if opens_refs and _jax.is_ref(raw) else raw
                found.append(Outgoing(position, group, value))
        return found

    def current(self, position: int) -> Any:
        """The raw value of a leaf now: its Variable's, else the one that came in."""
        definition = self.signature.slots[position].definition
        if definition is None:
            return self.values[position]
        return flattening.raw_of(self.objects[definition.index])

    def _is_same(self, raw: Any, position: int) -> bool:
        """Whether a raw value consists of the objects that came in."""
        if position not in self._contents:
            return raw is self.values[position]
        leaves, treedef = self._contents[position]
        current, current_def = jax.tree.flatten(raw)
        return current_def == treedef and all(map(operator.is_, current, leaves))

    def _find_changes(
        self, forced: frozenset[int]
    ) -> tuple[list[Outgoing], tuple[tuple[int, HashableMapping], ...]]:
        """The Variables that changed, and the metadata that did."""
        changed, metadata = [], []
        for position, slot in enumerate(self.signature.slots):
            definition = slot.variable
            if definition is None:
                continue
            variable = self.objects[definition.index]
            if type(variable) is not definition.type:
                name = f"{self.row.name}: {slot.name}"
                raise refusals.changed_class_error(variable, definition.type, name)
            raw = variable.get_raw_value()
            # A ref that is the same one was written in place, if at all.
            is_forced = position in forced and not _jax.is_ref(raw)
            if is_forced or not self._is_same(raw, position):
                changed.append(Outgoing(position, self.roles[position], raw))
            before, entries = definition.metadata, variables.metadata_of(variable)
            if entries is not before and entries != before:
                metadata.append((position, entries))
        return changed, tuple(metadata)

    # The structure.

    @functools.cached_property
    def _numbers(self) -> flattening.RefMap:
        """The numbers of the objects."""
        return flattening.RefMap.from_indexmap(self.objects)

    def _find_structure(
        self, refs: flattening.RefMap, forced: frozenset[int]
    ) -> tuple[Signature | None, list[Any], bool]:
        """The arguments now, ``None`` if they stay outside; are they unchanged?"""
        slots = self.signature.slots
        may_stay = all([slots[p].definition is not None for p in forced])
        is_kept = self._is_unchanged()
        if is_kept and may_stay:
            refs.take(self._numbers)
            return None, [], False
        skeleton, leaves = flattening.flatten_leaves(
            self.signature.treedef, self._roots, True, refs, self._numbers
        )
        now = dataclasses.replace(self.signature, skeleton=skeleton)
        return now, leaves, is_kept

    def _is_unchanged(self) -> bool:
        """Whether the arguments are the objects that came in, built as they were.

        Metadata of Variables travels on its own.
        """
        definitions = [slot.variable for slot in self.signature.slots]
        skeleton, leaves = flattening.flatten_leaves(
            self.signature.treedef,
            self._roots,
            True,
            flattening.RefMap(),
            self._numbers,
            as_before={x.index: x for x in definitions if x},
        )
        if skeleton != self.signature.skeleton:
            return False
        pairs = zip(definitions, leaves, self.values, strict=True)
        return all([variable or leaf is value for variable, leaf, value in pairs])

    def _warn_of_lost_structure(self) -> None:
        mode, roots, is_kept = self.row.mode, self._roots, True
        if not mode.sharing:
            is_kept = packing.is_same_tree(self.tree, self.signature, roots, mode)
        if mode.sharing or self.row.functions is not None:
            is_kept = is_kept and self._is_unchanged()
        if not is_kept:
            leaves = packing.leaves_of(self.signature, self.values, self.objects)
            numbers = flattening.IndexMap()
            before, _ = packing.unpack(self.signature, leaves, numbers, are_raw=False)
            refusals.warn_of_lost_structure(
                self.row.name, refusals.pytrees_in(before), self._pytrees
            )

    # Values that may not leave.

    def _check_output(self, out: Any, refs: flattening.RefMap) -> None:
        if not refs:
            return  # no objects in it, as in most cases
        row, structure = self.row, self.row.mode.structure
        if not structure:
            named = [
                (f".{slot.name}", self.objects[slot.definition.index])
                for slot in self.signature.slots
                if slot.definition is not None
            ]
            refusals.check_outputs(named, out, row.mode, row.name)
        if row.returns_captured and structure:
            return
        new = [obj for obj in refs if obj not in self._numbers]
        for obj in new:
            is_owned = not isinstance(obj, Variable) or variables.is_owned(obj)
            if isinstance(obj, pytrees.Pytree) and structure:
                is_owned = bookkeeping.state_of(obj).is_owned()
            if not is_owned and structure:
                raise refusals.extracted_error(obj, row.name)
            if not is_owned:
                raise refusals.captured_error(obj, out, row.name)
        if not (structure or row.is_detached):
            refusals.check_no_refs(new, out, row.name)

    @functools.cached_property
    def _given(self) -> list[Occurrence]:
        """The Variables in the arguments as they came."""
        return [*self.row.occurrences(self.tree)]

    def _occurrences(self, out: Any) -> list[Occurrence]:
        """The Variables in the arguments as they are now, and in the output."""
        # A changed structure that doesn't propagate needs no prefix, and may lack one.
        row, structure = self.row, self.row.mode.structure
        inputs = row.occurrences(self.tree) if structure else self._given
        return [*inputs, *row.outputs.occurrences(out, row.mode.sharing)]


def interior(f: Callable[..., Any], row: Row) -> Callable[..., Any]:
    """The function that JAX traces: it takes groups of leaves and returns a result."""

    def traced(*groups: Values) -> Any:
        inside = Inside(row, *packing.join(groups))
        result = inside.leave(inside.run(f))
        if row.traces is not None:
            errors.fenced(row.traces.add, inside.signature, inside.values, f)
        return result

    return debug_info.named_after(f, traced)


def _in_groups(leaves: Iterable[Outgoing], count: int, names: Names) -> Any:
    """The values of leaves by group, with their names."""
    groups: list[list[Outgoing]] = [[] for _ in range(count)]
    for leaf in leaves:
        groups[leaf.group].append(leaf)
    named = [dataclasses.replace(names, positions=_positions(x)) for x in groups]
    values_of = [[leaf.value for leaf in group] for group in groups]
    return packing.part_of([*map(Named.of, named, values_of)])


def _positions(leaves: Sequence[Outgoing]) -> tuple[int, ...]:
    return tuple([leaf.position for leaf in leaves])
