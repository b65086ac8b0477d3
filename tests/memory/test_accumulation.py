"""Gradients by parts are those of the whole batch, and need the memory of a part."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import graftree as nnx
from tests.modes import MODES

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(32, 8)).astype("float32")
BATCH = {"x": X, "y": X[:, :2]}


class Net(nnx.Module):
    def __init__(self, width=16):
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(8, width, rngs=rngs)
        self.down = nnx.Linear(width, 2, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1
        return self.down(jnp.tanh(self.up(x)))


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def assert_equal_trees(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("has_aux", [False, True])
def test_value_and_gradients_are_those_of_the_batch(has_aux, is_compiled):
    def loss(model, batch):
        return (loss_fn(model, batch), batch["x"]) if has_aux else loss_fn(model, batch)

    model = Net()
    value, grads = nnx.value_and_grad(loss, has_aux=has_aux)(Net(), BATCH)
    by_parts = nnx.memory.value_and_grad(loss, 4, has_aux=has_aux)
    found, of_parts = (nnx.jit(by_parts) if is_compiled else by_parts)(model, BATCH)
    if has_aux:
        (found, rows), (value, _) = found, value
        # A part has every fourth row.
        np.testing.assert_array_equal(rows[1], X[1::4])
    assert_equal_trees((found, of_parts), (value, grads))
    assert model.calls[...] == 4


@MODES
def test_other_arguments_are_whole_or_objects(mode):
    # Without graph updates, gradients have the form of what is differentiated.
    def loss(weight, x, factor, counts):
        counts["calls"][...] += 1
        return jnp.mean(x * weight) * factor

    counts = {"calls": nnx.Variable(jnp.array(0))}
    with nnx.set_graph_mode(mode.get("graph", True)):
        by_parts = nnx.memory.value_and_grad(loss, 2, whole=[2])
        value, grads = by_parts(jnp.array(3.0), X, jnp.array(2.0), counts)
    np.testing.assert_allclose(grads, 2 * X.mean(), rtol=1e-4)
    np.testing.assert_allclose(value, 6 * X.mean(), rtol=1e-4)
    assert counts["calls"][...] == 2


def test_half_precision_is_summed_in_float32():
    def loss(weight, x):
        return jnp.mean(weight * x)

    # In bfloat16, 256 + 1 is 256.
    x = jnp.concatenate([jnp.full(1, 256.0), jnp.ones(255)]).astype(jnp.bfloat16)
    weight = jnp.ones((), jnp.bfloat16)
    _, grad = nnx.memory.value_and_grad(loss, 256)(weight, x)
    assert grad.dtype == jnp.bfloat16
    assert grad == jnp.bfloat16((256 + 255) / 256)


def test_memory_is_that_of_a_part():
    model, x = Net(512), np.zeros((1024, 8), "float32")
    batch = {"x": x, "y": x[:, :2]}

    def temporaries(f):
        return (
            nnx.jit(f)
            .lower(model, batch)
            .compile()
            .memory_analysis()
            .temp_size_in_bytes
        )

    whole = temporaries(nnx.value_and_grad(loss_fn))
    parts = temporaries(nnx.memory.value_and_grad(loss_fn, 32))
    num_params = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert parts < whole / 32 + 3 * 4 * num_params < whole


def test_a_divided_batch_stays_where_it_is():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("data"))
    batch = jax.device_put(BATCH, rows)
    model = Net()
    nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(mesh, P())))
    step = nnx.jit(nnx.memory.value_and_grad(loss_fn, 4))
    text = step.lower(model, batch).compile().as_text()
    assert "all-reduce" in text
    assert not any(word in text for word in ("all-gather", "all-to-all", "permute"))
    assert_equal_trees(step(model, batch), nnx.value_and_grad(loss_fn)(Net(), BATCH))


def test_batches_that_can_not_be_parted_are_refused():
    by_parts = nnx.memory.value_and_grad(loss_fn, 5)
    with pytest.raises(
        ValueError, match=r"5 parts.\n  args\[1\]\['x'\]: shape \(32, 8\)"
    ):
        by_parts(Net(), BATCH)
    with pytest.raises(ValueError, match="no argument has arrays"):
        nnx.memory.value_and_grad(lambda model: 0.0, 5)(Net())
