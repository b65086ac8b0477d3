"""Metrics: running statistics over batches.

A metric is a Pytree whose counters are `MetricState` Variables: `update` adds a batch,
`compute` returns the statistic so far, `reset` starts over. All three work eagerly and
in every transform, and keep the shapes and dtypes of the counters, so a metric made
under ``vmap`` stays vectorized.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from graftree.annotations import (
    Array,
    ArrayLike,
    Filter,
    Float,
    Float32,
    Int,
    Num,
    Shaped,
)
from graftree.core.graph import functional
from graftree.core.objects import attributes, pytrees
from graftree.core.variables.variables import Variable
from graftree.nn.support import arguments


class MetricState(Variable[jax.Array]):
    """A counter of a metric.

    Example:
        >>> count = nnx.metrics.MetricState(jnp.array(0))
        >>> count[...] += 2
        >>> count[...].item()
        2
    """


class Metric(pytrees.Pytree):
    """Base class of metrics: override all four methods.

    Example:
        >>> class Largest(nnx.Metric):
        ...     def __init__(self):
        ...         self.largest = nnx.metrics.MetricState(jnp.array(-jnp.inf))
        ...     def reset(self):
        ...         self.largest[...] = jnp.array(-jnp.inf)
        ...     def update(self, *, loss, **_):
        ...         self.largest[...] = jnp.maximum(self.largest[...], loss.max())
        ...     def compute(self):
        ...         return self.largest[...]
        >>> metrics = nnx.MultiMetric(worst=Largest(), mean=nnx.metrics.Average("loss"))
        >>> metrics.update(loss=jnp.array([1.0, 3.0]))
        >>> {name: value.item() for name, value in metrics.compute().items()}
        {'worst': 3.0, 'mean': 2.0}
    """

    def __init__(self) -> None:
        raise _must_override("__init__")

    def reset(self) -> None:
        """Starts over, in place.

        Raises:
            NotImplementedError: If the subclass does not override it.
        """
        raise _must_override("reset")

    def update(self, **kwargs: Any) -> None:
        """Adds a batch, in place.

        Args:
            **kwargs: The values that the metric reads; it ignores other names.

        Raises:
            NotImplementedError: If the subclass does not override it.
        """
        raise _must_override("update")

    def compute(self) -> Any:
        """Returns the statistic of all batches since the last `reset`.

        Raises:
            NotImplementedError: If the subclass does not override it.
        """
        raise _must_override("compute")

    def split(self, *filters: Filter) -> Any:
        """Splits the metric like ``nnx.split(metric, *filters)``.

        Args:
            *filters: One State is returned for each; without filters, a single State.

        Returns:
            ``(graphdef, state, ...)``.

        Example:
            >>> graphdef, state = nnx.metrics.Average().split()
            >>> sorted(state)
            ['count', 'total']
        """
        return functional.split(self, *filters)


def _must_override(method: str) -> NotImplementedError:
    return NotImplementedError(
        f"Must override `{method}()` method: nnx.Metric is the base class of metrics; "
        "use one of nnx.metrics, or write a subclass."
    )


class Average(Metric):
    """Mean of all values so far.

    Args:
        argname: The keyword of `update` that holds the values.

    Attributes:
        argname: As given; static.
        total: The sum of the values, float32.
        count: The number of values, int32; up to 2**31 - 1.

    Example:
        >>> loss = nnx.metrics.Average("loss")
        >>> loss.update(loss=jnp.array([1.0, 2.0]))
        >>> loss.update(loss=6.0)
        >>> loss.compute()
        Array(3., dtype=float32)
    """

    def __init__(self, argname: str = "values") -> None:
        self.argname = argname
        self.total = MetricState(jnp.array(0, dtype=jnp.float32))
        self.count = MetricState(jnp.array(0, dtype=jnp.int32))

    @arguments.own_arithmetic
    def reset(self) -> None:
        """Sets the sum and the count to zero, in place."""
        reset_counters(self.total, self.count)

    @arguments.own_arithmetic
    def update(
        self, mask: Shaped[ArrayLike, "*mask_shape"] | None = None, **kwargs: Any
    ) -> None:
        """Adds a batch, in place; half-precision values are summed in float32.

        Args:
            mask: Booleans or whole numbers, how often each value counts, in any shape
                that broadcasts with the values; the count drops fractions. ``None``
                counts each value once. Values that don't count may be anything, even
                nan.
            **kwargs: The values, under the keyword ``argname``: a Python number or an
                array of any shape; other keywords are ignored.

        Raises:
            TypeError: If the values are missing.
            ValueError: If a mask is given with a Python number.

        Example:
            >>> mean = nnx.metrics.Average()
            >>> mask = jnp.array([True, True, False])
            >>> mean.update(values=jnp.array([1.0, 5.0, 9.0]), mask=mask)
            >>> mean.compute()
            Array(3., dtype=float32)
        """
        values = _argument(self.argname, kwargs)
        values, mask = _prepare(values, mask)
        _add(
            self.total, jnp.sum(values) if mask is None else weighted_sum(values, mask)
        )
        _add(self.count, values.size if mask is None else jnp.sum(mask))

    @arguments.own_arithmetic
    def compute(self) -> Float32[Array, "*counters"]:
        """Returns the mean of all values so far; nan if there are none.

        Returns:
            A float32 array with the shape of the counters, usually a scalar.

        Example:
            >>> nnx.metrics.Average().compute()
            Array(nan, dtype=float32)
        """
        return self.total[...] / self.count[...]


def reset_counters(*counters: MetricState) -> None:
    """Sets counters to zero, in place."""
    for counter in counters:
        counter[...] = jnp.zeros_like(counter[...])


def _add(counter: MetricState, amount: Any) -> None:
    """Adds to a counter, in its own dtype."""
    value = counter[...]
    counter[...] = value + jnp.asarray(amount).astype(value.dtype)


def _argument(argname: str, kwargs: Mapping[str, Any]) -> Any:
    if argname not in kwargs:
        keywords = ", ".join(map(repr, kwargs)) or "no keywords"
        raise TypeError(
            f"Expected keyword argument '{argname}' of update, got {keywords}."
        )
    return kwargs[argname]


def _prepare(values: Any, mask: Any) -> tuple[jax.Array, jax.Array | None]:
    """Converts values and mask to float32 or wider, and to one shape."""
    if mask is not None and isinstance(values, (int, float)):
        raise ValueError(
            "If mask is provided, values should be a jax array, got the Python number "
            f"{values!r}."
        )
    values = widen(values)
    if mask is None:
        return values, None
    mask = widen(mask)
    # A mask of fewer dimensions weights every value it is broadcast to.
    shape = jnp.broadcast_shapes(values.shape, mask.shape)
    return jnp.broadcast_to(values, shape), jnp.broadcast_to(mask, shape)


def weighted_sum(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns a weighted sum; values of weight zero may be anything, even nan."""
    return jnp.sum(jnp.where(weights == 0, 0, values * weights))


