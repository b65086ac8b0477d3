"""Gradients go through what a function wrote, as through a value that it returned.

The new value of a Variable is an output of the function for JAX. Where a transform
would drop its cotangent, a gradient would be wrong without a word (issue 12, §6).
"""

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from tests.modes import GRAPH, GRAPH_UPDATES, TREE


def step(v):
    """Writes a Variable, and returns a value that depends on it."""
    v[...] = jnp.sin(v[...]) * 2
    return v[...].sum()


def pure_loss(x, steps=1, adds_outputs=True):
    """The same on arrays: what the steps return, and a number of the last value."""
    total = 0.0
    for _ in range(steps):
        x = jnp.sin(x) * 2
        total += x.sum() * adds_outputs
    return total + (x**3).sum()


def in_scan(v, mode):
    f = nnx.scan(lambda v, x: (v, step(v)), in_axes=(nnx.Carry, 0), **mode)
    return f(v, jnp.zeros(2))[1].sum()


def in_fori_loop(v, mode):
    nnx.fori_loop(0, 2, lambda i, v: (step(v), v)[1], v, **mode)
    return 0.0


def in_vmap(v, mode):
    return nnx.vmap(step, **mode)(v).sum()


def in_vjp(v, mode):
    return nnx.vjp(step, v, **mode)[0]


def in_grad(v, mode):
    def inner(x, v):
        return x * step(v)

    return nnx.grad(inner, **mode)(1.0, v)


CALLS = {
    "jit": (1, lambda v, mode: nnx.jit(step, **mode)(v)),
    "remat": (1, lambda v, mode: nnx.remat(step, **mode)(v)),
    "cond": (1, lambda v, mode: nnx.cond(True, step, lambda v: 0.0, v, **mode)),
    "switch": (1, lambda v, mode: nnx.switch(0, [step, lambda v: 0.0], v, **mode)),
    "scan": (2, in_scan),
    "fori_loop": (2, in_fori_loop),
    "vmap": (1, in_vmap),
    "vjp": (1, in_vjp),
    "grad": (1, in_grad),
}


@pytest.mark.parametrize("name", CALLS)
def test_gradients_go_through_what_was_written(name, mode):
    if name == "vjp" and mode == GRAPH_UPDATES:
        pytest.skip("there is no vjp with graph updates")
    steps, call = CALLS[name]

    def loss(v):
        return call(v, mode) + (v[...] ** 3).sum()

    x = jnp.array([0.5, 1.5])
    found = nnx.grad(loss, **mode)(nnx.Param(x))
    expected = jax.grad(pure_loss)(x, steps, name != "fori_loop")
    assert jnp.allclose(found[...], expected, rtol=1e-5)


def with_rule(bwd, mode):
    f = nnx.custom_vjp(step, **mode)

    def fwd(v):
        x = v[...]
        return f(v), x

    f.defvjp(fwd, bwd)
    return f


def bwd_of_output(x, g):
    return (nnx.Param(g * jnp.cos(x) * 2),)


def bwd_with_updates(x, g, *, updates_g):
    return (nnx.Param((g + updates_g[0][...]) * jnp.cos(x) * 2),)


def bwd_of_graph_updates(x, g):
    (v_g,), out_g = g
    return (nnx.Param((out_g + v_g[...]) * jnp.cos(x) * 2),)


OUTER = pytest.mark.parametrize(
    "outer", [lambda f, **mode: f, nnx.jit, nnx.remat], ids=["eager", "jit", "remat"]
)


@OUTER
def test_custom_vjp_tells_of_a_gradient_that_its_rule_drops(value_mode, outer):
    f = outer(with_rule(bwd_of_output, value_mode), **value_mode)

    def loss(tree):
        return f(tree["v"]) + (tree["v"][...] ** 3).sum()

    v = nnx.Param(jnp.array([0.5, 1.5]))
    told = pytest.warns(nnx.errors.LostUpdateWarning, match="does not take its cot")
    with told as caught:
        nnx.grad(loss, **value_mode)({"v": v})
    message = str(caught[0].message)
    assert "bwd_of_output" in message and "written by step: args[0]" in message
    assert "`updates_g`" in message and "Return the new value" in message


@OUTER
def test_custom_vjp_may_write_what_the_gradient_does_not_need(value_mode, outer):
    f = outer(with_rule(bwd_of_output, value_mode), **value_mode)
    x = jnp.array([0.5, 1.5])
    v = nnx.Param(x)
    assert jnp.allclose(nnx.grad(f, **value_mode)(v)[...], jnp.cos(x) * 2)
    assert jnp.allclose(v[...], jnp.sin(x) * 2)


@pytest.mark.parametrize(
    ("bwd", "mode"),
    [
        (bwd_with_updates, GRAPH),
        (bwd_with_updates, TREE),
        (bwd_of_graph_updates, GRAPH_UPDATES),
    ],
    ids=["graph", "tree", "graph_updates"],
)
def test_custom_vjp_gives_the_rule_what_was_written(bwd, mode):
    f = with_rule(bwd, mode)
    x = jnp.array([0.5, 1.5])
    found = nnx.grad(lambda v: f(v) + (v[...] ** 3).sum(), **mode)(nnx.Param(x))
    assert jnp.allclose(found[...], jax.grad(pure_loss)(x), rtol=1e-5)
