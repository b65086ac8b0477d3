"""Where optimizer state is placed, and that an update leaves params where they are."""

import jax
import jax.numpy as jnp
import optax

import graftree as nnx


def mesh(*sizes, kind=jax.sharding.AxisType.Auto):
    names = ("x", "y")[: len(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes))


def gradients(model):
    return jax.tree.map(jnp.ones_like, nnx.state(model))


def test_moments_follow_the_annotation_of_the_param():
    with jax.set_mesh(mesh(2, 2)):
        model = nnx.Dict(kernel=nnx.Param(jnp.ones((4, 4)), out_sharding=("x", "y")))
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    mu = optimizer.opt_state[0].mu["kernel"]
    assert mu.out_sharding == ("x", "y")
    assert mu.sharding.spec == jax.P("x", "y")


def test_factored_moments_drop_an_annotation_that_does_not_fit():
    with jax.set_mesh(mesh(2, 2)):
        model = nnx.Dict(
            kernel=nnx.Param(jnp.ones((128, 256)), out_sharding=("x", "y"))
        )
        optimizer = nnx.Optimizer(model, optax.adafactor(0.1), wrt=nnx.Param)
        updates = optimizer.update(model, gradients(model))
    factored = optimizer.opt_state[0]
    assert factored.v_row["kernel"].shape == (128,)
    assert not factored.v_row["kernel"].has_metadata("out_sharding")
    assert updates["kernel"].shape == (128, 256)


def test_without_a_mesh_moments_follow_the_placement_of_the_param():
    with jax.set_mesh(mesh(2, 2)):
        kernel = nnx.Param(jnp.ones((4, 4)), out_sharding=("x", "y"))
    optimizer = nnx.Optimizer([kernel], optax.adam(0.1), wrt=nnx.Param)
    mu = optimizer.opt_state[0].mu[0]
    assert mu.sharding.spec == jax.P("x", "y")
    assert mu.get_metadata() == kernel.get_metadata()


def test_optimizer_sharding_leaves_the_param_where_it_is():
    explicit = mesh(2, 2, kind=jax.sharding.AxisType.Explicit)
    with jax.set_mesh(explicit):
        kernel = nnx.Param(jnp.ones((4, 4)), optimizer_sharding=jax.P("x", "y"))
        model = nnx.Dict(kernel=kernel)
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
        before = jax.typeof(model.kernel[...]).sharding

        @jax.jit
        def step(model, optimizer):
            optimizer.update(model, gradients(model))
            return model, optimizer

        model, optimizer = step(model, optimizer)
        assert jax.typeof(
            optimizer.opt_state[0].mu["kernel"][...]
        ).sharding.spec == jax.P("x", "y")
        assert jax.typeof(model.kernel[...]).sharding == before
