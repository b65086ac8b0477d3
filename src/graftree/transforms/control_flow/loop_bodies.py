"""The body of a loop: some leaves are carried, some are scanned, the others stay.

A loop is a call with one step, `Loop.step`, the body of JAX's loop. There, `TracedCall`
rebuilds all arguments from the carried leaves, the slices of the scanned
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
from graftree.transforms.lifting.leaves import (
    Leaves,
    Result,
    ResultPart,
    ResultSpec,
    join,
)
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


class CarryStructureError(TypeError, ValueError):
    """A step changed the structure of the carry; either type, as in Flax NNX."""


class _LeafOrigin(NamedTuple):
    """Says where a leaf is after the loop.

    Attributes:
        index: In the list that every step returns; without an axis, in the arguments.
        axis: The one on which it is stacked.
    """

    index: int
    axis: int | None = None


class _Notes(NamedTuple):
    """What is known of the result of a loop once a step is traced.

    Attributes:
        spec: The static part of the result.
        origins: Those of its leaves, and then those of the content of moved refs.
    """

    spec: ResultSpec
    origins: list[_LeafOrigin]


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
        self._notes: _Notes | None = None
        axes = [spec.inputs.values[role] for role in self.roles]
        arguments = [*range(len(self.signature.treedef.children()[0].children()))]
        if spec.functions is not None:
            arguments.append(FUNCTIONS)  # what they hold is carried like an argument
        # The static part of each carried argument, by its position.
        self._initial_signatures: dict[int, Signature] = {}
        for argument in arguments:
            argument_axes = axes[slice(*self.signature.leaves_of(argument))]
            # If a part is scanned, each step gets a new object.
            is_scanned = any([isinstance(axis, int) for axis in argument_axes])
            by_filters = Carry in argument_axes and not is_scanned
            if argument == carry_spec.argument or (spec.mode.structure and by_filters):
                signature = self.signature.of_argument(argument)
                self._initial_signatures[argument] = signature
        # The positions of leaves: of refs whose content is carried or scanned, of
        # carried leaves, of scanned ones with their axes.
        self._moved: list[int] = []
        self._carried: list[int] = []
        self._scanned: dict[int, int] = {}
        contents = list(self.values)
        leaf_specs = self.signature.leaf_specs
        for i, (leaf_spec, axis) in enumerate(zip(leaf_specs, axes, strict=True)):
            is_ref, is_scanned = _jax.is_ref(contents[i]), isinstance(axis, int)
            # JAX slices refs along their first axis only.
            is_moved = is_ref and bool(axis if is_scanned else moves_refs)
            # Without graph updates, writes to Variables are kept.
            is_kept = leaf_spec.variable is not None and not spec.mode.structure
            if is_moved:
                self._moved.append(i)
                contents[i] = contents[i][...]
            if is_scanned:
                self._scanned[i] = axis
                for x in jax.tree.leaves(contents[i]):
                    if not -jnp.ndim(x) <= axis < jnp.ndim(x):
                        raise ValueError(_lacks_axis(leaf_spec, x, axis))
                contents[i] = _moved(contents[i], axis, 0)
            elif is_moved or (not is_ref and (axis is Carry or is_kept)):
                self._carried.append(i)
        self.initial = Leaves.picked(contents, self.signature, self._carried)
        self.scanned = Leaves.picked(contents, self.signature, [*self._scanned])

    def step(
        self,
        f: Callable[[TracedCall], Any],
        carried: Leaves,
        scanned: Leaves | None = None,
    ) -> tuple[Leaves, list[Any]]:
        """Traces one step, which calls the function as ``f(call)``.

        Returns:
            The leaves for the next step, and those to stack.
        """
        following, stacked, self._notes, changed = self._outcome(f, carried, scanned)
        if changed:
            self._check_settled(f, carried, scanned, changed)
        return following, stacked

    def result(self, carried: Leaves, stacked: Sequence[Any]) -> Result:
        """Makes the argument of `Call.commit`, after the loop.

        Args:
            carried: The leaves that the last step left.
            stacked: All stacked ones.
        """
        assert self._notes, "JAX traces the step before the loop ends"
        last, values = carried.by_position(), []
        for index, axis in self._notes.origins:
            if axis is None:
                values.append(last.get(index, self.values[index]))
            else:
                values.append(_moved(stacked[index], 0, axis))
        count = len(values) - len(self._moved)
        for position, content in zip(self._moved, values[count:], strict=True):
            self.values[position][...] = content
        return Result.of(self._notes.spec, values[:count])

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
    ) -> tuple[Leaves, list[Any], _Notes, dict[int, Signature]]:
        """Traces one step.

        Returns:
            The leaves for the next step; the leaves to stack; notes; and the static
            parts of the carried arguments that it changed.
        """
        call = self.traced(carried, scanned)
        out = f(call)
        carry, others = self.carry_spec.split(out)
        changed, objects, leaves = self._flatten_carried(call, carry)
        result = self._without_dropped(call.collect(out, carried=(objects, others)))
        contents = [call.values[position][...] for position in self._moved]
        places = self._places(result.spec.parts)
        places += [(self._scanned.get(position), position) for position in self._moved]
        values = [call.current(position) for position in range(len(self.values))]
        stacked, origins = list[Any](), list[_LeafOrigin]()
        for value, (axis, position) in zip(
            [*result.leaves, *contents], places, strict=True
        ):
            if isinstance(axis, int):
                origins.append(_LeafOrigin(len(stacked), axis))
                stacked.append(value)
            elif position is not None:
                origins.append(_LeafOrigin(position))
                values[position] = value  # an attribute that is an array may be new
            else:
                raise CarryStructureError(
                    f"nnx.{self.spec.name}: the structure of a carried or broadcast "
                    "argument must not change, but it has new data.\nAdd it before the "
                    "loop, or give the argument an axis."
                )
        carry_leaves = slice(*self.signature.leaves_of(self.carry_spec.argument))
        values[carry_leaves] = map(flattening.raw_of, leaves)
        for position, content in zip(self._moved, contents, strict=True):
            values[position] = content
        following = Leaves.picked(values, self.signature, self._carried)
        return following, stacked, _Notes(result.spec, origins), changed

    def _places(self, parts: Sequence[ResultPart]) -> list[tuple[Any, int | None]]:
        """Lists for each leaf of a result its axis, and its position in the arguments.

        That is where the arguments have a leaf at its path; there may be none.
        """
        ins, outs = self.spec.inputs.values, self.spec.outputs.values
        # In the output, the carry is elsewhere than in the arguments.
        start, _ = self.signature.entries_of(self.carry_spec.argument)
        outputs = parts[2].signature.treedef.children()
        before = outputs[: self.carry_spec.output or 0]
        shifts = (0, 0, start - sum([treedef.num_leaves for treedef in before]))
        position_at = {x: i for i, x in enumerate(self.signature.skeleton.paths())}
        places = list[tuple[Any, int | None]]()
        for part, axes, shift in zip(parts, (ins, ins, outs), shifts, strict=True):
            paths = part.signature.skeleton.paths()
            for i, group in zip(part.positions, part.groups, strict=True):
                entry, *keys = paths[i]
                places.append((axes[group], position_at.get((entry + shift, *keys))))
        return places

    def _without_dropped(self, result: Result) -> Result:
        """Drops the changes that don't survive the loop, and warns of those.

        With graph updates, these are the changes of values that all steps share.
        """
        axes, tree = self.spec.inputs.values, self.spec.inputs.tree[0]
        changes = result.spec.parts[0]
        surviving = [
            i for i, group in enumerate(changes.groups) if axes[group] is not None
        ]
        if not self.spec.mode.structure or len(surviving) == len(changes.groups):
            return result
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

    # The carried arguments.

    def _flatten_carried(
        self, call: TracedCall, carry: Any
    ) -> tuple[dict[int, Signature], list[Any], list[Any]]:
        """Takes apart the arguments and the carry after a step.

        Returns:
            The static part of each carried argument that changed; of the carry the
            Variables and refs, and the leaves.
        """
        changed, objects, leaves = dict[int, Signature](), list[Any](), list[Any]()
        for argument, initial in self._initial_signatures.items():
            is_carry = argument == self.carry_spec.argument
            # Objects are numbered as in the arguments. So equal signatures have objects
            # with equal numbers at equal paths, and these must be the same.
            first, stop = [
                next(self.signature.numbers(start), len(call.objects))
                for start in self.signature.entries_of(argument)
            ]
            olds = [call.objects[i] for i in range(stop)]
            refs = flattening.RefMap([(olds[i], i) for i in range(first)])
            skeleton, argument_leaves = argument_trees.take_apart(
                carry if is_carry else call.argument(argument),
                self.spec.mode,
                refs,
                flattening.RefMap(),
                self.spec.name,
            )
            after, news = Signature(skeleton), [*refs]
            if is_carry:
                objects = [*filter(nodes.is_variable_or_ref, news)]
                leaves = argument_leaves
            if initial == after and argument_trees.are_same(olds, news):
                continue
            if is_carry:
                self._check_carry(argument, after, olds, news)
            # New data elsewhere is stacked or refused.
            if initial != after and self._may_settle(argument, after, olds, news):
                changed[argument] = after
        return changed, objects, leaves

    def _check_carry(
        self,
        argument: int,
        after: Signature,
        olds: Sequence[Any],
        news: Sequence[Any],
    ) -> None:
        """Raises unless the carry has the structure and the objects that it had."""
        initial = self._initial_signatures[argument]
        identified = self._identified(initial, olds)
        if not argument_trees.are_same(identified, self._identified(after, news)):
            raise self._identity_error()
        if initial != after and not self._may_settle(argument, after, olds, news):
            raise self._structure_error(argument, after)
        if self.spec.mode.structure:
            tops = after.skeleton.tops()
            free = {top.index for top in tops if self.carry_spec.may_be_new(top)}
            pairs = enumerate(zip(olds, news, strict=True))
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

    def _check_settled(
        self,
        f: Callable[[TracedCall], Any],
        carried: Leaves,
        scanned: Leaves | None,
        changed: dict[int, Signature],
    ) -> None:
        """Raises unless the second step, after the changes of the first, is equal.

        It must leave the carried values with the structure that it got them with, by
        the same program. Then all steps do.
        """
        error = self._structure_error(*next(iter(changed.items())))
        # What the copy knows of the leaves stays right: they are where they were.
        second, skeleton = copy.copy(self), self.signature.skeleton
        for argument, signature in changed.items():
            span = self.signature.entries_of(argument)
            skeleton = skeleton.with_part(*span, signature.skeleton)
        second.signature = dataclasses.replace(self.signature, skeleton=skeleton)
        second._initial_signatures = self._initial_signatures | changed

        def program_of(loop: Loop, changes: dict[int, Signature]) -> Any:
            def program(*groups: Any) -> Any:
                *results, _, found = loop._outcome(f, *groups)
                if found != changes:
                    raise error
                return jax.tree.leaves(results)

            return jax.make_jaxpr(program)(carried, scanned)

        if not programs.are_equal(program_of(self, changed), program_of(second, {})):
            raise error

    def _may_settle(
        self,
        argument: int,
        after: Signature,
        olds: Sequence[Any],
        news: Sequence[Any],
    ) -> bool:
        """Whether only static attributes can have changed in an argument."""
        initial = self._initial_signatures[argument]
        return (
            self.carry_spec.takes_changes
            and self.spec.mode.structure
            and len(olds) == len(news)
            and initial.treedef == after.treedef
            and initial.skeleton.leaves() == after.skeleton.leaves()
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
