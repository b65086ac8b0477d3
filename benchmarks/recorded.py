"""What was measured, in one file: the figures that pages of the documentation quote.

``python -m benchmarks --record``, and ``python -m benchmarks.issues --record``, write
``measured.json``: of each run its setting, its machine and its date, and the figures of
its groups. A group that is measured again with the same versions of Python and JAX
takes the place of the earlier figures.
"""

import dataclasses
import datetime
import json
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from benchmarks import tables
from benchmarks.groups import Group, Quantity, Row

FILE = pathlib.Path(__file__).parent / "measured.json"


@dataclasses.dataclass(frozen=True)
class Measured:
    """A group with its figures, in the order of its rows."""

    group: Group
    figures: tuple[float, ...]

    def figure(self, label: str) -> float:
        """The figure of the row with this label, such as ``"Graftree, default"``.

        Raises:
            LookupError: If there is no such row.
        """
        for row, figure in zip(self.group.rows, self.figures, strict=True):
            if tables.label(row) == label:
                return figure
        raise LookupError(f"{self.group.name!r} has no row {label!r} in {FILE.name}")


@dataclasses.dataclass(frozen=True)
class Run:
    """Groups that were measured in one process.

    Attributes:
        setting: The versions, the platform, and what was taken of how many turns.
        machine: Its processor, and what else it did.
        date: The day.
        measured: The groups, by name.
    """

    setting: str
    machine: str
    date: str
    measured: dict[str, Measured]

    @property
    def end(self) -> str:
        """The end of the support range: ``"Python 3.13, JAX 0.12"``."""
        versions = re.findall(r"(Python|JAX) (\d+\.\d+)", self.setting)
        return ", ".join(" ".join(version) for version in versions)


def read(file: pathlib.Path = FILE) -> list[Run]:
    """The runs that were recorded."""
    return [_run(**entry) for entry in json.loads(file.read_text())]


def record(
    setting: str, measured: Sequence[Measured], file: pathlib.Path = FILE
) -> None:
    """Adds a run of today; its groups leave earlier runs of the same versions."""
    today = datetime.date.today().isoformat()
    new = Run(setting, machine(), today, {x.group.name: x for x in measured})
    runs = [_without(run, new) for run in read(file)] + [new]
    entries = [_entry(run) for run in runs if run.measured]
    text = json.dumps(entries, indent=1, ensure_ascii=False)
    # One row of a group in a line: the file is read, and compared, by people.
    rows = r"\[\s+(\"[^\"]*\"),\s+(\"[^\"]*\"),\s+([-\d.e]+)\s+\]"
    file.write_text(re.sub(rows, r"[\1, \2, \3]", text) + "\n")


def machine() -> str:
    """The number of cores, the processor if Linux names it, and the load."""
    file = pathlib.Path("/proc/cpuinfo")
    text = file.read_text() if file.exists() else ""
    names = re.findall(r"^model name\s*: (.*)$", text, re.M)[:1]
    load = f"load average {os.getloadavg()[0]:.1f}"
    return ", ".join([f"{os.cpu_count()} cores", *names, load])


def page(runs: Sequence[Run]) -> str:
    """All tables in Markdown, under a heading for each end of the support range."""
    parts = []
    for end in sorted({run.end for run in runs}, reverse=True):
        parts.append(f"## {end}")
        for run in runs:
            if run.end == end:
                parts.append(f"{run.date}; {run.machine}.\n{run.setting}.")
                parts += [
                    tables.markdown(x.group, x.figures).strip()
                    for x in run.measured.values()
                ]
    return "\n\n".join(parts)


def _without(run: Run, newer: Run) -> Run:
    if run.end != newer.end:
        return run
    kept = {k: v for k, v in run.measured.items() if k not in newer.measured}
    return dataclasses.replace(run, measured=kept)


def _entry(run: Run) -> dict[str, Any]:
    def of(x: Measured) -> dict[str, Any]:
        quantity = x.group.quantity
        rows = zip(x.group.rows, x.figures, strict=True)
        return {
            "unit": quantity.unit,
            "digits": quantity.digits,
            "has_ratios": quantity.has_ratios,
            "rows": [[x.library, x.variant, float(f"{y:.7g}")] for x, y in rows],
        }

    groups = {name: of(x) for name, x in run.measured.items()}
    fields = {"setting": run.setting, "machine": run.machine, "date": run.date}
    return {**fields, "groups": groups}


def _run(setting: str, machine: str, date: str, groups: dict[str, Any]) -> Run:
    measured = {name: _measured(name, **entry) for name, entry in groups.items()}
    return Run(setting, machine, date, measured)


def _measured(
    name: str, unit: str, digits: int, has_ratios: bool, rows: list[Any]
) -> Measured:
    quantity = Quantity(unit, 1, not_again, digits, has_ratios)
    made = tuple(Row(library, variant, not_again) for library, variant, _ in rows)
    return Measured(Group(name, quantity, made), tuple(row[2] for row in rows))


def not_again(*_: Any) -> Any:
    """Stands in the place of what measured the figures."""
    raise TypeError("these are figures of an earlier run; measure rows.all_groups()")
