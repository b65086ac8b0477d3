"""The whole experiment, in order: train, save, report, restore and compare."""

import pathlib
import time
from collections.abc import Callable, Sequence

import numpy as np
from rich import console as rich_console

import graftree as nnx
from examples.digits import digits as program, report


def run(
    *,
    epochs: int,
    batch_size: int,
    seed: int,
    output: pathlib.Path,
    should_stop: Callable[[], bool],
) -> bool:
    """Trains a model and reports how it went.

    Args:
        epochs: How often to go over the training digits.
        batch_size: Digits per training step.
        seed: Decides the split, the first weights, the order of the digits and what
            dropout drops.
        output: An existing folder for the checkpoint and the pictures.
        should_stop: Asked after each training step; ``True`` ends the training, and
            the model is saved as it is.

    Returns:
        Whether the experiment was finished, not stopped.
    """
    console = rich_console.Console()
    digits = program.load(seed)
    model = program.DigitClassifier(rngs=nnx.Rngs(seed))
    steps = len(digits.train.labels) // batch_size
    training = program.train(
        model, digits, epochs=epochs, batch_size=batch_size, seed=seed
    )
    history: list[program.Epoch] = []
    start = time.perf_counter()
    with report.Display(console, epochs, steps) as display:
        for scores in training:
            if isinstance(scores, program.Epoch):
                history.append(scores)
                display.show_epoch(scores)
            else:
                display.show_step(scores)
            if should_stop():
                break
    model.eval()
    seconds = time.perf_counter() - start
    folder = output / "checkpoint"
    nnx.checkpoints.save(folder, model, overwrite=True)
    if should_stop():
        print(f"interrupted: the model so far was saved to {folder}")
        return False
    print(f"trained in {seconds:.1f} s; the model was saved to {folder}")
    logits = np.asarray(program.predict(model, digits.test.images))
    write_report(console, model, digits.test, logits, history, output)
    check_restored(folder, digits.test.images, logits, seed=seed + 1)
    print(f"test accuracy: {100 * history[-1].test.accuracy:.1f} %")
    return True


def write_report(
    console: rich_console.Console,
    model: nnx.Module,
    test: program.Batch,
    logits: np.ndarray,
    history: Sequence[program.Epoch],
    output: pathlib.Path,
) -> None:
    """Prints the tables, and writes the pictures into the folder ``output``."""
    predicted = logits.argmax(axis=-1)
    console.print(report.parameter_table(model))
    console.print(report.confusion_table(test.labels, predicted))
    report.draw_curves(history, output / "curves.png")
    report.draw_misclassified(test, predicted, output / "misclassified.png")
    print(f"the pictures are {output / 'curves.png'}, {output / 'misclassified.png'}")


def check_restored(
    folder: pathlib.Path, images: np.ndarray, logits: np.ndarray, *, seed: int
) -> None:
    """Fills a fresh model from ``folder`` and shows that it predicts the same.

    Args:
        folder: The checkpoint.
        images: What to predict.
        logits: What the saved model made of ``images``.
        seed: Gives the fresh model its own first weights.

    Raises:
        RuntimeError: If a single bit of the predictions differs.
    """
    fresh = program.DigitClassifier(rngs=nnx.Rngs(seed))
    restored = nnx.checkpoints.restore(folder, fresh)
    restored.eval()
    if np.asarray(program.predict(restored, images)).tobytes() != logits.tobytes():
        raise RuntimeError(f"The model restored from {folder} predicts differently.")
    print(
        "restored into a fresh model: "
        f"all {len(images)} test predictions are identical, bit for bit"
    )
