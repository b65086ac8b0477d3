"""Sets the dtypes of the layers of a model, at once or while they are made.

The dtypes of a layer are attributes: ``dtype``, in which it computes, and
``param_dtype``, in which its Params are stored. A policy only sets these and casts the
Params and the results; a layer made with these arguments is the same.

A policy for layers made in a context is set in each model when its outermost
constructor is done, as `set_policy` would, except that the arguments of a layer
win. Inner layers, such as the projections of attention, are made by code of this
library that passes all arguments: there, the arguments of the outer layer count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from graftree import _jax, errors
from graftree.annotations import Path
from graftree.core import ownership, paths, patterns
from graftree.core.graph import traversals
from graftree.core.modules import containers
from graftree.core.modules.modules import Module
from graftree.core.objects import bookkeeping, methods, pytrees, running
from graftree.core.objects.attributes import DataObject
from graftree.core.text import descriptions
from graftree.core.variables import variables
from graftree.core.variables.variables import Variable
from graftree.nn import compute_dtypes, moments, own_params, reparametrization
from graftree.precision import dtype_policies
from graftree.precision.dtype_policies import Exceptions, Policy


def set_policy(
    model: Any,
    policy: str | Policy,
    *,
    exceptions: Exceptions | None = None,
    strict: bool = False,
) -> Applied:
    """Sets the dtypes in which a model stores its Params, computes and returns results.

    Changes the layers of the model in place, all or none: their attributes ``dtype``
    and ``param_dtype``, and the dtype of their Params. Other Variables stay as they
    are: running statistics, random streams, caches. So does the state of an optimizer,
    so make the optimizer afterwards.

    Normalization layers compute in float32 or wider, and return the same dtype as the
    other layers; the softmax of attention is always float32. A module without ``dtype``
    reads the Params that are its attributes in the dtype of ``compute``.

    Args:
        model: A Module, or another object that holds layers.
        policy: The dtypes; ``params`` and ``compute`` are required. ``output`` is the
            dtype to which floating results of ``model(...)`` itself are cast.
        exceptions: Policies of parts, or ``"keep"`` to leave a part as it is. A key
            selects modules: a class, a pattern of paths as in ``"blocks[*].mlp"``, or a
            function of path and module. A part includes everything in it, except for
            ``output``. The innermost part counts, then the last exception; parts
            that an exception leaves out are as they would be without it.
        strict: Whether unknown layers are an error.

    Returns:
        The dtypes that were set, layer by layer, to print; and in ``unknown`` the
        unknown layers: modules without ``dtype`` that have Params in containers.

    Raises:
        TypeError: If ``model`` is not an object with layers, or an exception's key is
            not of these kinds.
        ValueError: If the policy or an exception can't be read or lacks a part, an
            exception matches no module, a shared module or Variable would get two
            dtypes, the result of an object without calls is to be cast, or there are
            unknown layers and ``strict`` is set. Then nothing has changed.
        TraceContextError: If another trace owns a part of the model.

    Warns:
        UnknownLayerWarning: If there are unknown layers.

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
    asked = dtype_policies.of_model(policy)
    policy_map = PolicyMap(model, asked, dtype_policies.of_exceptions(exceptions))
    policy_map.check_matches()
    applied = policy_map.apply(strict)
    if applied.unknown:
        message = unknown_message(applied.unknown)
        warnings.warn(message, errors.UnknownLayerWarning, stacklevel=2)
    return applied


@dataclasses.dataclass
class _Change:
    """Changes to one module; none if ``policy`` is `dtype_policies.KEEP`."""

    path: Path
    module: Any
    policy: Policy
    settings: dict[str, Any]
    casts: list[tuple[Variable[Any], Any]]
    unknown: UnknownLayer | None

    def described(self) -> SetLayer:
        """Returns the dtypes that the module has after the change."""
        stored = self.settings.get("param_dtype")
        if self.casts:
            stored = self.casts[0][1]
        params_dtype = self.settings.get(compute_dtypes.PARAMS_DTYPE)
        compute = self.settings.get("dtype", params_dtype)
        policy = Policy(stored, compute, self.policy.output)
        return SetLayer(self.path, type(self.module).__name__, policy)


