"""What doesn't fit an optimizer is told by argument and path (issue 12, section 13)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import graftree as nnx
from tests import tables


def ones(shape):
    """A Param of ones, for which nothing is compiled."""
    return nnx.Param(jnp.asarray(np.ones(shape, np.float32)))


def model_of(width):
    return nnx.Dict(layers=nnx.List([nnx.Dict(kernel=ones((width, 1)))]))


def started(width=2, tx=None):
    """A model, and an optimizer of its Params."""
    model = model_of(width)
    return model, nnx.Optimizer(model, tx or optax.adam(0.1), wrt=nnx.Param)


def gradients(model):
    return jax.tree.map(jnp.ones_like, nnx.state(model))


@pytest.mark.parametrize("make", [nnx.Optimizer, nnx.ModelAndOptimizer])
@tables.cases(
    "tx, phrases",
    (1e-3, ["`tx`, got 0.001", "Pass e.g. optax.adam(1e-3)"]),
    (optax.adam, ["`tx`, got the function adam", "Call it to make one"]),
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
    model, optimizer = started()
    grads = gradients(model)
    with pytest.raises(TypeError, match="the model first") as caught:
        optimizer.update(grads, model)
    assert "got a State as the model and a Dict as the gradients" in str(caught.value)
    assert "Call optimizer.update(model, grads)" in str(caught.value)
    assert jnp.all(grads["layers"][0]["kernel"][...] == 1) and optimizer.step[...] == 0


def test_a_state_for_another_shape_is_named():
    model, optimizer = started()
    model.layers[0].kernel = ones((7, 1))
    with pytest.raises(ValueError, match="made for other parameters") as caught:
        optimizer.update(model, gradients(model))
    expected = "0/mu/layers/0/kernel: shape (2, 1) then, shape (7, 1) for the model"
    assert expected in str(caught.value)
    assert "make its optimizer anew" in str(caught.value)
    assert "add got incompatible shapes" in str(caught.value)


def test_a_state_without_a_new_parameter_is_named():
    model, optimizer = started()
    model.scale = ones(3)
    with pytest.raises(ValueError, match="0/mu/scale: nothing then") as caught:
        optimizer.update(model, gradients(model))
    assert "make its optimizer anew" in str(caught.value)


@pytest.mark.parametrize("width", [7, 1])
def test_gradients_of_another_shape_are_named(width):
    # With width 1 the sum of both would have the shape of the gradients.
    model, optimizer = started(width, optax.sgd(0.1))
    with pytest.raises(ValueError, match="The gradients don't fit") as caught:
        optimizer.update(model, gradients(model_of(5)))
    where = f"the parameter is float32[{width},1], its gradient float32[5,1]"
    assert f"layers/0/kernel: {where}" in str(caught.value)
    assert "selected by wrt=Param" in str(caught.value)
    assert "Differentiate the model as it is now" in str(caught.value)
    assert model.layers[0].kernel.shape == (width, 1)


SHAPES = [(), (1,), (3,), (1, 1), (1, 3), (2, 1), (2, 3), (3, 2), (1, 2, 3), (0, 3)]


def leaves(*nodes):
    return jax.tree.leaves(nnx.to_pure_dict(nnx.state(nodes)))


UPDATED = [(optax.sgd, shape) for shape in ((), (1,), (3,), (1, 3), (2, 3))]
# Their own operations, on a shape each, are what takes time here.
UPDATED += [(optax.adam, ()), (optax.adam, (3,)), (optax.adafactor, (1,))]


@pytest.mark.parametrize(("make", "shape"), UPDATED)
def test_gradients_of_any_other_shape_are_refused_before_anything_changes(make, shape):
    model = nnx.Dict(w=ones(shape))
    optimizer = nnx.Optimizer(model, make(0.1), wrt=nnx.Param)
    compiled = nnx.jit(lambda optimizer, *args: optimizer.update(*args))
    before = leaves(model, optimizer)
    for given in SHAPES:
        grads = nnx.State({"w": ones(given)})
        for update in (nnx.Optimizer.update, compiled) if given != shape else ():
            with pytest.raises(ValueError, match="The gradients don't fit"):
                with jax.numpy_rank_promotion("allow"):
                    update(optimizer, model, grads)
    assert [*map(id, leaves(model, optimizer))] == [*map(id, before)]
    compiled(optimizer, model, nnx.State({"w": ones(shape)}))
    assert model.w.shape == shape and optimizer.step[...] == 1


KINDS = {
    "bool": jnp.ones(2, bool),
    "int32": jnp.ones(2, "int32"),
    "uint8": jnp.ones(2, "uint8"),
    "bfloat16": jnp.ones(2, "bfloat16"),
    "float32": jnp.ones(2, "float32"),
    "complex64": jnp.ones(2, "complex64"),
    "key": jax.random.split(jax.random.key(0)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("param", ["bfloat16", "float32", "complex64"])
def test_gradients_are_numbers_of_the_kind_of_the_parameter(param, kind):
    model = nnx.Dict(w=nnx.Param(jnp.ones(2, param)))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    grads = nnx.State({"w": nnx.Param(KINDS[kind])})
    if ("float" in kind and "float" in param) or kind == param:
        optimizer.update(model, grads)
        assert model.w.dtype == param
        return
    with pytest.raises(ValueError, match=f"w: the parameter is {param}"):
        optimizer.update(model, grads)
    assert optimizer.step[...] == 0


def test_numbers_of_python_are_gradients_of_scalars():
    model = nnx.Dict(w=nnx.Param(jnp.array(1.0)))
    optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
    for grad in (1, 1.0, jnp.array(1), np.float32(1)):
        optimizer.update(model, nnx.State({"w": nnx.Param(grad)}))
    assert model.w[...] == -1.0


def test_gradients_per_example_are_for_those_who_take_them():
    model = model_of(2)
    mean = optax.GradientTransformation(
        lambda params: (),
        lambda x, state, _: (jax.tree.map(lambda x: x.mean(0), x), ()),
    )
    optimizer = nnx.Optimizer(model, optax.chain(mean, optax.adam(0.1)), wrt=nnx.Param)
    grads = jax.tree.map(lambda x: jnp.stack([x, x, x]), gradients(model))
    optimizer.update(model, grads)
    assert model.layers[0].kernel.shape == (2, 1)
    plain = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    with pytest.raises(ValueError, match=r"update \(3, 2, 1\)"):
        with jax.numpy_rank_promotion("allow"):
            plain.update(model, grads)


def test_the_gradients_of_a_train_state_must_fit():
    graphdef, params = nnx.split(nnx.Dict(w=ones(2)))
    state = nnx.TrainState.create(graphdef, params=params, tx=optax.adam(0.1))
    with pytest.raises(ValueError, match=r"of the TrainState.\n  w.*float32\[1\]"):
        state.apply_gradients(nnx.State({"w": ones(1)}))


def test_averages_take_values_of_their_shape():
    ema = nnx.EMA(nnx.Dict(w=ones(2)), decay=0.5)
    before = leaves(ema)
    with pytest.raises(ValueError, match=r"w: the average has shape \(2,\)"):
        ema.update({"w": ones(1)})
    assert [*map(id, leaves(ema))] == [*map(id, before)]
