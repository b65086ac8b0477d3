"""A Module as two functions: `init` makes its state, `apply` calls it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from graftree.core.graph import functional as graph_functional
from graftree.core.graph.graphdefs import GraphDef
from graftree.core.modules.modules import Module
from graftree.core.rng.streams import Rngs
from graftree.core.states.states import State

M = TypeVar("M", bound=Module)


@dataclasses.dataclass
class Functional(Generic[M]):
    """The two functions of a Module that is yet to be made; see `functional`.

    Attributes:
        module_type: The class of the Module.
        graphdef: Its structure, after `init`.
        args: Arguments of its constructor.
        kwargs: Keyword arguments of its constructor.
    """

    module_type: type[M]
    graphdef: GraphDef[M] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def init(self, *, rngs: Rngs | None = None) -> State:
        """Makes the Module, and remembers its structure.

        Args:
            rngs: Given to the constructor, unless None.

        Returns:
            Its state.
        """
        kwargs = self.kwargs if rngs is None else {**self.kwargs, "rngs": rngs}
        module = self.module_type(*self.args, **kwargs)
        self.graphdef, state = graph_functional.split(module)
        return state

    def apply(self, *states: Any) -> Any:
        """Gives a function that calls the Module with these states.

        Returns:
            A proxy: called, or through an attribute, as ``apply(state).encode(x)``, it
            returns the output and the new ``(graphdef, state)``.

        Raises:
            ValueError: Before `init`.
        """
        if self.graphdef is None:
            raise ValueError(
                f"{self.module_type.__name__} has no structure yet: call `init` first."
            )
        return self.graphdef.apply(*states)


def functional(cls: type[M]) -> Callable[..., Functional[M]]:
    """Gives a constructor whose result makes the Module when `init` is called.

    Args:
        cls: The class of the Module.

    Example:
        >>> linear = nnx.bridge.functional(nnx.Linear)(3, 4)
        >>> state = linear.init(rngs=nnx.Rngs(0))
        >>> y, (graphdef, state) = linear.apply(state)(jnp.ones((1, 3)))
        >>> y.shape
        (1, 4)
    """

    def make(*args: Any, **kwargs: Any) -> Functional[M]:
        return Functional(cls, None, args, kwargs)

    return make
