"""Functions that run on each device of a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import graftree as nnx
from tests import zoo
from tests.modes import GRAPH_UPDATES

MESH = Mesh(np.array(jax.devices()), ("data",))
MODEL_MESH = Mesh(np.array(jax.devices()), ("model",))


def mlp():
    """Two layers, of which a device has eight hidden features."""
    rngs = nnx.Rngs(0)
    linear1 = nnx.Linear(2, 64, use_bias=False, rngs=rngs)
    return zoo.Box(
        linear1=linear1, linear2=nnx.Linear(64, 3, use_bias=False, rngs=rngs)
    )


def run(model, x):
    return model.linear2(nnx.relu(model.linear1(x)))


def path_ends_with(*suffix):
    return lambda path, value: path[-len(suffix) :] == suffix


BY_PATH = {
    path_ends_with("linear1", "kernel"): P(None, "model"),
    path_ends_with("linear2", "kernel"): P("model", None),
}


def on_mesh(mode, in_specs, out_specs, **options):
    return nnx.shard_map(
        mesh=MESH, in_specs=in_specs, out_specs=out_specs, **options, **mode
    )


@pytest.mark.parametrize("spec", [P(None), P()], ids=str)
def test_data_are_split_among_the_devices(mode, spec):
    model, x = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((32, 2))
    shapes = []

    @on_mesh(mode, (spec, P("data")), P("data"))
    def apply(model, x):
        shapes.append(x.shape)
        return model(x)

    y = apply(model, x)
    assert shapes == [(4, 2)] and y.sharding == NamedSharding(MESH, P("data"))
    np.testing.assert_allclose(y, x @ model.kernel[...], rtol=1e-6)


@pytest.mark.parametrize(
    "spec",
    [
        nnx.StateSharding(BY_PATH),
        nnx.StateSharding(
            nnx.State(
                {
                    "linear1": {"kernel": P(None, "model")},
                    "linear2": {"kernel": P("model", None)},
                }
            )
        ),
    ],
    ids=["filters", "state"],
)
def test_a_model_is_split_by_state_sharding(spec):
    model, x = mlp(), jnp.ones((32, 2))
    expected = run(model, x)

    @nnx.shard_map(mesh=MODEL_MESH, in_specs=(spec, P(None)), out_specs=P(None))
    def apply(model, x):
        assert model.linear1.kernel.shape == (2, 8)
        return jax.lax.psum(run(model, x), "model")

    np.testing.assert_allclose(apply(model, x), expected, rtol=1e-5)
    specs = [model.linear1.kernel[...].sharding, model.linear2.kernel[...].sharding]
    assert specs == [
        NamedSharding(MODEL_MESH, P(None, "model")),
        NamedSharding(MODEL_MESH, P("model", None)),
    ]


def test_a_model_is_split_by_a_prefix(value_mode):
    model, x = mlp(), jnp.ones((32, 2))
    expected = run(model, x)
    before = model.linear1.kernel[...].sharding
    prefix = nnx.prefix(model, BY_PATH, graph=value_mode["graph"])
    specs = {"in_specs": (prefix, P()), "out_specs": P()}

    @nnx.shard_map(mesh=MODEL_MESH, **specs, **value_mode)
    def apply(model, x):
        y = jax.lax.psum(run(model, x), "model")
        model.linear2.kernel[...] *= 2
        return y

    np.testing.assert_allclose(apply(model, x), expected, rtol=1e-5)
    changed = NamedSharding(MODEL_MESH, P("model", None))
    assert model.linear2.kernel[...].sharding == changed
    assert model.linear1.kernel[...].sharding == before


def test_new_objects_are_put_together_from_their_parts(mode):
    @on_mesh(mode, P("data"), (P("data"), P()))
    def make(x):
        return nnx.Param(2 * x), nnx.Param(jax.lax.psum(x, "data"))

    parts, total = make(jnp.arange(8.0))
    np.testing.assert_array_equal(parts[...], 2 * np.arange(8.0))
    np.testing.assert_array_equal(total[...], [28.0])


def test_new_attributes_are_put_together_by_the_spec_of_their_object():
    model = zoo.Box(a=nnx.Param(jnp.ones((2, 8))))

    @on_mesh(GRAPH_UPDATES, P(None, "data"), None)
    def add(model):
        model.new = nnx.Param(2 * model.a[...])

    add(model)
    assert model.new[...].sharding == NamedSharding(MESH, P(None, "data"))
    np.testing.assert_array_equal(model.new[...], np.full((2, 8), 2.0))


def test_unchanged_variables_come_back_sharded_with_graph_updates_only(mode):
    variable = nnx.Param(jnp.arange(8.0))
    before = variable[...]
    on_mesh(mode, P("data"), None)(lambda variable: None)(variable)
    if mode is GRAPH_UPDATES:
        assert variable[...].sharding == NamedSharding(MESH, P("data"))
    else:
        assert variable[...] is before
    np.testing.assert_array_equal(variable[...], np.arange(8.0))


def test_no_spec_is_the_empty_spec(mode):
    scale, x = nnx.Param(jnp.array(2.0)), jnp.arange(8.0)

    @on_mesh(mode, (None, P("data"), P()), (P("data"), None))
    def multiply(scale, x, nothing):
        return scale[...] * x, nothing

    y, nothing = multiply(scale, x, None)
    np.testing.assert_array_equal(y, 2 * x)
    assert nothing is None
    assert on_mesh(mode, [P()], None)(lambda scale: scale[...] + 1)(scale) == 3


def test_aliases_with_equal_specs_stay_aliases(graph_mode):
    variable = nnx.Param(jnp.arange(8.0))

    @on_mesh(graph_mode, (P("data"), P("data")), None)
    def add(first, second):
        assert first is second
        first[...] += 1

    add(variable, variable)
    np.testing.assert_array_equal(variable[...], np.arange(1.0, 9.0))


def test_aliases_with_other_specs_are_refused(graph_mode):
    variable = nnx.Param(jnp.arange(8.0))
    phrase = r"(?s)Inconsistent aliasing detected.*in nnx.shard_map:.*0: P.*1: P"
    with pytest.raises(ValueError, match=phrase):
        on_mesh(graph_mode, (P("data"), P()), None)(lambda a, b: a + b)(
            variable, variable
        )


def test_specs_that_do_not_fit_are_named(mode):
    double = on_mesh(mode, (P("data"), P()), P("data"))(lambda x: 2 * x)
    with pytest.raises(ValueError, match="`in_specs` of nnx.shard_map must be a tree"):
        double(jnp.ones(8))


def test_outputs_are_checked_for_replication(mode):
    with pytest.raises(ValueError, match="out_specs which require replication"):
        on_mesh(mode, P("data"), P())(lambda x: x)(jnp.ones(8))
    first = on_mesh(mode, P("data"), P(), check_vma=False)(lambda x: x)(jnp.arange(8.0))
    assert first.shape == (1,)


def test_some_axes_of_the_mesh_stay_automatic(mode):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    shapes = []

    @nnx.jit(**mode)
    @nnx.shard_map(
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        axis_names={"data"},
        **mode,
    )
    def double(x):
        shapes.append(x.shape)
        return 2 * x

    np.testing.assert_array_equal(double(jnp.ones(8)), np.full(8, 2.0))
    assert shapes == [(4,)]


def test_a_step_of_training_runs_inside(mode):
    model = nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0))
    kernel, x = model.kernel[...], jnp.arange(16.0).reshape(8, 2)

    @nnx.jit(**mode)
    @on_mesh(mode, (P(), P("data")), P())
    def step(model, x):
        def loss(model):
            return jax.lax.pmean(jnp.mean(model(x)), "data")

        value, grads = nnx.value_and_grad(loss, **mode)(model)
        gradient = nnx.state(grads)["kernel"][...]
        model.kernel[...] -= gradient
        return value

    np.testing.assert_allclose(step(model, x), jnp.mean(x @ kernel), rtol=1e-6)
    expected = kernel - jnp.mean(x, 0)[:, None]
    np.testing.assert_allclose(model.kernel[...], expected, rtol=1e-5)


def test_inner_is_the_function_of_jax():
    double = on_mesh({}, P("data"), P("data"))(lambda x: 2 * x)
    assert callable(double.inner) and double.inner is not double
