"""What loading a checkpoint takes: ``python -m benchmarks.weights``.

A checkpoint of 2 GB is written once, with the tensors of a Llama: matrices in bfloat16,
the table of tokens and the norms in float32. It is then loaded onto one device, onto
eight simulated ones, and by two processes of four devices each; parameters are divided
along their longest axis. Each load has fresh processes, and finds the file in the page
cache. Beside it stands the library ``safetensors``, if it is installed, in the two ways
that its users load: a whole file, or slices; both transpose as the model needs it.

- *read*: what the system calls of all processes have read while loading, from
  ``/proc/self/io``. A file that is mapped, as that library does, does not show there.
- *memory*: the most that a process has held while loading beyond what it held before
  and the arrays themselves, which on a CPU are host memory too: ``VmHWM`` less the two.
  Pages of a mapped file count, though the system could take them back.
- *time*: of the slowest process, the fastest of some turns.
"""

import argparse
import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import graftree as nnx
from benchmarks import tables
from examples.command_lines import SIMULATED
from examples.lm.processes import free_port
from examples.models import llama, pretrained
from graftree.weights import saving, sources, stored_tensors

PEER = "safetensors"
# Devices of each process.
LAYOUTS = {"one device": (1,), "8 devices": (8,), "2 processes, 4 devices each": (4, 4)}
LOADERS = ("Graftree", "safetensors, whole files", "safetensors, slices")


@dataclasses.dataclass(frozen=True)
class Found:
    """What one process has measured.

    Attributes:
        seconds: How long loading took.
        local: Bytes of the arrays that it holds, each part once.
        read: Bytes that its system calls have read.
        peak: Bytes held beyond what was there before, and the arrays.
        sums: Sums of the parts that it holds, to compare loaders.
    """

    seconds: float
    local: int
    read: int
    peak: int
    sums: dict[str, float]


def main(arguments: list[str] | None = None) -> None:
    """Measures all layouts and prints a table."""
    options = _parser().parse_args(arguments)
    if options.child is not None:
        task = argparse.Namespace(**json.loads(options.child))
        print(json.dumps(dataclasses.asdict(_measure(task))), flush=True)
        return
    folder = options.folder / f"{options.layers}x{options.width}"
    for kind in ("one", "several"):
        write(folder / kind, options)
    with sources.open(folder / "one") as source:
        two = sum(sorted(stored.nbytes for stored in source.tensors.values())[-2:])
    size = sum(path.stat().st_size for path in (folder / "one").glob("*.safe*"))
    print(f"checkpoint of {size:,} bytes; its two largest tensors: {two:,} bytes")
    print(f"load average of the machine: {os.getloadavg()[0]:.1f}")
    loaders = LOADERS if importlib.util.find_spec(PEER) else LOADERS[:1]
    if len(loaders) == 1:
        print(f"no {PEER}: pip install {PEER}, to see the peer beside it")
    figures = ["read / local", "memory / two largest", "s"]
    print(tables.head(["layout", "files", "loader"], figures), flush=True)
    for layout in [name for name in LAYOUTS if options.layout in name]:
        for kind in ("one", "several"):
            _print_rows(layout, folder / kind, loaders, two, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights")
    add = parser.add_argument
    default = pathlib.Path(tempfile.gettempdir()) / "graftree-benchmark-weights"
    add("--folder", type=pathlib.Path, default=default, help="where the files are kept")
    add("--layers", type=int, default=18, help="90 MB each, with the other defaults")
    add("--width", type=int, default=2048, help="of the model")
    add("--turns", type=int, default=3, help="of which the fastest counts")
    add("--layout", default="", metavar="TEXT", help="layouts whose name has this text")
    add("--child", help=argparse.SUPPRESS)
    return parser


def _print_rows(
    layout: str, folder: pathlib.Path, loaders: Any, two: int, options: Any
) -> None:
    turns: dict[str, list[list[Found]]] = {loader: [] for loader in loaders}
    for turn in range(options.turns):
        # Who comes first may find memory that the machine has to fetch first.
        at = turn % len(loaders)
        for loader in (*loaders[at:], *loaders[:at]):
            turns[loader].append(_start(layout, folder, loader, options))
    expected = [found.sums for found in turns[LOADERS[0]][0]]
    for loader, taken in turns.items():
        if [found.sums for found in taken[0]] != expected:
            raise AssertionError(f"{loader} loads other values, {layout}, {folder}")
        seconds = min(max(found.seconds for found in turn) for turn in taken)
        reads = [found.read / found.local for found in taken[0]]
        peak = max(found.peak for turn in taken for found in turn)
        read = f"{max(reads):.3f}" if loader == LOADERS[0] else "mapped"
        cells = (layout, folder.name, loader, read)
        print(tables.line([*cells, f"{peak / two:.2f}", f"{seconds:.2f}"]), flush=True)


def _start(layout: str, folder: pathlib.Path, loader: str, options: Any) -> list[Found]:
    """Loads in fresh processes."""
    port = free_port()
    processes = []
    for number, devices in enumerate(LAYOUTS[layout]):
        flags = f"{SIMULATED}={devices}"
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        task = {"number": number, "layout": layout, "loader": loader, "port": port}
        task |= {"layers": options.layers, "width": options.width}
        child = json.dumps(task | {"folder": str(folder)})
        command = [sys.executable, "-m", "benchmarks.weights", f"--child={child}"]
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
        )
    found = [process.communicate()[0].splitlines() for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"a process failed: {layout}, {loader}")
    return [Found(**json.loads(lines[-1])) for lines in found]


