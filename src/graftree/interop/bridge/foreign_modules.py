"""Modules of both kinds inside of bridge Modules."""

from __future__ import annotations

from collections.abc import Callable

import jax

from graftree.core.modules.modules import Module
from graftree.core.rng.streams import Rngs
from graftree.interop.bridge import binding, contexts, linen_side, modules
from graftree.interop.bridge.contexts import AttrPriority
from graftree.interop.bridge.to_nnx import ToNNX


def nnx_in_bridge_mdl(
    factory: Callable[[Rngs], Module], name: str | None = None
) -> Module:
    """Makes a Module inside of a bridge Module, which keeps its variables.

    Args:
        factory: Makes the Module from the random streams of the call.
        name: Its name; the default in a compact method is that of its class, with a
            number.

    Returns:
        The Module, with the variables that ``apply`` was given for it.

    Raises:
        ValueError: Outside of the methods of a bridge Module.
        flax.errors.ScopeParamNotFoundError: If ``apply`` was not given a `Param` of it.

    Example:
        >>> class Net(nnx.bridge.Module):
        ...     @nnx.bridge.compact
        ...     def __call__(self, x):
        ...         make = lambda rngs: nnx.Linear(3, 4, rngs=rngs)
        ...         return nnx.bridge.nnx_in_bridge_mdl(make)(x)
        >>> variables = Net().init(0, jnp.ones((1, 3)))
        >>> jax.tree.map(jnp.shape, variables["params"])
        {'Linear_0': {'bias': (4,), 'kernel': (3, 4)}}
    """
    parent = _parent("nnx_in_bridge_mdl")
    module = factory(_streams(parent))
    name = name or contexts.auto_name(type(module))
    if name is None:
        contexts.MODULE_CONTEXT.calls[-1].made.append(module)
        return module
    current = vars(parent).get(name)
    if isinstance(current, Module):  # made by an earlier call
        return current
    contexts.MODULE_CONTEXT.calls[-1].made.append(module)
    binding.place(module, name, AttrPriority.DEFAULT)
    return module


def linen_in_bridge_mdl(
    linen_module: linen_side.linen.Module, name: str | None = None
) -> Module:
    """Makes a Linen Module a Module inside of a bridge Module.

    Args:
        linen_module: The Linen Module.
        name: Its name; the default in a compact method is that of its class, with a
            number.

    Returns:
        A `ToNNX`, initialized together with the bridge Module.

    Raises:
        ValueError: Outside of the methods of a bridge Module.

    Example:
        >>> import flax.linen as nn
        >>> class Net(nnx.bridge.Module):
        ...     @nnx.bridge.compact
        ...     def __call__(self, x):
        ...         return nnx.bridge.linen_in_bridge_mdl(nn.Dense(4))(x)
        >>> variables = Net().init(0, jnp.ones((1, 3)))
        >>> jax.tree.map(jnp.shape, variables["params"])
        {'Dense_0': {'bias': (4,), 'kernel': (3, 4)}}
    """
    parent = _parent("linen_in_bridge_mdl")
    assert parent.scope is not None
    name = name or contexts.auto_name(type(linen_module))
    current = vars(parent).get(name) if name else None
    if isinstance(current, Module):
        return current
    module = ToNNX(linen_module, parent.scope.rngs)
    if name is not None:
        binding.place(module, name, AttrPriority.DEFAULT)
    return module


def _parent(function: str) -> modules.Module:
    parent = contexts.current_module()
    if parent is None or parent.scope is None:
        raise ValueError(f"{function}() only needed inside bridge Module")
    return parent


def _streams(parent: modules.Module) -> Rngs:
    """The streams of the call; with a constant one for values that won't be used."""
    assert parent.scope is not None
    rngs = parent.scope.rngs
    if parent.is_initializing() or "default" in rngs:
        return rngs
    completed = Rngs(jax.random.key(0))
    for name, stream in rngs.items():
        setattr(completed, name, stream)
    return completed
