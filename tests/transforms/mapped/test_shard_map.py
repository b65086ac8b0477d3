"""Functions that run on each device of a mesh.

Models that are split by filters and by states are in the examples of the reference
page, `tests/contract/test_transforms/test_seeds.py`.
"""

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
SPLIT = NamedSharding(MESH, P("data"))
NUMBERS = np.arange(8.0, dtype=np.float32)


def on_mesh(mode, in_specs, out_specs, **options):
    return nnx.shard_map(
        mesh=MESH, in_specs=in_specs, out_specs=out_specs, **options, **mode
    )


def test_a_model_is_split_by_a_prefix(value_mode):
    model = zoo.Box(up=nnx.Param(NUMBERS + 1), down=nnx.Param(NUMBERS))
    before = model.up.get_value()
    prefix = nnx.prefix(
        model,
        {nnx.PathContains("up"): P("data"), ...: SPLIT.spec},
        graph=value_mode["graph"],
    )

    @on_mesh(value_mode, (prefix, P()), P())
    def apply(model, x):
        assert model.up.shape == model.down.shape == (1,)
        y = jax.lax.psum(model.up * model.down * x, "data")
        model.down[...] *= 2
        return y

    np.testing.assert_array_equal(apply(model, 2.0), [2 * 168.0])
    assert model.down[...].sharding == SPLIT and model.up.get_value() is before


def test_new_objects_are_put_together_from_their_parts(mode):
    @on_mesh(mode, P("data"), (P("data"), P()))
    def make(x):
        return nnx.Param(2 * x), nnx.Param(jax.lax.psum(x, "data"))

    parts, total = make(NUMBERS)
    np.testing.assert_array_equal(parts[...], 2 * NUMBERS)
    np.testing.assert_array_equal(total[...], [28.0])


def test_new_attributes_are_put_together_by_the_spec_of_their_object():
    model = zoo.Box(a=nnx.Param(np.ones((2, 8))))

    @on_mesh(GRAPH_UPDATES, P(None, "data"), None)
    def add(model):
        model.new = nnx.Param(2 * model.a[...])

    add(model)
    assert model.new[...].sharding == NamedSharding(MESH, P(None, "data"))
    np.testing.assert_array_equal(model.new[...], np.full((2, 8), 2.0))


def test_unchanged_variables_come_back_sharded_with_graph_updates_only(mode):
    variable = nnx.Param(jnp.asarray(NUMBERS))
    before = variable[...]
    on_mesh(mode, P("data"), None)(lambda variable: None)(variable)
    if mode is GRAPH_UPDATES:
        assert variable[...].sharding == SPLIT
    else:
        assert variable[...] is before
    np.testing.assert_array_equal(variable[...], NUMBERS)


def test_no_spec_is_the_empty_spec(mode):
    scale = nnx.Param(jnp.array(2.0))

    @on_mesh(mode, (None, P("data"), P()), (P("data"), None))
    def multiply(scale, x, nothing):
        assert x.shape == (1,)
        return scale[...] * x, nothing

    y, nothing = multiply(scale, NUMBERS, None)
    np.testing.assert_array_equal(y, 2 * NUMBERS)
    assert y.sharding == SPLIT and nothing is None
    assert on_mesh(mode, [P()], None)(lambda scale: scale[...] + 1)(scale) == 3


def test_aliases_with_other_specs_are_refused(graph_mode):
    variable = nnx.Param(NUMBERS)
    phrase = r"(?s)Inconsistent aliasing detected.*in nnx.shard_map:.*0: P.*1: P"
    with pytest.raises(ValueError, match=phrase):
        on_mesh(graph_mode, (P("data"), P()), None)(lambda a, b: a + b)(
            variable, variable
        )


def test_specs_that_do_not_fit_are_named(mode):
    double = on_mesh(mode, (P("data"), P()), P("data"))(lambda x: 2 * x)
    with pytest.raises(ValueError, match="`in_specs` of nnx.shard_map must be a tree"):
        double(NUMBERS)


def test_outputs_are_checked_for_replication(mode):
    with pytest.raises(ValueError, match="out_specs which require replication"):
        on_mesh(mode, P("data"), P())(lambda x: x)(NUMBERS)
    first = on_mesh(mode, P("data"), P(), check_vma=False)(lambda x: x)(NUMBERS)
    assert first.shape == (1,)


def test_some_axes_of_the_mesh_stay_automatic(mode):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    specs = {"in_specs": SPLIT.spec, "out_specs": SPLIT.spec}

    @nnx.jit(**mode)
    @nnx.shard_map(mesh=mesh, axis_names={"data"}, **specs, **mode)
    def double(x):
        assert x.shape == (4,)
        return 2 * x

    np.testing.assert_array_equal(double(NUMBERS), 2 * NUMBERS)


def test_a_step_of_training_runs_inside(mode):
    model, x = zoo.Scale(3.0), NUMBERS

    @nnx.jit(**mode)
    @on_mesh(mode, (P(), P("data")), P())
    def step(model, x):
        def loss(model):
            return jax.lax.pmean(jnp.mean(model(x)), "data")

        value, grads = nnx.value_and_grad(loss, **mode)(model)
        model.w[...] -= nnx.state(grads)["w"][...]
        return value

    assert step(model, x) == 3 * 3.5 and model.w[...] == 3 - 3.5


def test_inner_is_the_function_of_jax():
    double = on_mesh({}, P("data"), P("data"))(lambda x: 2 * x)
    assert callable(double.inner) and double.inner is not double
