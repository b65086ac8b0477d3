"""Whether layers are equal in all but values, so that a `Stack` can keep them as one.

`check_alike` compares two layers: classes, static attributes, metadata, shapes and
dtypes. `check_values` says whether a layer's values can be parts of arrays.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from graftree import errors
from graftree.annotations import Path
from graftree.core import paths
from graftree.core.graph import differences, flattening
from graftree.core.graph.graphdefs import LEAF
from graftree.core.graph.matching import Misfit
from graftree.core.text import descriptions


@dataclasses.dataclass(frozen=True)
class _Kind:
    """Shape and dtype of an array, as JAX computes with it."""

    shape: tuple[int, ...]
    dtype: str
    is_weak: bool
    is_abstract: bool = False

    def __str__(self) -> str:
        weak = ", weak" * self.is_weak + ", abstract" * self.is_abstract
        return f"{descriptions.describe(self)}{weak}"

    __repr__ = __str__


@dataclasses.dataclass(frozen=True)
class _LeafKinds:
    """A Variable, or a bare array, with the kinds of its values."""

    fact: Any
    treedef: Any
    kinds: tuple[Any, ...]

    def __str__(self) -> str:
        value_text = str(self.treedef.unflatten(self.kinds))
        if self.fact is LEAF:
            return value_text
        suffix = ", in a ref" * getattr(self.fact, "is_ref", False)
        return f"{differences.describe(self.fact)} {value_text}{suffix}"


def check_alike(
    message: str, first: Any, other: Any, names: tuple[str, str], way_out: str
) -> None:
    """Raises unless two layers differ only in values.

    Args:
        message: The first line of the error.
        first: A layer.
        other: Another one.
        names: Where each of them is, as in "in layer 0".
        way_out: The last lines.

    Raises:
        StateMismatchError: If they differ in classes, static attributes, metadata,
            sharing, structure, or in shapes and dtypes.
    """
    changes = differences.between(_facts(first), _facts(other))
    if not changes:
        return
    lines = differences.in_words(changes, *names)
    raise errors.StateMismatchError(
        errors.message(message, where="\n".join(lines), way_out=way_out),
        [x.path for x in changes if x.new is differences.ABSENT],
        [x.path for x in changes if x.old is differences.ABSENT],
        [misfit for x in changes if (misfit := _misfit(x)) is not None],
    )


def _misfit(difference: differences.Difference) -> Misfit | None:
    """Returns the difference between the values of two leaves, if it is one."""
    path, old, new = difference
    if not (isinstance(old, _LeafKinds) and isinstance(new, _LeafKinds)):
        return None
    shapes = [[getattr(x, "shape", None) for x in leaf.kinds] for leaf in (old, new)]
    kind = "value" if old.treedef != new.treedef else "dtype"
    return Misfit(path, kind if shapes[0] == shapes[1] else "shape", str(old), str(new))


def _facts(layer: Any) -> dict[Path, Any]:
    """Returns the facts that equal layers share, by path."""
    graphdef, leaves = flattening.flatten_graph(layer)
    facts = differences.facts(graphdef, identity=False)
    for path, leaf in zip(graphdef.paths(), leaves, strict=True):
        values, treedef = jax.tree.flatten(flattening.raw_of(leaf))
        facts[path] = _LeafKinds(
            facts.get(path, LEAF), treedef, tuple(map(_kind, values))
        )
    # Layers of a Stack are read-only when they are looked at.
    return {path: x for path, x in facts.items() if path[-1:] != _MUTABLE}


_MUTABLE = (differences.MetadataKey("mutable"),)


def _kind(x: Any) -> Any:
    """Returns the kind of an array or number; for anything else its type, in words."""
    if type(x) in descriptions.SCALARS:
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


def check_values(message: str, layer: Any, way_out: str) -> None:
    """Raises unless the values of a layer are the same as parts of arrays.

    Args:
        message: The first line of the error.
        layer: The layer.
        way_out: The last lines.

    Raises:
        StateMismatchError: If there are values that no JAX array can hold.
    """
    wrong = [
        Misfit(path, "value", "an array", str(kind))
        for path, leaf in _facts(layer).items()
        for kind in (leaf.kinds if isinstance(leaf, _LeafKinds) else ())
        if not _is_known_to_jax(kind)
    ]
    if wrong:
        lines = "\n".join([f"{paths.to_string(x.path)}: {x.given}" for x in wrong])
        text = errors.message(message, where=lines, way_out=way_out)
        raise errors.StateMismatchError(text, misfits=wrong)


def _is_known_to_jax(kind: Any) -> bool:
    """Whether a JAX array can have the same dtype: 64 bits may be switched off."""
    if not isinstance(kind, _Kind) or kind.dtype == "int":
        return False
    if kind.dtype.startswith("key<"):
        return True
    dtype = np.dtype(kind.dtype)
    is_number = dtype.kind == "b" or jnp.issubdtype(dtype, jnp.number)
    return is_number and jax.dtypes.canonicalize_dtype(dtype) == dtype
