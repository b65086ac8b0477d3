"""The scores of a step: checked, stored in its note, and the best of several steps.

The note is JSON in a file that Orbax keeps in the folder of a step. The folder gets its
name only when that file is written too: no whole step lacks its scores.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from graftree import errors
from graftree.checkpoints import orbax_side, processes
from graftree.training import early_stopping

_KEY = "scores"


def checked(given: Any, best: str | None) -> dict[str, float]:
    """The scores that were given for a step, as numbers.

    Args:
        given: A dict of numbers, or ``None``.
        best: The name that must be there, if any must.

    Raises:
        TypeError: If it is not a dict, or a value is not a number.
        ValueError: If that name is missing, or if processes have other numbers.
    """
    if not isinstance(given, Mapping | None):
        raise TypeError(
            "Checkpoints.save expects scores to be a dict of numbers by name, got a "
            f"{type(given).__name__}.\nAn object to save needs another name."
        )
    given = {} if given is None else given
    if best is not None and best not in given:
        raise ValueError(
            errors.message(
                f"Checkpoints.save: the score {best!r} is missing, which decides which "
                "step is the best.",
                where=f"scores given: {', '.join(map(repr, given)) or 'none'}",
                way_out=f"Pass scores={{{best!r}: ...}}; float('nan') for a step that "
                "should not be the best.",
            )
        )
    found = {
        name: early_stopping.as_number(score, f"Checkpoints.save: the score {name!r}")
        for name, score in given.items()
    }
    if len({*processes.gathered(json.dumps(found).encode())}) > 1:
        raise ValueError(
            "Checkpoints.save: the scores differ between the processes, and only those "
            "of the first would be saved.\nReduce them over all processes first."
        )
    return found


def as_note(found: Mapping[str, float]) -> dict[str, Any] | None:
    """What is stored with a step; ``None`` for nothing."""
    return {_KEY: found} if found else None


def best_of(folders: Mapping[int, Any], name: str | None, mode: str) -> int | None:
    """The step with the best score of that name; of equal ones the earliest.

    Args:
        folders: Those of the steps, in order.
        name: Of the score; steps without it are never the best.
        mode: Which is better.
    """
    best, found = early_stopping.WORST[mode], None
    for step, folder in folders.items():
        with orbax_side.explained(orbax_side.READING, folder):
            score = orbax_side.read_note(folder).get(_KEY, {}).get(name, math.nan)
            is_better = early_stopping.is_better(score, best, mode)
        if is_better:
            best, found = score, step
    return found
