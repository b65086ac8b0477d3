"""Files with a row of numbers for each step: JSON lines, and tables as CSV.

    run.jsonl                          run.csv
    {"step": 1, "loss": 0.5}           step,loss,accuracy
    {"step": 2, "loss": NaN}           1,0.5,
                                       2,nan,0.25

- A row is one line, written at once. A line without an end, which a kill has left, does
  not count.
- Steps increase, so that the rows up to a step are the beginning of the file. To drop
  the others is to cut it there.
- A table with a new column is written beside the old one, then put in its place.
- A file has one writer: it is locked while it is open (`file_locks.py`).
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from graftree import errors, file_locks

Numbers = Mapping[str, int | float]

PARTIAL = ".partial"


class RowFile:
    """A file of rows, open for one writer; `JsonLines` and `Table` are the two kinds.

    Args:
        path: The file; it and its folder are made.

    Raises:
        BlockingIOError: If another writer has it open.
        ValueError: If there is a file of another kind.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self._descriptor = _locked(self.path)
        self._end: int | None = None  # where to cut before the next row
        with open(self.path, "rb") as file:
            if not self._is_start(file.readline()):
                self.close()
                raise ValueError(
                    f"RunLog: {self.path} exists, but is not a log.\nChoose another "
                    "path."
                )

    def start_new(self) -> None:
        """Raises if there are rows of another run, or of this one before a restart."""
        steps = [step for step, _ in self._rows()]
        if steps:
            raise FileExistsError(
                f"RunLog: {self.path} has {len(steps)} rows, up to step {steps[-1]}.\n"
                "To continue that run, pass resume=True, and save the log with the "
                "model: Checkpoints.save(step, model=model, log=log). For another run, "
                "choose another path."
            )
        self._end = 0

    def resume_after(self, step: int | None) -> None:
        """Has the next `append` drop the rows after a step first; ``None``: all rows.

        Raises:
            CheckpointError: If there is no row of that step.
        """
        ends = (end for row_step, end in self._rows() if row_step == step)
        end = 0 if step is None else next(ends, None)
        if end is None:
            raise errors.CheckpointError(
                f"RunLog: {self.path} has no row for step {step}, but had one when the "
                "checkpoint was saved.\nResume with the file of that run; or skip the "
                "log of the checkpoint with log=None."
            )
        self._end = end

    def append(self, step: int, numbers: Numbers) -> None:
        """Writes a row; if that fails, the file keeps those that it has."""
        if self._end is not None:
            os.ftruncate(self._descriptor, self._end)
            self._end = None
        _write(self._descriptor, self._line(step, numbers))

    def sync(self) -> None:
        """Returns when the rows would survive a loss of power.

        Raises:
            FileNotFoundError: If the file was deleted or replaced.
        """
        os.fsync(self._descriptor)
        if not file_locks.is_at(self._descriptor, self.path):
            raise FileNotFoundError(
                f"RunLog: {self.path} was deleted or replaced while it was open, so "
                "its rows are lost.\nMake a new RunLog."
            )
        _sync_folder(os.path.dirname(self.path))

    def close(self) -> None:
        """Closes the file, and lets others write."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _rows(self) -> Iterator[tuple[int, int]]:
        """Lists the steps of the rows, and where in the file each row ends."""
        end = 0
        with open(self.path, "rb") as file:
            for line in file:
                end += len(line)
                # A loss of power can damage only what comes after the last sync.
                with contextlib.suppress(ValueError, TypeError, LookupError):
                    if line.endswith(b"\n"):
                        yield self._step_of(line), end

    def _is_start(self, line: bytes) -> bool:
        """Whether a file of this kind can begin with this line, which may be empty."""
        raise NotImplementedError

    def _step_of(self, line: bytes) -> int:
        """Returns the step of a row; raises if the line is none."""
        raise NotImplementedError

    def _line(self, step: int, numbers: Numbers) -> bytes:
        raise NotImplementedError


class JsonLines(RowFile):
    """Each row is an object, ``{"step": 1, "loss": 0.5}``; NaN as Python spells it."""

    def _is_start(self, line: bytes) -> bool:
        start = b'{"step": '
        return start.startswith(line[: len(start)])

    def _step_of(self, line: bytes) -> int:
        return json.loads(line)["step"]

    def _line(self, step: int, numbers: Numbers) -> bytes:
        return json.dumps({"step": step, **numbers}).encode() + b"\n"


class Table(RowFile):
    """Each row is a line of numbers; the first line names them.

    A name that comes later is a new column, whose cells in earlier rows are empty.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        with open(self.path, encoding="utf-8", newline="") as file:
            self._columns = next(csv.reader(file), [])

    def append(self, step: int, numbers: Numbers) -> None:
        """Writes a row; if that fails, the file keeps those that it has."""
        columns = [] if self._end == 0 else self._columns
        new = [name for name in ("step", *numbers) if name not in columns]
        if new:
            self._replace([*columns, *new])
        super().append(step, numbers)

    def _replace(self, columns: list[str]) -> None:
        """Puts a table with other columns in the place of this one, at once."""
        with open(self.path, "rb") as file:
            rows = file.read(self._end).splitlines()[1:]
        partial = self.path + PARTIAL
        with contextlib.suppress(FileNotFoundError):
            os.remove(partial)  # of a killed program
        descriptor = _locked(partial)
        empty = b"," * (len(columns) - len(self._columns)) + b"\n"
        try:
            head = _csv_line(columns)
            _write(descriptor, head + b"".join(row + empty for row in rows))
            os.fsync(descriptor)
            os.replace(partial, self.path)
        except BaseException:
            os.close(descriptor)
            raise
        self.close()
        self._descriptor, self._columns, self._end = descriptor, columns, None

    def _is_start(self, line: bytes) -> bool:
        return line.startswith((b"step,", b"step\n")) or b"step".startswith(line)

    def _step_of(self, line: bytes) -> int:
        return int(line.partition(b",")[0])

    def _line(self, step: int, numbers: Numbers) -> bytes:
        cells = {"step": step, **numbers}
        return _csv_line(cells.get(name, "") for name in self._columns)


def _csv_line(cells: Iterable[Any]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


def _write(descriptor: int, data: bytes) -> None:
    """Writes at the end of a file: all, or nothing."""
    size = os.fstat(descriptor).st_size
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except BaseException:  # The disk may be full.
        os.ftruncate(descriptor, size)
        raise


def _locked(path: str) -> int:
    """Opens a file that no other writer has open."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    # Another one may have put a new file in its place since.
    if file_locks.try_lock(descriptor) and file_locks.is_at(descriptor, path):
        return descriptor
    os.close(descriptor)
    raise BlockingIOError(
        f"RunLog: another RunLog is writing {path}, in this program or another one."
        "\nClose that one, or choose another path."
    )


def _sync_folder(folder: str) -> None:
    """Makes the name of a new file survive a loss of power, where that is possible."""
    with contextlib.suppress(OSError):  # Windows opens no folders.
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
