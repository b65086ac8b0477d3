"""How axes, shardings and filters are assigned to the leaves of objects."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

from graftree.core import filters


class PrefixMapping(abc.ABC):
    """A prefix that assigns different values to different leaves of one object.

    Example:
        >>> isinstance(nnx.DiffState(0, nnx.Param), nnx.extract.PrefixMapping)
        True
    """

    @abc.abstractmethod
    def map_prefix(self, path: Any, variable: Any) -> Any:
        """The value for the leaf at ``path`` inside the object."""


@dataclasses.dataclass(frozen=True)
class DiffState(PrefixMapping):
    """Selects what is differentiated in one argument.

    Args:
        argnum: The position of the argument.
        filter: Which leaves of the objects there are differentiated.

    Example:
        >>> bias = nnx.DiffState(0, nnx.PathContains("bias"))
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> loss = lambda model: jnp.sum(model(jnp.ones((1, 2))))
        >>> list(nnx.grad(loss, argnums=bias)(model))
        ['bias']
    """

    argnum: int
    filter: Any

    def map_prefix(self, path: Any, variable: Any) -> bool:
        """Whether the leaf is differentiated."""
        return filters.to_predicate(self.filter)(path, variable)
