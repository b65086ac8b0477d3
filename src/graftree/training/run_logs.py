"""The log of a training run, which goes on exactly where the run is resumed: `RunLog`.

    write(step, metrics)        metrics of a step: arrays that the device still computes
         │  pending rows, in order: read once they are ready
         ▼
    a file of rows, whole lines; then TensorBoard, the progress line

The log is one of the objects of a checkpoint, as a data iterator is. A save first waits
until all rows are on disk, then stores the last step (`get_state`). A restore says
after which step the log goes on (`set_state`); the rows after it are dropped when the
next one is written, not before, so that a restore that fails changes nothing.

Of several processes, the first one writes; each knows the last step.
"""

from __future__ import annotations

import atexit
import collections
import operator
import os
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Self, cast

import jax
import jax.numpy as jnp
import numpy as np

from graftree.core import paths
from graftree.core.variables.variables import Variable
from graftree.training import early_stopping, log_displays, log_files

# Of rows that wait for the device. More are so far behind that one waits for the first.
MOST_PENDING = 100


class RunLog:
    """Writes the metrics of a run, a row for each step, to a file and TensorBoard.

    Save it with the model: `nnx.checkpoints.Checkpoints` stores up to which step the
    log was written, and a resumed run goes on after exactly that row. Write the row of
    a step before you save the step.

    It does not wait for the device: a row is written by a later call, when its values
    are ready. Then it survives a kill of the program; what `flush`, `close` or a
    checkpoint has seen also survives a loss of power (``fsync``). In a program of
    several processes, all make the same calls, and the first one writes the values that
    it has.

    Args:
        path: The file: JSON lines if it ends in ``.jsonl``, a table if in ``.csv``.
        resume: Whether the file may have rows. They are dropped, and the run starts
            over, unless a checkpoint is restored into the log before the next row.
        tensorboard: A folder for the event files of TensorBoard, of this run alone;
            ``None`` for none. Needs the package ``tensorboardX``.
        total: The last step of the run. Shows a line of progress, by the package
            ``rich``, if the program has a terminal. ``None`` shows nothing.

    Raises:
        FileExistsError: If there are rows or events, and not ``resume``.
        BlockingIOError: If another `RunLog` has the file open.
        ValueError: If the path has another ending, or the file other content.
        ImportError: If a package is missing.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "run.csv")
        >>> with nnx.training.RunLog(path) as log:
        ...     log.write(1, {"loss": jnp.array(0.5)})
        ...     log.write(2, {"loss": jnp.array(0.25), "accuracy": 0.75})
        >>> print(path.read_text())
        step,loss,accuracy
        1,0.5,
        2,0.25,0.75
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        resume: bool = False,
        tensorboard: str | os.PathLike[str] | None = None,
        total: int | None = None,
    ) -> None:
        kind = _kind_of(os.fspath(path))
        self._last_step: int | None = None
        self._pending = collections.deque[tuple[int, dict[str, Any]]]()
        self._file: log_files.RowFile | None = None
        self._displays: list[Any] = []
        self._is_closed = False
        if jax.process_index() != 0:
            return
        if tensorboard is not None:
            self._displays.append(log_displays.EventFiles(os.fspath(tensorboard)))
        if total is not None and log_displays.ProgressLine.can_show():
            self._displays.append(log_displays.ProgressLine(total))
        self._file = kind(os.fspath(path))
        try:
            for output in self._outputs():
                output.resume_after(None) if resume else output.start_new()
        except BaseException:
            self._close_outputs()
            raise
        _open_logs.add(self)
        atexit.register(self.close)

    def write(self, step: int, metrics: Any) -> None:
        """Adds the row of a step.

        Args:
            step: The number of the step; greater than those before.
            metrics: Numbers and arrays ``[]`` by name: what `nnx.MultiMetric.compute`
                returns, or another dict. Names of nested ones are joined,
                ``"validation/loss"``. A metric that is ``None`` has no arrays, and is
                left out. Arrays are read later; do not donate them.

        Raises:
            ValueError: If there is a row of this step or a later one; or a name can't
                be used.
            TypeError: If a value is not a real number; or is traced.
            OSError: If the disk refuses; the row is kept for the next call.
            RuntimeError: If an array was donated before it was read. Its row is lost.

        Example:
            >>> import pathlib, tempfile
            >>> path = pathlib.Path(tempfile.mkdtemp(), "run.jsonl")
            >>> with nnx.training.RunLog(path) as log:
            ...     log.write(10, {"loss": 0.5, "validation": {"loss": jnp.inf}})
            >>> print(path.read_text())
            {"step": 10, "loss": 0.5, "validation/loss": Infinity}
        """
        self._check_open("write")
        step = operator.index(step)
        values = _values_by_name(metrics)
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(
                f"RunLog.write: step {step} does not come after step {self._last_step},"
                " which has been written.\nPass all metrics of a step in one call. To "
                "go back to an earlier step, restore its checkpoint with the log."
            )
        self._last_step = step
        if self._file is not None:
            self._pending.append((step, values))
            self._write_pending(wait=False)

    def flush(self) -> None:
        """Waits for the values of all rows, and returns when these are on disk.

        Raises:
            OSError: If the disk refuses, or the file was deleted.

        Example:
            >>> import tempfile
            >>> nnx.training.RunLog(tempfile.mkdtemp() + "/run.csv").flush()
        """
        self._check_open("flush")
        self._write_pending(wait=True)
        for output in self._outputs():
            output.sync()

    def close(self) -> None:
        """Flushes, and closes the files; the end of the program does that too.

        Example:
            >>> import tempfile
            >>> nnx.training.RunLog(tempfile.mkdtemp() + "/run.csv").close()
        """
        if self._is_closed:
            return
        try:
            self.flush()
        finally:
            self._close_outputs()

    def get_state(self) -> dict[str, int | None]:
        """Flushes, and returns what a checkpoint stores: the last step."""
        self.flush()
        return {"step": self._last_step}

    def set_state(self, state: Mapping[str, int | None]) -> None:
        """Has the log go on after the step of a state: later rows will be dropped.

        Args:
            state: What `get_state` has returned.

        Raises:
            CheckpointError: If the file has no row of that step.
        """
        self._check_open("set_state")
        step = state["step"]
        self._write_pending(wait=True)
        for output in self._outputs():
            output.resume_after(step)
        self._last_step = step

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"Closing the log failed: {failure}")

    def _outputs(self) -> list[Any]:
        return [] if self._file is None else [self._file, *self._displays]

    def _write_pending(self, wait: bool) -> None:
        """Writes the first rows: those that are ready, or all."""
        while self._pending:
            step, values = self._pending[0]
            is_due = wait or len(self._pending) > MOST_PENDING
            if not (is_due or all(map(_is_ready, values.values()))):
                return
            try:
                numbers = {name: _read(x, name, step) for name, x in values.items()}
            except BaseException:
                self._pending.popleft()
                raise
            file: Any = self._file
            file.append(step, numbers)
            self._pending.popleft()
            for display in self._displays:
                display.append(step, numbers)

    def _check_open(self, method: str) -> None:
        if self._is_closed:
            raise ValueError(f"RunLog.{method}: this RunLog has been closed.")

    def _close_outputs(self) -> None:
        self._is_closed = True
        atexit.unregister(self.close)
        for output in reversed(self._outputs()):
            output.close()

    def _leave_to_parent(self) -> None:
        """Gives up the file in a fork: its copy would keep the lock of the parent."""
        self._displays = []
        self._pending.clear()
        self._close_outputs()


_open_logs = weakref.WeakSet[RunLog]()


def _leave_all_to_parent() -> None:
    for log in [*_open_logs]:
        log._leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all_to_parent)


_KINDS = {".jsonl": log_files.JsonLines, ".csv": log_files.Table}


def _kind_of(path: str) -> type[log_files.RowFile]:
    ending = os.path.splitext(path)[1]
    if ending not in _KINDS or "://" in path:
        raise ValueError(
            f"RunLog expects the path of a local file, *.jsonl or *.csv, got {path!r}."
        )
    return _KINDS[ending]


# ---------------------------------------------------------------- values


def _values_by_name(metrics: Any) -> dict[str, Any]:
    """Lists numbers, and arrays whose copies to the host have begun."""
    values: dict[str, Any] = {}
    for name, value in _named(metrics, ""):
        if name in ("", "step") or name in values or {*name} & {"\n", "\r"}:
            raise ValueError(
                f"RunLog.write: {name!r} can't be the name of a metric: names must be "
                "unique, one line long, and not 'step'.\nPass a dict of numbers "
                "by name."
            )
        early_stopping.check_number(value, f"RunLog.write: the metric {name!r}")
        if isinstance(value, jax.Array):
            value.copy_to_host_async()
            values[name] = value
        else:
            values[name] = _number(value)
    return values


def _named(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Lists the leaves of a tree by name; those of dicts in their order."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _named(value, f"{name}/{key}" if name else str(key))
    else:
        for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=_is_variable):
            keys = map(str, paths.from_jax(path))
            value = leaf.get_value() if _is_variable(leaf) else leaf
            yield "/".join(filter(None, [name, *keys])), value


def _is_variable(x: Any) -> bool:
    return isinstance(x, Variable)


def _is_ready(value: Any) -> bool:
    return not isinstance(value, jax.Array) or cast(Any, value).is_ready()


def _read(value: Any, name: str, step: int) -> int | float:
    if isinstance(value, jax.Array) and value.is_deleted():
        raise RuntimeError(
            f"RunLog: the metric {name!r} of step {step} was donated before it was "
            "read.\nPass a copy of it: jnp.copy(x)."
        )
    return _number(value)


def _number(value: Any) -> int | float:
    array = np.asarray(value)
    is_real = jnp.issubdtype(array.dtype, jnp.floating)
    return float(array) if is_real else int(array)
