"""update and pop: planned whole, then carried out."""

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx


class Model(nnx.Module):
    def __init__(self):
        self.a = nnx.Param(jnp.array(1.0))
        self.b = nnx.Param(jnp.array(2.0))
        self.static = 1
        self.items = nnx.data([jnp.array(3.0)])


def test_failed_update_changes_nothing():
    model = Model()
    for wrong in ({"b": 5.0, "static": jnp.ones(1)}, {"a": 5.0, "items": {7: 1.0}}):
        with pytest.raises((ValueError, IndexError)):
            nnx.update(model, {"a": jnp.array(9.0), **wrong})
        assert (model.a[...], model.b[...], model.static) == (1.0, 2.0, 1)


def test_update_of_a_captured_model_changes_nothing():
    model = Model()

    def f(x):
        inner = nnx.Dict(model=model, own=nnx.Param(x))
        nnx.update(inner, {"own": x * 2, "model": {"a": x}})

    with pytest.raises(nnx.errors.TraceContextError):
        jax.jit(f)(1.0)
    assert model.a[...] == 1.0 and not isinstance(model.a[...], jax.core.Tracer)


def test_failed_pop_removes_nothing():
    model = nnx.List([nnx.Param(jnp.array(1.0))])
    outer = nnx.Dict(a=nnx.Param(jnp.array(2.0)), b=model)
    with pytest.raises(ValueError, match="b/0"):
        nnx.pop(outer, nnx.Param)
    assert hasattr(outer, "a") and len(model) == 1


def test_static_attributes_stay_static():
    model = Model()
    nnx.update(model, {"static": 5})
    assert model.static == 5 and model._pytree__nodes["static"] is False


def test_gradients_in_the_form_of_the_model_are_a_state():
    model, grads = Model(), jax.tree.map(lambda x: x * 10, Model())
    nnx.update(model, grads)
    assert (model.a[...], model.b[...], model.items[0]) == (10.0, 20.0, 30.0)


@pytest.mark.parametrize("value", [jnp.ones(2), 3, "x"])
def test_what_is_no_node_can_not_be_updated(value):
    with pytest.raises((RuntimeError, TypeError), match="Unsupported type"):
        nnx.update(value, {})


def test_new_variables_are_copies():
    given = nnx.Param(jnp.array(1.0))
    model = Model()
    nnx.update(model, {"new": given})
    assert model.new is not given and model.new[...] == 1.0


def test_update_that_does_not_fit_a_ref_changes_nothing():
    node = {"a": nnx.Param(jnp.zeros(2)), "b": nnx.Param(jnp.zeros(2), ref=True)}
    with pytest.raises(ValueError, match="Invalid shape"):
        nnx.update(node, {"a": jnp.ones(2), "b": jnp.ones(3)})
    assert node["a"][...].tolist() == node["b"][...].tolist() == [0.0, 0.0]
