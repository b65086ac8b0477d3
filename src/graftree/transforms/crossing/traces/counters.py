"""Tells of a static attribute that makes a compiled function be traced at each call.

As ``model.step += 1`` does: what is static is part of the program. It is told once, in
the logger ``graftree``, where nobody asked.
"""

from __future__ import annotations

import itertools
import logging
import reprlib
from collections.abc import Callable
from typing import Any

from graftree.core.graph import differences
from graftree.core.graph.graphdefs import Static
from graftree.transforms.crossing import decorators, signatures
from graftree.transforms.crossing.traces import dependencies
from graftree.transforms.crossing.traces.traces import Trace, Traces

# So many traces in a row, of which each differs from the one before in one value.
COUNT = 3


def heed(traces: Traces, function: Callable[..., Any]) -> None:
    """Says which attribute it is, if the latest traces differ in one alone."""
    latest = traces.listed()[-COUNT:]
    if len(latest) < COUNT or traces.is_told:
        return
    # To list facts takes as long as tracing some layers.
    if any(_is_otherwise(x, y) for x, y in itertools.pairwise(latest)):
        return
    facts = [found for found in map(dependencies.of_trace, latest) if found is not None]
    changes = [differences.between(x, y) for x, y in itertools.pairwise(facts)]
    distinct = {change.path for found in changes for change in found}
    # Values that are not equal to themselves differ, and nothing can be said of it.
    if len(distinct) != 1 or [*map(len, changes)] != [1] * (COUNT - 1):
        return
    (path,) = distinct
    values = [changes[0][0].before, *[found[0].after for found in changes]]
    # What is passed as a static argument was meant so.
    if len(path) > 1 and all(isinstance(value, Static) for value in values):
        traces.is_told = True
        _tell(path, [value.value for value in values], function)


def _is_otherwise(one: Trace, other: Trace) -> bool:
    """Whether anything but their signatures tells two traces apart, or nothing."""
    return (
        one.signature() is other.signature()
        or one.types != other.types
        or one.settings != other.settings
    )


def _tell(path: Any, values: list[Any], function: Callable[..., Any]) -> None:
    logging.getLogger("graftree").warning(
        "%s is traced and compiled for each value of the static attribute %s, the "
        "latest being %s. If it changes as the program runs, make it a Variable, whose "
        "value is no part of the program; if it is the same made anew, as an optimizer "
        "or a lambda is, make it once. nnx.debugging.explain_recompile tells more.",
        decorators.name_of(function),
        signatures.name_of(path),
        ", ".join(map(_SHORT.repr, values)),
    )


# Functions within an optimizer have long names.
_SHORT = reprlib.Repr()
_SHORT.maxother = 60
