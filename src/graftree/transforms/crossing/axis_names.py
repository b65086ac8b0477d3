"""Annotations of Variables while a transform takes an axis away from them.

Inside, a mapped Variable lacks the mapped axis, so the name of that axis must not be in
its sharding. The name is taken out before the function runs and put back afterwards,
and new Variables get it as they leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jax.sharding import PartitionSpec

from graftree.core.variables import partitioning
from graftree.core.variables.variables import Variable
from graftree.transforms.crossing.rows import Occurrence


class Hidden:
    """The names of mapped axes, taken out of Variables.

    If the function raises they are not put back: its objects are dropped then.
    """

    def __init__(
        self, occurrences: Iterable[Occurrence], names: Mapping[str, Any]
    ) -> None:
        self._names = names
        self._mapped = _by_identity(occurrences)
        self._annotations = {
            number: variable.get_metadata("out_sharding", None)
            for number, (variable, _) in self._mapped.items()
        }
        for variable, axis in self._mapped.values():
            partitioning.remove_axis(variable, _from_start(axis, variable), names)
        self._shorter = {
            number: variable.get_metadata("out_sharding", None)
            for number, (variable, _) in self._mapped.items()
        }

    def put_back(self, occurrences: Iterable[Occurrence]) -> None:
        """Puts the names back, and into new Variables."""
        for variable, axis in (_by_identity(occurrences) | self._mapped).values():
            number = id(variable)
            before, inside = (
                self._annotations.get(number),
                variable.get_metadata("out_sharding", None),
            )
            partitioning.add_axis(variable, _from_start(axis, variable), self._names)
            # The name of the only axis was all that there was; and the change makes a
            # tuple of a spec.
            is_as_it_was = before is not None and inside == self._shorter[number]
            if is_as_it_was and (not inside or isinstance(before, PartitionSpec)):
                variable.set_metadata(out_sharding=before)


def _by_identity(
    occurrences: Iterable[Occurrence],
) -> dict[int, tuple[Variable[Any], int]]:
    return {
        id(leaf): (leaf, axis)
        for _, leaf, axis in occurrences
        if isinstance(leaf, Variable) and isinstance(axis, int)
    }


def _from_start(axis: int, variable: Variable[Any]) -> int:
    """The axis counted from the start; the value lacks it inside."""
    rank = len(getattr(variable.get_raw_value(), "shape", ()))
    return axis + rank + 1 if axis < 0 else axis
