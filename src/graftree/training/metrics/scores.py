"""Scores of predictions, as in scikit-learn, over batches.

Each is computed from sums over weighted rows (`_WeightedSums`), so it is the same
however the rows are divided: into batches, or over devices whose counters are added.
Precision, recall and their mean come from one count, `ConfusionMatrix`.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

from graftree.annotations import Array, ArrayLike, Float32, Int, Num, Shaped
from graftree.nn.support import arguments
from graftree.training.metrics import averages


class _WeightedSums(averages.Metric):
    """Sums over weighted rows, which keep the remainders that rounding loses.

    A float32 stops counting at 2**24; with its remainder it does at 2**48. Two sums,
    unless a subclass starts others: of a value of each row, and of the weights.

    Attributes:
        sums: Float32.
        remainders: To be added to the sums; of the same shape.
    """

    def __init__(self) -> None:
        self._start(2)

    def _start(self, *shape: int) -> None:
        self.sums = averages.MetricState(jnp.zeros(shape, jnp.float32))
        self.remainders = averages.MetricState(jnp.zeros(shape, jnp.float32))

    @arguments.own_arithmetic
    def reset(self) -> None:
        """Sets all counters to zero, in place."""
        averages.reset_counters(self.sums, self.remainders)

    @arguments.own_arithmetic
    def compute(self) -> Float32[Array, "*counters"]:
        """Returns the statistic of all rows so far; nan if there are none."""
        total, weight = jnp.moveaxis(self._totals(), -1, 0)
        return total / weight

    def _add_rows(self, values: jax.Array, weights: jax.Array) -> None:
        self._add(jnp.stack([averages.weighted_sum(values, weights), jnp.sum(weights)]))

    def _add(self, amounts: jax.Array) -> None:
        self.sums[...], lost = _exact_sum(
            self.sums[...], amounts.astype(self.sums.dtype)
        )
        self.remainders[...] += lost

    def _totals(self) -> jax.Array:
        return self.sums[...] + self.remainders[...]


def _exact_sum(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns a sum and its rounding error: Knuth, TAOCP 2, 4.2.2, theorem B."""
    total = a + b
    added = total - a
    lost = (a - (total - added)) + (b - added)
    return total, jnp.where(jnp.isfinite(total), lost, 0)


