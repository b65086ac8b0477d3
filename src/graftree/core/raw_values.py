"""Reading and writing the raw values of many Variables: all at once, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graftree.core import labels, variables
from graftree.core.variables import Variable

_get = variables.raw_slot.__get__


def read(boxes: Sequence[Variable[Any]]) -> list[Any]:
    """The raw values of many Variables."""
    return [*map(_get, boxes)]


def may_write(variable: Variable[Any]) -> bool:
    """Whether the value of a Variable may be written now."""
    return variables.is_owned(variable) and not labels.is_read_only(variable)


def write(boxes: Sequence[Variable[Any]], raw_values: Sequence[Any]) -> None:
    """Stores raw values in many Variables, into their refs if there are: all, or none.

    Raises:
        TraceContextError, ImmutableVariableError, TypeError, ValueError: See
            `variables.check_write`; nothing is written then.
    """
    for variable, value in zip(boxes, raw_values, strict=True):
        variables.check_write(variable, value)
    store(boxes, raw_values)


def store(boxes: Sequence[Variable[Any]], raw_values: Sequence[Any]) -> None:
    """`write` without its checks, for a caller that made them."""
    for variable, value in zip(boxes, raw_values, strict=True):
        variables.store(variable, value)
