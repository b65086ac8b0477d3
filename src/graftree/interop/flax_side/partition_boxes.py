"""Values boxed with the names of their axes: ``flax.core.meta``.

A box says about the value in it how it lies on a mesh. NNX keeps such annotations in
the metadata of Variables; boxes are what Linen and programs around it pass on.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any, Generic, Self, TypeVar, cast

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from graftree import errors
from graftree.core.variables import partitioning
from graftree.interop.flax_side import pytree_dataclasses

A = TypeVar("A")
B = TypeVar("B")
PARTITION_NAME = partitioning.PARTITION_NAME


class AxisMetadata(abc.ABC, Generic[A]):
    """A box around a value, told by transforms when the value gains or loses an axis.

    Example:
        >>> from graftree.interop.flax_side import partition_boxes as meta
        >>> issubclass(meta.Partitioned, meta.AxisMetadata)
        True
    """

    @abc.abstractmethod
    def unbox(self) -> A:
        """Returns the value."""

    @abc.abstractmethod
    def replace_boxed(self, val: B) -> AxisMetadata[B]:
        """Returns a box like this one around another value."""

    @abc.abstractmethod
    def add_axis(self, index: int, params: dict[Any, Any]) -> Self:
        """Returns a box whose value has a new axis at an index."""

    @abc.abstractmethod
    def remove_axis(self, index: int, params: dict[Any, Any]) -> Self:
        """Returns a box whose value lacks the axis at an index."""


class Partitioned(pytree_dataclasses.PyTreeNode, AxisMetadata[A]):
    """A value with a mesh axis, or None, for each of its axes.

    Attributes:
        value: An array; the only child of the pytree.
        names: The mesh axes.
        mesh: The mesh, or None for the one in force where the box is opened.

    Example:
        >>> from graftree.interop.flax_side import partition_boxes as meta
        >>> box = meta.Partitioned(jnp.ones((2, 3)), names=("data", None))
        >>> box.add_axis(0, {"partition_name": "layers"}).get_partition_spec()
        P('layers', 'data', None)
    """

    value: Any
    names: tuple[str | None, ...] = pytree_dataclasses.field(pytree_node=False)
    mesh: Mesh | None = pytree_dataclasses.field(default=None, pytree_node=False)

    def unbox(self, apply_constraint: bool = True) -> Any:
        """Returns the value, constrained to lie as the names say if there is a mesh.

        Args:
            apply_constraint: Whether to constrain it.
        """
        mesh = self.mesh if self.mesh is not None else get_global_mesh()
        if not apply_constraint or mesh is None:
            return self.value
        return jax.lax.with_sharding_constraint(self.value, self.get_sharding(mesh))

    def replace_boxed(self, val: Any) -> Any:
        """Returns a box like this one around another value."""
        return self.replace(value=val)

    def add_axis(self, index: int, params: Mapping[Any, Any]) -> Self:
        """Returns a box with a name inserted for a new axis."""
        name, names = self._axis_name(params), list(self.names)
        names += [None] * (index - len(names))
        position = index if index >= 0 else len(names) + 1 + index
        names.insert(position, name)
        return self.replace(names=tuple(names))

    def remove_axis(self, index: int, params: Mapping[Any, Any]) -> Self:
        """Returns a box without the name of an axis."""
        name, names = self._axis_name(params), list(self.names)
        removed = names.pop(index)
        if removed != name:
            raise AssertionError(
                f"Expected to remove the axis {name!r} at index {index} of "
                f"{self.names}, where {removed!r} is."
            )
        return self.replace(names=tuple(names))

    def _axis_name(self, params: Mapping[Any, Any]) -> Any:
        if PARTITION_NAME not in params:
            raise errors.GraftreeError(
                "Trying to transform a Partitioned variable but "
                f'"{PARTITION_NAME}" is not specified in metadata_params: {self}.'
            )
        return params[PARTITION_NAME]

    def get_partition_spec(self) -> PartitionSpec:
        """Returns the names as a PartitionSpec."""
        return PartitionSpec(*self.names)

    def get_sharding(self, mesh: Mesh | AbstractMesh) -> NamedSharding:
        """Returns the sharding on a mesh."""
        return NamedSharding(mesh, self.get_partition_spec())

    def to_nnx_metadata(self) -> dict[str, Any]:
        """Returns the fields as metadata of a Variable."""
        fields = dict(vars(self))
        fields["out_sharding"] = fields.pop("names")
        return fields

    @classmethod
    def from_nnx_metadata(cls, metadata: dict[str, Any]) -> Self:
        """Makes a box from the metadata of a Variable and its ``value``."""
        return cls(metadata["value"], metadata["out_sharding"], metadata.get("mesh"))


def is_axis_metadata(val: Any) -> bool:
    """Whether a value is a box.

    Example:
        >>> from graftree.interop.flax_side import partition_boxes as meta
        >>> meta.is_axis_metadata(3)
        False
    """
    return isinstance(val, AxisMetadata)


def map_axis_meta(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Replaces each box of a pytree by a function of it; other leaves stay.

    Example:
        >>> from graftree.interop.flax_side import partition_boxes as meta
        >>> tree = {"a": meta.Partitioned(1, ("x",)), "b": 2}
        >>> meta.map_axis_meta(lambda box: box.names, tree)
        {'a': ('x',), 'b': 2}
    """
    return jax.tree.map(
        lambda leaf: fn(leaf) if is_axis_metadata(leaf) else leaf,
        tree,
        is_leaf=is_axis_metadata,
    )


