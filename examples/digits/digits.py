"""A convolutional network learns to read handwritten digits: all of it, in one file.

The digits are those of scikit-learn: 1,797 real images, bundled, no download.
Images are float32 ``[count, 8, 8, 1]`` from 0 to 1, labels int32 ``[count]``.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
import optax
from sklearn import datasets, model_selection

import graftree as nnx

CLASSES = 10
TEST_SHARE = 0.2
PEAK_LEARNING_RATE = 3e-3

# -------------------------------------------------------------------------------- data


class Batch(NamedTuple):
    """Some images with their labels."""

    images: np.ndarray
    labels: np.ndarray


class Split(NamedTuple):
    """What to train on, and what to test on."""

    train: Batch
    test: Batch


def load(seed: int) -> Split:
    """Returns 1,437 digits to train on and 360 to test on.

    Args:
        seed: Decides which digit goes where; every class is split in the same ratio.
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

    The few that don't fill a batch are skipped, so that the training step is compiled
    for one shape only; another shuffle skips others.
    """
    order = generator.permutation(len(examples.labels))
    for start in range(0, len(order) - batch_size + 1, batch_size):
        chosen = order[start : start + batch_size]
        yield Batch(examples.images[chosen], examples.labels[chosen])


# ----------------------------------------------------------------------------- network


class ConvBlock(nnx.Module):
    """A convolution with ``out_features`` filters that halves height and width."""

    def __init__(self, in_features: int, out_features: int, *, rngs: nnx.Rngs):
        self.conv = nnx.Conv(in_features, out_features, kernel_size=(3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(out_features, momentum=0.9, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[batch, 2h, 2w, in_features]`` to ``[batch, h, w, out_features]``."""
        x = nnx.relu(self.norm(self.conv(x)))
        return nnx.max_pool(x, window_shape=(2, 2), strides=(2, 2))


class DigitClassifier(nnx.Module):
    """Scores an 8x8 image against the ten digits."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.block1 = ConvBlock(1, 32, rngs=rngs)
        self.block2 = ConvBlock(32, 64, rngs=rngs)
        self.hidden = nnx.Linear(2 * 2 * 64, 128, rngs=rngs)
        self.dropout = nnx.Dropout(0.4, rngs=rngs)
        self.output = nnx.Linear(128, CLASSES, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Maps images ``[batch, 8, 8, 1]`` to logits ``[batch, 10]``."""
        x = self.block2(self.block1(images))
        x = x.reshape(x.shape[0], -1)
        x = self.dropout(nnx.relu(self.hidden(x)))
        return self.output(x)


# ---------------------------------------------------------------------------- training


class Scores(NamedTuple):
    """How well a set of digits is recognized."""

    loss: float
    accuracy: float


class Epoch(NamedTuple):
    """The scores after one pass over the training digits."""

    number: int
    train: Scores
    test: Scores


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean loss of logits ``[batch, 10]`` against labels ``[batch]``."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@nnx.jit
def train_step(
    model: nnx.Module,
    optimizer: nnx.Optimizer,
    metrics: nnx.MultiMetric,
    batch: Batch,
) -> None:
    """Learns from one batch: updates all of its first three arguments in place."""

    def loss_fn(model: nnx.Module) -> tuple[jax.Array, jax.Array]:
        logits = model(batch.images)
        return cross_entropy(logits, batch.labels), logits

    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, grads)
    metrics.update(loss=loss, logits=logits, labels=batch.labels)


@nnx.jit
def predict(model: nnx.Module, images: jax.Array) -> jax.Array:
    """Returns the logits ``[batch, 10]`` of ``images``."""
    return model(images)


def make_metrics() -> nnx.MultiMetric:
    """Returns running means of the loss and of the accuracy."""
    return nnx.MultiMetric(
        loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy()
    )


def read_scores(metrics: nnx.MultiMetric) -> Scores:
    """Returns the values of ``metrics`` so far as Python floats."""
    return Scores(**{name: float(x) for name, x in metrics.compute().items()})


def evaluate(model: nnx.Module, examples: Batch) -> Scores:
    """Scores ``model``, which must be in evaluation mode."""
    logits, labels = predict(model, examples.images), examples.labels
    metrics = make_metrics()
    metrics.update(loss=cross_entropy(logits, labels), logits=logits, labels=labels)
    return read_scores(metrics)


def train(
    model: nnx.Module, digits: Split, *, epochs: int, batch_size: int, seed: int
) -> Iterator[Scores | Epoch]:
    """Trains ``model`` in place and leaves it in evaluation mode.

    Args:
        model: The network to train.
        digits: What to train on, and what to test on after each epoch.
        epochs: How often to go over the training digits.
        batch_size: Digits per step.
        seed: Decides the order of the digits.

    Yields:
        After each step, the scores of the epoch so far; after each epoch, an
        `Epoch`. Leave the loop to stop the training early.
    """
    steps = epochs * (len(digits.train.labels) // batch_size)
    schedule = optax.cosine_onecycle_schedule(steps, PEAK_LEARNING_RATE)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule), wrt=nnx.Param)
    metrics = make_metrics()
    generator = np.random.default_rng(seed)
    for number in range(1, epochs + 1):
        model.train()
        metrics.reset()
        for batch in batches(digits.train, batch_size, generator):
            train_step(model, optimizer, metrics, batch)
            yield read_scores(metrics)
        model.eval()
        yield Epoch(number, read_scores(metrics), evaluate(model, digits.test))
