"""Trains a language model whose layers are on different devices.

    python -m examples.pipeline
    python -m examples.pipeline --stages 2 --micro-batches 4 --steps 50

It compares the pipeline with the same model without one, says what each device holds
and sends, and trains the model on the text of ``pipeline.py``. Devices are simulated.
"""

import pathlib
import sys
import time
from collections.abc import Sequence

from examples.command_lines import OneLineParser, simulate, whole_number

LENGTH = 32
NUMBERS = {"stages": 4, "layers": 8, "micro-batches": 8, "batch": 16, "steps": 20}


def main(arguments: Sequence[str]) -> int:
    """Runs the example; returns the exit code."""
    parser = OneLineParser(
        prog="python -m examples.pipeline", description="A pipeline."
    )
    for name, default in NUMBERS.items():
        parser.add_argument(f"--{name}", type=whole_number(1, 10**6), default=default)
    given = parser.parse_args(arguments)
    if given.layers % given.stages:
        parser.error(f"{given.stages} stages can't share {given.layers} layers evenly")
    if given.batch % given.micro_batches:
        parser.error(f"{given.micro_batches} micro-batches don't divide {given.batch}")
    simulate(given.stages)
    run(**vars(given))
    return 0


def run(stages: int, layers: int, micro_batches: int, batch: int, steps: int) -> None:
    """Compares, reports and trains."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import graftree as nnx
    from examples.lm import layouts
    from examples.lm.model import Config
    from examples.pipeline import pipeline, training

    layout = layouts.make({pipeline.STAGE: stages})
    mesh = layout.mesh
    config = Config(layers=layers, width=64, heads=4, kv_heads=2, hidden=192)
    model, optimizer = training.make(config, layout)
    text = np.frombuffer(pathlib.Path(pipeline.__file__).read_bytes(), np.uint8)
    generator = np.random.default_rng(0)

    def texts() -> jax.Array:
        starts = generator.integers(len(text) - LENGTH, size=batch)
        return jnp.asarray([text[i : i + LENGTH + 1] for i in starts], jnp.int32)

    print(f"{layers} layers on {stages} stages, {micro_batches} micro-batches")
    bubble = pipeline.bubble_fraction(stages, micro_batches)
    print(f"turns: {pipeline.turns(stages, micro_batches)}, bubble: {bubble:.1%}")
    report = nnx.sharding.report(model)
    print(
        f"bytes of parameters: {report.num_bytes:,}; "
        f"on each device {report.bytes_per_device:,}"
    )
    tokens = texts()
    with layout.in_force():
        loss, gradients = training.loss_and_gradients(
            model, tokens, mesh, micro_batches
        )
        expected, expected_gradients = training.loss_and_gradients(model, tokens)
        apart = training.largest_difference(gradients, expected_gradients)
        print(f"loss: {loss:.6f}, without pipeline {expected:.6f}")
        print(f"gradients: at most {apart:.1e} from those without, relatively")
        step = training.train_step.lower(
            model, optimizer, tokens, mesh, micro_batches
        ).compile()
        sent = nnx.forecast.collectives(step)["collective-permute"]
        print(f"collective-permutes in a step: {sent.count}, {sent.bytes:,} bytes")
        began = time.perf_counter()
        for number in range(1, steps + 1):
            loss = step(model, optimizer, texts())
            if number == 1 or number == steps or number % 5 == 0:
                print(f"step {number:3}: loss {loss:.4f}")
    print(f"{steps} steps in {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
