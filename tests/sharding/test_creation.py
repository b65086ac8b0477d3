"""Models made on a mesh: no device ever holds a whole array that is to be split."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding

import graftree as nnx

KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])


def mesh_of(kind, **sizes):
    return jax.make_mesh((*sizes.values(),), (*sizes,), axis_types=(kind,) * len(sizes))


class Net(nnx.Module):
    def __init__(self, rngs):
        up = {"out_sharding": ("embed", "mlp"), "optimizer_sharding": ("batch", "mlp")}
        self.up = nnx.Linear(8, 16, kernel_metadata=up, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


RULES = [("embed", None), ("mlp", "model"), ("batch", "data")]


@KINDS
def test_values_are_those_without_a_mesh_and_lie_as_annotated(kind):
    mesh = mesh_of(kind, data=2, model=4)
    model = nnx.sharding.init(lambda: Net(nnx.Rngs(0)), mesh, RULES)
    with nnx.use_eager_sharding(False):
        expected = Net(nnx.Rngs(0))
    states = [nnx.to_flat_state(nnx.state(x)) for x in (model, expected)]
    for (path, found), (other, leaf) in zip(*states, strict=True):
        assert path == other
        assert isinstance(found[...].sharding, NamedSharding)
        if not isinstance(leaf, nnx.RngKey):
            np.testing.assert_allclose(found[...], leaf[...], rtol=1e-6)
    kernel = model.up.kernel
    assert kernel.out_sharding == ("embed", "mlp")
    assert kernel[...].sharding.shard_shape((8, 16)) == (8, 4)
    assert model.down.kernel[...].sharding.is_fully_replicated


@KINDS
def test_optimizer_state_follows_its_own_annotation(kind):
    mesh = mesh_of(kind, data=2, model=4)

    def make():
        model = Net(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    model, optimizer = nnx.sharding.init(make, mesh, RULES)
    mu = optimizer.opt_state[0].mu["up"]["kernel"]
    assert mu[...].sharding.shard_shape((8, 16)) == (4, 4)
    assert optimizer.step[...].sharding.is_fully_replicated

    @nnx.jit
    def step(model, optimizer, x):
        grads = nnx.grad(lambda model: jnp.sum(model.down(model.up(x))))(model)
        optimizer.update(model, grads)

    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        step(model, optimizer, jnp.ones((4, 8)))
    assert model.up.kernel[...].sharding.shard_shape((8, 16)) == (8, 4)
    assert int(optimizer.step[...]) == 1


def test_no_device_holds_a_whole_array_while_it_is_made(monkeypatch):
    mesh = mesh_of(AxisType.Auto, model=8)
    jit, programs = jax.jit, []

    def make():
        metadata = {"out_sharding": (None, "model")}
        return nnx.Linear(64, 1024, kernel_metadata=metadata, rngs=nnx.Rngs(0))

    def recording(*args, **kwargs):
        programs.append(jit(*args, **kwargs))
        return programs[-1]

    with monkeypatch.context() as patch, jax.set_mesh(mesh):
        patch.setattr(jax, "jit", recording)
        nnx.sharding.init(make, mesh)
        memory = programs[-1].lower().compile().memory_analysis()
    part = 64 * 1024 * 4 // 8
    assert part <= memory.output_size_in_bytes < 1.2 * part
    assert memory.temp_size_in_bytes < 4 * part


def test_rules_and_names_that_do_not_fit_are_refused():
    mesh = mesh_of(AxisType.Auto, model=8)
    with pytest.raises(ValueError, match="embed"):
        nnx.sharding.init(lambda: Net(nnx.Rngs(0)), mesh)
