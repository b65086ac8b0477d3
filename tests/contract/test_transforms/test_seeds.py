"""Programs of others: the examples of the reference page, and reports of users.

The examples print what the page shows.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import graftree as nnx
from tests import comparisons, modes, zoo
from tests.contract.test_transforms.matrix import tracers_in

P = jax.sharding.PartitionSpec


def shapes(x):
    return repr(jax.tree.map(jnp.shape, x))


def shown(**params):
    """What `shapes` gives of a state of Params, by their shapes."""
    lines = [f"  '{k}': Param(\n    value={shape}\n  )" for k, shape in params.items()]
    return "State({\n" + ",\n".join(lines) + "\n})"


KERNEL, KERNEL_AND_BIAS = shown(kernel=(2, 3)), shown(bias=(3,), kernel=(2, 3))


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
    diff_state = nnx.DiffState(0, nnx.PathContains("kernel"))
    assert shapes(nnx.grad(loss_fn, argnums=diff_state)(m, x, y)) == KERNEL


def test_value_and_grad_gives_both():
    m, x, y = linear_example()
    value, grads = nnx.value_and_grad(loss_fn)(m, x, y)
    assert close(value, loss_fn(m, x, y)) and shapes(grads) == KERNEL_AND_BIAS


# ---------------------------------------------------------------------------------- jit


def test_jit_donates_by_name():
    @nnx.jit(donate_argnames=("model", "optimizer"))
    def func(model: nnx.Module, optimizer: nnx.Optimizer, other_args):
        pass

    model, x, _ = linear_example()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    assert func(model, optimizer, x) is None
    assert model(x).shape == (1, 3) and optimizer.step[...] == 0


# ---------------------------------------------------------------------------- shard_map


def test_shard_map_of_the_data():
    mesh = jax.sharding.Mesh(jax.local_devices(), ("data",))
    m, x = linear_example()[0], jnp.ones((32, 2))

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


COLUMNS, ROWS = P(None, "model"), P("model", None)
SPECS = {
    "filters": {
        path_ends_with("linear1", "kernel"): COLUMNS,
        path_ends_with("linear2", "kernel"): ROWS,
    },
    "state": nnx.State({"linear1": {"kernel": COLUMNS}, "linear2": {"kernel": ROWS}}),
}


@pytest.mark.parametrize("name", SPECS)
def test_shard_map_of_the_model(name):
    mesh = jax.sharding.Mesh(jax.local_devices(), ("model",))
    m, x = MLP(2, 64, 3, rngs=nnx.Rngs(0)), jnp.ones((32, 2))
    expected, specs = m(x), (nnx.StateSharding(SPECS[name]), P(None))

    @nnx.shard_map(mesh=mesh, in_specs=specs, out_specs=P(None))
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
    y, linear = np.asarray(x), model.blocks.linear
    for kernel, bias in zip(
        np.asarray(linear.kernel), np.asarray(linear.bias), strict=True
    ):
        y = np.maximum(y @ kernel + bias, 0)
    assert close(model(x), y, 1e-5)


# --------------------------------------------------------------------------------- vmap


def test_vmap_over_the_data():
    model, x = linear_example()[0], jnp.ones((5, 2))

    @nnx.vmap(in_axes=(None, 0), out_axes=0)
    def forward(model, x):
        return model(x)

    y = forward(model, x)
    assert y.shape == (5, 3) and close(y, model(x))


def test_vmap_over_the_model():
    weights = jax.random.uniform(nnx.Rngs(0)(), (5, 2, 3))
    model, x = zoo.Box(w=nnx.Param(weights)), jnp.ones((2,))

    @nnx.vmap(in_axes=(0, None), out_axes=0)
    def forward(model, x):
        return x @ model.w

    y = forward(model, x)
    assert y.shape == (5, 3) and close(y, model.w.sum(1))


def test_vmap_over_a_part_of_the_model():
    foo = zoo.Box(a=nnx.Param(jnp.arange(4)), b=nnx.BatchStat(jnp.arange(4)))
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
    return zoo.Box(x=nnx.Param(jnp.array(1.0)), y=nnx.Param(jnp.array(2.0)))


def sin_x_times_y(m):
    return jnp.sin(m.x) * m.y


def test_custom_vjp_with_states():
    f = nnx.custom_vjp(sin_x_times_y)

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
    assert shapes(grads) == shown(x=(), y=())
    assert close(grads["x"][...], 2 * np.cos(1)) and close(grads["y"][...], np.sin(1))
    assert not tracers_in([m, grads])


def test_custom_vjp_of_one_attribute():
    diff_state = nnx.DiffState(0, nnx.PathContains("x"))
    f = nnx.custom_vjp(nondiff_argnums=(diff_state,))(sin_x_times_y)

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
    grad = nnx.grad(f, argnums=diff_state)(foo())
    assert shapes(grad) == shown(x=())
    assert close(grad["x"][...], 2 * np.cos(1))


def test_custom_vjp_with_modules(value_mode):
    f = nnx.custom_vjp(**value_mode)(sin_x_times_y)

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
    assert type(grads) is zoo.Box
    assert close(grads.x[...], 2 * np.cos(1)) and close(grads.y[...], np.sin(1))


# -------------------------------------------------------------------------- vjp and jvp


def sum_of_outputs(m, x):
    return jnp.sum(m(x))


def test_vjp():
    m, x, _ = linear_example()
    decorated = nnx.vjp(graph=False)(sum_of_outputs)
    for out, vjp_fn in (nnx.vjp(sum_of_outputs, m, x, graph=False), decorated(m, x)):
        m_grad, x_grad = vjp_fn(jnp.ones_like(out))
        assert close(out, sum_of_outputs(m, x)) and type(m_grad) is nnx.Linear
        assert close(m_grad.kernel[...], 1) and close(x_grad[0], m.kernel.sum(1))


def test_jvp():
    m, x, _ = linear_example()
    primals, tangents = (m, x), (jax.tree.map(jnp.zeros_like, m), jnp.ones_like(x))
    expected = sum_of_outputs(m, x), m.kernel.sum()
    out = nnx.jvp(sum_of_outputs, primals, tangents, graph=False)
    assert close(out, expected)
    assert close(nnx.jvp(graph=False)(sum_of_outputs)(primals, tangents), expected)


# ------------------------------------------------------------------------- control flow


def square_example():
    return nnx.Linear(10, 10, rngs=nnx.Rngs(0)), jnp.linspace(-1.0, 1.0, 10)


def test_while_loop_calls_the_module_three_times():
    def fwd_fn(input):
        module, x, count = input
        return module, module(x), count - 1.0

    module, x = square_example()
    _, y, _ = nnx.while_loop(lambda input: input[-1] > 0, fwd_fn, (module, x, 3.0))
    assert close(y, module(module(module(x))), 1e-5)


def test_fori_loop_writes_the_kernel():
    def fwd_fn(i, input):
        m, x = input
        m.kernel[...] = jnp.identity(10) * i
        return m, m(x)

    module, x = square_example()
    _, y = nnx.fori_loop(2, 4, fwd_fn, (module, x))
    np.testing.assert_array_equal(y, x * 2 * 3)
    assert close(module.kernel[...], np.identity(10) * 3)


# ----------------------------------------------------------- issue 4520: leaked tracers


class Stacked(nnx.Module):
    """Uses vmap in its constructor and scan in its call."""

    def __init__(self, rngs, mode):
        self.stem = nnx.Linear(16, 32, rngs=rngs)
        self.mode = nnx.static(tuple(mode.items()))

        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0, **mode)
        def create_block(rngs: nnx.Rngs):
            return nnx.Linear(32, 32, rngs=rngs)

        self.backbone = create_block(rngs)
        self.head = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, **dict(self.mode))
        def forward(x: jax.Array, model: nnx.Module):
            return model(x)

        return self.head(forward(self.stem(x), self.backbone))


@functools.cache
def made_in(mode):
    return Stacked(nnx.Rngs(0), dict(mode))


@pytest.fixture
def stacked(mode):
    return nnx.clone(made_in(tuple(mode.items())))


def test_eval_shape_of_a_model_leaves_concrete_arrays(stacked):
    given, expected = (
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 16), (8, 10))
    )
    with comparisons.unchanged(stacked):
        assert jax.eval_shape(stacked, given) == expected
    kinds = jax.tree.map(type, jax.tree.leaves(nnx.split(stacked)[1]))
    assert len(kinds) == 6 and all(issubclass(kind, jax.Array) for kind in kinds)
    assert not tracers_in(stacked)


@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint, jax.vmap])
def test_other_transforms_of_a_model_leave_concrete_arrays(transform, stacked):
    x = jnp.ones((8, 16))
    with comparisons.unchanged(stacked):
        assert np.allclose(transform(stacked)(x), stacked(x), atol=1e-5)
    assert not tracers_in(stacked)


def test_models_are_made_under_eval_shape(mode, stacked):
    shaped = nnx.eval_shape(lambda: Stacked(nnx.Rngs(0), mode))
    leaves = [[x.shape for x in jax.tree.leaves(model)] for model in (shaped, stacked)]
    assert leaves[0] == leaves[1] and not tracers_in(shaped)


# ------------------------------------------------------------- the proposal: tree mode


def test_gradients_are_modules(value_mode):
    model = zoo.Box(w=nnx.Param(jnp.array(2.0)))
    grads = nnx.grad(lambda model: model.w**2, **value_mode)(model)
    assert type(grads) is zoo.Box and grads.w[...] == 4.0


def test_prefix_filters_become_prefix_objects(mode):
    foo = zoo.Box(w=nnx.Param(jnp.arange(3.0)), count=nnx.BatchStat(jnp.array(1.0)))
    prefix = nnx.StateAxes(axes := {nnx.Param: 0, ...: None})
    if mode != modes.GRAPH_UPDATES:
        prefix = nnx.prefix(foo, axes, graph=mode["graph"])

    @nnx.vmap(in_axes=(prefix,), **mode)
    def f(model):
        model.w[...] += model.count
        return model.w * 2

    assert f(foo).tolist() == [2.0, 4.0, 6.0]
    assert foo.w[...].tolist() == [1.0, 2.0, 3.0] and foo.count[...] == 1.0


# ------------------------------------------------------------------- transform_metadata


def unplaced(value, names):
    return nnx.Variable(value, out_sharding=names, eager_sharding=False)


def create(rngs):
    return unplaced(rngs.uniform((16,)), ("dout",))


def test_vmap_adds_the_name_of_the_axis():
    create_stack = nnx.vmap(
        create, in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "din"}
    )
    v_stack = create_stack(nnx.Rngs(0).split(8))
    assert v_stack.shape == (8, 16)
    assert v_stack.out_sharding == ("din", "dout")


@pytest.mark.parametrize("vmap", [nnx.vmap, jax.vmap])
def test_transform_metadata_adds_the_name_of_the_axis(graph, vmap):
    options = {} if vmap is jax.vmap else {"graph": graph, "graph_updates": False}
    axes = {"in_axes": 0, "out_axes": 0}
    named = nnx.transform_metadata(create, **axes, partition="din", graph=graph)
    v_stack = vmap(named, **axes, **options)(nnx.Rngs(0).split(8))
    assert v_stack.shape == (8, 16)
    assert v_stack.out_sharding == ("din", "dout")


def test_transform_metadata_hides_the_name_inside(graph):
    @nnx.transform_metadata(in_axes=(0, None), out_axes=0, partition="din", graph=graph)
    def f(v, x):
        assert v.out_sharding == ("dout",) and v.shape == (16,)
        v[...] = v + x
        return v * 1

    v = unplaced(jnp.zeros((8, 16)), ("din", "dout"))
    mode = {"graph": graph, "graph_updates": False}
    y = nnx.vmap(f, in_axes=(0, None), **mode)(v, 1.0)
    assert y.shape == v.shape == (8, 16) and float(v.sum()) == 128
    assert v.out_sharding == ("din", "dout")


# ------------------------------------------------------------- sow, perturb, capture


class Perturbed(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.array([2.0, -1.0]))

    def __call__(self, x):
        x = self.perturb("grad_of_x", x * 3)
        return self.w * x


X, Y = jnp.array([1.0, 2.0]), jnp.array([0.5, 0.5])
# Of mean((w * z - y)**2) at z = 3 * x, by hand: (w * z - y) * w.
GRAD_OF_X = (np.array([2.0, -1.0]) * 3 * X - Y) * np.array([2.0, -1.0])


def test_gradients_of_perturbations_by_capture(mode):
    @nnx.jit(**mode)
    def train_step(model, optimizer, x, y):
        _, perturbs = nnx.capture(model, nnx.Perturbation)(x)  # init perturbations

        def loss_fn(model, perturbs):
            y_pred = nnx.capture(model, init=perturbs)(x)
            return jnp.mean((y_pred - y) ** 2)

        grads, interm_grads = nnx.grad(loss_fn, argnums=(0, 1), **mode)(model, perturbs)
        optimizer.update(model, grads)
        return interm_grads

    model = Perturbed()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    interm_grads = train_step(model, optimizer, X, Y)
    assert np.allclose(interm_grads["grad_of_x"][...], GRAD_OF_X)
    gradient = (np.array([2.0, -1.0]) * 3 * X - Y) * 3 * X
    assert np.allclose(model.w[...], np.array([2.0, -1.0]) - 0.1 * gradient)
    assert vars(model).keys() == vars(Perturbed()).keys()


def test_gradients_of_perturbations_by_graph_updates():
    @nnx.jit
    def train_step(model, x, y):
        model(x)  # initialize the perturbation

        def loss_fn(model):
            return jnp.mean((model(x) - y) ** 2)

        diff_state = nnx.DiffState(0, (nnx.Param, nnx.Perturbation))
        grads = nnx.grad(loss_fn, argnums=diff_state)(model)
        grads, interm_grads = nnx.state(grads, nnx.Param, nnx.Perturbation)
        nnx.pop(model, nnx.Perturbation)  # clean up perturbations
        return grads, interm_grads

    model = Perturbed()
    with pytest.warns(DeprecationWarning, match="capture"):
        grads, interm_grads = train_step(model, X, Y)
    assert np.allclose(interm_grads["grad_of_x"][...], GRAD_OF_X)
    assert list(grads) == ["w"] and not hasattr(model, "grad_of_x")


# ------------------------------------------------------- clones that can be donated


def test_deep_clones_have_buffers_of_their_own():
    model, x, _ = linear_example()
    cloned = nnx.clone(model, arrays=True)
    pairs = list(zip(jax.tree.leaves(model), jax.tree.leaves(cloned), strict=True))
    assert all(np.array_equal(a, b) for a, b in pairs)
    assert all(a.unsafe_buffer_pointer() != b.unsafe_buffer_pointer() for a, b in pairs)
    step = nnx.jit(lambda a, b, x: a(x) + b(x), donate_argnums=(0, 1))
    step(model, cloned, x)
    assert cloned(x).shape == (1, 3)
