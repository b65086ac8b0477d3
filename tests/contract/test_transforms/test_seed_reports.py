"""Reports of users and the proposal of tree mode: their programs run here."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import graftree as nnx
from tests import comparisons
from tests.contract.test_transforms.matrix import tracers_in
from tests.modes import GRAPH_UPDATES
from tests.zoo import Box

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


def test_eval_shape_of_a_model_leaves_concrete_arrays(mode):
    model = Stacked(nnx.Rngs(0), mode)
    before = comparisons.snapshot(model)
    spec = jax.ShapeDtypeStruct(shape=(8, 16), dtype=jnp.float32)
    out = jax.eval_shape(model, spec)
    assert out == jax.ShapeDtypeStruct((8, 10), jnp.float32)
    kinds = jax.tree.map(type, jax.tree.leaves(nnx.split(model)[1]))
    assert len(kinds) == 6 and all(issubclass(kind, jax.Array) for kind in kinds)
    assert comparisons.snapshot(model) == before and not tracers_in(model)


@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint, jax.vmap])
def test_other_transforms_of_a_model_leave_concrete_arrays(transform, mode):
    model = Stacked(nnx.Rngs(0), mode)
    before = comparisons.snapshot(model)
    x = jnp.ones((8, 16))
    expected = model(x)
    assert np.allclose(transform(model)(x), expected, atol=1e-5)
    assert comparisons.snapshot(model) == before and not tracers_in(model)


def test_models_are_made_under_eval_shape(mode):
    shaped = nnx.eval_shape(lambda: Stacked(nnx.Rngs(0), mode))
    made = Stacked(nnx.Rngs(0), mode)
    assert jax.tree.map(jnp.shape, jax.tree.leaves(shaped)) == jax.tree.map(
        jnp.shape, jax.tree.leaves(made)
    )
    assert not tracers_in(shaped)


# ------------------------------------------------------------- the proposal: tree mode


def test_gradients_are_modules(value_mode):
    foo = Box(w=nnx.Param(jnp.array(2.0)))
    grads = nnx.grad(lambda model: model.w**2, **value_mode)(foo)
    assert type(grads) is Box and grads.w[...] == 4.0


def test_prefix_filters_become_prefix_objects(mode):
    foo = Box(w=nnx.Param(jnp.arange(3.0)), count=nnx.BatchStat(jnp.array(1.0)))
    axes = {nnx.Param: 0, ...: None}
    if mode == GRAPH_UPDATES:
        prefix = nnx.StateAxes(axes)
    else:
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
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    cloned = nnx.clone(model, arrays=True)
    pairs = list(zip(jax.tree.leaves(model), jax.tree.leaves(cloned), strict=True))
    assert all(np.array_equal(a, b) for a, b in pairs)
    assert all(a.unsafe_buffer_pointer() != b.unsafe_buffer_pointer() for a, b in pairs)
    step = nnx.jit(lambda a, b, x: a(x) + b(x), donate_argnums=(0, 1))
    step(model, cloned, jnp.ones((1, 2)))
    assert cloned(jnp.ones((1, 2))).shape == (1, 2)
