"""Places values on a mesh: activations, and models being made.

`constrain` places values inside a model by the names of their axes. `init` makes a
model where it belongs: each device computes its own part.

`report` is a table of where a model's arrays are, by path, with the bytes on each
device.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from graftree import _jax, errors
from graftree.core import paths
from graftree.core.graph import flattening, functional, traversals
from graftree.core.states import pure_dicts
from graftree.core.text import descriptions
from graftree.core.variables import (
    partitioning,
    sharding as variable_sharding,
    variables,
)
from graftree.transforms import recordings

T = TypeVar("T")


def constrain(x: T, names: Sequence[Any]) -> T:
    """Places a value on the mesh in force by the names of its axes.

    Call it where a model should say how its activations are divided, as in
    ``x = nnx.sharding.constrain(x, ("batch", None, "embed"))``. Without a mesh it does
    nothing. On axes of type Auto it is ``jax.lax.with_sharding_constraint``, on
    Explicit ones ``jax.sharding.reshard``; it skips axes that `jax.shard_map` has taken
    (Manual). Gradients are placed the same way. Compiled functions are traced again
    where other rules or another mesh are in force.

    Args:
        x: An array, or a pytree of arrays, all with axes of these names.
        names: One for each axis: a name that `logical_axis_rules` know or an axis of
            the mesh, a tuple of such names, or ``None`` for an axis that is not
            divided. You may leave out axes at the end; they are not divided either.

    Returns:
        The same values, placed.

    Raises:
        ValueError: If a name stands for no axis of the mesh, or two for the same; if an
            array has fewer axes than there are names, or its size along one can't be
            divided.
        TypeError: If ``names`` is a string.

    Example:
        >>> mesh = jax.make_mesh((4,), ("data",))
        >>> with jax.set_mesh(mesh), nnx.logical_axis_rules([("batch", "data")]):
        ...     x = nnx.sharding.constrain(jnp.ones((8, 3)), ("batch", None))
        >>> x.sharding.shard_shape(x.shape)
        (2, 3)
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    spec = variable_sharding.get_pspec(names)
    leaves, treedef = jax.tree.flatten_with_path(x)
    for path, leaf in leaves:
        if problem := _misfit(names, spec, np.shape(leaf), mesh):
            text = f"at {paths.dotted(paths.from_jax(path))}\n" if path else ""
            text += f"array of shape {np.shape(leaf)}\n{_meanings(mesh)}"
            message = f"nnx.sharding.constrain: {problem}."
            raise ValueError(errors.message(message, where=text, way_out=_WAY_OUT))
    return treedef.unflatten([_place(leaf, spec, mesh) for _, leaf in leaves])


def _place(leaf: Any, spec: PartitionSpec, mesh: Any) -> Any:
    shardings = {
        axis_type: NamedSharding(mesh, _only(axis_type, spec, mesh))
        for axis_type in {*mesh.axis_types} & _PUT.keys()
    }
    for sharding in shardings.values():
        leaf = variable_sharding.on_mesh(leaf, sharding)
    if len(shardings) > 1:
        explicit, auto = shardings[AxisType.Explicit], shardings[AxisType.Auto]
        return _place_both(leaf, explicit, auto)
    for axis_type, sharding in shardings.items():
        leaf = _PUT[axis_type](leaf, sharding)
    return leaf


_PUT = {
    AxisType.Auto: jax.lax.with_sharding_constraint,
    AxisType.Explicit: jax.sharding.reshard,
}


@functools.partial(jax.jit, static_argnums=(1, 2))
def _place_both(x: jax.Array, explicit: NamedSharding, auto: NamedSharding) -> Any:
    """Places a value by both at once: each alone would forget the other's effect."""
    return jax.lax.with_sharding_constraint(jax.sharding.reshard(x, explicit), auto)


