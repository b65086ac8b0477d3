"""Traced side of a call: new objects for the function, and its changes to them.

A Variable whose value is still the object that came in was not changed, is not returned
and not written.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from graftree import _jax, errors
from graftree.core.graph import flattening
from graftree.core.graph.graphdefs import LEAF, ArrayRefDef, GraphDef, VariableDef
from graftree.core.hashable_mappings import HashableMapping
from graftree.core.objects import bookkeeping, callables, pytrees, running
from graftree.core.variables import partitioning, values, variables
from graftree.core.variables.variables import Variable
from graftree.transforms.lifting import (
    argument_errors,
    argument_trees,
    debug_info,
    decorators,
    tracer_leaks,
)
from graftree.transforms.lifting.leaves import (
    Leaves,
    Result,
    ResultPart,
    ResultSpec,
    join,
)
from graftree.transforms.lifting.prefixes import Occurrence, Prefix
from graftree.transforms.lifting.signatures import FUNCTIONS, Labels, Signature
from graftree.transforms.lifting.specs import HiddenAxisNames, TransformSpec


class TracedCall:
    """Traced side of one call: the arguments as fresh objects of the trace.

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
        spec: TransformSpec,
        signature: Signature,
        given: Sequence[Any],
        roles: Sequence[int],
    ) -> None:
        self.spec = spec
        self.signature, self.roles = signature, roles
        # JAX leaves arrays of NumPy where it traces nothing of them. Then a write to a
        # Variable would reach the caller's array at once, even if the function fails,
        # and could not be traced.
        self.values = [
            values.as_jax(x) if isinstance(x, np.ndarray) and leaf_spec.variable else x
            for leaf_spec, x in zip(signature.leaf_specs, given, strict=True)
        ]
        # In-place writes to a list or dict would change the values to compare with.
        self._contents = {
            position: jax.tree.flatten(value)
            for position, value in enumerate(self.values)
            if not values.is_array(value)
        }
        self.objects = flattening.IndexMap()
        self.tree, self._roots = argument_trees.unpack(
            self.signature, self.values, self.objects
        )
        self._loses_structure = not (spec.mode.structure or spec.is_detached)
        if self._loses_structure:
            self._pytrees = argument_errors.pytrees_in(self.tree)

    def run(
        self,
        f: Callable[..., Any],
        number: int = 0,
        around: Callable[[Any], Callable[..., Any]] = lambda f: f,
    ) -> Any:
        """Calls the function with these arguments.

        Args:
            f: The function.
            number: The one in the tree that stands for it if it holds objects.
            around: Makes the function to call of it.
        """
        tree, signature = self.tree, self.signature
        if signature.has_callables:
            tree = callables.closed(tree)
        args, kwargs = tree[:2]
        functions = tree[2] if len(tree) > 2 else ()
        if signature.statics:
            args, kwargs = decorators.put(args, kwargs, signature.statics)
        if functions and functions[number] is not None:
            f = functions[number]
        f = around(f)
        names = functools.partial(debug_info.named, f)
        contents: list[tracer_leaks.StaticContent] = []
        if self._contents or not signature.has_no_contents:
            contents = tracer_leaks.contents_in(self.tree)
            # Most objects have none, which stays so each time they are built.
            signature.has_no_contents = not contents
        try:
            with running.inside(self.spec, names, args, kwargs, functions):
                if partitioning.PARTITION_NAME not in self.spec.axis_metadata:
                    return f(*args, **kwargs)
                hidden = HiddenAxisNames(self._given, self.spec.axis_metadata)
                out = f(*args, **kwargs)
                hidden.put_back(self._occurrences(out))
                return out
        finally:
            if contents:
                tracer_leaks.take_out(contents, self.spec.name)

    def argument(self, number: int) -> Any:
        """A positional argument, or what the functions hold."""
        return self.tree[2] if number == FUNCTIONS else self.tree[0][number]

    # The way out.

    def leave(self, out: Any) -> Result:
        """Makes the result: the function's changes to its arguments, and its output."""
        result = self.collect(out)
        if not self.spec.has_prefixes:
            return result
        ins, outs = len(self.spec.inputs.values), len(self.spec.outputs.values)
        return result.grouped((ins, ins, outs))

    def collect(
        self,
        out: Any,
        *,
        forced: frozenset[int] = frozenset(),
        carried: tuple[Sequence[Any], Any] | None = None,
    ) -> Result:
        """Finds the function's changes to its arguments, and takes its output apart.

        Args:
            out: The output.
            forced: Positions of leaves that are returned even if they didn't change: of
                Variables, and of arrays in objects, with the structure around them.
            carried: Variables in the output that stand for those of the caller, as in
                the carry of a loop; and the rest of it, which is checked for aliases.
        """
        spec, mode = self.spec, self.spec.mode
        forced |= self._returned_unchanged()
        refs, known = flattening.RefMap(), flattening.RefMap()
        changed, metadata = {}, ()
        structure, held, keeps = None, [], False
        if not spec.is_detached:
            changed, metadata = self._find_changes(forced)
            if mode.structure:
                structure, held, keeps = self._find_structure(refs, forced)
                known = self._numbers
        if carried is not None:
            pairs = [(x, self._numbers[x]) for x in carried[0] if x in self._numbers]
            known = flattening.RefMap([*known.items(), *pairs])
        elif self._loses_structure:
            self._warn_of_lost_structure()
        skeleton, leaves = argument_trees.take_apart(out, mode, refs, known, spec.name)
        output = Signature(skeleton)
        # Usually there are no objects in it, and no new ones in the arguments.
        if structure is not None or any([x is not LEAF for x in output.entries]):
            self._check_output(out if carried is None else carried[1], refs)
        if spec.may_differ(self.signature, structure, output):
            argument_errors.check_consistent(spec.name, self._occurrences(out))
        roles = tuple([self.roles[position] for position in changed])
        new, added = ResultPart(self.signature, (), ()), []
        if structure is not None:
            new, added = _new(spec.inputs, structure, held, self._numbers, True)
        returned, values = _new(
            spec.outputs, output, leaves, known, mode.structure, spec.labels
        )
        result = ResultSpec(
            (ResultPart(self.signature, tuple(changed), roles), new, returned),
            structure,
            output,
            metadata,
            tuple([p for p in changed if p in forced and self._is_same(changed[p], p)]),
            keeps,
        )
        return Result.of(result, [*changed.values(), *added, *values])

    def _returned_unchanged(self) -> frozenset[int]:
        # A donated buffer is gone after the call, so its Variable needs a new one.
        spec, placed = self.spec, self.spec.returns_placed and self.spec.mode.structure
        flags = [
            group in spec.inputs.donated or (placed and value is not None)
            for group, value in enumerate(spec.inputs.values)
        ]
        if not any(flags):
            return frozenset()
        return frozenset(
            position
            for position, leaf_spec in enumerate(self.signature.leaf_specs)
            if flags[self.roles[position]] and leaf_spec.variable
        )

    def current(self, position: int) -> Any:
        """Reads a leaf as it is now: its Variable, else the value that came in."""
        definition = self.signature.leaf_specs[position].definition
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
    ) -> tuple[dict[int, Any], tuple[tuple[int, HashableMapping], ...]]:
        """Finds the values of Variables that changed, and the metadata that did."""
        changed, metadata = {}, []
        for position, leaf_spec in enumerate(self.signature.leaf_specs):
            definition = leaf_spec.variable
            if definition is None:
                continue
            variable = self.objects[definition.index]
            if type(variable) is not definition.type:
                name = f"{self.spec.name}: {leaf_spec.name}"
                raise argument_errors.changed_class_error(
                    variable, definition.type, name
                )
            raw = variable.get_raw_value()
            # A ref that is the same one was written in place, if at all.
            is_forced = position in forced and not _jax.is_ref(raw)
            if is_forced or not self._is_same(raw, position):
                changed[position] = raw
            before, entries = definition.metadata, variables.metadata_of(variable)
            if entries is not before and entries != before:
                metadata.append((position, entries))
        return changed, tuple(metadata)

    # The structure.

    @functools.cached_property
    def _numbers(self) -> flattening.RefMap:
        """Numbers of the objects."""
        return flattening.RefMap.from_indexmap(self.objects)

    def _find_structure(
        self, refs: flattening.RefMap, forced: frozenset[int]
    ) -> tuple[Signature | None, list[Any], bool]:
        """Takes the arguments apart, ``None`` if they stay; are they unchanged?

        They are if they are what came in, built as it was. Metadata of Variables
        travels on its own.
        """
        signature, leaf_specs = self.signature, self.signature.leaf_specs
        skeleton, leaves = flattening.flatten_leaves(
            signature.treedef, self._roots, True, refs, self._numbers
        )
        is_kept = _stands_for(skeleton, signature.skeleton) and all(
            [
                leaf_spec.variable or leaf is value
                for leaf_spec, leaf, value in zip(
                    leaf_specs, leaves, self.values, strict=True
                )
            ]
        )
        if is_kept and all([leaf_specs[p].definition is not None for p in forced]):
            return None, [], False
        return dataclasses.replace(signature, skeleton=skeleton), leaves, is_kept

    def _warn_of_lost_structure(self) -> None:
        mode, roots, is_kept = self.spec.mode, self._roots, True
        if not mode.sharing:
            is_kept = argument_trees.is_same_tree(
                self.tree, self.signature, roots, mode
            )
        if mode.sharing or self.spec.functions is not None:
            changed, *_ = self._find_structure(flattening.RefMap(), frozenset())
            is_kept = is_kept and changed is None
        if not is_kept:
            leaves = argument_trees.leaves_of(self.signature, self.values, self.objects)
            numbers = flattening.IndexMap()
            before, _ = argument_trees.unpack(
                self.signature, leaves, numbers, are_raw=False
            )
            argument_errors.warn_of_lost_structure(
                self.spec.name, argument_errors.pytrees_in(before), self._pytrees
            )

    # Values that may not leave.

    def _check_output(self, out: Any, refs: flattening.RefMap) -> None:
        spec, structure = self.spec, self.spec.mode.structure
        if not structure:
            named = [
                (f".{leaf_spec.name}", self.objects[leaf_spec.definition.index])
                for leaf_spec in self.signature.leaf_specs
                if leaf_spec.definition is not None
            ]
            argument_errors.check_outputs(named, out, spec.mode, spec.name)
        if spec.returns_captured and structure:
            return
        new = [obj for obj in refs if obj not in self._numbers]
        for obj in new:
            is_owned = not isinstance(obj, Variable) or variables.is_owned(obj)
            if isinstance(obj, pytrees.Pytree) and structure:
                is_owned = bookkeeping.state_of(obj).is_owned()
            if not is_owned and structure:
                raise argument_errors.extracted_error(obj, spec.name)
            if not is_owned:
                raise argument_errors.captured_error(obj, out, spec.name)
        if not (structure or spec.is_detached):
            argument_errors.check_no_refs(new, out, spec.name)

    @functools.cached_property
    def _given(self) -> list[Occurrence]:
        """Variables in the arguments as they came."""
        return [*self.spec.occurrences(self.tree)]

    def _occurrences(self, out: Any) -> list[Occurrence]:
        """Lists the Variables in the arguments as they are now, and in the output."""
        # A changed structure that doesn't propagate needs no prefix, and may lack one.
        spec, structure = self.spec, self.spec.mode.structure
        inputs = spec.occurrences(self.tree) if structure else self._given
        return [*inputs, *spec.outputs.occurrences(out, spec.mode.sharing)]


