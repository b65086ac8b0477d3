"""Models that are made where they belong: each device computes its own part.

Before they are made they are *abstract*, with shapes and shardings for arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from graftree import _jax, errors
from graftree.core import paths
from graftree.core.graph import flattening, functional, traversals
from graftree.core.states import pure_dicts
from graftree.core.variables import partitioning, variables
from graftree.core.variables import sharding as variable_sharding
from graftree.core.variables.variables import Variable
from graftree.sharding import misfits
from graftree.transforms import recordings

T = TypeVar("T")


def init(
    make: Callable[[], T],
    mesh: jax.sharding.Mesh,
    rules: Sequence[tuple[str, Any]] = (),
) -> T:
    """Makes a model on a mesh, as its Variables are annotated.

    The function is compiled, so that no device ever holds more than its part of an
    array, and all devices have part in making it. The numbers are those that the
    function gives without a mesh: what JAX would cut to 32 bits stays on the host, and
    so do Python numbers.

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
        ValueError: If the mesh has no axis of a name, or the devices can't divide an
            axis of an array; it lists all of these by path. Nothing has been made.
        TypeError: If ``rules`` are no pairs.

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
        _check(abstract, mesh)
        places = jax.tree.map(lambda x: x.sharding, pure_dicts.as_pure(abstract))
        kept: list[Any] = []  # what no device can hold, in the places of their leaves

        def arrays() -> Any:
            leaves, treedef = jax.tree.flatten(
                pure_dicts.as_pure(functional.state(make()))
            )
            kept[:] = [leaf if _is_on_host(leaf) else None for leaf in leaves]
            stand_in = [
                leaf if host is None else jnp.zeros(np.shape(host), bool)
                for leaf, host in zip(leaves, kept, strict=True)
            ]
            return treedef.unflatten(stand_in)

        with jax.set_mesh(mesh):
            made, treedef = jax.tree.flatten(jax.jit(arrays, out_shardings=places)())
            state = treedef.unflatten(
                [
                    leaf if host is None else host
                    for leaf, host in zip(made, kept, strict=True)
                ]
            )
            return functional.merge(graphdef, state)


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
        if not _is_variable(leaf):
            return leaf
        raw = leaf.get_raw_value()
        placed = partitioning.place_abstract(raw, variables.metadata_of(leaf))
        return leaf if placed is raw else leaf.copy(placed)

    return traversals.map(place, tree, graph=graph)


def get_abstract_model(
    init_fn: Callable[[], Any], mesh: jax.sharding.Mesh, *, graph: bool | None = None
) -> tuple[Any, Any]:
    """The structure and the sharded shapes of the model that a function makes.

    Args:
        init_fn: Makes the model; it is not run, only traced.
        mesh: What the annotations refer to.
        graph: The mode; ``None`` takes the default.

    Returns:
        The GraphDef, and the State with a ``jax.ShapeDtypeStruct`` on ``mesh`` for each
        array; what is not annotated is replicated.

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
        is_variable = _is_variable(leaf)
        spec = partitioning.get_var_pspec(leaf) if is_variable else None
        sharding = NamedSharding(mesh, spec or PartitionSpec())
        raw = flattening.raw_of(leaf)
        placed = jax.tree.map(lambda x: x.update(sharding=sharding), raw)
        return leaf.copy(placed) if is_variable else placed

    with jax.set_mesh(mesh):
        graphdef, state = functional.split(
            recordings.eval_shape(init_fn, graph=graph), graph=graph
        )
        return graphdef, jax.tree.map(place, state, is_leaf=_is_variable)


def _is_on_host(leaf: Any) -> bool:
    """Whether a value is a Python number, or an array of a dtype that JAX would cut."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype
    return isinstance(leaf, (int, float, complex))


def _explain(
    make: Callable[[], Any], mesh: jax.sharding.Mesh, error: Exception
) -> None:
    """Raises what is wrong with the annotations of a model that can't be made."""
    try:
        with variable_sharding.use_eager_sharding(False):
            abstract = functional.state(recordings.eval_shape(make))
    except Exception:  # The annotations are not the reason.
        return
    _check(abstract, mesh, error)


def _check(state: Any, mesh: jax.sharding.Mesh, cause: Exception | None = None) -> None:
    leaves = jax.tree.leaves_with_path(state, is_leaf=_is_variable)
    lines = [
        f"{paths.dotted(paths.from_jax(path))}: {problem}"
        for path, leaf in leaves
        if _is_variable(leaf) and (problem := _problem(leaf, mesh)) is not None
    ]
    if lines:
        raise ValueError(
            errors.message(
                "nnx.sharding.init: the annotations don't fit the mesh.",
                where="\n".join([*lines, misfits.surroundings(mesh)]),
                way_out=misfits.WAY_OUT,
            )
        ) from cause


def _is_variable(x: Any) -> bool:
    return isinstance(x, Variable)


def _problem(variable: Variable[Any], mesh: jax.sharding.Mesh) -> str | None:
    annotation = variable.get_metadata("out_sharding", None)
    spec = partitioning.get_var_pspec(variable)
    if not annotation or spec is None or _jax.is_format(annotation):
        return None
    names = getattr(annotation, "spec", annotation)
    for array in jax.tree.leaves(variable.get_raw_value()):
        problem = misfits.between(names, spec, array.shape, mesh)
        if problem is not None:
            return problem
    return None
