"""The aliases of ``flax.typing`` that `graftree.annotations` does not have.

And two types of ``flax.nnx`` that programs need for annotations only. They say what
annotations mean; nothing checks them. The few classes among them are those that
programs make or compare.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import (
    Any,
    Generic,
    NamedTuple,
    Protocol,
    Self,
    TypeAlias,
    TypeGuard,
    TypeVar,
)

import jax
import numpy as np

from graftree.annotations import Collection, Key, ShapeDtype
from graftree.core.text import representations
from graftree.interop.flax_side import frozen_dicts

T = TypeVar("T")

# Axes.
Axis: TypeAlias = int | None
AxisName: TypeAlias = str | tuple[str, ...] | None
ScanAxis: TypeAlias = int

# Values.
ArrayPytree: TypeAlias = Any
Leaf: TypeAlias = Any
Index: TypeAlias = int
Path: TypeAlias = str
PRNGFoldable: TypeAlias = int | str
RNGSequences: TypeAlias = dict[str, jax.Array]

# Collections of variables.
FrozenVariableDict: TypeAlias = frozen_dicts.FrozenDict[str, Collection]
MutableCollection: TypeAlias = dict[str, Any]
MutableVariableDict: TypeAlias = dict[str, MutableCollection]

# Sharding.
LogicalPartitionSpec: TypeAlias = Any
LogicalPartitionSpecPytree: TypeAlias = Any
PartitionSpecPytree: TypeAlias = Any


class Missing:
    """The class of `MISSING`.

    Example:
        >>> from graftree.interop.flax_side import type_aliases
        >>> isinstance(type_aliases.MISSING, type_aliases.Missing)
        True
    """


MISSING = Missing()
"""The default of an argument for which None means something."""


@dataclasses.dataclass(frozen=True)
class In(Generic[T]):
    """An axis of inputs only.

    Example:
        >>> from graftree.interop.flax_side import type_aliases
        >>> type_aliases.In(0)
        In(axis=0)
    """

    axis: T


@dataclasses.dataclass(frozen=True)
class Out(Generic[T]):
    """An axis of outputs only.

    Example:
        >>> from graftree.interop.flax_side import type_aliases
        >>> type_aliases.Out(0)
        Out(axis=0)
    """

    axis: T


InOutAxis: TypeAlias = Axis | In[Axis] | Out[Axis]
InOutScanAxis: TypeAlias = ScanAxis | In[ScanAxis] | Out[ScanAxis]


@dataclasses.dataclass(frozen=True)
class SizeBytes:
    """A number of elements, and of the bytes that they take.

    Attributes:
        size: The number of elements.
        bytes: The number of bytes.

    Example:
        >>> from graftree.interop.flax_side import type_aliases
        >>> type_aliases.SizeBytes.from_any({"w": jnp.ones((1000, 3))})
        3,000 (12.0 KB)
    """

    size: int
    bytes: int

    @classmethod
    def from_array(cls, x: Any) -> Self:
        """The size of one array."""
        size = int(np.prod(x.shape))
        return cls(size, size * np.dtype(x.dtype).itemsize)

    @classmethod
    def from_any(cls, x: Any) -> Self:
        """The size of all arrays in a pytree."""
        total = cls(0, 0)
        for leaf in jax.tree.leaves(x):
            if has_shape_dtype(leaf):
                total += cls.from_array(leaf)
        return total

    def __add__(self, other: SizeBytes) -> Self:
        return type(self)(self.size + other.size, self.bytes + other.bytes)

    def __bool__(self) -> bool:
        return bool(self.size)

    def __repr__(self) -> str:
        return f"{self.size:,} ({representations.format_bytes(self.bytes)})"


class AttributeStatus(NamedTuple):
    """Whether an attribute is data, and whether the program said so.

    Example:
        >>> nnx.pytreelib.AttributeStatus(is_data=True, explicit=False)
        AttributeStatus(is_data=True, explicit=False)
    """

    is_data: bool
    explicit: bool


class ModuleDefApply(Protocol):
    """What ``graphdef.apply`` is: a function of states that gives a proxy.

    Example:
        >>> graphdef, state = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> apply: nnx.helpers.ModuleDefApply = graphdef.apply
    """

    def __call__(self, state: Any, *states: Any) -> Any: ...


class PytreeDeque(collections.deque[T]):
    """A deque that is a pytree.

    Example:
        >>> from graftree.interop.flax_side import type_aliases
        >>> jax.tree.map(lambda x: 2 * x, type_aliases.PytreeDeque([1, 2]))
        PytreeDeque([2, 4])
    """


jax.tree_util.register_pytree_with_keys(
    PytreeDeque,
    lambda xs: ([(jax.tree_util.SequenceKey(i), x) for i, x in enumerate(xs)], ()),
    lambda _, values: PytreeDeque(values),
    lambda xs: (tuple(xs), ()),
)


def has_shape_dtype(x: Any) -> TypeGuard[ShapeDtype]:
    """Whether a value has a shape and a dtype.

    Example:
        >>> from graftree.interop.flax_side import type_aliases
        >>> type_aliases.has_shape_dtype(jnp.ones(2)), type_aliases.has_shape_dtype(3)
        (True, False)
    """
    return hasattr(x, "shape") and hasattr(x, "dtype")


def is_key_like(x: Any) -> TypeGuard[Key]:
    """Whether a value can be a key of a path.

    Example:
        >>> from graftree.interop.flax_side import type_aliases
        >>> type_aliases.is_key_like("a"), type_aliases.is_key_like(None)
        (True, True)
    """
    return hasattr(x, "__hash__") and hasattr(x, "__lt__")
