"""The examples of the reference page of transforms run, and print what it shows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests.contract.test_transforms.matrix import tracers_in
from tests.zoo import Box

P = jax.sharding.PartitionSpec
KERNEL_AND_BIAS = """\
State({
  'bias': Param(
    value=(3,)
  ),
  'kernel': Param(
    value=(2, 3)
  )
})"""
KERNEL = """\
State({
  'kernel': Param(
    value=(2, 3)
  )
})"""
X_AND_Y = """\
State({
  'x': Param(
    value=()
  ),
  'y': Param(
    value=()
  )
})"""
ONLY_X = """\
State({
  'x': Param(
    value=()
  )
})"""


def shapes(x):
    return repr(jax.tree.map(jnp.shape, x))


def close(a, b, tolerance=1e-6):
    return np.allclose(a, b, atol=tolerance)


# --------------------------------------------------------------------------------- grad


def loss_fn(m, x, y):
    return jnp.mean((m(x) - y) ** 2)


def linear_example():
    return nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((1, 2)), jnp.ones((1, 3))


def test_grad_gives_the_state_of_the_model():
    m, x, y = linear_example()
    grads = nnx.grad(loss_fn)(m, x, y)
    assert shapes(grads) == KERNEL_AND_BIAS
    expected = 2 / 3 * (x @ m.kernel[...] + m.bias[...][None] - y)
    assert close(grads["bias"][...], expected[0])
    assert close(grads["kernel"][...], x.T @ expected)


def test_grad_of_one_attribute():
    m, x, y = linear_example()
    kernel_attribute = nnx.PathContains("kernel")
    diff_state = nnx.DiffState(0, kernel_attribute)
    grad_fn = nnx.grad(loss_fn, argnums=diff_state)
    assert shapes(grad_fn(m, x, y)) == KERNEL


def test_value_and_grad_gives_both():
    m, x, y = linear_example()
    value, grads = nnx.value_and_grad(loss_fn)(m, x, y)
    assert close(value, loss_fn(m, x, y)) and shapes(grads) == KERNEL_AND_BIAS


# ---------------------------------------------------------------------------------- jit


def test_jit_donates_by_name():
    @nnx.jit(donate_argnames=("model", "optimizer"))
    def func(model: nnx.Module, optimizer: nnx.Optimizer, other_args):
        pass

    optax = pytest.importorskip("optax")
    model, x, _ = linear_example()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    assert func(model, optimizer, x) is None
    assert model(x).shape == (1, 3) and optimizer.step[...] == 0


# ---------------------------------------------------------------------------- shard_map


def test_shard_map_of_the_data():
    mesh = jax.sharding.Mesh(jax.local_devices(), ("data",))
    m, x = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((32, 2))

    @nnx.shard_map(mesh=mesh, in_specs=(P(None), P("data")), out_specs=P("data"))
    def f(m, x):
        assert x.shape == (4, 2)
        return m(x)

    y = f(m, x)
    assert y.sharding.spec[0] == "data" and close(y, m(x))


class MLP(nnx.Module):
    def __init__(self, din, dhidden, dout, *, rngs: nnx.Rngs):
        self.linear1 = nnx.Linear(din, dhidden, use_bias=False, rngs=rngs)
        self.linear2 = nnx.Linear(dhidden, dout, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.linear2(jax.nn.relu(self.linear1(x)))


def path_ends_with(*path_suffix):
    return lambda path, value: path[-len(path_suffix) :] == path_suffix


SPECS = {
    "filters": lambda: nnx.StateSharding(
        {
            path_ends_with("linear1", "kernel"): P(None, "model"),
            path_ends_with("linear2", "kernel"): P("model", None),
        }
    ),
    "state": lambda: nnx.StateSharding(
        nnx.State(
            {
                "linear1": {"kernel": P(None, "model")},
                "linear2": {"kernel": P("model", None)},
            }
        )
    ),
}


@pytest.mark.parametrize("name", SPECS)
def test_shard_map_of_the_model(name):
    mesh = jax.sharding.Mesh(jax.local_devices(), ("model",))
    m, x = MLP(2, 64, 3, rngs=nnx.Rngs(0)), jnp.ones((32, 2))
    expected = m(x)

    @nnx.shard_map(mesh=mesh, in_specs=(SPECS[name](), P(None)), out_specs=P(None))
    def f(m, x):
        assert m.linear1.kernel.shape == (2, 8) and m.linear2.kernel.shape == (8, 3)
        return jax.lax.psum(m(x), "model")

    assert close(f(m, x), expected, 1e-5)
    assert m.linear1.kernel.sharding.spec == P(None, "model")
    assert m.linear2.kernel.sharding.spec[0] == "model"


# --------------------------------------------------------------------------------- scan


class Block(nnx.Module):
    def __init__(self, input_dim, features, *, rngs):
        self.linear = nnx.Linear(input_dim, features, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array):
        return jax.nn.relu(self.dropout(self.linear(x)))


class Model(nnx.Module):
    def __init__(self, num_layers, features, *, rngs):
        @nnx.split_rngs(splits=num_layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def create_block(rngs: nnx.Rngs):
            return Block(features, features, rngs=rngs)

        self.blocks = create_block(rngs)
        self.num_layers = num_layers

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x, model):
            return model(x)

        return forward(x, self.blocks)


def test_scan_over_blocks_made_by_vmap():
    model = Model(2, 4, rngs=nnx.Rngs(0))
    _, params, _ = nnx.split(model, nnx.Param, ...)
    assert params["blocks"]["linear"]["kernel"].shape == (2, 4, 4)
    x = jnp.arange(5 * 4, dtype="float32").reshape((5, 4))
    assert model(x).shape == (5, 4)
    assert model.blocks.dropout.rngs.count[...].tolist() == [1, 1]

    model.eval()
    y = x
    for kernel, bias in zip(
        model.blocks.linear.kernel[...], model.blocks.linear.bias[...], strict=True
    ):
        y = jax.nn.relu(y @ kernel + bias[None])
    assert close(model(x), y, 1e-5)


# --------------------------------------------------------------------------------- vmap


def test_vmap_over_the_data():
    model, x = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((5, 2))

    @nnx.vmap(in_axes=(None, 0), out_axes=0)
    def forward(model, x):
        return model(x)

    y = forward(model, x)
    assert y.shape == (5, 3) and close(y, model(x))


def test_vmap_over_the_model():
    weights = jax.random.uniform(nnx.Rngs(0)(), (5, 2, 3))
    model, x = Box(w=nnx.Param(weights)), jnp.ones((2,))

    @nnx.vmap(in_axes=(0, None), out_axes=0)
    def forward(model, x):
        return x @ model.w

    y = forward(model, x)
    assert y.shape == (5, 3) and close(y, model.w.sum(1))


def test_vmap_over_a_part_of_the_model():
    foo = Box(a=nnx.Param(jnp.arange(4)), b=nnx.BatchStat(jnp.arange(4)))
    state_axes = nnx.StateAxes({nnx.Param: 0, nnx.BatchStat: None})

    @nnx.vmap(in_axes=(state_axes,), out_axes=0)
    def mul(foo):
        return foo.a * foo.b

    assert repr(mul(foo)) == (
        "Array([[0, 0, 0, 0],\n"
        "       [0, 1, 2, 3],\n"
        "       [0, 2, 4, 6],\n"
        "       [0, 3, 6, 9]], dtype=int32)"
    )


# --------------------------------------------------------------------------- custom_vjp


def foo():
    return Box(x=nnx.Param(jnp.array(1.0)), y=nnx.Param(jnp.array(2.0)))


def test_custom_vjp_with_states():
    @nnx.custom_vjp
    def f(m):
        return jnp.sin(m.x) * m.y

    def f_fwd(m):
        return f(m), (jnp.cos(m.x), jnp.sin(m.x), m)

    def f_bwd(res, g):
        input_updates_g, out_g = g
        cos_x, sin_x, m = res
        (m_updates_g,) = input_updates_g
        m_g = jax.tree.map(lambda x: x, m_updates_g)  # create copy
        m_g["x"][...] = cos_x * out_g * m.y
        m_g["y"][...] = sin_x * out_g
        return (m_g,)

    f.defvjp(f_fwd, f_bwd)
    m = foo()
    grads = nnx.grad(f)(m)
    assert shapes(grads) == X_AND_Y
    assert close(grads["x"][...], 2 * np.cos(1)) and close(grads["y"][...], np.sin(1))
    assert not tracers_in([m, grads])


def test_custom_vjp_of_one_attribute():
    x_attribute = nnx.PathContains("x")
    diff_state = nnx.DiffState(0, x_attribute)

    @nnx.custom_vjp(nondiff_argnums=(diff_state,))
    def f(m):
        return jnp.sin(m.x) * m.y

    def f_fwd(m):
        return f(m), (jnp.cos(m.x), m)

    def f_bwd(res, g):
        input_updates_g, out_g = g
        cos_x, m = res
        (m_updates_g,) = input_updates_g
        m_g = jax.tree.map(lambda x: x, m_updates_g)  # create copy
        m_g.x[...] = cos_x * out_g * m.y
        del m_g["y"]  # y is not differentiable
        return (m_g,)

    f.defvjp(f_fwd, f_bwd)
    grad = nnx.grad(f, argnums=nnx.DiffState(0, x_attribute))(foo())
    assert shapes(grad) == ONLY_X
    assert close(grad["x"][...], 2 * np.cos(1))


def test_custom_vjp_with_modules(value_mode):
    @nnx.custom_vjp(**value_mode)
    def f(m):
        return jnp.sin(m.x) * m.y

    def f_fwd(m):
        return f(m), (jnp.cos(m.x), jnp.sin(m.x), m)

    def f_bwd(res, g):
        cos_x, sin_x, m = res
        m_g = nnx.clone(m)
        m_g.x[...] = cos_x * g * m.y
        m_g.y[...] = sin_x * g
        return (m_g,)

    f.defvjp(f_fwd, f_bwd)
    grads = nnx.grad(f, **value_mode)(foo())
    assert type(grads) is Box
    assert close(grads.x[...], 2 * np.cos(1)) and close(grads.y[...], np.sin(1))


# -------------------------------------------------------------------------- vjp and jvp


def test_vjp():
    m, x, _ = linear_example()

    def loss_fn(m, x):
        return jnp.sum(m(x))

    primals_out, vjp_fn = nnx.vjp(loss_fn, m, x, graph=False)
    m_grad, x_grad = vjp_fn(jnp.ones_like(primals_out))
    assert close(primals_out, loss_fn(m, x)) and type(m_grad) is nnx.Linear
    assert close(m_grad.kernel[...], 1) and close(x_grad[0], m.kernel.sum(1))

    @nnx.vjp(graph=False)
    def f(m, x):
        return jnp.sum(m(x))

    primals_out, vjp_fn = f(m, x)
    assert close(vjp_fn(jnp.ones_like(primals_out))[1][0], m.kernel.sum(1))


def test_jvp():
    m, x, _ = linear_example()

    def f(m, x):
        return jnp.sum(m(x))

    m_tangent = jax.tree.map(jnp.zeros_like, m)
    x_tangent = jnp.ones_like(x)
    expected = f(m, x), m.kernel.sum()
    out = nnx.jvp(f, (m, x), (m_tangent, x_tangent), graph=False)
    assert close(out, expected)
    decorated = nnx.jvp(graph=False)(f)
    assert close(decorated((m, x), (m_tangent, x_tangent)), expected)


# ------------------------------------------------------------------------- control flow


def test_while_loop_calls_the_module_three_times():
    def fwd_fn(input):
        module, x, count = input
        return module, module(x), count - 1.0

    module = nnx.Linear(10, 10, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (10,))
    _, y, _ = nnx.while_loop(lambda input: input[-1] > 0, fwd_fn, (module, x, 3.0))
    assert close(y, module(module(module(x))), 1e-5)


def test_fori_loop_writes_the_kernel():
    def fwd_fn(i, input):
        m, x = input
        m.kernel[...] = jnp.identity(10) * i
        return m, m(x)

    module = nnx.Linear(10, 10, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (10,))
    _, y = nnx.fori_loop(2, 4, fwd_fn, (module, x))
    np.testing.assert_array_equal(y, x * 2 * 3)
    assert close(module.kernel[...], np.identity(10) * 3)