class PolicyMap:
    """Decides the policy of each module of a model, and applies them.

    Args:
        model: The model.
        policy: Its policy.
        exceptions: Their selections, and their policies.
        changeable: The modules that may be changed, by `id`, each with the attributes
            that may not; ``None``: everything may be changed.

    Attributes:
        matched: Indices of the exceptions that match a module.
    """

    def __init__(
        self,
        model: Any,
        policy: Policy,
        exceptions: list[tuple[Any, Policy]],
        changeable: Mapping[int, frozenset[str]] | None = None,
    ) -> None:
        self._policy = policy
        self._changeable = changeable
        self._exceptions = [
            (selection, patterns.to_predicate(selection), exception)
            for selection, exception in exceptions
        ]
        self.matched: set[int] = set()
        objects = [*traversals.iter_graph(model, graph=True)]
        self._modules = {path: x for path, x in objects if isinstance(x, Module)}
        self._modules[()] = model
        self._first = {*self._modules}
        shared = traversals.find_duplicates(
            model, only=lambda _, x: isinstance(x, (DataObject, Variable))
        )
        for first, *others in shared:
            if first in self._modules:
                self._modules |= dict.fromkeys(others, self._modules[first])
        self._variables = {path: x for path, x in objects if compute_dtypes.is_param(x)}
        self._params = self._own_params()
        self._policies = self._all_policies()
        self._check_shared(shared)

    def apply(self, strict: bool) -> Applied:
        """Checks everything, and then changes all modules."""
        changes = [self._change(path) for path in self._policies if path in self._first]
        _check_callable(changes)
        _check_writable(changes)
        described = [change.described() for change in changes]
        applied = Applied(
            self._policy,
            tuple([x for x in described if x.policy != dtype_policies.KEEP]),
            tuple([change.unknown for change in changes if change.unknown is not None]),
        )
        if strict and applied.unknown:
            raise ValueError(unknown_message(applied.unknown))
        _write(changes)
        return applied

    def check_matches(self) -> None:
        """Refuses an exception that matches no module."""
        for i, (selection, _, _) in enumerate(self._exceptions):
            if i not in self.matched:
                module_paths = [path for path in self._modules if path]
                raise patterns.no_match_error(
                    "set_policy: exceptions", selection, module_paths
                )

    def _change(self, path: Path) -> _Change:
        """Returns the changes to a module."""
        module, policy = self._modules[path], self._policies[path]
        fixed = (self._changeable or {}).get(id(module), frozenset())
        settings = dtype_settings(module, policy)
        params = {x[len(path) :]: v for x, v in self._params.get(path, [])}
        unknown, casts = None, []
        if "dtype" not in settings and policy.compute is not None:
            param_names = {(name,) for name in own_params.names_in(module)}
            if param_names:
                dtype = dtype_policies.scalar_type(policy.compute)
                settings[compute_dtypes.PARAMS_DTYPE] = dtype
            if others := [
                _described(x, v) for x, v in params.items() if x not in param_names
            ]:
                unknown = UnknownLayer(path, type(module).__name__, tuple(others))
                params = {x: v for x, v in params.items() if x in param_names}
        if policy.params is not None and "param_dtype" not in fixed:
            casts = [(variable, policy.params) for variable in params.values()]
        if "dtype" in fixed:
            policy = dataclasses.replace(policy, output=None)
        if path == () and self._policy.output is not None:
            policy = dataclasses.replace(policy, output=self._output(policy))
        settings = {name: x for name, x in settings.items() if name not in fixed}
        return _Change(path, module, policy, settings, casts, unknown)

    def _output(self, policy: Policy) -> Any:
        """Returns the model's output dtype: exceptions can set it, kinds can't."""
        is_said = policy.output is not None and any(
            exception.output is not None and is_meant((), self._modules[()])
            for _, is_meant, exception in self._exceptions
        )
        return policy.output if is_said else self._policy.output

    def _own_params(self) -> dict[Path, list[tuple[Path, Variable[Any]]]]:
        """Returns the Params of each module that are in none of its sub-modules."""
        owned: dict[Path, list[tuple[Path, Variable[Any]]]] = {}
        for path, variable in self._variables.items():
            owned.setdefault(self._owner(path), []).append((path, variable))
        return owned

    def _owner(self, path: Path) -> Path:
        modules = self._modules
        return next((x for x in _above(path) if is_layer(modules.get(x))), ())

    def _all_policies(self) -> dict[Path, Policy]:
        """Returns the policies of all modules, those of outer modules first."""
        policies: dict[Path, Policy] = {}
        for path, module in paths.sorted_by_path(self._modules.items()):
            outer = next(
                (policies[x] for x in _above(path) if x in policies), self._policy
            )
            outer = dataclasses.replace(outer, output=None)
            # Also for a module that stays as it is: this notes which exceptions match.
            policies[path] = self._policy_of(path, module, outer)
            if self._changeable is not None and id(module) not in self._changeable:
                policies[path] = dtype_policies.KEEP
        return policies

    def _policy_of(self, path: Path, module: Any, policy: Policy) -> Policy:
        """Returns the policy of a module, from that of the module it is in."""
        policy = by_kind(module, policy)
        for i, (_, is_meant, exception) in enumerate(self._exceptions):
            if is_meant(path, module):
                self.matched.add(i)
                if exception is dtype_policies.KEEP:
                    policy = exception
                else:
                    policy = dtype_policies.overridden(policy, exception)
        return policy

    def _check_shared(self, shared: list[list[Path]]) -> None:
        """Refuses shared parts for which not all paths give the same dtypes."""
        for aliases in shared:
            if aliases[0] in self._modules:
                policies = {path: self._policies[path] for path in aliases}
            elif aliases[0] in self._variables:
                owners = {path: self._policies[self._owner(path)] for path in aliases}
                policies = {
                    path: Policy(owner_policy.params)
                    for path, owner_policy in owners.items()
                }
            else:
                continue
            if len({*policies.values()}) > 1:
                raise _contradiction(policies)


