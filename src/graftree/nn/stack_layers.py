"""The layers of a `Stack`: whether they are alike, and their values as parts of arrays.

Equal layers are one program, whose values are stacked along a first axis. So they may
differ in nothing but values: `check_alike` says so wherever a layer becomes one of
them. The rest takes stacked arrays apart, which may be abstract ones, and puts them
together.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from graftree import _jax, errors
from graftree.annotations import Path
from graftree.core import paths
from graftree.core.graph import differences, flattening, functional
from graftree.core.graph.fits import Misfit
from graftree.core.graph.graphdefs import LEAF
from graftree.core.states import states
from graftree.core.text import short_forms
from graftree.core.variables import sharding as variable_sharding

# Are layers alike?


@dataclasses.dataclass(frozen=True)
class _Kind:
    """Shape and dtype of an array, as JAX computes with it."""

    shape: tuple[int, ...]
    dtype: str
    is_weak: bool
    is_abstract: bool = False

    def __str__(self) -> str:
        weak = ", weak" * self.is_weak + ", abstract" * self.is_abstract
        return f"{short_forms.describe(self)}{weak}"

    __repr__ = __str__


@dataclasses.dataclass(frozen=True)
class _Held:
    """A Variable, or a bare array, with the kinds of what it holds."""

    fact: Any
    treedef: Any
    kinds: tuple[Any, ...]

    def __str__(self) -> str:
        held = str(self.treedef.unflatten(self.kinds))
        if self.fact is LEAF:
            return held
        where = ", in a ref" * getattr(self.fact, "is_ref", False)
        return f"{differences.describe(self.fact)} {held}{where}"


def check_alike(
    what: str, first: Any, other: Any, names: tuple[str, str], way_out: str
) -> None:
    """Raises unless two layers differ in nothing but values.

    Args:
        what: The first line of the error.
        first: A layer.
        other: Another one.
        names: Where each of them is, as in "in layer 0".
        way_out: The last lines.

    Raises:
        StateMismatchError: If they differ in classes, static attributes, metadata,
            sharing, structure, or in shapes and dtypes.
    """
    found = differences.between(_facts(first), _facts(other))
    if not found:
        return
    lines = differences.in_words(found, *names)
    raise errors.StateMismatchError(
        errors.message(what, where="\n".join(lines), way_out=way_out),
        [x.path for x in found if x.after is differences.ABSENT],
        [x.path for x in found if x.before is differences.ABSENT],
        [misfit for x in found if (misfit := _misfit(x)) is not None],
    )


def _misfit(difference: differences.Difference) -> Misfit | None:
    """A difference of two leaves in what they hold."""
    path, old, new = difference
    if not (isinstance(old, _Held) and isinstance(new, _Held)):
        return None
    shapes = [[getattr(x, "shape", None) for x in held.kinds] for held in (old, new)]
    what = "value" if old.treedef != new.treedef else "dtype"
    return Misfit(path, what if shapes[0] == shapes[1] else "shape", str(old), str(new))


def _facts(layer: Any) -> dict[Path, Any]:
    """What equal layers have in common, by path."""
    graphdef, leaves = flattening.flatten_graph(layer)
    found = differences.facts(graphdef, identity=False)
    for path, leaf in zip(graphdef.paths(), leaves, strict=True):
        values, treedef = jax.tree.flatten(flattening.raw_of(leaf))
        found[path] = _Held(found.get(path, LEAF), treedef, tuple(map(_kind, values)))
    # Layers of a Stack are read-only when they are looked at.
    return {path: x for path, x in found.items() if path[-1:] != _MUTABLE}


_MUTABLE = (differences.MetadataKey("mutable"),)
_NUMBERS = (bool, int, float, complex)


def _kind(x: Any) -> Any:
    """The kind of an array or number; of anything else its type, in words."""
    if type(x) in _NUMBERS:
        dtype = np.dtype(jax.dtypes.canonicalize_dtype(type(x)))
        is_fitting = type(x) is not int or x in _range(dtype)
        return _Kind((), dtype.name if is_fitting else "int", type(x) is not bool)
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        return f"a {type(x).__name__}"
    is_abstract = isinstance(x, jax.ShapeDtypeStruct)
    is_weak = bool(getattr(x, "weak_type", False))
    return _Kind(tuple(x.shape), str(x.dtype), is_weak, is_abstract)


def _range(dtype: Any) -> range:
    limits = np.iinfo(dtype)
    return range(int(limits.min), int(limits.max) + 1)


def check_values(what: str, layer: Any, way_out: str) -> None:
    """Raises unless the values of a layer are the same as parts of arrays.

    Args:
        what: The first line of the error.
        layer: The layer.
        way_out: The last lines.

    Raises:
        StateMismatchError: If there are values that no JAX array can hold.
    """
    wrong = [
        Misfit(path, "value", "an array", str(kind))
        for path, held in _facts(layer).items()
        for kind in (held.kinds if isinstance(held, _Held) else ())
        if not _is_known_to_jax(kind)
    ]
    if wrong:
        where = "\n".join([f"{paths.to_string(x.path)}: {x.given}" for x in wrong])
        text = errors.message(what, where=where, way_out=way_out)
        raise errors.StateMismatchError(text, misfits=wrong)


def _is_known_to_jax(kind: Any) -> bool:
    """Whether a JAX array has the same dtype: one of 64 bits it may not have."""
    if not isinstance(kind, _Kind) or kind.dtype == "int":
        return False
    if kind.dtype.startswith("key<"):
        return True
    dtype = np.dtype(kind.dtype)
    is_number = dtype.kind == "b" or jnp.issubdtype(dtype, jnp.number)
    return is_number and jax.dtypes.canonicalize_dtype(dtype) == dtype


def count(layers: Any, length: int) -> int:
    """How many layers are stacked here.

    Where devices have some of the layers each, as in `shard_map`, the arrays say it.

    Args:
        layers: The layers.
        length: How many there were when they were made.

    Raises:
        ValueError: If a Variable lacks the axis of layers, such as one that a method
            made in the layers as if they were one.
    """
    listed = [
        (path, getattr(x, "shape", ()))
        for path, leaf in states.to_flat_state(functional.state(layers))
        for x in jax.tree.leaves(flattening.raw_of(leaf))
    ]
    counts = {shape[:1] for _, shape in listed} or {(length,)}
    known = (length,) if (length,) in counts else max(counts)
    if len(counts) > 1 or not known:
        raise _axis_error(listed, known or (length,))
    return known[0]


def _axis_error(listed: Any, known: tuple[int, ...]) -> ValueError:
    where = [
        f"layers.{paths.dotted(path)}: shape {shape}"
        for path, shape in listed
        if shape[:1] != known
    ]
    return ValueError(
        errors.message(
            f"A Stack of {known[0]} layers has Variables without an entry per layer.",
            where="\n".join(differences.bounded(where)),
            way_out="Call what makes them, or changes their shape, for each layer: "
            "stack.each(lambda layer: layer.init_cache(...)).",
        )
    )


# Parts of stacked arrays, which may be abstract ones.


def layer_of(x: Any, position: int) -> Any:
    """The entry of a layer."""
    spec = _explicit_spec(x)
    if isinstance(x, jax.ShapeDtypeStruct):
        return _abstract(x, x.shape[1:], 1)
    if spec is None:
        return x[position]
    return x.at[position].get(out_sharding=jax.P(*spec[1:]))


def some_of(x: Any, index: slice) -> Any:
    """The entries of some layers."""
    spec = _explicit_spec(x)
    if isinstance(x, jax.ShapeDtypeStruct):
        count = len(range(*index.indices(x.shape[0])))
        return _abstract(x, (count, *x.shape[1:]))
    if spec is None:
        return x[index]
    return x.at[index].get(out_sharding=jax.P(None, *spec[1:]))


def with_layer(old: Any, position: int, x: Any) -> Any:
    """Stacked values with others for a layer."""
    if isinstance(old, jax.ShapeDtypeStruct):
        return old
    if _explicit_spec(old) is None:
        return old.at[position].set(x)
    is_there = jnp.arange(old.shape[0]) == position
    is_there = is_there.reshape(-1, *[1] * (old.ndim - 1))
    return jnp.where(is_there, jnp.asarray(x)[None], old)


def _explicit_spec(x: Any) -> Any:
    """The spec of an array whose first axis is divided, if its type says so."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return None
    spec = jax.typeof(x).sharding.spec
    return spec if spec and spec[0] is not None else None


