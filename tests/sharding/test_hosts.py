"""Arrays of all processes; tests/examples runs several of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import graftree as nnx

KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])


def sharding_of(kind, spec):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
    return jax.NamedSharding(mesh, spec)


@KINDS
def test_rows_are_divided_among_the_devices(kind):
    batch = {"x": np.arange(32.0).reshape(16, 2), "y": [np.arange(8)]}
    placed = nnx.sharding.global_batch(batch, sharding_of(kind, P(("data", "model"))))
    assert placed["x"].sharding.shard_shape((16, 2)) == (2, 2)
    np.testing.assert_array_equal(placed["x"], batch["x"])
    np.testing.assert_array_equal(placed["y"][0], batch["y"][0])


@KINDS
@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"x": np.ones((7, 3))}, r"x has 7 rows .* its 2 parts of the axis data"),
        ([np.ones(8), {"y": np.ones(3)}], r"\[1\].y has 3 rows"),
        (np.ones(3), "the batch has 3 rows in this process, no multiple of its 2"),
        (np.float32(1), r"the batch has the shape \(\), and .* for 1 axes"),
        ({"s": "text", "x": np.ones(3)}, r"s has the dtype <U4.*\n  x has 3 rows"),
        ({"n": [None, object()]}, r"n\[1\] has the dtype object"),
        ({"k": jax.random.split(jax.random.key(0), 3)}, "k has 3 rows"),
        ({"k": jax.random.key(0)}, r"k has the shape \(\)"),
    ],
)
def test_rows_that_can_not_be_divided_are_named(kind, batch, words):
    with pytest.raises(ValueError, match=words):
        nnx.sharding.global_batch(batch, sharding_of(kind, P("data")))


@KINDS
def test_metrics_and_models_are_read_whole(kind):
    batch = nnx.sharding.global_batch(np.arange(8.0), sharding_of(kind, P("model")))
    metric = nnx.metrics.MultiMetric(
        loss=nnx.metrics.Average(), spread=nnx.metrics.Welford()
    )
    nnx.jit(lambda metric, x: metric.update(values=x))(metric, batch)
    found = nnx.sharding.fetch(metric.compute())
    assert found["loss"].item() == 3.5 and isinstance(found["loss"], np.ndarray)
    np.testing.assert_allclose(found["spread"].standard_deviation, np.arange(8.0).std())
    np.testing.assert_array_equal(nnx.sharding.fetch(batch), np.arange(8.0))


@KINDS
@pytest.mark.parametrize("shape", [(4, 6), (4, 7, 1), (3, 8), (4,)])
def test_all_axes_of_the_sharding_are_checked(kind, shape):
    sharding = sharding_of(kind, P("data", "model"))
    with pytest.raises(ValueError, match="x has .*axis 1 |x has 3 rows|for 2 axes"):
        nnx.sharding.global_batch({"x": np.ones(shape)}, sharding)
    placed = nnx.sharding.global_batch({"x": np.ones((4, 8, 3))}, sharding)["x"]
    assert placed.sharding.shard_shape(placed.shape) == (2, 2, 3)


@KINDS
@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_random_keys_are_rows_too(kind, implementation):
    keys = jax.random.split(jax.random.key(0, impl=implementation), 8)
    placed = nnx.sharding.global_batch({"k": keys}, sharding_of(kind, P("model")))["k"]
    assert placed.sharding.shard_shape((8,)) == (2,) and placed.dtype == keys.dtype
    assert (nnx.sharding.fetch(placed) == keys).all()


def test_what_is_no_array_is_fetched_as_it_is():
    thing = object()
    tree = {"loss": jnp.ones(2), "name": "a", "n": 3, "none": None, "thing": thing}
    tree |= {"flag": True, "half": jnp.ones(1, jnp.bfloat16), "key": jax.random.key(0)}
    found = nnx.sharding.fetch(tree)
    assert found["name"] == "a" and found["thing"] is thing and found["none"] is None
    for name in ("loss", "n", "flag", "half"):
        assert isinstance(found[name], np.ndarray), name
    assert found["key"] == tree["key"] and found["half"].dtype == jnp.bfloat16
