"""A Linen Module as a Module: its variables are attributes, its methods keep working.

A `ToNNX` has no variables until it is called once while *initializing*, a flag that
`lazy_init` sets on a whole model. The Linen Module then initializes itself from the
shapes of its inputs, as in Linen, and its variables become attributes by their path.
Each later call gives them to the Linen Module, and takes back what it may change. A
Variable stays the same object then.
"""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import jax

from graftree import errors
from graftree.core.graph import traversals
from graftree.core.modules import modules
from graftree.core.objects import attributes, bookkeeping
from graftree.core.objects.pytrees import Pytree
from graftree.core.rng.streams import Rngs, RngState
from graftree.core.variables.variables import Variable
from graftree.interop.bridge import contexts, linen_side, variables

T = TypeVar("T")

# The attributes of a `ToNNX` that are not variables of Linen.
_OWN = ("to_nnx__module", "to_nnx__rngs", *bookkeeping.NAMES)
_RESERVED = frozenset({*_OWN, "module", "rngs"})


class ToNNX(modules.Module):
    """A Linen Module as a Module.

    Collections become types of Variables: ``params`` is `Param`, ``batch_stats`` is
    `BatchStat`, a collection without a type gets a new one of its name. The variables
    of ``Dense_0`` are in a dict, ``model.Dense_0["kernel"]``. Boxes such as
    ``nn.Partitioned`` become metadata of the Variable, and are given to Linen again.

    Args:
        module: The Linen Module.
        rngs: The random streams to draw from, of which it takes a fork, or a key, for
            the stream ``params``. Every call draws one key from every stream.

    Raises:
        ValueError: If variables of two collections have the same path, or one has a
            name that a ToNNX needs for itself.
        flax.errors.ScopeCollectionNotFound: If it is called before `lazy_init`.

    Example:
        >>> import flax.linen as nn
        >>> dense = nnx.bridge.ToNNX(nn.Dense(4), rngs=nnx.Rngs(0))
        >>> dense = dense.lazy_init(jnp.ones((1, 3)))
        >>> dense.kernel.shape, dense(jnp.ones((2, 3))).shape
        ((3, 4), (2, 4))
    """

    to_nnx__module: linen_side.linen.Module
    to_nnx__rngs: Any

    def __init__(
        self,
        module: linen_side.linen.Module,
        rngs: Rngs | jax.Array | None = None,
    ):
        self.to_nnx__module = module
        if isinstance(rngs, Rngs):
            rngs = rngs.fork()
        elif isinstance(rngs, jax.Array):
            rngs = Rngs(params=rngs)
        is_data = bool(attributes.has_data(rngs))
        self.to_nnx__rngs = attributes.data(rngs) if is_data else rngs

    @property
    def module(self) -> linen_side.linen.Module:
        """The Linen Module, under its older name."""
        _warn_renamed("module")
        return self.to_nnx__module

    @property
    def rngs(self) -> Any:
        """The random streams, under their older name."""
        _warn_renamed("rngs")
        return self.to_nnx__rngs

    def lazy_init(self, *args: Any, **kwargs: Any) -> ToNNX:
        """Initializes the variables by a call with these arguments.

        Returns:
            The same object.
        """
        return lazy_init(self, *args, **kwargs)

    def __call__(
        self,
        *args: Any,
        rngs: Rngs | jax.Array | None = None,
        method: Callable[..., Any] | str | None = None,
        mutable: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Calls the Linen Module, or one of its methods.

        Args:
            *args: Arguments of the method.
            rngs: Other random streams for this call, or a key for ``params``.
            method: The method or its name; ``None`` for ``__call__``.
            mutable: The collections that the call may change, as in ``Module.apply``.
                The default is what the Module around this one may change (a
                `ToLinen`, a bridge or Linen Module), else nothing.
            **kwargs: Keyword arguments of the method.

        Returns:
            The output of the method. Changes are in the attributes.
        """
        keys = _draw(self.to_nnx__rngs if rngs is None else rngs)
        linen_module = self.to_nnx__module
        if bookkeeping.state_of(self).initializing:
            out, initial = linen_module.init_with_output(
                keys, *args, method=method, **kwargs
            )
            self._take(initial)
            return out
        if mutable is None:
            mutable = _mutable_around()
        out = linen_module.apply(
            variables.nnx_attrs_to_linen_vars(self._own_variables()),
            *args,
            rngs=keys,
            method=method,
            mutable=mutable,
            **kwargs,
        )
        if mutable is False:
            return out
        out, updates = out
        self._take(updates)
        return out

    def __getattr__(self, name: str) -> Any:
        linen_module = vars(self).get("to_nnx__module")
        # Names with underscores are asked for by Python and JAX.
        if linen_module is not None and not name.startswith("_"):
            found = inspect.getattr_static(type(linen_module), name, None)
            if isinstance(found, (staticmethod, classmethod)):
                return getattr(type(linen_module), name)
            if isinstance(found, types.FunctionType):
                return functools.partial(self.__call__, method=found)
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}"
        )

    def _own_variables(self) -> dict[str, Any]:
        own = vars(self).items()
        return {name: x for name, x in own if name not in _OWN and _is_linen_data(x)}

    def _take(self, collections: Mapping[str, Any]) -> None:
        """Writes variables into attributes; adds those that are new."""
        taken = variables.linen_vars_to_nnx_attrs(collections)
        if reserved := _RESERVED & taken.keys():
            raise ValueError(
                f"{type(self.to_nnx__module).__name__} has variables or submodules "
                f"named {sorted(reserved)}, names that a ToNNX needs for itself. "
                "Rename them in the Linen Module."
            )
        own = {name: vars(self)[name] for name in taken if name in vars(self)}
        writes = list(_writes(own, taken, ()))
        for variable, source in writes:
            variable.update_from_state(source)
        for name, value in taken.items():
            merged, is_new = _merged(own.get(name), value)
            if is_new:
                setattr(self, name, attributes.data(merged))


def _warn_renamed(name: str) -> None:
    warnings.warn(
        f"`ToNNX.{name}` is deprecated. Please use `to_nnx__{name}` instead.",
        DeprecationWarning,
        stacklevel=3,
    )


def _draw(rngs: Any) -> dict[str, Any]:
    """The keys for Linen: one from each stream."""
    if isinstance(rngs, Rngs):
        keys = {name: stream() for name, stream in rngs.items()}
    elif isinstance(rngs, jax.Array):
        keys = {"params": rngs}
    else:
        keys = dict(rngs) if isinstance(rngs, Mapping) else {}
    if "params" not in keys and "default" in keys:
        keys["params"] = keys.pop("default")
    return keys


def _mutable_around() -> Any:
    """What the innermost bridge or Linen Module that runs now may change."""
    bridge_module = contexts.current_module()
    if bridge_module is not None and bridge_module.scope is not None:
        return bridge_module.scope.mutable
    linen_module = linen_side.current_linen_module()
    if linen_module is not None and linen_module.scope is not None:
        return linen_module.scope.mutable
    return False


def _is_linen_data(x: Any) -> bool:
    if isinstance(x, Variable):
        return not isinstance(x, RngState)
    return isinstance(x, dict) and all(_is_linen_data(y) for y in x.values())


def _writes(
    own: Mapping[str, Any], taken: Mapping[str, Any], path: tuple[Any, ...]
) -> Iterator[tuple[Variable[Any], Variable[Any]]]:
    """The Variables that exist already, with those that they get their values from."""
    for name, value in taken.items():
        current = own.get(name)
        if current is None:
            continue
        if isinstance(value, Mapping) and isinstance(current, dict):
            yield from _writes(current, value, (*path, name))
        elif isinstance(current, Variable) and type(current) is type(value):
            yield current, cast("Variable[Any]", value)
        else:
            raise variables.duplicate_error((*path, name), value, current)


def _merged(current: Any, taken: Any) -> tuple[Any, bool]:
    """What an attribute is in the end, and whether that is another object."""
    if current is None:
        return taken, True
    if isinstance(current, Variable):
        return current, False
    parts = {name: _merged(current.get(name), x) for name, x in taken.items()}
    if not any(is_new for _, is_new in parts.values()):
        return current, False
    return {**current, **{name: x for name, (x, _) in parts.items()}}, True


def lazy_init(fn: T, *args: Any, **kwargs: Any) -> T:
    """Initializes all `ToNNX` in a Module by calling it once.

    Args:
        fn: The Module, or one of its methods.
        *args: Arguments of the call.
        **kwargs: Keyword arguments of the call.

    Returns:
        ``fn``.

    Raises:
        ValueError: If ``fn`` is neither a Module nor a method of one.

    Example:
        >>> import flax.linen as nn
        >>> class Block(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.dense = nnx.bridge.ToNNX(nn.Dense(4), rngs)
        ...
        ...     def __call__(self, x):
        ...         return nnx.relu(self.dense(x))
        >>> block = nnx.bridge.lazy_init(Block(nnx.Rngs(0)), jnp.ones((1, 3)))
        >>> block.dense.bias.shape
        (4,)
    """
    module = _module_of(fn)
    _set_initializing(module, True)
    try:
        fn(*args, **kwargs)  # pyright: ignore[reportCallIssue]
    finally:
        _set_initializing(module, False)
    return fn


def _module_of(fn: Any) -> modules.Module:
    method = fn
    while isinstance(method, functools.partial):
        method = method.func
    module = getattr(method, "__self__", method)
    if isinstance(module, modules.Module) and callable(fn):
        return module
    raise ValueError(
        errors.message(
            f"lazy_init: fn = {fn!r} needs to be a method of an NNX Module.",
            way_out="Pass the Module itself to initialize it by its __call__, or a "
            "bound method: lazy_init(model.encode, x).",
        )
    )


def _set_initializing(module: modules.Module, value: bool) -> None:
    for _, node in traversals.iter_graph(module, graph=True):
        if isinstance(node, Pytree):
            contexts.set_initializing(node, value)
