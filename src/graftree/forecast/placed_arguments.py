"""The arguments of a step: which arrays they hold, and on which devices these are."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from graftree import errors
from graftree.core import paths
from graftree.core.graph import flattening
from graftree.core.objects.pytrees import Pytree
from graftree.core.variables.variables import Variable
from graftree.forecast import targets
from graftree.forecast.targets import Target
from graftree.nn import compute_dtypes
from graftree.sharding.placement import PlacedArray, placed_array
from graftree.training.optimizers import OptState

PARAMETERS, OPTIMIZER, OTHERS = "parameters", "optimizer", "others"


class Argument(NamedTuple):
    """An array in the arguments.

    Attributes:
        row: Its path, such as ``model.blocks[0].kernel``, its form and its parts.
        role: `PARAMETERS`, `OPTIMIZER` or `OTHERS`.
    """

    row: PlacedArray
    role: str


class PlacedArguments(NamedTuple):
    """Arguments on a target.

    Attributes:
        args: Positional ones; their arrays are abstract.
        kwargs: Likewise.
        arrays: What they hold, each array once.
        target: The target.
        mesh: Its devices; ``None`` for one device.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    arrays: list[Argument]
    target: Target
    mesh: Mesh | None


def place(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    target: Target | None,
) -> PlacedArguments:
    """Makes arguments abstract, and finds the devices that are meant.

    Raises:
        ValueError: See `graftree.forecast.step`.
    """
    flat = _Flat((args, dict(kwargs)), _names(function, args, kwargs))
    target, mesh = _devices(flat.arrays(), target)
    abstract = functools.partial(_abstract, target=target, mesh=mesh)
    flat = flat.map(abstract)
    (args, kwargs), arrays = flat.build(), {}
    for path, leaf, array in flat.arrays():
        role = PARAMETERS if compute_dtypes.is_param(leaf) else OTHERS
        if isinstance(leaf, OptState) or flat.is_of_optax(path):
            role = OPTIMIZER
        arrays.setdefault(id(array), Argument(placed_array(path, array), role))
    return PlacedArguments(args, dict(kwargs), [*arrays.values()], target, mesh)


def _names(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Any]:
    """Names the positional arguments; those without a name by their position."""
    names: list[Any] = [*range(len(args))]
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of a function that is not of Python
        return names
    for i, parameter in enumerate([*parameters][: len(args)]):
        if parameter.kind is parameter.VAR_POSITIONAL:
            break
        names[i] = parameter.name
    return names


def _is_object(x: Any) -> bool:
    return isinstance(x, (Pytree, Variable))


def _is_of_optax(x: Any) -> bool:
    """Whether it is a part of the state of an Optax transformation."""
    is_named = isinstance(x, tuple) and hasattr(x, "_fields")
    return is_named and type(x).__module__.partition(".")[0] == "optax"


class _Flat:
    """Arguments taken apart: plain pytrees, and all objects in them together.

    Args:
        arguments: Positional ones and keyword ones.
        names: Of the positional ones.
    """

    def __init__(self, arguments: Any, names: Sequence[Any]) -> None:
        flat, self.treedef = jax.tree.flatten_with_path(arguments, is_leaf=_is_object)
        self.names = names
        self.paths = [self._path(paths.from_jax(path)) for path, _ in flat]
        self.leaves = [leaf for _, leaf in flat]
        parts = jax.tree.leaves_with_path(
            arguments, is_leaf=lambda x: _is_object(x) or _is_of_optax(x)
        )
        self._of_optax = [
            self._path(paths.from_jax(path)) for path, x in parts if _is_of_optax(x)
        ]
        self.objects = [i for i, x in enumerate(self.leaves) if _is_object(x)]
        objects = [self.leaves[i] for i in self.objects]
        self.graphdef, self.variables = flattening.flatten(objects, True, "step")

    def _path(self, path: tuple[Any, ...]) -> tuple[Any, ...]:
        group, *rest = path
        if group == 0:
            rest[0] = self.names[rest[0]]
        return tuple(rest)

    def is_of_optax(self, path: tuple[Any, ...]) -> bool:
        """Whether an array is in a state of Optax that is an argument itself."""
        return any(path[: len(part)] == part for part in self._of_optax)

    def arrays(self) -> list[tuple[tuple[Any, ...], Any, Any]]:
        """Lists the path of each array, the Variable or leaf that has it, and it."""
        pairs = [
            (path, leaf)
            for i, (path, leaf) in enumerate(zip(self.paths, self.leaves, strict=True))
            if i not in self.objects
        ]
        for path, leaf in zip(self.graphdef.paths(), self.variables, strict=True):
            index, *rest = path
            pairs.append(((*self.paths[self.objects[index]], *rest), leaf))
        return [
            ((*path, *paths.from_jax(subpath)), leaf, array)
            for path, leaf in pairs
            for subpath, array in jax.tree.leaves_with_path(flattening.raw_of(leaf))
            if hasattr(array, "shape") and hasattr(array, "dtype")
        ]

    def map(self, function: Callable[[Any], Any]) -> _Flat:
        """Returns the same with each array replaced."""
        other = object.__new__(_Flat)
        other.__dict__ |= self.__dict__
        other.leaves = [
            x if i in self.objects else function(x) for i, x in enumerate(self.leaves)
        ]
        other.variables = [
            x.copy(jax.tree.map(function, x.get_raw_value()))
            if isinstance(x, Variable)
            else function(x)
            for x in self.variables
        ]
        return other

    def build(self) -> Any:
        """Returns new arguments."""
        objects = flattening.unflatten(self.graphdef, self.variables)
        leaves = [*self.leaves]
        for i, built in zip(self.objects, objects, strict=True):
            leaves[i] = built
        return self.treedef.unflatten(leaves)


