"""Hardware that you don't have: devices for meshes, and figures for bounds."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import os
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from graftree import _jax_topologies
from graftree.forecast.accelerators import ACCELERATORS, GPU, Accelerator


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """Devices to compile for, of which none need be there.

    Attributes:
        name: As `target` takes it.
        accelerator: The figures of one device; ``None`` for CPUs.
        devices: Devices of JAX. They can be compiled for; no array can be on them.

    Example:
        >>> target = nnx.forecast.target("cpu:8")
        >>> dict(target.mesh({"data": 4, "tensor": 2}).shape)
        {'data': 4, 'tensor': 2}
    """

    name: str
    accelerator: Accelerator | None
    devices: tuple[Any, ...]

    def mesh(self, sizes: Mapping[str, int], axis_types: Any = None) -> Mesh:
        """Arranges the devices as a mesh.

        Devices that are near each other get near positions: on GPUs the last axes are
        within a host.

        Args:
            sizes: The size of each axis, by its name.
            axis_types: As in ``jax.make_mesh``; by default ``AxisType.Auto`` for each.

        Raises:
            ValueError: If the sizes don't multiply to the number of devices.
        """
        count = math.prod(sizes.values())
        if count != len(self.devices):
            axes = " x ".join(f"{name}={size}" for name, size in sizes.items())
            raise ValueError(
                f"nnx.forecast: a mesh of {axes} has {count} devices, but the target "
                f"{self.name!r} has {len(self.devices)}.\nChange the sizes, or use "
                "another target."
            )
        if axis_types is None:
            axis_types = (jax.sharding.AxisType.Auto,) * len(sizes)
        shape, names = tuple(sizes.values()), tuple(sizes)
        if self.accelerator is None or self.accelerator.gpu is not None:
            devices = np.array(self.devices, object).reshape(shape)
            return Mesh(devices, names, axis_types=axis_types)
        return jax.make_mesh(shape, names, axis_types, devices=self.devices)

    def host(self, device: Any) -> int:
        """Returns the host of a device; 0 for TPUs, whose links join all hosts."""
        is_gpu = self.accelerator is not None and self.accelerator.gpu is not None
        return device.process_index if is_gpu else 0

    @property
    def sharding(self) -> SingleDeviceSharding:
        """Puts an array on the first device, whole."""
        return SingleDeviceSharding(self.devices[0])


def target(name: str) -> Target:
    """Finds hardware by its name.

    The compiler of a TPU is in ``libtpu``, that of a GPU in JAX's CUDA plugin; neither
    needs the hardware, and the extras ``graftree[forecast-tpu]`` and
    ``graftree[forecast-gpu]`` have them. Set ``JAX_PLATFORMS=cpu`` before JAX starts,
    or it looks for the hardware itself.

    Args:
        name: An accelerator and its topology: ``"v5e:4x4"`` or ``"v5p:2x2x4"`` for the
            chips of a TPU slice, ``"h100:8"`` for GPUs in a host, ``"h100:4x8"`` for
            hosts times GPUs in each, ``"cpu:8"`` for devices of this machine. A name
            without topology means one chip.

    Raises:
        ValueError: If there is no such accelerator or topology.
        ImportError: If its compiler isn't installed.

    Example:
        >>> target = nnx.forecast.target("cpu:8")
        >>> len(target.devices), target.name
        (8, 'cpu:8')
    """
    result = _target(name.lower())
    _targets.update(dict.fromkeys(result.devices, result))
    return result


@functools.cache
def _target(name: str) -> Target:
    kind, _, topology = name.partition(":")
    sizes = [int(size) for size in re.findall(r"\d+", topology)] or [1]
    is_valid = re.fullmatch(r"\d+(x\d+)*|", topology) and min(sizes) > 0
    if not is_valid or kind not in (*ACCELERATORS, "cpu"):
        kinds = ", ".join([*ACCELERATORS, "cpu"])
        raise ValueError(
            f"nnx.forecast.target({name!r}): there is no such target.\nA name is an "
            f"accelerator ({kinds}) and a topology, as in 'v5e:4x4', 'h100:8', "
            "'h100:4x8' (hosts x devices) and 'cpu:8'."
        )
    if kind == "cpu":
        devices = _jax_topologies.cpu_devices(math.prod(sizes))
        return Target(name, None, tuple(devices))
    accelerator = ACCELERATORS[kind]
    if accelerator.gpu is None:
        devices = _tpu_devices(name, accelerator, topology)
    else:
        hosts, per_host = math.prod(sizes[:-1]), sizes[-1]
        devices = _gpu_devices(name, accelerator, accelerator.gpu, (hosts, per_host))
    return Target(name, accelerator, tuple(devices))


def of_device(device: Any) -> Target | None:
    """Finds the target that a device belongs to, of those asked for so far."""
    return _targets.get(device)


_targets: dict[Any, Target] = {}


def _tpu_devices(name: str, accelerator: Accelerator, topology: str) -> list[Any]:
    # Else libtpu asks Google Cloud which machine this is, and a second process of this
    # machine is refused.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    rank = 2 if accelerator.topology_name in ("v5e", "v6e") else 3
    topology = topology or "x".join(["1"] * rank)
    # A chip of v4 has two cores, which JAX uses as one device.
    is_v4 = accelerator.topology_name == "v4"
    options = {"chip_config_name": "megacore"} if is_v4 else {}
    try:
        return _jax_topologies.devices_of(
            "tpu", f"{accelerator.topology_name}:{topology}", **options
        )
    except Exception as error:
        raise _missing(name, error, "tpu", "libtpu", "forecast-tpu") from error


def _gpu_devices(
    name: str, accelerator: Accelerator, gpu: GPU, sizes: tuple[int, int]
) -> list[Any]:
    topology = "1x{}x{}".format(*sizes)  # slices, hosts, devices of a host
    description = _description(accelerator, gpu)
    try:
        return _jax_topologies.devices_of(
            "cuda", "", topology=topology, target_config=description
        )
    except Exception as error:
        plugin = "jax-cuda13-plugin"
        raise _missing(name, error, "cuda", plugin, "forecast-gpu") from error


def _missing(
    name: str, error: Exception, platform: str, package: str, extra: str
) -> Exception:
    """Says what to install, or what is wrong with a topology."""
    if importlib.util.find_spec(_MODULES[platform]) is not None:
        return ValueError(
            f"nnx.forecast.target({name!r}): the compiler of {package} refuses this "
            f"topology.\n{error}"
        )
    return ImportError(
        f"nnx.forecast.target({name!r}) needs the compiler in {package}: pip install "
        f"'graftree[{extra}]'.\nWithout it, a target such as 'cpu:8' shows what each "
        "device holds and sends, with the numbers of XLA's compiler for CPUs."
    )


_MODULES = {"tpu": "libtpu", "cuda": "jax_cuda13_plugin"}


def _description(accelerator: Accelerator, gpu: GPU) -> str:
    """Describes a GPU as XLA's compiler reads it, a text of a protocol buffer."""
    major, minor = gpu.capability
    fields = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * 1024,
        "shared_memory_per_core": gpu.shared_memory * 1024,
        "threads_per_core_limit": 2048,
        "core_count": gpu.cores,
        "fpus_per_core": gpu.fp32_units,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "memory_bandwidth": int(accelerator.memory_bandwidth),
        "l2_cache_size": gpu.l2_cache * 2**20,
        "clock_rate_ghz": gpu.clock,
        "device_memory_size": int(accelerator.memory),
        "shared_memory_per_block_optin": (gpu.shared_memory - 1) * 1024,
        "registers_per_core_limit": 2**16,
        "registers_per_block_limit": 2**16,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
        "device_address_bits": 64,
    }
    lines = "\n".join(f"{name}: {value}" for name, value in fields.items())
    return f"""
gpu_device_info {{
{lines}
cuda_compute_capability {{ major: {major} minor: {minor} }}
device_vendor: "NVIDIA Corporation"
platform_version: "Compute Capability {major}.{minor}"
name: "{gpu.name}"
driver_version: "13.0.0"
runtime_version: "13.0.0"
compile_time_toolkit_version: "13.0.0"
dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{gpu.name}"
"""
