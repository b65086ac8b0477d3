"""The scale of a loss whose gradients are in float16."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import graftree as nnx
from tests import tables, zoo

INF = jnp.inf


def loss_of(net, x):
    return jnp.mean(net(x) ** 2)


def parts(**options):
    net = zoo.Block()
    optimizer = nnx.Optimizer(net, optax.adam(0.1), wrt=nnx.Param)
    return net, optimizer, nnx.precision.DynamicScale(**options)


def train_step(net, optimizer, scaler, x):
    loss, grads = scaler.value_and_grad(loss_of)(net, x)
    scaler.update(optimizer, net, grads)
    return loss


def contents(*objects):
    """All values but for those of random streams."""
    state = nnx.state(objects, nnx.Not(nnx.RngState))
    return [np.asarray(x) for x in jax.tree.leaves(nnx.as_pure(state))]


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


GOOD = jnp.array([[1.0, 2.0], [0.5, -1.0], [3.0, 0.1]])
BAD = GOOD.at[0, 0].set(INF)


@pytest.mark.parametrize("jit", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_a_step_that_is_not_finite_changes_nothing_but_the_scale(jit):
    net, optimizer, scaler = parts()
    step = jit(train_step)
    step(net, optimizer, scaler, GOOD)
    before, count = contents(net, optimizer), net.dropout.rngs.count[...]
    step(net, optimizer, scaler, BAD)
    assert same(contents(net, optimizer), before)
    assert not scaler.is_finite[...] and scaler.scale[...] == 2.0**15
    assert net.dropout.rngs.count[...] == count + 1  # no key is used twice
    step(net, optimizer, scaler, GOOD)
    assert scaler.is_finite[...] and not same(contents(net, optimizer), before)
    assert optimizer.step[...] == 2


def test_the_scale_does_not_change_what_finite_steps_do():
    net, optimizer, scaler = parts()
    plain, plain_optimizer, _ = parts()
    for _ in range(3):
        loss = train_step(net, optimizer, scaler, GOOD)
        expected, grads = nnx.value_and_grad(loss_of)(plain, GOOD)
        plain_optimizer.update(plain, grads)
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for a, b in zip(
        contents(net, optimizer), contents(plain, plain_optimizer), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_gradients_below_float16_survive_and_are_float32():
    weight = nnx.Dict(w=nnx.Param(jnp.array(1.0, jnp.float16)))

    def loss(weight):
        return weight.w[...].astype(jnp.float32) * 1e-9

    assert nnx.grad(loss)(weight).w[...] == 0
    scaler = nnx.precision.DynamicScale(scale=2.0**14)
    value, grads = scaler.value_and_grad(loss)(weight)
    np.testing.assert_allclose(value, 1e-9, rtol=1e-6)
    assert grads.w[...].dtype == jnp.float32
    np.testing.assert_allclose(grads.w[...], 1e-9, rtol=0.01)


def test_it_works_in_all_modes_and_with_auxiliary_outputs(mode):
    def loss(model, x):
        return jnp.mean(model(x) ** 2), {"x": x}

    scaler, model = nnx.precision.DynamicScale(), nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    @nnx.jit(**mode)
    def run(scaler, model, x):
        return scaler.value_and_grad(loss, has_aux=True, **mode)(model, x)

    (value, aux), grads = run(scaler, model, GOOD)
    expected, aux_too = loss(model, GOOD)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_array_equal(aux["x"], aux_too["x"])
    expected = nnx.grad(lambda m: loss(m, GOOD)[0], **mode)(model)
    np.testing.assert_allclose(grads.kernel[...], expected.kernel[...], rtol=1e-5)
    assert scaler.finite_steps[...] == 1


def test_plain_jax_jit_takes_it():
    scaler, model = nnx.precision.DynamicScale(), nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    @jax.jit
    def run(scaler, model, x):
        scaler.value_and_grad(loss_of)(model, x)
        return scaler

    scaler = run(scaler, model, GOOD)
    assert run(scaler, model, BAD).scale[...] == 2.0**15


def test_mapped_gradients_are_averaged_and_devices_agree():
    scaler, model = nnx.precision.DynamicScale(), nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    def run(scaler, model, x):
        _, grads = scaler.value_and_grad(loss_of, axis_name="i")(model, x)
        return grads.kernel[...], scaler.is_finite[...], scaler.scale[...]

    def mapped(xs):
        copied = nnx.clone(scaler)
        return jax.vmap(lambda x: run(nnx.clone(copied), model, x), axis_name="i")(xs)

    xs = jnp.stack([GOOD, 2 * GOOD])
    kernel, is_finite, _ = mapped(xs)
    expected = jnp.mean(
        jnp.stack([nnx.grad(loss_of)(model, x).kernel[...] for x in xs]), axis=0
    )
    np.testing.assert_allclose(kernel[0], expected, rtol=1e-5)
    assert is_finite.all()
    _, is_finite, scale = mapped(jnp.stack([GOOD, BAD]))
    assert not is_finite.any() and (scale == 2.0**15).all()


def test_bare_arrays_of_a_model_are_brought_back_too():
    class Counted(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(2))
            self.seen = jnp.zeros(())

        def __call__(self, x):
            self.seen = self.seen + 1
            return x * self.w[None]

    model, scaler = Counted(), nnx.precision.DynamicScale()
    run = nnx.jit(lambda model, s, x: s.value_and_grad(loss_of)(model, x)[0])
    run(model, scaler, GOOD)
    run(model, scaler, BAD)
    assert model.seen == 1


def test_models_in_array_refs_are_left_alone_too():
    net = nnx.with_vars(zoo.Block(), ref=True)
    optimizer = nnx.Optimizer(net, optax.adam(0.1), wrt=nnx.Param)
    scaler = nnx.precision.DynamicScale()
    gradient = nnx.jit(lambda scaler, net, x: scaler.value_and_grad(loss_of)(net, x))
    for x, moves in ((BAD, False), (GOOD, True)):
        before = contents(net, optimizer)
        plain = nnx.to_arrays(net)  # gradients of refs are refused
        _, grads = gradient(scaler, plain, x)
        scaler.update(optimizer, net, grads)
        assert same(contents(net, optimizer), before) is not moves


@tables.cases(
    "options",
    {"growth_factor": 1.0},
    {"backoff_factor": 1.5},
    {"growth_interval": 0},
    {"scale": 0.0},
    {"scale": 1.0, "minimum_scale": 2.0},
    {"scale": 1e39},
)
def test_arguments_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match="DynamicScale expects"):
        nnx.precision.DynamicScale(**options)


@pytest.mark.peers
@tables.cases(
    "options",
    {"scale": 2.0**16, "growth_interval": 2},
    {"scale": 3.0, "growth_interval": 1, "growth_factor": 3.0},
    {"scale": 1.0, "backoff_factor": 0.25, "minimum_scale": 0.1},
    {"scale": 2.0**127, "growth_interval": 1},
)
def test_the_scale_moves_as_that_of_the_peer(options):
    pytest.importorskip("flax")
    from flax.training import dynamic_scale

    ours = nnx.precision.DynamicScale(**options)
    options = {"fin_steps": 0} | options | {"scale": jnp.float32(options["scale"])}
    theirs = dynamic_scale.DynamicScale(**options)
    weight = nnx.Dict(w=nnx.Param(jnp.array([1e-3, 2.0])))
    ours_step = nnx.jit(
        lambda s, m, x: s.value_and_grad(lambda m: (m.w[...] * x).sum())(m)
    )
    theirs_step = jax.jit(lambda s, w, x: s.value_and_grad(lambda w: (w * x).sum())(w))
    for x in [1.0, 2.0, 1.0, 1.0, INF, INF, 1.0, 1.0, 1.0, jnp.nan, 1.0, 1e-8]:
        value, grads = ours_step(ours, weight, x)
        theirs, is_finite, expected, expected_grads = theirs_step(
            theirs, weight.w[...], x
        )
        if jnp.isfinite(expected):  # theirs is divided by the scale again
            np.testing.assert_allclose(value, expected, rtol=1e-6)
        np.testing.assert_array_equal(grads.w[...], expected_grads)
        np.testing.assert_array_equal(ours.is_finite[...], is_finite)
        np.testing.assert_array_equal(ours.scale[...], theirs.scale)
        np.testing.assert_array_equal(ours.finite_steps[...], theirs.fin_steps)