def _only(axis_type: AxisType, spec: PartitionSpec, mesh: Any) -> PartitionSpec:
    """Leaves out axes of the mesh that are of another type."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))

    def reduced(entry: Any) -> Any:
        if isinstance(entry, tuple):
            return tuple(axis for axis in entry if types[axis] == axis_type) or None
        return entry if types.get(entry, axis_type) == axis_type else None

    return PartitionSpec(*map(reduced, spec))


def init(
    make: Callable[[], T],
    mesh: jax.sharding.Mesh,
    rules: Sequence[tuple[str, Any]] = (),
) -> T:
    """Makes a model on a mesh, placed by the annotations of its Variables.

    The function is compiled, so that no device ever holds more than its part of an
    array, and all devices help to make it. The numbers are those that the function
    gives without a mesh: values that JAX would cut to 32 bits stay on the host, and so
    do Python numbers.

    Args:
        make: Makes the model; also a tuple of a model and its optimizer, whose state
            goes where the parameters are, or where their ``optimizer_sharding`` says.
            It is traced twice.
        mesh: The devices. Variables without annotations are on all of them.
        rules: The meaning of the logical axis names in annotations: pairs of a name and
            an axis of the mesh, a tuple of axes, or ``None``.

    Returns:
        The result of ``make``.

    Raises:
        ValueError: If the mesh has no axis of a name, or the devices can't divide an
            axis of an array; lists all of these by path. Nothing has been made.
        TypeError: If ``rules`` are not pairs.

    Example:
        >>> mesh = jax.make_mesh((2,), ("model",))
        >>> def make():
        ...     metadata = {"out_sharding": (None, "mlp")}
        ...     return nnx.Linear(4, 8, kernel_metadata=metadata, rngs=nnx.Rngs(0))
        >>> model = nnx.sharding.init(make, mesh, [("mlp", "model")])
        >>> [shard.data.shape for shard in model.kernel.addressable_shards]
        [(4, 4), (4, 4)]
    """
    # JAX cuts numbers to 32 bits before we put back those that it must not.
    with variable_sharding.logical_axis_rules(rules), np.errstate(over="ignore"):
        try:
            graphdef, abstract = get_abstract_model(make, mesh)
        except Exception as error:
            _explain(make, mesh, error)
            raise
        _check_annotations(abstract, mesh)
        shardings = jax.tree.map(lambda x: x.sharding, pure_dicts.as_pure(abstract))
        on_host: dict[int, Any] = {}  # values that no device can hold, by index

        def arrays() -> Any:
            state = pure_dicts.as_pure(functional.state(make()))
            leaves, treedef = jax.tree.flatten(state)
            on_host.update({i: x for i, x in enumerate(leaves) if _is_on_host(x)})
            for i, x in on_host.items():
                leaves[i] = jnp.zeros(np.shape(x), bool)
            return treedef.unflatten(leaves)

        with jax.set_mesh(mesh):
            state = jax.jit(arrays, out_shardings=shardings)()
            leaves, treedef = jax.tree.flatten(state)
            leaves = [on_host.get(i, x) for i, x in enumerate(leaves)]
            return functional.merge(graphdef, treedef.unflatten(leaves))


def as_abstract(tree: T, graph: bool | None = None) -> T:
    """Gives the annotated Variables of an abstract model their shardings.

    Args:
        tree: An abstract model, a State, or a container of these; it is not changed.
        graph: The mode; ``None`` takes the default.

    Returns:
        A new tree. A Variable with an annotation, with a ``jax.ShapeDtypeStruct`` that
        has no sharding, is replaced by one with it, on the mesh in its metadata or that
        of ``jax.set_mesh``. All others are the Variables of ``tree``.

    Raises:
        ValueError: In tree mode, for shared references.

    Example:
        >>> mesh = jax.make_mesh((2,), ("a",))
        >>> shape = jax.ShapeDtypeStruct((4,), jnp.float32)
        >>> bias = nnx.Param(shape, out_sharding=("a",), eager_sharding=False)
        >>> with jax.set_mesh(mesh):
        ...     tuple(nnx.as_abstract(bias).sharding.spec)
        ('a',)
    """

    def place(_: Any, leaf: Any) -> Any:
        if not variables.is_variable(leaf):
            return leaf
        raw = leaf.get_raw_value()
        placed = partitioning.place_abstract(raw, variables.metadata_of(leaf))
        return leaf if placed is raw else leaf.copy(placed)

    return traversals.map(place, tree, graph=graph)


def get_abstract_model(
    init_fn: Callable[[], Any], mesh: jax.sharding.Mesh, *, graph: bool | None = None
) -> tuple[Any, Any]:
    """Returns the structure and sharded shapes of the model that a function makes.

    Args:
        init_fn: Makes the model; it is not run, only traced.
        mesh: The mesh that the annotations refer to.
        graph: The mode; ``None`` takes the default.

    Returns:
        The GraphDef, and the State with a ``jax.ShapeDtypeStruct`` on ``mesh`` for each
        array; Variables without annotations are replicated.

    Raises:
        ValueError: If the mesh has no axis of a name.

    Example:
        >>> mesh = jax.make_mesh((2,), ("a",))
        >>> init = lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> graphdef, state = nnx.get_abstract_model(init, mesh)
        >>> state["kernel"].sharding.is_fully_replicated
        True
    """

    def place(leaf: Any) -> Any:
        is_variable = variables.is_variable(leaf)
        spec = partitioning.get_var_pspec(leaf) if is_variable else None
        sharding = NamedSharding(mesh, spec or PartitionSpec())
        raw = flattening.raw_of(leaf)
        placed = jax.tree.map(lambda x: x.update(sharding=sharding), raw)
        return leaf.copy(placed) if is_variable else placed

    with jax.set_mesh(mesh):
        # Split within the trace: abstract arrays in containers would be static.
        graphdef, state = recordings.eval_shape(
            lambda: functional.split(init_fn(), graph=graph), graph=graph
        )
        return graphdef, jax.tree.map(place, state, is_leaf=variables.is_variable)


def _is_on_host(leaf: Any) -> bool:
    """Whether a value is a Python number, or an array of a dtype that JAX would cut."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype
    return isinstance(leaf, (int, float, complex))


