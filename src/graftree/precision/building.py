"""A policy for the layers that are made in a context.

It is set in each model when its outermost constructor is done, as `set_policy` would,
but for what the arguments of a layer say. The layers inside, such as the projections of
attention, are made by code of this library that passes all arguments: what counts there
are the arguments of the outer one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp

from graftree import _jax, errors
from graftree.core import ownership, patterns
from graftree.core.modules.modules import Module
from graftree.core.objects import running
from graftree.nn.linear import Embed
from graftree.precision import applied as descriptions
from graftree.precision import policies
from graftree.precision.models import Parts
from graftree.precision.policies import Exceptions, Policy

_NAMES = ("dtype", "param_dtype")
_DEFAULTS = {"dtype": None, "param_dtype": jnp.float32}
_LAYERS = "graftree.nn.", "graftree.surgery.stacks"


@contextlib.contextmanager
def default(
    policy: str | Policy, *, exceptions: Exceptions | None = None
) -> Iterator[None]:
    """A context in which layers are made with the dtypes of a policy.

    A model made in it is as `set_policy` would make it, but for layers that are given
    ``dtype`` (other than ``None``) or ``param_dtype`` as arguments: these win. Random
    numbers are drawn in float32, or in the ``param_dtype`` that a layer is given, and
    then rounded to the dtype of ``params``: the seed gives the numbers that it gives
    without a policy. The policy holds in this thread, also for models that ``nnx.jit``
    makes: functions compiled before are traced anew.

    Args:
        policy: As for `set_policy`. ``output`` is for the models themselves: modules
            that were called for, not those made in the constructor of another one, and
            that have a ``__call__``.
        exceptions: As for `set_policy`; paths begin at the model.

    Raises:
        TypeError: As `set_policy`.
        ValueError: As `set_policy`; at the end of the context, if an exception matched
            nothing.

    Warns:
        UnknownLayerWarning: When a model is made that has layers with Params but
            without ``dtype``.

    Example:
        >>> with nnx.precision.default("params=f32, compute=bf16, output=f32"):
        ...     model = nnx.LoRALinear(2, 3, lora_rank=1, rngs=nnx.Rngs(0))
        >>> model.dtype is model.lora.dtype is jnp.bfloat16
        True
        >>> model(jnp.ones((1, 2))).dtype
        dtype('float32')
    """
    builder = _Builder(policies.of_model(policy), policies.of_exceptions(exceptions))
    key = (builder.policy, *builder.exceptions)
    with running.made_by(builder.make), _jax.built_apart(key):
        yield
    builder.check_matched()


@dataclasses.dataclass
class _Running:
    """A constructor that runs: its class, what it was given, and in which trace."""

    kind: type
    given: frozenset[str]
    trace: Any

    @property
    def is_ours(self) -> bool:
        """Whether it is of a layer of this library, or of one derived from it."""
        return any(base.__module__.startswith(_LAYERS) for base in self.kind.__mro__)


class _Builder:
    """Makes objects, and sets the policy in those that are models."""

    def __init__(self, policy: Policy, exceptions: list[tuple[Any, Policy]]) -> None:
        self.policy = policy
        self.exceptions = exceptions
        self._matched: set[int] = set()
        self._running: list[_Running] = []
        # Kept, so that no other object gets the same number.
        self._made: dict[int, Any] = {}
        self._given: dict[int, frozenset[str]] = {}
        for where, _ in exceptions:
            patterns.to_predicate(where)

    def make(
        self,
        cls: type,
        build: Callable[[], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Makes an object; see `running.Maker`."""
        outer = self._running[-1] if self._running else None
        trace = ownership.current()
        given = _given(cls, args, kwargs, outer)
        self._running.append(_Running(cls, given, trace))
        try:
            made = build()
        finally:
            self._running.pop()
        if isinstance(made, Module):
            self._made[id(made)] = made
            chosen = _chosen(made, is_inside=outer is not None and outer.is_ours)
            self._given[id(made)] = given | chosen
            if outer is None or outer.trace is not trace:
                self._set_policy(made, is_model=outer is None and callable(made))
        return made

    def _set_policy(self, model: Any, is_model: bool) -> None:
        policy = self.policy
        if not is_model:
            policy = dataclasses.replace(policy, output=None)
        parts = Parts(model, policy, self.exceptions, self._given)
        self._matched |= parts.matched()
        found = parts.apply(strict=False)
        if found.unknown:
            # Up from here: `make`, the metaclass, the caller.
            message = descriptions.unknown_message(found.unknown)
            warnings.warn(message, errors.UnknownLayerWarning, stacklevel=4)

    def check_matched(self) -> None:
        """Refuses an exception that matched nothing of all that was made."""
        for number, (where, _) in enumerate(self.exceptions):
            if number not in self._matched:
                raise ValueError(
                    errors.message(
                        f"precision.default: the exception {patterns.describe(where)} "
                        "matches no module that was made in the context.",
                        way_out="Paths begin at the model, as in 'blocks[*].mlp'.",
                    )
                )


def _given(
    cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outer: _Running | None
) -> frozenset[str]:
    """Which dtypes a layer is given as arguments."""
    try:
        bound = inspect.signature(cls.__init__).bind(None, *args, **kwargs).arguments
    except (TypeError, ValueError):  # the constructor says what is wrong
        return frozenset()
    bound = bound | bound.get("kwargs", {})
    given = {name for name in _NAMES if name in bound}
    if bound.get("dtype") is None:
        given.discard("dtype")
    if outer is not None and outer.is_ours:
        # It passes on what it was given itself, or its defaults.
        given = {
            name
            for name in given
            if name in outer.given or bound[name] != _default(outer.kind, name)
        }
    return frozenset(given)


def _chosen(layer: Any, is_inside: bool) -> frozenset[str]:
    """Which dtypes the class of a layer has chosen: they are not its defaults."""
    if is_inside:  # a layer of ours made it, and gave it what is given
        return frozenset()
    found = {name: vars(layer)[name] for name in _NAMES if name in vars(layer)}
    expected = {name: _default(type(layer), name) for name in found}
    if isinstance(layer, Embed) and expected["dtype"] is None:
        expected["dtype"] = layer.embedding.dtype
    return frozenset([name for name, x in found.items() if x != expected[name]])


def _default(cls: type, name: str) -> Any:
    """The default of an argument of a class, or of the first base that has one."""
    for base in cls.__mro__:
        if "__init__" in vars(base):
            found = inspect.signature(base.__init__).parameters.get(name)
            if found is not None and found.default is not found.empty:
                return found.default
    return _DEFAULTS[name]
