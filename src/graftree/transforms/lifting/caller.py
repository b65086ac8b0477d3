"""Caller's side: arguments in, and after success all changes at once.

    Call      takes the arguments of one call apart, into groups of leaves for JAX
    commit    writes a result of the traced function to the caller's objects
    lift      a whole transform: both sides around a function that JAX gives

The caller's objects are written only after everything is checked; then nothing fails.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from graftree import _jax, errors
from graftree.core import fingerprints
from graftree.core.graph.flattening import KEEP, Builder, IndexMap
from graftree.core.graph.graphdefs import ArrayRefDef
from graftree.core.objects import callables, running
from graftree.core.pickling import Rebuilt
from graftree.core.variables import partitioning, sharding, variables
from graftree.transforms.lifting import (
    argument_errors,
    argument_trees,
    decorators,
    specs,
)
from graftree.transforms.lifting.argument_trees import Arguments
from graftree.transforms.lifting.leaves import Leaves, Result, join
from graftree.transforms.lifting.programs import compilations
from graftree.transforms.lifting.signatures import LeafSpec
from graftree.transforms.lifting.traced import interior


class Call:
    """Caller's side of one call.

    Args:
        f: The function.
        spec: Its transform.
        args: The positional arguments.
        kwargs: The keyword arguments.
        statics: The static ones, if they have been taken out of these already.

    Attributes:
        spec: As given.
        tree: The arguments without the static ones: ``(args, kwargs)``, third what the
            functions hold.
        statics: The static arguments.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        spec: specs.TransformSpec,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        statics: decorators.Statics | None = None,
    ) -> None:
        keyword_rule = spec.keywords[spec.mode.structure]
        if kwargs and keyword_rule is specs.Keywords.REFUSED:
            raise TypeError(
                f"nnx.{spec.name} takes no keyword arguments, got {sorted(kwargs)}. "
                "Pass them by position."
            )
        if keyword_rule is specs.Keywords.BECOME_POSITIONAL:
            count = spec.inputs.count
            args, kwargs = decorators.to_positions(f, args, kwargs, count), {}
        running.note_arguments(spec, args, kwargs, spec.functions)
        if statics is None and spec.statics is not None:
            args, kwargs, statics = decorators.take(
                spec.statics, args, kwargs, spec.name
            )
        self._f, self.spec, self.statics = f, spec, statics or ()
        self.tree = spec.tree(args, kwargs)

    @functools.cached_property
    def read(self) -> tuple[Any, Sequence[Any], Any]:
        """Tree with its callables taken apart; its leaves, and the treedef."""
        spec = self.spec
        return argument_trees.flatten(self.tree, spec.mode, spec.name, of_call=True)

    @functools.cached_property
    def arguments(self) -> Arguments:
        """Arguments with the objects in them taken apart."""
        spec, unseen = self.spec, fingerprints.Unseen.latest
        call_arguments = Arguments.of(
            *self.read, spec.mode, spec.name, self.statics, spec.labels, self._f
        )
        if spec.signatures is None:
            return call_arguments
        signature = call_arguments.signature
        is_new = fingerprints.Unseen.latest is not unseen
        number, first = spec.signatures.intern(signature, is_new)
        signature.number = first.number = number
        if first.may_change_in_place:
            return call_arguments
        return dataclasses.replace(call_arguments, signature=first)

    @functools.cached_property
    def groups(self) -> list[Leaves]:
        """JAX's arguments: one group of leaves per value of the prefix."""
        spec, made = self.spec, self.arguments
        signature, values = made.signature, made.values()
        numbers = spec.inputs.group(signature, made.leaves)
        if len(spec.inputs.values) == 1:
            groups = [Leaves.of(values, signature, None)]
        else:
            positions: list[list[int]] = [[] for _ in spec.inputs.values]
            for position, number in enumerate(numbers):
                positions[number].append(position)
            groups = [Leaves.picked(values, signature, chosen) for chosen in positions]
        if spec.inputs.donated and donates_twice(spec, groups):
            self.explain()
        # Before the function runs: it can't if its values have different axes.
        if spec.may_differ(signature):
            argument_errors.check_consistent(spec.name, spec.occurrences(self.read[0]))
        return groups

    def run(self, transformed: Callable[..., Any]) -> Any:
        """Calls JAX's transformed function, and commits its result: a whole call."""
        groups, traces = self.groups, self.spec.traces
        compiled = compilations.count
        result = transformed(*groups)
        if traces is not None and compilations.count != compiled:
            signature, values, _ = join(groups)
            errors.fenced(traces.called, signature, values, compiled)
        return self.commit(result)

    def commit(self, result: Any) -> Any:
        """Writes a result to the caller's objects; returns the output."""
        spec, axis = self.spec, None
        if spec.maps_axis:
            axis = spec.axis_metadata.get(partitioning.PARTITION_NAME)
        return commit(self.arguments, result, axis)

    def explain(self, error: Exception | None = None) -> None:
        """Raises an error about buffers that can't be donated, with their paths.

        On one device JAX finds this out before it donates anything, and raises one
        without paths. A check here would cost time in each call.
        """
        inputs, made = self.spec.inputs, self.arguments
        groups = inputs.group(made.signature, made.leaves)
        donated = [group in inputs.donated for group in groups]
        shared = argument_errors.shared_buffer(
            made.values(), made.signature.leaf_specs, donated, self.spec.name
        )
        if shared is not None:
            raise shared from error


