"""What compilers of accelerators make of train steps, on a machine without any.

The steps are those of `accelerator_models`, with AdamW, donated arguments and abstract
arrays. What is compared is exact: operations, bytes that the compiler of a TPU counts,
temporaries, kernels (instructions that run, fused ones as one), and the size of the
code. It needs ``graftree[forecast-tpu]`` and ``graftree[forecast-gpu]``.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

import graftree
from benchmarks import accelerator_models as models, gauges, groups
from benchmarks.accelerator_models import Sizes
from benchmarks.gauges import Operation
from benchmarks.groups import Group, Made, Quantity
from graftree.forecast import costs, hlo

TARGETS = ("v5e:1x1", "h100:1")
ADAMW = optax.adamw(1e-3)


def _quantity(unit: str, scale: float, digits: int) -> Quantity:
    return Quantity(unit, scale, gauges.reading, digits)


QUANTITIES = {
    "operations": _quantity("Gflop", 1e-9, 2),
    "bytes accessed": _quantity("GB", 1e-9, 3),
    "temporaries": _quantity("MiB", 2**-20, 1),
    "kernels": _quantity("kernels", 1, 0),
    "code": _quantity("KiB", 2**-10, 0),
}
GOALS = {"operations": "1.01 raw", "bytes accessed": "1.02 raw"}
GOALS |= {"temporaries": "1.01 raw", "kernels": "1.02 raw"}
# What compilers of GPUs don't say.
OF_TPUS = ("bytes accessed", "code")


def all_groups(
    *targets: str, quantities: Sequence[str] = tuple(QUANTITIES)
) -> list[Group]:
    """Each quantity of each model on each target."""
    return [
        groups.compared(
            f"accelerators, {target}, {name}: {quantity}",
            *(QUANTITIES[quantity], "", _made(quantity), name, target),
            in_modes=False,
            target=GOALS.get(quantity, ""),
        )
        for target in targets or TARGETS
        for name in models.SIZES
        for quantity in quantities
        if quantity not in OF_TPUS or target.startswith("v")
    ]


def _made(quantity: str) -> Made:
    """Makes the operations of `groups.compared` that read a quantity of a program."""

    def reading_of(lower: Callable[..., Any]) -> Callable[..., Operation]:
        def make(*args: Any) -> Operation:
            *modules, name, target = args
            return lambda: _figures(lower, *modules, name, target)[quantity]

        return make

    return Made(*map(reading_of, (lower_raw, lower_nnx, lower_equinox)))


@functools.cache
def _figures(lower: Callable[..., Any], *args: Any) -> dict[str, float]:
    """Compiles a step for a target and reads its program."""
    *modules, name, target = args
    place = functools.partial(_placed, graftree.forecast.target(target))
    compiled = lower(*modules, name, models.SIZES[name], place).compile()
    program, stats = hlo.Program(compiled.as_text()), compiled.memory_analysis()
    counted = [
        (count, product.count or 0)
        for computation, count in program.runs()
        for instruction in computation.values()
        for product in costs.products(program, computation, instruction)
    ]
    analysis = compiled.cost_analysis() or {}
    return {
        "operations": sum(count * flops for count, flops in counted),
        "bytes accessed": analysis.get("bytes accessed", 0),
        "temporaries": stats.temp_size_in_bytes,
        "kernels": kernels(program),
        "code": stats.generated_code_size_in_bytes,
    }


def kernels(program: hlo.Program) -> int:
    """How many instructions of a program do something on the device."""
    return sum(
        count * costs.is_kernel(instruction)
        for computation, count in program.runs()
        for instruction in computation.values()
    )


def _placed(target: Any, tree: Any) -> Any:
    """Arrays as shapes on a device of a target."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=target.sharding), tree
    )


# ---------------------------------------------------------------------- the libraries


def lower_raw(name: str, sizes: Sizes, place: Callable[[Any], Any]) -> Any:
    """Lowers the step in plain JAX."""
    params, stats = raw_state(name, sizes)
    opt_state = jax.eval_shape(ADAMW.init, params)
    step = jax.jit(functools.partial(raw_step, name, sizes), donate_argnums=(0, 1, 2))
    return step.lower(*place((params, stats, opt_state, *models.batch(name, sizes))))


def raw_step(
    name: str, sizes: Sizes, params: Any, stats: Any, opt_state: Any, x: Any, y: Any
) -> Any:
    """A step as a pure function."""

    def loss_of(params):
        logits, moved = models.RAW[name](params, stats, x, sizes)
        return models.loss(logits, y), moved

    (loss, moved), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
    updates, opt_state = ADAMW.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), moved, opt_state, loss


def raw_state(name: str, sizes: Sizes) -> tuple[Any, Any]:
    """Parameters and statistics as nested dicts of shapes."""
    model, _ = nnx_objects(graftree, name, sizes)
    parts = graftree.state(model, graftree.Param, graftree.BatchStat)
    params, stats = map(graftree.to_pure_dict, parts)
    return params, stats


def nnx_objects(nnx: Any, name: str, sizes: Sizes) -> tuple[Any, Any]:
    """The abstract model and optimizer of Graftree or Flax NNX."""

    def make():
        model = models.nnx_classes(nnx)[name](sizes, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, ADAMW, wrt=nnx.Param)

    return nnx.eval_shape(make)


def lower_nnx(nnx: Any, name: str, sizes: Sizes, place: Callable[[Any], Any]) -> Any:
    """Lowers the step of Graftree or Flax NNX."""

    @functools.partial(nnx.jit, donate_argnums=(0, 1))
    def step(model, optimizer, x, y):
        loss, grads = nnx.value_and_grad(lambda m, x, y: models.loss(m(x), y))(
            model, x, y
        )
        optimizer.update(model, grads)
        return loss

    graphdef, state = nnx.split(nnx_objects(nnx, name, sizes))
    objects = nnx.merge(graphdef, place(state))
    return step.lower(*objects, *place(models.batch(name, sizes)))


def lower_equinox(
    eqx: Any, name: str, sizes: Sizes, place: Callable[[Any], Any]
) -> Any:
    """Lowers the step of Equinox."""
    make = functools.partial(models.equinox_classes(eqx)[name], sizes)
    model, state = eqx.filter_eval_shape(
        lambda: eqx.nn.make_with_state(make)(key=jax.random.key(0))
    )
    params, static = eqx.partition(model, _is_array)
    opt_state = jax.eval_shape(ADAMW.init, params)

    def step(params, state, opt_state, x, y):
        def loss_of(params):
            params = jax.tree.map(lambda p: p.astype(models.DTYPE), params)
            model = eqx.combine(params, static)
            call = jax.vmap(model, (0, None), (0, None), axis_name="batch")
            logits, moved = call(x, state)
            return models.loss(logits, y), moved

        (loss, moved), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, moments = ADAMW.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), moved, moments, loss

    args = place((params, state, opt_state, *models.batch(name, sizes)))
    return jax.jit(step, donate_argnums=(0, 1, 2)).lower(*args)


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape")
