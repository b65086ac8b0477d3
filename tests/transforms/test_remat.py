"""Functions that are computed again on the way back: `remat` (contract, section 5)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import zoo


def sine(model, x):
    model.count[...] += 1
    return jnp.sin(model.w * x)


def test_values_and_gradients_are_those_of_the_function(mode):
    def loss(w, x):
        model = zoo.Box(w=nnx.Param(w), count=nnx.BatchStat(jnp.array(0)))
        return nnx.remat(sine, **mode)(model, x), model.count[...]

    (value, count), grad = jax.value_and_grad(loss, has_aux=True)(2.0, jnp.array(0.3))
    np.testing.assert_allclose((value, grad), (np.sin(0.6), 0.3 * np.cos(0.6)), 1e-6)
    assert count == 1


def test_updates_propagate_once_under_grad(mode):
    model = zoo.Box(w=nnx.Param(jnp.array(2.0)), count=nnx.BatchStat(jnp.array(0)))
    grads = nnx.grad(lambda v, model: v * nnx.remat(sine, **mode)(model, 0.3), **mode)(
        nnx.Param(jnp.array(2.0)), model
    )
    np.testing.assert_allclose(grads[...], np.sin(0.6), rtol=1e-6)
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
