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
- The functions that JAX traces don't close over a skeleton, so their identity is that
  of the user's function and JAX's caches work.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax

from graftree import _jax
from graftree.core import flattening, labels, ownership, pytrees, variables
from graftree.core.flattening import KEEP, Builder, IndexMap, RefMap
from graftree.core.metadata import HashableMapping
from graftree.core.skeletons import GraphDef, VariableDef
from graftree.core.variables import Variable
from graftree.transforms import aliasing, packing
from graftree.transforms.packing import Packed, Skeleton
from graftree.transforms.propagation import Propagation

# Inside the trace.


@dataclasses.dataclass(frozen=True, eq=True)
class Returned:
    """The static part of what leaves a trace.

    Attributes:
        changed: The positions of the input leaves whose Variables changed.
        metadata: New metadata of Variables, with the positions of their leaves.
        structure: The skeleton of the arguments, if their structure changed.
        out: The skeleton of the output.
    """

    changed: tuple[int, ...]
    metadata: tuple[tuple[int, HashableMapping], ...]
    structure: Skeleton | None
    out: Skeleton


jax.tree_util.register_static(Returned)


@dataclasses.dataclass(frozen=True, eq=False)
class Leaves:
    """The leaves of a skeleton that leaves a trace.

    Attributes:
        objects: Variables, refs, arrays, in order.
        is_new: Which of them the caller doesn't have; only these travel.
    """

    objects: list[Any]
    is_new: list[bool]

    def values(self) -> list[Any]:
        """The raw values of the new leaves."""
        return [
            packing.raw_of(x) for x in itertools.compress(self.objects, self.is_new)
        ]


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
        self.snapshots = [jax.tree.flatten(value) for value in values]
        self.objects = IndexMap()
        self.tree, self.roots = unpack(skeleton, values, self.objects)

    def collect(self, out: Any, forced: frozenset[int] = frozenset()) -> Collected:
        """Finds what the function did to its arguments, and takes its output apart.

        Args:
            out: The output.
            forced: Positions of leaves that are returned even if they didn't change.

        Raises:
            ValueError: If the output contains an object that can't leave the trace.
        """
        outer = RefMap.from_indexmap(self.objects)
        refs, known = RefMap(), RefMap()
        changed, metadata = [], []
        structure, structure_leaves = None, Leaves([], [])
        if not self.is_detached:
            changed, metadata = self._find_changes(forced)
            if self.propagation.structure:
                structure, structure_leaves = self._find_structure(refs, outer)
                known = outer
        treedef, entries, leaves = packing.take_apart(
            out, self.propagation, refs, known, self.transform
        )
        self._check_output(out, refs, outer)
        out_skeleton = Skeleton(treedef, tuple(entries))
        return Collected(
            Returned(tuple(changed), tuple(metadata), structure, out_skeleton),
            [self._current(position) for position in changed],
            structure_leaves,
            Leaves(leaves, [leaf not in known for leaf in leaves]),
        )

    def _current(self, position: int) -> Any:
        definition = self.skeleton.definitions()[position]
        if definition is None:
            return self.values[position]
        return packing.raw_of(self.objects[definition.index])

    def _find_changes(
        self, forced: frozenset[int]
    ) -> tuple[list[int], list[tuple[int, HashableMapping]]]:
        changed, metadata = [], []
        for position, definition in enumerate(self.skeleton.definitions()):
            if not isinstance(definition, VariableDef):
                continue
            variable = self.objects[definition.index]
            raw = variable.get_raw_value()
            if position in forced or not _is_same(raw, self.snapshots[position]):
                if not (_jax.is_ref(raw) and _is_same(raw, self.snapshots[position])):
                    changed.append(position)
            entries = labels.metadata_of(variable)
            if entries is not definition.metadata and entries != definition.metadata:
                metadata.append((position, entries))
        return changed, metadata

    def _find_structure(
        self, refs: RefMap, outer: RefMap
    ) -> tuple[Skeleton | None, Leaves]:
        """Flattens the arguments again; ``None`` if they are built as they were."""
        entries: list[GraphDef[Any] | None] = []
        leaves: list[Any] = []
        is_new: list[bool] = []
        for root, entry in zip(self.roots, self.skeleton.entries, strict=True):
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
        if self._is_unchanged(entries, leaves):
            return None, Leaves([], [])
        skeleton = Skeleton(self.skeleton.treedef, tuple(entries))
        return skeleton, Leaves(leaves, is_new)

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

    def _check_output(self, out: Any, refs: RefMap, outer: RefMap) -> None:
        if not self.propagation.structure:
            aliasing.check_outputs(
                self._named_objects(), out, self.propagation, self.transform
            )
        if self.returns_captured:
            return
        for obj in refs:
            if obj in outer:
                continue
            if isinstance(obj, Variable):
                if not variables.is_owned(obj):
                    raise self._captured_error(obj, out)
            elif isinstance(obj, pytrees.Pytree) and self.propagation.structure:
                if not pytrees.state_of(obj).is_owned():
                    raise self._captured_error(obj, out)

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
            return aliasing.extracted_error(obj, self.transform)
        return aliasing.captured_error(obj, out, self.transform)


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


