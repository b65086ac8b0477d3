"""``jax.export`` of functions made by `nnx.jit` (issue 20)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import graftree as nnx
from tests import zoo

BATCH = jax.ShapeDtypeStruct(export.symbolic_shape("b, 2"), jnp.float32)


def counted():
    count = nnx.Variable(jnp.array(0))
    return zoo.Box(w=nnx.Param(jnp.array([2.0, 3.0])), count=count)


def predict(model, x):
    return {"y": model.w[None] * x}


def test_exported_function_is_that_of_the_user(mode):
    model = counted()
    exported = export.export(nnx.jit(predict, **mode))(model, BATCH)
    assert exported.fun_name == "predict"
    assert exported.in_tree == jax.tree.structure(((model, 0), {}))
    assert exported.out_tree == jax.tree.structure({"y": 0})
    for batch in (1, 4):
        out = exported.call(model, jnp.ones((batch, 2)))
        np.testing.assert_array_equal(out["y"], [[2.0, 3.0]] * batch)


def test_model_that_the_function_holds_is_in_the_export(mode):
    model = counted()
    exported = export.export(nnx.jit(lambda x: predict(model, x), **mode))(BATCH)
    assert [aval.shape[1:] for aval in exported.in_avals] == [(2,)]
    np.testing.assert_array_equal(exported.call(jnp.ones((1, 2)))["y"], [[2.0, 3.0]])


def test_exported_function_has_derivatives(mode):
    model = counted()
    exported = export.export(nnx.jit(predict, **mode))(model, jnp.ones((1, 2)))

    def loss(model):
        return exported.call(model, jnp.array([[5.0, 7.0]]))["y"].sum()

    np.testing.assert_array_equal(jax.grad(loss, allow_int=True)(model).w, [5.0, 7.0])


def test_static_arguments_are_left_out(mode):
    def f(n, model, *, x, m):
        return n * model.w * x + m

    jitted = nnx.jit(f, static_argnums=0, static_argnames="m", **mode)
    model = counted()
    exported = export.export(jitted)(2, model, x=jnp.ones(2), m=1.0)
    np.testing.assert_array_equal(exported.call(model, x=jnp.ones(2)), [5.0, 7.0])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m.count.set_value(m.count[...] + 1), r"args\[0\].count changes"),
        (lambda m: m.w.set_metadata(tag="x"), r"args\[0\].w changes"),
    ],
)
def test_function_that_changes_its_arguments_is_refused(change, says, mode):
    def step(model):
        change(model)
        return model.w * 2

    model = counted()
    says = rf"step changes its arguments(?s:.*){says}(?s:.*)model\.eval"
    with pytest.raises(ValueError, match=says):
        export.export(nnx.jit(step, **mode))(model)
    assert model.count[...] == 0


def test_function_that_draws_is_told_to_take_a_key(mode):
    rngs = nnx.Rngs(0)
    with pytest.raises(ValueError, match=r"noise on purpose(?s:.*)nnx\.Rngs\(key\)"):
        export.export(nnx.jit(lambda rngs: rngs.normal((2,)), **mode))(rngs)
    draw = nnx.jit(lambda key: nnx.Rngs(key).normal((2,)), **mode)
    key = jax.random.key(3)
    np.testing.assert_array_equal(export.export(draw)(key).call(key), draw(key))


def test_function_that_changes_attributes_is_refused():
    def name(model):
        model.name = "x"

    with pytest.raises(ValueError, match="attributes of the arguments change"):
        export.export(nnx.jit(name))(counted())


def test_array_refs_are_refused(mode):
    model = nnx.to_refs(counted())
    says = r"takes array refs(?s:.*)args\[0\]\.w(?s:.*)nnx\.to_arrays\(model\)"
    with pytest.raises(TypeError, match=says):
        export.export(nnx.jit(predict, **mode))(model, BATCH)


def test_shared_layer_is_read_twice():
    model = nnx.List([layer := zoo.Scale(3.0), layer])
    exported = export.export(nnx.jit(lambda m, x: m[1](m[0](x))))(model, BATCH)
    assert exported.call(model, jnp.ones((1, 2))).tolist() == [[9.0, 9.0]]


def test_bound_arguments_are_in_the_export():
    jitted = nnx.jit_partial(predict, counted(), graph=False)
    out = export.export(jitted)(BATCH).call(jnp.ones((1, 2)))
    np.testing.assert_array_equal(out["y"], [[2.0, 3.0]])


def test_stages_stay_those_of_the_call_until_they_are_exported():
    traced = nnx.jit(predict).trace(counted(), jnp.ones((1, 2)))
    assert isinstance(traced.lower(), nnx.transforms.compilation.Lowered)
    assert len(traced.jaxpr.in_avals) == 3


def test_function_is_exported_for_platforms_that_are_not_here():
    jitted = nnx.jit(predict)
    exported = export.export(jitted, platforms=["cpu", "cuda", "tpu"])(counted(), BATCH)
    assert exported.platforms == ("cpu", "cuda", "tpu")
    assert exported.call(counted(), jnp.ones((1, 2)))["y"].shape == (1, 2)
