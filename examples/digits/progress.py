"""The live display of the training loop: a bar that moves, and a line per epoch."""

from rich import console as rich_console

from examples import bars
from examples.digits import train


class Display(bars.Bar):
    """Shows how training goes while it is entered as a context.

    Args:
        console: Where to show it.
        epochs: Number of epochs that will be run.
        steps: Number of steps in each of them.
    """

    def __init__(self, console: rich_console.Console, epochs: int, steps: int):
        self._epochs = epochs
        text = f"epoch {{task.fields[epoch]}}/{epochs}"
        super().__init__(console, text, epochs * steps, epoch="1", scores="compiling")

    def show_step(self, scores: train.Scores) -> None:
        """Moves the bar by one step; ``scores`` are those of the epoch so far."""
        self.step(f"loss {scores.loss:.4f}, accuracy {scores.accuracy:6.1%}")

    def show_epoch(self, epoch: train.Epoch) -> None:
        """Prints the line of a finished epoch."""
        width = len(str(self._epochs))
        self.line(
            f"epoch {epoch.number:{width}}/{self._epochs}"
            f"   training: loss {epoch.train.loss:.4f}, {epoch.train.accuracy:6.1%}"
            f"   test: loss {epoch.test.loss:.4f}, {epoch.test.accuracy:6.1%}",
            epoch=f"{min(epoch.number + 1, self._epochs)}",
        )
