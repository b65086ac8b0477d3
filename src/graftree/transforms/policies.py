"""What `remat` keeps: policies by names of values, and by paths of modules.

    name        names a value, as the user says
    given_name  the name that an equation of a program gives
    Output      the name of what a module returned, made while a policy asks for it
    Program     the names in a program

A name is an equation in the program that JAX traces, and nothing in what is compiled.
JAX tells a policy no path. So what a module returns is named by it while a policy asks
for that module, and what is traced meanwhile is kept apart from JAX's other traces.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import jax
import jax.core
import numpy as np
from jax import ad_checkpoint

from graftree import _jax, errors
from graftree.annotations import Path
from graftree.core import paths, patterns
from graftree.core.objects import methods, running
from graftree.core.objects.attributes import DataObject
from graftree.core.objects.running import Frame
from graftree.core.variables.variables import Variable
from graftree.transforms.crossing import debug_info, jaxprs

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
        self = cls(f"{paths.dotted(path, type(module).__name__)}()")
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


@dataclasses.dataclass(frozen=True)
class Part:
    """Values that are kept.

    Attributes:
        call: The function that was called, for messages.
        where: A pattern of names and paths, or what else selects modules; or a policy
            as JAX takes it.
        is_offloaded: Whether they are kept in the memory of the host.
    """

    call: str
    where: Any
    is_offloaded: bool = False

    @property
    def is_of_jax(self) -> bool:
        """Whether JAX's policy decides."""
        return not self.call

    def has_name(self, name: str) -> bool:
        """Whether it selects values of a name."""
        where = self.where
        if isinstance(where, patterns.Pattern):
            return name == where.text or where((name,))
        return where is ...

    def has_output(self, path: Path, module: Any) -> bool:
        """Whether it selects what a module, or its method at the path, returns."""
        if self.is_of_jax:
            return False
        return patterns.to_predicate(self.where)(path, module)


@dataclasses.dataclass(frozen=True, repr=False)
class Policy:
    """Which values `nnx.remat` keeps; the first part that knows a value decides."""

    parts: tuple[Part, ...]

    def __or__(self, other: Any) -> Policy:
        return Policy((*self.parts, *_parts(other)))

    def __ror__(self, other: Any) -> Policy:
        return Policy((*_parts(other), *self.parts))

    def __repr__(self) -> str:
        texts = [
            repr(part.where)
            if part.is_of_jax
            else f"{part.call}({patterns.describe(part.where)})"
            for part in self.parts
        ]
        return " | ".join(texts)

    def __call__(self, *args: Any, **params: Any) -> NoReturn:
        """Raises: JAX alone can't look for modules, nor find out what is misspelt."""
        raise TypeError(
            errors.message(
                f"jax.checkpoint can't use the policy {self!r}.",
                way_out="Use nnx.remat, or jax.checkpoint_policies.",
            )
        )

    def asking(self, path: Path, module: Any) -> frozenset[int]:
        """The numbers of the parts that ask for what a module returns."""
        numbered = enumerate(self.parts)
        return frozenset([i for i, part in numbered if part.has_output(path, module)])

    def matches(self, number: int, name: str) -> bool:
        """Whether one of its parts asks for a name in a program."""
        if isinstance(name, Output):
            return name.policy == self and number in name.asking
        return self.parts[number].has_name(name)


def selecting(call: str, where: Sequence[Any], is_offloaded: bool = False) -> Policy:
    """A policy that keeps what is selected.

    Raises:
        TypeError: If something selects nothing, or can't be part of a key.
        ValueError: If there is nothing, or a pattern is malformed.
    """
    given = [*_flat(where)]
    if not given:
        raise ValueError(f"{call} expects a name or a pattern of paths, got none.")
    for x in given:
        if any(x is policy for policy in vars(jax.checkpoint_policies).values()):
            raise TypeError(f"{call} expects names; add a policy of JAX with `|`.")
        patterns.to_predicate(x)
        try:
            hash(x)
        except TypeError:
            raise TypeError(f"{call} expects what has a hash, got {x!r}.") from None
    read = [patterns.Pattern(x) if isinstance(x, str) else x for x in given]
    return Policy(tuple([Part(call, x, is_offloaded) for x in read]))


def _flat(where: Any) -> Iterator[Any]:
    for x in where:
        if isinstance(x, (list, tuple)):
            yield from _flat(x)
        else:
            yield x


def _parts(policy: Any) -> tuple[Part, ...]:
    if isinstance(policy, Policy):
        return policy.parts
    if not callable(policy):
        raise TypeError(
            "A policy is combined with another one, also of "
            f"jax.checkpoint_policies, got {type(policy).__name__}."
        )
    return (Part("", policy),)


