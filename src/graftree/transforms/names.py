"""Names of values, by which `remat` is told what to keep.

    name        names a value, as the user says
    given_name  the name that an equation of a program gives
    Output      the name of what a module returned, made while a policy asks for it
    Program     the names in a program

A name is an equation in the program that JAX traces, and nothing in what is compiled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, TypeVar

import jax
import numpy as np
from jax import ad_checkpoint

from graftree import _jax, errors
from graftree.annotations import Path
from graftree.core import patterns
from graftree.core.objects.attributes import DataObject
from graftree.core.variables.variables import Variable
from graftree.transforms.crossing import jaxprs

T = TypeVar("T")


def name(x: T, name: str) -> T:
    """Names a value, so that a policy of `nnx.remat` can keep it by its name.

    It costs nothing: the compiled program is the same. The name holds for what is
    returned, so what should use the kept value must be computed from that. It is one
    with ``jax.ad_checkpoint.checkpoint_name``.

    Args:
        x: An array, or a pytree of arrays; what else is in it has no name. Not an
            object: of a Variable pass the value, ``variable[...]``.
        name: The name, the same for as many values as you like.

    Returns:
        ``x``, with the same values, dtypes and shardings.

    Raises:
        TypeError: If ``x`` contains a Module, a Variable or an array ref, or the name
            is no string.
        ValueError: If the name is empty.

    Example:
        >>> def f(x):
        ...     hidden = nnx.name(jnp.sin(x), "hidden")
        ...     return jnp.cos(hidden)
        >>> g = nnx.remat(f, policy=nnx.memory.save("hidden"))
        >>> jnp.allclose(jax.grad(g)(1.0), jax.grad(f)(1.0))
        Array(True, dtype=bool)
    """
    if not isinstance(name, str):
        raise TypeError(f"A name of a value is a string, got {type(name).__name__}.")
    if not name:
        raise ValueError("The name of a value is empty.")
    for leaf in jax.tree.leaves(x, is_leaf=_is_object):
        if _is_object(leaf) or _jax.is_ref(leaf):
            raise TypeError(
                errors.message(
                    f"nnx.name expects arrays, got {type(leaf).__name__}.",
                    where=f"name: {name!r}",
                    way_out="Name the value of a Variable, variable[...], or what a "
                    "module returns.",
                )
            )
    return with_name(x, name)


def with_name(x: Any, name: str) -> Any:
    """A pytree whose arrays have a name; objects in it stay what they are."""
    if not _jax.is_tracing():
        return x
    return jax.tree.map(
        lambda leaf: (
            ad_checkpoint.checkpoint_name(leaf, name)
            if isinstance(leaf, (jax.Array, np.ndarray)) and not _jax.is_ref(leaf)
            else leaf
        ),
        x,
        is_leaf=_is_object,
    )


def is_naming(kind: str) -> bool:
    """Whether an operation of a kind gives a value a name."""
    # The other one is that of JAX's option jax_remat3.
    return kind in ("name", "CheckpointName")


def given_name(equation: Any) -> str | None:
    """The name that an equation gives to a value, if it does that."""
    if not is_naming(jaxprs.kind(equation)):
        return None
    return jaxprs.parameters(equation).get("name")


def _is_object(x: Any) -> bool:
    return isinstance(x, (DataObject, Variable))


class Output(str):
    """The name of what a module returned, as in ``blocks[3].attention()``.

    Attributes:
        path: The keys to the module, and the method if that isn't ``__call__``.
        policy: The policy that asks for it.
        asking: The numbers of those parts of the policy that do.
    """

    __slots__ = ("asking", "path", "policy")

    path: Path
    policy: Any
    asking: frozenset[int]

    @classmethod
    def of(cls, path: Path, module: Any, policy: Any, asking: frozenset[int]) -> Output:
        """Makes one."""
        self = cls(f"{patterns.dotted(path, type(module).__name__)}()")
        self.path, self.policy, self.asking = path, policy, asking
        return self


@dataclasses.dataclass(frozen=True)
class Program:
    """The names in a program.

    Attributes:
        names: Of all values that a policy is asked for.
        hides_some: Whether there is a function with a derivative of its own, which JAX
            will trace only when it differentiates.
    """

    names: tuple[str, ...]
    hides_some: bool

    @classmethod
    def read(cls, equations: Iterable[Any]) -> Program:
        """The names that these equations give, also those in loops and calls.

        Names of values that nothing uses don't count.
        """
        names, hides_some, pending = list[str](), False, list(equations)
        while pending:
            equation = pending.pop()
            given = given_name(equation)
            if given is not None:
                names.append(given)
            kind = equation.primitive.name
            hides_some |= kind.startswith("custom_vjp")
            # Of these JAX differentiates another program.
            if not kind.startswith(("custom_jvp", "custom_vjp")):
                parts = jaxprs.programs_in(equation)
                pending += [x for part in parts for x in jaxprs.needed_in(part)]
        return cls(tuple(names), hides_some)
