"""The clock and the other gauges: operations that are compared take turns.

A machine slows down and speeds up over seconds. Operations that run one after the other
each meet a different machine; taking turns within one process, they all meet the same
one, and the median over the turns leaves out the worst of the rest.
"""

import dataclasses
import functools
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

Operation = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        turns: Turns of each operation, if they are short.
        seconds: About how long one turn lasts.
        budget: Seconds for all turns of operations that are compared. Where these are
            slow there are fewer turns, but at least ``fewest``.
        fewest: See ``budget``.
        pick: What is taken of the turns: their median, or on a machine that has other
            things to do the ``min``.
    """

    turns: int
    seconds: float
    budget: float
    fewest: int = 3
    pick: Callable[[list[float]], float] = statistics.median

    def turns_of(self, seconds: float) -> int:
        """How many turns there are, if one of each operation takes so long."""
        return min(self.turns, max(self.fewest, round(self.budget / seconds)))


QUICK = Effort(turns=25, seconds=0.005, budget=1.0, fewest=2)
FULL = Effort(turns=75, seconds=0.01, budget=8.0, fewest=5)


def seconds_per_call(
    operations: Sequence[Operation], effort: Effort, *, wait: bool = True
) -> list[float]:
    """Times operations that take turns.

    Args:
        operations: What to time.
        effort: How long.
        wait: Whether a turn ends when the last result is there. Without, it ends with
            the last call: for operations that compute nothing.

    Returns:
        The seconds per call of each operation, picked from its turns.
    """
    timed = [
        functools.partial(
            _time, operation, _repeats(operation, effort.seconds, wait), wait
        )
        for operation in operations
    ]
    return _in_turns(timed, effort)


def readings(operations: Sequence[Operation], effort: Effort) -> list[float]:
    """What is typical of the numbers that operations return, which take turns."""
    for operation in operations:
        operation()
    return _in_turns(operations, effort)


def reading(operations: Sequence[Operation], effort: Effort) -> list[float]:
    """The numbers that operations return, for what is the same each time."""
    del effort
    return [operation() for operation in operations]


def _in_turns(operations: Sequence[Operation], effort: Effort) -> list[float]:
    """The first turn of all tells how many more there is time for."""
    # What is there now stays; without it a collection between turns takes no time.
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        start = time.perf_counter()
        samples = [[operation()] for operation in operations]
        for _ in range(effort.turns_of(time.perf_counter() - start) - 1):
            gc.collect()
            for operation, taken in zip(operations, samples, strict=True):
                taken.append(operation())
    finally:
        gc.enable()
        gc.unfreeze()
    return [effort.pick(taken) for taken in samples]


def _repeats(operation: Operation, seconds: float, wait: bool) -> int:
    """How many calls fill a turn; the calls made here also compile and warm up."""
    _time(operation, 1, wait)
    if _time(operation, 1, wait) > 10 * seconds:
        return 1
    # The fastest of three: an interruption here would leave turns of one call, which
    # find all caches of the processor cold.
    return max(1, round(seconds / min(_time(operation, 3, wait) for _ in range(3))))


def _time(operation: Operation, repeat: int, wait: bool) -> float:
    """Seconds per call."""
    start = time.perf_counter()
    for _ in range(repeat):
        result = operation()
    if wait:
        jax.block_until_ready(jax.tree.leaves(result))
    return (time.perf_counter() - start) / repeat


# Where frames meet the end of a chunk of CPython's stack, calls are slow; a chunk has
# some 50 frames. So tracing depends on where it begins.
DEPTHS = (0, 16, 32, 48, 64, 80, 96, 112)


def at_many_depths(operation: Operation) -> Operation:
    """The operation, each time at another depth of the stack of Python."""
    depths = itertools.cycle(DEPTHS)
    return lambda: _at_depth(next(depths), operation)


def _at_depth(depth: int, operation: Operation) -> Any:
    return _at_depth(depth - 1, operation) if depth else operation()
