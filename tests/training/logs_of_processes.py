"""A program whose processes keep one log: what each has for itself is added up first.

``python -m tests.training.logs_of_processes FOLDER --process 0 --processes 2 --port N``
is one of them. Each counts rows of its own, and saves the log with a checkpoint.
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp

import graftree as nnx
from tests.stress.starts import tell


def sum_over_processes(metric):
    """The recipe of docs/guides/logging.md."""
    from jax.experimental import multihost_utils

    counters = multihost_utils.process_allgather(nnx.state(metric))
    nnx.update(metric, jax.tree.map(lambda x: jnp.sum(x, axis=0), counters))


def run(folder, process):
    """Two rows, one of them after the checkpoint is restored."""
    metric = nnx.metrics.Average("loss")
    metric.update(loss=jnp.arange(2.0 + process) + 10 * process)
    sum_over_processes(metric)
    with (
        nnx.training.RunLog(folder / "run.csv") as log,
        nnx.checkpoints.Checkpoints(folder / "steps") as kept,
    ):
        log.write(1, {"loss": metric.compute()})
        kept.save(1, metric=metric, log=log)
        log.write(2, {"loss": 0.0})
        kept.restore_latest(metric=metric, log=log)
        log.write(2, {"loss": metric.compute()})
    tell("loss", float(metric.compute()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    for name in ("process", "processes", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = f"localhost:{options.port}"
    jax.distributed.initialize(address, options.processes, options.process)
    run(options.folder, options.process)
