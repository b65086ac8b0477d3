"""Functions that are computed again on the way back: `remat` (contract, section 5)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx


class Block(nnx.Module):
    def __init__(self, scale=2.0):
        self.scale = nnx.Param(jnp.array(scale))
        self.count = nnx.BatchStat(jnp.array(0))

    def __call__(self, x):
        self.count[...] += 1
        return jnp.sin(self.scale * x)


def gradient(function, mode):
    """The gradient for the scale of a block, by JAX alone."""

    def loss(scale, x):
        block = Block(scale)
        return nnx.remat(function, **mode)(block, x), block.count[...]

    return jax.grad(loss, has_aux=True)


# --------------------------------------------------------------------------- results


def test_values_and_gradients_are_those_of_the_function(mode):
    x = jnp.array(0.3)
    assert nnx.remat(Block.__call__, **mode)(Block(), x) == jnp.sin(2.0 * x)
    grad, count = gradient(Block.__call__, mode)(2.0, x)
    np.testing.assert_allclose(grad, 0.3 * np.cos(0.6), rtol=1e-6)
    assert count == 1


def test_updates_propagate_once_under_grad(mode):
    block, x = Block(), jnp.array(0.3)
    scale = nnx.Param(jnp.array(2.0))

    def loss(scale, block, x):
        return scale * nnx.remat(Block.__call__, **mode)(block, x)

    grads = nnx.grad(loss, **mode)(scale, block, x)
    np.testing.assert_allclose(grads[...], np.sin(0.6), rtol=1e-6)
    assert block.count[...] == 1


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


def test_decorates_methods(mode):
    class Net(nnx.Module):
        def __init__(self):
            self.block = Block()

        @nnx.remat(static_argnums=2, **mode)
        def __call__(self, x, power):
            assert power == 3  # not traced
            return self.block(x) ** power

    net = Net()
    np.testing.assert_allclose(net(jnp.array(0.3), 3), np.sin(0.6) ** 3, rtol=1e-6)
    assert net.block.count[...] == 1 and Net.__call__.__name__ == "__call__"


def test_keywords_are_taken(mode):
    f = nnx.remat(lambda v, x, power=2: v * x**power, static_argnums=2, **mode)
    v = nnx.Param(jnp.array(3.0))
    assert f(v, x=2.0) == 12.0 and f(v, x=2.0, power=3) == 24.0


def test_works_under_scan_and_jit(mode):
    multiply = nnx.remat(lambda x, v: (v * x, None), **mode)

    @nnx.jit(**mode)
    def run(stack, x):
        return nnx.scan(multiply, in_axes=(nnx.Carry, 0), **mode)(x, stack)[0]

    assert run(nnx.Param(jnp.arange(1.0, 4.0)), 2.0) == 12.0


def test_works_around_custom_vjp(mode):
    @nnx.custom_vjp(**mode)
    def triple(v, x):
        v[...] += 1
        return 3 * x

    # A gradient that is not that of the function shows whose rule was used.
    triple.defvjp(
        lambda v, x: (triple(v, x), v),
        lambda v, g: (nnx.clone(v), jnp.array(7.0)),
    )

    def loss(x, count):
        return nnx.remat(lambda v, x: triple(v, x), **mode)(count, x)

    count = nnx.BatchStat(jnp.array(0.0))
    assert nnx.grad(loss, **mode)(jnp.array(2.0), count) == 7.0
    assert count[...] == 1.0


def test_structure_propagates_with_graph_updates():
    @nnx.remat
    def grow(block):
        block.new = nnx.Param(jnp.array(1.0))
        return block

    block = Block()
    assert grow(block) is block and block.new[...] == 1.0


def test_refs_are_written_in_place(mode):
    variable = nnx.Variable(jnp.array(0.0), ref=True)

    def f(x, variable):
        variable[...] += 1
        return jnp.sin(x)

    assert nnx.remat(f, **mode)(0.3, variable) == jnp.sin(0.3)
    assert variable[...] == 1.0
    gradient = jax.grad(lambda x: nnx.remat(f, **mode)(x, variable))
    np.testing.assert_allclose(gradient(0.3), np.cos(0.3), rtol=1e-6)


def test_constants_become_arrays(mode):
    def reset(block):
        block.count[...] = jnp.array(7)
        return 1.0, nnx.Param(2.0)

    block = Block()
    out = nnx.remat(reset, **mode)(block)
    values = (*out, block.count)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(values))
    assert out[0] == 1.0 and out[1][...] == 2.0 and block.count[...] == 7


# ---------------------------------------------------------------------------- errors


def test_static_positions_are_checked():
    with pytest.raises(ValueError, match="only accepts 1 positional argument"):
        nnx.remat(lambda x: x, static_argnums=1)
    with pytest.raises(ValueError, match="Non-hashable static arguments"):
        nnx.remat(lambda x, y: x, static_argnums=1)(1.0, [])


def test_returned_arguments_are_refused_without_graph_updates(value_mode):
    phrase = r"(?s)\.args\[0\]\n  - \.out\n.*nnx\.remat with graph_updates=False"
    with pytest.raises(ValueError, match=phrase):
        nnx.remat(lambda v: v, **value_mode)(nnx.Param(1.0))


def test_trees_refuse_aliases():
    variable = nnx.Param(jnp.array(1.0))
    with pytest.raises(ValueError, match="Duplicate Param") as error:
        nnx.remat(lambda v, w: v + w, graph=False)(variable, w=variable)
    assert "  - .args[0]\n  - .kwargs['w']" in str(error.value)
    assert nnx.remat(lambda v, w: v + w)(variable, variable) == 2.0