def add_axis(tree: Any, index: int, params: dict[Any, Any]) -> Any:
    """Adds an axis to each box of a pytree.

    Example:
        >>> from graftree.interop.flax_side import partition_boxes as meta
        >>> box = meta.Partitioned(1, ("x",))
        >>> meta.add_axis(box, 0, {"partition_name": None}).names
        (None, 'x')
    """
    return map_axis_meta(lambda box: box.add_axis(index, params), tree)


def remove_axis(tree: Any, index: int, params: dict[Any, Any]) -> Any:
    """Removes an axis from each box of a pytree.

    Example:
        >>> from graftree.interop.flax_side import partition_boxes as meta
        >>> box = meta.Partitioned(1, ("x", "y"))
        >>> meta.remove_axis(box, 0, {"partition_name": "x"}).names
        ('y',)
    """
    return map_axis_meta(lambda box: box.remove_axis(index, params), tree)


def unbox(tree: Any) -> Any:
    """Opens all boxes of a pytree, nested ones too.

    Example:
        >>> from graftree.interop.flax_side import partition_boxes as meta
        >>> meta.unbox({"a": meta.Partitioned(1, ("x",)), "b": 2})
        {'a': 1, 'b': 2}
    """
    return map_axis_meta(lambda box: unbox(box.unbox()), tree)


def replace_boxed(tree: Any, updates: Any) -> Any:
    """Puts new values into the boxes of a pytree.

    Args:
        tree: A pytree with boxes.
        updates: A pytree of the same structure, with values in place of boxes.

    Returns:
        The pytree with the new values, boxed where the old ones were.

    Example:
        >>> from graftree.interop.flax_side import partition_boxes as meta
        >>> tree = {"a": meta.Partitioned(1, ("x",)), "b": 2}
        >>> meta.replace_boxed(tree, {"a": 3, "b": 4})
        {'a': Partitioned(value=3, names=('x',), mesh=None), 'b': 4}
    """
    return jax.tree.map(
        lambda old, new: old.replace_boxed(new) if is_axis_metadata(old) else new,
        tree,
        updates,
        is_leaf=is_axis_metadata,
    )


def get_partition_spec(tree: Any) -> Any:
    """Gives for each box its PartitionSpec, for another array ``P()``, else None.

    Example:
        >>> from graftree.interop.flax_side import partition_boxes as meta
        >>> tree = {"a": meta.Partitioned(1, ("x",)), "b": jnp.ones(2)}
        >>> meta.get_partition_spec(tree)
        {'a': P('x',), 'b': P()}
    """

    def spec(leaf: Any) -> PartitionSpec | None:
        if is_axis_metadata(leaf):
            return leaf.get_partition_spec()
        return PartitionSpec() if hasattr(leaf, "shape") else None

    return jax.tree.map(spec, tree, is_leaf=is_axis_metadata)


def get_sharding(tree: Any, mesh: Mesh) -> Any:
    """Gives for each box or array its sharding on a mesh; for others None.

    Example:
        >>> from graftree.interop.flax_side import partition_boxes as meta
        >>> mesh = jax.make_mesh((1,), ("x",))
        >>> meta.get_sharding(meta.Partitioned(1, ("x",)), mesh).spec
        P('x',)
    """
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        get_partition_spec(tree),
        is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )


def with_partitioning(
    fn: Callable[..., Any], names: tuple[str | None, ...], mesh: Mesh | None = None
) -> Callable[..., Partitioned[Any]]:
    """Wraps an initializer: what it returns comes in a box.

    Args:
        fn: The initializer.
        names: The mesh axis, or None, of each axis of its result.
        mesh: The mesh, or None for the one in force.

    Returns:
        The new initializer.

    Example:
        >>> from graftree.interop.flax_side import partition_boxes as meta
        >>> init = meta.with_partitioning(jax.nn.initializers.ones, ("x", None))
        >>> init(jax.random.key(0), (2, 2)).names
        ('x', None)
    """

    def boxed(*args: Any, **kwargs: Any) -> Partitioned[Any]:
        return Partitioned(fn(*args, **kwargs), names, mesh=mesh)

    boxed.__wrapped__ = fn  # type: ignore[attr-defined]
    return cast(Callable[..., Partitioned[Any]], boxed)


def get_global_mesh() -> AbstractMesh | None:
    """The mesh in force, or None.

    Example:
        >>> from graftree.interop.flax_side import partition_boxes as meta
        >>> meta.get_global_mesh() is None
        True
    """
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def global_mesh_defined() -> bool:
    """Whether a mesh is in force.

    Example:
        >>> from graftree.interop.flax_side import partition_boxes as meta
        >>> meta.global_mesh_defined()
        False
    """
    return get_global_mesh() is not None
