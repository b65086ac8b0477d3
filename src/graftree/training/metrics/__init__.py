"""Metrics: statistics of many batches, on the device.

    metrics = nnx.MultiMetric(
        loss=nnx.metrics.Average("loss"), f1=nnx.metrics.F1Score(10, average="macro")
    )
    metrics.update(loss=loss, logits=logits, labels=labels)  # also in nnx.jit
    metrics.compute()  # {"loss": ..., "f1": ...}

`Metric` is their common base class.
"""

# The files of this folder:
#
# - `averages.py`: the base class; means, accuracy and deviations, as in Flax NNX.
# - `scores.py`: further metrics of scikit-learn: for numbers, and for classes.

from graftree import namespaces
from graftree.training.metrics.averages import (
    Accuracy as Accuracy,
    Average as Average,
    Metric as Metric,
    MetricState as MetricState,
    MultiMetric as MultiMetric,
    Statistics as Statistics,
    Welford as Welford,
)
from graftree.training.metrics.scores import (
    ConfusionMatrix as ConfusionMatrix,
    F1Score as F1Score,
    MeanAbsoluteError as MeanAbsoluteError,
    MeanSquaredError as MeanSquaredError,
    Perplexity as Perplexity,
    Precision as Precision,
    R2Score as R2Score,
    Recall as Recall,
    RocAuc as RocAuc,
    TopKAccuracy as TopKAccuracy,
)

__dir__ = namespaces.lister(__name__)
