"""Models in JAX's own transforms (contract, section 1.5; design, section 3)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import comparisons
from tests.contract.test_transforms.matrix import flat, tracers_in
from tests.zoo import Block, Box, Parts

X = jnp.array([[1.0, 2.0], [3.0, 5.0], [-1.0, 4.0]])


def linear():
    return nnx.Linear(2, 2, rngs=nnx.Rngs(0))


def expected(model, x=X):
    return np.asarray(x) @ np.asarray(model.kernel) + np.asarray(model.bias)


# ------------------------------------------------------------------ models as arguments


def test_jit_takes_and_returns_models():
    model = linear()
    assert np.allclose(jax.jit(lambda m, x: m(x))(model, X), expected(model))
    doubled = jax.jit(lambda m: jax.tree.map(lambda x: 2 * x, m))(model)
    assert type(doubled) is nnx.Linear and doubled.in_features == 2
    assert np.array_equal(doubled.kernel[...], 2 * model.kernel[...])


def test_jit_traces_once_for_equal_models():
    traces = []
    f = jax.jit(lambda m, x: (traces.append(None), m(x))[1])
    for seed in range(3):
        f(nnx.Linear(2, 2, rngs=nnx.Rngs(seed)), X)
    assert len(traces) == 1
    f(nnx.Linear(2, 2, rngs=nnx.Rngs(0), use_bias=False), X)
    assert len(traces) == 2


def test_grad_is_a_model():
    model = linear()
    grads = jax.grad(lambda m: m(X).sum())(model)
    assert type(grads) is nnx.Linear
    assert np.allclose(grads.kernel[...], np.asarray(X).sum(0)[:, None] * np.ones(2))
    assert flat(grads.bias) == [3.0, 3.0]


def test_vmap_makes_and_applies_stacked_models():
    keys = jax.random.split(jax.random.key(0), 4)
    models = jax.vmap(lambda key: nnx.Linear(2, 2, rngs=nnx.Rngs(params=key)))(keys)
    assert models.kernel.shape == (4, 2, 2)
    y = jax.vmap(lambda m, x: m(x), in_axes=(0, None))(models, X)
    for i in range(4):
        one = nnx.Linear(2, 2, rngs=nnx.Rngs(params=keys[i]))
        assert np.allclose(y[i], expected(one), atol=1e-6)


def test_scan_carries_and_scans_models():
    def step(carry, layer):
        model, x = carry
        return (model, jnp.tanh(layer(x)) + model.bias[None]), x

    layers = jax.tree.map(lambda *xs: jnp.stack(xs), *[linear() for _ in range(3)])
    (model, y), _ = jax.lax.scan(step, (linear(), X), layers)
    x = np.asarray(X)
    for _ in range(3):
        x = np.tanh(expected(linear(), x))
    assert type(model) is nnx.Linear and np.allclose(y, x, atol=1e-6)


@pytest.mark.parametrize("loop", ["while", "fori"])
def test_loops_carry_models(loop):
    def step(model):
        model.bias[...] += 1
        return model

    model = linear()
    if loop == "while":
        out = jax.lax.while_loop(lambda m: m.bias[0] < 3, step, model)
    else:
        out = jax.lax.fori_loop(0, 3, lambda i, m: step(m), model)
    assert flat(out.bias) == [3.0, 3.0] and flat(model.bias) == [0.0, 0.0]


def test_cond_takes_models():
    model = linear()
    y = jax.lax.cond(True, lambda m: m(X), lambda m: X, model)
    assert np.allclose(y, expected(model))


def test_eval_shape_gives_an_abstract_model():
    out = jax.eval_shape(lambda m: jax.tree.map(lambda x: x[None], m), linear())
    assert out.kernel.get_value() == jax.ShapeDtypeStruct((1, 2, 2), jnp.float32)


def test_checkpoint_recomputes_and_gives_the_same_gradient():
    loss = jax.checkpoint(lambda m, x: jnp.tanh(m(x)).sum())
    plain = jax.grad(lambda m: jnp.tanh(m(X)).sum())(linear())
    grads = jax.grad(loss)(linear(), X)
    assert np.allclose(grads.kernel[...], plain.kernel[...], atol=1e-6)


@pytest.mark.parametrize(
    "transform", [jax.jit, jax.checkpoint, functools.partial(jax.vmap, in_axes=0)]
)
def test_writes_to_arguments_stay_inside(transform):
    def f(m):
        m.a[...] = m.a * 2
        m.k = 5
        m.new = m.a[...]
        return m.a[...]

    model = Parts()
    before = comparisons.snapshot(model)
    assert flat(transform(f)(model)) == [2.0, 4.0]
    assert comparisons.snapshot(model) == before


def test_arguments_returned_are_new_objects():
    model = Parts()
    out = jax.jit(lambda m: m)(model)
    assert out is not model and out.a is not model.a and out.a.tag == "x"
    out.a[...] += 1
    assert flat(model.a) == [1.0, 2.0]


# -------------------------------------------------- merge: dropout and normalization


@pytest.fixture(scope="module")
def eager():
    """The losses, running means and counts after one and more eager calls."""
    net = Block()
    calls = [
        (net(X).sum(), net.norm.mean[...], net.dropout.rngs.count[...])
        for _ in range(3)
    ]
    return [*zip(*calls, strict=True)]


@pytest.fixture
def split_net():
    return nnx.split(Block(), nnx.Param, ...)


def run(graphdef, params, rest, x=X, loss=jnp.sum):
    """The loss, and the new state beside the Params, of a model that is made anew."""
    net = nnx.merge(graphdef, params, rest, copy=True)
    return loss(net(x)), nnx.split(net, nnx.Param, ...)[2]


def check(eager, values, new_rest, old_rest):
    """Asserts that losses and state are those of eager calls."""
    losses, means, counts = eager
    steps = len(values)
    assert np.allclose(values, losses[:steps], atol=1e-5)
    assert np.allclose(new_rest["norm"]["mean"][...], means[steps - 1], atol=1e-6)
    assert new_rest["dropout"]["rngs"]["count"][...] == counts[steps - 1] == steps
    assert old_rest["dropout"]["rngs"]["count"][...] == 0


def test_merged_model_is_written_under_grad(split_net, eager):
    graphdef, params, rest = split_net
    loss = lambda params: run(graphdef, params, rest)  # noqa: E731
    (value, new_rest), grads = jax.value_and_grad(loss, has_aux=True)(params)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    check(eager, [value], new_rest, rest)
    assert not tracers_in([params, rest, grads, new_rest])


def test_merged_model_is_written_under_scan(split_net, eager):
    graphdef, params, rest = split_net
    step = lambda rest, x: run(graphdef, params, rest, x)[::-1]  # noqa: E731
    new_rest, values = jax.lax.scan(step, rest, jnp.stack([X] * 3))
    check(eager, values, new_rest, rest)


@pytest.mark.parametrize("transform", [jax.checkpoint, jax.jit])
def test_merged_model_is_written_under_checkpoint_and_jit(transform, split_net, eager):
    graphdef, params, rest = split_net
    forward = transform(functools.partial(run, graphdef))
    (value, new_rest), _ = jax.value_and_grad(forward, has_aux=True)(params, rest)
    check(eager, [value], new_rest, rest)


def test_merged_model_trains_as_the_object_does(split_net):
    graphdef, params, rest = split_net
    mean_square = lambda y: (y**2).mean()  # noqa: E731

    def descend(params, grads):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    @jax.jit
    def step(params, rest):
        loss = lambda params: run(graphdef, params, rest, X, mean_square)  # noqa: E731
        grads, new_rest = jax.grad(loss, has_aux=True)(params)
        return descend(params, grads), new_rest

    @nnx.jit
    def step_of_object(net):
        grads = nnx.grad(lambda net: mean_square(net(X)))(net)
        nnx.update(net, descend(nnx.state(net, nnx.Param), grads))

    net = Block()
    for _ in range(3):
        params, rest = step(params, rest)
        step_of_object(net)
    merged = nnx.merge(graphdef, params, rest)
    assert np.allclose(merged.linear.kernel[...], net.linear.kernel[...], atol=1e-5)
    assert np.allclose(merged.norm.var[...], net.norm.var[...], atol=1e-5)


def test_objects_made_inside_are_written_inside():
    @jax.jit
    def f(x):
        model = Box(w=nnx.Param(x))
        model.w[...] *= 2
        model.inner = Box(k=3)
        return model

    out = f(jnp.ones(2))
    out.w[...] += 1
    assert flat(out.w) == [3.0, 3.0] and out.inner.k == 3
