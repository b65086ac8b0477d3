"""Functions that are computed again on the way back: `remat`, and `name` for it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import graftree as nnx
from tests import zoo
from tests.meshes import mesh_of


def sine(model, x):
    model.count[...] += 1
    return jnp.sin(model.w * x)


def counted(w=2.0):
    return zoo.Box(w=nnx.Param(jnp.asarray(w)), count=nnx.BatchStat(jnp.array(0)))


def test_values_and_gradients_are_those_of_the_function(mode):
    def loss(w, x):
        model = counted(w)
        return nnx.remat(sine, **mode)(model, x), model.count[...]

    (value, count), grad = jax.value_and_grad(loss, has_aux=True)(2.0, 0.3)
    np.testing.assert_allclose((value, grad), (np.sin(0.6), 0.3 * np.cos(0.6)), 1e-6)
    assert count == 1


def test_updates_propagate_once_under_grad(mode):
    model = counted()
    grad = nnx.grad(lambda v, model: v * nnx.remat(sine, **mode)(model, 0.3), **mode)
    found = grad(nnx.Param(jnp.array(2.0)), model)
    np.testing.assert_allclose(found, np.sin(0.6), rtol=1e-6)
    assert model.count[...] == 1


def test_nothing_of_the_way_forward_is_kept():
    def residuals(function):
        _, backward = jax.vjp(function, jnp.ones(3))
        return len(jax.tree.leaves(backward))

    def function(x):
        return jnp.sin(jnp.sin(jnp.sin(x)))

    keep_all = jax.checkpoint_policies.everything_saveable
    assert residuals(nnx.remat(function)) < residuals(function)
    assert residuals(nnx.remat(function, policy=keep_all)) == residuals(function)


def test_options_reach_jax(mode):
    f = nnx.remat(lambda x: x, prevent_cse=False, **mode)
    assert "prevent_cse=False" in str(jax.make_jaxpr(f)(1.0))


def test_static_arguments_of_methods_and_keywords(mode):
    class Power(zoo.Scale):
        @nnx.remat(static_argnums=2, **mode)
        def __call__(self, x, power=2):
            assert type(power) is int  # not traced
            return self.w * x**power

    model = Power(3.0)
    assert model(2.0) == model(x=2.0) == 12.0
    assert model(2.0, 3) == model(2.0, power=3) == 24.0


def test_static_positions_are_checked():
    with pytest.raises(ValueError, match="only accepts 1 positional argument"):
        nnx.remat(lambda x: x, static_argnums=1)
    with pytest.raises(ValueError, match="Non-hashable static arguments"):
        nnx.remat(lambda x, y: x, static_argnums=1)(1.0, [])


# ------------------------------------------------------------- names, for its policies


def test_a_name_is_in_the_program_and_not_in_what_is_compiled():
    def named(x):
        return jnp.sin(nnx.name(x, "x"))

    assert "name=x" in str(jax.make_jaxpr(named)(1.0))
    texts = [jax.jit(f).lower(1.0).as_text() for f in (named, jnp.sin)]
    assert texts[0].count("stablehlo.") == texts[1].count("stablehlo.") == 1


@pytest.mark.parametrize("is_newer", [False, True], ids=["remat2", "remat3"])
@pytest.mark.parametrize("lift", [lambda f: f, nnx.jit, jax.grad])
def test_names_are_found_in_what_any_kind_of_remat_records(lift, is_newer):
    if "jax_remat3" not in jax.config.values:
        pytest.skip("This JAX has one kind of rematerialization.")
    before = jax.config.values["jax_remat3"]
    try:
        jax.config.update("jax_remat3", is_newer)
        check_names_are_found(lift)
    finally:
        jax.config.update("jax_remat3", before)


def check_names_are_found(lift):
    def run(where):
        f = nnx.remat(
            lambda x: jnp.cos(nnx.name(jnp.sin(x), "a")), policy=nnx.memory.save(where)
        )
        return lift(f)(0.5)

    run("a")
    with pytest.raises(ValueError, match="'b'"):
        run("b")


def test_trees_keep_their_form_and_what_is_no_array():
    tree = {"a": jnp.ones(2, jnp.bfloat16), "b": (np.ones(3), "text", None, 2)}
    assert nnx.name(tree, "tree") is tree  # nothing is traced

    def traced(x):
        named = nnx.name({**tree, "c": x}, "tree")
        assert named["b"][1:] == ("text", None, 2)
        assert named["a"].dtype == jnp.bfloat16
        return named["c"]

    assert jax.eval_shape(traced, jnp.ones(3, jnp.int8)).dtype == jnp.int8


def test_the_sharding_of_what_is_named_stays():
    mesh, spec = mesh_of("Explicit", data=8), P("data", None)
    with jax.set_mesh(mesh):
        x = nnx.Param(jax.device_put(np.ones((8, 2)), NamedSharding(mesh, spec)))

        @nnx.jit
        def f(x):
            named = nnx.name(x[...], "x")
            assert jax.typeof(named).sharding.spec == spec
            return named

        assert f(x).sharding.spec == spec


@pytest.mark.parametrize("x", [nnx.Param(1.0), [zoo.Scale()], jax.new_ref(1.0)])
def test_objects_are_refused(x):
    with pytest.raises(TypeError, match=r"(?s)nnx.name expects arrays.*name: 'w'"):
        nnx.name(x, "w")


def test_names_are_strings():
    with pytest.raises(TypeError, match="is a string, got int"):
        nnx.name(1.0, 3)
    with pytest.raises(ValueError, match="empty"):
        nnx.name(1.0, "")
