"""What goes round in a loop, and stays what it is.

The carry comes back from each step, and so do, without being returned, the arguments
that are carried by filters, if no part of them is scanned. Their structure must be the
same in all steps, and their objects the same ones. There is one exception: in a `scan`
with graph updates a step may set static attributes, as `model.train()` does. Then the
second step, which meets them set, must be the same program; `Loop` traces it to see.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from graftree.core.graph import differences, tree_checks
from graftree.core.graph.flattening import RefMap
from graftree.core.graph.graphdefs import LEAF, VariableDef
from graftree.transforms.crossing import packing, signatures
from graftree.transforms.crossing.inside import Inside
from graftree.transforms.crossing.rows import Row
from graftree.transforms.crossing.signatures import Signature


class Carry:
    """In the axes of `scan`: what goes from one step to the next.

    The class itself is used, not an instance of it.

    Example:
        >>> def add(total, x):
        ...     return total + x, total
        >>> cumulate = nnx.scan(add, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        >>> total, before = cumulate(jnp.array(0), jnp.arange(4))
        >>> int(total), before.tolist()
        (6, [0, 0, 1, 3])
    """


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the carry is in the arguments and in the output of the step.

    Attributes:
        argument: The number of the positional argument; ``None`` if there is no carry.
        output: The number in a tuple of outputs; ``None`` if it is the whole output.
        takes_new_variables: Whether a Variable that is itself a leaf of the carry may
            come back as another one.
        may_settle: Whether a step may set static attributes, if all do the same.
        identity: The rule that other objects break, for the message.
    """

    argument: int | None
    output: int | None = None
    takes_new_variables: bool = False
    may_settle: bool = False
    identity: str = ""

    def may_be_new(self, node: Any) -> bool:
        """Whether another object may be where this one is at the top of the carry."""
        return self.takes_new_variables and isinstance(node, VariableDef)

    def split(self, out: Any) -> tuple[Any, Any]:
        """The carry of an output, and the output without it."""
        if self.argument is None:
            return None, out
        if self.output is None:
            return out, None
        number = self.output
        if not isinstance(out, (tuple, list)) or len(out) <= number:
            raise ValueError(
                f"The function must return a tuple with the carry at index {number}, "
                f"as out_axes says, got {type(out).__name__}."
            )
        return out[number], (*out[:number], None, *out[number + 1 :])


class CarryStructureError(TypeError, ValueError):
    """A step changed the structure of the carry; either type, as in Flax NNX."""


class _Now(NamedTuple):
    """What a step left in the place of an argument.

    Attributes:
        signature: Its static part.
        olds: The objects up to it that there were.
        news: The objects up to it that there are now.
        leaves: Its leaves.
    """

    signature: Signature
    olds: list[Any]
    news: list[Any]
    leaves: list[Any]


class Rounds:
    """The arguments of a loop that go round.

    Attributes:
        before: The static part of each as it came, by its position.
    """

    def __init__(
        self, row: Row, place: Place, signature: Signature, roles: Sequence[int]
    ) -> None:
        self._row = row
        self._place = place
        self._signature = signature
        axes = [row.inputs.values[role] for role in roles]
        count = len(signature.treedef.children()[0].children())

        def goes_round(number: int) -> bool:
            own = axes[slice(*signature.span(number).leaves)]
            # If a part is scanned, each step gets the object anew.
            is_carried = Carry in own and not any(isinstance(x, int) for x in own)
            return number == place.argument or (row.mode.structure and is_carried)

        self.before = {
            number: signature.of_argument(number)
            for number in filter(goes_round, range(count))
        }

    def take(
        self, inside: Inside, carry: Any
    ) -> tuple[dict[int, Signature], list[Any], list[Any]]:
        """What is there after a step.

        Returns:
            The static parts, as in ``before``; of the carry the Variables and refs, and
            the leaves.
        """
        after: dict[int, Signature] = {}
        objects, leaves = self._take_carry(inside, carry, after)
        for number in self.before:
            if number not in after:
                now = self._take_apart(inside, number, inside.tree[0][number])
                # New data is stacked or refused where it is given a place.
                settles = self._may_settle(number, now)
                after[number] = now.signature if settles else self.before[number]
        return after, objects, leaves

    def with_changes(self, after: dict[int, Signature]) -> Signature:
        """The signature of the arguments, of which these are different."""
        skeleton = self._signature.skeleton
        for number, now in after.items():
            start, stop = self._signature.span(number).entries
            skeleton = skeleton.with_part(start, stop, now.skeleton)
        return dataclasses.replace(self._signature, skeleton=skeleton)

    def _take_apart(self, inside: Inside, number: int, value: Any) -> _Now:
        """What is now in the place of an argument.

        Its objects are numbered as in the arguments. So at equal places in equal
        signatures are objects with equal numbers, which must be the same.
        """
        first, stop = [
            next(self._signature.numbers(start), len(inside.objects))
            for start in self._signature.span(number).entries
        ]
        olds = [inside.objects[number] for number in range(stop)]
        refs = RefMap([(olds[number], number) for number in range(first)])
        skeleton, leaves = packing.take_apart(
            value, self._row.mode, refs, RefMap(), self._row.name
        )
        return _Now(Signature(skeleton), olds, [*refs], leaves)

    def _take_carry(
        self, inside: Inside, carry: Any, after: dict[int, Signature]
    ) -> tuple[list[Any], list[Any]]:
        """The Variables and refs in a carry, and its leaves; adds it to ``after``."""
        number = self._place.argument
        if number is None:
            return [], []
        now = self._take_apart(inside, number, carry)
        identified = self._identified(self.before[number], now.olds)
        if not _are_same(identified, self._identified(now.signature, now.news)):
            raise self._identity_error()
        if self.before[number] != now.signature and not self._may_settle(number, now):
            raise self.error(number, now.signature)
        if self._row.mode.structure:
            tops = now.signature.tops()
            free = {top.index for top in tops if self._place.may_be_new(top)}
            pairs = enumerate(zip(now.olds, now.news, strict=True))
            if not all(x is y or index in free for index, (x, y) in pairs):
                raise self._identity_error()
        after[number] = now.signature
        return [*filter(tree_checks.is_variable_or_ref, now.news)], now.leaves

    def _identified(self, signature: Signature, objects: Sequence[Any]) -> list[Any]:
        """Objects that must be the same, whatever else is wrong."""
        if not self._row.mode.structure:
            return [*filter(tree_checks.is_variable_or_ref, objects)]
        tops = [top for top in signature.tops() if top is not LEAF]
        return [objects[x.index] for x in tops if not self._place.may_be_new(x)]

    def _identity_error(self) -> ValueError:
        if self._row.mode.structure:
            return ValueError(
                f"{self._place.identity}, but nnx.{self._row.name} got other objects "
                "back than it gave to the function.\nChange them in place, or split "
                "them and carry their State."
            )
        return ValueError(
            f"{self._row.name} Variable identity must be preserved across "
            "iterations: the carry has other Variables out than in, or has them "
            "in other places.\nWrite to them in place (`variable[...] = value`)."
        )

    def error(self, number: int, after: Signature) -> TypeError:
        """For an argument that has another structure after a step."""
        is_carry = number == self._place.argument
        name = "carry" if is_carry else self._signature.labels.of(number)
        before = self.before[number]
        found = differences.between(before.facts(name), after.facts(name))
        lines = differences.in_words(found, "before", "after", signatures.name_of)
        listed = "\n  ".join(lines or ["which objects are shared"])
        return CarryStructureError(
            f"nnx.{self._row.name}: the structure of the carry must stay the same in a "
            f"loop, but a step changed it.\n  {listed}\nAttributes of carried objects, "
            "and metadata of carried Variables, can't be added, removed or changed "
            "there."
        )

    # A step may set static attributes of carried objects, as `model.train()` does.

    def _may_settle(self, number: int, now: _Now) -> bool:
        """Whether no more than static attributes can have changed in an argument."""
        before = self.before[number]
        return (
            self._place.may_settle
            and self._row.mode.structure
            and len(now.olds) == len(now.news)
            and before.treedef == now.signature.treedef
            and before.skeleton.leaves() == now.signature.skeleton.leaves()
        )


def _are_same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    return len(first) == len(second) and all(map(operator.is_, first, second))
