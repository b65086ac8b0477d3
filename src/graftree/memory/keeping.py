"""Keeps values for the backward pass: by names, and by the paths of modules.

    name            gives a value a name of the user's choice
    save, offload   policies for `nnx.remat`: the values to keep, and where
    Output          the name of an output of a module, while a policy asks for it

A name is an equation in the program that JAX traces; it is gone once that is compiled.
JAX gives a policy no path. So outputs of a module are named after it while a policy
asks for that module, and these traces are kept apart from JAX's other ones.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

import jax
import jax.core
import numpy as np

from graftree import _jax, errors
from graftree.annotations import Path
from graftree.core import paths, patterns
from graftree.core.objects import methods, running
from graftree.core.objects.attributes import DataObject
from graftree.core.text import descriptions
from graftree.core.variables.variables import Variable
from graftree.transforms.derivatives.grad import RematPolicy
from graftree.transforms.lifting import debug_info, jaxprs

T = TypeVar("T")


def name(x: T, name: str) -> T:
    """Names a value, so that a policy of `nnx.remat` can keep it by its name.

    It costs nothing: the compiled program is the same. The name is on the returned
    value, so use that value in whatever should use the kept one. It is the same kind of
    name as that of ``jax.ad_checkpoint.checkpoint_name``.

    Args:
        x: An array, or a pytree of arrays; anything else in it gets no name. Not an
            object: for a Variable, pass the value, ``variable[...]``.
        name: The name; any number of values may have the same one.

    Returns:
        ``x``, with the same values, dtypes and shardings.

    Raises:
        TypeError: If ``x`` contains a Module, a Variable or an array ref, or the name
            is not a string.
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
        raise TypeError(f"The name of a value is a string, got {type(name).__name__}.")
    if not name:
        raise ValueError("The name of a value must not be empty.")
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


def save(*where: Any) -> SavePolicy:
    """Makes a policy for `nnx.remat` and `nnx.Stack` that keeps only these values.

    A path begins at the argument of the function that the module is in. So in
    ``nnx.remat(Block.__call__)`` and in a `Stack`, where all layers are one program, it
    begins at the layer, and in ``nnx.remat(loss_fn)`` at the model. For modules that
    the function closes over, it begins at the object whose method calls the function,
    or else at the module itself.

    Args:
        *where: Names given by `nnx.name`, and modules whose output to keep: patterns of
            paths, as in ``"blocks[*].attention"``, which end in the name of a method
            that is named (`debugging.named`); classes; functions of path and module;
            ``...`` for everything. Patterns select names too.

    Returns:
        The policy. Combine it by ``|`` with others, including those of
        ``jax.checkpoint_policies``: the first that keeps a value decides where.

    Raises:
        TypeError: If something in ``where`` is none of these.
        ValueError: If ``where`` is empty, or a pattern is malformed; and when a
            function is traced with the policy, if something matches no name and no
            module there. It is only a warning if a ``custom_vjp`` may hide it.

    Example:
        >>> class Block(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.up = nnx.Linear(2, 8, rngs=rngs)
        ...         self.down = nnx.Linear(8, 2, rngs=rngs)
        ...     def __call__(self, x):
        ...         return self.down(nnx.name(jnp.sin(self.up(x)), "hidden"))
        >>> policy = nnx.memory.save("hidden", "down")
        >>> stack = nnx.Stack(Block, 24, remat=policy, rngs=nnx.Rngs(0))
        >>> stack(jnp.ones((1, 2))).shape
        (1, 2)
        >>> dots = jax.checkpoint_policies.dots_saveable
        >>> stack = nnx.Stack(Block, 24, remat=policy | dots, rngs=nnx.Rngs(0))
    """
    return _selecting("nnx.memory.save", where)


def offload(*where: Any) -> SavePolicy:
    """Like `save`, but keeps the values in the memory of the host.

    They are copied there in the forward pass, and back when needed. This takes time on
    the bus, but none of the device's memory. Where device and host are one, as on a
    CPU, it saves nothing.

    Args:
        *where: As for `save`.

    Returns:
        The policy; ``save("a") | offload("b", "c")`` keeps one on the device.

    Raises:
        TypeError: As for `save`.
        ValueError: As for `save`; and when a function is traced with the policy, if the
            devices can't use the memory ``pinned_host``.

    Example:
        >>> def f(x):
        ...     return jnp.cos(nnx.name(jnp.sin(x), "hidden"))
        >>> g = nnx.remat(f, policy=nnx.memory.offload("hidden"))
        >>> jnp.allclose(jax.grad(g)(1.0), jax.grad(f)(1.0))
        Array(True, dtype=bool)
    """
    return _selecting("nnx.memory.offload", where, is_offloaded=True)


def with_name(x: Any, name: str) -> Any:
    """Names the arrays of a pytree; objects in it stay as they are."""
    if not _jax.is_tracing():
        return x
    return jax.tree.map(
        lambda leaf: (
            _jax.ad_checkpoint().checkpoint_name(leaf, name)
            if isinstance(leaf, (jax.Array, np.ndarray)) and not _jax.is_ref(leaf)
            else leaf
        ),
        x,
        is_leaf=_is_object,
    )


