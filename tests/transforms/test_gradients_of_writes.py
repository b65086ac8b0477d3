"""Gradients go through what a function wrote, as through a value that it returned.

The new value of a Variable is an output of the function for JAX. Where a transform
would drop its cotangent, a gradient would be wrong without a word (issue 12, §6).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import tables
from tests.contract.test_transforms.matrix import cases
from tests.modes import BY_NAME, GRAPH, GRAPH_UPDATES, TREE

X = np.array([0.5, 1.5], np.float32)


def step(v, x=None):
    """Writes a Variable, and returns a value that depends on it."""
    v[...] = jnp.sin(v[...]) * 2
    return v[...]


@functools.cache
def by_jax(*returns):
    """The gradient of the same steps on arrays, of which some return a value."""

    def loss(x):
        total = 0.0
        for is_returned in returns:
            x = jnp.sin(x) * 2
            total += x.sum() * is_returned
        return total + (x**3).sum()

    return jax.jit(jax.grad(loss))(X)


def check(call, returns, mode):
    """Compares gradients through a call that writes a Variable, and returns values."""

    def loss(v):
        return jnp.sum(call(v)) + (v[...] ** 3).sum()

    found = nnx.grad(loss, **mode)(nnx.Param(jnp.asarray(X)))
    np.testing.assert_allclose(found, by_jax(*returns), rtol=1e-5)


TRANSFORMS = "jit jit_partial grad vjp remat vmap scan fori_loop cond switch".split()


@cases(lambda row: row.transform in TRANSFORMS, without=("compiled", "scan broadcast"))
def test_gradients_go_through_what_was_written(case):
    def call(v):
        out = case(step, v)
        return out if case.row.has_output else 0.0

    check(call, [case.row.has_output], BY_NAME[case.mode])


def test_gradients_go_through_what_each_step_of_a_loop_wrote(mode):
    def call(v):
        nnx.fori_loop(0, 2, lambda i, v: (step(v), v)[1], v, **mode)
        scan = nnx.scan(lambda v, x: (v, step(v)), in_axes=(nnx.Carry, 0), **mode)
        return scan(v, jnp.zeros(2))[1]

    check(call, [0, 0, 1, 1], mode)


def test_gradients_go_through_what_one_branch_wrote(mode):
    check(lambda v: nnx.cond(True, step, lambda v: v * 0, v, **mode), [1], mode)


def with_rule(bwd, mode):
    f = nnx.custom_vjp(lambda v: step(v).sum(), **mode)

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


OUTER = tables.cases(
    "outer", lambda f, **mode: f, nnx.jit, nnx.remat, ids=["eager", "jit", "remat"]
)


@OUTER
def test_custom_vjp_tells_of_a_gradient_that_its_rule_drops(value_mode, outer):
    f = outer(with_rule(bwd_of_output, value_mode), **value_mode)

    def loss(tree):
        return f(tree["v"]) + (tree["v"][...] ** 3).sum()

    told = pytest.warns(nnx.errors.LostUpdateWarning, match="does not take its cot")
    with told as caught:
        nnx.grad(loss, **value_mode)({"v": nnx.Param(jnp.asarray(X))})
    message = str(caught[0].message)
    assert "bwd_of_output" in message and "written by <lambda>: args[0]" in message
    assert "`updates_g`" in message and "Return the new value" in message


@OUTER
def test_custom_vjp_may_write_what_the_gradient_does_not_need(value_mode, outer):
    f = outer(with_rule(bwd_of_output, value_mode), **value_mode)
    v = nnx.Param(jnp.asarray(X))
    found = nnx.grad(f, **value_mode)(v)[...]
    np.testing.assert_allclose((found, v), (np.cos(X) * 2, np.sin(X) * 2), rtol=1e-6)


@tables.cases(
    "bwd, mode",
    (bwd_with_updates, GRAPH),
    (bwd_with_updates, TREE),
    (bwd_of_graph_updates, GRAPH_UPDATES),
    ids=["graph", "tree", "graph_updates"],
)
def test_custom_vjp_gives_the_rule_what_was_written(bwd, mode):
    check(with_rule(bwd, mode), [1], mode)