def widen(x: Any) -> jax.Array:
    """Converts to float32, or to the dtype if that is wider."""
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


class Accuracy(Average):
    """Fraction of correct predictions so far.

    Args:
        threshold: ``None`` predicts the class with the largest logit. A float is for
            binary labels: a logit of at least ``threshold`` predicts a label above
            zero.
        *args: As for `Average`.
        **kwargs: As for `Average`.

    Raises:
        TypeError: If ``threshold`` is neither ``None`` nor a float.

    Example:
        >>> accuracy = nnx.metrics.Accuracy()
        >>> logits = jnp.array([[0.2, 0.8], [0.9, 0.1]])
        >>> accuracy.update(logits=logits, labels=jnp.array([1, 1]))
        >>> accuracy.compute()
        Array(0.5, dtype=float32)
    """

    def __init__(
        self, threshold: float | None = None, *args: Any, **kwargs: Any
    ) -> None:
        self.threshold = checked_threshold(threshold)
        super().__init__(*args, **kwargs)

    @arguments.own_arithmetic
    def update(
        self,
        *,
        logits: Num[Array | np.ndarray, "*logits_shape"],
        labels: Int[Array | np.ndarray, "*batch"],
        mask: Shaped[ArrayLike, "*mask_shape"] | None = None,
        **_: Any,
    ) -> None:
        """Adds a batch of predictions, in place.

        Args:
            logits: ``[*batch, classes]``; with a threshold ``[*batch]``.
            labels: ``[*batch]``, int32 or int64.
            mask: As for `Average.update`.

        Raises:
            ValueError: If the numbers of dimensions do not match, or the labels have
                another dtype.

        Example:
            >>> accuracy = nnx.metrics.Accuracy(threshold=0.5)
            >>> logits, labels = jnp.array([0.7, 0.1, 0.5]), jnp.array([1, 1, 1])
            >>> accuracy.update(logits=logits, labels=labels)
            >>> accuracy.compute()
            Array(0.6666667, dtype=float32)
        """
        check_predictions(logits, labels, binary=self.threshold is not None)
        classes = jnp.asarray(labels).astype(jnp.int32)
        if self.threshold is None:
            right = jnp.argmax(jnp.asarray(logits), axis=-1) == classes
        else:
            right = (jnp.asarray(logits) >= self.threshold) == (classes > 0)
        super().update(mask=mask, **{self.argname: right})


