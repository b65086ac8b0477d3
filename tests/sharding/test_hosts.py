"""Arrays of all processes; tests/examples runs several of them."""

import jax
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
    spec = P(("data", "model"))
    placed = nnx.sharding.global_batch(batch, sharding_of(kind, spec))
    assert placed["x"].sharding.shard_shape((16, 2)) == (2, 2)
    np.testing.assert_array_equal(placed["x"], batch["x"])
    np.testing.assert_array_equal(placed["y"][0], batch["y"][0])


@KINDS
@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"x": np.ones((7, 3))}, r"x has 7 rows .* its 2 parts of the axis data"),
        ([np.ones(8), {"y": np.ones(3)}], r"\[1\].y has 3 rows"),
        (np.ones(3), "the batch has 3 rows.*can't divide"),
        (np.float32(1), r"the batch has the shape \(\)"),
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
