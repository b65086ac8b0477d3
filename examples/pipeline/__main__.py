"""Trains a language model whose layers are on different devices.

    python -m examples.pipeline
    python -m examples.pipeline --stages 2 --micro-batches 4 --steps 50

It compares the pipeline with the same model without one, says what each device holds
and sends, and trains the model on the text of ``pipeline.py``. Devices are simulated.
"""

import argparse
import os
import pathlib
import sys
import time
from collections.abc import Sequence

LENGTH = 32


def main(arguments: Sequence[str]) -> int:
    """Runs the example; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.pipeline", description="A pipeline."
    )
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args(arguments)
    if min(vars(given).values()) < 1:
        parser.error("all numbers must be at least 1")
    if given.layers % given.stages:
        parser.error(f"{given.stages} stages can't share {given.layers} layers evenly")
    if given.batch % given.micro_batches:
        parser.error(f"{given.micro_batches} micro-batches don't divide {given.batch}")
    # Before the backend is made: it has as many devices as there are stages.
    flag = f"--xla_force_host_platform_device_count={given.stages}"
    os.environ["XLA_FLAGS"] = f"{flag} {os.environ.get('XLA_FLAGS', '')}".strip()
    return run(
        given.stages, given.layers, given.micro_batches, given.batch, given.steps
    )


def run(stages: int, layers: int, micro_batches: int, batch: int, steps: int) -> int:
    """Compares, reports and trains."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import graftree as nnx
    from examples.lm import hlo
    from examples.lm.model import Config
    from examples.pipeline import pipeline, training

    layout = training.layout_of(stages)
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
        sent = hlo.collectives(step.as_text())["collective-permute"]
        print(f"collective-permutes in a step: {sent.count}, {sent.num_bytes:,} bytes")
        began = time.perf_counter()
        for number in range(1, steps + 1):
            loss = step(model, optimizer, texts())
            if number == 1 or number == steps or number % 5 == 0:
                print(f"step {number:3}: loss {loss:.4f}")
    print(f"{steps} steps in {time.perf_counter() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
