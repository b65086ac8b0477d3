"""Forecasts: operations, memory and modules against closed forms; errors; targets."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas

import graftree as nnx
from tests import tables
from tests.forecast import models

CPU = "cpu"


def shape(mesh, sizes, *spec, dtype=jnp.float32):
    sharding = jax.NamedSharding(mesh, jax.P(*spec))
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)


def target_or_skip(name):
    try:
        return nnx.forecast.target(name)
    except ImportError as error:
        pytest.skip(str(error).splitlines()[0])


@tables.cases("name", *["cpu", pytest.param("v5e", marks=pytest.mark.long)])
@tables.cases("model", *models.CASES)
def test_operations_are_those_of_the_closed_form(name, model):
    case, target = models.CASES[model], target_or_skip(name)
    forecast = nnx.forecast.step(*case.arguments(), target=target)
    assert forecast.flops == pytest.approx(case.flops, rel=0.02)
    assert forecast.costs.unknown == {} and forecast.costs.unknown_loops == 0


@tables.cases("model", *models.CASES)
@pytest.mark.long
def test_operations_of_gpus_are_those_of_the_closed_form(model):
    case, target = models.CASES[model], target_or_skip("h100")
    forecast = nnx.forecast.step(*case.arguments(), target=target)
    assert forecast.flops == pytest.approx(case.flops, rel=0.02)


def make():
    metadata = {"out_sharding": (None, "tensor")}
    up = nnx.Linear(16, 32, kernel_metadata=metadata, rngs=nnx.Rngs(0))
    model = nnx.Sequential(up, nnx.Linear(32, 8, rngs=nnx.Rngs(1)))
    return model, nnx.Optimizer(model, models.optax.adam(1e-3), wrt=nnx.Param)


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, x):
    grads = nnx.grad(lambda model: (model(x) ** 2).mean())(model)
    optimizer.update(model, grads)


def forecast_of_step():
    mesh = nnx.forecast.target("cpu:4").mesh({"data": 2, "tensor": 2})
    objects = nnx.merge(*nnx.get_abstract_model(make, mesh))
    x = shape(mesh, (64, 16), "data")
    return nnx.forecast.step(train_step, *objects, x), train_step, (*objects, x)


def test_memory_of_arguments_is_the_sum_of_shards():
    memory = forecast_of_step()[0].memory
    params = 4 * (16 * 16 + 32 + 32 * 8 + 8)
    assert memory.parameters == params
    assert memory.optimizer == 2 * params + 4 + 4  # two counters
    assert memory.others == 4 * 32 * 16


def memory_of(function, *args):
    return nnx.forecast.step(function, *args, target=nnx.forecast.target(CPU)).memory


KERNEL = jax.random.normal(jax.random.key(0), (64, 64))


@tables.cases(
    "function",
    lambda x: x @ KERNEL,
    nnx.jit(lambda x: x @ KERNEL),
    lambda x: jax.checkpoint(jax.jit(lambda x: x @ KERNEL + KERNEL[:1]))(x),
    lambda x: jax.lax.scan(lambda x, _: (x @ KERNEL, None), x, None, length=2)[0],
    ids=["function", "jit", "nested", "loop"],
)
def test_what_a_function_closes_over_counts_once(function):
    memory = memory_of(function, jnp.ones((2, 64)))
    assert (memory.constants, memory.others) == (4 * 64 * 64, 4 * 2 * 64)
    assert memory.total >= memory.constants + memory.arguments


def test_arguments_count_as_jax_holds_them():
    assert memory_of(jnp.sin, np.zeros(8)).others == 4 * 8  # float64, for JAX float32
    assert memory_of(lambda x: x.astype(float), jnp.zeros((3, 3), jnp.int4)).others == 5


def test_frozen_params_are_parameters_and_states_of_optax_the_optimizer():
    model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    nnx.surgery.freeze(model, where="kernel")
    memory = memory_of(lambda model, x: model(x), model, jnp.ones((1, 4)))
    assert memory.parameters == 4 * (4 * 8 + 8)
    graphdef, params = nnx.split(nnx.Linear(4, 8, rngs=nnx.Rngs(0)))
    state = nnx.TrainState.create(graphdef, params=params, tx=models.optax.adam(0.1))
    memory = memory_of(lambda state: state.apply_gradients(state.params), state)
    assert memory.parameters == 4 * (4 * 8 + 8)
    assert memory.optimizer == 2 * 4 * (4 * 8 + 8) + 4


def test_a_forecast_for_cpus_is_what_the_compiled_step_has():
    """The same step, on devices that are there."""
    forecast, step, _ = forecast_of_step()
    mesh = jax.make_mesh(
        (2, 2),
        ("data", "tensor"),
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
        devices=jax.devices()[:4],
    )
    objects = nnx.merge(*nnx.get_abstract_model(make, mesh))
    compiled = step.lower(*objects, shape(mesh, (64, 16), "data")).compile()
    stats = compiled.memory_analysis()
    assert stats.argument_size_in_bytes == forecast.memory.arguments
    assert stats.temp_size_in_bytes == forecast.memory.temporaries
    sent = nnx.forecast.collectives(compiled)
    assert sum(x.sent for x in sent.values()) == forecast.sent


def test_modules_add_up_to_the_whole_at_every_depth():
    forecast, *_ = forecast_of_step()
    for depth in (0, 1, 2, None):
        rows = forecast.by_module(depth)
        assert sum(work.flops for _, work in rows) == forecast.flops
        assert sum(work.bytes for _, work in rows) == forecast.bytes
        assert sum(work.sent for _, work in rows) == pytest.approx(forecast.sent)
    flops = {
        (".".join(scope.path), scope.is_backward): work.flops
        for scope, work in forecast.by_module()
        if work.flops
    }
    up, down = 2 * 32 * 16 * 16, 2 * 32 * 32 * 8  # of a device
    assert flops["model.layers[0]", False] == up
    assert sum(flops.values()) == pytest.approx(2 * up + 3 * down, rel=0.5)


def test_what_each_device_has_whole_is_listed_and_the_rest_not():
    rows = [row.path for row in forecast_of_step()[0].undivided]
    assert rows[0] == "model.layers[1].kernel" and "x" not in rows
    assert "model.layers[0].kernel" not in rows


def test_text_html_json_and_pictures_have_the_same_numbers(tmp_path):
    forecast, *_ = forecast_of_step()
    text = str(forecast)
    assert text.startswith("cpu:4: 4 devices, data=2, tensor=2\n")
    assert "model.layers[1].kernel" in text and "all-reduce" in text
    assert "<table>" in forecast._repr_html_()
    content = json.loads(forecast.as_json())
    assert content["memory"]["total"] == forecast.memory.total
    assert sum(x["flops"] for x in content["costs"]["modules"]) == forecast.flops
    forecast.draw(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
    assert forecast.bound is None and forecast.rate(8) is None
    with pytest.raises(ValueError, match="no column 'size'.*\n.*flops, bytes, sent"):
        forecast.table(sort="size")


def test_memory_is_part_of_the_estimate_and_no_bound():
    """A cache, or a kernel that keeps attention weights in registers, moves less."""
    times = {"compute": 0.5, "memory": 2.0, "network": 0.25}
    costs = nnx.forecast.Costs({}, {}, times, {}, 0)
    memory = nnx.forecast.Memory(1, 0, 0, 0, 0, limit=2)
    target = nnx.forecast.target("cpu:4")
    forecast = nnx.forecast.Forecast(target, {}, memory, costs, [], [], (0.0, 0.0))
    assert (forecast.bound, forecast.estimate) == (0.5, 2.0)
    assert forecast.bottleneck == "memory" and forecast.rate(8) == 4
    rows = [line.split() for line in str(forecast).splitlines()]
    assert ["memory", "0", "B", "2.000", "s", "<"] in rows
    assert ["at", "least", "500.000", "ms"] in rows


def test_loops_count_each_turn():
    def scanned(x, w):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=7)[0]

    x, w = [jax.ShapeDtypeStruct((32, 32), jnp.float32)] * 2
    target = nnx.forecast.target(CPU)
    assert nnx.forecast.step(scanned, x, w, target=target).flops == 7 * 2 * 32**3


def test_a_loop_of_unknown_length_is_said():
    def loop(x):
        return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ x, x)

    x = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    forecast = nnx.forecast.step(loop, x, target=nnx.forecast.target(CPU))
    assert forecast.costs.unknown_loops == 1 and "unknown length" in str(forecast)


# --------------------------------------------------------------------------- choices


def _batch(size):
    return (jax.ShapeDtypeStruct((size, 100), jnp.float32),)


@tables.cases("memory, size", (8000, 10), (8799, 10), (799, 0), (1e9, 64))
def test_the_largest_size_is_the_last_that_fits(memory, size):
    result = nnx.forecast.largest(
        jnp.sin, _batch, memory=memory, at_most=64, target=nnx.forecast.target(CPU)
    )
    assert result.size == size
    assert result.forecast.memory.total == 800 * max(size, 1)


def test_the_largest_size_is_a_multiple_and_found_on_curves():
    def square(x):
        return x @ x.T

    options = {"memory": 40_000, "target": nnx.forecast.target(CPU)}
    totals = nnx.forecast.largest(square, _batch, at_most=99, **options).totals
    fits = max(n for n, total in totals.items() if total <= 40_000)
    assert totals[fits + 1] > 40_000
    some = nnx.forecast.largest(square, _batch, at_most=99, multiple_of=4, **options)
    assert some.size == fits // 4 * 4


def test_sizes_that_there_are_not_are_refused():
    with pytest.raises(ValueError, match="multiple of 8 and at most 4"):
        nnx.forecast.largest(jnp.sin, _batch, multiple_of=8, at_most=4)
    target = nnx.forecast.target(CPU)
    with pytest.raises(ValueError, match="memory of a CPU is unknown"):
        nnx.forecast.largest(jnp.sin, _batch, target=target)
    with pytest.raises(ValueError, match="no forecasts"):
        nnx.forecast.compare({})


# ---------------------------------------------------------------------------- errors


def test_unknown_targets_are_refused_with_those_there_are():
    for name in ("v9", "h100:0", "h100:4y8", "h100:-1"):
        with pytest.raises(ValueError, match="no such target.*\n.*v5e.*h100.*cpu"):
            nnx.forecast.target(name)


def test_a_mesh_must_have_the_devices_of_the_target():
    with pytest.raises(ValueError, match=r"data=3 has 3 devices, but .* 'cpu:4' has 4"):
        nnx.forecast.target("cpu:4").mesh({"data": 3})


def test_arguments_of_other_devices_are_refused_before_tracing():
    mesh = nnx.forecast.target("cpu:4").mesh({"data": 4})
    other = nnx.forecast.target("cpu:8").mesh({"data": 8})
    x = shape(mesh, (8,), "data")

    def never(*_):
        pytest.fail("it was traced")

    real = jax.device_put(jnp.ones(8), jax.devices()[0])
    with pytest.raises(ValueError, match=r"devices of this machine.*\n.*b\[0\]\n"):
        nnx.forecast.step(lambda a, b: never(), x, [real])
    with pytest.raises(ValueError, match="several targets.*\n.*cpu:4\n.*cpu:8"):
        nnx.forecast.step(never, x, shape(other, (8,), "data"))
    two = nnx.forecast.target("cpu:4").mesh({"data": 2, "tensor": 2})
    with pytest.raises(ValueError, match="several meshes"):
        nnx.forecast.step(never, x, shape(two, (8,), "data"))
    with pytest.raises(ValueError, match="no target is given"):
        nnx.forecast.step(never, jnp.ones(8))
    with pytest.raises(ValueError, match="has 4 devices, but nothing says"):
        nnx.forecast.step(never, jnp.ones(8), target=nnx.forecast.target("cpu:4"))


@pytest.fixture
def filtering():
    """JAX takes its frames out of tracebacks, as for users."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "auto")
    yield
    jax.config.update("jax_traceback_filtering", before)


def test_a_kernel_of_another_platform_names_its_module(filtering):
    class Kernel(nnx.Module):
        def __call__(self, x):
            def double(x_ref, y_ref):
                y_ref[...] = x_ref[...] * 2

            return pallas.pallas_call(double, out_shape=x)(x)

    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    model, target = nnx.Sequential(Kernel()), nnx.forecast.target(CPU)
    with pytest.raises(ValueError, match="interpret mode") as caught:
        nnx.forecast.step(lambda model, x: model(x), model, x, target=target)
    assert "'pallas_call' in model.layers[0]" in caught.value.__notes__[-1]


@pytest.mark.long
def test_a_program_that_does_not_compile_names_its_module(filtering):
    class Eigen(nnx.Module):
        def __call__(self, x):
            return jnp.linalg.eigvals(x)

    target = target_or_skip("v5e")
    x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    model = nnx.Sequential(Eigen())
    with pytest.raises(NotImplementedError) as caught:
        nnx.forecast.step(lambda model, x: model(x), model, x, target=target)
    note = caught.value.__notes__[-1]
    assert "'v5e'" in note and "'eig' in model.layers[0]" in note
