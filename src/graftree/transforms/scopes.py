"""Where in a program an operation is: the module that it is in, and the pass.

For tools that read what JAX records. The names of modules are the scopes in which their
methods are traced (`core/objects/running.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from graftree import _jax

# What JAX calls the forward pass that is done again.
_AGAIN = "rematted_computation"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where in a program something is: names of modules, and of transforms."""

    names: tuple[str, ...] = ()
    transforms: frozenset[str] = frozenset()

    def of(self, equation: Any) -> Place:
        """The place of an equation, and of the programs in it."""
        names, transforms = self.names, {*self.transforms}
        scopes = _jax.scopes_of(equation)
        for is_transform, run in itertools.groupby(scopes, lambda scope: scope[1]):
            found = [part for name, _ in run for part in name.split("/")]
            if is_transform:
                transforms |= {*found}
                continue
            transforms |= {_AGAIN} & {*found}
            found = tuple([name for name in found if name != _AGAIN])
            # A transform may begin with the path that is known already.
            names = found if found[: len(names)] == names else names + found
        return Place(names, frozenset(transforms))

    @property
    def direction(self) -> str:
        """In which pass it is."""
        if _AGAIN in self.transforms:
            return "recomputed"
        return "backward" if "transpose" in self.transforms else "forward"

    def path(self, owner: str) -> str:
        """The path of the module, as in ``net.blocks[3].mlp``; empty in none.

        Args:
            owner: What the object is called whose method was traced.
        """
        # JAX names products after the formulas of einsum.
        first, *others = [name for name in self.names if "->" not in name] or [""]
        return ".".join([owner if first == "self" else first, *others])
