"""A live display of training: a bar that moves, with lines above it.

Where output is not a terminal (a pipe, a log file), only the lines are printed.
"""

from typing import Self

from rich import console as rich_console, progress as rich_progress


class Bar:
    """A bar that is shown while it is entered as a context.

    Args:
        console: Where to show it.
        text: What stands before the bar; it may have fields of rich in braces.
        total: Number of steps.
        done: How many of them have been done.
        **fields: What stands behind the bar as ``scores``, and fields of ``text``.
    """

    def __init__(
        self,
        console: rich_console.Console,
        text: str,
        total: int,
        done: int = 0,
        **fields: str,
    ):
        self._bar = rich_progress.Progress(
            rich_progress.TextColumn(text),
            rich_progress.BarColumn(),
            rich_progress.TextColumn("{task.fields[scores]}"),
            rich_progress.TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total, completed=done, **fields)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def step(self, scores: str) -> None:
        """Moves the bar by one step."""
        self._bar.update(self._task, advance=1, scores=scores)

    def line(self, text: str, **fields: str) -> None:
        """Prints a line above the bar, which gets other fields."""
        self._bar.console.print(text, highlight=False, soft_wrap=True)
        self._bar.update(self._task, **fields)
