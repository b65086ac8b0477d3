"""Optimizer in transforms, in copies, and with refs."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import graftree as nnx


def linear():
    """Two Params with known values."""
    return nnx.Dict(
        kernel=nnx.Param(jnp.array([[1.0, -2.0], [3.0, 0.5]])),
        bias=nnx.Param(jnp.array([0.25, -0.75])),
    )


def ones_like(model):
    return jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))


def test_update_in_plain_jit_changes_only_what_is_returned():
    model = linear()
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

    @jax.jit
    def step(model, optimizer):
        optimizer.update(model, ones_like(model))
        return model, optimizer

    new_model, new_optimizer = step(model, optimizer)
    assert (optimizer.step[...], new_optimizer.step[...]) == (0, 1)
    np.testing.assert_allclose(new_model.bias[...], [0.15, -0.85], rtol=1e-5)
    np.testing.assert_array_equal(model.bias[...], [0.25, -0.75])


def test_update_under_eval_shape():
    def make_and_step():
        model = linear()
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
        optimizer.update(model, ones_like(model))
        return model, optimizer

    abstract = jax.eval_shape(make_and_step)
    leaves = jax.tree.leaves(abstract)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)


def test_copies_are_independent_and_share_the_transformation():
    model = linear()
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    for duplicate in (copy.deepcopy(optimizer), nnx.clone(optimizer)):
        duplicate.update(model, ones_like(model))
        assert (optimizer.step[...], duplicate.step[...]) == (0, 1)
    assert nnx.clone(optimizer).tx is optimizer.tx
    assert nnx.merge(*nnx.split(optimizer)).step is optimizer.step


@pytest.mark.parametrize(
    "make",
    [optax.adam, optax.contrib.schedule_free_sgd],
    ids=["zeros", "copies of the params"],
)
def test_refs_carry_an_update_out_of_plain_jit(make):
    with nnx.var_defaults(ref=True):
        model = linear()
        optimizer = nnx.Optimizer(model, make(0.1), wrt=nnx.Param)
    assert all(v.ref for _, v in nnx.to_flat_state(nnx.state(optimizer)))

    @jax.jit
    def step(model, optimizer):
        params = nnx.map_state(
            lambda path, variable: variable.copy(ref=False), nnx.state(model)
        )
        optimizer.update(model, jax.tree.map(jnp.ones_like, params))

    step(model, optimizer)
    np.testing.assert_allclose(model.bias[...], [0.15, -0.85], rtol=1e-4)
    assert optimizer.step[...] == 1