def donates_twice(spec: specs.TransformSpec, groups: Sequence[Leaves]) -> bool:
    """Whether an array over several devices would be donated twice.

    JAX finds this out on one device while another one donates its part, and older
    versions crash.
    """
    values = [x for number in spec.inputs.donated for x in groups[number].values]
    arrays = [x for x in values if _jax.is_concrete(type(x))]
    return len({*map(id, arrays)}) < len(arrays) and any(map(is_spread, arrays))


def is_spread(x: Any) -> bool:
    """Whether it is an array over several devices."""
    return _jax.is_concrete(type(x)) and len(x.sharding.device_set) > 1


def is_of_donation(error: Exception) -> bool:
    """Whether JAX refused a call because a buffer would be donated and used again."""
    is_of_jax = isinstance(error, (ValueError, RuntimeError))
    return is_of_jax and _DONATION.search(str(error)) is not None


_DONATION = re.compile("Attempt to (donate|use) (the same|a) buffer")


def commit(call: Arguments, result: Result, axis: Any = None) -> Any:
    """Writes the function's changes into the caller's objects: all, or nothing.

    Args:
        call: The arguments.
        result: The result of `traced.TracedCall.leave`.
        axis: The name of the axis that new Variables got from the transform, if any.

    Returns:
        The output.
    """
    result = result.ungrouped()
    spec, (changed, structure, out) = result.spec, result.parts()
    leaves, objects, leaf_specs = call.leaves, call.objects, call.signature.leaf_specs
    for position, _ in spec.metadata:
        variables.check_owned(leaves[position], leaf_specs[position].name)
    # Unchanged values need no write where none is allowed.
    writes = [
        (position, value)
        for position, value in zip(spec.changed, changed, strict=True)
        if position not in spec.kept or variables.may_write(leaves[position])
    ]
    if spec.structure is None or spec.keeps_structure:
        builder = Builder(IndexMap(objects), objects, takes_raw=True)
    else:
        builder = Builder(IndexMap(), objects, takes_raw=True)
        # Nothing can change a plain argument, so there is no value for it.
        changed_specs = [x for x in spec.structure.leaf_specs if not x.is_plain]
        remaining = iter(_filled(changed_specs, structure, objects, axis))
        filled = [
            KEEP if x.is_plain else next(remaining) for x in spec.structure.leaf_specs
        ]
        builder.members(spec.structure.skeleton, filled)
    filled = _filled(spec.out.leaf_specs, out, objects, axis)
    built = builder.build(spec.out.skeleton, filled)
    builder.check()
    variables.write_all(
        [leaves[position] for position, _ in writes],
        [value for _, value in writes],
        lambda number: leaf_specs[writes[number][0]].name,
    )
    for position, entries in spec.metadata:
        variables.replace_metadata(leaves[position], entries)
    builder.commit()
    return callables.closed(built) if spec.out.has_callables else built


def _filled(
    leaf_specs: Sequence[LeafSpec],
    leaves: Sequence[Any],
    existing: Mapping[int, Any],
    axis: Any,
) -> list[Any]:
    """Lists the leaves for a builder: KEEP for Variables of the caller; new refs."""
    remaining = iter(leaves)
    refs: dict[int, Any] = {}
    filled: list[Any] = []
    for leaf_spec in leaf_specs:
        definition = leaf_spec.definition
        value = next(remaining) if leaf_spec.outer_index is None else KEEP
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
    """Finds the caller's ref for one in the output: its own, or a new one."""
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
    spec: specs.TransformSpec,
    run: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Applies a JAX transform to a function over objects.

    It is called as ``transform(inner, in_prefix, out_prefix)``; ``inner`` takes a group
    of leaves per entry of the tuple ``in_prefix``. The function returned has its result
    as ``inner``. A call is ``run(inner, args, kwargs)``, by default of a new `Call`.
    """
    inner = _Transformed(f, transform, spec)

    def run_once(inner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return Call(f, spec, args, kwargs).run(inner)

    run = run or run_once

    @decorators.wraps(f)
    def lifted(*args: Any, **kwargs: Any) -> Any:
        with _jax.hidden_frames:
            return run(inner.called(), args, kwargs)

    vars(lifted)["inner"] = inner
    return lifted


class _Transformed(Rebuilt):
    """A function transformed by JAX; pickled without JAX's part."""

    def __init__(
        self, f: Any, transform: Callable[..., Any], spec: specs.TransformSpec
    ) -> None:
        self._given = f, transform, spec
        self.function = self._made()

    def _made(self) -> Callable[..., Any]:
        f, transform, spec = self._given
        inputs = spec.inputs.values
        return transform(interior(f, spec), inputs, spec.result_prefix)

    def called(self) -> Callable[..., Any]:
        """Returns what to call, for observers a new one: see `__call__`."""
        return self.function if running.stack.trace_namespace is None else self

    def __call__(self, *groups: Leaves) -> Any:
        apart = running.stack.trace_namespace
        function = self.function if apart is None else apart.function(self, self._made)
        return function(*groups)


def returning_arrays(transformed: Callable[..., Any]) -> Callable[..., Any]:
    """Makes arrays of scalars from a transform that JAX doesn't compile.

    JAX then returns the constants of a program as they are in it.
    """

    def as_array(x: Any) -> Any:
        return x if isinstance(x, jax.Array) else jax.numpy.asarray(x)

    return lambda *groups: jax.tree.map(as_array, transformed(*groups))
