"""Weights loaded and saved by two processes: ``python -m tests.stress.shared_weights``.

Each process reads what its four devices hold, and the first one writes what both have.
A save that fails in the first process must fail there, and keep nobody waiting.
"""

import argparse
import os
import pathlib
import tempfile

import jax
import numpy as np
from jax.experimental import multihost_utils

import graftree as nnx
from graftree.weights import sources
from tests import meshes
from tests.stress import starts

NAME = "tests.stress.shared_weights"
ROWS, COLUMNS = 64, 32
TABLE = {"fc": "up"}


def run(options):
    """What one process does; prints what it read and whether all was right."""
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{options.port}", 2, options.process)
    folder = pathlib.Path(options.folder)
    opened, real = [], sources.open
    sources.open = lambda path: opened.append(real(path)) or opened[-1]

    def make():
        metadata = {"out_sharding": ("x", None)}
        layer = nnx.Linear(ROWS, COLUMNS, kernel_metadata=metadata, rngs=nnx.Rngs(0))
        return nnx.Dict(up=layer)

    with jax.set_mesh(meshes.mesh_of(x=8)):
        model = nnx.eval_shape(make)
        nnx.weights.load(folder / "a.safetensors", model, TABLE)
    print("read", opened[-1].bytes_read, flush=True)
    whole = nnx.sharding.fetch(model.up.kernel[...])
    np.testing.assert_array_equal(whole, numbers()[0].T)
    nnx.weights.save(folder / "b.safetensors", model, TABLE)
    nnx.weights.save(folder / "set", model, TABLE, shard_bytes=ROWS * COLUMNS * 4)
    one, other = [(folder / f"{name}.safetensors").read_bytes() for name in "ab"]
    print("same", one == other, len([*(folder / "set").iterdir()]), flush=True)
    try:
        nnx.weights.save(folder / "a.safetensors" / "c.safetensors", model, TABLE)
    except nnx.errors.WeightsError:
        print("refused", flush=True)
    multihost_utils.sync_global_devices("end")
    print("end", flush=True)


def numbers():
    """A kernel and a bias, as weights of PyTorch have them."""
    kernel = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(COLUMNS, ROWS)
    return kernel, np.arange(COLUMNS, dtype=np.float32)


def write(path):
    """Writes what both processes will read."""
    kernel, bias = numbers()
    model = nnx.Dict(up=nnx.Linear(ROWS, COLUMNS, rngs=nnx.Rngs(0)))
    nnx.weights.load({"fc.weight": kernel, "fc.bias": bias}, model, TABLE)
    nnx.weights.save(path, model, TABLE)


def main(arguments=None):
    """Starts two processes, and compares what they say."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--process", type=int)
    parser.add_argument("--port", type=int)
    options = parser.parse_args(arguments)
    if options.process is not None:
        run(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        write(pathlib.Path(folder) / "a.safetensors")
        port = starts.free_port()
        record = starts.start(
            [[NAME, folder, f"--process={i}", f"--port={port}"] for i in range(2)]
        )
    record.check(0)
    half = ROWS * COLUMNS * 4 // 2 + COLUMNS * 4  # of the kernel; the bias is on all
    for process in range(2):
        assert record.last("read", process) == str(half), record.lines
        assert record.last("same", process) == "True 3", record.lines
    assert record.last("refused", 0) == "", record.lines
    print(f"two processes read {half} bytes each, and saved what they read")


if __name__ == "__main__":
    main()
