"""The recipes of docs/guides/initialization.md: sizes of an example, parts made again.

No function of its own serves them, so these tests hold what they rest on.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import graftree as nnx
from graftree import errors
from tests import meshes


class Net(nnx.Module):
    """Layers after the first get their sizes from an example."""

    def __init__(self, example, *, rngs):
        self.encoder = nnx.Sequential(
            nnx.Conv(example.shape[-1], 4, (3, 3), strides=2, rngs=rngs),
            nnx.BatchNorm(4, rngs=rngs),
            nnx.relu,
            nnx.Dropout(0.5, rngs=rngs),
            lambda x: x.reshape(x.shape[0], -1),
        )
        encoded = nnx.eval_shape(self.encoder, example)
        self.head = nnx.Linear(encoded.shape[-1], 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.encoder(x))


@pytest.mark.parametrize("example", [jnp.ones((1, 8, 6, 2)), (2, 8, 6, 2)])
def test_an_example_gives_sizes_and_changes_nothing(example, mode):
    if isinstance(example, tuple):
        example = jax.ShapeDtypeStruct(example, jnp.float32)
    with nnx.set_graph_mode(mode["graph"]):
        net = Net(example, rngs=nnx.Rngs(0))
    direct = nnx.Linear(4 * 4 * 3, 3, rngs=nnx.Rngs(0))
    assert net.head.kernel.shape == direct.kernel.shape
    norm, dropout = net.encoder.layers[1], net.encoder.layers[3]
    np.testing.assert_array_equal(norm.mean[...], np.zeros(4))
    assert dropout.rngs.count[...] == 0
    assert net(jnp.ones((5, 8, 6, 2))).shape == (5, 3)


@pytest.mark.parametrize("transform", [nnx.jit, nnx.eval_shape, jax.eval_shape])
def test_sizes_of_an_example_in_a_traced_constructor(transform):
    def make():
        return Net(jnp.ones((1, 8, 6, 2)), rngs=nnx.Rngs(0))

    made = transform(make)() if transform is nnx.jit else transform(make)
    assert made.head.kernel.shape == (48, 3)


# ------------------------------------------------------------------ a part made again


class Model(nnx.Module):
    def __init__(self, rngs, tied=False):
        init = nnx.initializers.normal(3.0)
        self.embed = nnx.Embed(8, 8, rngs=rngs)
        self.blocks = nnx.Stack(lambda rngs: nnx.Linear(8, 8, rngs=rngs), 3, rngs=rngs)
        self.head = nnx.Linear(8, 8, kernel_init=init, use_bias=False, rngs=rngs)
        self.gain = nnx.Param(jnp.ones(8))
        if tied:
            self.head.kernel = self.embed.embedding


def again(model, name, **options):
    """The recipe."""
    fresh = nnx.jit(lambda: nnx.state(getattr(Model(nnx.Rngs(1), **options), name)))()
    nnx.checkpoints.load_state(getattr(model, name), fresh)


def params(model):
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {path: np.asarray(leaf[...]) for path, leaf in state}


def changed(before, after):
    return {path for path in before if not np.array_equal(before[path], after[path])}


def test_a_part_is_as_its_constructor_makes_it_and_the_rest_untouched():
    model = Model(nnx.Rngs(0))
    variable, before = model.head.kernel, params(model)
    again(model, "head")
    assert changed(before, params(model)) == {("head", "kernel")}
    # Computed in one program with the others, the numbers round as they will.
    expected = Model(nnx.Rngs(1)).head.kernel[...]
    np.testing.assert_allclose(model.head.kernel[...], expected, rtol=1e-6)
    assert model.head.kernel is variable and 2 < np.std(variable[...]) < 4


def test_a_stack_is_made_again_where_it_is():
    model = Model(nnx.Rngs(0))
    kernel, before = model.blocks.layers.kernel, params(model)
    sharding = jax.NamedSharding(meshes.mesh_of(model=8), jax.P(None, None, "model"))
    kernel.set_value(jax.device_put(kernel[...], sharding))
    again(model, "blocks")
    assert changed(before, params(model)) == {("blocks", "layers", "kernel")}
    assert kernel[...].sharding == sharding
    expected = Model(nnx.Rngs(1)).blocks.layers.kernel[...]
    np.testing.assert_allclose(kernel[...], expected, rtol=1e-6)


def test_a_tied_weight_is_new_in_both_places():
    model = Model(nnx.Rngs(0), tied=True)
    again(model, "head", tied=True)
    assert model.head.kernel is model.embed.embedding
    expected = Model(nnx.Rngs(1), tied=True).embed.embedding[...]
    np.testing.assert_allclose(model.embed.embedding[...], expected, rtol=1e-6)


def test_another_constructor_is_an_error_that_changes_nothing():
    model, other = Model(nnx.Rngs(0)), nnx.Linear(8, 4, rngs=nnx.Rngs(1))
    before = params(model)
    with pytest.raises(errors.StateMismatchError, match="kernel"):
        nnx.checkpoints.load_state(model.head, nnx.state(other))
    assert not changed(before, params(model))


def test_moments_of_a_part_are_set_back():
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    optimizer.update(model, grads)
    moments = nnx.state(optimizer, nnx.surgery.at("opt_state.**.head.**"))
    nnx.update(optimizer, jax.tree.map(jnp.zeros_like, moments))
    mu, nu = optimizer.opt_state[0].mu, optimizer.opt_state[0].nu
    for moment in (mu, nu):
        assert not np.any(moment["head"]["kernel"][...])
        assert np.all(moment["embed"]["embedding"][...])
    optimizer.update(model, grads)
