"""What shows a run while it goes on: TensorBoard's files, and a line in the terminal.

Both get the rows of a `RunLog` after its file has them. Their packages are imported
when they are asked for.
"""

from __future__ import annotations

import glob
import os
import socket
import sys
import time
from typing import Any

from graftree import errors
from graftree.training.log_files import Numbers


class EventFiles:
    """Event files for TensorBoard, with a scalar for each number.

    A restarted run begins a new file. This says first from which step on TensorBoard
    should forget what earlier files have (``purge_step``).

    Args:
        folder: Where the files are.

    Raises:
        ImportError: If ``tensorboardX`` is not installed.
    """

    def __init__(self, folder: str) -> None:
        try:  # An optional package, which a type checker may lack too.
            from tensorboardX import (  # pyright: ignore[reportMissingImports]
                record_writer,
            )
            from tensorboardX.proto import (  # pyright: ignore[reportMissingImports]
                event_pb2,
                summary_pb2,
            )
        except ImportError as error:
            raise ImportError(
                "RunLog(tensorboard=...) writes with tensorboardX, which is not "
                "installed: pip install tensorboardX"
            ) from error
        self._make_writer: Any = record_writer.RecordWriter
        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        self._folder = os.path.abspath(folder)
        self._path = ""
        self._writer: Any = None  # made by the first row
        self._purge_step: int | None = None

    def start_new(self) -> None:
        """Raises if there are files of another run, or of this one before a restart."""
        files = glob.glob("*tfevents*", root_dir=self._folder)
        if files:
            raise FileExistsError(
                errors.message(
                    f"RunLog: {self._folder} has events of another run.",
                    where=min(files),
                    way_out="To continue that run, pass resume=True. For another "
                    "run, choose another folder.",
                )
            )

    def resume_after(self, step: int | None) -> None:
        """Begins a new file with the next row, which hides what comes after a step."""
        self.close()
        self._purge_step = 0 if step is None else step + 1

    def append(self, step: int, numbers: Numbers) -> None:
        """Writes a row."""
        writer = self._writer or self._open()
        value = self._summaries.Summary.Value
        values = [value(tag=name, simple_value=x) for name, x in numbers.items()]
        self._write(writer, step=step, summary=self._summaries.Summary(value=values))
        writer.flush()

    def sync(self) -> None:
        """Returns when the rows would survive a loss of power."""
        if self._writer is not None:
            with open(self._path, "rb") as file:
                os.fsync(file.fileno())

    def close(self) -> None:
        """Closes the file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _open(self) -> Any:
        os.makedirs(self._folder, exist_ok=True)
        # TensorBoard reads them in the order of their names.
        name = f"events.out.tfevents.{time.time_ns():020}.{socket.gethostname()}"
        self._path = os.path.join(self._folder, name)
        self._writer = writer = self._make_writer(self._path)
        self._write(writer, file_version="brain.Event:2")
        if self._purge_step is not None:
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._write(writer, step=self._purge_step, session_log=start)
        return writer

    def _write(self, writer: Any, **fields: Any) -> None:
        event = self._events.Event(wall_time=time.time(), **fields)
        writer.write(event.SerializeToString())


class ProgressLine:
    """A line at the bottom of the terminal: steps, time, and the newest numbers.

    Args:
        total: The last step of the run.

    Raises:
        ImportError: If ``rich`` is not installed.
    """

    def __init__(self, total: int) -> None:
        try:
            import rich.progress
        except ImportError as error:
            raise ImportError(
                "RunLog(total=...) shows progress with rich, which is not installed: "
                "pip install rich"
            ) from error
        self._line = rich.progress.Progress(
            rich.progress.MofNCompleteColumn(),
            rich.progress.BarColumn(),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TimeRemainingColumn(elapsed_when_finished=True),
            rich.progress.TextColumn("{task.description}", markup=False),
        )
        self._task = self._line.add_task("", total=total)

    @staticmethod
    def can_show() -> bool:
        """Whether there is a terminal."""
        return sys.stdout is not None and sys.stdout.isatty()

    def start_new(self) -> None:
        """Shows the line, at its beginning."""
        self._line.start()

    def resume_after(self, step: int | None) -> None:
        """Shows the line, at a step."""
        self._line.reset(self._task, completed=step or 0)
        self._line.start()

    def append(self, step: int, numbers: Numbers) -> None:
        """Shows a row."""
        text = "  ".join(f"{name} {number:.4g}" for name, number in numbers.items())
        self._line.update(self._task, completed=step, description=text)

    def sync(self) -> None:
        """Does nothing: it keeps nothing."""

    def close(self) -> None:
        """Leaves the line as it is."""
        self._line.stop()
