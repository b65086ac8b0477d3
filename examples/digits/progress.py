"""The live display of the training loop: a bar that moves, and a line per epoch.

Where output is not a terminal (a pipe, a log file), only the lines are printed.
"""

from typing import Self

from rich import console as rich_console
from rich import progress as rich_progress

from examples.digits import train


class Display:
    """Shows how training goes while it is entered as a context.

    Args:
        console: Where to show it.
        epochs: Number of epochs that will be run.
        steps: Number of steps in each of them.
    """

    def __init__(self, console: rich_console.Console, epochs: int, steps: int):
        self._epochs = epochs
        self._bar = rich_progress.Progress(
            rich_progress.TextColumn("{task.description}"),
            rich_progress.BarColumn(),
            rich_progress.TextColumn("{task.fields[scores]}"),
            rich_progress.TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(
            f"epoch 1/{epochs}", total=epochs * steps, scores="compiling"
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def show_step(self, scores: train.Scores) -> None:
        """Moves the bar by one step; ``scores`` are those of the epoch so far."""
        text = f"loss {scores.loss:.4f}, accuracy {scores.accuracy:6.1%}"
        self._bar.update(self._task, advance=1, scores=text)

    def show_epoch(self, epoch: train.Epoch) -> None:
        """Prints the line of a finished epoch."""
        width = len(str(self._epochs))
        self._bar.console.print(
            f"epoch {epoch.number:{width}}/{self._epochs}"
            f"   training: loss {epoch.train.loss:.4f}, {epoch.train.accuracy:6.1%}"
            f"   test: loss {epoch.test.loss:.4f}, {epoch.test.accuracy:6.1%}",
            highlight=False,
        )
        following = min(epoch.number + 1, self._epochs)
        self._bar.update(self._task, description=f"epoch {following}/{self._epochs}")