def _above(path: Path) -> Iterator[Path]:
    """Yields the paths above another one, the nearest first."""
    return (path[:end] for end in reversed(range(len(path))))


def _contradiction(policies: dict[Path, Policy]) -> ValueError:
    lines = [
        f"{paths.dotted(p)}: {str(policy) or 'as it is'}"
        for p, policy in policies.items()
    ]
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
    casts = [(x, cast(x, dtype)) for c in changes for x, dtype in c.casts]
    for change in changes:
        for name, value in change.settings.items():
            set_attribute(change.module, name, value)
        if change.policy != dtype_policies.KEEP:
            set_output(change.module, change.policy.output)
        if compute_dtypes.PARAMS_DTYPE in change.settings:
            own_params.update(change.module)
    for variable, raw in casts:
        if raw is not variable.get_raw_value():
            variable.set_raw_value(raw)


# One layer.

_WRAPPERS = (reparametrization.SpectralNorm, reparametrization.WeightNorm)


def is_layer(x: Any) -> bool:
    """Whether it is a module that Params may belong to."""
    return isinstance(x, Module) and not isinstance(
        x, (containers.List, containers.Dict)
    )


def by_kind(layer: Any, policy: Policy) -> Policy:
    """Returns the policy of a layer without an exception: wide for norms."""
    if not isinstance(layer, moments.Norm) or policy.compute is None:
        return policy
    wide = jnp.promote_types(policy.compute, jnp.float32)
    output = None if wide == policy.compute else policy.compute
    return Policy(policy.params, wide, output)


def dtype_settings(layer: Any, policy: Policy) -> dict[str, Any]:
    """Returns the attributes of a layer that hold dtypes, with their new values."""
    wanted = {"dtype": policy.compute, "param_dtype": policy.params}
    settings: dict[str, Any] = {
        name: dtype_policies.scalar_type(dtype)
        for name, dtype in wanted.items()
        if dtype is not None and _has_dtype(layer, name)
    }
    # They store the weights of another layer in their `dtype`, if they have one.
    if isinstance(layer, _WRAPPERS) and "dtype" in settings:
        settings["dtype"] = None
    if isinstance(layer, reparametrization.SpectralNorm):
        settings.pop("param_dtype", None)  # that of its statistics
    return settings


def _has_dtype(layer: Any, name: str) -> bool:
    """Whether a module has an attribute that holds a floating dtype, or ``None``."""
    if name not in vars(layer):
        return False
    value = vars(layer)[name]
    try:
        return value is None or jnp.issubdtype(jnp.dtype(value), jnp.inexact)
    except TypeError:
        return False


def set_attribute(module: Any, name: str, value: Any) -> None:
    """Sets an attribute that holds a dtype, past all code of the class."""
    if vars(module).get(name, Policy) is not value:
        pytrees.store_attribute(module, name, value, False)


def set_output(module: Any, dtype: Any) -> None:
    """Sets the dtype to which the results of a module are cast; ``None``: no cast."""
    if dtype is not None:
        set_attribute(module, methods.OUTPUT_DTYPE, dtype_policies.scalar_type(dtype))
    elif methods.OUTPUT_DTYPE in vars(module):
        delattr(module, methods.OUTPUT_DTYPE)


