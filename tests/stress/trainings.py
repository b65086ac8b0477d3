"""A training program to be killed: ``python -m tests.stress.trainings DIRECTORY``.

All that a run depends on is in its objects: params sharded over the mesh, batch
statistics, a schedule, averages, metrics, random streams, and two iterators over data,
Grain's and one with a NumPy generator. A log of losses is beside the folder. Each step
prints its loss bit by bit, and the end a digest of all that was left, so that two runs
can be compared by what they print:

    start 6            the first step of this process
    loss 6 0x1.5p+0
    saved 6            `save` has returned; the disk may have it or not
    stop 8             it was asked to stop, and has saved
    state 0f3a...
    end

Of several processes each has data of its own, or with ``--same-data`` all have the
same, so that the run may go on with another number of them.
"""

import argparse
import hashlib
import json
import os

import grain
import jax
import numpy as np
import optax

import graftree as nnx
from graftree import checkpoints
from tests.stress.starts import tell

MESHES = {"1x1": (1, 1), "1x8": (1, 8), "2x4": (2, 4)}
BATCH, FEATURES, CLASSES = 16, 12, 8


def read_options(arguments=None):
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory")
    parser.add_argument("--mesh", choices=MESHES, default="1x1")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--process", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--same-data", action="store_true")
    return parser.parse_args(arguments)


def start_jax(options):
    """Gives this process its share of the simulated devices, before there are any."""
    devices = MESHES[options.mesh][0] * MESHES[options.mesh][1] // options.processes
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    jax.config.update("jax_platforms", "cpu")
    if options.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"localhost:{options.port}", options.processes, options.process
        )


def make_mesh(rows, columns):
    """A mesh over the first devices that there are."""
    kinds = (jax.sharding.AxisType.Auto,) * 2
    devices = jax.devices()[: rows * columns]
    names = "data", "model"
    return jax.make_mesh((rows, columns), names, axis_types=kinds, devices=devices)


class Noise:
    """A NumPy generator as an iterator; its state is the dict that it works on."""

    def __init__(self, seed, shape):
        self.shape = shape
        self.generator = np.random.Generator(np.random.PCG64(seed))
        self.state = {"generator": self.generator.bit_generator.state, "drawn": 0}

    def __next__(self):
        """Draws; then the state that was handed out has changed in place."""
        drawn = self.generator.normal(size=self.shape).astype("float32")
        self.state["generator"] = self.generator.bit_generator.state
        self.state["drawn"] += 1
        return drawn

    def get_state(self):
        """What `set_state` takes, and what `__next__` goes on changing."""
        return self.state

    def set_state(self, state):
        """Goes on where that state was taken."""
        self.generator.bit_generator.state = state["generator"]
        self.state = state


def make_data(process=0, processes=1):
    """The share of one process: rows, shuffled, and noise to add to them."""
    rows = np.random.default_rng(5).normal(size=(256, FEATURES + 1)).astype("float32")
    rows[:, -1] = np.argmax(rows[:, :CLASSES], -1)
    share = grain.MapDataset.source(rows)[process::processes]
    share = share.seed(3).shuffle().repeat().batch(BATCH // processes)
    shape = (BATCH // processes, FEATURES)
    return {"rows": iter(share.to_iter_dataset()), "noise": Noise(process, shape)}


def make_objects(hidden):
    """Everything with Variables, for the mesh in force."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            def linear(*sizes, axes):
                metadata = {"out_sharding": axes}
                return nnx.Linear(*sizes, kernel_metadata=metadata, rngs=rngs)

            self.wide = linear(FEATURES, hidden, axes=(None, "model"))
            self.norm = nnx.BatchNorm(hidden, rngs=rngs)
            self.drop = nnx.Dropout(0.2, rngs=rngs)
            self.out = linear(hidden, CLASSES, axes=("model", None))

        def __call__(self, x):
            return self.out(self.drop(nnx.relu(self.norm(self.wide(x)))))

    def build():
        rngs = nnx.Rngs(0, noise=1)
        model = Net(rngs)
        rate = optax.warmup_cosine_decay_schedule(0.0, 0.05, 5, 40)
        made = {
            "model": model,
            "optimizer": nnx.Optimizer(model, optax.adam(rate), wrt=nnx.Param),
            "ema": nnx.EMA(model, 0.9, only=nnx.Param),
            "metrics": nnx.MultiMetric(
                loss=nnx.metrics.Average("loss"), spread=nnx.metrics.Welford("loss")
            ),
            "rngs": rngs,
        }
        state = nnx.state(made)
        shardings = nnx.get_partition_spec(state)
        nnx.update(made, jax.lax.with_sharding_constraint(state, shardings))
        return made

    return nnx.jit(build)()


def make_step():
    """One step of training, which donates what it changes."""

    def loss_of(model, rngs, x, labels):
        x = x + 0.01 * jax.random.normal(rngs.noise(), x.shape)
        return optax.softmax_cross_entropy_with_integer_labels(model(x), labels).mean()

    @nnx.jit(donate_argnums=0)
    def step(made, x, labels):
        model = made["model"]
        loss, grads = nnx.value_and_grad(loss_of)(model, made["rngs"], x, labels)
        made["optimizer"].update(model, grads)
        made["ema"].update(model)
        made["metrics"].update(loss=loss)
        return loss

    return step


def next_batch(data, mesh):
    """The next rows of all processes, with noise, over the mesh."""
    rows, noise = next(data["rows"]), next(data["noise"])
    over = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    inputs = rows[:, :-1] + 0.1 * noise
    labels = rows[:, -1].astype("int32")
    if len(rows) == BATCH:  # each process has the same
        return [
            jax.make_array_from_callback(x.shape, over, lambda where, x=x: x[where])
            for x in (inputs, labels)
        ]
    make = jax.make_array_from_process_local_data
    return [make(over, x) for x in (inputs, labels)]


def digest(made, data):
    """A hash of all values that this process has, by path, and of the data's place."""
    seen = hashlib.sha256()
    for path, leaf in nnx.to_flat_state(nnx.state(made)):
        value = leaf.get_value()
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        seen.update(f"{path} {value.dtype} {value.shape}".encode())
        for shard in sorted(value.addressable_shards, key=lambda x: x.device.id):
            seen.update(np.asarray(shard.data).tobytes())
    for name, iterator in data.items():
        state = json.dumps(iterator.get_state(), sort_keys=True)
        seen.update(f"{name} {state}".encode())
    return seen.hexdigest()


def train(options):
    """Goes on from the latest checkpoint, or begins."""
    mesh = make_mesh(*MESHES[options.mesh])
    with (
        jax.set_mesh(mesh),
        nnx.training.RunLog(f"{options.directory}.csv", resume=True) as log,
        checkpoints.Checkpoints(options.directory, keep=2, every=options.every) as kept,
    ):
        made = make_objects(options.hidden)
        own = () if options.same_data else (options.process, options.processes)
        data = make_data(*own)
        last = kept.restore_latest(**made, **data, log=log)
        first = 0 if last is None else last + 1
        tell("start", first)
        step = make_step()
        for number in range(first, options.steps):
            loss = step(made, *next_batch(data, mesh))
            log.write(number, {"loss": loss})
            tell("loss", number, float(loss).hex())
            stop = kept.should_stop(number)
            if kept.save(number, force=stop, **made, **data, log=log):
                tell("saved", number)
            if stop:
                tell("stop", number)
                return
        tell("state", digest(made, data))
    tell("end")


if __name__ == "__main__":
    given = read_options()
    start_jax(given)
    train(given)
