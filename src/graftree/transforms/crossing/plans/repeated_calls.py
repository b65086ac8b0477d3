"""Calls of transforms other than `jit` with the same objects again.

What JAX doesn't compile is traced each time: the function may read what it likes. But
what became of its arguments outside is remembered as `plans` say, so they are taken
apart once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graftree.core import stamps
from graftree.core.objects import running
from graftree.core.pickling import Rebuilt
from graftree.core.variables import partitioning
from graftree.transforms.crossing import outside
from graftree.transforms.crossing.outside import Call
from graftree.transforms.crossing.plans.planned_calls import NO_PLAN
from graftree.transforms.crossing.plans.plans import Plans
from graftree.transforms.crossing.rows import Keywords, Row


class RepeatedCalls(Rebuilt):
    """The calls of one function in one transform.

    Args:
        f: The function.
        row: Its transform.
    """

    def __init__(self, f: Callable[..., Any], row: Row) -> None:
        self._f, self._row = f, row
        self._plans = Plans(row)
        self._is_called = False
        # A filter that reads values may give others each time; and what a plan writes
        # has no axis to be named.
        names_axis = partitioning.PARTITION_NAME in row.axis_metadata
        self._may_plan = not (row.inputs.reads_leaves or names_axis)
        self._keeps_positions = row.keyword_rule is not Keywords.BECOME_POSITIONAL

    def run(
        self,
        transformed: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The output of a call; what JAX transformed takes the groups of leaves."""
        try:
            return self._run(transformed, args, kwargs)
        except Exception as error:
            if outside.is_of_donation(error):  # of `pmap`
                Call(self._f, self._row, args, kwargs).explain(error)
            raise

    def _run(
        self,
        transformed: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        row = self._row
        # Keywords and defaults may become positions.
        is_complete = self._keeps_positions or len(args) >= row.inputs.count
        may_plan = self._may_plan and is_complete and not kwargs
        if may_plan and not running.stack.observers:
            running.note_arguments(row.identity, args, kwargs)
            out = self._plans.call(transformed, args, kwargs)
            if out is not NO_PLAN:
                return out
        made = stamps.clock.now
        call = Call(self._f, row, args, kwargs)
        # Many are called once, and never again: on the line that makes them.
        if may_plan and self._is_called:
            self._plans.learn(args, kwargs, call.packed, made)
        self._is_called = True
        return call.run(transformed)
