"""Metrics: numbers against NumPy, counters in place, errors that name what is wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx

metrics = nnx.metrics


def counters(metric):
    return {path[-1]: leaf for path, leaf in nnx.to_flat_state(nnx.state(metric))}


# The base class.


def test_base_class_must_be_overridden():
    class Empty(nnx.Metric):
        def __init__(self):
            pass

    with pytest.raises(NotImplementedError, match=r"Must override `__init__\(\)`"):
        nnx.Metric()
    for name in ("reset", "update", "compute"):
        with pytest.raises(NotImplementedError, match=rf"Must override `{name}\(\)`"):
            getattr(Empty(), name)()


# Average.


def test_attributes_stand_in_reading_order():
    def names(metric):
        return [name for name in vars(metric) if not name.startswith("_")]

    assert names(metrics.Average()) == ["argname", "total", "count"]
    assert names(metrics.Accuracy()) == ["threshold", "argname", "total", "count"]
    assert names(metrics.Welford()) == ["argname", "count", "mean", "m2"]


def test_average_of_numbers_and_arrays():
    metric = metrics.Average("loss")
    metric.update(loss=np.array([[1.0, 2.0], [3.0, 4.0]]), unrelated=0)
    metric.update(loss=5)
    metric.update(loss=jnp.array([6, 7], jnp.uint8))
    metric.update(loss=True)
    assert metric.compute() == np.float32((10 + 5 + 13 + 1) / 8)


def test_counters_keep_their_dtypes(float64):
    metric = metrics.Average()
    for values in (jnp.ones(3, jnp.float64), np.ones(3, np.int64), 0.5):
        metric.update(values=values)
    assert metric.total[...].dtype == jnp.float32
    assert metric.count[...].dtype == jnp.int32


def test_average_without_values_is_nan():
    assert np.isnan(metrics.Average().compute())


@pytest.mark.parametrize("dtype", [bool, np.int32, np.float32])
def test_mask_weighs_values(dtype):
    values = np.arange(6.0).reshape(3, 2)
    mask = np.array([[1, 0], [1, 1], [0, 1]], dtype)
    metric = metrics.Average()
    metric.update(values=values, mask=mask)
    assert metric.compute() == np.float32(np.average(values, weights=mask))
    assert metric.count[...] == 4


def test_broadcast_mask_counts_all_it_covers():
    metric = metrics.Average()
    metric.update(values=jnp.arange(6.0).reshape(3, 2), mask=jnp.array([1, 0]))
    assert metric.compute() == 2.0
    assert metric.count[...] == 3


def test_half_precision_is_summed_in_float32():
    values = jnp.full(4096, 1.0078125, jnp.bfloat16)
    metric = metrics.Average()
    metric.update(values=values, mask=jnp.ones(4096, jnp.bfloat16))
    assert metric.compute() == 1.0078125
    assert metric.count[...] == 4096


def test_mask_needs_an_array():
    for metric in (metrics.Average(), metrics.Welford()):
        with pytest.raises(ValueError, match="should be a jax array"):
            metric.update(values=1.0, mask=jnp.ones(1))


def test_missing_values_are_named():
    for metric in (metrics.Average("loss"), metrics.Welford("loss")):
        with pytest.raises(
            TypeError, match="Expected keyword argument 'loss'"
        ) as caught:
            metric.update(losses=1.0)
        assert "'losses'" in str(caught.value)


def test_reset_keeps_variables_shapes_and_dtypes():
    for metric in (metrics.Average(), metrics.Welford()):
        before = counters(metric)
        metric.update(values=jnp.ones(3))
        metric.reset()
        for name, variable in counters(metric).items():
            assert variable is before[name]
            assert variable[...] == 0 and variable.shape == ()


# Accuracy.


def test_accuracy_of_reference_batches():
    metric = metrics.Accuracy()
    logits = jax.random.normal(jax.random.key(0), (5, 2))
    metric.update(logits=logits, labels=jnp.array([0, 1, 1, 1, 0]), extra=1)
    assert metric.compute() == np.float32(0.6)
    logits = jax.random.normal(jax.random.key(1), (5, 2))
    metric.update(logits=logits, labels=np.array([0, 1, 1, 1, 1]))
    assert metric.compute() == np.float32(0.4)


def test_binary_accuracy_of_a_reference_batch():
    metric = metrics.Accuracy(threshold=0.5)
    logits = jax.random.normal(jax.random.key(2), (5,))
    metric.update(logits=logits, labels=jnp.array([0, 1, 0, 1, 1]))
    assert metric.compute() == np.float32(0.8)


def test_accuracy_takes_a_mask_and_an_argname():
    metric = metrics.Accuracy(None, "right")
    logits, labels = jnp.eye(3), jnp.array([0, 2, 2])
    metric.update(logits=logits, labels=labels, mask=jnp.array([True, True, False]))
    assert metric.compute() == 0.5


def test_threshold_must_be_a_float():
    for threshold in (1, "0.5"):
        with pytest.raises(TypeError, match="Expected threshold to be a float"):
            metrics.Accuracy(threshold)


@pytest.mark.parametrize(
    ("threshold", "logits", "labels", "phrase"),
    [
        (
            None,
            (5,),
            jnp.zeros(5, jnp.int32),
            "For multi-class classification.*1 and 1",
        ),
        (0.5, (5, 2), jnp.zeros(5, jnp.int32), "For binary classification.*2 and 1"),
        (None, (5, 2), jnp.zeros(5, jnp.uint8), "Expected labels.dtype==jnp.int32"),
        (0.5, (5,), jnp.zeros(5, bool), "Expected labels.dtype==jnp.int32.*bool"),
        (0.5, (5, 2), jnp.zeros(5), "For binary classification"),
    ],
)
def test_predictions_that_do_not_fit_are_named(threshold, logits, labels, phrase):
    metric = metrics.Accuracy(threshold)
    with pytest.raises(ValueError, match=phrase):
        metric.update(logits=jnp.zeros(logits), labels=labels)


# Welford.


def test_welford_of_reference_batches():
    metric = metrics.Welford()
    metric.update(values=jnp.array([1.0, 2.0, 3.0, 4.0]))
    np.testing.assert_allclose(
        jax.tree.leaves(metric.compute()), (2.5, 0.559017, 1.118034), rtol=1e-6
    )
    metric.update(values=jnp.array([3.0, 2.0, 1.0, 0.0]))
    np.testing.assert_allclose(
        jax.tree.leaves(metric.compute()), (2.0, 0.43301272, 1.2247449), rtol=1e-6
    )


def test_welford_of_many_batches_against_numpy():
    # A mean far from zero: a difference of sums of squares would lose all digits.
    batches = np.random.default_rng(0).normal(1000.0, 0.1, (50, 4, 5))
    metric = metrics.Welford()
    for batch in batches[:-1]:
        metric.update(values=jnp.array(batch))
    for value in batches[-1].flatten().tolist():
        metric.update(values=value)
    result = metric.compute()
    np.testing.assert_allclose(result.mean, batches.mean(), rtol=1e-6)
    np.testing.assert_allclose(result.standard_deviation, batches.std(), rtol=1e-3)
    np.testing.assert_allclose(
        result.standard_error_of_mean, batches.std() / np.sqrt(1000), rtol=1e-3
    )


def test_welford_honours_a_mask():
    values, mask = np.array([1.0, 2.0, 6.0, 9.0]), np.array([True, True, True, False])
    metric = metrics.Welford()
    metric.update(values=values, mask=mask)
    metric.update(values=values, mask=np.zeros(4, bool))
    np.testing.assert_allclose(metric.compute().mean, 3.0, rtol=1e-6)
    np.testing.assert_allclose(
        metric.compute().standard_deviation, values[:3].std(), rtol=1e-6
    )
    assert metric.count[...] == 3


def test_welford_without_values():
    result = metrics.Welford().compute()
    assert result.mean == 0
    assert np.isnan(result.standard_deviation)
    assert np.isnan(result.standard_error_of_mean)


def test_statistics_are_a_frozen_pytree():
    result = metrics.Statistics(1.0, 2.0, 3.0)
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(result)]
    assert paths == [".mean", ".standard_error_of_mean", ".standard_deviation"]
    assert result.replace(mean=4.0) == metrics.Statistics(4.0, 2.0, 3.0)
    with pytest.raises(AttributeError):
        result.mean = 0.0


# Several metrics at once.


def test_multi_metric_gives_every_keyword_to_every_metric():
    metric = nnx.MultiMetric(loss=metrics.Average(), accuracy=metrics.Accuracy())
    metric.update(values=3.0, logits=jnp.eye(2), labels=jnp.array([0, 0]))
    assert list(metric.compute().items()) == [("loss", 3.0), ("accuracy", 0.5)]
    metric.reset()
    assert metric.loss.count[...] == 0
    assert nnx.MultiMetric().compute() == {}


def test_nested_multi_metric_gives_a_nested_dict():
    metric = nnx.MultiMetric(train=nnx.MultiMetric(loss=metrics.Average()))
    metric.update(values=2.0)
    assert metric.compute() == {"train": {"loss": 2.0}}


def test_masks_go_to_all_metrics_or_to_each_its_own():
    values, mask = jnp.array([1.0, 3.0]), jnp.array([True, False])
    metric = nnx.MultiMetric(a=metrics.Average(), b=metrics.Average())
    masks = {"a": mask}
    metric.update(values=values, mask=masks)
    assert metric.compute() == {"a": 1.0, "b": 2.0}
    assert list(masks) == ["a"]
    metric.reset()
    metric.update(values=values, mask=mask)
    assert metric.compute() == {"a": 1.0, "b": 1.0}


def test_metrics_without_mask_are_not_given_one():
    class Counter(nnx.Metric):
        def __init__(self):
            self.calls = metrics.MetricState(jnp.array(0))

        def update(self, *, values):
            self.calls[...] += 1

        def compute(self):
            return self.calls[...]

    metric = nnx.MultiMetric(calls=Counter(), mean=metrics.Average())
    for mask in (None, {"mean": jnp.ones(1), "calls": None}):
        metric.update(values=jnp.ones(1), mask=mask)
    assert metric.compute()["calls"] == 2


def test_names_of_methods_are_refused():
    for name in ("update", "reset", "compute", "split"):
        with pytest.raises(ValueError, match=f"can't be named '{name}'"):
            nnx.MultiMetric(**{name: metrics.Average()})
    with pytest.raises(TypeError):
        nnx.MultiMetric(metrics.Average())


# In transforms.


def make_metrics():
    return nnx.MultiMetric(mean=metrics.Average(), spread=metrics.Welford())


def test_split_metric_is_that_of_the_library_and_runs_under_plain_jit():
    metric = make_metrics()
    graphdef, state = metric.split(metrics.MetricState)
    assert nnx.merge(graphdef, state).spread.count is metric.spread.count

    @jax.jit
    def step(graphdef, state, values):
        metric = nnx.merge(graphdef, state)
        metric.update(values=values)
        return metric.split()

    found = nnx.merge(*step(graphdef, state, jnp.arange(5.0))).compute()
    metric.update(values=jnp.arange(5.0))
    expected = jax.tree.leaves(metric.compute())
    np.testing.assert_allclose(jax.tree.leaves(found), expected, rtol=1e-6)


def test_vmapped_metric_stays_vectorized():
    graphdef, state = metrics.Average().split()
    state = jax.tree.map(lambda x: jnp.zeros((3,), x.dtype), state)

    def step(state, values):
        metric = nnx.merge(graphdef, state)
        metric.update(values=values)
        return nnx.state(metric)

    metric = nnx.merge(graphdef, jax.vmap(step)(state, jnp.arange(6.0).reshape(3, 2)))
    np.testing.assert_array_equal(metric.compute(), [0.5, 2.5, 4.5])
    metric.reset()
    assert metric.total.shape == (3,)


@pytest.mark.peers
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_numbers_are_those_of_the_peer(dtype):
    flax_nnx = pytest.importorskip("flax.nnx")
    rng = np.random.default_rng(0)
    ours = nnx.MultiMetric(
        a=metrics.Average(), b=metrics.Welford(), c=metrics.Accuracy()
    )
    theirs = flax_nnx.MultiMetric(
        a=flax_nnx.metrics.Average(),
        b=flax_nnx.metrics.Welford(),
        c=flax_nnx.metrics.Accuracy(),
    )
    for _ in range(4):
        batch = {
            "values": jnp.array(rng.integers(-8, 8, (4, 3)).astype(dtype)),
            "logits": jnp.array(rng.normal(size=(6, 4)), jnp.float32),
            "labels": jnp.array(rng.integers(0, 4, 6)),
        }
        ours.update(**batch)
        theirs.update(**batch)
    np.testing.assert_allclose(
        jax.tree.leaves(ours.compute()), jax.tree.leaves(theirs.compute()), rtol=1e-4
    )
