"""Devices that aren't there: compilers of JAX's plugins, and a CPU with more devices.

`jax.experimental.topologies` describes devices of an installed plugin. Clients of
``jaxlib`` are not documented; without them there is no CPU with more devices than JAX
was started with.
"""

from __future__ import annotations

import functools
from typing import Any

from jax.experimental import topologies

from graftree import _jax_names


def devices_of(platform: str, name: str, **options: Any) -> list[Any]:
    """Lists the devices of a topology.

    Raises:
        Exception: Whatever the plugin raises: it is missing, or knows no such topology.
    """
    return list(topologies.get_topology_desc(name, platform, **options).devices)


@functools.cache
def cpu_devices(count: int) -> list[Any]:
    """Makes CPU devices for which programs can be compiled, apart from JAX's own."""
    devices = _cpu_devices(count)
    if devices is None:
        raise NotImplementedError("this JAX makes no CPU with more devices")
    return devices


@_jax_names.by("jaxlib.xla_client:make_cpu_client")
def _cpu_devices(make_cpu_client: Any, count: int) -> list[Any] | None:
    return list(make_cpu_client(num_devices=count).devices())
