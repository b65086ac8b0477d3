"""The handwritten digits of scikit-learn: 1,797 real images, bundled, no download.

Images are float32 ``[count, 8, 8, 1]`` in 0 to 1, labels int32 ``[count]`` in 0 to 9.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from sklearn import datasets, model_selection

CLASSES = 10
TEST_SHARE = 0.2


class Batch(NamedTuple):
    """Some images with their labels."""

    images: np.ndarray
    labels: np.ndarray


class Split(NamedTuple):
    """What to learn from, and what to be tested on."""

    train: Batch
    test: Batch


def load(seed: int) -> Split:
    """Returns the digits as 1,437 to train on and 360 to test on.

    Args:
        seed: Decides which digit goes where; every class is shared out evenly.
    """
    digits = datasets.load_digits()
    images = (digits.images / 16.0).astype(np.float32)[..., np.newaxis]
    labels = digits.target.astype(np.int32)
    train_images, test_images, train_labels, test_labels = (
        model_selection.train_test_split(
            images, labels, test_size=TEST_SHARE, stratify=labels, random_state=seed
        )
    )
    return Split(Batch(train_images, train_labels), Batch(test_images, test_labels))


def batches(
    examples: Batch, batch_size: int, generator: np.random.Generator
) -> Iterator[Batch]:
    """Yields the examples once, shuffled, in batches of exactly ``batch_size``.

    The few left over at the end are skipped, so that the training step is compiled for
    one shape only; another shuffle skips others.
    """
    order = generator.permutation(len(examples.labels))
    for start in range(0, len(order) - batch_size + 1, batch_size):
        chosen = order[start : start + batch_size]
        yield Batch(examples.images[chosen], examples.labels[chosen])


def batch_count(examples: Batch, batch_size: int) -> int:
    """Returns how many batches one pass over ``examples`` gives."""
    return len(examples.labels) // batch_size
