"""The one crossing between a caller's objects and a JAX transform.

Every lifted transform is the same four steps around a JAX transform:

    pack     outside: the arguments become a `Skeleton` (static) and a flat list of
             leaves; graph mode numbers shared objects across all arguments
    unpack   inside: fresh objects, owned by the inner trace; the function runs
    collect  inside: which Variables changed, did the structure change, the output;
             again static parts and flat lists of leaves
    commit   outside, after success only: all checks, then all writes

JAX sees flat lists only. A transform gives different leaves different axes, shardings
or roles by putting them in different groups (`Values`); what the leaves are and where
they belong is static data of the pytree nodes that carry them. So a cached call of
``jax.jit`` needs no bookkeeping: the static part of the output comes back with it.

What always holds:

- Nothing outside is written before `commit` has checked everything; then nothing fails.
- A Variable whose value is the object that came in was not changed, is not returned and
  not written.
- JAX knows what it traced again: a skeleton is static data of its arguments, and not
  closed over, but in `custom_vjp` and inside control flow (see `traced_once`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from graftree import _jax
from graftree.core.graph import flattening
from graftree.core.graph.flattening import KEEP, Builder, IndexMap, RefMap
from graftree.core.graph.graphdefs import ArrayRefDef, GraphDef, VariableDef
from graftree.core.imprints import HashableMapping
from graftree.core.objects import bookkeeping
from graftree.core.objects.pytrees import Pytree
from graftree.core.variables import values as variable_values
from graftree.core.variables import variables
from graftree.core.variables.variables import Variable
from graftree.transforms.crossing import alias_reports, loss_warnings, packing
from graftree.transforms.crossing.packing import Packed
from graftree.transforms.crossing.propagation import Propagation
from graftree.transforms.crossing.signatures import Skeleton

# Inside the trace.


@dataclasses.dataclass(frozen=True, eq=True)
class Returned:
    """The static part of what leaves a trace.

    Attributes:
        changed: The positions of the input leaves whose Variables changed.
        metadata: New metadata of Variables, with the positions of their leaves.
        structure: The skeleton of the arguments, if their structure changed.
        out: The skeleton of the output.
        kept: Those of ``changed`` that came back without a change.
        keeps_structure: Whether ``structure`` came back without a change.
    """

    changed: tuple[int, ...]
    metadata: tuple[tuple[int, HashableMapping], ...]
    structure: Skeleton | None
    out: Skeleton
    kept: tuple[int, ...] = ()
    keeps_structure: bool = False


jax.tree_util.register_static(Returned)


@dataclasses.dataclass(frozen=True, eq=False)
class Leaves:
    """The leaves of a skeleton that leaves a trace.

    Attributes:
        objects: Variables, refs, arrays, in order.
        is_new: Which of them the caller doesn't have; only these travel.
        opens_refs: Whether the content of a ref travels; JAX doesn't let refs out.
    """

    objects: list[Any]
    is_new: list[bool]
    opens_refs: bool = True

    def values(self) -> list[Any]:
        """The raw values of the new leaves."""
        new = itertools.compress(self.objects, self.is_new)
        raw_values = map(flattening.raw_of, new)
        return [x[...] if self.opens_refs and _jax.is_ref(x) else x for x in raw_values]


@dataclasses.dataclass(frozen=True, eq=False)
class Collected:
    """What leaves a trace: the static part, and the leaves in three flat lists.

    Attributes:
        returned: The static part.
        changed: New raw values, one per entry of ``returned.changed``.
        structure: The leaves of the structure; none if it didn't change.
        out: The leaves of the output.
    """

    returned: Returned
    changed: list[Any]
    structure: Leaves
    out: Leaves


class Linked(NamedTuple):
    """A part of an output that stands for arguments, as the carry of a loop does.

    Attributes:
        objects: The Variables in it; outside they are the caller's own.
        others: The rest of the output, which is checked for aliases.
    """

    objects: list[Any]
    others: Any


class Crossing:
    """The inside of one call: the fresh arguments, and what they were made of.

    Attributes:
        tree: The arguments, rebuilt; owned by the current trace.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        values: Sequence[Any],
        propagation: Propagation,
        transform: str,
        *,
        returns_captured: bool = False,
        is_detached: bool = False,
    ) -> None:
        self.skeleton = skeleton
        self.values = values
        self.propagation = propagation
        self.transform = transform
        self.returns_captured = returns_captured
        self.is_detached = is_detached
        # In-place writes to a list or dict would change what they are compared with.
        self._contents = {
            position: jax.tree.flatten(value)
            for position, value in enumerate(values)
            if not variable_values.is_array(value)
        }
        self.objects = IndexMap()
        self.tree, self._roots = packing.unpack(skeleton, values, self.objects)
        self._loses_structure = not (propagation.structure or is_detached)
        if self._loses_structure:
            self._pytrees = loss_warnings.pytrees_in(self.tree)

    @functools.cached_property
    def _outer(self) -> RefMap:
        """The numbers of the objects."""
        return RefMap.from_indexmap(self.objects)

    def collect(
        self,
        out: Any,
        forced: frozenset[int] = frozenset(),
        linked: Linked | None = None,
    ) -> Collected:
        """Finds what the function did to its arguments, and takes its output apart.

        Args:
            out: The output.
            forced: Positions of leaves that are returned even if they didn't change: of
                Variables, and of arrays in objects, with the structure around them.
            linked: What of the output stands for arguments, if any.

        Raises:
            ValueError: If the output contains an object that can't leave the trace.
        """
        if self._loses_structure and linked is None:
            self._warn_of_lost_structure()
        refs, known = RefMap(), RefMap()
        changed, metadata = [], []
        structure, structure_leaves, keeps = None, Leaves([], []), False
        if not self.is_detached:
            changed, metadata = self._find_changes(forced)
            if self.propagation.structure:
                structure, structure_leaves, keeps = self._find_structure(refs, forced)
                known = self._outer
        if linked is not None:
            outer = self._outer
            linked_objects = [x for x in linked.objects if x in outer]
            known = RefMap([*known.items(), *[(x, outer[x]) for x in linked_objects]])
        treedef, entries, leaves = packing.take_apart(
            out, self.propagation, refs, known, self.transform
        )
        self._check_output(out if linked is None else linked.others, refs)
        out_skeleton = Skeleton(treedef, tuple(entries))
        is_new = [leaf not in known for leaf in leaves]
        kept = tuple([p for p in changed if p in forced and self._is_kept(p)])
        return Collected(
            Returned(
                tuple(changed), tuple(metadata), structure, out_skeleton, kept, keeps
            ),
            [self.current(position) for position in changed],
            structure_leaves,
            Leaves(leaves, is_new, self.propagation.structure),
        )

    def _is_kept(self, position: int) -> bool:
        return self._is_same(self.current(position), position)

    def _is_same(self, raw: Any, position: int) -> bool:
        """Whether a raw value consists of the objects that came in."""
        if position not in self._contents:
            return raw is self.values[position]
        leaves, treedef = self._contents[position]
        current, current_def = jax.tree.flatten(raw)
        return current_def == treedef and all(map(operator.is_, current, leaves))

    def current(self, position: int) -> Any:
        """The raw value of a leaf now: that of its Variable, else what came in."""
        definition = self.skeleton.definitions()[position]
        if definition is None:
            return self.values[position]
        return flattening.raw_of(self.objects[definition.index])

    def _find_changes(
        self, forced: frozenset[int]
    ) -> tuple[list[int], list[tuple[int, HashableMapping]]]:
        changed, metadata = [], []
        for position, definition in enumerate(self.skeleton.definitions()):
            if not isinstance(definition, VariableDef):
                continue
            variable = self.objects[definition.index]
            raw = variable.get_raw_value()
            # A ref that is the same one was written in place, if at all.
            is_forced = position in forced and not _jax.is_ref(raw)
            if is_forced or not self._is_same(raw, position):
                changed.append(position)
            entries = variables.metadata_of(variable)
            if entries is not definition.metadata and entries != definition.metadata:
                metadata.append((position, entries))
        return changed, metadata

    def _warn_of_lost_structure(self) -> None:
        if self.propagation.sharing:
            entries, found, _ = self._flatten_again(RefMap())
            is_kept = self._is_unchanged(entries, found)
        else:
            is_kept = packing.is_same_tree(self.tree, self.skeleton, self._roots)
        if not is_kept:
            leaves = [
                value if definition is None else self.objects[definition.index]
                for definition, value in zip(
                    self.skeleton.definitions(), self.values, strict=True
                )
            ]
            loss_warnings.warn(self.transform, self.skeleton, leaves, self._pytrees)

    def _find_structure(
        self, refs: RefMap, forced: frozenset[int]
    ) -> tuple[Skeleton | None, Leaves, bool]:
        """Flattens the arguments again, and tells if they are built as they were.

        Returns:
            The structure, ``None`` if it need not come back; its leaves; whether it
            comes back without a change.
        """
        entries, leaves, is_new = self._flatten_again(refs)
        is_kept = self._is_unchanged(entries, leaves)
        definitions = self.skeleton.definitions()
        if is_kept and all(definitions[p] is not None for p in forced):
            return None, Leaves([], []), False
        skeleton = Skeleton(
            self.skeleton.treedef, tuple(entries), self.skeleton.statics
        )
        return skeleton, Leaves(leaves, is_new), is_kept

    def _flatten_again(
        self, refs: RefMap
    ) -> tuple[list[GraphDef[Any] | None], list[Any], list[bool]]:
        """The arguments as they are now: entries, leaves, which of these are new."""
        outer = self._outer
        entries: list[GraphDef[Any] | None] = []
        leaves: list[Any] = []
        is_new: list[bool] = []
        for root, entry in zip(self._roots, self.skeleton.entries, strict=True):
            if entry is None:
                # Nothing can change a plain argument.
                entries.append(None)
                leaves.append(root)
                is_new.append(False)
            else:
                graphdef, found = flattening.flatten_graph(root, refs, outer)
                entries.append(graphdef)
                leaves += found
                is_new += [leaf not in outer for leaf in found]
        return entries, leaves, is_new

    def _is_unchanged(
        self, entries: Sequence[GraphDef[Any] | None], leaves: Sequence[Any]
    ) -> bool:
        before = self.skeleton.entries
        if len(leaves) != len(self.values) or not all(
            new is old or (new is not None and old is not None and _same_def(new, old))
            for new, old in zip(entries, before, strict=True)
        ):
            return False
        return all(
            isinstance(leaf, Variable) or leaf is value
            for leaf, value in zip(leaves, self.values, strict=True)
        )

    def _check_output(self, out: Any, refs: RefMap) -> None:
        if not refs:
            return  # no objects in it, as in most cases
        outer = self._outer
        if not self.propagation.structure:
            alias_reports.check_outputs(
                self._named_objects(), out, self.propagation, self.transform
            )
        if self.returns_captured and self.propagation.structure:
            return
        for obj in refs:
            if obj in outer:
                continue
            is_owned = not isinstance(obj, Variable) or variables.is_owned(obj)
            if isinstance(obj, Pytree) and self.propagation.structure:
                is_owned = bookkeeping.state_of(obj).is_owned()
            if not is_owned:
                raise self._captured_error(obj, out)
        if not (self.propagation.structure or self.is_detached):
            new = [obj for obj in refs if obj not in outer]
            alias_reports.check_no_refs(new, out, self.transform)

    def _named_objects(self) -> list[tuple[str, Any]]:
        """The Variables and refs that came in, with their paths."""
        definitions = self.skeleton.definitions()
        return [
            (f".{name}", self.objects[definition.index])
            for name, definition in zip(self.skeleton.names(), definitions, strict=True)
            if definition is not None
        ]

    def _captured_error(self, obj: Any, out: Any) -> ValueError:
        if self.propagation.structure:
            return alias_reports.extracted_error(obj, self.transform)
        return alias_reports.captured_error(obj, out, self.transform)


