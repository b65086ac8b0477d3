"""(skeleton, leaves) to object.

A `Builder` makes the object. With ``outer_index_outer_ref`` it reuses objects that
exist: it first builds everything new, then writes into the existing ones. So it either
succeeds, or changes nothing that existed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import jax

from graftree import _jax
from graftree.core.graph import flattening, nodes
from graftree.core.graph.flattening import IndexMap
from graftree.core.graph.graphdefs import (
    LEAF,
    NODE,
    ArrayRefDef,
    Cell,
    GraphDef,
    NodeRef,
    NodeRow,
    Static,
    Tree,
    VariableDef,
)
from graftree.core.graph.nodes import GraphKind
from graftree.core.imprints import HashableMapping
from graftree.core.objects import bookkeeping, pytrees
from graftree.core.variables import values, variables
from graftree.core.variables.variables import MISSING, Variable


def unflatten(
    graphdef: GraphDef[Any],
    leaves: Sequence[Any],
    *,
    index_ref: MutableMapping[int, Any] | None = None,
    outer_index_outer_ref: Mapping[int, Any] | None = None,
    recreate_variables: bool = True,
) -> Any:
    """The object of a skeleton of either mode, from its leaves in order."""
    builder = Builder(
        IndexMap() if index_ref is None else index_ref,
        outer_index_outer_ref or {},
        recreate_variables=recreate_variables,
    )
    root = builder.build(graphdef, leaves)
    builder.check()
    builder.commit()
    return root


# A leaf that stands for "the existing Variable keeps what it has".
KEEP: Any = object()


class Builder:
    """One reconstruction of one or several objects that share references.

    `build` makes new objects and puts off all writes into existing ones; `check` raises
    if one of them is not allowed; `commit` carries them out.

    Args:
        found: Objects by number; it is filled, and later skeletons may refer to it.
        existing: Objects to reuse, by the ``outer_index`` of the skeleton.
        recreate_variables: Whether raw leaves become Variables.
    """

    def __init__(
        self,
        found: MutableMapping[int, Any],
        existing: Mapping[Any, Any],
        *,
        recreate_variables: bool = True,
    ) -> None:
        self.found = found
        self.existing = existing
        self.recreate_variables = recreate_variables
        self.fills: list[tuple[Any, GraphKind, Any, Sequence[Any], Sequence[Any]]] = []
        self.updates: list[tuple[Variable[Any], Any, Any]] = []

    def build(self, graphdef: GraphDef[Any], leaves: Sequence[Any]) -> Any:
        """The object of a skeleton; what is reused in it is complete after `commit`."""
        if graphdef.root is not NODE:
            return self._value(graphdef.root, iter(leaves))
        root, values = self._build_root(graphdef.rows, leaves)
        return self._made(root, values)

    def members(self, graphdef: GraphDef[Any], leaves: Sequence[Any]) -> list[Any]:
        """What is in the cells of the root, as by `build`."""
        return self._build_root(graphdef.rows, leaves)[1]

    def _build_root(
        self, rows: Sequence[NodeRow], leaves: Sequence[Any]
    ) -> tuple[NodeRow, list[Any]]:
        """The root, and what is in its cells."""
        given, remaining = iter(leaves), iter(rows)
        # The rows above, and what was found in them. No recursion, whose depth Python
        # limits.
        pending = [self._opened(next(remaining))]
        while True:
            row, cells, values = pending[-1]
            for cell in cells:
                if type(cell) is Static:
                    values.append(cell[1])
                elif cell is NODE:
                    pending.append(self._opened(next(remaining)))
                    break
                else:
                    values.append(self._value(cell, given))
            else:
                pending.pop()
                if not pending:
                    return row, values
                pending[-1][2].append(self._made(row, values))

    def _opened(self, row: NodeRow) -> tuple[NodeRow, Iterator[Cell], list[Any]]:
        # Objects come before what is below them, which may refer to them.
        if row.index is not None:
            obj = self._existing(row)
            if obj is MISSING:
                kind: Any = nodes.kind_of_type(row.type)
                obj = kind.create_empty(row.metadata)
            self.found[row.index] = obj
        return row, iter(row.cells), []

    def _made(self, row: NodeRow, values: list[Any]) -> Any:
        """The object or container of a row, with these values in its cells."""
        if type(row.metadata) is Tree:
            return unflatten_tree(row.metadata, values)
        kind: Any = nodes.kind_of_type(row.type)
        if row.index is None:
            return kind.unflatten([*zip(row.keys, values, strict=True)], row.metadata)
        obj = self.found[row.index]
        if obj is self.existing.get(row.outer_index, MISSING):
            self.fills.append((obj, kind, row.metadata, row.keys, values))
        else:
            # At once: a container around it may look into it.
            kind.fill(obj, row.metadata, row.keys, values)
        return obj

    def _value(self, cell: Any, given: Iterator[Any]) -> Any:
        if cell is LEAF:
            return next(given)
        if type(cell) is NodeRef:
            return self.found[cell.index]
        return self._leaf(cell, next(given))

    def _leaf(self, definition: Any, leaf: Any) -> Any:
        if isinstance(definition, ArrayRefDef):
            # A frozen array instead of a ref is allowed and stays an array.
            kept = leaf is KEEP
            ref = self.existing[definition.outer_index] if kept else leaf
            self.found[definition.index] = ref
            return ref
        variable = self._existing(definition)
        if variable is MISSING:
            variable = _as_variable(definition, leaf, self.recreate_variables)
        elif leaf is not KEEP:
            self.updates.append((variable, leaf, definition.metadata))
        self.found[definition.index] = variable
        if isinstance(definition.array_refdef, ArrayRefDef):
            self.found[definition.array_refdef.index] = variable.get_raw_value()
        return variable

    def _existing(self, node: NodeRow | VariableDef) -> Any:
        """The object that is reused for an entry of a skeleton, or `MISSING`."""
        obj = self.existing.get(node.outer_index, MISSING)
        if obj is not MISSING and type(obj) is not node.type:
            raise ValueError(
                f"Expected an object of type {node.type.__name__} to reuse for index "
                f"{node.outer_index}, got {type(obj).__name__}."
            )
        return obj

    def check(self) -> None:
        """Raises if a write that was put off is not allowed."""
        self.fills = [fill for fill in self.fills if _differs(*fill)]
        for obj, *_ in self.fills:
            if isinstance(obj, pytrees.Pytree):
                bookkeeping.check_owned(obj)
        for variable, leaf, _ in self.updates:
            variables.check_write(variable, flattening.raw_of(leaf))

    def commit(self) -> None:
        """Carries out the writes that were put off."""
        for obj, kind, *content in self.fills:
            kind.refill(obj, *content)
        for variable, leaf, entries in self.updates:
            write_leaf(variable, leaf)
            if isinstance(leaf, Variable):
                continue
            if entries != variables.metadata_of(variable):
                variables.replace_metadata(variable, entries)


def unflatten_tree(tree: Tree, members: Sequence[Any]) -> Any:
    """What JAX made of these members, in the order of the cells."""
    if tree.order is not None:
        placed = [None] * len(members)
        for position, member in zip(tree.order, members, strict=True):
            placed[position] = member
        members = placed
    return jax.tree.unflatten(tree.treedef, members)


def _differs(
    obj: Any,
    kind: GraphKind,
    metadata: Any,
    keys: Sequence[Any],
    values: Sequence[Any],
) -> bool:
    children, current = kind.flatten(obj)
    return (
        current != metadata
        or len(children) != len(keys)
        or any(
            child.key != key or child.value is not value
            for child, key, value in zip(children, keys, values, strict=True)
        )
    )


def _as_variable(node: Any, leaf: Any, recreate_variables: bool) -> Any:
    if isinstance(leaf, Variable) or not recreate_variables:
        return leaf
    return make_variable(node, leaf)


def make_variable(node: VariableDef, leaf: Any) -> Any:
    """The Variable that a skeleton describes, around a value.

    Its ``ref`` metadata says what it holds, also if a ref was recorded and an array
    came, or the other way round. What stands in for an array may become a ref later.
    """
    entries = node.metadata
    if entries["ref"] is not _jax.is_ref(leaf) and not values.is_stand_in(leaf):
        entries = HashableMapping({**entries, "ref": _jax.is_ref(leaf)})
    return variables.rebuild(node.type, leaf, entries)


def write_leaf(variable: Variable[Any], leaf: Any) -> None:
    """Writes a leaf of a state into a Variable, where `check_write` allows it.

    A Variable gives its value and its metadata, any other leaf is the value.
    """
    variables.store(variable, flattening.raw_of(leaf))
    if isinstance(leaf, Variable):
        variables.take_metadata(variable, leaf)