def _abstract(x: Any, target: Target, mesh: Mesh | None) -> Any:
    """Describes an array that would be on the target: whole, if nothing is said."""
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        return x
    sharding = getattr(x, "sharding", None)
    if mesh is None:
        sharding = target.sharding
    elif not (isinstance(sharding, NamedSharding) and _target_of(x) is not None):
        sharding = NamedSharding(mesh, jax.P())
    dtype = x.dtype
    if not jnp.issubdtype(dtype, jax.dtypes.extended):  # as random keys are
        dtype = jax.dtypes.canonicalize_dtype(dtype)  # of NumPy's float64
    return jax.ShapeDtypeStruct(
        x.shape, dtype, sharding=sharding, weak_type=getattr(x, "weak_type", False)
    )


def _target_of(x: Any) -> Target | None:
    """Finds the target that an array is on."""
    sharding = getattr(x, "sharding", None)
    if sharding is None or isinstance(getattr(sharding, "mesh", None), _ABSTRACT):
        return None
    return targets.of_device(next(iter(sharding.device_set)))


_ABSTRACT = jax.sharding.AbstractMesh


def _is_elsewhere(x: Any) -> bool:
    """Whether an array is on devices of this machine, and JAX would not move it."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.sharding is not None
    return isinstance(x, jax.Array) and x.committed


def _devices(
    arrays: Sequence[tuple[Any, Any, Any]], target: Target | None
) -> tuple[Target, Mesh | None]:
    """Finds the target and the mesh that arguments are on, or raises."""
    path_by_target: dict[Target, str] = {}
    path_by_mesh: dict[Any, str] = {}
    paths_elsewhere, paths_divided = [], []
    for path, _, array in arrays:
        its_target = _target_of(array)
        if its_target is None:
            if _is_elsewhere(array):
                paths_elsewhere.append(paths.dotted(path))
                if len(array.sharding.device_set) > 1:
                    paths_divided.append(paths.dotted(path))
            continue
        path_by_target.setdefault(its_target, paths.dotted(path))
        if isinstance(array.sharding, NamedSharding):
            path_by_mesh.setdefault(array.sharding.mesh, paths.dotted(path))
    if paths_divided or (path_by_target and paths_elsewhere):
        raise _mixed(
            "some arguments are on devices of this machine, not of the target",
            paths_divided or paths_elsewhere,
            "Make all of them on the target's mesh: nnx.get_abstract_model(make, "
            "mesh),\njax.ShapeDtypeStruct(shape, dtype, sharding=...).",
        )
    several = [*path_by_target, *({target} - {None, *path_by_target})]
    if path_by_target and len(several) > 1:
        lines = [f"{path_by_target.get(x, 'target=')}: {x.name}" for x in several]
        raise _mixed("there are several targets", lines, "Use one mesh for all.")
    if len(path_by_mesh) > 1:
        lines = [f"{path}: {dict(mesh.shape)}" for mesh, path in path_by_mesh.items()]
        raise _mixed("the arguments are on several meshes", lines, "Use one of them.")
    return _only_target(next(iter(several), target), path_by_target), next(
        iter(path_by_mesh), None
    )


def _only_target(target: Target | None, is_on_it: Any) -> Target:
    if target is None:
        raise _mixed(
            "no target is given",
            [],
            "Make the arguments on a mesh, nnx.get_abstract_model(make, "
            "target.mesh(...)),\nor pass a target of one device, as in "
            "target=nnx.forecast.target('h100').",
        )
    if not is_on_it and len(target.devices) > 1:
        raise _mixed(
            f"{target.name!r} has {len(target.devices)} devices, but nothing says "
            "which of them hold which arrays",
            [],
            "Make the arguments on a mesh: nnx.get_abstract_model(make, "
            "target.mesh({...})).",
        )
    return target


def _mixed(problem: str, lines: Sequence[str], way_out: str) -> ValueError:
    more = [f"and {len(lines) - 5} more"] if len(lines) > 5 else []
    return ValueError(
        errors.message(
            f"nnx.forecast.step: {problem}.",
            where="\n".join([*lines[:5], *more]),
            way_out=way_out,
        )
    )
