"""What a transform is: its inputs, its outputs, its other rules.

A `TransformSpec` has the prefixes of a transform, and its rules for the rest. Names of
mapped axes are hidden from Variables while the function runs (`HiddenAxisNames`).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jax.sharding import PartitionSpec

from graftree.config import Propagation
from graftree.core.graph.graphdefs import Interned
from graftree.core.objects import callables
from graftree.core.variables import partitioning, variables
from graftree.transforms.lifting.decorators import Chosen
from graftree.transforms.lifting.leaves import Result
from graftree.transforms.lifting.prefixes import Occurrence, Prefix
from graftree.transforms.lifting.signatures import ARGS, Labels, Signature


class Keywords(enum.Enum):
    """Rule for keyword arguments."""

    STAY = "stay"
    BECOME_POSITIONAL = "become positional"  # those have a prefix
    REFUSED = "refused"


@dataclasses.dataclass(frozen=True)
class TransformSpec:
    """Rules of one transform.

    Attributes:
        name: The public name of the transform.
        mode: The changes that propagate.
        inputs: The prefix of ``(args, kwargs)``, without the static arguments.
        outputs: The prefix of the output.
        statics: Which arguments are static, if any are.
        keywords: The rule for keyword arguments, without graph updates and with.
        axis_metadata: Metadata for Variables whose axis the transform takes away
            inside: the ``transform_metadata`` of the public functions.
        maps_axis: Whether it is this transform that maps the axis, not one around it.
        returns_placed: Whether, with graph updates, Variables whose prefix is not
            ``None`` come back also if the function didn't change them.
        returns_captured: Whether, with graph updates, objects of an outer trace may be
            returned, as copies.
        is_detached: Whether nothing reaches the caller's objects, and the output is
            made of new ones.
        labels: The names of the positional arguments in messages.
        signatures: Those of earlier calls, if JAX keeps their compiled programs.
        traces: Where traces are noted, if they are; see `hooks.record_of_traces`.
        held: The prefix of what the functions hold.
        functions: The functions, if they hold objects; see `holding`.
    """

    name: str
    mode: Propagation
    inputs: Prefix
    outputs: Prefix
    statics: Chosen | None = None
    keywords: tuple[Keywords, Keywords] = (Keywords.STAY, Keywords.BECOME_POSITIONAL)
    axis_metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    maps_axis: bool = True
    returns_placed: bool = False
    returns_captured: bool = False
    is_detached: bool = False
    labels: Labels = ARGS
    signatures: Interned | None = None
    traces: Any = None
    held: Any = None
    functions: callables.Functions | None = None

    @staticmethod
    def uniform(name: str, mode: Propagation, **options: Any) -> TransformSpec:
        """Makes the spec of a transform that treats all leaves alike."""
        both = Prefix(None, "args", name, mode)
        return TransformSpec(name, mode, both, both, **options)

    def holding(self, *functions: Any) -> TransformSpec:
        """Makes the spec for these functions, whose contents are one more argument.

        It comes after all others in the tree of a call.
        """
        held = callables.Functions.of(functions)
        if held is None:
            return self
        inputs = self.inputs.holding(self.held)
        return dataclasses.replace(self, inputs=inputs, functions=held)

    @property
    def held_leaves(self) -> tuple[Any, ...] | None:
        """Objects in its functions; ``None`` if they may be others each time."""
        return () if self.functions is None else self.functions.leaves

    def tree(self, args: Any, kwargs: Any) -> tuple[Any, ...]:
        """Makes the tree of a call."""
        if self.functions is None:
            return args, kwargs
        return args, kwargs, self.functions.now()

    def occurrences(self, tree: Any) -> Iterator[Occurrence]:
        """Lists the Variables in ``(args, kwargs)``, each wherever it occurs."""
        for path, leaf, prefix in self.inputs.occurrences(tree, self.mode.sharing):
            yield path[1:], leaf, prefix  # without the index of args or kwargs

    def may_differ(self, *signatures: Signature | None) -> bool:
        """Whether a Variable could occur twice in these, with different prefixes."""
        distinct = {*self.inputs.distinct, *self.outputs.distinct}
        return (
            self.mode.sharing
            and len(distinct) > 1
            and any([x is not None and x.has_references for x in signatures])
        )

    @functools.cached_property
    def has_prefixes(self) -> bool:
        """Whether JAX gets anything for the groups."""
        values = *self.inputs.values, *self.outputs.values
        return any([value is not None for value in values])

    @property
    def result_prefix(self) -> Any:
        """JAX's prefix for a result of `traced.TracedCall.leave`."""
        if not self.has_prefixes:
            return None
        ins, outs = self.inputs.values, self.outputs.values
        return Result.prefix((ins, ins, outs))


class HiddenAxisNames:
    """Names of mapped axes, taken out of Variables.

    If the function raises they are not put back: its objects are dropped then.
    """

    def __init__(
        self, occurrences: Iterable[Occurrence], names: Mapping[str, Any]
    ) -> None:
        self._names = names
        self._mapped = _by_identity(occurrences)
        self._annotations = self._annotated()
        for variable, axis in self._mapped.values():
            partitioning.remove_axis(variable, _from_start(axis, variable), names)
        self._shorter = self._annotated()

    def _annotated(self) -> dict[int, Any]:
        return {
            number: variable.get_metadata("out_sharding", None)
            for number, (variable, _) in self._mapped.items()
        }

    def put_back(self, occurrences: Iterable[Occurrence]) -> None:
        """Puts the names back, and into new Variables."""
        for variable, axis in (_by_identity(occurrences) | self._mapped).values():
            number = id(variable)
            before = self._annotations.get(number)
            inside = variable.get_metadata("out_sharding", None)
            partitioning.add_axis(variable, _from_start(axis, variable), self._names)
            # The name of the only axis was all there was; and the change turns a spec
            # into a tuple.
            is_as_it_was = before is not None and inside == self._shorter[number]
            if is_as_it_was and (not inside or isinstance(before, PartitionSpec)):
                variable.set_metadata(out_sharding=before)


def _by_identity(
    occurrences: Iterable[Occurrence],
) -> dict[int, tuple[variables.Variable[Any], int]]:
    return {
        id(leaf): (leaf, axis)
        for _, leaf, axis in occurrences
        if isinstance(leaf, variables.Variable) and isinstance(axis, int)
    }


def _from_start(axis: int, variable: variables.Variable[Any]) -> int:
    """Counts the axis from the start; the value lacks it in the function."""
    rank = len(getattr(variable.get_raw_value(), "shape", ()))
    return axis + rank + 1 if axis < 0 else axis