# ------------------------------------------------------------------ the checkpoint


def config_of(options: Any) -> Any:
    """The sizes of the model."""
    width = options.width
    return llama.Config(
        vocab_size=width * 16,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=width // 16,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        max_position_embeddings=4096,
    )


def abstract_model(options: Any) -> Any:
    """The model without values."""
    config = config_of(options)
    return nnx.eval_shape(lambda: llama.Llama(config, rngs=nnx.Rngs(0)))


def write(folder: pathlib.Path, options: Any) -> None:
    """Writes the checkpoint, if it is not there: as one file, or as several."""
    if folder.exists():
        return
    rng = np.random.default_rng(0)

    def make(shape: tuple[int, ...], is_wide: bool) -> Any:
        if is_wide:
            return rng.random(shape, np.float32)
        # The bits of numbers from 0 to 1.
        return rng.integers(0, 0x3F80, shape, np.uint16).view(jnp.bfloat16)

    outs = []
    for tensor in nnx.weights.Mapping(llama.WEIGHTS).tensors(abstract_model(options)):
        shape = tensor.solved.file_shape
        is_wide = len(shape) == 1 or "embed" in tensor.name
        dtype = np.dtype(np.float32 if is_wide else jnp.bfloat16)
        stored = stored_tensors.Stored(dtype, shape)
        values = functools.partial(make, shape, is_wide)
        outs.append(saving.NewTensor(tensor.name, stored, values))
    size = sum(out.stored.nbytes for out in outs)
    shard = size // 5 if folder.name == "several" else None
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_suffix(".partial")
    saving.write(partial, outs, shard_bytes=shard, metadata={"format": "pt"})
    partial.rename(folder)


# ------------------------------------------------------------------ one process


def _measure(options: Any) -> Found:
    """Loads in this process, and says what that took."""
    devices = LAYOUTS[options.layout]
    if len(devices) > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"localhost:{options.port}", len(devices), options.number
        )
    load = {
        LOADERS[0]: _ours,
        LOADERS[1]: _whole_files,
        LOADERS[2]: _slices,
    }[options.loader](options)
    jax.block_until_ready([jax.device_put(0, x) for x in jax.local_devices()])
    _forget_peak()
    before, read = _kilobytes("VmRSS") * 1024, _bytes_of_calls()
    began = time.perf_counter()
    arrays = load()
    jax.block_until_ready(arrays)
    seconds = time.perf_counter() - began
    read = _bytes_of_calls() - read
    peak = _kilobytes("VmHWM") * 1024 - before
    held = sum(s.data.nbytes for x in arrays for s in x.addressable_shards)
    parts = [{str(s.index): s.data for s in x.addressable_shards} for x in arrays]
    local = sum(part.nbytes for each in parts for part in each.values())
    return Found(seconds, local, read, peak - held, _sums(arrays))


