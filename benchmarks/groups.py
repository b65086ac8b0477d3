"""What a table of measurements is made of: rows in groups, each with a quantity."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from benchmarks import gauges, libraries
from benchmarks.gauges import Operation
from benchmarks.libraries import EQUINOX, FLAX, GRAFTREE, RAW

MODES = {
    "default": {},
    "graph=True, graph_updates=False": {"graph": True, "graph_updates": False},
    "graph=False": {"graph": False},
}


@dataclasses.dataclass(frozen=True)
class Quantity:
    """What is measured.

    Attributes:
        unit: In which unit it is printed.
        scale: Units per what ``measure`` gives.
        measure: Measures operations that are compared.
        digits: How many are printed after the point.
        has_ratios: Whether ratios mean something: not if it should be zero.
    """

    unit: str
    scale: float
    measure: Callable[[Sequence[Operation], gauges.Effort], list[float]]
    digits: int = 1
    has_ratios: bool = True


MICROSECONDS = Quantity("µs", 1e6, gauges.seconds_per_call)
HOST_MICROSECONDS = Quantity("µs", 1e6, partial(gauges.seconds_per_call, wait=False))
MILLISECONDS = Quantity("ms", 1e3, gauges.seconds_per_call)
OWN_MILLISECONDS = Quantity("ms", 1e3, gauges.readings)
OWN_MICROSECONDS = Quantity("µs", 1e6, gauges.readings)
COURSE_MICROSECONDS = Quantity("µs", 1e6, gauges.reading)
EQUATIONS = Quantity("equations", 1, gauges.reading, digits=0)
LINES = Quantity("lines", 1, gauges.reading, digits=0)
STATES = Quantity("x state", 1, gauges.reading, digits=2)
OBJECTS = Quantity("objects", 1, gauges.reading, digits=2, has_ratios=False)
KILOBYTES = Quantity("KB", 1e-3, gauges.reading)
TIMES = Quantity("x median", 1, gauges.readings)
BYTES = Quantity("bytes", 1, gauges.reading, digits=0, has_ratios=False)


def per_second(count: int, unit: str, longer: int = 1) -> Quantity:
    """How many of something are done in a second, ``count`` of them in a call.

    Args:
        count: How many a call does.
        unit: What these are.
        longer: How many times the budget the operations may take.
    """

    def measure(operations, effort):
        effort = dataclasses.replace(effort, budget=longer * effort.budget)
        return [count / x for x in gauges.seconds_per_call(operations, effort)]

    return Quantity(f"{unit}/s", 1, measure, digits=0)


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        library: Who does it; the row of ``RAW`` is what the others are compared with.
        variant: The mode, or nothing.
        set_up: Makes the operation that is measured.
    """

    library: str
    variant: str
    set_up: Callable[[], Operation]


@dataclasses.dataclass(frozen=True)
class Group:
    """Rows that do the same, so that their figures can be compared.

    Attributes:
        name: What they do.
        quantity: What is measured of it.
        rows: Who does it.
        target: What we want to reach, as ratios.
    """

    name: str
    quantity: Quantity
    rows: tuple[Row, ...]
    target: str = ""

    def measure(self, effort: gauges.Effort) -> list[float]:
        """The figures of the rows, in the unit of the quantity."""
        found = self.quantity.measure([row.set_up() for row in self.rows], effort)
        return [self.quantity.scale * figure for figure in found]


class Made(NamedTuple):
    """What makes an operation; a module that has functions of these names does, too.

    Attributes:
        raw: Makes that of raw JAX.
        nnx: Makes that of Graftree or Flax NNX, of the library and a mode.
        equinox: Makes that of Equinox, of the library.
    """

    raw: Callable[..., Operation]
    nnx: Callable[..., Operation]
    equinox: Callable[..., Operation] | None = None


def compared(
    name: str,
    quantity: Quantity,
    by_hand: str,
    made: Any,
    *args: Any,
    in_modes: bool = True,
    target: str = "",
    **options: Any,
) -> Group:
    """The group of raw JAX, Graftree, Flax NNX and Equinox, as far as installed.

    Args:
        name: What they do.
        quantity: What is measured of it.
        by_hand: How raw JAX does it.
        made: Makes the operations, see `Made`.
        *args: What is to be done.
        in_modes: Whether Graftree and Flax NNX have a row for each mode.
        target: What we want to reach.
        **options: How it is to be done.
    """
    found = [Row(RAW, by_hand, partial(made.raw, *args, **options))]
    for library, nnx in libraries.installed(GRAFTREE, FLAX).items():
        for mode, flags in (MODES if in_modes else {"": {}}).items():
            make = partial(made.nnx, nnx, *args, **options, **flags)
            found.append(Row(library, mode, make))
    if getattr(made, "equinox", None) is not None:
        for library, module in libraries.installed(EQUINOX).items():
            make = partial(made.equinox, module, *args, **options)
            found.append(Row(library, "", make))
    return Group(name, quantity, tuple(found), target)


def with_rows(group: Group, *rows: Row) -> Group:
    """The group with these rows instead of its own."""
    return dataclasses.replace(group, rows=rows)


def in_default_mode(group: Group) -> Group:
    """The group without the rows of the other modes."""
    others = [*MODES][1:]
    return with_rows(group, *(x for x in group.rows if x.variant not in others))


def without_peers(group: Group) -> Group:
    """The group with only raw JAX and Graftree."""
    kept = RAW, GRAFTREE
    return with_rows(group, *(x for x in group.rows if x.library in kept))
