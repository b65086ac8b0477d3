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
