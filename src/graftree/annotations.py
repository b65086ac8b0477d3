"""Type aliases shared by the whole package.

Every alias is a plain typing construct, and the file imports only the standard library,
JAX and NumPy, so that any module may import it. ``Key`` and ``Path`` are the words for
positions in an object tree, ``Filter`` and ``Predicate`` those for choosing leaves; the
rest describes arrays, and the arguments of layers.
"""

import importlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import EllipsisType, UnionType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import jax
import numpy as np

if TYPE_CHECKING:
    from jaxtyping import (
        Bool as Bool,
        Float as Float,
        Float32 as Float32,
        Inexact as Inexact,
        Int as Int,
        Integer as Integer,
        Num as Num,
        Shaped as Shaped,
    )
else:

    class _Shaped:
        """A dtype of jaxtyping, which is imported when an annotation is evaluated.

        Not before: an import of jaxtyping that comes before pytest's makes it warn.
        """

        def __init__(self, name: str) -> None:
            self._name = name

        def __getitem__(self, shape: Any) -> Any:
            return getattr(importlib.import_module("jaxtyping"), self._name)[shape]

    Bool, Float, Float32, Inexact, Int, Integer, Num, Shaped = map(
        _Shaped, "Bool Float Float32 Inexact Int Integer Num Shaped".split()
    )

Array: TypeAlias = jax.Array
ArrayLike: TypeAlias = jax.typing.ArrayLike
"""Values that JAX functions take as arrays: arrays, NumPy arrays, Python scalars."""

# Positions in an object tree.
Key: TypeAlias = Hashable
"""One step of a path: an attribute name, a dict key or an index."""
Path: TypeAlias = tuple[Key, ...]
"""The steps from a root to one of its leaves; ``()`` is the root itself."""

# Choosing leaves.
Predicate: TypeAlias = Callable[[Path, Any], bool]
"""Says whether the leaf at a path is chosen."""
FilterLiteral: TypeAlias = (
    type | UnionType | str | Predicate | bool | EllipsisType | None
)
"""A filter that is not a sequence of filters."""
Filter: TypeAlias = FilterLiteral | list["Filter"] | tuple["Filter", ...]
"""Anything that `graftree.core.filters.to_predicate` understands."""

# Arrays and their descriptions.
Dtype: TypeAlias = jax.typing.DTypeLike
Shape: TypeAlias = Sequence[int]
PRNGKey: TypeAlias = jax.Array
ShapeDtype: TypeAlias = jax.ShapeDtypeStruct | jax.Array | np.ndarray

# Arguments of layers.
Axes: TypeAlias = int | Sequence[int]
"""One axis or several."""
Initializer: TypeAlias = Callable[..., Any]
"""A function ``(key, shape, dtype) -> array``."""
PrecisionLike: TypeAlias = jax.lax.PrecisionLike
PaddingLike: TypeAlias = str | int | Sequence[int | tuple[int, int]]
"""Padding as users may write it: a name, one width, or widths per spatial axis."""
LaxPadding: TypeAlias = str | Sequence[tuple[int, int]]
"""Padding as ``jax.lax`` takes it."""
DotGeneralT: TypeAlias = Callable[..., jax.Array]
ConvGeneralDilatedT: TypeAlias = Callable[..., jax.Array]
EinsumT: TypeAlias = Callable[..., jax.Array]

# Sharding.
Sharding: TypeAlias = tuple[str | tuple[str, ...] | None, ...]
"""One entry per array axis: the mesh axes it is split over."""
LogicalNames: TypeAlias = tuple[str | None, ...]
LogicalRules: TypeAlias = Sequence[tuple[str, str | tuple[str, ...] | None]]
"""Pairs of a logical axis name and the mesh axes it stands for."""

# Collections of variables, by name.
Collection: TypeAlias = Mapping[str, Any]
VariableDict: TypeAlias = Mapping[str, Collection]


class PromoteDtypeFn(Protocol):
    """Brings several arrays to one dtype before a layer computes with them."""

    def __call__(
        self, args: tuple[Any, ...], /, *, dtype: Dtype | None, inexact: bool = ...
    ) -> tuple[Any, ...]:
        """Returns ``args`` converted to ``dtype``, or to their common dtype.

        Args:
            args: Arrays, or ``None`` for absent ones, which stay ``None``.
            dtype: The dtype to convert to, or ``None`` for the one that JAX's promotion
                of all ``args`` gives.
            inexact: Whether integers become floats.

        Returns:
            A tuple with one entry per entry of ``args``.
        """
        ...
