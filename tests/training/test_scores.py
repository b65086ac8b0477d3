"""Metrics that scikit-learn has, compared with it; masks, devices, bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from sklearn import metrics as sklearn

import graftree as nnx
from tests import meshes, tables

metrics = nnx.metrics
random = np.random.default_rng(0)

CLASSES, ROWS = 4, 96
LABELS = random.integers(0, CLASSES, ROWS)
LOGITS = random.normal(size=(ROWS, CLASSES)) + 2 * np.eye(CLASSES)[LABELS]
PREDICTED = LOGITS.argmax(-1)
BINARY = random.integers(0, 2, ROWS)
SCORES = random.normal(size=ROWS) + BINARY
WEIGHTS = random.choice([0, 0.5, 1, 2], ROWS)
TARGETS = random.normal(3, 2, size=ROWS)
PREDICTIONS = TARGETS + random.normal(size=ROWS)

MANY = {"logits": LOGITS, "labels": LABELS}
TWO = {"logits": SCORES, "labels": BINARY}
NUMBERS = {"predictions": PREDICTIONS, "targets": TARGETS}


def perplexity(labels, logits, **options):
    exponentials = np.exp(logits)
    probabilities = exponentials / exponentials.sum(-1, keepdims=True)
    return np.exp(sklearn.log_loss(labels, probabilities, **options))


# The metric, what it is given, and what scikit-learn says with weights.
CASES = {
    "mean_squared_error": (metrics.MeanSquaredError(), NUMBERS, TARGETS, PREDICTIONS),
    "mean_absolute_error": (metrics.MeanAbsoluteError(), NUMBERS, TARGETS, PREDICTIONS),
    "r2_score": (metrics.R2Score(), NUMBERS, TARGETS, PREDICTIONS),
    "top_k_accuracy_score": (metrics.TopKAccuracy(2), MANY, LABELS, LOGITS),
    "perplexity": (metrics.Perplexity(), MANY, LABELS, LOGITS),
    "confusion_matrix": (metrics.ConfusionMatrix(CLASSES), MANY, LABELS, PREDICTED),
}
OF_CLASSES = {
    "precision_score": metrics.Precision,
    "recall_score": metrics.Recall,
    "f1_score": metrics.F1Score,
}


@nnx.jit
def step(metric, batch):
    metric.update(**batch)


def updated(metric, batch, mask):
    """A new metric that was given the rows in three batches."""
    metric = nnx.clone(metric)
    for start in (0, 32, 64):
        part = slice(start, start + 32)
        rows = {name: x[part] for name, x in batch.items()}
        step(metric, {**rows, "mask": mask[part], "loss": 0.0})
    return metric


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_scikit_learn(name):
    metric, batch, truth, prediction = CASES[name]
    formula = perplexity if name == "perplexity" else getattr(sklearn, name)
    options = {"k": 2} if metric.__class__ is metrics.TopKAccuracy else {}
    expected = formula(truth, prediction, sample_weight=WEIGHTS, **options)
    found = updated(metric, batch, WEIGHTS).compute()
    np.testing.assert_allclose(found, expected, rtol=2e-6)


@pytest.mark.parametrize("name", OF_CLASSES)
@pytest.mark.parametrize("average", ["micro", "macro", "weighted", None, "binary"])
def test_scores_of_classes_are_those_of_scikit_learn(name, average):
    make, formula = OF_CLASSES[name], getattr(sklearn, name)
    if average == "binary":
        metric, batch = make(threshold=0.5), TWO
        truth, predicted = BINARY, SCORES >= 0.5
    else:
        # A fifth class, which never occurs: 0 / 0 is 0.
        more = np.pad(LOGITS, ((0, 0), (0, 1)), constant_values=-9)
        metric, batch = make(5, average=average), {**MANY, "logits": more}
        truth, predicted = LABELS, PREDICTED
    options = {} if average == "binary" else {"labels": range(5), "zero_division": 0}
    found = updated(metric, batch, WEIGHTS).compute()
    options |= {"average": average, "sample_weight": WEIGHTS}
    np.testing.assert_allclose(found, formula(truth, predicted, **options), rtol=2e-6)


@pytest.mark.parametrize("scale", [1, 1e-6, 1e6])
def test_area_is_within_its_error_of_that_of_scikit_learn(scale):
    labels, weights = np.tile(BINARY, 40), np.tile(WEIGHTS, 40)
    scores = labels + random.normal(size=len(labels))
    metric = metrics.RocAuc()
    metric.update(logits=scores * scale, labels=labels, mask=weights)
    expected = sklearn.roc_auc_score(labels, scores, sample_weight=weights)
    assert 0 < metric.max_error() < 0.002
    assert abs(metric.compute() - expected) <= metric.max_error() + 1e-6


def test_area_of_scores_that_bfloat16_has_is_exact():
    values = [-np.inf, -1e30, -2, -1, -1e-30, -0.0, 0.0, 1e-30, 1, 2, 1e30, np.inf]
    scores = np.array(jnp.array(values, jnp.bfloat16).astype(jnp.float32))
    labels = np.array([0, 0, 1, 0, 1, 0, 1, 0, 1, 1, 0, 1])
    metric = metrics.RocAuc()
    metric.update(logits=scores, labels=labels)
    finite = np.unique(scores, return_inverse=True)[1]
    np.testing.assert_allclose(metric.compute(), sklearn.roc_auc_score(labels, finite))
    np.testing.assert_allclose(metric.max_error(), 0.5 / 36)  # 0 and -0


# ----------------------------------------------------------- counters and transforms

EVERY = {
    **{name: case[:2] for name, case in CASES.items()},
    "roc_auc_score": (metrics.RocAuc(), TWO),
    "f1_score": (metrics.F1Score(threshold=0.0), TWO),
}
every = pytest.mark.parametrize("name", EVERY)


def of_split(metric, batch):
    graphdef, state = metric.split()

    @jax.jit
    def update(state, batch):
        metric = nnx.merge(graphdef, state)
        metric.update(**batch)
        return nnx.state(metric)

    return nnx.merge(graphdef, update(update(state, batch), batch))


@every
@pytest.mark.parametrize("way", ["split", "Auto", "Explicit"])
def test_every_way_gives_the_same(name, way):
    metric, batch = EVERY[name]
    batch = {**batch, "mask": WEIGHTS > 0}
    expected = nnx.clone(metric)
    for _ in range(2):
        step(expected, batch)
    found = nnx.clone(metric)
    if way == "split":
        found = of_split(found, batch)
    else:
        mesh = meshes.mesh_of(way, data=8)
        with jax.set_mesh(mesh):
            rows = NamedSharding(mesh, PartitionSpec("data"))
            for _ in range(2):
                step(found, jax.device_put(batch, rows))
    np.testing.assert_allclose(found.compute(), expected.compute(), rtol=2e-6)


@every
def test_counters_of_devices_can_be_added(name):
    metric, batch = EVERY[name]
    mesh = meshes.mesh_of(data=8)
    graphdef, state = metric.split()

    def update(batch):
        part = nnx.merge(graphdef, jax.tree.map(jnp.zeros_like, state))
        part.update(**batch)
        return jax.lax.psum(nnx.state(part), "data")

    row, whole = PartitionSpec("data"), PartitionSpec()
    summed = jax.shard_map(update, mesh=mesh, in_specs=row, out_specs=whole)
    found = nnx.merge(graphdef, jax.jit(summed)(jax.tree.map(jnp.asarray, batch)))
    expected = nnx.clone(metric)
    expected.update(**batch)
    np.testing.assert_allclose(found.compute(), expected.compute(), rtol=2e-6)


@every
def test_mapped_metrics_are_vectorized(name):
    metric, batch = EVERY[name]
    halves = jax.tree.map(lambda x: jnp.stack([x[:48], x[48:]]), batch)
    make = nnx.vmap(lambda _: nnx.clone(metric), in_axes=0, out_axes=0)
    mapped = make(jnp.zeros(2))
    nnx.jit(nnx.vmap(step))(mapped, halves)
    for i, found in enumerate(mapped.compute()):
        expected = nnx.clone(metric)
        step(expected, jax.tree.map(lambda x, i=i: x[i], halves))
        np.testing.assert_allclose(found, expected.compute(), rtol=2e-6)


@every
def test_reset_starts_again(name):
    metric, batch = EVERY[name]
    used = nnx.clone(metric)
    used.update(**batch)
    used.reset()
    states = map(nnx.state, (used, nnx.clone(metric)))
    jax.tree.map(np.testing.assert_array_equal, *states)


@every
def test_counters_keep_their_dtypes(name, float64):
    metric, batch = EVERY[name]
    metric = updated(metric, batch, WEIGHTS)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(nnx.state(metric)))


def test_counters_go_on_where_float32_ends():
    confusion = metrics.ConfusionMatrix(2)
    confusion.sums[0, 1] = 2.0**24
    one = {"logits": jnp.array([[0.0, 1.0]]), "labels": jnp.array([0])}
    for _ in range(6):
        step(confusion, one)
    assert confusion.compute()[0, 1] == 2**24 + 6


def test_targets_far_from_zero_lose_no_digits():
    targets = random.normal(1000, 0.1, 2048).astype(np.float32)
    predictions = (targets + random.normal(0, 0.05, 2048)).astype(np.float32)
    score = metrics.R2Score()
    for rows in (slice(0, 64), slice(64, None)):
        score.update(predictions=predictions[rows], targets=targets[rows])
    expected = sklearn.r2_score(targets.astype(float), predictions.astype(float))
    np.testing.assert_allclose(score.compute(), expected, rtol=1e-5)


@tables.cases("error, expected", (0.0, 1.0), (0.25, 0.0))
@pytest.mark.parametrize("target", [0.5, 0.1])
def test_score_of_equal_targets(target, error, expected):
    targets = np.full(7, target)
    score = metrics.R2Score()
    score.update(predictions=targets + error, targets=targets)
    assert score.compute() == expected
    if target == 0.5:  # the mean of seven times 0.1 is another number
        assert sklearn.r2_score(targets, targets + error) == expected


# ------------------------------------------------------------------ masks and bad input


def test_masks_go_by_the_first_axes():
    predictions, targets = random.normal(size=(2, 3, 3))
    error = metrics.MeanSquaredError()
    mask = np.array([True, False, True])
    error.update(predictions=predictions, targets=targets, mask=mask)
    expected = sklearn.mean_squared_error(targets, predictions, sample_weight=mask)
    np.testing.assert_allclose(error.compute(), expected, rtol=1e-6)


def broken(batch):
    """The batch with three bad rows: a nan, and for labels two that are no class."""
    batch = {name: x.copy() for name, x in batch.items()}
    first, second = batch.values()
    first[0] = np.nan
    if second.dtype == int:
        second[1], second[2] = -1, CLASSES
    return batch


@every
def test_masked_rows_may_hold_anything_and_others_make_the_result_nan(name):
    metric, batch = EVERY[name]
    bad = broken(batch)
    found, expected, spoilt = (nnx.clone(metric) for _ in range(3))
    mask = np.arange(ROWS) >= 3
    found.update(**bad, mask=mask)
    expected.update(**batch, mask=mask)
    np.testing.assert_array_equal(found.compute(), expected.compute())
    for row in range(3 if "labels" in batch else 1):
        spoilt.reset()
        spoilt.update(**bad, mask=np.arange(ROWS) == row)
        assert np.isnan(spoilt.compute()).all()


def test_metrics_without_rows():
    for name in ("mean_squared_error", "r2_score", "perplexity", "roc_auc_score"):
        assert np.isnan(EVERY[name][0].compute())
    assert metrics.F1Score().compute() == 0


def test_metrics_ignore_what_others_read():
    parts = {"error": metrics.MeanAbsoluteError(), "f1": metrics.F1Score(threshold=0.0)}
    both = nnx.MultiMetric(**parts)
    both.update(**TWO, **NUMBERS, loss=1.0, mask={"f1": BINARY == 1})
    found = both.compute()
    np.testing.assert_allclose(found["error"], np.abs(PREDICTIONS - TARGETS).mean())
    recall = (SCORES[BINARY == 1] >= 0).mean()
    np.testing.assert_allclose(found["f1"], 2 * recall / (1 + recall), rtol=1e-6)


@tables.cases(
    "metric, batch, phrase",
    (
        metrics.MeanSquaredError(),
        {"predictions": np.zeros((4, 1)), "targets": np.zeros(4)},
        r"the same shape, got \(4, 1\) and \(4,\)",
    ),
    (
        metrics.MeanSquaredError(),
        {"predictions": np.zeros((4, 2)), "targets": np.zeros((4, 2)), "mask": [1, 0]},
        r"mask for rows of shape \(4, 2\).*got the shape \(2,\)",
    ),
    (metrics.Perplexity(), TWO, "For multi-class classification.*1 and 1"),
    (metrics.RocAuc(), MANY, "For binary classification.*2 and 1"),
    (metrics.Recall(3, average=None), MANY, r"Recall expected.*\(96, 3\).*\(96, 4\)"),
    (
        metrics.RocAuc(),
        {"logits": SCORES, "labels": BINARY[:1]},
        r"RocAuc expected logits of shape \(1,\).*\(96,\)",
    ),
    (metrics.TopKAccuracy(5), MANY, r"TopKAccuracy\(5\).*5 classes.*\(96, 4\)"),
    (metrics.TopKAccuracy(1), {**MANY, "labels": LABELS * 1.0}, "labels.dtype"),
)
def test_batches_that_do_not_fit_are_named_and_nothing_is_added(metric, batch, phrase):
    with pytest.raises(ValueError, match=phrase):
        metric.update(**batch)
    assert all(np.all(x == 0) for x in jax.tree.leaves(nnx.state(metric)))


def test_rows_beyond_what_a_cell_counts_are_refused():
    rows = jax.ShapeDtypeStruct((2**12 + 1, 2**12), jnp.int32)
    with pytest.raises(ValueError, match=r"at most 2\*\*24 rows.*got 16781312"):
        jax.eval_shape(lambda x: metrics.RocAuc().update(logits=x, labels=x), rows)


@tables.cases(
    "make, phrase",
    (lambda: metrics.Precision(3), "Precision expects an average.*'binary' for 3"),
    (lambda: metrics.F1Score(average="mean"), "F1Score expects an average.*'mean'"),
    (lambda: metrics.Recall(3, threshold=0.5), "Recall.*2 if there is a threshold"),
    (lambda: metrics.ConfusionMatrix(1), "num_classes >= 2.*got 1"),
    (lambda: metrics.TopKAccuracy(0), "k >= 1, got 0"),
)
def test_arguments_out_of_range_are_named(make, phrase):
    with pytest.raises(ValueError, match=phrase):
        make()


def test_all_classes_are_the_most_that_top_k_can_look_at():
    accuracy = metrics.TopKAccuracy(4)
    accuracy.update(**MANY)
    assert accuracy.compute() == 1


def test_a_batch_of_which_nothing_counts_changes_no_r2():
    score, x = metrics.R2Score(), jnp.array([1.0, 2.0, 4.0])
    score.update(predictions=x + 0.5, targets=x)
    before = score.compute()
    score.update(predictions=x, targets=x, mask=jnp.zeros(3, bool))
    assert score.compute() == before