def _sums(arrays: Any) -> dict[str, float]:
    """The sums of all local parts by shape: the order of arrays does not matter."""
    found: dict[str, float] = {}
    for x in arrays:
        for shard in x.addressable_shards:
            key = f"{x.dtype}{[*x.shape]}{[*shard.data.shape]}"
            # Of bits: exact, in whatever order.
            bits = np.asarray(shard.data)
            bits = bits.view(np.uint16 if bits.itemsize == 2 else np.uint32)
            weights = np.arange(1, bits.shape[0] + 1, dtype=np.uint64) % 7
            total = bits.reshape(len(weights), -1).sum(1, dtype=np.uint64) @ weights
            found[key] = found.get(key, 0) + float(total % 2**32)
    return found


def _shardings(model: Any) -> Any:
    if jax.device_count() == 1:
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return jax.tree.map(lambda _: device, nnx.state(model))
    return pretrained.divided(model, pretrained.mesh_of(jax.device_count()))


Load = Callable[[], list[Any]]


def _ours(options: Any) -> Load:
    model = abstract_model(options)
    shardings = _shardings(model)

    def load() -> Any:
        nnx.weights.load(
            options.folder, model, llama.WEIGHTS, dtype="file", shardings=shardings
        )
        return jax.tree.leaves(nnx.state(model))

    return load


def _targets(options: Any) -> dict[str, tuple[Any, Any]]:
    """Of each tensor: the shape in the model, and where it goes."""
    model = abstract_model(options)
    found = {}
    places = dict(nnx.to_flat_state(_shardings(model)))
    for tensor in nnx.weights.Mapping(llama.WEIGHTS).tensors(model):
        (array,) = tensor.arrays
        sharding = places[array.path].get_value()
        found[tensor.name] = (array.value.shape, sharding)
    return found


def _whole_files(options: Any) -> Load:
    """What most users write: all tensors as NumPy arrays, then onto the devices."""
    from safetensors.numpy import load_file

    def tensors(path: pathlib.Path) -> Iterator[tuple[str, Any]]:
        found = load_file(path)
        for name in [*found]:
            yield name, found.pop(name)

    def placed(name: str, x: Any, shape: Any, sharding: Any) -> Any:
        x = (x if "embed" in name else x.T).reshape(shape)
        if jax.process_count() == 1:
            return jax.device_put(x, sharding)
        # There `device_put` would compare the values of all processes.
        return jax.make_array_from_callback(shape, sharding, x.__getitem__)

    return _of_files(options, tensors, placed)


def _slices(options: Any) -> Load:
    """What a careful user writes: each device gets its slice."""
    from safetensors import safe_open

    def tensors(path: pathlib.Path) -> Iterator[tuple[str, Any]]:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_slice(name)

    return _of_files(options, tensors, _of_slices)


def _of_files(
    options: Any,
    tensors: Callable[[pathlib.Path], Iterator[tuple[str, Any]]],
    placed: Callable[..., Any],
) -> Load:
    """Loads the tensors of all files, each onto its devices."""
    import ml_dtypes  # noqa: F401  NumPy learns bfloat16

    targets = _targets(options)

    def load() -> Any:
        return [
            placed(name, tensor, *targets[name])
            for path in sorted(pathlib.Path(options.folder).glob("*.safetensors"))
            for name, tensor in tensors(path)
        ]

    return load


def _of_slices(name: str, tensor: Any, shape: Any, sharding: Any) -> Any:
    def part(index: tuple[slice, ...]) -> Any:
        if len(shape) == 1:
            return tensor[index[0]]
        if len(shape) == 2:
            if "embed" in name:
                return tensor[index]
            return np.ascontiguousarray(tensor[index[1], index[0]].T)
        bounds = [i.indices(n)[:2] for i, n in zip(index, shape, strict=True)]
        lengths = [stop - start for start, stop in bounds]
        if "o_proj" in name:  # heads and their features are rows, and not divided
            return tensor[index[2], :].T.reshape(lengths)
        return tensor[:, index[0]].T.reshape(lengths)

    return jax.make_array_from_callback(shape, sharding, part)


def _kilobytes(name: str) -> int:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise KeyError(name)


def _bytes_of_calls() -> int:
    lines = pathlib.Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def _forget_peak() -> None:
    pathlib.Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    main()