def _explain(
    make: Callable[[], Any], mesh: jax.sharding.Mesh, error: Exception
) -> None:
    """Raises the faults in the annotations of a model that can't be made."""
    try:
        with variable_sharding.use_eager_sharding(False):
            abstract = functional.state(recordings.eval_shape(make))
    except Exception:  # The annotations are not the reason.
        return
    _check_annotations(abstract, mesh, error)


def _check_annotations(
    state: Any, mesh: jax.sharding.Mesh, cause: Exception | None = None
) -> None:
    leaves = jax.tree.leaves_with_path(state, is_leaf=variables.is_variable)
    lines = [
        f"{paths.dotted(paths.from_jax(path))}: {problem}"
        for path, leaf in leaves
        if variables.is_variable(leaf)
        and (problem := _problem_of_annotation(leaf, mesh))
    ]
    if lines:
        raise ValueError(
            errors.message(
                "nnx.sharding.init: the annotations don't fit the mesh.",
                where="\n".join([*lines, _meanings(mesh)]),
                way_out=_WAY_OUT,
            )
        ) from cause


def _problem_of_annotation(
    variable: variables.Variable[Any], mesh: jax.sharding.Mesh
) -> str | None:
    annotation = variable.get_metadata("out_sharding", None)
    spec = partitioning.get_var_pspec(variable)
    if not annotation or spec is None or _jax.is_format(annotation):
        return None
    names = getattr(annotation, "spec", annotation)
    arrays = jax.tree.leaves(variable.get_raw_value())
    problems = [_misfit(names, spec, array.shape, mesh) for array in arrays]
    return next(filter(None, problems), None)


