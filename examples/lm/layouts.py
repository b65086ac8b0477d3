"""Layouts: which axes of the mesh divide the batch, and which the kernels.

The names in the model say what an axis *is*; the rules here say where it goes. An axis
that the mesh lacks divides nothing, so the same table is for all layouts.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax

import graftree as nnx
from examples.lm import settings

# For each logical name the axes of a mesh that divide it.
DIVIDED_BY = {
    "batch": ("data", "fsdp"),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh, and what divides a program over it.

    Attributes:
        mesh: The devices; its axes are some of ``data``, ``fsdp`` and ``tensor``.
        rules: Pairs of a logical name and the axes of the mesh that it stands for.
    """

    mesh: jax.sharding.Mesh
    rules: tuple[tuple[str, Any], ...]

    @property
    def batch(self) -> jax.sharding.NamedSharding:
        """Where the rows of a batch go."""
        return jax.NamedSharding(self.mesh, jax.P(dict(self.rules)["batch"]))

    def without_batch(self) -> "Layout":
        """Returns the layout for a batch that is not divided, such as a single row."""
        rules = [(name, None if name == "batch" else x) for name, x in self.rules]
        return Layout(self.mesh, tuple(rules))

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """A context in which names and shardings mean this mesh."""
        with jax.set_mesh(self.mesh), nnx.logical_axis_rules(self.rules):
            yield


def on_all_devices(sizes: Mapping[str, int]) -> Layout:
    """Returns the layout on a mesh of all devices.

    Raises:
        WrongOption: If there are more devices, or fewer.
    """
    present, asked = jax.device_count(), math.prod(sizes.values())
    if asked != present:
        raise settings.WrongOption(
            f"--mesh: {settings.in_words(sizes)} is a mesh of {asked} devices, but "
            f"there are {present} ({jax.devices()[0].device_kind})"
        )
    return make(sizes)


def make(sizes: Mapping[str, int]) -> Layout:
    """Returns the layout on a mesh with axes of these sizes, e.g. ``{"fsdp": 8}``.

    It takes the first devices, if there are more.
    """
    names = tuple(sizes)
    mesh = jax.make_mesh(
        tuple(sizes.values()),
        names,
        axis_types=(jax.sharding.AxisType.Auto,) * len(names),
        devices=jax.devices()[: math.prod(sizes.values())],
    )
    return on_mesh(mesh)


def on_mesh(mesh: jax.sharding.Mesh) -> Layout:
    """Returns the layout on a mesh, even on one whose devices don't exist."""
    return Layout(mesh, rules_for(mesh.axis_names))


def rules_for(names: tuple[str, ...]) -> tuple[tuple[str, Any], ...]:
    """Returns the rules for a mesh that has axes of these names."""
    rules = []
    for logical, axes in DIVIDED_BY.items():
        present = tuple(axis for axis in axes if axis in names)
        rules.append(
            (logical, present if len(present) > 1 else next(iter(present), None))
        )
    return tuple(rules)