def _abstract(x: Any, shape: tuple[int, ...], start: int = 0) -> Any:
    sharding = x.sharding
    if isinstance(sharding, jax.NamedSharding):
        sharding = sharding.update(spec=jax.P(*sharding.spec[start:]))
    return x.update(shape=shape, sharding=sharding)


def stacked(axis_name: str | None, *values: Any) -> Any:
    """Values along a first axis, divided as each of them, and by the axis of layers."""
    first = values[0]
    sharding = getattr(first, "sharding", None)
    sharding = None if isinstance(first, _jax.Tracer) else sharding
    if isinstance(sharding, jax.NamedSharding):
        (entry,) = variable_sharding.get_pspec((axis_name,))
        names = entry if isinstance(entry, tuple) else (entry,)
        mesh = sharding.mesh
        is_auto = {*mesh.axis_types} == {jax.sharding.AxisType.Auto}
        is_axis = is_auto and {*names} <= {*mesh.axis_names}
        spec = jax.P(entry if is_axis else None, *sharding.spec)
        sharding = sharding.update(spec=spec)
    if isinstance(first, jax.ShapeDtypeStruct):
        return first.update(shape=(len(values), *first.shape), sharding=sharding)
    joined = jnp.stack([*map(jnp.asarray, values)])
    is_placed = isinstance(sharding, jax.NamedSharding)
    return jax.device_put(joined, sharding) if is_placed else joined
