"""The two Variables of an adaptation: shaped, sharded and kept like their kernel.

kernel: leading axes, batch axes, in axes, out axes
lora_a: leading axes, batch axes, in axes, rank
lora_b: leading axes, batch axes, rank, out axes
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from graftree import _jax
from graftree.annotations import Dtype, Initializer
from graftree.core.variables import metadata as variable_metadata
from graftree.core.variables import values, variables
from graftree.core.variables.variables import Variable
from graftree.surgery import adaptable_layers

# The metadata of a kernel that its factors have too.
_INHERITED = frozenset(
    {"out_sharding", "mesh", "sharding_rules", *variable_metadata.REQUIRED}
)
_A, _B = 0, 1


class Factors:
    """Makes both Variables for a layer.

    Args:
        layer: The layer, which can be adapted.
        rank: The rank of the adaptation.
        dtype: The dtype of the Variables.
        kind: Their class.
    """

    def __init__(self, layer: Any, rank: int, dtype: Dtype, kind: Any) -> None:
        self._kernel = adaptable_layers.kernel_of(layer)
        self._dtype = dtype
        self._kind = kind
        _, in_sizes, out_sizes = adaptable_layers.sizes_of(layer)
        shape = tuple(self._kernel.shape)
        self._apart = shape[: len(shape) - len(in_sizes) - len(out_sizes)]
        self._num_inputs = len(in_sizes)
        self._sizes = (*in_sizes, rank), (rank, *out_sizes)
        rows, columns = math.prod(in_sizes), math.prod(out_sizes)
        self._flat = (rows, rank), (rank, columns)

    def a(self, key: jax.Array, initializer: Initializer) -> Variable[Any]:
        """Makes ``lora_a``."""
        return self._placed(_A, self._initial(_A, key, initializer))

    def b(self, key: jax.Array, initializer: Initializer) -> Variable[Any]:
        """Makes ``lora_b``."""
        return self._placed(_B, self._initial(_B, key, initializer))

    def _initial(self, number: int, key: jax.Array, initializer: Initializer) -> Any:
        shape, flat = (*self._apart, *self._sizes[number]), self._flat[number]

        def make(key: jax.Array) -> jax.Array:
            if not self._apart:
                return jnp.reshape(initializer(key, flat, self._dtype), shape)
            keys = jax.random.split(key, math.prod(self._apart))
            made = jax.vmap(lambda key: initializer(key, flat, self._dtype))(keys)
            return jnp.reshape(made, shape)

        is_abstract = values.is_stand_in(self._kernel.get_raw_value())
        return jax.eval_shape(make, key) if is_abstract else make(key)

    def _placed(self, number: int, value: Any) -> Variable[Any]:
        """A Variable with the annotation of the kernel, where the kernel is."""
        given = variables.metadata_of(self._kernel)
        entries = {name: given[name] for name in given if name in _INHERITED}
        if "out_sharding" in entries:
            entries["out_sharding"] = self._part(number, entries["out_sharding"])
        own = getattr(self._kernel.get_value(), "sharding", None)
        if isinstance(own, NamedSharding) and not isinstance(value, _jax.Tracer):
            value = _moved(value, self._part(number, own))
        elif entries.get("mesh") or not jax.sharding.get_abstract_mesh().empty:
            return self._kind(value, **entries)
        # It is where the kernel is. There may be no mesh now, by which to place it.
        eager = entries.pop("eager_sharding")
        variable = self._kind(value, **entries, eager_sharding=False)
        variable.set_metadata(eager_sharding=eager)
        return variable

    def _part(self, number: int, annotation: Any) -> Any:
        """What an annotation of the kernel says of the axes that one of the two has."""
        if isinstance(annotation, NamedSharding):
            spec = self._part(number, annotation.spec)
            return NamedSharding(annotation.mesh, spec)
        if not isinstance(annotation, (tuple, list, PartitionSpec)) or not annotation:
            return annotation if isinstance(annotation, PartitionSpec) else None
        missing = len(self._kernel.shape) - len(annotation)
        entries = (*annotation, *[None] * missing)
        inputs = len(self._apart) + self._num_inputs
        parts = (
            (*entries[:inputs], None),
            (*entries[: len(self._apart)], None, *entries[inputs:]),
        )
        is_spec = isinstance(annotation, PartitionSpec)
        return PartitionSpec(*parts[number]) if is_spec else parts[number]


def _moved(value: Any, sharding: NamedSharding) -> Any:
    if isinstance(value, jax.ShapeDtypeStruct):
        return value.update(sharding=sharding)
    return jax.device_put(value, sharding)
