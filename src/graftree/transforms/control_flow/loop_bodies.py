"""The body of a loop: some leaves are carried, some are scanned, the others stay.

A loop is a call with one step, which `Loop.run` gives to JAX's loop as its body. There,
`TracedCall` rebuilds all arguments from the carried leaves, the slices of the scanned
ones, and the rest. The step's changes, and where each changed leaf is after the loop,
are recorded in Python (JAX traces it once, with the loop), and put together after the
loop.

The carry comes back from each step. So do arguments that are carried by filters,
without being returned, if no part of them is scanned. Their structure must be the same
in all steps, and their objects the same ones. There is one exception: in a `scan` with
graph updates a step may set static attributes, as `model.train()` does. Then the second
step, which sees them set, must be the same program.

An array ref stays out of the loop, and the steps write to it in place. Where JAX can't
do that, its content is carried or scanned, each step has its own ref, and the last
content is written to the caller's.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from graftree import _jax
from graftree.core.graph import differences, flattening, graphdefs, nodes
from graftree.core.rng.streams import RngState
from graftree.transforms.lifting import (
    argument_errors,
    argument_trees,
    programs,
    signatures,
)
from graftree.transforms.lifting.leaves import Leaves, Result, ResultPart, join
from graftree.transforms.lifting.signatures import FUNCTIONS, LeafSpec, Signature
from graftree.transforms.lifting.specs import TransformSpec
from graftree.transforms.lifting.traced import TracedCall


class Carry:
    """In the axes of `scan`: a value that goes from one step to the next.

    Use the class itself, not an instance.

    Example:
        >>> def add(total, x):
        ...     return total + x, total
        >>> cumulate = nnx.scan(add, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        >>> total, before = cumulate(jnp.array(0), jnp.arange(4))
        >>> int(total), before.tolist()
        (6, [0, 0, 1, 3])
    """


@dataclasses.dataclass(frozen=True)
class CarrySpec:
    """Where the carry is in a step's arguments and output, and what may change in it.

    Attributes:
        argument: Index of the positional argument; ``None`` if there is no carry.
        output: Index in a tuple of outputs; ``None`` if it is the whole output.
        takes_changes: Whether a Variable that is itself a leaf of the carry may come
            back as another one, and a step may set static attributes, if all do the
            same.
        identity: The rule that other objects break, for the message.
    """

    argument: int | None
    output: int | None = None
    takes_changes: bool = False
    identity: str = ""

    def may_be_new(self, node: Any) -> bool:
        """Whether another object may replace this one at the top of the carry."""
        return self.takes_changes and isinstance(node, graphdefs.VariableDef)

    def split(self, out: Any) -> tuple[Any, Any]:
        """Splits an output into the carry and the rest."""
        if self.argument is None:
            return None, out
        if self.output is None:
            return out, None
        index = self.output
        if not isinstance(out, (tuple, list)) or len(out) <= index:
            raise ValueError(
                f"The function must return a tuple with the carry at index {index}, "
                f"as out_axes says, got {type(out).__name__}."
            )
        return out[index], (*out[:index], None, *out[index + 1 :])

    def start_in(self, out: Signature) -> int:
        """Returns the index of the first entry of the carry in an output."""
        if self.output is None:
            return 0
        outputs = out.treedef.children()[: self.output]
        return sum(output.num_leaves for output in outputs)


class CarryStructureError(TypeError, ValueError):
    """A step changed the structure of the carry; either type, as in Flax NNX."""


class _FlattenedArgument(NamedTuple):
    """An argument as a step left it, taken apart.

    Attributes:
        signature: Its static part.
        olds: The objects up to it before the step.
        news: The objects up to it after the step.
        leaves: Its leaves.
    """

    signature: Signature
    olds: list[Any]
    news: list[Any]
    leaves: list[Any]


class _LeafOrigin(NamedTuple):
    """Says where a leaf is after the loop.

    Attributes:
        index: In the list that every step returns; without an axis, in the arguments.
        axis: The one on which it is stacked.
    """

    index: int
    axis: int | None = None


# ``step(run, carried, scanned)`` returns the leaves for the next step, and those to
# stack. It calls the function as ``run(call)``.
Step = Callable[..., tuple[Leaves, list[Any]]]


class Loop:
    """One loop, while it is traced.

    In the prefix of its inputs, integers are scanned axes, `Carry` is carried, and
    ``None`` stays: without graph updates the Variables there are carried, too. The
    content of refs is carried where JAX can't keep them out of the loop
    (``moves_refs``).

    Attributes:
        initial: The carried leaves, as they are before the first step.
        scanned: The scanned leaves, with their axis in front.
    """

    def __init__(
        self,
        spec: TransformSpec,
        carry_spec: CarrySpec,
        groups: Sequence[Leaves],
        moves_refs: bool = False,
    ) -> None:
        self.spec = spec
        self.carry_spec = carry_spec
        self.signature, self.values, self.roles = join(groups)
        self._carry_leaves = self.signature.leaves_of(carry_spec.argument)
        axes = [spec.inputs.values[role] for role in self.roles]

        def is_carried(argument: int) -> bool:
            argument_axes = axes[slice(*self.signature.leaves_of(argument))]
            # If a part is scanned, each step gets a new object.
            is_scanned = any([isinstance(axis, int) for axis in argument_axes])
            by_filters = Carry in argument_axes and not is_scanned
            return argument == carry_spec.argument or (
                spec.mode.structure and by_filters
            )

        positions = [*range(len(self.signature.treedef.children()[0].children()))]
        if spec.functions is not None:
            positions.append(FUNCTIONS)  # what they hold is carried like an argument
        # The static part of each carried argument, by its position.
        self._initial_signatures = {
            argument: self.signature.of_argument(argument)
            for argument in filter(is_carried, positions)
        }
        # JAX slices refs along their first axis only.
        self._moved = [
            i
            for i, (x, axis) in enumerate(zip(self.values, axes, strict=True))
            if _jax.is_ref(x) and (axis if isinstance(axis, int) else moves_refs)
        ]
        self._carried = [i for i, x in enumerate(axes) if self._is_carried(i, x)]
        self._scanned = {i: x for i, x in enumerate(axes) if isinstance(x, int)}
        contents = list(self.values)
        for i in self._moved:
            contents[i] = contents[i][...]
        for i, axis in self._scanned.items():
            for x in jax.tree.leaves(contents[i]):
                if not -jnp.ndim(x) <= axis < jnp.ndim(x):
                    raise ValueError(_lacks_axis(self.signature.leaf_specs[i], x, axis))
            contents[i] = _moved(contents[i], axis, 0)
        self.initial = Leaves.picked(contents, self.signature, self._carried)
        self.scanned = Leaves.picked(contents, self.signature, [*self._scanned])

    def _is_carried(self, position: int, axis: Any) -> bool:
        if isinstance(axis, int):
            return False
        if _jax.is_ref(self.values[position]):
            return position in self._moved
        is_variable = self.signature.leaf_specs[position].variable is not None
        return axis is Carry or (is_variable and not self.spec.mode.structure)

    def run(self, loop: Callable[[Step], tuple[Leaves, Any]]) -> Any:
        """Runs JAX's loop over a step, and returns the argument of `Call.commit`.

        ``loop`` gets the step; it returns the leaves that the last one left, and all
        stacked ones.
        """
        notes: list[Any] = []

        def step(
            f: Callable[[TracedCall], Any],
            carried: Leaves,
            scanned: Leaves | None = None,
        ) -> tuple[Leaves, list[Any]]:
            values, stacked, notes[:], after = self._outcome(f, carried, scanned)
            if after != self._initial_signatures:
                self._check_settled(f, carried, scanned, after)
            return values, stacked

        carried, stacked = loop(step)
        assert notes, "JAX traces the step before the loop ends"
        last = carried.by_position()

        def value(source: _LeafOrigin) -> Any:
            if source.axis is None:
                return last.get(source.index, self.values[source.index])
            return _moved(stacked[source.index], 0, source.axis)

        returned, sources, refs = notes
        for position, source in zip(self._moved, refs, strict=True):
            self.values[position][...] = value(source)
        return Result.of(returned, map(value, sources))

    def traced(self, carried: Leaves, scanned: Leaves | None = None) -> TracedCall:
        """Puts together the arguments of one step."""
        values = list(self.values)
        for group in (carried, scanned):
            if group is not None:
                for position, value in group.by_position().items():
                    values[position] = value
        for position in self._moved:
            values[position] = _jax.new_ref(values[position])
        return TracedCall(self.spec, self.signature, values, self.roles)

    def _outcome(
        self, f: Callable[[TracedCall], Any], carried: Leaves, scanned: Leaves | None
    ) -> tuple[Leaves, list[Any], list[Any], dict[int, Signature]]:
        """Traces one step.

        Returns:
            The leaves for the next step; the leaves to stack; notes; and the static
            parts of the carried arguments after it. The notes are the static part of
            the result, and where the leaves are that changed, of the structure, of the
            output, and of refs that were moved.
        """
        call = self.traced(carried, scanned)
        out = f(call)
        carry, others = self.carry_spec.split(out)
        after, objects, leaves = self._flatten_carried(call, carry)
        result = self._without_dropped(call.collect(out, carried=(objects, others)))
        changed, structure, output = result.spec.parts
        start, _ = self.signature.entries_of(self.carry_spec.argument)
        shift = start - self.carry_spec.start_in(result.spec.out)
        replaced = [self._position(structure, i) for i in structure.positions]
        positions = [
            *changed.positions,
            *replaced,
            *[self._position(output, i, shift) for i in output.positions],
        ]
        values = [call.current(i) for i in range(len(self.values))]
        # Arrays that are attributes may have been replaced.
        for position, value in zip(replaced, result.parts()[1], strict=True):
            if position is not None:
                values[position] = value
        values[slice(*self._carry_leaves)] = map(flattening.raw_of, leaves)
        for position in self._moved:
            values[position] = call.values[position][...]
        stacked: list[Any] = []

        def source_of(value: Any, axis: Any, position: int | None) -> _LeafOrigin:
            if isinstance(axis, int):
                stacked.append(value)
                return _LeafOrigin(len(stacked) - 1, axis)
            if position is None:
                raise CarryStructureError(
                    f"nnx.{self.spec.name}: the structure of a carried or broadcast "
                    "argument must not change, but it has new data.\nAdd it before the "
                    "loop, or give the argument an axis."
                )
            return _LeafOrigin(position)

        ins, outs = self.spec.inputs.values, self.spec.outputs.values
        axes = [ins[group] for group in changed.groups + structure.groups]
        axes += [outs[group] for group in output.groups]
        sources = [*map(source_of, result.leaves, axes, positions)]
        refs = [source_of(values[i], self._scanned.get(i), i) for i in self._moved]
        notes = [result.spec, sources, refs]
        following = Leaves.picked(values, self.signature, self._carried)
        return following, stacked, notes, after

    def _check_settled(
        self,
        f: Callable[[TracedCall], Any],
        carried: Leaves,
        scanned: Leaves | None,
        after: dict[int, Signature],
    ) -> None:
        """Raises unless the second step, after the changes of the first, is equal.

        It must leave the carried values with the structure that it got them with, by
        the same program. Then all steps do.
        """
        initial = self._initial_signatures
        changed = next(x for x in initial if after[x] != initial[x])
        error = self._structure_error(changed, after[changed])
        # What the copy knows of the leaves stays right: they are where they were.
        second, skeleton = copy.copy(self), self.signature.skeleton
        for argument, signature in after.items():
            span = self.signature.entries_of(argument)
            skeleton = skeleton.with_part(*span, signature.skeleton)
        second.signature = dataclasses.replace(self.signature, skeleton=skeleton)
        second._initial_signatures = after

        def program_of(loop: Loop) -> Any:
            def program(*groups: Any) -> Any:
                *results, _, left = loop._outcome(f, *groups)
                if left != after:
                    raise error
                return jax.tree.leaves(results)

            return jax.make_jaxpr(program)(carried, scanned)

        if not programs.are_equal(program_of(self), program_of(second)):
            raise error

    def _without_dropped(self, result: Result) -> Result:
        """Drops the changes that don't survive the loop, and warns of those.

        With graph updates, these are the changes of values that all steps share.
        """
        if not self.spec.mode.structure:
            return result
        axes, tree = self.spec.inputs.values, self.spec.inputs.tree[0]
        changes = result.spec.parts[0]
        surviving = [
            i for i, group in enumerate(changes.groups) if axes[group] is not None
        ]
        dropped = {*changes.positions} - {changes.positions[i] for i in surviving}
        for argument, axis in enumerate(tree if isinstance(tree, tuple) else ()):
            if axis is not None:  # filters drop it on purpose
                dropped = dropped - {*range(*self.signature.leaves_of(argument))}
        if dropped:
            leaf_specs = self.signature.leaf_specs
            argument_errors.warn_of_broadcasts(
                [leaf_specs[i].name for i in sorted(dropped)]
            )
        return result.with_changes(surviving)

    @functools.cached_property
    def _positions(self) -> dict[Any, int]:
        return {path: i for i, path in enumerate(self.signature.skeleton.paths())}

    def _position(
        self, result_part: ResultPart, position: int, shift: int = 0
    ) -> int | None:
        """Finds the argument's leaf at the path of a leaf of a part of the result."""
        entry, *path = result_part.signature.skeleton.paths()[position]
        return self._positions.get((entry + shift, *path))

    # The carried arguments.

    def _flatten_carried(
        self, call: TracedCall, carry: Any
    ) -> tuple[dict[int, Signature], list[Any], list[Any]]:
        """Takes apart the arguments and the carry after a step.

        Returns:
            The static part of each carried argument; of the carry the Variables and
            refs, and the leaves.
        """
        after, objects, leaves = {**self._initial_signatures}, [], []
        for argument in self._initial_signatures:
            is_carry = argument == self.carry_spec.argument
            value = carry if is_carry else call.argument(argument)
            flattened = self._flatten(call, argument, value)
            if is_carry:
                self._check_carry(argument, flattened)
                objects = filter(nodes.is_variable_or_ref, flattened.news)
                leaves = flattened.leaves
            # New data is stacked or refused by `source_of`.
            if is_carry or self._may_settle(argument, flattened):
                after[argument] = flattened.signature
        return after, [*objects], leaves

    def _flatten(
        self, call: TracedCall, argument: int, value: Any
    ) -> _FlattenedArgument:
        """Takes apart the value that an argument has after a step.

        Its objects are numbered as in the arguments. So equal signatures have objects
        with equal numbers at equal paths, and these must be the same.
        """
        first, stop = [
            next(self.signature.numbers(start), len(call.objects))
            for start in self.signature.entries_of(argument)
        ]
        olds = [call.objects[i] for i in range(stop)]
        refs = flattening.RefMap([(olds[i], i) for i in range(first)])
        skeleton, leaves = argument_trees.take_apart(
            value, self.spec.mode, refs, flattening.RefMap(), self.spec.name
        )
        return _FlattenedArgument(Signature(skeleton), olds, [*refs], leaves)

    def _check_carry(self, argument: int, flattened: _FlattenedArgument) -> None:
        """Raises unless the carry has the structure and the objects that it had."""
        initial = self._initial_signatures[argument]
        identified = self._identified(initial, flattened.olds)
        if not argument_trees.are_same(
            identified, self._identified(flattened.signature, flattened.news)
        ):
            raise self._identity_error()
        changed = initial != flattened.signature
        if changed and not self._may_settle(argument, flattened):
            raise self._structure_error(argument, flattened.signature)
        if self.spec.mode.structure:
            tops = flattened.signature.skeleton.tops()
            free = {top.index for top in tops if self.carry_spec.may_be_new(top)}
            pairs = enumerate(zip(flattened.olds, flattened.news, strict=True))
            if not all([x is y or index in free for index, (x, y) in pairs]):
                raise self._identity_error()

    def _identified(self, signature: Signature, objects: Sequence[Any]) -> list[Any]:
        """Lists the objects that must be the same, even if something else is wrong."""
        if not self.spec.mode.structure:
            return [*filter(nodes.is_variable_or_ref, objects)]
        tops = [top for top in signature.skeleton.tops() if top is not graphdefs.LEAF]
        return [objects[x.index] for x in tops if not self.carry_spec.may_be_new(x)]

    def _identity_error(self) -> ValueError:
        if self.spec.mode.structure:
            return ValueError(
                f"{self.carry_spec.identity}, but in nnx.{self.spec.name} the function "
                "returned other objects than it got.\nChange them in place, or "
                "split them and carry their State."
            )
        return ValueError(
            f"{self.spec.name} Variable identity must be preserved across "
            "iterations: a step returned other Variables in the carry, or moved "
            "them.\nWrite to them in place (`variable[...] = value`)."
        )

    def _structure_error(self, argument: int, after: Signature) -> TypeError:
        """Explains that a step changed the structure of an argument."""
        is_carry = argument == self.carry_spec.argument
        name = "carry" if is_carry else self.signature.labels.of(argument)
        initial = self._initial_signatures[argument].facts(name)
        changed = differences.between(initial, after.facts(name))
        lines = differences.in_words(changed, "before", "after", signatures.name_of)
        changes = "\n  ".join(lines or ["which objects are shared"])
        return CarryStructureError(
            f"nnx.{self.spec.name}: the structure of the carry must stay the same in a "
            f"loop, but a step changed it.\n  {changes}\nAttributes of carried "
            "objects, and metadata of carried Variables, can't be added, removed or "
            "changed there."
        )

    # A step may set static attributes of carried objects, as `model.train()` does.

    def _may_settle(self, argument: int, flattened: _FlattenedArgument) -> bool:
        """Whether only static attributes can have changed in an argument."""
        initial = self._initial_signatures[argument]
        return (
            self.carry_spec.takes_changes
            and self.spec.mode.structure
            and len(flattened.olds) == len(flattened.news)
            and initial.treedef == flattened.signature.treedef
            and initial.skeleton.leaves() == flattened.signature.skeleton.leaves()
        )


def _lacks_axis(leaf_spec: LeafSpec, value: Any, axis: int) -> str:
    message = (
        f"nnx.scan can't scan axis {axis} of an array of shape {jnp.shape(value)}: "
        f"it has no such axis.\n  at {leaf_spec.name}"
    )
    if leaf_spec.variable and issubclass(leaf_spec.variable.type, RngState):
        message += (
            "\nSplit random streams first: rngs.split(n), or @nnx.split_rngs(splits=n) "
            "on top of nnx.scan; or carry them, with the axis nnx.Carry."
        )
    return message


def _moved(value: Any, axis: int, to: int) -> Any:
    if axis == to:
        return value
    return jax.tree.map(lambda x: jnp.moveaxis(x, axis, to), value)