def checked_threshold(threshold: float | None) -> float | None:
    """Refuses thresholds that are not floats."""
    if threshold is not None and not isinstance(threshold, float):
        raise TypeError(
            f"Expected threshold to be a float, got {type(threshold).__name__}: "
            f"{threshold!r}."
        )
    return threshold


def check_predictions(logits: Any, labels: Any, binary: bool) -> None:
    """Refuses logits and labels of dimensions or dtypes that do not go together."""
    if binary and logits.ndim != labels.ndim:
        raise ValueError(
            "For binary classification, expected logits.ndim==labels.ndim, got "
            f"{logits.ndim} and {labels.ndim}; without a threshold the last axis of "
            "the logits holds the classes."
        )
    if not binary and logits.ndim != labels.ndim + 1:
        raise ValueError(
            "For multi-class classification, expected logits.ndim==labels.ndim+1, got "
            f"{logits.ndim} and {labels.ndim}; labels are class indices, not one-hot."
        )
    if labels.dtype not in (jnp.int32, np.int64):
        raise ValueError(
            f"Expected labels.dtype==jnp.int32 or int64, got {labels.dtype}; convert "
            "them with labels.astype(jnp.int32)."
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Statistics:
    """Statistics that `Welford` computes.

    Attributes:
        mean: The mean.
        standard_error_of_mean: The standard deviation divided by the root of the count.
        standard_deviation: That of the population: it divides by the count.

    Example:
        >>> nnx.metrics.Statistics(1.0, 0.1, 0.2).replace(mean=2.0)
        Statistics(mean=2.0, standard_error_of_mean=0.1, standard_deviation=0.2)
    """

    mean: Float[Array, "*counters"]
    standard_error_of_mean: Float[Array, "*counters"]
    standard_deviation: Float[Array, "*counters"]

    def replace(self, **updates: Any) -> Statistics:
        """Returns a copy with new values of some fields.

        Args:
            **updates: New values by field name.

        Raises:
            TypeError: If no field has that name.
        """
        return dataclasses.replace(self, **updates)


class Welford(Metric):
    """Mean, standard error and standard deviation of all values so far.

    Merges the moments of each batch into those so far. This stays accurate where the
    difference of two sums of squares would cancel.

    Args:
        argname: The keyword of `update` that holds the values.

    Attributes:
        argname: As given; static.
        count: Number of values, int32.
        mean: Mean of the values, float32.
        m2: Sum of the squared distances from the mean, float32.

    Example:
        >>> welford = nnx.metrics.Welford()
        >>> welford.update(values=jnp.array([1.0, 2.0, 3.0, 4.0]))
        >>> welford.compute().mean, welford.compute().standard_deviation
        (Array(2.5, dtype=float32), Array(1.118034, dtype=float32))

    References:
        Chan, Golub and LeVeque, 1979, "Updating formulae and a pairwise algorithm for
        computing sample variances", eq. 2.1.
    """

    def __init__(self, argname: str = "values") -> None:
        self.argname = argname
        self.count = MetricState(jnp.array(0, dtype=jnp.int32))
        self.mean = MetricState(jnp.array(0, dtype=jnp.float32))
        self.m2 = MetricState(jnp.array(0, dtype=jnp.float32))

    @arguments.own_arithmetic
    def reset(self) -> None:
        """Sets the count and the moments to zero, in place."""
        reset_counters(self.count, self.mean, self.m2)

    @arguments.own_arithmetic
    def update(
        self, mask: Shaped[ArrayLike, "*mask_shape"] | None = None, **kwargs: Any
    ) -> None:
        """Adds a batch, in place.

        Args:
            mask: As for `Average.update`.
            **kwargs: The values, under the keyword ``argname``: a Python number or an
                array of any shape; other keywords are ignored.

        Raises:
            TypeError: If the values are missing.
            ValueError: If a mask is given with a Python number.

        Example:
            >>> welford = nnx.metrics.Welford()
            >>> mask = jnp.array([True, True, False])
            >>> welford.update(values=jnp.array([1.0, 3.0, 9.0]), mask=mask)
            >>> welford.compute().mean
            Array(2., dtype=float32)
        """
        values, mask = _prepare(_argument(self.argname, kwargs), mask)
        weights = jnp.ones_like(values) if mask is None else mask
        n = jnp.sum(weights)
        batch_mean = weighted_sum(values, weights) / or_one(n)
        batch_m2 = weighted_sum((values - batch_mean) ** 2, weights)
        # With d = batch_mean - mean and N = count + n:
        # mean += d n / N,  m2 += batch_m2 + d^2 n count / N,  count = N.
        count = self.count[...].astype(n.dtype)
        distance = batch_mean - self.mean[...]
        share = n / or_one(count + n)
        _add(self.mean, distance * share)
        _add(self.m2, batch_m2 + distance**2 * count * share)
        _add(self.count, n)

    @arguments.own_arithmetic
    def compute(self) -> Statistics:
        """Returns the statistics so far; without values, the deviations are nan.

        Returns:
            Mean, standard error of the mean, and standard deviation, in float32.
        """
        count = self.count[...]
        deviation = jnp.sqrt(self.m2[...] / count)
        return Statistics(
            mean=self.mean[...],
            standard_error_of_mean=deviation / jnp.sqrt(count.astype(deviation.dtype)),
            standard_deviation=deviation,
        )


def or_one(n: jax.Array) -> jax.Array:
    """Replaces a divisor of zero by one: without values, nothing changes."""
    return jnp.where(n == 0, jnp.ones_like(n), n)


class MultiMetric(Metric):
    """Several metrics, updated by one call.

    Args:
        **metrics: The metrics by name; each becomes an attribute.

    Raises:
        ValueError: If a name is taken by a method, e.g. ``update``.

    Example:
        >>> metrics = nnx.MultiMetric(
        ...     accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss")
        ... )
        >>> logits = jnp.array([[0.2, 0.8], [0.9, 0.1]])
        >>> metrics.update(logits=logits, labels=jnp.array([1, 0]), loss=0.5)
        >>> metrics.compute()
        {'accuracy': Array(1., dtype=float32), 'loss': Array(0.5, dtype=float32)}
    """

    def __init__(self, **metrics: Metric) -> None:
        class_names = {name for base in type(self).__mro__ for name in vars(base)}
        clashes = [name for name in metrics if name in class_names]
        if clashes:
            raise ValueError(
                "MultiMetric: a metric can't be named "
                f"{', '.join(map(repr, clashes))}, because that is an attribute of the "
                "class; choose another name."
            )
        self._metric_names = tuple(metrics)
        for name, metric in metrics.items():
            setattr(self, name, attributes.data(metric))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Metric: ...

    @arguments.own_arithmetic
    def reset(self) -> None:
        """Resets all metrics, in place.

        Example:
            >>> metrics = nnx.MultiMetric(loss=nnx.metrics.Average())
            >>> metrics.update(values=3.0)
            >>> metrics.reset()
            >>> metrics.loss.count[...].item()
            0
        """
        for name in self._metric_names:
            getattr(self, name).reset()

    @arguments.own_arithmetic
    def update(self, **updates: Any) -> None:
        """Adds a batch to all metrics, in place.

        Args:
            **updates: Passed to every metric; each reads those it knows. ``mask`` is
                either one mask for all, or a dict of masks by metric name; a metric
                without a mask does not get that keyword.

        Raises:
            TypeError: If the argument of a metric is missing.
            ValueError: If a mask is for a name that no metric has.

        Example:
            >>> metrics = nnx.MultiMetric(
            ...     all=nnx.metrics.Average(), some=nnx.metrics.Average()
            ... )
            >>> masks = {"some": jnp.array([True, False])}
            >>> metrics.update(values=jnp.array([1.0, 3.0]), mask=masks)
            >>> [value.item() for value in metrics.compute().values()]
            [2.0, 1.0]
        """
        mask = updates.pop("mask", None)
        masks = (
            mask
            if isinstance(mask, Mapping)
            else dict.fromkeys(self._metric_names, mask)
        )
        if unknown := [name for name in masks if name not in self._metric_names]:
            raise ValueError(
                "MultiMetric.update: there is no metric "
                f"{', '.join(map(repr, unknown))} to mask, only "
                f"{', '.join(map(repr, self._metric_names))}."
            )
        for name in self._metric_names:
            metric_mask = masks.get(name)
            batch = updates if metric_mask is None else {**updates, "mask": metric_mask}
            getattr(self, name).update(**batch)

    @arguments.own_arithmetic
    def compute(self) -> dict[str, Any]:
        """Returns the statistics of all metrics so far.

        Returns:
            A new dict, in the order in which you gave the metrics.
        """
        return {name: getattr(self, name).compute() for name in self._metric_names}
