"""Sets the dtypes of the layers of a model."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from graftree import errors
from graftree.annotations import Path
from graftree.core import paths, patterns
from graftree.core.graph import traversals
from graftree.core.modules.modules import Module
from graftree.core.objects import bookkeeping, methods
from graftree.core.objects.attributes import DataObject
from graftree.core.variables import variables
from graftree.core.variables.variables import Variable
from graftree.precision import applied as descriptions
from graftree.precision import layers, policies
from graftree.precision.applied import Applied, Layer, UnknownLayer
from graftree.precision.policies import Exceptions, Policy


def set_policy(
    model: Any,
    policy: str | Policy,
    *,
    exceptions: Exceptions | None = None,
    strict: bool = False,
) -> Applied:
    """Sets in which dtypes a model stores its Params, computes, and returns results.

    It changes the layers of the model in place, all or none: their attributes ``dtype``
    and ``param_dtype``, and the dtype of their Params. Other Variables stay as they
    are: running statistics, random streams, caches. So does the state of an optimizer,
    which is best made afterwards.

    Normalization layers compute in float32 or wider, and return what the other layers
    do; the softmax of attention is float32 in any case.

    Args:
        model: A Module, or another object that holds layers.
        policy: The dtypes; ``params`` and ``compute`` are required. ``output`` is the
            dtype to which floating results of ``model(...)`` itself are cast.
        exceptions: Policies of parts, or ``"keep"`` to leave a part as it is. A key is
            what selects modules: a class, a pattern of paths as in ``"blocks[*].mlp"``,
            or a function of path and module. A part is meant with all that is in it,
            but for ``output``. The innermost part counts, then the last exception; what
            an exception does not say is as it would be without it.
        strict: Whether layers that it does not know are an error.

    Returns:
        What was set, layer by layer, to print; and in ``unknown`` the layers that it
        does not know: modules with Params of their own but without ``dtype``.

    Raises:
        TypeError: If ``model`` is no object with layers, or an exception selects
            nothing that could be.
        ValueError: If the policy or an exception can't be read or lacks a part, an
            exception matches no module, a shared module or Variable would get two
            dtypes, the result of something is to be cast that is not called, or there
            are unknown layers and ``strict`` is set. Then nothing has changed.
        TraceContextError: If another trace owns a part of the model.

    Warns:
        UnknownLayerWarning: If there are layers that it does not know.

    Example:
        >>> rngs = nnx.Rngs(0)
        >>> model = nnx.Sequential(
        ...     nnx.Linear(2, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
        ... )
        >>> applied = nnx.precision.set_policy(
        ...     model, "params=f32, compute=bf16, output=f32"
        ... )
        >>> model.layers[0](jnp.ones((1, 2))).dtype, model(jnp.ones((1, 2))).dtype
        (dtype(bfloat16), dtype('float32'))
        >>> print(applied)
        layer        class       params   compute   output
        <root>       Sequential  -        -         float32
        layers[0-1]  Linear      float32  bfloat16  -
    """
    if not isinstance(model, DataObject):
        raise TypeError(
            "set_policy expects a Module or another Pytree that holds layers, got "
            f"{type(model).__name__}."
        )
    asked = policies.of_model(policy)
    parts = Parts(model, asked, policies.of_exceptions(exceptions))
    parts.check_matches()
    applied = parts.apply(strict)
    if applied.unknown:
        message = descriptions.unknown_message(applied.unknown)
        warnings.warn(message, errors.UnknownLayerWarning, stacklevel=2)
    return applied


@dataclasses.dataclass
class _Change:
    """What changes in one module; nothing if ``policy`` is `policies.KEEP`."""

    path: Path
    module: Any
    policy: Policy
    settings: dict[str, Any]
    casts: list[tuple[Variable[Any], Any]]
    unknown: UnknownLayer | None

    def described(self) -> Layer:
        """What the module has then."""
        stored = self.settings.get("param_dtype")
        if self.casts:
            stored = self.casts[0][1]
        policy = Policy(stored, self.settings.get("dtype"), self.policy.output)
        return Layer(self.path, type(self.module).__name__, policy)


class Parts:
    """The modules of a model, by path, and the policy of each.

    Args:
        model: The model.
        policy: Its policy.
        exceptions: What they select, and their policies.
        given: For each module that may be changed, by `id`, which of its attributes
            may not; ``None``: all may be.
    """

    def __init__(
        self,
        model: Any,
        policy: Policy,
        exceptions: list[tuple[Any, Policy]],
        given: Mapping[int, frozenset[str]] | None = None,
    ) -> None:
        self._policy = policy
        self._given = given
        self._selections = [where for where, _ in exceptions]
        self._exceptions = [
            (patterns.to_predicate(where), own) for where, own in exceptions
        ]
        found = [*traversals.iter_graph(model, graph=True)]
        self._modules = {path: x for path, x in found if isinstance(x, Module)}
        self._modules[()] = model
        self._paths = [*self._modules]
        self._variables = {path: x for path, x in found if layers.is_param(x)}
        self._known: dict[Path, Policy] = {}
        self._params = self._own_params()
        self._add_shared(model)

    def apply(self, strict: bool) -> Applied:
        """Checks everything, and then changes all modules."""
        order = sorted(self._paths, key=_order)
        changes = [self._change(path) for path in order]
        _check_callable(changes)
        _check_writable(changes)
        described = [change.described() for change in changes]
        applied = Applied(
            self._policy,
            tuple([layer for layer in described if layer.policy != policies.KEEP]),
            tuple([change.unknown for change in changes if change.unknown is not None]),
        )
        if strict and applied.unknown:
            raise ValueError(descriptions.unknown_message(applied.unknown))
        _write(changes)
        return applied

    def check_matches(self) -> None:
        """Refuses an exception that matches no module."""
        for number in set(range(len(self._selections))) - self.matched():
            known = [path for path in self._modules if path]
            where = self._selections[number]
            raise patterns.no_match_error("set_policy: exceptions", where, known)

    def matched(self) -> set[int]:
        """The numbers of the exceptions that match a module."""
        return {
            number
            for number, (is_meant, _) in enumerate(self._exceptions)
            if any(is_meant(path, x) for path, x in self._modules.items())
        }

    def _change(self, path: Path) -> _Change:
        """What changes in a module."""
        module, policy = self._modules[path], self._of(path)
        given: frozenset[str] = frozenset()
        if self._given is not None:
            given = self._given.get(id(module), given)
        found, params = layers.settings(module, policy), self._params.get(path, [])
        is_known, unknown, casts = "dtype" in found or not params, None, []
        if not is_known and policy.compute is not None:
            unknown = descriptions.unknown_layer(path, module, params)
        if is_known and policy.params is not None and "param_dtype" not in given:
            casts = [(variable, policy.params) for _, variable in params]
        if "dtype" in given:
            policy = dataclasses.replace(policy, output=None)
        if path == () and self._policy.output is not None:
            policy = dataclasses.replace(policy, output=self._output(policy))
        settings = {name: x for name, x in found.items() if name not in given}
        return _Change(path, module, policy, settings, casts, unknown)

    def _output(self, policy: Policy) -> Any:
        """What the model itself returns: an exception may say, its kind does not."""
        said = [
            own.output
            for is_meant, own in self._exceptions
            if is_meant((), self._modules[()])
        ]
        is_said = policy.output is not None and any(x is not None for x in said)
        return policy.output if is_said else self._policy.output

    def _own_params(self) -> dict[Path, list[tuple[Path, Variable[Any]]]]:
        """The Params of each module that are in no module inside it."""
        owned: dict[Path, list[tuple[Path, Variable[Any]]]] = {}
        for path, variable in self._variables.items():
            owned.setdefault(self._owner(path), []).append((path, variable))
        return owned

    def _owner(self, path: Path) -> Path:
        above = [path[:end] for end in range(len(path) - 1, 0, -1)]
        modules = self._modules
        return next((x for x in above if layers.is_layer(modules.get(x))), ())

    def _of(self, path: Path) -> Policy:
        """The policy of the module at a path."""
        if self._given is not None and id(self._modules[path]) not in self._given:
            return policies.KEEP
        if path not in self._known:
            policy = dataclasses.replace(self._policy, output=None)
            if path != ():
                above = [path[:end] for end in range(len(path) - 1, -1, -1)]
                outer = self._of(next(x for x in above if x in self._modules))
                policy = dataclasses.replace(outer, output=None)
            self._known[path] = self._own(path, policy)
        return self._known[path]

    def _own(self, path: Path, policy: Policy) -> Policy:
        """The policy of a module, from that of the module around it."""
        module = self._modules[path]
        policy = layers.by_kind(module, policy)
        for is_meant, given in self._exceptions:
            if is_meant(path, module):
                is_kept = given is policies.KEEP
                policy = given if is_kept else policies.overridden(policy, given)
        return policy

    def _add_shared(self, model: Any) -> None:
        """Adds the further paths of what is shared; each must say the same."""
        shared = traversals.find_duplicates(
            model, only=lambda _, x: isinstance(x, (DataObject, Variable))
        )
        for first, *others in shared:
            if first in self._modules:
                for path in others:
                    self._modules[path] = self._modules[first]
        for places in shared:
            if places[0] in self._modules:
                found = {path: self._of(path) for path in places}
            elif places[0] in self._variables:
                owners = {path: self._of(self._owner(path)) for path in places}
                found = {path: Policy(own.params) for path, own in owners.items()}
            else:
                continue
            if len({*found.values()}) > 1:
                raise _contradiction(found)


def _order(path: Path) -> list[Any]:
    return [(0, x, "") if isinstance(x, int) else (1, 0, str(x)) for x in path]


def _contradiction(found: dict[Path, Policy]) -> ValueError:
    lines = [f"{paths.dotted(p)}: {own or 'as it is'}" for p, own in found.items()]
    return ValueError(
        errors.message(
            "set_policy: a shared part of the model would get two policies.",
            where="\n".join(lines),
            way_out="Give all of these paths the same exception.",
        )
    )


# Checking and writing.


def _check_callable(changes: list[_Change]) -> None:
    for change in changes:
        dtype, kind = change.policy.output, type(change.module).__name__
        if dtype is not None and not methods.has_known_call(change.module):
            raise ValueError(
                errors.message(
                    f"set_policy: output={dtype} casts the result of a call, but "
                    f"{kind} has no plain method __call__.",
                    where=paths.dotted(change.path),
                    way_out="Leave output out, and cast where the results are used; or "
                    "have __call__ call the decorated function.",
                )
            )


def _check_writable(changes: list[_Change]) -> None:
    for change in changes:
        if change.settings or change.policy.output:
            name = next(iter(change.settings), methods.OUTPUT_DTYPE)
            bookkeeping.check_owned(change.module, name)
        for variable, _ in change.casts:
            variables.check_write(variable, path=paths.dotted(change.path))


def _write(changes: list[_Change]) -> None:
    casts = [(x, layers.cast(x, dtype)) for c in changes for x, dtype in c.casts]
    for change in changes:
        for name, value in change.settings.items():
            layers.set_attribute(change.module, name, value)
        if change.policy != policies.KEEP:
            layers.set_output(change.module, change.policy.output)
    for variable, raw in casts:
        if raw is not variable.get_raw_value():
            variable.set_raw_value(raw)