def _stands_for(skeleton: GraphDef[Any], other: GraphDef[Any]) -> bool:
    """Whether a skeleton is of the objects of another one, built as they were there.

    Their numbers in the other one are the outer ones of the skeleton. Metadata of
    Variables may differ.
    """
    kinds = (VariableDef, ArrayRefDef)
    fields = [field for spec in other.specs for field in spec.fields]
    definitions: dict[int | None, Any] = {
        field.index: field for field in fields if isinstance(field, kinds)
    }
    specs = [
        spec._replace(
            index=spec.outer_index,
            outer_index=None,
            fields=tuple(
                [
                    definitions.get(x.outer_index) if isinstance(x, kinds) else x
                    for x in spec.fields
                ]
            ),
        )
        for spec in skeleton.specs
    ]
    return GraphDef.of(skeleton.root, specs, skeleton.num_leaves) == other


def _new(
    prefix: Prefix,
    signature: Signature,
    leaves: Sequence[Any],
    known: flattening.RefMap,
    opens_refs: bool,
    labels: Labels | None = None,
) -> tuple[ResultPart, list[Any]]:
    """Lists leaves of a signature that the caller does not have, with their values.

    They are those of an output with ``labels``, else of arguments, where nothing can
    change a plain leaf. JAX doesn't let refs out; with ``opens_refs`` their content
    travels.
    """
    positions, numbers, values = [], [], []
    groups = prefix.group(signature, leaves)
    for position, (leaf, group) in enumerate(zip(leaves, groups, strict=True)):
        is_plain = labels is None and signature.leaf_specs[position].is_plain
        if leaf not in known and not is_plain:
            raw = flattening.raw_of(leaf)
            positions.append(position)
            numbers.append(group)
            values.append(raw[...] if opens_refs and _jax.is_ref(raw) else raw)
    root = None if labels is None else labels.output
    return ResultPart(signature, tuple(positions), tuple(numbers), root), values


def interior(f: Callable[..., Any], spec: TransformSpec) -> Callable[..., Any]:
    """Makes the function that JAX traces: from groups of leaves to a result."""

    def traced(*groups: Leaves) -> Any:
        call = TracedCall(spec, *join(groups))
        result = call.leave(call.run(f))
        if spec.traces is not None:
            errors.fenced(spec.traces.add, call.signature, call.values, f)
        return result

    return debug_info.named_after(f, traced)