@dataclasses.dataclass(frozen=True)
class _Decision:
    """A policy as JAX asks it: of an operation, with the types of its inputs."""

    policy: Policy

    def __call__(self, primitive: Any, *types: Any, **params: Any) -> Any:
        for number, part in enumerate(self.policy.parts):
            if part.is_of_jax:
                answer = part.where(primitive, *types, **params)
                if answer is not False and answer is not ad_checkpoint.Recompute:
                    return answer
            elif is_naming(primitive.name):
                if self.policy.matches(number, params["name"]):
                    return _OFFLOAD if part.is_offloaded else True
        return False


def for_jax(policy: Any) -> Any:
    """The policy that JAX gets for one that a user gave."""
    return _Decision(policy) if isinstance(policy, Policy) else policy


def watched(
    policy: Any,
    checkpoint: Callable[..., Any],
    inner: Callable[..., Any],
    function: Callable[..., Any],
) -> Callable[..., Any]:
    """``checkpoint(inner)``, where what a policy asks for gets names, and is missed.

    Args:
        policy: That of the user; for one of JAX, there is nothing to do.
        checkpoint: A transform of JAX, which traces ``inner`` when it is called.
        inner: It takes groups of leaves.
        function: That of the user.
    """
    if not isinstance(policy, Policy):
        return checkpoint(inner)

    def run(*groups: Any) -> Any:
        _check_memory(policy)
        namer = _Namer(policy, running.stack.top)

        def named(*groups: Any) -> Any:
            with methods.observed(namer):
                return inner(*groups)

        # Traced here, to read the names; in the trace around it is the same operation.
        traced = checkpoint(debug_info.named_after(inner, named))
        program, shapes = jax.make_jaxpr(traced, return_shape=True)(*groups)
        jaxpr, captured = jaxprs.opened(program)
        found = Program.read(jaxprs.needed_in(jaxpr))
        _check_found(policy, found, namer.seen, _title(function))
        out = jax.core.eval_jaxpr(jaxpr, captured, *jax.tree.leaves(groups))
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return run


def _title(function: Any) -> str:
    name = getattr(function, "__qualname__", debug_info.name_of(function))
    return name.rpartition("<locals>.")[2]


class _Namer:
    """An observer of calls, which names what a policy asks for.

    Attributes:
        seen: The paths of what was called.
    """

    def __init__(self, policy: Policy, limit: Frame | None) -> None:
        self._policy, self._limit = policy, limit
        self.seen: dict[Path, None] = {}

    def __call__(self, frame: Frame, call: Callable[[], Any]) -> Any:
        out = call()
        path, selected = running.path_inside(frame, self._limit), frame.module
        if frame.method != "__call__":
            path = (*path, frame.method)
            selected = inspect.getattr_static(type(selected), frame.method, None)
        self.seen[path] = None
        asking = self._policy.asking(path, selected)
        if not asking:
            return out
        output = Output.of(path, frame.module, self._policy, asking)
        return with_name(out, output)


# In the memory of the host: JAX takes all other kinds of memory for the device's.
_OFFLOAD: Any = ad_checkpoint.Offloadable(src="device", dst="pinned_host")


def kinds_of_memory() -> list[str]:
    """The memories of the devices that a program is for, as far as that is known."""
    mesh, chosen = _jax.concrete_mesh(), _jax.config.jax_default_device
    if mesh is not None:
        chosen = mesh.devices.flat[0]
    elif not isinstance(chosen, jax.Device):
        chosen = jax.local_devices(backend=chosen)[0]
    return [memory.kind for memory in chosen.addressable_memories()]


def _check_memory(policy: Policy) -> None:
    """Raises if the host has no memory for what is kept there."""
    offloaded = [part for part in policy.parts if part.is_offloaded]
    kind = _OFFLOAD.dst
    kinds = kinds_of_memory() if offloaded else (kind,)
    if kind not in kinds:
        raise ValueError(
            errors.message(
                f"{offloaded[0].call} needs the memory {kind!r}, which the devices of "
                "this platform don't have.",
                where=f"they have: {', '.join(kinds)}",
                way_out="Keep these values with nnx.memory.save.",
            )
        )


def _check_found(
    policy: Policy, program: Program, seen: Iterable[Path], function: str
) -> None:
    """Raises if a part of a policy is for nothing; warns if that is not certain."""
    given = [(str(x),) for x in program.names if not isinstance(x, Output)]
    for number, part in enumerate(policy.parts):
        if part.is_of_jax or any(policy.matches(number, x) for x in program.names):
            continue
        error = patterns.no_match_error(
            f"{part.call}: where",
            part.where,
            [*given, *seen],
            what="name and no module",
            owner=function,
        )
        if not program.hides_some:
            raise error
        warnings.warn(f"{error}\nIt may be in a custom_vjp.", stacklevel=2)