def _same_def(new: GraphDef[Any], old: GraphDef[Any]) -> bool:
    """Whether a skeleton is the one that came in, apart from its outer numbers."""
    return (
        new.attributes == old.attributes
        and len(new.nodes) == len(old.nodes)
        and all(map(_same_node, new.nodes, old.nodes))
    )


def _same_node(new: Any, old: Any) -> bool:
    if type(new) is not type(old):
        return False
    if isinstance(new, VariableDef):
        # Metadata travels on its own.
        return new.type is old.type and new.index == old.index == new.outer_index
    index = getattr(new, "outer_index", None)
    return (new if index is None else new._replace(outer_index=None)) == old and (
        index is None or index == new.index
    )


# Outside again.


def commit(
    packed: Packed,
    returned: Returned,
    changed: Sequence[Any],
    structure: Sequence[Any],
    out: Sequence[Any],
) -> Any:
    """Writes what the function did into the caller's objects: all of it, or nothing.

    Args:
        packed: The call.
        returned: The static part of what came back.
        changed: New raw values of Variables, in the order of ``returned.changed``.
        structure: The new leaves of the structure.
        out: The leaves of the output.

    Returns:
        The output; returned inputs are the caller's own objects.

    Raises:
        TraceContextError: If another trace owns an object that would change.
    """
    writes = _Writes(packed, returned, changed)
    writes.check()
    if returned.structure is None or returned.keeps_structure:
        builder = Builder(IndexMap(packed.objects), packed.objects)
    else:
        builder = Builder(IndexMap(), packed.objects)
        entries = [entry for entry in returned.structure.entries if entry is not None]
        packing.build_entries(
            builder, entries, _filled(entries, structure, packed.objects)
        )
    entries = returned.out.entries
    roots = packing.build_entries(
        builder, entries, _filled(entries, out, packed.objects)
    )
    builder.check()
    writes.commit()
    builder.commit()
    return jax.tree.unflatten(returned.out.treedef, roots)