def cast(variable: Variable[Any], dtype: Any) -> Any:
    """Casts the stored value of a Variable; returns the same object if unchanged."""
    raw = variable.get_raw_value()
    if _jax.is_ref(raw):
        return raw if raw.dtype == dtype else _jax.new_ref(raw[...].astype(dtype))
    return own_params.in_dtype(raw, dtype)


# The layers that were set, and those that were not, to print.


@dataclasses.dataclass(frozen=True)
class SetLayer:
    """Dtypes of a layer after a change.

    Attributes:
        path: Its keys, from the model.
        kind: The name of its class.
        policy: Its dtypes, ``None`` for a kind that it lacks.
    """

    path: Path
    kind: str
    policy: Policy


@dataclasses.dataclass(frozen=True)
class UnknownLayer:
    """A module with Params in containers, but no dtype in which it computes.

    Attributes:
        path: Its keys, from the model.
        kind: The name of its class.
        params: These Params, as in ``scales[0] float32[8]``.
    """

    path: Path
    kind: str
    params: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Applied:
    """Dtypes that were set; prints as a table.

    Attributes:
        policy: The policy of the model.
        layers: The layers that were set, in the order of the model.
        unknown: The layers with Params but without ``dtype``, which are unchanged.
    """

    policy: Policy
    layers: tuple[SetLayer, ...]
    unknown: tuple[UnknownLayer, ...]

    def __str__(self) -> str:
        rows = []
        for layer in self.layers:
            dtypes = [str(dtype or "-") for dtype in vars(layer.policy).values()]
            rows.append((paths.dotted(layer.path), layer.kind, *dtypes))
        head = ("layer", "class", *vars(self.policy))
        text = "\n".join(descriptions.aligned([head, *descriptions.folded_rows(rows)]))
        if self.unknown:
            text += "\n\n" + unknown_message(self.unknown)
        return text


def _described(path: Path, variable: Variable[Any]) -> str:
    raw = variable.get_raw_value()
    kind = f" {descriptions.describe(raw)}" if hasattr(raw, "dtype") else ""
    return paths.dotted(path) + kind


def unknown_message(unknown: Sequence[UnknownLayer]) -> str:
    """Makes the message about layers in which nothing can be set."""
    rows = [(paths.dotted(x.path), x.kind, ", ".join(x.params)) for x in unknown]
    return errors.message(
        "A policy can't set these Params: they are in containers, and their layers "
        "have no attribute `dtype`. They were left unchanged.",
        where="\n".join(descriptions.aligned(descriptions.folded_rows(rows))),
        way_out="Make each an attribute of its layer, or give the class attributes "
        "`dtype` and `param_dtype`, which its methods use. To leave them as they are: "
        'exceptions={Class: "keep"}.',
    )


# Layers that are being made.

_DEFAULTS = {"dtype": None, "param_dtype": jnp.float32}
_LAYERS = "graftree.nn.", "graftree.surgery.stacks"


@contextlib.contextmanager
def default(
    policy: str | Policy, *, exceptions: Exceptions | None = None
) -> Iterator[None]:
    """Makes layers in its block with the dtypes of a policy.

    A model made in it is as `set_policy` would make it, except that the arguments
    ``dtype`` (other than ``None``) and ``param_dtype`` of a layer win. Random numbers
    are drawn in float32, or in the ``param_dtype`` of a layer's arguments, and then
    rounded to the dtype of ``params``: a seed gives the same numbers as without a
    policy. The policy holds in this thread, including for models that ``nnx.jit``
    makes: functions compiled before are traced again.

    Args:
        policy: As for `set_policy`. ``output`` is for the models themselves: modules
            with a ``__call__`` that are not made in the constructor of another module.
        exceptions: As for `set_policy`; paths begin at the model.

    Raises:
        TypeError: As `set_policy`.
        ValueError: As `set_policy`; at the end of the context, if an exception matched
            nothing.

    Warns:
        UnknownLayerWarning: When a model is made that has Params in containers, in
            layers without ``dtype``.

    Example:
        >>> with nnx.precision.default("params=f32, compute=bf16, output=f32"):
        ...     model = nnx.LoRALinear(2, 3, lora_rank=1, rngs=nnx.Rngs(0))
        >>> model.dtype is model.lora.dtype is jnp.bfloat16
        True
        >>> model(jnp.ones((1, 2))).dtype
        dtype('float32')
    """
    builder = _PolicyBuilder(
        dtype_policies.of_model(policy), dtype_policies.of_exceptions(exceptions)
    )
    key = (builder.policy, *builder.exceptions)
    with running.made_by(builder.make), _jax.built_apart(key):
        yield
    builder.check_matched()


