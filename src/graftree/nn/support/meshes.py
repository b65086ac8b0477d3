"""What layers compute with, on a mesh with axes of the type Explicit.

There the sharding of an array is part of its type. JAX doesn't choose between operands
that are divided differently, but raises. A layer has operands of two kinds: its inputs,
which the program has placed, and what it brings along, such as Params. The rule of all
layers is that the second give way to the first.

- A Param is gathered along each axis of the mesh that divides the batch; its gradient
  is scattered again. This is fully sharded data parallelism, FSDP (`beside`).
- A look-up has the sharding of its indices (`look_up`).
- A first carry is divided like the batch (`led_by`).
- State that inputs are written into is divided like them while it is used
  (`together`); its Variable stays where it is.

Without a mesh, or with Auto axes, where the compiler chooses, nothing is added here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from graftree import _jax
from graftree.core.variables import values


def sharding_of(x: Any) -> NamedSharding | None:
    """Reads the sharding in the type of an array; ``None`` without Explicit axes."""
    if not values.is_array(x):
        return None
    # Eager, `typeof` takes 4 us.
    if not isinstance(x, _jax.Tracer) and not isinstance(x.sharding, NamedSharding):
        return None
    sharding = jax.typeof(x).sharding
    return sharding if sharding.mesh.explicit_axes else None


def beside(
    inputs: Any, features: Sequence[int], params: Sequence[Any]
) -> tuple[Any, ...]:
    """Params that can meet these inputs: gathered where both would be divided.

    Args:
        inputs: What the program has placed.
        features: The axes of the inputs that the Params have too; along all others, the
            inputs are a batch.
        params: Arrays; anything else stays as it is.
    """
    sharding = sharding_of(inputs)
    if sharding is None:
        return tuple(params)
    shared = [axis + inputs.ndim if axis < 0 else axis for axis in features]
    spec = [entry for axis, entry in enumerate(sharding.spec) if axis not in shared]
    names = _names(spec)
    return tuple([_on_mesh(param, sharding, names) for param in params])


def _on_mesh(param: Any, sharding: NamedSharding, names: set[str]) -> Any:
    """A Param on the mesh of a sharding, not divided by these axes of it."""
    if not values.is_array(param):
        return param
    own = wanted = sharding_of(param)
    if wanted is None:
        wanted = sharding.update(spec=PartitionSpec(*(None,) * param.ndim))
    elif not names.isdisjoint(_names(wanted.spec)):
        wanted = wanted.update(spec=_remaining_spec(wanted.spec, names))
    # Outside of `jax.set_mesh`, JAX 0.12 forgets the mesh of what a loop closes over:
    # its gradient would not know where it belongs.
    if own == wanted and not jax.sharding.get_abstract_mesh().empty:
        return param
    return jax.sharding.reshard(param, wanted)


def whole(param: jax.Array) -> jax.Array:
    """A Param on all devices, for a computation on itself."""
    sharding = sharding_of(param)
    if sharding is None:
        return param
    return _on_mesh(param, sharding, _names(sharding.spec))


def _names(spec: Iterable[Any]) -> set[str]:
    """Collects the axes of the mesh that divide an array."""
    entries = [entry for entry in spec if isinstance(entry, (str, tuple))]
    return {name for x in entries for name in ((x,) if isinstance(x, str) else x)}


def _remaining_spec(spec: Iterable[Any], names: Collection[str]) -> PartitionSpec:
    return PartitionSpec(*[_remaining(entry, names) for entry in spec])


def _remaining(entry: Any, names: Collection[str]) -> Any:
    """An entry of a spec without these axes of the mesh."""
    if isinstance(entry, tuple):
        return tuple([name for name in entry if name not in names]) or None
    return None if entry in names else entry


def of_convolution(inputs: jax.Array, kernel: jax.Array) -> NamedSharding | None:
    """Infers the sharding of a convolution by a divided kernel, which JAX does not.

    Outputs are divided like the batch, and like the last axis of the kernel.

    Args:
        inputs: ``[batch, *spatial, in_features]``.
        kernel: ``[*spatial, in_features, out_features]``, which can meet them.
    """
    sharding, own = sharding_of(inputs), sharding_of(kernel)
    if sharding is None or own is None or not _names(own.spec):
        return None
    batch, *others = sharding.spec
    if any(others):
        return None  # JAX asks for more
    spec = PartitionSpec(batch, *others[:-1], own.spec[-1])
    return sharding.update(spec=spec)


def look_up(table: jax.Array, indices: jax.Array, out_sharding: Any) -> jax.Array:
    """Takes the rows of a table with these numbers; NaN where there is none.

    Args:
        table: ``[rows, features]``.
        indices: Integers of any shape.
        out_sharding: That of the result; ``None``: that of the indices.
    """
    if out_sharding is None:
        out_sharding = _of_rows(table, indices)
    if len(table) == 1:
        shape = (*indices.shape, *table.shape[1:])
        row = table.reshape((1,) * indices.ndim + table.shape[1:])
        options = {} if out_sharding is None else {"out_sharding": out_sharding}
        return jnp.broadcast_to(row, shape, **options)
    if out_sharding is None:
        return jnp.take(table, indices, axis=0)
    return table.at[indices].get(mode="fill", out_sharding=out_sharding)


def _of_rows(table: jax.Array, indices: jax.Array) -> NamedSharding | None:
    """Infers the sharding of a look-up, if that of the indices determines it."""
    sharding = sharding_of(indices)
    if sharding is None or not _names(sharding.spec):
        return None
    own, names = sharding_of(table), _names(sharding.spec)
    rows, features = (None, None) if own is None else own.spec
    if _remaining(rows, names) is not None:
        return None  # rows divided by another axis of the mesh: JAX asks for more
    return sharding.update(
        spec=PartitionSpec(*sharding.spec, _remaining(features, names))
    )


def led_by(inputs: Any, batch_axes: Sequence[int], tree: Any) -> Any:
    """Arrays, such as a first carry, that are divided like a batch of inputs.

    Args:
        inputs: What the program has placed.
        batch_axes: The axes of the inputs that lead the other arrays.
        tree: Arrays; those without the batch axes stay as they are.
    """
    sharding = sharding_of(inputs)
    if sharding is None:
        return tree
    sizes = tuple([inputs.shape[axis] for axis in batch_axes])
    batch = [sharding.spec[axis] for axis in batch_axes]

    def divided(x: Any) -> Any:
        if jnp.shape(x)[: len(sizes)] != sizes:
            return x
        own = sharding_of(x)
        rest = (None,) * jnp.ndim(x) if own is None else own.spec
        rest = _remaining_spec(rest[len(sizes) :], _names(batch))
        return placed(x, sharding.update(spec=PartitionSpec(*batch, *rest)))

    return jax.tree.map(divided, tree)


def placed(x: Any, sharding: NamedSharding) -> jax.Array:
    """An array with this sharding in its type."""
    return x if sharding_of(x) == sharding else jax.sharding.reshard(x, sharding)


def together(x: jax.Array, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two arrays of the same rank, divided alike, where one of them is.

    An axis of the mesh that divides both keeps its place in the inputs.
    """
    own = sharding_of(x)
    sharding = sharding_of(inputs) or own
    if sharding is None:
        return x, inputs
    if own is not None:
        spec = list(sharding.spec)
        for axis, entry in enumerate(own.spec):
            if spec[axis] is None:
                spec[axis] = _remaining(entry, _names(spec))
        sharding = sharding.update(spec=PartitionSpec(*spec))
    return placed(x, sharding), placed(inputs, sharding)
