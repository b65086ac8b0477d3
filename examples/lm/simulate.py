"""A training step for hundreds of devices, compiled on a machine that has none of them.

    python -m examples.lm.simulate --target v5e:16x16   7B parameters, 256 devices
    python -m examples.lm.simulate --target h100:8x8 --mesh fsdp=64
    python -m examples.lm.simulate                      for CPUs, so without figures
    python -m examples.lm.simulate --tiny               a model of bytes, 8 devices
    python -m examples.lm.simulate --largest batch ...  the largest batch that fits

The step is that of `train`, compiled ahead of time from shapes: neither a parameter nor
a batch is ever made, and nothing is run. `nnx.forecast` says what a device would hold,
compute and send, and the least time of a step. The compilers of TPUs and GPUs come with
``graftree[forecast-tpu]`` and ``graftree[forecast-gpu]``.
"""

import dataclasses
import functools
import math
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from examples.command_lines import OneLineParser, whole_number
from examples.lm.settings import converted, in_words, parse_mesh

if TYPE_CHECKING:
    import graftree as nnx
    from examples.lm.layouts import Layout

# The sizes that can be looked for, and what they are multiples of.
LARGEST = {"batch": 1, "length": 128, "layers": 1}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is simulated; as defaults, the sizes of Llama 2 7B.

    Attributes:
        target: The devices, as `nnx.forecast.target` takes them; empty for as many CPUs
            as the mesh has.
        mesh: The size of each axis of the mesh, by name.
        largest: The name of a size, such as ``"batch"``: the largest that fits is
            looked for, a multiple of the number of devices if it is the batch.
        params: The dtype of parameters, and so of AdamW's moments: ``f32`` or ``bf16``.
        micro_batches: In how many parts the gradient is computed.
        batch: Number of texts in a step.
        length: Number of tokens of a text.
        layers: As in `model.Config`; likewise the rest.
    """

    target: str = ""
    mesh: Mapping[str, int] = dataclasses.field(
        default_factory=lambda: {"fsdp": 64, "tensor": 4}
    )
    largest: str = ""
    params: str = "f32"
    micro_batches: int = 1
    batch: int = 256
    length: int = 2048
    layers: int = 32
    width: int = 4096
    heads: int = 32
    kv_heads: int = 32
    hidden: int = 11008
    vocabulary: int = 32000

    @property
    def policy(self) -> str:
        """The policy of precision."""
        return f"params={self.params}, compute=bf16, output=f32"


TINY = Plan(
    mesh={"fsdp": 4, "tensor": 2},
    batch=8,
    length=16,
    layers=2,
    width=32,
    heads=4,
    kv_heads=2,
    hidden=64,
    vocabulary=256,
)


def plan_of(arguments: Sequence[str]) -> Plan:
    """Reads a command line."""
    parser = OneLineParser(
        prog="python -m examples.lm.simulate", description="A step for many devices."
    )
    add, size = parser.add_argument, whole_number(1, 2**20)
    add("--tiny", action="store_true", help="small sizes, 8 devices")
    add("--target", help="as in v5e:16x16, h100:8, h100:4x8, cpu:256 (default: CPUs)")
    add("--mesh", type=converted(parse_mesh), help="as in fsdp=64,tensor=4")
    add("--largest", choices=LARGEST, help="the largest of it that fits")
    add("--params", choices=("f32", "bf16"), help="dtype of parameters and moments")
    for field in dataclasses.fields(Plan)[4:]:  # the sizes
        add(f"--{field.name}", type=size, help=f"default: {field.default}")
    options = vars(parser.parse_args(arguments))
    plan = TINY if options.pop("tiny") else Plan()
    changes = {name: value for name, value in options.items() if value is not None}
    plan = dataclasses.replace(plan, **changes)
    if plan.largest and plan.target.partition(":")[0] in ("", "cpu"):
        parser.error("--largest: the memory of a CPU is unknown; add --target")
    return plan


def main(arguments: Sequence[str]) -> int:
    """Simulates what the options say; returns the exit code."""
    plan = plan_of(arguments)
    os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        simulate(plan)
    except (ImportError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def simulate(plan: Plan) -> None:
    """Compiles the step of a plan for its target, and prints the forecast."""
    import graftree as nnx

    print(
        f"{plan.target or 'CPUs'}: {in_words(plan.mesh)}; {plan.policy}; AdamW; remat"
    )
    plan, forecast = find_largest(plan) if plan.largest else (plan, forecast_of(plan))
    layout = layout_of(plan)
    with layout.in_force():
        rows = nnx.sharding.report(abstract_arguments(plan, layout)[0]).rows
    print(f"parameters: {sum(math.prod(row.shape) for row in rows):,}")
    print(f"batch: {plan.batch} texts of {plan.length} tokens; {plan.layers} layers\n")
    print(f"{forecast}\n\n{forecast.table(depth=3, sort='flops')}\n")
    if rate := forecast.rate(plan.batch * plan.length):
        print(f"at most {rate:,.0f} tokens per second and device")
    tracing, compilation = forecast.seconds
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"tracing {tracing:.1f} s, compilation {compilation:.1f} s, {peak:.2f} GiB")


def forecast_of(plan: Plan) -> "nnx.forecast.Forecast":
    """Compiles the step of a plan for its target."""
    import graftree as nnx
    from examples.lm import train

    layout = layout_of(plan)
    with layout.in_force():
        return nnx.forecast.step(train.train_step, *abstract_arguments(plan, layout))


def find_largest(plan: Plan) -> "tuple[Plan, nnx.forecast.Forecast]":
    """Finds the largest of a size that fits, and prints what each needs.

    Returns:
        The plan with that size, or with the smallest if none fits; and its forecast.
    """
    import graftree as nnx
    from examples.lm import train

    layout, multiple_of = layout_of(plan), LARGEST[plan.largest]
    if plan.largest == "batch":
        multiple_of = plan.micro_batches * math.prod(plan.mesh.values())

    def with_size(size: int) -> Plan:
        return dataclasses.replace(plan, **{plan.largest: size})

    with layout.in_force():
        found = nnx.forecast.largest(
            train.train_step,
            lambda size: abstract_arguments(with_size(size), layout),
            multiple_of=multiple_of,
        )
    for size, total in found.totals.items():
        print(f"{plan.largest} {size:,}: {total / 2**30:.2f} GiB")
    print(f"largest {plan.largest} that fits: {found.size or 'none'}")
    return with_size(found.size or min(found.totals)), found.forecast


def layout_of(plan: Plan) -> "Layout":
    """The mesh of a plan on the devices of its target, and the rules for it."""
    import graftree as nnx
    from examples.lm import layouts

    target = nnx.forecast.target(plan.target or f"cpu:{math.prod(plan.mesh.values())}")
    return layouts.on_mesh(target.mesh(plan.mesh))


def abstract_arguments(plan: Plan, layout: "Layout") -> tuple[Any, Any, Any, int]:
    """What the step takes, as shapes that know where they would be."""
    import jax
    import jax.numpy as jnp

    import graftree as nnx
    from examples.lm import train
    from examples.lm.model import Config

    names = ("vocabulary", "layers", "width", "heads", "kv_heads", "hidden")
    sizes = {name: getattr(plan, name) for name in names}
    config = Config(**sizes, stacked=True, remat=True)
    recipe = train.Recipe(precision=plan.policy)
    make = functools.partial(train.make_objects, config, recipe)
    model, optimizer = nnx.merge(*nnx.get_abstract_model(make, layout.mesh))
    shape = (plan.batch, plan.length + 1)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=layout.batch)
    return model, optimizer, tokens, plan.micro_batches


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
