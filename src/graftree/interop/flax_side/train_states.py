"""Params, optimizer state and step in one pytree: ``flax.training.train_state``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import jax

from graftree.interop.flax_side import pytree_dataclasses
from graftree.training import optimizers

OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"
"""The key of params that take their gradients as new values (for 8-bit training)."""


class TrainState(pytree_dataclasses.PyTreeNode):
    """Params, optimizer state and step; a step returns a new object.

    Write a subclass to hold more. Unlike `nnx.TrainState` it has no skeleton of a
    model, but a function.

    Attributes:
        step: The number of calls of `apply_gradients`.
        apply_fn: The function of the model; static.
        params: A pytree of arrays, or a State.
        tx: The Optax transformation; static.
        opt_state: The state of ``tx``.

    Example:
        >>> import optax
        >>> from graftree.interop.flax_side import train_states
        >>> state = train_states.TrainState.create(
        ...     apply_fn=None, params={"w": jnp.array(3.0)}, tx=optax.sgd(0.5)
        ... )
        >>> state = state.apply_gradients(grads={"w": jnp.array(2.0)})
        >>> state.step, state.params["w"].item()
        (1, 2.0)
    """

    step: int | jax.Array
    apply_fn: Callable[..., Any] | None = pytree_dataclasses.field(pytree_node=False)
    params: Any = pytree_dataclasses.field(pytree_node=True)
    tx: Any = pytree_dataclasses.field(pytree_node=False)
    opt_state: Any = pytree_dataclasses.field(pytree_node=True)

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable[..., Any] | None,
        params: Any,
        tx: Any,
        **kwargs: Any,
    ) -> Self:
        """Makes an object with a fresh optimizer state, at step 0.

        Args:
            apply_fn: The function of the model, or None.
            params: A pytree of arrays, or a State.
            tx: An Optax transformation.
            **kwargs: Values of the fields that a subclass adds.

        Returns:
            The new object.
        """
        opt_state = tx.init(_optimized(params))
        return cls(
            step=0,
            apply_fn=apply_fn,
            params=params,
            tx=tx,
            opt_state=opt_state,
            **kwargs,
        )

    def apply_gradients(self, *, grads: Any, **kwargs: Any) -> Self:
        """Returns the object after one step of the optimizer.

        Args:
            grads: Gradients with the structure of ``params``.
            **kwargs: New values of other fields.

        Returns:
            A new object with ``step + 1``; this one is unchanged.
        """
        params = _optimized(self.params)
        updates, opt_state = self.tx.update(_optimized(grads), self.opt_state, params)
        new_params = optimizers.apply_updates(params, updates)
        if _has_overwritten(self.params):
            new_params = {
                "params": new_params,
                OVERWRITE_WITH_GRADIENT: grads[OVERWRITE_WITH_GRADIENT],
            }
        return self.replace(
            step=self.step + 1, params=new_params, opt_state=opt_state, **kwargs
        )


def _has_overwritten(params: Any) -> bool:
    return isinstance(params, Mapping) and OVERWRITE_WITH_GRADIENT in params


def _optimized(params: Any) -> Any:
    """The params that the optimizer is for."""
    return params["params"] if _has_overwritten(params) else params
