"""`nnx.name`: names of values, for policies of remat."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import graftree as nnx
from tests import zoo


def test_a_name_is_in_the_program_and_not_in_what_is_compiled():
    def named(x):
        return jnp.sin(nnx.name(x, "x"))

    assert "name=x" in str(jax.make_jaxpr(named)(1.0))
    texts = [jax.jit(f).lower(1.0).as_text() for f in (named, jnp.sin)]
    assert texts[0].count("stablehlo.") == texts[1].count("stablehlo.") == 1


@pytest.fixture(params=[False, True], ids=["remat2", "remat3"])
def kind_of_remat(request):
    if "jax_remat3" not in jax.config.values:
        pytest.skip("This JAX has one kind of rematerialization.")
    before = jax.config.values["jax_remat3"]
    jax.config.update("jax_remat3", request.param)
    yield
    jax.config.update("jax_remat3", before)


@pytest.mark.usefixtures("kind_of_remat")
@pytest.mark.parametrize("lift", [lambda f: f, nnx.jit, jax.grad])
def test_names_are_found_in_what_any_kind_of_remat_records(lift):
    def f(x):
        return jnp.cos(nnx.name(jnp.sin(x), "a"))

    def run(where):
        return lift(nnx.remat(f, policy=nnx.memory.save(where)))(0.5)

    run("a")
    with pytest.raises(ValueError, match="'b'"):
        run("b")


def test_trees_keep_their_form_and_what_is_no_array():
    tree = {"a": jnp.ones(2, jnp.bfloat16), "b": (np.ones(3), "text", None, 2)}
    found = nnx.name(tree, "tree")
    assert found is tree  # nothing is traced

    def traced(x):
        named = nnx.name({**tree, "c": x}, "tree")
        assert named["b"][1:] == ("text", None, 2)
        assert named["a"].dtype == jnp.bfloat16
        return named["c"]

    assert jax.eval_shape(traced, jnp.ones(3, jnp.int8)).dtype == jnp.int8


def test_the_sharding_stays():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        spec = P("data", None)
        x = nnx.Param(jax.device_put(jnp.ones((8, 2)), NamedSharding(mesh, spec)))

        @nnx.jit
        def f(x):
            named = nnx.name(x[...], "x")
            assert jax.typeof(named).sharding.spec == spec
            return named

        assert f(x).sharding.spec == spec


@pytest.mark.parametrize(
    "x",
    [nnx.Param(jnp.ones(2)), [zoo.Scale()], jax.new_ref(1.0)],
)
def test_objects_are_refused(x):
    with pytest.raises(TypeError, match=r"(?s)nnx.name expects arrays.*name: 'w'"):
        nnx.name(x, "w")


def test_names_are_strings():
    with pytest.raises(TypeError, match="is a string, got int"):
        nnx.name(1.0, 3)
    with pytest.raises(ValueError, match="empty"):
        nnx.name(1.0, "")
