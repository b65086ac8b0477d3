"""Programs recorded to be looked at: any function, any arguments, nothing is written.

For tools that read what JAX records. Arguments that are neither arrays nor objects are
constants, whatever they are; of the output, arrays and objects count. A `NameStack`
says where in a program an operation is: the names of modules are the scopes in which
their methods are traced (`core/objects/running.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax

from graftree import _jax, config
from graftree.core.graph import nodes
from graftree.core.objects import methods
from graftree.core.objects.pytrees import Pytree
from graftree.transforms.crossing import decorators, inside
from graftree.transforms.crossing.outside import Call
from graftree.transforms.crossing.rows import Keywords, Row


def opened(
    f: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """A function and its arguments: objects are passed, not closed over.

    A method is one whose calls are known, so that what it computes goes by its name.
    """
    while True:
        if isinstance(f, functools.partial):
            f, args, kwargs = f.func, (*f.args, *args), f.keywords | kwargs
        elif inspect.ismethod(f) and isinstance(f.__self__, Pytree):
            f, args = methods.known(f.__func__), (f.__self__, *args)
        elif isinstance(f, Pytree):
            f, args = type(f).__call__, (f, *args)
        else:
            return f, args, kwargs


def crossing(
    name: str, f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Call, Callable[..., Any]]:
    """The call of a function, and what JAX traces of it; both are for one tool."""

    @decorators.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _map(
            lambda x: x.value if isinstance(x, _Kept) else x, args, kwargs
        )
        return _only_data(f(*args, **kwargs))

    row = Row.uniform(
        name,
        config.GRAPH_UPDATES,
        keywords=(Keywords.STAY, Keywords.STAY),
        returns_captured=True,
    )
    args, kwargs = _map(lambda x: x if _is_data(x) else _Kept(x), args, kwargs)
    return Call(run, row, args, kwargs), inside.interior(run, row)


class _Kept:
    """An argument that JAX doesn't see."""

    def __init__(self, value: Any) -> None:
        self.value = value


jax.tree_util.register_static(_Kept)


def _map(change: Callable[[Any], Any], *trees: Any) -> Any:
    return jax.tree.map(
        change, trees, is_leaf=lambda x: nodes.is_graph_node(x) or isinstance(x, _Kept)
    )


def _is_data(x: Any) -> bool:
    is_abstract = isinstance(x, jax.ShapeDtypeStruct)
    return nodes.is_graph_node(x) or is_abstract or _jax.is_data_type(type(x))


def _only_data(out: Any) -> list[Any]:
    """The arrays and objects in an output."""
    return [x for x in jax.tree.leaves(out, is_leaf=nodes.is_graph_node) if _is_data(x)]


# What JAX calls the forward pass that is done again.
_AGAIN = "rematted_computation"
# Names that JAX gives; products go by the formulas of einsum.
_OF_JAX = re.compile(r"checkpoint|p?jit(\(.*\))?|closed_call|.*->.*")


@dataclasses.dataclass(frozen=True)
class NameStack:
    """Where in a program something is: names of modules, and of transforms."""

    names: tuple[str, ...] = ()
    transforms: frozenset[str] = frozenset()

    def of(self, equation: Any) -> NameStack:
        """The place of an equation, and of the programs in it."""
        return self.within(_jax.scopes_of(equation))

    def within(self, scopes: Iterable[tuple[str, bool]]) -> NameStack:
        """The place within more names, each with whether it is that of a transform."""
        names, transforms = self.names, {*self.transforms}
        for is_transform, run in itertools.groupby(scopes, lambda scope: scope[1]):
            found = [part for name, _ in run for part in name.split("/")]
            if is_transform:
                transforms |= {*found}
                continue
            transforms |= {_AGAIN} & {*found}
            found = tuple([name for name in found if name != _AGAIN])
            # A transform may begin with the path that is known already.
            names = found if found[: len(names)] == names else names + found
        return NameStack(names, frozenset(transforms))

    @property
    def direction(self) -> str:
        """In which pass it is."""
        if _AGAIN in self.transforms:
            return "recomputed"
        return "backward" if self.is_backward else "forward"

    @property
    def is_backward(self) -> bool:
        """Whether it is of a backward pass, or done again for one."""
        return "transpose" in self.transforms

    def path(self, owner: str) -> str:
        """The path of the module, as in ``net.blocks[3].mlp``; empty in none.

        Args:
            owner: What the object is called whose method was traced.
        """
        names = [name for name in self.names if not _OF_JAX.fullmatch(name)]
        first, *others = names or [""]
        return ".".join([owner if first == "self" else first, *others])
