"""The live display and the tables for the terminal, the pictures for the folder."""

import pathlib
from collections.abc import Sequence

import numpy as np
from matplotlib import axes, figure, ticker
from rich import console as rich_console, table
from sklearn import metrics

import graftree as nnx
from examples import bars, pictures
from examples.digits import digits

TRAIN_COLOR, TEST_COLOR, *_ = pictures.COLORS
GRID_COLUMNS = 8
GRID_CELLS = 40


class Display(bars.Bar):
    """A bar that moves, and a line per epoch, while it is entered as a context.

    Args:
        console: Where to show it.
        epochs: Number of epochs that will be run.
        steps: Number of steps in each of them.
    """

    def __init__(self, console: rich_console.Console, epochs: int, steps: int):
        self._epochs = epochs
        text = f"epoch {{task.fields[epoch]}}/{epochs}"
        super().__init__(console, text, epochs * steps, epoch="1", scores="compiling")

    def show_step(self, scores: digits.Scores) -> None:
        """Moves the bar by one step; ``scores`` are those of the epoch so far."""
        self.step(f"loss {scores.loss:.4f}, accuracy {scores.accuracy:6.1%}")

    def show_epoch(self, epoch: digits.Epoch) -> None:
        """Prints the line of a finished epoch."""
        width = len(str(self._epochs))
        self.line(
            f"epoch {epoch.number:{width}}/{self._epochs}"
            f"   training: loss {epoch.train.loss:.4f}, {epoch.train.accuracy:6.1%}"
            f"   test: loss {epoch.test.loss:.4f}, {epoch.test.accuracy:6.1%}",
            epoch=f"{min(epoch.number + 1, self._epochs)}",
        )


def parameter_table(model: nnx.Module) -> table.Table:
    """Returns a table of the parameters and running statistics of ``model``."""
    result = table.Table(title="parameters and running statistics")
    for name in ("path", "type", "shape", "dtype"):
        result.add_column(name)
    for name in ("count", "bytes"):
        result.add_column(name, justify="right")
    for kind in (nnx.Param, nnx.BatchStat):
        variables = nnx.to_flat_state(nnx.state(model, kind))
        for path, variable in variables:
            result.add_row(
                ".".join(map(str, path)),
                kind.__name__,
                "x".join(map(str, variable.shape)),
                str(variable.dtype),
                f"{variable.size:,}",
                f"{variable.nbytes:,}",
            )
        count = sum(variable.size for _, variable in variables)
        size = sum(variable.nbytes for _, variable in variables)
        total = ("total", kind.__name__, "", "", f"{count:,}", f"{size:,}")
        result.add_row(*total, style="bold", end_section=True)
    return result


def confusion_table(labels: np.ndarray, predicted: np.ndarray) -> table.Table:
    """Returns a table that counts, for each true digit, what it was taken for."""
    counts = metrics.confusion_matrix(labels, predicted, labels=range(digits.CLASSES))
    result = table.Table(title="confusion matrix: true digit down, predicted across")
    result.add_column("", style="bold")
    for digit in range(digits.CLASSES):
        result.add_column(str(digit), justify="right", min_width=3)
    for digit, row in enumerate(counts):
        cells = [_confusion_cell(n, right=k == digit) for k, n in enumerate(row)]
        result.add_row(str(digit), *cells)
    return result


def _confusion_cell(count: int, right: bool) -> str:
    if right:
        return f"[green]{count}[/]"
    return f"[bold red]{count}[/]" if count else "[dim].[/]"


def draw_curves(history: Sequence[digits.Epoch], path: pathlib.Path) -> None:
    """Writes a picture of loss and accuracy over the epochs to ``path``."""
    picture = figure.Figure(figsize=(10, 4), layout="constrained")
    loss, accuracy = picture.subplots(1, 2)
    _draw_curve(loss, history, "loss")
    loss.set_title("loss (mean cross entropy)")
    loss.set_ylim(bottom=0)
    loss.legend()
    _draw_curve(accuracy, history, "accuracy")
    accuracy.set_title("accuracy (share recognized)")
    accuracy.yaxis.set_major_formatter(ticker.PercentFormatter(xmax=1))
    accuracy.legend()
    pictures.write(picture, path)


def _draw_curve(plot: axes.Axes, history: Sequence[digits.Epoch], score: str) -> None:
    numbers = [epoch.number for epoch in history]
    of_train = [getattr(epoch.train, score) for epoch in history]
    of_test = [getattr(epoch.test, score) for epoch in history]
    plot.plot(numbers, of_train, ".-", color=TRAIN_COLOR, label="training")
    plot.plot(numbers, of_test, ".-", color=TEST_COLOR, label="test")
    plot.set_xlabel("epoch")
    plot.set_xlim(0.5, len(history) + 0.5)
    whole_numbers = ticker.MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1)
    plot.xaxis.set_major_locator(whole_numbers)
    pictures.tidy(plot)


def draw_misclassified(
    examples: digits.Batch, predicted: np.ndarray, path: pathlib.Path
) -> None:
    """Writes a picture of the digits that were taken for others to ``path``."""
    wrong = np.flatnonzero(predicted != examples.labels)
    shown = wrong[:GRID_CELLS]
    columns = min(max(1, len(shown)), GRID_COLUMNS)
    rows = max(1, -(-len(shown) // columns))
    size = (max(5.0, 1.3 * columns), 0.6 + 1.7 * rows)
    picture = figure.Figure(figsize=size, layout="constrained")
    title = f"{len(wrong)} of {len(predicted)} test digits misclassified"
    if len(shown) < len(wrong):
        title += f", the first {len(shown)} of them"
    picture.suptitle(title)
    grid = picture.subplots(rows, columns, squeeze=False)
    for cell in grid.flat[len(shown) :]:
        cell.set_axis_off()
    for cell, index in zip(grid.flat, shown, strict=False):
        cell.set(xticks=[], yticks=[])
        cell.spines[:].set_color("lightgray")
        cell.imshow(examples.images[index, ..., 0], cmap="gray_r", vmin=0, vmax=1)
        cell.set_title(
            f"true {examples.labels[index]}\npredicted {predicted[index]}", fontsize=9
        )
    pictures.write(picture, path)
