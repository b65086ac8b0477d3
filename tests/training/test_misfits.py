"""What doesn't fit an optimizer is told by argument and path (issue 12, section 13)."""

import jax
import jax.numpy as jnp
import optax
import pytest

import graftree as nnx


def model_of(width):
    return nnx.Dict(layers=nnx.List([nnx.Linear(width, 1, rngs=nnx.Rngs(0))]))


def gradients(model):
    return jax.tree.map(jnp.ones_like, nnx.state(model))


@pytest.mark.parametrize("make", [nnx.Optimizer, nnx.ModelAndOptimizer])
@pytest.mark.parametrize(
    ("tx", "phrases"),
    [
        (1e-3, ["`tx`, got 0.001", "Pass e.g. optax.adam(1e-3)"]),
        (optax.adam, ["`tx`, got the function adam", "Call it to make one"]),
    ],
)
def test_what_is_no_transformation_is_refused(make, tx, phrases):
    with pytest.raises(TypeError, match="expects an Optax transformation") as caught:
        make(model_of(2), tx, wrt=nnx.Param)
    assert all(phrase in str(caught.value) for phrase in phrases)


def test_an_optimizer_of_nothing_warns_and_works():
    model = model_of(2)
    with pytest.warns(UserWarning, match="wrt=BatchStat selects nothing") as caught:
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.BatchStat)
    assert "usually wrt=nnx.Param" in str(caught[0].message)
    optimizer.update(model, nnx.State({}))
    assert optimizer.step[...] == 1


def test_swapped_arguments_of_update_are_refused():
    model = model_of(2)
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    grads = gradients(model)
    with pytest.raises(TypeError, match="the model first") as caught:
        optimizer.update(grads, model)
    assert "got a State as the model and a Dict as the gradients" in str(caught.value)
    assert "Call optimizer.update(model, grads)" in str(caught.value)
    assert jnp.all(grads["layers"][0]["kernel"][...] == 1) and optimizer.step[...] == 0


def test_a_state_for_another_shape_is_named():
    model = model_of(2)
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    model.layers[0] = nnx.Linear(7, 1, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="made for other parameters") as caught:
        optimizer.update(model, gradients(model))
    expected = "0/mu/layers/0/kernel: shape (2, 1) then, shape (7, 1) for the model"
    assert expected in str(caught.value)
    assert "make its optimizer anew" in str(caught.value)
    assert "add got incompatible shapes" in str(caught.value)


def test_a_state_without_a_new_parameter_is_named():
    model = model_of(2)
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    model.scale = nnx.Param(jnp.ones(3))
    with pytest.raises(ValueError, match="0/mu/scale: nothing then") as caught:
        optimizer.update(model, gradients(model))
    assert "make its optimizer anew" in str(caught.value)


@pytest.mark.parametrize("width", [7, 1])
def test_gradients_of_another_shape_are_named(width):
    # With width 1 the sum of both would have the shape of the gradients.
    model = model_of(width)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    with pytest.raises(ValueError, match="The gradients don't fit") as caught:
        optimizer.update(model, gradients(model_of(5)))
    where = f"layers/0/kernel: the parameter has shape ({width}, 1), its update (5, 1)"
    assert where in str(caught.value)
    assert "Differentiate the model as it is now" in str(caught.value)
    assert model.layers[0].kernel.shape == (width, 1)


def test_other_failures_of_a_transformation_pass_through():
    def update(updates, state, params=None):
        raise ValueError("mine")

    model = model_of(2)
    tx = optax.GradientTransformation(optax.adam(0.1).init, update)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    with pytest.raises(ValueError, match="^mine"):
        optimizer.update(model, gradients(model))
