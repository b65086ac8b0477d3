"""Partition annotations of whole models: attached, extracted, and kept in step.

An annotation is the metadata ``out_sharding`` of a Variable (see `sharding.py`): an
entry per dimension of its value. `with_partitioning` attaches it as the Variable is
made, the ``get_...`` functions give trees of specs for ``jax.jit`` and
``jax.device_put``, and `add_axis` and `remove_axis` follow a transform that adds a
dimension to all values or takes one away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from graftree import _jax, errors
from graftree.annotations import Path
from graftree.core import ownership, paths
from graftree.core.text import representations
from graftree.core.variables import sharding as variable_sharding, variables
from graftree.core.variables.metadata import VariableMetadata, with_metadata
from graftree.core.variables.variables import Variable

A = TypeVar("A")

PARTITION_NAME = "partition_name"
"""The key under which ``transform_metadata`` names the axis for ``out_sharding``."""


def with_partitioning(
    initializer: Callable[..., Any],
    sharding: Any,
    mesh: Mesh | None = None,
    **metadata: Any,
) -> Callable[..., VariableMetadata]:
    """Wraps an initializer so that the Variable made from its value is annotated.

    Args:
        initializer: Called with the arguments of the wrapper.
        sharding: The annotation: per dimension a mesh axis or logical name, a tuple of
            them, or ``None``.
        mesh: The mesh to place the value on; ``None`` for the one in force.
        **metadata: Further metadata, e.g. ``sharding_rules``.

    Returns:
        A function with the arguments of ``initializer`` that returns a
        `VariableMetadata`, which the constructor of a Variable takes apart.

    Example:
        >>> init = nnx.with_partitioning(nnx.initializers.ones, ("data", None))
        >>> boxed = init(jax.random.key(0), (2, 3))
        >>> nnx.Param(boxed, eager_sharding=False).out_sharding
        ('data', None)
    """
    return with_metadata(initializer, out_sharding=sharding, mesh=mesh, **metadata)


def get_var_pspec(variable: Variable[Any]) -> PartitionSpec | None:
    """Returns the PartitionSpec of a Variable, with mesh axes for logical names.

    Args:
        variable: The Variable.

    Returns:
        Its spec. Without an annotation: an empty one if the value has a shape,
        otherwise ``None``.

    Raises:
        ValueError: If the axis rules in force contradict those of the Variable.
        TypeError: If the annotation is a bare string.

    Example:
        >>> kernel = nnx.Param(jnp.ones(2), out_sharding=("a",), eager_sharding=False)
        >>> tuple(nnx.spmd.get_var_pspec(kernel))
        ('a',)
    """
    annotation = variable.get_metadata("out_sharding", None)
    if _jax.is_format(annotation):
        annotation = annotation.sharding
    if not annotation:
        return PartitionSpec() if hasattr(variable.get_raw_value(), "shape") else None
    rules = variable.get_metadata("sharding_rules", None)
    return variable_sharding.get_pspec(annotation, rules)


def get_partition_spec(tree: A) -> A:
    """Returns a tree of PartitionSpecs for a model, state or other pytree.

    Args:
        tree: The pytree; it is not changed.

    Returns:
        A new tree of the same structure. In place of each Variable it has one with the
        same type and metadata that holds the spec; in place of any other leaf, an empty
        spec if the leaf has a shape, otherwise ``None``.

    Raises:
        ValueError: If the axis rules in force contradict those of a Variable.
        TypeError: If an annotation is a bare string.

    Example:
        >>> kernel = nnx.Param(jnp.ones(2), out_sharding=("a",), eager_sharding=False)
        >>> specs = nnx.get_partition_spec({"kernel": kernel, "bias": jnp.ones(3)})
        >>> tuple(specs["kernel"].get_value()), tuple(specs["bias"])
        (('a',), ())
    """

    def spec(leaf: Any) -> Any:
        if isinstance(leaf, Variable):
            return leaf.replace(get_var_pspec(leaf))
        return PartitionSpec() if hasattr(leaf, "shape") else None

    return jax.tree.map(spec, tree, is_leaf=variables.is_variable)


def get_named_sharding(tree: A, mesh: Mesh) -> A:
    """Returns a tree of shardings for a model, state or other pytree.

    Args:
        tree: The pytree; it is not changed.
        mesh: The mesh whose axes the annotations name.

    Returns:
        The tree of `get_partition_spec` with a ``NamedSharding`` for each spec, as
        ``jax.device_put`` and ``jax.jit(out_shardings=...)`` take it.

    Raises:
        ValueError: If the mesh lacks an axis, or axis rules contradict each other.
        TypeError: If an annotation is a bare string.

    Example:
        >>> mesh = jax.make_mesh((2,), ("a",))
        >>> kernel = nnx.Param(jnp.ones(2), out_sharding=("a",), eager_sharding=False)
        >>> shardings = nnx.get_named_sharding(nnx.state([kernel]), mesh)
        >>> placed = jax.device_put(nnx.state([kernel]), shardings)
        >>> tuple(placed[0].sharding.spec)
        ('a',)
    """

    def on_mesh(spec: Any) -> Any:
        return NamedSharding(mesh, spec) if isinstance(spec, PartitionSpec) else spec

    return jax.tree.map(
        on_mesh,
        get_partition_spec(tree),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def place_abstract(
    value: Any, metadata: Mapping[str, Any], *, is_replicated: bool = False
) -> Any:
    """Adds to an abstract value the sharding that its annotation asks for.

    Without an annotation, ``is_replicated`` replicates it on the mesh in force.
    """
    if not any(map(_is_unplaced, jax.tree.leaves(value))):
        return value
    sharding = _abstract_sharding(metadata, is_replicated)
    if sharding is None:
        return value
    return jax.tree.map(
        lambda x: x.update(sharding=sharding) if _is_unplaced(x) else x, value
    )


def _is_unplaced(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct) and x.sharding is None


def _abstract_sharding(metadata: Mapping[str, Any], is_replicated: bool) -> Any:
    annotation = metadata.get("out_sharding")
    if _jax.is_format(annotation):
        return annotation
    mesh = jax.sharding.get_abstract_mesh()
    if not annotation:
        has_sharding = is_replicated and not mesh.empty
        return NamedSharding(mesh, PartitionSpec()) if has_sharding else None
    has_own = isinstance(annotation, NamedSharding) or metadata.get("mesh") is not None
    if mesh.empty and not has_own:
        return None
    return variable_sharding.named_sharding(annotation, metadata)


def on_concrete_mesh(sharding: Any, path: Path, call: str) -> Any:
    """Returns the sharding on devices of an abstract array.

    Raises:
        ValueError: If its mesh is not in force; with the path, and the function that
            was called.
    """
    if not isinstance(sharding, NamedSharding) or not isinstance(
        sharding.mesh, AbstractMesh
    ):
        return sharding
    mesh = _jax.concrete_mesh()
    if mesh is None or mesh.abstract_mesh != sharding.mesh:
        raise ValueError(
            errors.message(
                f"{call}: an abstract array has a sharding on a mesh that is not "
                "active.",
                where=f"{paths.to_string(path, '<root>')}: {sharding}",
                way_out="Load within jax.set_mesh(mesh), with the mesh that the model "
                "was made for.",
            )
        )
    return sharding.update(mesh=mesh)


def add_axis(tree: A, index: int, transform_metadata: Mapping[str, Any]) -> A:
    """Adds a dimension to the annotations of all Variables in a tree.

    Inserts the name ``transform_metadata[PARTITION_NAME]`` into each annotation at
    ``index``; likewise for every metadata entry that is a tuple and has a key in
    ``transform_metadata``. Then calls `Variable.add_axis`. Variables without annotation
    have nothing to change.

    Args:
        tree: A pytree or an object; its Variables are changed in place.
        index: The position of the new dimension. A negative one counts from the end of
            the value, which may already have the dimension, or of the annotation if
            that is longer.
        transform_metadata: Names of the new dimension, by metadata key.

    Returns:
        ``tree`` itself.

    Raises:
        ValueError: If ``transform_metadata`` has no `PARTITION_NAME`.
        TraceContextError: If another trace owns a Variable.

    Example:
        >>> kernel = nnx.Param(jnp.ones(2), out_sharding=("a",), eager_sharding=False)
        >>> layers = {nnx.PARTITION_NAME: "layers"}
        >>> nnx.spmd.add_axis(kernel, 0, layers).out_sharding
        ('layers', 'a')
    """
    return _change(tree, index, transform_metadata, _inserted, "add_axis")


def remove_axis(tree: A, index: int, transform_metadata: Mapping[str, Any]) -> A:
    """Removes a dimension from the annotations of all Variables in a tree.

    The inverse of `add_axis`.

    Args:
        tree: A pytree or an object; its Variables are changed in place.
        index: The position of the dimension. A negative one counts from the end of the
            value, or of the annotation if that is longer.
        transform_metadata: Names of the dimension, by metadata key.

    Returns:
        ``tree`` itself.

    Raises:
        ValueError: If ``transform_metadata`` has no `PARTITION_NAME`, or the name at
            ``index`` is a different one; then nothing is changed.
        TraceContextError: If another trace owns a Variable.

    Example:
        >>> kernel = nnx.Param(1, out_sharding=("layers", "a"), eager_sharding=False)
        >>> layers = {nnx.PARTITION_NAME: "layers"}
        >>> nnx.spmd.remove_axis(kernel, 0, layers).out_sharding
        ('a',)
    """
    return _change(tree, index, transform_metadata, _removed, "remove_axis")


def annotate_first_axis(tree: A, name: Any) -> A:
    """Names the first dimension of Variables that have no annotation, and places them.

    `add_axis` leaves them alone; here the dimension is that of layers, which all
    Variables of them have.
    """
    for variable in representations.variables_in(tree) if name is not None else ():
        raw = variable.get_raw_value()
        if variable.get_metadata("out_sharding", None) or not jax.tree.leaves(raw):
            continue
        variable.set_metadata(out_sharding=(name,))
        entries = variables.metadata_of(variable)
        if not _jax.is_ref(raw):
            placed = variable_sharding.place_named(raw, entries, name)
            if placed is not raw:
                variables.store(variable, placed)
    return tree


def drop_empty(tree: Any) -> None:
    """Removes annotations that say nothing about any dimension."""
    for variable in representations.variables_in(tree):
        if variable.get_metadata("out_sharding", None) == ():
            variable.del_metadata("out_sharding")


def _change(
    tree: A,
    index: int,
    transform_metadata: Mapping[str, Any],
    change: Callable[..., tuple[Any, ...]],
    method: str,
) -> A:
    if PARTITION_NAME not in transform_metadata:
        raise ValueError(
            f'"{PARTITION_NAME}" is not specified in transform_metadata: '
            f"{dict(transform_metadata)}.\n"
            "Add nnx.PARTITION_NAME with the name of the axis, or None."
        )
    name = transform_metadata[PARTITION_NAME]
    names = {**transform_metadata, "out_sharding": name}
    boxes = representations.variables_in(tree)
    # All before the first is written: an error must not leave half a model renamed.
    changes = [
        {
            key: _with_entries(variable, key, change(variable, key, index, names[key]))
            for key in names
            if _entries(variable, key)
        }
        for variable in boxes
    ]
    for variable, entries in zip(boxes, changes, strict=True):
        if entries and not variables.is_owned(variable):
            raise ownership.variable_error(variable)
    for variable, entries in zip(boxes, changes, strict=True):
        if entries:
            variable.set_metadata(**entries)
        getattr(variable, method)(index, name)
    return tree


def _entries(variable: Variable[Any], key: str) -> tuple[Any, ...]:
    """Returns a metadata entry per dimension; empty if it is not of that kind."""
    value = variable.get_metadata(key, None)
    if key == "out_sharding" and isinstance(value, NamedSharding):
        value = value.spec
    if key == "out_sharding" and isinstance(value, (list, PartitionSpec)):
        value = tuple(value)
    return value if isinstance(value, tuple) else ()


def _with_entries(variable: Variable[Any], key: str, entries: tuple[Any, ...]) -> Any:
    """Returns metadata with other entries; a NamedSharding stays on its mesh."""
    value = variable.get_metadata(key)
    if key == "out_sharding" and isinstance(value, NamedSharding):
        return NamedSharding(value.mesh, PartitionSpec(*entries))
    return entries


def _inserted(variable: Variable[Any], key: str, index: int, name: Any) -> tuple:
    entries = _entries(variable, key)
    position = _position(variable, index, len(entries) + 1)
    padded = [*entries, *[None] * (position - len(entries))]
    return (*padded[:position], name, *padded[position:])


def _removed(variable: Variable[Any], key: str, index: int, name: Any) -> tuple:
    entries = _entries(variable, key)
    position = _position(variable, index, len(entries))
    entry = entries[position] if position < len(entries) else None
    if entry != name:
        raise ValueError(
            f"Expected to remove {name!r} at index {index} from {entries}, but found "
            f"{entry!r}.\nThis is `{key}` of a {type(variable).__name__}; pass the "
            "name that was added at this index."
        )
    return entries[:position] + entries[position + 1 :]


def _position(variable: Variable[Any], index: int, count: int) -> int:
    rank = max(len(getattr(variable.get_raw_value(), "shape", ())), count)
    position = index + rank if index < 0 else index
    if position < 0:
        raise ValueError(f"Index {index} is out of range for {rank} dimensions.")
    return position
