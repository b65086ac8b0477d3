"""TrainState: skeleton, params and optimizer state in one immutable pytree.

The functional counterpart of a Module with an `Optimizer`: each step returns a new
object, and plain JAX transforms accept and return it. Subclasses become frozen
dataclasses and registered pytrees without a decorator.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp

from graftree import namespaces
from graftree.annotations import Array, Int
from graftree.core.graph.graphdefs import GraphDef
from graftree.core.states import pure_dicts
from graftree.core.states.states import State
from graftree.training import optimizers, step_checks

if TYPE_CHECKING:
    import optax
else:
    optax = namespaces.OnUse("optax")

M = TypeVar("M")


@dataclass_transform(frozen_default=True)
class _FrozenPytree:
    """Turns its subclasses into frozen dataclasses that are JAX pytrees.

    Fields are children; those whose metadata has ``pytree_node=False`` or
    ``static=True`` are part of the structure.
    """

    def __init_subclass__(cls, **dataclass_options: Any) -> None:
        super().__init_subclass__()
        frozen: Any = dataclasses.dataclass(frozen=True, **dataclass_options)(cls)
        fields: dict[bool, list[str]] = {True: [], False: []}
        for field in dataclasses.fields(frozen):
            is_child = field.metadata.get("pytree_node", True)
            is_child = is_child and not field.metadata.get("static", False)
            fields[is_child].append(field.name)
        jax.tree_util.register_dataclass(cls, fields[True], fields[False])


class TrainState(_FrozenPytree, Generic[M]):
    """Skeleton, params and optimizer state in one immutable pytree.

    To hold more state, write a subclass and annotate its fields, e.g.
    ``batch_stats: nnx.State``; the subclass is a frozen pytree dataclass too.

    Attributes:
        graphdef: The skeleton of the model.
        params: The State to optimize.
        opt_state: The state of ``tx``; its moments are Variables of the types of the
            params.
        step: The number of calls of `apply_gradients`; an int32 scalar.
        tx: The Optax transformation; static.

    Raises:
        dataclasses.FrozenInstanceError: If a field is assigned; use `replace`.

    Example:
        >>> import optax
        >>> graphdef, params = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> ts = nnx.TrainState.create(graphdef, params=params, tx=optax.sgd(0.1))
        >>> @jax.jit
        ... def train_step(ts, x):
        ...     loss = lambda params: jnp.mean(ts.apply(params)(x)[0] ** 2)
        ...     return ts.apply_gradients(jax.grad(loss)(ts.params))
        >>> train_step(ts, jnp.ones((1, 2))).step
        Array(1, dtype=int32, weak_type=True)
    """

    graphdef: GraphDef[M]
    params: State
    opt_state: Any
    step: Int[Array, ""]
    tx: optax.GradientTransformation = dataclasses.field(
        metadata={"pytree_node": False}
    )

    @classmethod
    def create(
        cls,
        graphdef: GraphDef[M],
        *,
        params: State,
        tx: optax.GradientTransformation,
        step: int = 0,
        **kwargs: Any,
    ) -> Self:
        """Makes a TrainState with a fresh optimizer state.

        Args:
            graphdef: The skeleton of the model.
            params: The State to optimize.
            tx: An Optax gradient transformation.
            step: The initial value of the step counter.
            **kwargs: Values of the fields that a subclass adds.

        Returns:
            The new object; it holds ``params`` itself, not a copy.

        Example:
            >>> import optax
            >>> class State(nnx.TrainState):
            ...     batch_stats: nnx.State
            >>> model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
            >>> graphdef, params, stats = nnx.split(model, nnx.Param, nnx.BatchStat)
            >>> ts = State.create(
            ...     graphdef, params=params, tx=optax.sgd(0.1), batch_stats=stats
            ... )
            >>> y, (_, state) = ts.apply("params", "batch_stats")(jnp.ones((2, 3)))
            >>> sorted(state)
            ['bias', 'mean', 'scale', 'var']
        """
        return cls(
            graphdef=graphdef,
            params=params,
            opt_state=tx.init(params),
            step=jnp.asarray(step),
            tx=tx,
            **kwargs,
        )

    def apply(self, state: State | str, *states: State | str) -> Any:
        """Returns a stand-in for the model that you call with the given state.

        Args:
            state: A State, or the name of a field that holds one.
            *states: More of them; together they must be the whole state of the model.

        Returns:
            An object that you call like the model; so are its methods. Each call
            returns ``(output, (graphdef, state))``, with the state after the call.

        Raises:
            TypeError: If a named field is not a State.

        Example:
            >>> import optax
            >>> graphdef, params = nnx.split(nnx.Embed(5, 2, rngs=nnx.Rngs(0)))
            >>> ts = nnx.TrainState.create(graphdef, params=params, tx=optax.sgd(0.1))
            >>> logits, _ = ts.apply("params").attend(jnp.ones((1, 2)))
            >>> logits.shape
            (1, 5)
        """
        resolved_states = map(self._resolve, (state, *states))
        return self.graphdef.apply(*resolved_states)

    def _resolve(self, state: State | str) -> Any:
        if not isinstance(state, str):
            return state
        value = getattr(self, state)
        if not isinstance(value, State):
            raise TypeError(
                f"Expected {type(self).__name__}.{state} to be a State, got "
                f"{type(value).__name__}; pass the name of a field that holds a State."
            )
        return value

    def apply_gradients(self, grads: Any, **kwargs: Any) -> Self:
        """Returns the TrainState after one optimizer step.

        Args:
            grads: Gradients with the structure of ``params``.
            **kwargs: New values of other fields.

        Returns:
            A new object with ``step + 1``; this one is unchanged.

        Raises:
            ValueError: If a gradient does not fit its parameter; see
                `Optimizer.update`.

        Example:
            >>> import optax
            >>> graphdef, params = nnx.split(nnx.Dict(weight=nnx.Param(jnp.array(3.0))))
            >>> ts = nnx.TrainState.create(graphdef, params=params, tx=optax.sgd(0.5))
            >>> grads = nnx.State({"weight": nnx.Param(jnp.array(2.0))})
            >>> ts.apply_gradients(grads).params["weight"][...].item()
            2.0
        """
        params, pure_grads = map(pure_dicts.as_pure, (self.params, grads))
        step_checks.check_gradients(params, pure_grads, "of the TrainState")
        updates, opt_state = self.tx.update(grads, self.opt_state, self.params)
        return self.replace(
            params=optimizers.apply_updates(self.params, updates),
            opt_state=opt_state,
            step=self.step + 1,
            **kwargs,
        )

    def replace(self, **updates: Any) -> Self:
        """Returns a copy with new values of some fields.

        Args:
            **updates: New values by field name.

        Returns:
            A new object.

        Raises:
            TypeError: If no field has that name.

        Example:
            >>> import optax
            >>> graphdef, params = nnx.split(nnx.Dict(weight=nnx.Param(jnp.array(3.0))))
            >>> ts = nnx.TrainState.create(graphdef, params=params, tx=optax.sgd(0.5))
            >>> ts.replace(step=7).step
            7
        """
        return dataclasses.replace(self, **updates)
