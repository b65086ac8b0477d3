"""Types and rules for annotations: ``flax.typing`` and ``flax.core.spmd``.

The aliases that `graftree.annotations` does not have, and two types of ``flax.nnx``
that programs need for annotations only; nothing checks them. The few classes among them
are those that programs make or compare.

The rules from logical axis names to mesh axes in force are those of
``nnx.logical_axis_rules``; only the forms in which Flax takes and returns annotations
are added here.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple, Protocol, Self, TypeAlias, TypeGuard, TypeVar

import jax
import numpy as np
from jax.sharding import PartitionSpec

from graftree.annotations import Collection, Key
from graftree.core.text import representations
from graftree.core.variables import sharding as shardings
from graftree.interop.flax_side import frozen_dicts

T = TypeVar("T")

Axis: TypeAlias = int | None
Index: TypeAlias = int
Leaf: TypeAlias = Any
FrozenVariableDict: TypeAlias = frozen_dicts.FrozenDict[str, Collection]


class Missing:
    """Class of `MISSING`.

    Example:
        >>> isinstance(MISSING, Missing)
        True
    """


MISSING = Missing()
"""The default of an argument for which None means something."""


@dataclasses.dataclass(frozen=True)
class SizeBytes:
    """A number of elements, and of the bytes that they take.

    Attributes:
        size: The number of elements.
        bytes: The number of bytes.

    Example:
        >>> SizeBytes.from_any({"w": jnp.ones((1000, 3))})
        3,000 (12.0 KB)
    """

    size: int
    bytes: int

    @classmethod
    def from_array(cls, x: Any) -> Self:
        """Returns the size of one array."""
        size = int(np.prod(x.shape))
        return cls(size, size * np.dtype(x.dtype).itemsize)

    @classmethod
    def from_any(cls, x: Any) -> Self:
        """Returns the size of all arrays in a pytree."""
        total = cls(0, 0)
        for leaf in jax.tree.leaves(x):
            if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
                total += cls.from_array(leaf)
        return total

    def __add__(self, other: SizeBytes) -> Self:
        return type(self)(self.size + other.size, self.bytes + other.bytes)

    def __bool__(self) -> bool:
        return bool(self.size)

    def __repr__(self) -> str:
        return f"{self.size:,} ({representations.format_bytes(self.bytes)})"


class AttributeStatus(NamedTuple):
    """Whether an attribute is data, and whether the program declared it so.

    Example:
        >>> nnx.pytreelib.AttributeStatus(is_data=True, explicit=False)
        AttributeStatus(is_data=True, explicit=False)
    """

    is_data: bool
    explicit: bool


class ModuleDefApply(Protocol):
    """Type of ``graphdef.apply``: a function of states that gives a proxy.

    Example:
        >>> graphdef, state = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> apply: nnx.helpers.ModuleDefApply = graphdef.apply
    """

    def __call__(self, state: Any, *states: Any) -> Any: ...


class PytreeDeque(collections.deque[T]):
    """A deque that is a pytree.

    Example:
        >>> jax.tree.map(lambda x: 2 * x, PytreeDeque([1, 2]))
        PytreeDeque([2, 4])
    """


jax.tree_util.register_pytree_with_keys(
    PytreeDeque,
    lambda xs: ([(jax.tree_util.SequenceKey(i), x) for i, x in enumerate(xs)], ()),
    lambda _, values: PytreeDeque(values),
    lambda xs: (tuple(xs), ()),
)


def is_key_like(x: Any) -> TypeGuard[Key]:
    """Whether a value can be a key of a path.

    Example:
        >>> is_key_like("a"), is_key_like(None)
        (True, True)
    """
    return hasattr(x, "__hash__") and hasattr(x, "__lt__")


def from_sharding_rules(
    sharding: Any, sharding_rules: shardings.AxisRules
) -> tuple[Any, ...]:
    """Renames the axes of an annotation by rules.

    Args:
        sharding: An entry per dimension: a name, a tuple of names, or None.
        sharding_rules: Pairs of a logical name and its meaning.

    Returns:
        A tuple with an entry per dimension; names without a rule stay as they are.

    Example:
        >>> from_sharding_rules(("batch", None), [("batch", "data")])
        ('data', None)
    """
    return tuple(shardings.from_sharding_rules(sharding, sharding_rules))


def get_pspec(
    sharding: Any, sharding_rules: shardings.AxisRules | None = None
) -> PartitionSpec | None:
    """Returns the PartitionSpec of an annotation under some rules and those in force.

    Args:
        sharding: A tuple, PartitionSpec or NamedSharding, or None.
        sharding_rules: Further rules, or None.

    Returns:
        The spec; None if there is no annotation.

    Raises:
        ValueError: If the rules contradict those in force.

    Example:
        >>> with nnx.logical_axis_rules([("batch", "data")]):
        ...     get_pspec(("batch", None))
        P('data', None)
    """
    if sharding is None:
        return None
    return shardings.get_pspec(sharding, sharding_rules)