def _exact_product(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns a float32 product and its rounding error: Dekker, 1971, section 5."""
    product = a * b
    a_high, b_high = (jax.lax.reduce_precision(x, 8, 11) for x in (a, b))
    a_low, b_low = a - a_high, b - b_high
    lost = a_high * b_high - product + a_high * b_low + a_low * b_high + a_low * b_low
    return product, jnp.where(jnp.isfinite(product), lost, 0)


def _weights(mask: Any, rows: tuple[int, ...]) -> jax.Array:
    """Returns the weight of each row; the axes of a mask are the rows' first ones."""
    mask = averages.widen(1 if mask is None else mask)
    fits = all(m in (1, n) for m, n in zip(mask.shape, rows, strict=False))
    if mask.ndim > len(rows) or not fits:
        raise ValueError(
            f"Expected a mask for rows of shape {rows}, or for their first axes, got "
            f"the shape {mask.shape}."
        )
    mask = mask.reshape(mask.shape + (1,) * (len(rows) - mask.ndim))
    return jnp.broadcast_to(mask, rows)


class _Regression(_WeightedSums):
    """A metric of predicted numbers."""

    @arguments.own_arithmetic
    def update(
        self,
        *,
        predictions: Num[ArrayLike, "*shape"],
        targets: Num[ArrayLike, "*shape"],
        mask: Shaped[ArrayLike, "*mask_shape"] | None = None,
        **_: Any,
    ) -> None:
        """Adds a batch, in place.

        Args:
            predictions: Numbers of any shape.
            targets: The right ones, of the same shape.
            mask: Weights, usually booleans, for the first axes of the targets, as
                ``[batch]`` for ``[batch, outputs]``. ``None`` counts each target once.

        Raises:
            ValueError: If the shapes do not fit.
        """
        predictions, targets = averages.widen(predictions), averages.widen(targets)
        if predictions.shape != targets.shape:
            raise ValueError(
                "Expected predictions and targets of the same shape, got "
                f"{predictions.shape} and {targets.shape}."
            )
        self._add_batch(predictions, targets, _weights(mask, targets.shape))

    def _add_batch(self, predictions: Any, targets: Any, weights: Any) -> None:
        raise NotImplementedError


class MeanSquaredError(_Regression):
    """Mean of ``(predictions - targets) ** 2`` so far.

    Attributes:
        sums: Of the squares and the weights, float32. All metrics from here on keep
            their sums like this.
        remainders: Rounding errors of the sums, so that they count to ``2**48``.

    Example:
        >>> error = nnx.metrics.MeanSquaredError()
        >>> predictions = jnp.array([2.5, 0.0, 2.0])
        >>> error.update(predictions=predictions, targets=jnp.array([3.0, -0.5, 2.0]))
        >>> error.compute()
        Array(0.16666667, dtype=float32)
    """

    def _add_batch(self, predictions: Any, targets: Any, weights: Any) -> None:
        self._add_rows((predictions - targets) ** 2, weights)


class MeanAbsoluteError(_Regression):
    """Mean of ``|predictions - targets|`` so far.

    Example:
        >>> error = nnx.metrics.MeanAbsoluteError()
        >>> predictions = jnp.array([2.5, 0.0, 2.0])
        >>> error.update(predictions=predictions, targets=jnp.array([3.0, -0.5, 3.0]))
        >>> error.compute()
        Array(0.6666667, dtype=float32)
    """

    def _add_batch(self, predictions: Any, targets: Any, weights: Any) -> None:
        self._add_rows(jnp.abs(predictions - targets), weights)


class R2Score(_Regression):
    """Share of the variance of the targets that the predictions explain.

    ``1 - sum((targets - predictions)**2) / sum((targets - mean(targets))**2)``. All
    elements are one output; for the score of each output, make and update the metric
    under ``nnx.vmap``.

    Targets far from zero cost no digits up to a mean of some 10,000 times their
    deviation: the squares are summed with their rounding errors. Adding the
    counters of several devices rounds once more, without that.

    Example:
        >>> score = nnx.metrics.R2Score()
        >>> targets = jnp.array([3.0, -0.5, 2.0, 7.0])
        >>> score.update(predictions=jnp.array([2.5, 0.0, 2.0, 8.0]), targets=targets)
        >>> score.compute().round(4)
        Array(0.9486, dtype=float32)
    """

    def __init__(self) -> None:
        self._start(4)

    def _add_batch(self, predictions: Any, targets: Any, weights: Any) -> None:
        count = jnp.sum(weights).astype(jnp.float32)
        mean = averages.weighted_sum(targets, weights) / averages.or_one(count)
        mean = mean.astype(jnp.float32)
        apart = targets - mean
        residual = averages.weighted_sum((predictions - targets) ** 2, weights)
        first, second = (
            averages.weighted_sum(apart, weights),
            averages.weighted_sum(apart**2, weights),
        )
        # Moments of the targets, of those about the mean:
        # sum t = count mean + first, sum t^2 = count mean^2 + 2 mean first + second.
        total, lost = _exact_product(count, mean)
        square, lost_of_square = _exact_product(total, mean)
        second = second + 2 * mean * first + lost * mean + lost_of_square
        self._add(jnp.stack([count, residual, total, square]))
        self._add(jnp.stack([0 * count, 0 * count, first + lost, second]))

    @arguments.own_arithmetic
    def compute(self) -> Float32[Array, "*counters"]:
        """Returns the score of all rows so far; nan if there are none.

        Returns:
            At most 1. Where all targets are equal, 1 if the predictions equal them,
            otherwise 0, as in scikit-learn.
        """
        count, residual, first, _ = jnp.moveaxis(self._totals(), -1, 0)
        mean = first / count
        variation = self._variation(mean)
        rounding = count * (mean * jnp.finfo(jnp.float32).eps) ** 2
        of_constant = jnp.where(residual > 0, 0, 1 + residual)  # nan stays nan
        return jnp.where(variation <= rounding, of_constant, 1 - residual / variation)

    def _variation(self, mean: jax.Array) -> jax.Array:
        """Sums the squares about the mean: second - 2 mean first + count mean^2."""
        count, _, first, second = jnp.moveaxis(self.sums[...], -1, 0)
        count_remainder, _, of_first, of_second = jnp.moveaxis(
            self.remainders[...], -1, 0
        )
        cross, lost_of_cross = _exact_product(-2 * mean, first)
        scaled_mean, lost_of_mean = _exact_product(count, mean)
        square, lost_of_square = _exact_product(scaled_mean, mean)
        total, lost = _exact_sum(second, cross)
        total, lost_of_total = _exact_sum(total, square)
        lost += lost_of_cross + lost_of_square + lost_of_total + of_second
        return total + (
            lost + mean * (lost_of_mean + count_remainder * mean - 2 * of_first)
        )


class _Classification(_WeightedSums):
    """A metric of logits and labels.

    Attributes:
        num_classes: ``None``: as many as there are logits.
        is_binary: Whether there is one logit for each label, which is 0 or 1.
    """

    num_classes: Any = None
    is_binary: bool = False

    @arguments.own_arithmetic
    def update(
        self,
        *,
        logits: Num[ArrayLike, "*logits_shape"],
        labels: Int[ArrayLike, "*batch"],
        mask: Shaped[ArrayLike, "*mask_shape"] | None = None,
        **_: Any,
    ) -> None:
        """Adds a batch, in place.

        Args:
            logits: ``[*batch, classes]``; with a threshold, and for `RocAuc`,
                ``[*batch]``.
            labels: Classes, ``[*batch]``, int32 or int64.
            mask: Weights, usually booleans, for the first axes of the labels. ``None``
                counts each label once. The result is nan if a row counts whose label
                is not a class, or whose logits hold a nan.

        Raises:
            ValueError: If the shapes do not fit, or the labels have another dtype; or
                for metrics that count in cells, if there are more than ``2**24`` rows.
        """
        logits, labels = averages.widen(logits), jnp.asarray(labels)
        averages.check_predictions(logits, labels, self.is_binary)
        classes = self.num_classes or logits.shape[-1]
        expected = labels.shape if self.is_binary else (*labels.shape, classes)
        if logits.shape != expected:
            raise ValueError(
                f"{type(self).__name__} expected logits of shape {expected} for labels "
                f"of shape {labels.shape}, got {logits.shape}."
            )
        weights = _weights(mask, labels.shape)
        unknown = jnp.isnan(logits) if self.is_binary else jnp.isnan(logits).any(-1)
        unknown |= (labels < 0) | (labels >= classes)
        # A compiled function can't raise.
        weights = jnp.where(unknown & (weights != 0), jnp.nan, weights)
        self._add_batch(logits, jnp.clip(labels, 0, classes - 1), weights)

    def _add_batch(self, logits: Any, labels: Any, weights: Any) -> None:
        raise NotImplementedError


class TopKAccuracy(_Classification):
    """Share of rows whose label is among the ``k`` largest logits.

    Among equal logits, that of the lower class comes first, as in `Accuracy`;
    scikit-learn puts the higher first.

    Args:
        k: How many classes are predicted for each row.

    Raises:
        ValueError: If ``k`` is less than 1.

    Example:
        >>> accuracy = nnx.metrics.TopKAccuracy(2)
        >>> logits = jnp.array([[0.5, 0.2, 0.2], [0.3, 0.4, 0.2], [0.7, 0.2, 0.1]])
        >>> accuracy.update(logits=logits, labels=jnp.array([0, 1, 2]))
        >>> accuracy.compute()
        Array(0.6666667, dtype=float32)
    """

    def __init__(self, k: int) -> None:
        if k < 1:
            raise ValueError(f"TopKAccuracy expects k >= 1, got {k}.")
        self.k = k
        super().__init__()

    def _add_batch(self, logits: Any, labels: Any, weights: Any) -> None:
        if logits.shape[-1] < self.k:
            raise ValueError(
                f"TopKAccuracy({self.k}) expects logits of {self.k} classes or more, "
                f"got the shape {logits.shape}."
            )
        labels = labels[..., None]
        classes = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
        label_logits = jnp.take_along_axis(logits, labels, axis=-1)
        # `top_k` would gather a batch that is sharded.
        ahead = (logits > label_logits) | (
            (logits == label_logits) & (classes < labels)
        )
        self._add_rows(jnp.sum(ahead, axis=-1) < self.k, weights)


class Perplexity(_Classification):
    """Exponential of the mean cross-entropy, ``exp(mean(-log p(label)))``.

    Example:
        >>> perplexity = nnx.metrics.Perplexity()
        >>> uniform, tokens = jnp.zeros((2, 3, 50)), jnp.zeros((2, 3), int)
        >>> perplexity.update(logits=uniform, labels=tokens)
        >>> perplexity.compute().round(3)
        Array(50., dtype=float32)
    """

    def _add_batch(self, logits: Any, labels: Any, weights: Any) -> None:
        label_logits = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
        self._add_rows(jax.nn.logsumexp(logits, axis=-1) - label_logits, weights)

    @arguments.own_arithmetic
    def compute(self) -> Float32[Array, "*counters"]:
        """Returns the perplexity so far; nan without rows.

        Returns:
            1 for a model that is always certain and right, the number of classes for
            one that knows nothing.
        """
        return jnp.exp(super().compute())


class ConfusionMatrix(_Classification):
    """Counts how many rows of each class were predicted as each class.

    Args:
        num_classes: How many classes there are.
        threshold: ``None`` predicts the class with the largest logit. A float is for
            two classes: a logit of at least ``threshold`` predicts class 1.

    Raises:
        TypeError: If ``threshold`` is neither ``None`` nor a float.
        ValueError: If ``num_classes`` is less than 2, or not 2 with a threshold.

    Example:
        >>> confusion = nnx.metrics.ConfusionMatrix(3)
        >>> logits = nnx.one_hot(jnp.array([0, 2, 2, 1]), 3)  # of predicted classes
        >>> confusion.update(logits=logits, labels=jnp.array([0, 1, 2, 1]))
        >>> confusion.compute()
        Array([[1., 0., 0.],
               [0., 1., 1.],
               [0., 0., 1.]], dtype=float32)
    """

    def __init__(self, num_classes: int = 2, *, threshold: float | None = None) -> None:
        self.threshold = averages.checked_threshold(threshold)
        self.is_binary = threshold is not None
        if num_classes < 2 or (self.is_binary and num_classes != 2):
            raise ValueError(
                f"{type(self).__name__} expects num_classes >= 2, and 2 if there is a "
                f"threshold, got {num_classes} and the threshold {threshold}."
            )
        self.num_classes = num_classes
        self._start(num_classes, num_classes)

    def _add_batch(self, logits: Any, labels: Any, weights: Any) -> None:
        if self.is_binary:
            predicted = (logits >= self.threshold).astype(int)
        else:
            predicted = jnp.argmax(logits, axis=-1)
        shape = (self.num_classes, self.num_classes)
        self._add(_table(shape, (labels, predicted), weights))

    @arguments.own_arithmetic
    def compute(self) -> Float32[Array, "*counters"]:
        """Returns the counts so far.

        Returns:
            ``[classes, classes]``: the rows are the labels, the columns the
            predictions. Counts above ``2**24`` are rounded, but only in this result.
        """
        return self._totals()


def _table(shape: tuple[int, int], cells: Any, weights: jax.Array) -> jax.Array:
    """Sums the weights in each cell; all are nan if a weight is."""
    if weights.size > 2**24:  # where a cell would stop counting
        raise ValueError(
            f"Expected at most 2**24 rows in an update, got {weights.size}; update "
            "with parts of the batch, one after the other."
        )
    mesh = jax.typeof(weights).sharding.mesh
    options = {}
    if mesh.explicit_axes:  # JAX must know that this is the sum over all devices
        replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        options["out_sharding"] = replicated
    counts = jnp.zeros(shape, weights.dtype).at[cells].add(weights, **options)
    return jnp.where(jnp.isnan(weights).any(), jnp.nan, counts)


class _ClassScore(ConfusionMatrix):
    """A ratio of counts for each class, and their average."""

    def __init__(
        self,
        num_classes: int = 2,
        *,
        average: Literal["binary", "micro", "macro", "weighted"] | None = "binary",
        threshold: float | None = None,
    ) -> None:
        super().__init__(num_classes, threshold=threshold)
        choices = ("binary", "micro", "macro", "weighted", None)
        if average not in choices or (average == "binary" and num_classes != 2):
            raise ValueError(
                f"{type(self).__name__} expects an average of {choices}, and 'binary' "
                f"only for two classes, got {average!r} for {num_classes}."
            )
        self.average = average

    @staticmethod
    def _terms(right: Any, labelled: Any, predicted: Any) -> tuple[Any, Any]:
        """Returns numerator and denominator, from three counts for each class."""
        raise NotImplementedError

    @arguments.own_arithmetic
    def compute(self) -> Float32[Array, "*counters"]:
        """Returns the score so far; 0 in the place of 0/0, as in scikit-learn.

        Returns:
            A scalar; ``[classes]`` if ``average`` is ``None``.
        """
        counts = super().compute()
        right = jnp.diagonal(counts, axis1=-2, axis2=-1)
        labelled = counts.sum(axis=-1)
        numerators, denominators = self._terms(right, labelled, counts.sum(axis=-2))
        if self.average == "micro":
            numerators, denominators = (
                numerators.sum(axis=-1),
                denominators.sum(axis=-1),
            )
        scores = numerators / averages.or_one(denominators)
        if self.average == "binary":
            return scores[..., 1]
        if self.average == "macro":
            return scores.mean(axis=-1)
        if self.average == "weighted":
            total = labelled.sum(axis=-1)
            return (scores * labelled).sum(axis=-1) / averages.or_one(total)
        return scores


class Precision(_ClassScore):
    """Share of the rows predicted as a class that belong to it.

    Args:
        num_classes: How many classes there are. Classes that never occur count too, as
            with scikit-learn's ``labels=range(num_classes)``.
        average: As in scikit-learn. ``"binary"``: the score of class 1; ``"micro"``: of
            all classes together; ``"macro"``: the mean over classes; ``"weighted"``:
            that mean, weighted by how often each class is a label; ``None``: the score
            of each class.
        threshold: As for `ConfusionMatrix`.

    Raises:
        TypeError: If ``threshold`` is neither ``None`` nor a float.
        ValueError: If ``num_classes`` is less than 2, or not 2 with a threshold or for
            ``"binary"``; or if ``average`` is something else.

    Example:
        >>> precision = nnx.metrics.Precision(threshold=0.5)
        >>> logits, labels = jnp.array([0.9, 0.6, 0.2, 0.7]), jnp.array([1, 0, 1, 1])
        >>> precision.update(logits=logits, labels=labels)
        >>> precision.compute()
        Array(0.6666667, dtype=float32)
    """

    @staticmethod
    def _terms(right: Any, labelled: Any, predicted: Any) -> tuple[Any, Any]:
        return right, predicted


class Recall(_ClassScore):
    """Share of the rows of a class that were predicted as it.

    Args:
        *args: As for `Precision`.
        **kwargs: As for `Precision`.

    Example:
        >>> recall = nnx.metrics.Recall(3, average="macro")
        >>> logits = nnx.one_hot(jnp.array([0, 2, 2, 1]), 3)
        >>> recall.update(logits=logits, labels=jnp.array([0, 1, 2, 1]))
        >>> recall.compute()
        Array(0.8333333, dtype=float32)
    """

    @staticmethod
    def _terms(right: Any, labelled: Any, predicted: Any) -> tuple[Any, Any]:
        return right, labelled


class F1Score(_ClassScore):
    """Harmonic mean of precision and recall.

    Args:
        *args: As for `Precision`.
        **kwargs: As for `Precision`.

    Example:
        >>> score = nnx.metrics.F1Score(3, average=None)
        >>> logits = nnx.one_hot(jnp.array([0, 2, 2, 1]), 3)
        >>> score.update(logits=logits, labels=jnp.array([0, 1, 2, 1]))
        >>> score.compute()
        Array([1.       , 0.6666667, 0.6666667], dtype=float32)
    """

    @staticmethod
    def _terms(right: Any, labelled: Any, predicted: Any) -> tuple[Any, Any]:
        return 2 * right, labelled + predicted


class RocAuc(_Classification):
    """Area under the ROC curve: how often a positive row is above a negative one.

    Memory is constant: two histograms of the 65,536 numbers of bfloat16. Scores of any
    range that are equal when rounded to bfloat16 count as a half; `max_error` bounds
    the effect. For the exact area, keep all scores and pass them to
    ``sklearn.metrics.roc_auc_score``. Prefer logits to probabilities, which are close
    together near 1; for two logits a row, the score is ``logits[:, 1] - logits[:, 0]``.

    Example:
        >>> area = nnx.metrics.RocAuc()
        >>> logits, labels = jnp.array([0.1, 0.4, 0.35, 0.8]), jnp.array([0, 0, 1, 1])
        >>> area.update(logits=logits, labels=labels)
        >>> area.compute(), area.max_error()
        (Array(0.75, dtype=float32), Array(0., dtype=float32))
    """

    num_classes = 2
    is_binary = True

    def __init__(self) -> None:
        self._start(2, 2**16)

    def _add_batch(self, logits: Any, labels: Any, weights: Any) -> None:
        self._add(_table((2, 2**16), (labels, _ranks(logits)), weights))

    @arguments.own_arithmetic
    def compute(self) -> Float32[Array, "*counters"]:
        """Returns the area so far; nan without rows of both labels."""
        negatives, positives = self._shares()
        lower_negatives = jnp.cumsum(negatives, axis=-1) - negatives / 2
        return jnp.sum(positives * lower_negatives, axis=-1)

    def max_error(self) -> Float32[Array, "*counters"]:
        """Returns how far `compute` may be from the exact area of the rows so far.

        Returns:
            Half the share of pairs of a positive and a negative row in the same bin.
        """
        negatives, positives = self._shares()
        return jnp.sum(positives * negatives, axis=-1) / 2

    def _shares(self) -> jax.Array:
        """Returns the share of each bin, ``[2, *counters, bins]``."""
        counts = jnp.moveaxis(self._totals(), -2, 0)
        return counts / counts.sum(axis=-1, keepdims=True)


def _ranks(scores: jax.Array) -> jax.Array:
    """Ranks each score among all bfloat16 numbers."""
    rounded = jnp.where(scores == 0, 0, scores).astype(jnp.bfloat16)  # no -0
    bits = jax.lax.bitcast_convert_type(rounded, jnp.uint16).astype(jnp.int32)
    return jnp.where(bits < 2**15, bits + 2**15, 2**16 - 1 - bits)