def axes_of(entry: Any) -> tuple[str, ...]:
    """Lists the axes of the mesh that divide an axis of an array."""
    axes = entry if isinstance(entry, tuple) else (entry,)
    return tuple(axis for axis in axes if isinstance(axis, str))


def _misfit(
    names: Sequence[Any], spec: PartitionSpec, shape: tuple[int, ...], mesh: Any
) -> str | None:
    """Describes the fault in an array with axes of these names, if there is one.

    Args:
        names: An annotation.
        spec: The meaning of its names.
        shape: The shape of the array.
        mesh: The mesh.
    """
    name_by_axis: dict[str, Any] = {}
    for name, entry in zip(names, spec, strict=True):
        for axis in axes_of(entry):
            if axis not in mesh.axis_names:
                return f"{name!r} means {axis!r}, which is not an axis of the mesh"
            if axis in name_by_axis:
                other = name_by_axis[axis]
                return f"{other!r} and {name!r} are both mapped to the axis {axis!r}"
            name_by_axis[axis] = name
    if len(names) > len(shape):
        return f"{len(names)} names {tuple(names)} for the shape {shape}"
    for i, entry in enumerate(spec):
        count = math.prod(mesh.shape[axis] for axis in axes_of(entry))
        if shape[i] % count:
            axes = ", ".join(axes_of(entry))
            return (
                f"axis {i} ({names[i]!r}) has size {shape[i]}, which is not divisible "
                f"by {count} devices (axis {axes} of the mesh)"
            )
    return None


def _meanings(mesh: Any) -> str:
    """Lists the possible meanings of names."""
    rules = ", ".join(
        f"{a!r} -> {b!r}" for a, b in variable_sharding.get_logical_axis_rules()
    )
    axes = ", ".join(f"{name!r} of {size}" for name, size in mesh.shape.items())
    return f"axes of the mesh: {axes}\nrules in force: {rules or 'none'}"


_WAY_OUT = (
    "Map each name to its own axis of the mesh, or to None, with rules "
    "[(name, axis), ...];\na size that isn't divisible needs None, or another mesh."
)


@dataclasses.dataclass(frozen=True)
class PlacedArray:
    """One array of a report.

    Attributes:
        path: Where it is, as in ``blocks[3].mlp.kernel``.
        dtype: Its dtype.
        shape: Its shape.
        local_shape: The shape of the part that a device holds.
        spec: The axes of the mesh that divide its axes.
        num_bytes: The size of the array.
        local_bytes: The size of the part that a device holds.
        array: The array itself, or a ``jax.ShapeDtypeStruct``.
    """

    path: str
    dtype: Any
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    spec: Any
    num_bytes: int
    local_bytes: int
    array: Any = dataclasses.field(repr=False)


class Report:
    """Result of `report`; prints as a table.

    Attributes:
        rows: A `PlacedArray` for each array.
        num_bytes: The size of all arrays.
        bytes_per_device: The most that a device holds of them.

    Example:
        >>> report = nnx.sharding.report(nnx.Linear(2, 4, rngs=nnx.Rngs(0)))
        >>> report.rows[1].path, report.rows[1].local_shape, report.num_bytes
        ('kernel', (2, 4), 48)
    """

    def __init__(self, rows: Sequence[PlacedArray]) -> None:
        self.rows = tuple(rows)
        self.num_bytes = sum(row.num_bytes for row in rows)
        self.bytes_per_device = _fullest(rows)

    def __str__(self) -> str:
        lines = [("path", "global", "local", "spec", "bytes", "bytes per device")]
        lines += [
            (
                row.path,
                descriptions.describe_form(row.dtype, row.shape),
                descriptions.describe_form(row.dtype, row.local_shape),
                _in_words(row.spec),
                f"{row.num_bytes:,}",
                f"{row.local_bytes:,}",
            )
            for row in self.rows
        ]
        total = f"{self.num_bytes:,}", f"{self.bytes_per_device:,}"
        return "\n".join(descriptions.aligned([*lines, ("total", "", "", "", *total)]))

    __repr__ = __str__

    def draw(self, path: str) -> None:
        """Draws where the parts of an array are; needs ``rich``.

        Args:
            path: The path of an array of one or two axes, as in the table.

        Raises:
            KeyError: If there is no array at the path.

        Example:
            >>> mesh = jax.make_mesh((2,), ("a",))
            >>> make = lambda: nnx.Param(jnp.ones((4, 4)), out_sharding=("a",))
            >>> report = nnx.sharding.report({"x": nnx.sharding.init(make, mesh)})
            >>> report.draw("x")  # doctest: +SKIP
        """
        arrays = {row.path: row.array for row in self.rows}
        if path not in arrays:
            raise KeyError(f"There is no array at {path!r}: {', '.join(arrays)}.")
        jax.debug.visualize_array_sharding(arrays[path])