def _is_same(raw: Any, snapshot: tuple[list[Any], Any]) -> bool:
    leaves, treedef = snapshot
    if len(leaves) == 1 and raw is leaves[0]:
        return True
    current, current_def = jax.tree.flatten(raw)
    return current_def == treedef and all(
        a is b for a, b in zip(current, leaves, strict=True)
    )


def unpack(
    skeleton: Skeleton, values: Sequence[Any], objects: IndexMap
) -> tuple[Any, list[Any]]:
    """Rebuilds a tree of arguments as fresh objects of the current trace.

    Args:
        skeleton: The static part.
        values: The raw values of all leaves.
        objects: Filled with the objects by number.

    Returns:
        The tree, and the leaves of its treedef.
    """
    builder = Builder(objects, {})
    roots = _build_entries(builder, skeleton.entries, values)
    builder.commit()
    return jax.tree.unflatten(skeleton.treedef, roots), roots


def _build_entries(
    builder: Builder, entries: Sequence[GraphDef[Any] | None], leaves: Sequence[Any]
) -> list[Any]:
    roots: list[Any] = []
    position = 0
    for entry in entries:
        if entry is None:
            roots.append(leaves[position])
            position += 1
        else:
            end = position + entry.num_leaves
            roots.append(builder.build(entry, leaves[position:end]))
            position = end
    return roots


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
    written = [packed.leaves[position] for position in returned.changed]
    relabeled = [
        (packed.leaves[position], entries) for position, entries in returned.metadata
    ]
    for variable in (*written, *[variable for variable, _ in relabeled]):
        if not variables.is_owned(variable):
            position = next(
                i for i, leaf in enumerate(packed.leaves) if leaf is variable
            )
            raise ownership.variable_error(variable, packed.skeleton.names()[position])
    if returned.structure is None:
        builder = Builder(IndexMap(packed.objects), packed.objects)
    else:
        builder = Builder(IndexMap(), packed.objects)
        entries = [entry for entry in returned.structure.entries if entry is not None]
        _build_entries(builder, entries, _with_kept(entries, structure))
    roots = _build_entries(
        builder, returned.out.entries, _with_kept(returned.out.entries, out)
    )
    builder.check()
    variables.write_raw(written, changed)
    for variable, metadata in relabeled:
        labels.replace_metadata(variable, metadata)
    builder.commit()
    return jax.tree.unflatten(returned.out.treedef, roots)


def _with_kept(
    entries: Sequence[GraphDef[Any] | None], leaves: Sequence[Any]
) -> list[Any]:
    """The leaves with KEEP in the places of Variables that exist outside."""
    given = iter(leaves)
    filled: list[Any] = []
    for entry in entries:
        definitions = [None] if entry is None else [d for _, d in entry.leaves()]
        for definition in definitions:
            exists = definition is not None and definition.outer_index is not None
            filled.append(KEEP if exists else next(given))
    return filled
