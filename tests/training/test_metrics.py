"""Metrics: numbers against NumPy, counters in place, errors that name what is wrong.

At the end `EMA`, averages of parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import meshes, tables
from tests.comparisons import raises

metrics = nnx.metrics


BOTH = (metrics.Average, metrics.Welford)


def updated(metric, *batches):
    """A metric that has seen some batches."""
    for batch in batches:
        metric.update(**batch)
    return metric


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


def test_average_of_numbers_and_arrays():
    values = np.array([[1.0, 2.0], [3.0, 4.0]]), 5, jnp.array([6, 7], jnp.uint8), True
    given = ({"loss": x, "other": 0} for x in values)
    metric = updated(metrics.Average("loss"), *given)
    assert metric.compute() == np.float32((10 + 5 + 13 + 1) / 8)


def test_counters_keep_their_dtypes(float64):
    values = jnp.ones(3, jnp.float64), np.ones(3, np.int64), 0.5
    metric = updated(metrics.Average(), *({"values": x} for x in values))
    assert metric.total[...].dtype == jnp.float32
    assert metric.count[...].dtype == jnp.int32


@pytest.mark.parametrize("dtype", [bool, np.int32, np.float32])
def test_mask_weighs_values(dtype):
    values = np.arange(6.0).reshape(3, 2)
    mask = np.array([[1, 0], [1, 1], [0, 1]], dtype)
    metric = updated(metrics.Average(), {"values": values, "mask": mask})
    assert metric.compute() == np.float32(np.average(values, weights=mask))
    assert metric.count[...] == 4


@pytest.mark.parametrize("hidden", [np.nan, np.inf])
def test_values_that_do_not_count_may_be_anything(hidden):
    batch = {"values": np.array([1.0, 3.0, hidden]), "mask": np.array([1, 1, 0])}
    assert updated(metrics.Average(), batch).compute() == 2.0
    found = updated(metrics.Welford(), batch).compute()
    assert (found.mean, found.standard_deviation) == (2.0, 1.0)


def test_broadcast_mask_counts_all_it_covers():
    values = np.arange(6.0, dtype=np.float32).reshape(3, 2)
    batch = {"values": values, "mask": np.array([1, 0])}
    metric = updated(metrics.Average(), batch)
    assert (metric.compute(), metric.count[...]) == (2.0, 3)


def test_half_precision_is_summed_in_float32():
    ones = jnp.asarray(np.ones(4096), jnp.bfloat16)
    metric = updated(metrics.Average(), {"values": ones * 1.0078125, "mask": ones})
    assert (metric.compute(), metric.count[...]) == (1.0078125, 4096)


@pytest.mark.parametrize("make", BOTH)
def test_values_are_named_and_masks_are_for_arrays(make):
    with pytest.raises(ValueError, match="should be a jax array"):
        make().update(values=1.0, mask=jnp.ones(1))
    with pytest.raises(TypeError, match="argument 'loss' of .*got.* 'losses'"):
        make("loss").update(losses=1.0)


@pytest.mark.parametrize("make", BOTH)
def test_reset_keeps_variables_shapes_and_dtypes(make):
    metric = make()
    before = nnx.to_flat_state(nnx.state(metric))
    updated(metric, {"values": np.ones(3, np.float32)}).reset()
    after = nnx.to_flat_state(nnx.state(metric))
    for (_, old), (_, new) in zip(before, after, strict=True):
        assert new is old and new[...] == 0 and new.shape == ()


# Accuracy.


FIRST = 0, (5, 2), [0, 1, 1, 1, 0]


@tables.cases(
    "threshold, batches, expected",
    (None, [FIRST], 0.6),
    (None, [FIRST, (1, (5, 2), [0, 1, 1, 1, 1])], 0.4),
    (0.5, [(2, (5,), [0, 1, 0, 1, 1])], 0.8),
)
def test_accuracy_of_reference_batches(threshold, batches, expected):
    metric = metrics.Accuracy(threshold)
    for seed, shape, labels in batches:
        logits = jax.random.normal(jax.random.key(seed), shape)
        metric.update(logits=logits, labels=np.array(labels), other=1)
    assert metric.compute() == np.float32(expected)


def test_accuracy_takes_a_mask_and_an_argname():
    batch = {"logits": np.eye(3), "labels": jnp.array([0, 2, 2])}
    mask = np.array([True, True, False])
    metric = updated(metrics.Accuracy(None, "right"), {**batch, "mask": mask})
    assert metric.compute() == 0.5


def test_threshold_must_be_a_float():
    for threshold in (1, "0.5"):
        with pytest.raises(TypeError, match="Expected threshold to be a float"):
            metrics.Accuracy(threshold)


@tables.cases(
    "threshold, logits, labels, phrase",
    (None, (5,), np.zeros(5, int), "For multi-class classification.*1 and 1"),
    (0.5, (5, 2), np.zeros(5, int), "For binary classification.*2 and 1"),
    (None, (5, 2), np.zeros(5, np.uint8), "Expected labels.dtype==jnp.int32"),
    (0.5, (5,), np.zeros(5, bool), "Expected labels.dtype==jnp.int32.*bool"),
    (0.5, (5, 2), np.zeros(5), "For binary classification"),
)
def test_predictions_that_do_not_fit_are_named(threshold, logits, labels, phrase):
    metric = metrics.Accuracy(threshold)
    with pytest.raises(ValueError, match=phrase):
        metric.update(logits=np.zeros(logits, np.float32), labels=labels)


# Welford.


def test_welford_of_many_batches_against_numpy():
    # A mean far from zero: a difference of sums of squares would lose all digits.
    batches = np.random.default_rng(0).normal(1000.0, 0.1, (50, 4, 5))
    each = [*batches[:-1].astype(np.float32), *batches[-1].flatten().tolist()]
    result = updated(metrics.Welford(), *({"values": x} for x in each)).compute()
    np.testing.assert_allclose(result.mean, batches.mean(), rtol=1e-6)
    found = result.standard_deviation, result.standard_error_of_mean
    expected = batches.std(), batches.std() / np.sqrt(1000)
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_welford_honours_a_mask():
    values, mask = np.array([1.0, 2.0, 6.0, 9.0]), np.array([True, True, True, False])
    batches = [{"values": values, "mask": x} for x in (mask, np.zeros(4, bool))]
    metric = updated(metrics.Welford(), *batches)
    found = metric.compute().mean, metric.compute().standard_deviation
    np.testing.assert_allclose(found, (3.0, values[:3].std()), rtol=1e-6)
    assert metric.count[...] == 3


def test_metrics_without_values():
    assert np.isnan(metrics.Average().compute())
    mean, *others = jax.tree.leaves(metrics.Welford().compute())
    assert mean == 0 and np.isnan(others).all()


def test_statistics_are_a_frozen_pytree():
    result = metrics.Statistics(1.0, 2.0, 3.0)
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(result)]
    assert paths == [".mean", ".standard_error_of_mean", ".standard_deviation"]
    assert result.replace(mean=4.0) == metrics.Statistics(4.0, 2.0, 3.0)
    with pytest.raises(AttributeError):
        result.mean = 0.0


# Several metrics at once.


def test_multi_metric_gives_every_keyword_to_every_metric():
    def make(**more):
        parts = {"loss": metrics.Average(), "accuracy": metrics.Accuracy()}
        return nnx.MultiMetric(**parts, **more)

    batch = {"values": 3.0, "logits": np.eye(2), "labels": np.array([0, 0])}
    metric = updated(make(all=make()), batch)
    each = {"loss": 3.0, "accuracy": 0.5}
    assert metric.compute() == {**each, "all": each}
    assert [*metric.compute()] == ["loss", "accuracy", "all"]
    metric.reset()
    assert metric.loss.count[...] == 0 and nnx.MultiMetric().compute() == {}


def test_masks_go_to_all_metrics_or_to_each_its_own():
    values, mask = np.array([1.0, 3.0]), np.array([True, False])
    masks = {"a": mask}
    for given, wanted in ((masks, {"a": 1.0, "b": 2.0}), (mask, {"a": 1.0, "b": 1.0})):
        metric = nnx.MultiMetric(a=metrics.Average(), b=metrics.Average())
        metric.update(values=values, mask=given)
        assert metric.compute() == wanted
    assert list(masks) == ["a"]
    with pytest.raises(ValueError, match="no metric 'A' to mask, only 'a', 'b'"):
        metric.update(values=values, mask={"A": mask})


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


# --------------------------------------------------------------- averages of parameters


def dense():
    return nnx.Dict(
        kernel=nnx.Param(jnp.array([1.0, 2.0]), tag="kernel"),
        mean=nnx.BatchStat(jnp.array([5.0])),
    )


def test_averages_are_copies_of_the_same_type_and_metadata():
    model = dense()
    ema = nnx.EMA(model, 0.9)
    assert isinstance(ema.params, nnx.State)
    for name, kind in (("kernel", nnx.Param), ("mean", nnx.BatchStat)):
        average = ema.params[name]
        assert type(average) is kind and average is not model[name]
        assert average.get_metadata() == model[name].get_metadata()
        pointers = [v[...].unsafe_buffer_pointer() for v in (average, model[name])]
        assert pointers[0] != pointers[1]


def test_updates_against_numpy():
    model, decay = dense(), 0.75
    ema = nnx.EMA(model, decay, only=nnx.Param)
    expected = np.array([1.0, 2.0])
    for step in range(1, 5):
        model.kernel[...] = jnp.array([step, -step], jnp.float32)
        expected = decay * expected + (1 - decay) * np.array([step, -step])
        assert ema.update(model) is None
    np.testing.assert_allclose(ema.params["kernel"][...], expected, rtol=1e-6)


def test_updates_may_be_states_and_pure_dicts():
    model = dense()
    for updates in (
        nnx.state(model),
        nnx.to_pure_dict(nnx.state(model)),
        nnx.as_pure(nnx.state(model)),
    ):
        ema = nnx.EMA(jax.tree.map(jnp.zeros_like, model), 0.5)
        average = ema.params["kernel"]
        ema.update(updates)
        assert ema.params["kernel"] is average
        np.testing.assert_array_equal(average[...], [0.5, 1.0])


def test_bare_arrays_are_refused():
    model = nnx.Dict(a=nnx.Dict(raw=jnp.ones(2)))
    named = "ArrayImpl", "['a']['raw']", "`only`"
    with raises(TypeError, "EMA only supports Variable leaves", *named):
        nnx.EMA(model, 0.9)


def test_other_paths_are_refused_and_nothing_changes():
    ema = nnx.EMA(dense(), 0.5)
    with pytest.raises(ValueError, match="mean"):
        ema.update({"kernel": jnp.zeros(2)})
    np.testing.assert_array_equal(ema.params["kernel"][...], [1.0, 2.0])


def test_integers_and_random_keys_take_the_newest_value():
    count, key = nnx.Variable(jnp.array(3)), nnx.Variable(jax.random.key(0))
    model = nnx.Dict(count=count, key=key)
    ema = nnx.EMA(model, 0.9)
    model.count[...], model.key[...] = jnp.array(4), jax.random.key(1)
    ema.update(model)
    assert ema.params["count"][...] == 4
    assert ema.params["key"][...] == jax.random.key(1)


def test_models_with_random_streams_can_be_followed():
    model = nnx.Dict(rngs=nnx.Rngs(0), kernel=nnx.Param(jnp.ones(2)))
    ema = nnx.EMA(model, 0.9)
    model.rngs()
    ema.update(model)
    assert ema.apply_to(model).rngs() == model.rngs()


def test_half_precision_averages_are_computed_in_float32():
    ema = nnx.EMA([nnx.Param(jnp.array(256.0, jnp.bfloat16))], 0.999)
    ema.update([nnx.Param(jnp.array(256.0, jnp.bfloat16))])
    # 0.999 in bfloat16 is 1: the average would grow by itself.
    assert ema.params[0][...] == 256.0 and ema.params[0][...].dtype == jnp.bfloat16


def test_pytree_values_are_averaged():
    ema = nnx.EMA([nnx.Param({"a": jnp.zeros(2)})], 0.5)
    ema.update([nnx.Param({"a": jnp.ones(2)})])
    np.testing.assert_array_equal(ema.params[0].get_value()["a"], [0.5, 0.5])


def test_apply_to_shares_averages_and_what_is_not_followed():
    model = nnx.Dict(block=dense())
    ema = nnx.EMA(model, 0.5, only=nnx.Param)
    averaged = ema.apply_to(model)
    assert type(averaged) is type(model) and averaged.block is not model.block
    assert averaged.block.kernel is ema.params["block"]["kernel"]
    assert averaged.block.kernel is ema.params.block.kernel
    assert averaged.block.mean is model.block.mean
    ema.update({"block": {"kernel": nnx.Param(jnp.array([3.0, 4.0]))}})
    np.testing.assert_array_equal(averaged.block.kernel[...], [2.0, 3.0])


def test_apply_to_another_structure_is_refused():
    ema = nnx.EMA(dense(), 0.5)
    with raises(ValueError, "lacks Variables", "mean"):
        ema.apply_to(nnx.Dict(kernel=nnx.Param(jnp.ones(2))))


def test_sharing_is_kept_in_graph_mode_and_refused_in_tree_mode():
    weight = nnx.Param(jnp.ones(2))
    model = nnx.Dict(a=weight, b=weight)
    averaged = nnx.EMA(model, 0.5, graph=True).apply_to(model)
    assert averaged.a is averaged.b
    with pytest.raises(ValueError, match="found at paths"):
        nnx.EMA(model, 0.5, graph=False)


def test_update_inside_jit_changes_the_callers_averages():
    model = dense()
    ema = nnx.EMA(model, 0.5)
    update = nnx.jit(lambda model, ema: ema.update(jax.tree.map(jnp.zeros_like, model)))
    update(model, ema)
    np.testing.assert_array_equal(ema.params["kernel"][...], [0.5, 1.0])


def test_copies_have_the_sharding_of_the_model():
    with jax.set_mesh(meshes.mesh_of(x=2)):
        kernel = nnx.Param(jnp.ones(4), out_sharding=("x",))
    ema = nnx.EMA([kernel], 0.5)
    ema.update([kernel])
    assert ema.params[0].sharding == kernel.sharding


@pytest.mark.filterwarnings("ignore:Hooks:UserWarning")
def test_ema_averages_what_is_stored_and_runs_no_hook():
    hooks = {"on_get_value": lambda _, x: 2 * x, "on_set_value": lambda _, x: x / 2}
    model = nnx.Dict(w=nnx.Param(jnp.array(4.0), **hooks))
    ema = nnx.EMA(model, 0.75)
    model.w[...] = jnp.array(16.0)  # stores 8
    ema.update(model)
    assert ema.params["w"].get_raw_value() == 5.0
    assert ema.apply_to(model).w[...] == 10.0
