"""Variables that are arguments by themselves: in a State, a list, or alone.

A functional training loop passes a new State at each call. A plan is right for its
Variables if they are like those that it was made for; it keeps none of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from graftree.core.variables import variables
from graftree.core.variables.variables import Variable


class LooseVariables:
    """What the loose Variables of a call must be like for a plan.

    Args:
        boxes: Those of the call that it is made of; their types are compared elsewhere.
        attached: The objects of that call, which have Variables of their own.
        are_written: Whether each call writes all of them.
    """

    def __init__(
        self,
        boxes: Sequence[Variable[Any]],
        attached: Collection[Any],
        are_written: bool,
    ) -> None:
        self._are_written = are_written
        self._metadata = [variables.metadata_of(x).noted() for x in boxes]
        self._is_fixed = all(entries.is_fixed for entries in self._metadata)
        # Those live as long as the plan, so that nothing else gets these numbers.
        self._attached = frozenset(map(id, attached))
        has_refs = any(entries["ref"] for entries in self._metadata)
        self.may_be_planned = not has_refs and self._fit(boxes)

    def read(self, boxes: Sequence[Variable[Any]]) -> list[Any] | None:
        """Their raw values; ``None`` if they are not like the earlier ones."""
        metadata = [*map(variables.metadata_of, boxes)]
        if metadata != self._metadata:
            return None
        # Those of the next call are mostly the same objects, which is seen at once; but
        # not what has changed in them.
        if self._is_fixed:
            self._metadata = metadata
        return variables.read_all(boxes) if self._fit(boxes) else None

    def _fit(self, boxes: Sequence[Variable[Any]]) -> bool:
        """Whether each is there once, and can be written if it must be."""
        numbers = {*map(id, boxes)}
        return (
            len(numbers) == len(boxes)
            and numbers.isdisjoint(self._attached)
            and (not self._are_written or variables.may_replace_all(boxes, ()))
        )
