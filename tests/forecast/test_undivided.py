"""Large arrays that a step makes: which of them its devices don't divide."""

import functools

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from tests import tables

BATCH, WIDTH, HIDDEN = 512, 32, 128


class MLP(nnx.Module):
    def __init__(self, kernel, width, hidden, rngs):
        options = {"kernel_metadata": {"out_sharding": kernel}, "use_bias": False}
        self.up = nnx.Linear(width, hidden, rngs=rngs, **options)
        self.down = nnx.Linear(hidden, width, rngs=rngs, **options)

    def __call__(self, x):
        return self.down(jnp.sin(self.up(x)))


@nnx.jit(donate_argnums=0)
def train_step(model, x):
    grads = nnx.grad(lambda model: (model(x) ** 2).sum())(model)
    nnx.update(model, jax.tree.map(lambda p, g: p - g, nnx.state(model), grads))


def forecast_of(batch, kernel=(), step=train_step, stacked=False, target="cpu:8", n=1):
    """A forecast with a batch and kernels divided so, ``n`` times as large."""
    mesh = nnx.forecast.target(target).mesh({"fsdp": 4, "tensor": 2})

    def make():
        block = functools.partial(MLP, kernel, n * WIDTH, n * HIDDEN)
        if stacked:
            return nnx.Stack(lambda rngs: block(rngs=rngs), 3, rngs=nnx.Rngs(0))
        return nnx.Sequential(block(rngs=nnx.Rngs(0)))

    model = nnx.merge(*nnx.get_abstract_model(make, mesh))
    sharding = jax.NamedSharding(mesh, jax.P(*batch))
    x = jax.ShapeDtypeStruct((n * BATCH, n * WIDTH), jnp.float32, sharding=sharding)
    with jax.set_mesh(mesh):
        return nnx.forecast.step(step, model, x)


def whole_of(forecast):
    return {
        (row.path, row.shape, row.way_out)
        for row in forecast.activations
        if row.way_out is not None
    }


def test_activations_of_a_batch_that_is_not_divided_are_listed_with_their_module():
    forecast = forecast_of([])
    up = ("model.layers[0].up", (BATCH, HIDDEN), ("fsdp", 0))
    assert up in whole_of(forecast)
    assert forecast.activations[0].num_bytes == 4 * BATCH * HIDDEN
    text = str(forecast)
    assert "made on every device whole" in text and "fsdp could divide axis 0" in text


@tables.cases("stacked", False, True)
@tables.cases("kernel", (), ("fsdp",))
def test_none_is_listed_of_a_batch_that_is_divided(kernel, stacked):
    """Kernels are whole, or gathered, and their gradients summed."""
    assert whole_of(forecast_of(["fsdp"], kernel, stacked=stacked)) == set()


def test_layers_of_a_stack_are_named():
    paths = {path for path, *_ in whole_of(forecast_of([], stacked=True))}
    assert "model.layers.up" in paths


def test_what_shard_map_divides_is_unknown():
    def step(model, x):
        def part(x):
            return jnp.sin(x) * 2

        mesh = jax.sharding.get_abstract_mesh()
        return jax.shard_map(part, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())(x)

    rows = forecast_of([], step=step).activations
    assert rows and {row.way_out for row in rows} == {None}
    assert "unknown of" in str(forecast_of([], step=step))


def test_sizes_that_no_axis_divides_are_not_listed():
    mesh = nnx.forecast.target("cpu:4").mesh({"data": 4})
    sharding = jax.NamedSharding(mesh, jax.P())
    x = jax.ShapeDtypeStruct((33, 15), jnp.float32, sharding=sharding)
    assert nnx.forecast.step(lambda x: jnp.sin(x @ x.T), x).activations == []


def test_on_one_device_there_is_nothing_to_divide():
    x = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    target = nnx.forecast.target("cpu")
    assert nnx.forecast.step(jnp.sin, x, target=target).activations == []


@pytest.mark.long
@tables.cases("target", "v5e:2x4", "h100:8")
def test_compilers_of_accelerators_name_what_they_make(target):
    """Smaller arrays would stay in the scratchpad of a TPU."""
    try:
        forecast = forecast_of([], target=target, n=32)
    except ImportError as error:
        pytest.skip(str(error).splitlines()[0])
    shapes = {(shape, way_out) for _, shape, way_out in whole_of(forecast)}
    assert ((32 * BATCH, 32 * HIDDEN), ("fsdp", 0)) in shapes
    assert whole_of(forecast_of(["fsdp"], ("fsdp",), target=target, n=32)) == set()