def is_naming(primitive: str) -> bool:
    """Whether an operation gives a value a name."""
    # The other one belongs to JAX's option jax_remat3.
    return primitive in ("name", "CheckpointName")


def given_name(equation: Any) -> str | None:
    """Reads the name that an equation gives to a value, if it gives one."""
    if not is_naming(jaxprs.kind(equation)):
        return None
    return jaxprs.parameters(equation).get("name")


def _is_object(x: Any) -> bool:
    return isinstance(x, (DataObject, Variable))


class Output(str):
    """Name of an output of a module, as in ``blocks[3].attention()``.

    Attributes:
        path: The keys to the module, and the method if that isn't ``__call__``.
        policy: The policy that asks for it.
        asking: The indices of the selections of the policy that ask for it.
    """

    __slots__ = ("asking", "path", "policy")

    path: Path
    policy: Any
    asking: frozenset[int]

    @classmethod
    def of(cls, path: Path, module: Any, policy: Any, asking: frozenset[int]) -> Output:
        """Names an output of the module at a path."""
        self = cls(f"{paths.dotted(path, type(module).__name__)}()")
        self.path, self.policy, self.asking = path, policy, asking
        return self


@dataclasses.dataclass(frozen=True)
class Selection:
    """Selects values to keep.

    Attributes:
        call: The function that was called, for messages.
        where: A pattern of names and paths, or another selection of modules; or a
            policy in JAX's form.
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
        """Whether it selects the outputs of a module, or of its method at the path."""
        if self.is_of_jax:
            return False
        return patterns.to_predicate(self.where)(path, module)


@dataclasses.dataclass(frozen=True, repr=False)
class SavePolicy(RematPolicy):
    """Says which values `nnx.remat` keeps; the first selection that has one decides."""

    selections: tuple[Selection, ...]

    def __or__(self, other: Any) -> SavePolicy:
        return SavePolicy((*self.selections, *_selections(other)))

    def __ror__(self, other: Any) -> SavePolicy:
        return SavePolicy((*_selections(other), *self.selections))

    def __repr__(self) -> str:
        texts = [
            repr(selection.where)
            if selection.is_of_jax
            else f"{selection.call}({patterns.describe(selection.where)})"
            for selection in self.selections
        ]
        return " | ".join(texts)

    def __call__(self, *args: Any, **params: Any) -> NoReturn:
        """Raises: JAX by itself can't look for modules, nor find misspellings."""
        raise TypeError(
            errors.message(
                f"jax.checkpoint can't use the policy {self!r}.",
                way_out="Use nnx.remat, or jax.checkpoint_policies.",
            )
        )

    def apply(
        self,
        checkpoint: Callable[..., Any],
        inner: Callable[..., Any],
        function: Callable[..., Any],
    ) -> Callable[..., Any]:
        """See `RematPolicy`: wanted values get names, and missing ones raise."""

        def run(*groups: Any) -> Any:
            _check_memory(self.selections)
            namer = _Namer(self, running.stack.top)

            def named(*groups: Any) -> Any:
                with methods.observed(namer):
                    return inner(*groups)

            # Traced here to read the names; the enclosing trace gets the same.
            with_names = debug_info.named_after(inner, named)
            traced = checkpoint(with_names, policy=_Decision(self))
            program, shapes = jax.make_jaxpr(traced, return_shape=True)(*groups)
            jaxpr, captured = jaxprs.opened(program)
            name = descriptions.callable_name(function) or debug_info.name_of(function)
            self._check_matches(jaxprs.needed_in(jaxpr), namer.paths, name)
            out = jax.core.eval_jaxpr(jaxpr, captured, *jax.tree.leaves(groups))
            return jax.tree.unflatten(jax.tree.structure(shapes), out)

        return run

    def _check_matches(
        self, equations: Iterable[Any], paths: Iterable[Path], function: str
    ) -> None:
        """Raises if a selection has no effect; warns if that is not certain."""
        names, hides_some = _names_in(equations)
        of_values = [(str(x),) for x in names if not isinstance(x, Output)]
        for index, selection in enumerate(self.selections):
            if selection.is_of_jax or any(self.matches(index, x) for x in names):
                continue
            error = patterns.no_match_error(
                f"{selection.call}: where",
                selection.where,
                [*of_values, *paths],
                noun="name and no module",
                owner=function,
            )
            if not hides_some:
                raise error
            warnings.warn(f"{error}\nIt may be in a custom_vjp.", stacklevel=2)

    def asking(self, path: Path, module: Any) -> frozenset[int]:
        """Lists the indices of the selections that ask for the outputs of a module."""
        selections = enumerate(self.selections)
        return frozenset([i for i, x in selections if x.has_output(path, module)])

    def matches(self, index: int, name: str) -> bool:
        """Whether one of its selections asks for a name in a program."""
        if isinstance(name, Output):
            return name.policy == self and index in name.asking
        return self.selections[index].has_name(name)


