"""The training step, and the loop that repeats it."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
import optax

import graftree as nnx
from examples.digits import data

PEAK_LEARNING_RATE = 3e-3


class Scores(NamedTuple):
    """How well a set of digits is recognized."""

    loss: float
    accuracy: float


class Epoch(NamedTuple):
    """The scores after one pass over the training digits."""

    number: int
    train: Scores
    test: Scores


def make_optimizer(model: nnx.Module, steps: int) -> nnx.Optimizer:
    """Returns AdamW whose learning rate rises, then falls to zero over ``steps``."""
    schedule = optax.cosine_onecycle_schedule(steps, PEAK_LEARNING_RATE)
    return nnx.Optimizer(model, optax.adamw(schedule), wrt=nnx.Param)


def make_metrics() -> nnx.MultiMetric:
    """Returns running means of the loss and of the accuracy."""
    return nnx.MultiMetric(
        loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy()
    )


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean loss of logits ``[batch, 10]`` against labels ``[batch]``."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@nnx.jit
def train_step(
    model: nnx.Module,
    optimizer: nnx.Optimizer,
    metrics: nnx.MultiMetric,
    batch: data.Batch,
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


def evaluate(model: nnx.Module, examples: data.Batch) -> Scores:
    """Scores ``model``, which must be in evaluation mode."""
    logits = predict(model, examples.images)
    metrics = make_metrics()
    metrics.update(
        loss=cross_entropy(logits, examples.labels),
        logits=logits,
        labels=examples.labels,
    )
    return read_scores(metrics)


def read_scores(metrics: nnx.MultiMetric) -> Scores:
    """Returns the present values of ``metrics`` as Python floats."""
    return Scores(**{name: float(x) for name, x in metrics.compute().items()})


def fit(
    model: nnx.Module,
    digits: data.Split,
    *,
    epochs: int,
    batch_size: int,
    seed: int,
    on_step: Callable[[Scores], None],
    on_epoch: Callable[[Epoch], None],
    should_stop: Callable[[], bool],
) -> list[Epoch]:
    """Trains ``model`` in place and leaves it in evaluation mode.

    Args:
        model: The network to train.
        digits: What to train on, and what to test on after each epoch.
        epochs: How often to go over the training digits.
        batch_size: Digits per step.
        seed: Decides the order of the digits.
        on_step: Called after each step, with the scores of the epoch so far.
        on_epoch: Called after each epoch.
        should_stop: Asked after each step; ``True`` ends the training there.

    Returns:
        The scores of the epochs that were finished.
    """
    steps = epochs * data.batch_count(digits.train, batch_size)
    optimizer = make_optimizer(model, steps)
    metrics = make_metrics()
    generator = np.random.default_rng(seed)
    history: list[Epoch] = []
    for number in range(1, epochs + 1):
        model.train()
        metrics.reset()
        for batch in data.batches(digits.train, batch_size, generator):
            train_step(model, optimizer, metrics, batch)
            on_step(read_scores(metrics))
            if should_stop():
                model.eval()
                return history
        model.eval()
        test = evaluate(model, digits.test)
        history.append(Epoch(number, read_scores(metrics), test))
        on_epoch(history[-1])
    return history
