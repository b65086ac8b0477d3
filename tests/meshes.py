"""Meshes over the eight devices that the tests have."""

import jax


def mesh_of(kind="Auto", **sizes):
    """A mesh of axes of one kind, given by name and size."""
    kinds = (getattr(jax.sharding.AxisType, kind),) * len(sizes)
    return jax.make_mesh((*sizes.values(),), (*sizes,), axis_types=kinds)