def _names_in(equations: Iterable[Any]) -> tuple[list[str], bool]:
    """Lists the names that equations give, also those in loops and calls.

    Also whether there is a function with a derivative of its own, which JAX will trace
    only when it differentiates. Names of values that nothing uses don't count.
    """
    names, hides_some, pending = list[str](), False, list(equations)
    while pending:
        equation = pending.pop()
        name = given_name(equation)
        if name is not None:
            names.append(name)
        primitive = equation.primitive.name
        hides_some |= primitive.startswith("custom_vjp")
        # For these, JAX differentiates another program.
        if not primitive.startswith(("custom_jvp", "custom_vjp")):
            programs = jaxprs.programs_in(equation)
            pending += [x for program in programs for x in jaxprs.needed_in(program)]
    return names, hides_some


def _selecting(
    call: str, where: Sequence[Any], is_offloaded: bool = False
) -> SavePolicy:
    """Makes a policy that keeps the selected values.

    Raises:
        TypeError: If something selects nothing, or can't be part of a key.
        ValueError: If there is nothing, or a pattern is malformed.
    """
    values = jax.tree.leaves(where, is_leaf=lambda x: not isinstance(x, (list, tuple)))
    if not values:
        raise ValueError(f"{call} expects a name or a pattern of paths, got none.")
    for x in values:
        if any(x is policy for policy in vars(jax.checkpoint_policies).values()):
            raise TypeError(f"{call} expects names; add a policy of JAX with `|`.")
        patterns.to_predicate(x)
        try:
            hash(x)
        except TypeError:
            raise TypeError(f"{call} expects a hashable value, got {x!r}.") from None
    wheres = [patterns.Pattern(x) if isinstance(x, str) else x for x in values]
    return SavePolicy(tuple([Selection(call, x, is_offloaded) for x in wheres]))


def _selections(policy: Any) -> tuple[Selection, ...]:
    if isinstance(policy, SavePolicy):
        return policy.selections
    if not callable(policy):
        raise TypeError(
            "A policy can only be combined with another policy, including those in "
            f"jax.checkpoint_policies, got {type(policy).__name__}."
        )
    return (Selection("", policy),)


@dataclasses.dataclass(frozen=True)
class _Decision:
    """A policy in JAX's form: called with an operation and its input types."""

    policy: SavePolicy

    def __call__(self, primitive: Any, *types: Any, **params: Any) -> Any:
        for index, selection in enumerate(self.policy.selections):
            if selection.is_of_jax:
                answer = selection.where(primitive, *types, **params)
                if answer is not False and answer is not _jax.ad_checkpoint().Recompute:
                    return answer
            elif is_naming(primitive.name):
                if self.policy.matches(index, params["name"]):
                    return _offloaded() if selection.is_offloaded else True
        return False


class _Namer:
    """An observer of calls, which names the outputs that a policy asks for.

    Attributes:
        paths: The paths of the calls.
    """

    def __init__(self, policy: SavePolicy, limit: running.ModuleCall | None) -> None:
        self._policy, self._limit = policy, limit
        self.paths: dict[Path, None] = {}

    def __call__(self, frame: running.ModuleCall, call: Callable[[], Any]) -> Any:
        out = call()
        path, selected = running.path_in_transform(frame, self._limit), frame.module
        if frame.method != "__call__":
            path = (*path, frame.method)
            selected = inspect.getattr_static(type(selected), frame.method, None)
        self.paths[path] = None
        asking = self._policy.asking(path, selected)
        if not asking:
            return out
        output = Output.of(path, frame.module, self._policy, asking)
        return with_name(out, output)


# The memory of the host: JAX takes all other kinds of memory for the device's.
_HOST = "pinned_host"


def _offloaded() -> Any:
    """Makes JAX's answer for a value that is kept in the memory of the host."""
    return _jax.ad_checkpoint().Offloadable(src="device", dst=_HOST)


def kinds_of_memory() -> list[str]:
    """Lists the memories of the devices that a program is for, or seems to be."""
    mesh, chosen = _jax.concrete_mesh(), _jax.config.jax_default_device
    if mesh is not None:
        chosen = mesh.devices.flat[0]
    elif not isinstance(chosen, jax.Device):
        chosen = jax.local_devices(backend=chosen)[0]
    return [memory.kind for memory in chosen.addressable_memories()]


def _check_memory(selections: Iterable[Selection]) -> None:
    """Raises if the host has no memory for the values kept there."""
    offloaded = [x for x in selections if x.is_offloaded]
    kinds = kinds_of_memory() if offloaded else (_HOST,)
    if _HOST not in kinds:
        raise ValueError(
            errors.message(
                f"{offloaded[0].call} needs the memory {_HOST!r}, which the devices of "
                "this platform don't have.",
                where=f"they have: {', '.join(kinds)}",
                way_out="Keep these values with nnx.memory.save.",
            )
        )
