"""Annotations of Variables while a transform takes an axis away from them.

Inside, a mapped Variable lacks the mapped axis, so the name of that axis must not be in
its sharding. The name is taken out before the function runs and put back afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from graftree.core import partitioning
from graftree.core.variables import Variable
from graftree.transforms.boundary import Crossing

Mapped = list[tuple[Variable[Any], int]]


def mapped_variables(crossing: Crossing, axes: Sequence[Any]) -> Mapped:
    """The Variables of a call that are mapped, each with its axis.

    Args:
        crossing: The arguments.
        axes: The axis of each leaf; those that are no integers are passed over.
    """
    mapped: Mapped = []
    definitions = crossing.skeleton.definitions()
    for definition, axis in zip(definitions, axes, strict=True):
        if definition is not None and isinstance(axis, int):
            variable = crossing.objects[definition.index]
            if isinstance(variable, Variable):
                mapped.append((variable, axis))
    return mapped


@contextlib.contextmanager
def hidden(mapped: Mapped, axis_metadata: Mapping[str, Any]) -> Iterator[None]:
    """A context without the names of the mapped axes."""
    for variable, axis in mapped:
        partitioning.remove_axis(variable, axis, axis_metadata)
    yield
    # Not after an exception: the objects of a failed call are dropped.
    for variable, axis in mapped:
        partitioning.add_axis(variable, axis, axis_metadata)


def add_to_new(
    outputs: Iterable[tuple[Any, Any, Any]],
    mapped: Mapped,
    axis_metadata: Mapping[str, Any],
) -> None:
    """Puts the names into new Variables of an output.

    Args:
        outputs: The Variables there: path, Variable, axis.
        mapped: Those that get them back as arguments.
        axis_metadata: The names.
    """
    done = {id(variable) for variable, _ in mapped}
    for _, leaf, axis in outputs:
        if (
            isinstance(leaf, Variable)
            and isinstance(axis, int)
            and id(leaf) not in done
        ):
            done.add(id(leaf))
            partitioning.add_axis(leaf, axis, axis_metadata)
