"""Models that are made where they belong: each device computes its own part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from graftree.core.graph import functional
from graftree.core.states import pure_dicts
from graftree.core.variables import sharding
from graftree.transforms import shape_eval

T = TypeVar("T")


def init(
    make: Callable[[], T],
    mesh: jax.sharding.Mesh,
    rules: Sequence[tuple[str, Any]] = (),
) -> T:
    """Makes a model on a mesh, as its Variables are annotated.

    The function is compiled, so that no device ever holds more than its part of an
    array, and all devices have part in making it. The numbers are those that the
    function gives without a mesh.

    Args:
        make: Makes the model; also a tuple of a model and its optimizer, whose state
            goes where the parameters are, or where their ``optimizer_sharding`` says.
            It is traced twice.
        mesh: The devices. What is not annotated is on all of them.
        rules: What logical names of axes in annotations stand for: pairs of a name and
            an axis of the mesh, a tuple of axes, or ``None``.

    Returns:
        What ``make`` returns.

    Raises:
        ValueError: If the mesh has no axis of a name, or an axis of an array is not a
            multiple of its number of devices.

    Example:
        >>> mesh = jax.make_mesh((2,), ("model",))
        >>> def make():
        ...     metadata = {"out_sharding": (None, "mlp")}
        ...     return nnx.Linear(4, 8, kernel_metadata=metadata, rngs=nnx.Rngs(0))
        >>> model = nnx.sharding.init(make, mesh, [("mlp", "model")])
        >>> [shard.data.shape for shard in model.kernel.addressable_shards]
        [(4, 4), (4, 4)]
    """
    with sharding.logical_axis_rules(rules):
        graphdef, abstract = shape_eval.get_abstract_model(make, mesh)
        places = jax.tree.map(lambda x: x.sharding, pure_dicts.as_pure(abstract))

        def arrays() -> Any:
            return pure_dicts.as_pure(functional.state(make()))

        with jax.set_mesh(mesh):
            state = jax.jit(arrays, out_shardings=places)()
            return functional.merge(graphdef, state)
