"""Writing the raw values of many Variables: all at once, or none."""

from __future__ import annotations

import collections
import itertools
import operator
from collections.abc import Sequence
from typing import Any

from graftree import _jax
from graftree.core import ownership
from graftree.core.variables import labels, variables
from graftree.core.variables.metadata import HashableMapping
from graftree.core.variables.variables import Variable

_set = labels.raw_slot.__set__


def may_write(variable: Variable[Any]) -> bool:
    """Whether the value of a Variable may be written now."""
    return labels.is_owned(variable) and not labels.is_read_only(variable)


def may_replace(boxes: Sequence[Variable[Any]], raw_values: Sequence[Any]) -> bool:
    """Whether `replace` is allowed now: all may be written, and refs play no part."""
    current = itertools.repeat(ownership.current())
    if not all(map(operator.is_, map(labels.owner_of, boxes), current)):
        return False
    # The Variables of a model mostly share a few entries, and a few types of values.
    entries = {id(x): x for x in map(labels.metadata_of, boxes)}.values()
    kinds = {*map(type, variables.read(boxes)), *map(type, raw_values)}
    return not any(map(_is_special, entries)) and not any(map(_may_be_ref, kinds))


def _is_special(entries: HashableMapping) -> bool:
    return entries["ref"] or not entries.get("mutable", True)


def _may_be_ref(kind: type) -> bool:
    return issubclass(kind, (_jax.Ref, _jax.Tracer))


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


def replace(boxes: Sequence[Variable[Any]], raw_values: Sequence[Any]) -> None:
    """`store` for Variables of which none holds a ref, nor shall hold one."""
    # As a loop it would cost four times as much, of what a whole call may cost.
    collections.deque(map(_set, boxes, raw_values), maxlen=0)
