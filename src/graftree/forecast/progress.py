"""Says what is being compiled, and for how long: a line on the standard error."""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

INTERVAL = 30.0  # seconds between two lines of a log

_candidate = contextvars.ContextVar("candidate", default="")


@contextlib.contextmanager
def candidate(text: str) -> Iterator[None]:
    """Says which of several forecasts is made, as in ``2 of 3``."""
    token = _candidate.set(f"{text}: ")
    try:
        yield
    finally:
        _candidate.reset(token)


def shown(text: str) -> contextlib.AbstractContextManager[Any]:
    """Shows a text, and for how long: on a terminal by rich, else a line at times."""
    text = f"nnx.forecast: {_candidate.get()}{text}"
    if sys.stderr is not None and sys.stderr.isatty():
        with contextlib.suppress(ImportError):
            return _line(text)
    return _lines(text)


def _line(text: str) -> contextlib.AbstractContextManager[Any]:
    import rich.console
    import rich.progress

    line = rich.progress.Progress(
        rich.progress.SpinnerColumn(),
        rich.progress.TextColumn("{task.description}", markup=False),
        rich.progress.TimeElapsedColumn(),
        console=rich.console.Console(stderr=True),
        transient=True,
    )
    line.add_task(text, total=None)
    return line


@contextlib.contextmanager
def _lines(text: str) -> Iterator[None]:
    start, is_over = time.monotonic(), threading.Event()

    def write() -> None:
        while not is_over.wait(INTERVAL):
            seconds = time.monotonic() - start
            print(f"{text}, {seconds:.0f} s so far", file=sys.stderr, flush=True)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
