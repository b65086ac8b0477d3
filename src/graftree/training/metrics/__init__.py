"""Metrics: statistics of many batches, on the device.

    metrics = nnx.MultiMetric(
        loss=nnx.metrics.Average("loss"), f1=nnx.metrics.F1Score(10, average="macro")
    )
    metrics.update(loss=loss, logits=logits, labels=labels)  # also in nnx.jit
    metrics.compute()  # {"loss": ..., "f1": ...}

`Metric` says what all of them have in common.
"""

# The files of this folder:
#
# - `averages.py`: the base class; means, accuracy and deviations, as in Flax NNX.
# - `scores.py`: what scikit-learn has besides: of numbers, and of classes.

from graftree import namespaces
from graftree.training.metrics.averages import Accuracy as Accuracy
from graftree.training.metrics.averages import Average as Average
from graftree.training.metrics.averages import Metric as Metric
from graftree.training.metrics.averages import MetricState as MetricState
from graftree.training.metrics.averages import MultiMetric as MultiMetric
from graftree.training.metrics.averages import Statistics as Statistics
from graftree.training.metrics.averages import Welford as Welford
from graftree.training.metrics.scores import ConfusionMatrix as ConfusionMatrix
from graftree.training.metrics.scores import F1Score as F1Score
from graftree.training.metrics.scores import MeanAbsoluteError as MeanAbsoluteError
from graftree.training.metrics.scores import MeanSquaredError as MeanSquaredError
from graftree.training.metrics.scores import Perplexity as Perplexity
from graftree.training.metrics.scores import Precision as Precision
from graftree.training.metrics.scores import R2Score as R2Score
from graftree.training.metrics.scores import Recall as Recall
from graftree.training.metrics.scores import RocAuc as RocAuc
from graftree.training.metrics.scores import TopKAccuracy as TopKAccuracy

__dir__ = namespaces.lister(__name__)
