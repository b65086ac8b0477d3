"""Policies of `remat`: which values are kept, by their names and modules.

    Policy     parts in order, of which the first that knows a value decides
    Part       a selection, and where its values are kept
    watched    a function that is checked against a policy when it has been traced

JAX asks a policy for each operation, but tells it neither the module nor the line. So
while a function is traced for a policy, what the modules that it asks for return gets
a name (`names.Output`), and of names JAX does tell. What is traced meanwhile is kept
apart from JAX's other traces.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import jax
import jax.core
from jax import ad_checkpoint

from graftree import _jax, errors
from graftree.annotations import Path
from graftree.core import patterns
from graftree.core.objects import methods, running
from graftree.core.objects.running import Frame
from graftree.transforms import names
from graftree.transforms.crossing import guises, jaxprs
from graftree.transforms.names import Output, Program


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
            elif names.is_naming(primitive.name):
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
        traced = checkpoint(guises.named_after(inner, named))
        program, shapes = jax.make_jaxpr(traced, return_shape=True)(*groups)
        jaxpr, captured = jaxprs.opened(program)
        found = Program.read(jaxprs.needed_in(jaxpr))
        _check_found(policy, found, namer.seen, _title(function))
        out = jax.core.eval_jaxpr(jaxpr, captured, *jax.tree.leaves(groups))
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return run


def _title(function: Any) -> str:
    name = getattr(function, "__qualname__", guises.name_of(function))
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
        return names.with_name(out, output)


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
