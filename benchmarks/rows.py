"""The table of measurements. A row is one library doing what its group is named for."""

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks import models
from benchmarks.timing import Operation

DEPTHS = (4, 50)
FORMS = ("split", "merge", "state", "update", "clone")
MODES = {
    "default": {},
    "graph=True, graph_updates=False": {"graph": True, "graph_updates": False},
    "graph=False": {"graph": False},
}
RAW = "raw JAX"
FLAX = "Flax NNX"


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        library: Who does it; the row of ``RAW`` is what the others are compared with.
        variant: The mode, or nothing.
        set_up: Makes the operation that is timed.
    """

    library: str
    variant: str
    set_up: Callable[[], Operation]


@dataclasses.dataclass(frozen=True)
class Group:
    """Rows that do the same, so that their times can be compared."""

    name: str
    rows: tuple[Row, ...]


def groups() -> list[Group]:
    """All measurements, in the order in which they are printed."""
    steps = [
        Group(f"train step, {depth} layers, Adam", _steps(depth)) for depth in DEPTHS
    ]
    steps.append(Group("train step in place, 50 layers, Adam", _in_place(50)))
    return steps + [Group(f"{form}, 50 layers", _forms(form)) for form in FORMS]


def _steps(depth: int) -> tuple[Row, ...]:
    rows = [Row(RAW, "jax.jit on a flat list", partial(models.raw_step, depth))]
    for library, nnx in _installed({"Graftree": "graftree", FLAX: "flax.nnx"}):
        for name, mode in MODES.items():
            rows.append(
                Row(library, name, partial(models.nnx_step, nnx, depth, **mode))
            )
    for library, equinox in _installed({"Equinox": "equinox"}):
        step = partial(models.equinox_step, equinox, depth)
        rows.append(Row(library, "filter_jit", step))
    return tuple(rows)


def _in_place(depth: int) -> tuple[Row, ...]:
    donated = partial(models.raw_step, depth, donate=True)
    rows = [
        Row(RAW, "jax.jit, donated arrays", donated),
        Row(RAW, "jax.jit, array refs", partial(models.raw_refs_step, depth)),
    ]
    for library, nnx in _installed({"Graftree": "graftree", FLAX: "flax.nnx"}):
        step = partial(models.refs_step, nnx, depth)
        rows.append(Row(library, "jax.jit, array refs", step))
    return tuple(rows)


def _forms(form: str) -> tuple[Row, ...]:
    rows = [Row(RAW, "jax.tree", partial(models.raw_form, form, 50))]
    for library, nnx in _installed({"Graftree": "graftree", FLAX: "flax.nnx"}):
        rows.append(Row(library, "", partial(models.nnx_form, nnx, form, 50)))
    return tuple(rows)


def _installed(modules: dict[str, str]) -> list[tuple[str, Any]]:
    """Imports those libraries of {name: module} that are installed."""
    return [
        (name, importlib.import_module(module))
        for name, module in modules.items()
        if importlib.util.find_spec(module.split(".")[0])
    ]