@dataclasses.dataclass
class _Running:
    """A constructor that runs: its class, the dtypes passed to it, and its trace."""

    kind: type
    fixed: frozenset[str]
    trace: Any

    @property
    def is_ours(self) -> bool:
        """Whether it is of a layer of this library, or of one derived from it."""
        return any(base.__module__.startswith(_LAYERS) for base in self.kind.__mro__)


class _PolicyBuilder:
    """Makes objects, and sets the policy in those that are models."""

    def __init__(self, policy: Policy, exceptions: list[tuple[Any, Policy]]) -> None:
        self.policy = policy
        self.exceptions = exceptions
        self._matched: set[int] = set()
        self._running: list[_Running] = []
        # Kept, so that no other object gets the same number.
        self._modules: dict[int, Any] = {}
        self._fixed_dtypes: dict[int, frozenset[str]] = {}
        for selection, _ in exceptions:
            patterns.to_predicate(selection)

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
        fixed = _passed_dtypes(cls, args, kwargs, outer)
        self._running.append(_Running(cls, fixed, trace))
        try:
            obj = build()
        finally:
            self._running.pop()
        if isinstance(obj, Module):
            self._modules[id(obj)] = obj
            chosen = _chosen(obj, is_inside=outer is not None and outer.is_ours)
            self._fixed_dtypes[id(obj)] = fixed | chosen
            if outer is None or outer.trace is not trace:
                self._set_policy(obj, is_model=outer is None and callable(obj))
        return obj

    def _set_policy(self, model: Any, is_model: bool) -> None:
        policy = self.policy
        if not is_model:
            policy = dataclasses.replace(policy, output=None)
        policy_map = PolicyMap(model, policy, self.exceptions, self._fixed_dtypes)
        self._matched |= policy_map.matched
        applied = policy_map.apply(strict=False)
        if applied.unknown:
            # Up from here: `make`, the metaclass, the caller.
            message = unknown_message(applied.unknown)
            warnings.warn(message, errors.UnknownLayerWarning, stacklevel=4)

    def check_matched(self) -> None:
        """Refuses an exception that matched nothing in any model that was made."""
        for i, (selection, _) in enumerate(self.exceptions):
            if i not in self._matched:
                raise ValueError(
                    errors.message(
                        "precision.default: the exception "
                        f"{patterns.describe(selection)} matches no module that was "
                        "made in the context.",
                        way_out="Paths begin at the model, as in 'blocks[*].mlp'.",
                    )
                )


def _passed_dtypes(
    cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outer: _Running | None
) -> frozenset[str]:
    """Returns the names of the dtypes that a layer gets as arguments."""
    try:
        bound = inspect.signature(cls.__init__).bind(None, *args, **kwargs).arguments
    except (TypeError, ValueError):  # the constructor reports the fault
        return frozenset()
    bound = bound | bound.get("kwargs", {})
    names = {name for name in _DEFAULTS if name in bound}
    if bound.get("dtype") is None:
        names.discard("dtype")
    if outer is not None and outer.is_ours:
        # It passes on the dtypes that it was given, or its defaults.
        names = {
            name
            for name in names
            if name in outer.fixed or bound[name] != _default(outer.kind, name)
        }
    return frozenset(names)


def _chosen(layer: Any, is_inside: bool) -> frozenset[str]:
    """Returns the names of the dtypes that a class chose: they aren't its defaults."""
    if is_inside:  # one of our layers made it, and passed its arguments on
        return frozenset()
    dtypes = {name: x for name, x in vars(layer).items() if name in _DEFAULTS}
    expected = {name: _default(type(layer), name) for name in dtypes}
    return frozenset([name for name, x in dtypes.items() if x != expected[name]])


def _default(cls: type, name: str) -> Any:
    """Returns the default of an argument of a class, or of the first base with one."""
    for base in cls.__mro__:
        if "__init__" in vars(base):
            parameter = inspect.signature(base.__init__).parameters.get(name)
            if parameter is not None and parameter.default is not parameter.empty:
                return parameter.default
    return _DEFAULTS[name]