def _fullest(rows: Sequence[PlacedArray]) -> int:
    """Counts the bytes on the fullest device; abstract arrays are on all devices."""
    local_bytes = collections.Counter[Any]()
    everywhere = 0
    for row in rows:
        sharding = getattr(row.array, "sharding", None)
        if sharding is None:
            everywhere += row.local_bytes
        for device in getattr(sharding, "device_set", ()):
            local_bytes[device] += row.local_bytes
    return everywhere + max(local_bytes.values(), default=0)


def report(tree: Any) -> Report:
    """Reports where the arrays of an object are, and the bytes that each device holds.

    Args:
        tree: An object, also an abstract one; a State; a pytree of these. A repeated
            array counts once.

    Returns:
        A `Report`, which prints as a table.

    Example:
        >>> mesh = jax.make_mesh((4,), ("model",))
        >>> def make():
        ...     metadata = {"out_sharding": (None, "model")}
        ...     return nnx.Linear(2, 8, kernel_metadata=metadata, rngs=nnx.Rngs(0))
        >>> nnx.sharding.report(nnx.sharding.init(make, mesh))
        path    global        local         spec             bytes  bytes per device
        bias    float32[8]    float32[8]    (replicated)        32                32
        kernel  float32[2,8]  float32[2,2]  (None, 'model')     64                16
        total                                                   96                48
    """
    skeleton, leaves = flattening.flatten(tree, None, "report")
    rows: dict[int, PlacedArray] = {}
    for path, leaf in zip(skeleton.paths(), leaves, strict=True):
        for subpath, array in jax.tree.leaves_with_path(flattening.raw_of(leaf)):
            if hasattr(array, "shape") and hasattr(array, "dtype"):
                rows.setdefault(id(array), placed_array((*path, *subpath), array))
    return Report([*rows.values()])


def placed_array(path: tuple[Any, ...], array: Any) -> PlacedArray:
    """Describes an array, abstract or not, and where it is."""
    sharding = getattr(array, "sharding", None)
    local = array.shape if sharding is None else sharding.shard_shape(array.shape)
    return PlacedArray(
        paths.dotted(path),
        array.dtype,
        array.shape,
        local,
        getattr(sharding, "spec", None),
        _num_bytes(array.shape, array.dtype),
        _num_bytes(local, array.dtype),
        array,
    )


def _num_bytes(shape: Sequence[int], dtype: Any) -> int:
    """The size of an array on a device, where two numbers of 4 bits share a byte."""
    bits = 8 * dtype.itemsize
    for kind, facts in ((jnp.integer, jnp.iinfo), (jnp.floating, jnp.finfo)):
        if jnp.issubdtype(dtype, kind):
            bits = facts(dtype).bits
    return -(-math.prod(shape) * bits // 8)


def _in_words(spec: Any) -> str:
    """Writes the axes that divide an array."""
    is_divided = any(entry is not None for entry in spec or ())
    return f"({', '.join(map(repr, spec))})" if is_divided else "(replicated)"