class _Writes:
    """What a call writes into Variables: values and metadata."""

    def __init__(
        self, packed: Packed, returned: Returned, changed: Sequence[Any]
    ) -> None:
        self.packed = packed
        self.metadata = returned.metadata
        # What came back unchanged needs no write where none is allowed.
        self.values = [
            (position, value)
            for position, value in zip(returned.changed, changed, strict=True)
            if position not in returned.kept
            or variables.may_write(packed.leaves[position])
        ]

    def check(self) -> None:
        """Raises if one of them is not allowed."""
        leaves = self.packed.leaves
        for position, value in self.values:
            self._check(variables.check_write, position, leaves[position], value)
        for position, _ in self.metadata:
            self._check(variables.check_owned, position, leaves[position])

    def _check(self, check: Callable[..., None], position: int, *args: Any) -> None:
        try:
            check(*args)
            return
        except Exception:
            path = self.packed.skeleton.names()[position]
        check(*args, path)  # raises again, with the path, which costs more to find

    def commit(self) -> None:
        """Carries them out."""
        leaves = self.packed.leaves
        variables.store_all(
            [leaves[position] for position, _ in self.values],
            [value for _, value in self.values],
        )
        for position, entries in self.metadata:
            variables.replace_metadata(leaves[position], entries)


def _filled(
    entries: Sequence[GraphDef[Any] | None],
    leaves: Sequence[Any],
    existing: Mapping[int, Any],
) -> list[Any]:
    """The leaves for a builder: KEEP where a Variable exists outside; refs made anew.

    Args:
        entries: What is built.
        leaves: The new leaves, with the content of refs in their place.
        existing: The objects outside, by number.
    """
    given = iter(leaves)
    refs: dict[int, Any] = {}
    filled: list[Any] = []
    for entry in entries:
        definitions = [None] if entry is None else [d for _, d in entry.leaves()]
        for definition in definitions:
            exists = definition is not None and definition.outer_index is not None
            value = KEEP if exists else next(given)
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
