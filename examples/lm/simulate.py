"""A training step for hundreds of devices, compiled on a machine that has none of them.

    python -m examples.lm.simulate                      7B parameters, 256 devices
    python -m examples.lm.simulate --mesh data=4,fsdp=8,tensor=8 --batch 64
    python -m examples.lm.simulate --tiny               a model of bytes, 8 devices

The step is that of `train`, lowered and compiled ahead of time from shapes: neither a
parameter nor a batch is ever made. XLA divides the program for so many CPU devices of
one process, and says what a device would hold and send. Nothing is run: there are no
losses and no speeds, and a compiler for TPUs or GPUs plans memory and communication in
its own way.
"""

import dataclasses
import functools
import math
import os
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from examples import command_lines
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
        mesh: The size of each axis of the mesh, by name.
        batch: Number of texts in a step.
        length: Number of tokens of a text.
        layers: As in `model.Config`; likewise the rest.
    """

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

    @property
    def devices(self) -> int:
        """How many devices the mesh has."""
        return math.prod(self.mesh.values())


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
    add("--mesh", type=converted(parse_mesh), help="as in fsdp=64,tensor=4")
    for field in dataclasses.fields(Plan)[1:]:
        add(f"--{field.name}", type=size, help=f"default: {field.default}")
    given = vars(parser.parse_args(arguments))
    plan = TINY if given.pop("tiny") else Plan()
    changes = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(plan, **changes)


def main(arguments: Sequence[str]) -> int:
    """Simulates what the options say; returns the exit code."""
    plan = plan_of(arguments)
    os.environ["JAX_PLATFORMS"] = "cpu"
    command_lines.simulate(plan.devices)  # JAX counts them when it starts
    simulate(plan)
    return 0


def simulate(plan: Plan) -> None:
    """Lowers and compiles the step of a plan, and prints what is found."""
    from examples.lm import layouts, train
    from examples.lm.model import Config

    sizes = ("vocabulary", "layers", "width", "heads", "kv_heads", "hidden")
    sizes = {name: getattr(plan, name) for name in sizes}
    config = Config(**sizes, stacked=True, remat=True)
    print(f"{plan.devices} simulated devices: {in_words(plan.mesh)}")
    print(f"batch: {plan.batch} texts of {plan.length} tokens; {POLICY}; AdamW; remat")
    layout = layouts.make(plan.mesh)
    began = time.perf_counter()
    with layout.in_force():
        model, optimizer, tokens = abstract_arguments(plan, config, layout)
        made = time.perf_counter()
        show_parameters(model, optimizer)
        lowered = train.train_step.lower(model, optimizer, tokens)
        done = time.perf_counter()
        compiled = lowered.compile()
    compile_time = time.perf_counter() - done
    show_program(compiled)
    print(
        f"abstract model {made - began:.1f} s, lowering {done - made:.1f} s, "
        f"compilation {compile_time:.1f} s"
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak memory of this process: {peak:.2f} GiB")
    print("not run: no array was made, so there are no losses and no speeds")


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


def show_parameters(model: Any, optimizer: Any) -> None:
    """Prints how many parameters there are, and what a device holds of them."""
    import graftree as nnx

    report = nnx.sharding.report(model)
    count = sum(math.prod(row.shape) for row in report.rows)
    both = nnx.sharding.report((model, optimizer))
    largest = max(report.rows, key=lambda row: row.num_bytes)
    print(f"parameters: {count:,}")
    print(
        f"parameters and optimizer: {_size(both.num_bytes)}, "
        f"{_size(both.bytes_per_device)} per device"
    )
    print(
        f"largest array: {largest.path} {largest.shape}, "
        f"{largest.local_shape} per device"
    )


def show_program(compiled: Any) -> None:
    """Prints what a device holds and sends in a step, as the compiler says."""
    from examples.lm import hlo

    memory = compiled.memory_analysis()
    held = {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "of these in place of arguments": memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
    }
    print("per device and step:")
    for name, size in held.items():
        print(f"  {name:30} {_size(size):>12}")
    text = compiled.as_text()
    for kind, found in hlo.collectives(text).items():
        print(f"  {kind:30} {_size(found.num_bytes):>12} in {found.count:,} arrays")
    print(f"  {'lines of the program':30} {len(text.splitlines()):>12,}")


def _size(count: int) -> str:
    """A number of bytes in words."""
    return f"{count / 2**20:,.3f} MiB" if count < 2**24 else f"{count / 2**30:.3f} GiB"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
