"""The clock: operations that are compared take turns within one process.

A machine slows down and speeds up over seconds. Operations that run one after the other
each meet a different machine; taking turns, they all meet the same one, and the median
over the turns leaves out the worst of the rest.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

Operation = Callable[[], Any]


def medians(
    operations: Sequence[Operation], *, rounds: int, seconds: float
) -> list[float]:
    """Times operations that take turns.

    Args:
        operations: What to time. The last result of a turn is waited for.
        rounds: Turns for each operation.
        seconds: About how long one turn lasts.

    Returns:
        For each operation the median over its turns of the seconds per call.
    """
    repeats = [_repeats(operation, seconds) for operation in operations]
    samples: list[list[float]] = [[] for _ in operations]
    gc.disable()
    try:
        for _ in range(rounds):
            for operation, repeat, taken in zip(
                operations, repeats, samples, strict=True
            ):
                taken.append(_time(operation, repeat) / repeat)
            gc.collect()
    finally:
        gc.enable()
    return [statistics.median(taken) for taken in samples]


def _repeats(operation: Operation, seconds: float) -> int:
    """How many calls fill a turn; the calls made here also compile and warm up."""
    _time(operation, 3)
    return max(1, round(seconds / (_time(operation, 5) / 5)))


def _time(operation: Operation, repeat: int) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        result = operation()
    jax.block_until_ready(jax.tree.leaves(result))
    return time.perf_counter() - start
