"""``remat``: intermediate values are computed again on the way back, not kept."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from graftree import config
from graftree.transforms import policies
from graftree.transforms.crossing import (
    debug_info,
    decorators,
    guards,
    outside,
    programs,
)
from graftree.transforms.crossing.decorators import MISSING
from graftree.transforms.crossing.rows import Row
from graftree.transforms.crossing.signatures import Signatures


@decorators.keeps_type
def remat(
    f: Any = MISSING,
    *,
    prevent_cse: bool = True,
    static_argnums: int | Sequence[int] = (),
    policy: Callable[..., bool] | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Saves memory in gradients by computing a function twice, with ``jax.checkpoint``.

    Values and gradients are those of the function. It runs twice, but what it writes to
    its arguments reaches the caller's objects once. `nnx.memory.saved` lists what is
    kept.

    Args:
        f: The function; also a method, as a decorator.
        prevent_cse: Whether the compiler is kept from finding out that something is
            computed twice, and doing it once. In a `scan` it can't; ``False`` is faster
            there.
        static_argnums: Positions of arguments that are compile-time constants.
        policy: Which intermediate values are kept all the same: by names and modules,
            made by `nnx.memory.save` or `nnx.memory.offload`; or one of
            ``jax.checkpoint_policies``; ``None`` keeps none.
        graph: The mode; ``None`` takes the default.
        graph_updates: Whether structural changes reach the caller's objects.

    Returns:
        A function with the arguments of ``f``, or a decorator if ``f`` is not given.

    Raises:
        ValueError: If ``f`` is a method bound to a Module, or a position is out of
            range; at a call, for aliases that the mode doesn't allow, and if the policy
            names what isn't there.

    Example:
        >>> class Block(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.linear = nnx.Linear(2, 2, rngs=rngs)
        ...     @nnx.remat
        ...     def __call__(self, x):
        ...         return jnp.sin(self.linear(x))
        >>> block = Block(nnx.Rngs(0))
        >>> grads = nnx.grad(lambda block, x: block(x).sum())(block, jnp.ones((1, 2)))
        >>> grads["linear"]["kernel"].shape
        (2, 2)
    """
    mode = config.propagation(graph, graph_updates)

    checkpoint = functools.partial(
        jax.checkpoint, prevent_cse=prevent_cse, policy=policies.for_jax(policy)
    )

    def make(function: Callable[..., Any]) -> Callable[..., Any]:
        def checkpointed(f: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                # JAX knows a function again, and goes on with what it captured.
                new = debug_info.named_after(f, lambda *args: f(*args))
                traced = policies.watched(policy, checkpoint, new, function)
                return programs.run(function, traced, *args)

            return call

        def transform(inner: Callable[..., Any], _ins: Any, _outs: Any) -> Any:
            return outside.returning_arrays(guards.by_content(inner, checkpointed))

        statics = decorators.choose(function, "static", static_argnums)
        row = Row.uniform(
            "remat",
            mode,
            statics=statics,
            returns_captured=True,
            signatures=Signatures(),
        )
        return outside.lift(function, transform, row)

    return decorators.decorate(f, "remat", make)
