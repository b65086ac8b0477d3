"""A training step for hundreds of devices, compiled on a machine that has none of them.

    python -m examples.lm.simulate --target v5e:16x16   7B parameters, 256 devices
    python -m examples.lm.simulate --target h100:8x8 --mesh fsdp=64
    python -m examples.lm.simulate                      for CPUs, so without figures
    python -m examples.lm.simulate --tiny               a model of bytes, 8 devices

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
    from examples.lm.layouts import Layout
    from examples.lm.model import Config

POLICY = "params=f32, compute=bf16, output=f32"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is simulated; as defaults, the sizes of Llama 2 7B.

    Attributes:
        target: The devices, as `nnx.forecast.target` takes them; empty for as many CPUs
            as the mesh has.
        mesh: The size of each axis of the mesh, by name.
        batch: Number of texts in a step.
        length: Number of tokens of a text.
        layers: As in `model.Config`; likewise the rest.
    """

    target: str = ""
    mesh: Mapping[str, int] = dataclasses.field(
        default_factory=lambda: {"fsdp": 64, "tensor": 4}
    )
    batch: int = 256
    length: int = 2048
    layers: int = 32
    width: int = 4096
    heads: int = 32
    kv_heads: int = 32
    hidden: int = 11008
    vocabulary: int = 32000


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
    for field in dataclasses.fields(Plan)[2:]:
        add(f"--{field.name}", type=size, help=f"default: {field.default}")
    options = vars(parser.parse_args(arguments))
    plan = TINY if options.pop("tiny") else Plan()
    changes = {name: value for name, value in options.items() if value is not None}
    return dataclasses.replace(plan, **changes)


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
    from examples.lm import layouts, train
    from examples.lm.model import Config

    target = nnx.forecast.target(plan.target or f"cpu:{math.prod(plan.mesh.values())}")
    layout = layouts.on_mesh(target.mesh(plan.mesh))
    sizes = ("vocabulary", "layers", "width", "heads", "kv_heads", "hidden")
    sizes = {name: getattr(plan, name) for name in sizes}
    config = Config(**sizes, stacked=True, remat=True)
    print(f"{target.name}: {in_words(plan.mesh)}")
    print(f"batch: {plan.batch} texts of {plan.length} tokens; {POLICY}; AdamW; remat")
    with layout.in_force():
        arguments = abstract_arguments(plan, config, layout)
        forecast = nnx.forecast.step(train.train_step, *arguments)
    rows = nnx.sharding.report(arguments[0]).rows
    print(f"parameters: {sum(math.prod(row.shape) for row in rows):,}\n")
    print(f"{forecast}\n\n{forecast.table(depth=3, sort='flops')}\n")
    if rate := forecast.rate(plan.batch * plan.length):
        print(f"at most {rate:,.0f} tokens per second and device")
    tracing, compilation = forecast.seconds
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"tracing {tracing:.1f} s, compilation {compilation:.1f} s, {peak:.2f} GiB")


def abstract_arguments(
    plan: Plan, config: "Config", layout: "Layout"
) -> tuple[Any, Any, Any]:
    """What the step takes, as shapes that know where they would be."""
    import jax
    import jax.numpy as jnp

    import graftree as nnx
    from examples.lm import train

    make = functools.partial(train.make_objects, config, train.Recipe(precision=POLICY))
    model, optimizer = nnx.merge(*nnx.get_abstract_model(make, layout.mesh))
    shape = (plan.batch, plan.length + 1)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=layout.batch)
    return model, optimizer, tokens


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
