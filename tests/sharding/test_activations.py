"""Values placed inside of a model, by the names of their axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import graftree as nnx

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
KINDS = pytest.mark.parametrize("kinds", [(AUTO, AUTO), (EXPLICIT, EXPLICIT)], ids=str)
ALL_KINDS = pytest.mark.parametrize(
    "kinds", [(AUTO, AUTO), (EXPLICIT, EXPLICIT), (AUTO, EXPLICIT)]
)
RULES = [("batch", "data"), ("mlp", "model"), ("embed", None)]
X = np.arange(32, dtype=np.float32).reshape(8, 4)


def mesh_of(*kinds):
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=kinds)


@pytest.mark.parametrize("compile", [lambda f: f, jax.jit, nnx.jit])
@ALL_KINDS
def test_values_are_kept_and_lie_by_rules_and_mesh_axes(compile, kinds):
    def f(x):
        place = nnx.sharding.constrain
        both = place({"a": x, "b": [2 * x]}, ("batch", "mlp"))
        return both, place(x, ("embed", "model")), place(x, (("data", "mlp"),))

    with jax.set_mesh(mesh_of(*kinds)), nnx.logical_axis_rules(RULES):
        both, second, third = compile(f)(X)
    assert both["a"].sharding.shard_shape(X.shape) == (4, 1)
    assert both["b"][0].sharding.shard_shape(X.shape) == (4, 1)
    assert second.sharding.shard_shape(X.shape) == (8, 1)
    assert third.sharding.shard_shape(X.shape) == (1, 4)
    for found, factor in ((both["a"], 1), (both["b"][0], 2), (second, 1), (third, 1)):
        np.testing.assert_array_equal(found, factor * X)


@KINDS
def test_gradients_pass_backwards_and_are_placed_alike(kinds):
    def loss(x):
        return jnp.sum(nnx.sharding.constrain(x, ("batch", "mlp")) ** 2)

    with jax.set_mesh(mesh_of(*kinds)), nnx.logical_axis_rules(RULES):
        x = nnx.sharding.constrain(X, ("batch", None))
        gradient = jax.jit(jax.grad(loss))(x)
        text = jax.jit(jax.grad(loss)).lower(x).as_text()
    np.testing.assert_array_equal(gradient, 2 * X)
    assert '[{"data"}, {"model"}]' in text


def test_without_a_mesh_nothing_is_done():
    x = jnp.ones(3)
    assert nnx.sharding.constrain(x, ("anything", "else")) is x


@pytest.mark.parametrize("compile", [jax.jit, nnx.jit])
def test_a_compiled_function_follows_the_rules_in_force(compile):
    f = compile(lambda x: nnx.sharding.constrain(x, ("batch",)))
    traces = []
    counted = compile(lambda x: (traces.append(0), f(x))[1])
    with jax.set_mesh(mesh_of(AUTO, AUTO)):
        for axis in ("data", "model", None, "data", "model"):
            with nnx.logical_axis_rules([["batch", axis]]):
                assert counted(X).sharding.is_equivalent_to(
                    jax.NamedSharding(mesh_of(AUTO, AUTO), P(axis)), 2
                )
    assert len(traces) == 3


def test_axes_of_a_shard_map_are_left_out():
    @jax.shard_map(
        mesh=mesh_of(AUTO, AUTO),
        in_specs=P("data"),
        out_specs=P("data"),
        axis_names={"data"},
    )
    def f(x):
        return 2 * nnx.sharding.constrain(x, ("batch", "mlp"))

    with jax.set_mesh(mesh_of(AUTO, AUTO)), nnx.logical_axis_rules(RULES):
        found = jax.jit(f)(X)
    np.testing.assert_array_equal(found, 2 * X)
    assert found.sharding.shard_shape(X.shape) == (4, 1)


@KINDS
@pytest.mark.parametrize(
    ("names", "shape", "words"),
    [
        (("batch", "depth"), (8, 4), "'depth' means 'depth', no axis of the mesh"),
        (("batch", "heads"), (8, 4), "'heads' means 'tensor', no axis"),
        (("batch", "depth"), (8, 4), "axes of the mesh: 'data' of 2, 'model' of 4"),
        (("batch", "depth"), (8, 4), "rules in force: 'batch' -> 'data', 'heads' ->"),
        (("batch", "data"), (8, 4), "'batch' and 'data' both stand for the axis"),
        (("batch", None, None), (8, 4), r"3 names .* for the shape \(8, 4\)"),
        (("batch",), (7, 4), r"axis 0 \('batch'\) has the size 7"),
        (("batch",), (7, 4), r"2 devices can't divide \(axis data of the mesh\)"),
        (("batch",), (7, 4), r"at x\[0\]\n  array of shape \(7, 4\)"),
    ],
)
def test_what_does_not_fit_is_refused(kinds, names, shape, words):
    rules = nnx.logical_axis_rules([("batch", "data"), ("heads", "tensor")])
    with jax.set_mesh(mesh_of(*kinds)), rules, pytest.raises(ValueError, match=words):
        nnx.sharding.constrain({"x": [jnp.ones(shape)]}, names)


def test_a_string_is_refused():
    with jax.set_mesh(mesh_of(AUTO, AUTO)), pytest.raises(TypeError, match="'data',"):
        nnx.sharding.constrain(X, "data")
