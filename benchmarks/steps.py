"""One step of Adam, written for each library: ``Step`` holds it with its arguments.

All steps compute the same: the loss of a model, its gradient, one update. A step of raw
JAX or Equinox gives the next values of its objects; one of Graftree or Flax NNX changes
the objects themselves.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax

ADAM = optax.adam(1e-3)


@dataclasses.dataclass(frozen=True)
class Passing:
    """A way to pass objects and a batch to a function.

    Attributes:
        wrap: Makes, of a function of keywords, the function that is jitted.
        call: Calls that one with objects and batch, each a dict by keyword.
    """

    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    call: Callable[[Callable[..., Any], dict[str, Any], dict[str, Any]], Any]


POSITIONAL = Passing(
    wrap=lambda update: update,
    call=lambda step, objects, batch: step(*objects.values(), *batch.values()),
)
KEYWORDS = Passing(
    wrap=lambda update: update,
    call=lambda step, objects, batch: step(**objects, **batch),
)
NESTED = Passing(
    wrap=lambda update: lambda objects, batch: update(**objects, **batch),
    call=lambda step, objects, batch: step(objects, batch),
)


@dataclasses.dataclass
class Step:
    """A jitted train step that changes its objects; calling it trains once.

    Attributes:
        function: What was jitted.
        objects: Its arguments that change, by name.
        batch: Its other arguments, by name.
        passing: How it takes these.
    """

    function: Any
    objects: dict[str, Any]
    batch: dict[str, jax.Array]
    passing: Passing = POSITIONAL

    def __call__(self) -> jax.Array:
        return self.passing.call(self.function, self.objects, self.batch)

    def lower(self) -> Any:
        """Traces and lowers the step."""
        return self.passing.call(self.function.lower, self.objects, self.batch)


class PureStep(Step):
    """A jitted train step that gives the next values of its objects."""

    def __call__(self) -> jax.Array:
        values, loss = super().__call__()
        self.objects = dict(zip(self.objects, values, strict=True))
        return loss


# ---------------------------------------------------------------------------- raw JAX


def raw(
    loss_of: Callable[..., Any],
    params: Any,
    batch: dict[str, jax.Array],
    *,
    state: Any = (),
    donate: bool = False,
    passing: Passing = POSITIONAL,
) -> Step:
    """Train step in plain JAX: ``jax.jit`` on a flat list of arrays.

    Args:
        loss_of: Takes parameters, state, x and y; gives the loss and the next state.
        params: What is trained.
        batch: The other arguments of ``loss_of``, x and y.
        state: What changes without a gradient.
        donate: Whether the arrays of the last step are given up.
        passing: How they are passed.
    """
    leaves, update = _raw_update(loss_of, params, state)

    def pure(leaves, x, y):
        leaves, loss = update(leaves, x, y)
        return (leaves,), loss

    function = jax.jit(passing.wrap(pure), donate_argnums=0 if donate else ())
    return PureStep(function, {"leaves": leaves}, batch, passing)


def raw_refs(
    loss_of: Callable[..., Any], params: Any, batch: dict[str, jax.Array]
) -> Step:
    """Train step in plain JAX: ``jax.jit`` on a flat list of array refs."""
    leaves, update = _raw_update(loss_of, params, ())

    @jax.jit
    def function(refs, x, y):
        leaves, loss = update([ref[...] for ref in refs], x, y)
        for ref, leaf in zip(refs, leaves, strict=True):
            ref[...] = leaf
        return loss

    return Step(function, {"refs": [*map(jax.new_ref, leaves)]}, batch)


def _raw_update(
    loss_of: Callable[..., Any], params: Any, state: Any
) -> tuple[list[jax.Array], Callable[..., Any]]:
    """All that a step changes, flat; and the step from these to the next."""
    leaves, treedef = jax.tree.flatten((params, ADAM.init(params), state))

    def update(leaves, x, y):
        params, opt_state, state = jax.tree.unflatten(treedef, leaves)
        gradient_of = jax.value_and_grad(loss_of, has_aux=True)
        (loss, state), grads = gradient_of(params, state, x, y)
        params, opt_state = updated(params, opt_state, grads)
        return jax.tree.leaves((params, opt_state, state)), loss

    return leaves, update


def updated(params: Any, opt_state: Any, grads: Any) -> tuple[Any, Any]:
    """One step of Adam on values."""
    updates, opt_state = ADAM.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


# ----------------------------------------------------------------- Graftree, Flax NNX


def nnx(
    nnx: Any,
    loss_of: Callable[..., Any],
    model: Any,
    batch: dict[str, jax.Array],
    *,
    has_state: bool = False,
    donate: bool = False,
    passing: Passing = POSITIONAL,
    **mode: bool,
) -> Step:
    """Train step on objects, for Graftree or Flax NNX, in one of the three modes.

    Args:
        nnx: Graftree or Flax NNX.
        loss_of: Takes model, x and y; gives the loss.
        model: What is trained.
        batch: The other arguments of ``loss_of``, x and y.
        has_state: Whether the model holds more than parameters.
        donate: Whether the arrays of the last step are given up.
        passing: How they are passed.
        **mode: The mode of all transforms.
    """
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    # With structure updates, the default, gradients are those of parameters alone.
    update_of = nnx_update_of_params if has_state and mode else nnx_update
    update = passing.wrap(update_of(nnx, loss_of, **mode))
    function = nnx.jit(update, donate_argnums=(0, 1) if donate else (), **mode)
    return Step(function, {"model": model, "optimizer": optimizer}, batch, passing)


def nnx_update(
    nnx: Any, loss_of: Callable[..., Any], **mode: bool
) -> Callable[..., Any]:
    """The step as a function of model, optimizer, x and y, to be jitted."""

    def update(model, optimizer, x, y):
        loss, grads = nnx.value_and_grad(loss_of, **mode)(model, x, y)
        optimizer.update(model, grads)
        return loss

    return update


def nnx_update_of_params(
    nnx: Any, loss_of: Callable[..., Any], **mode: bool
) -> Callable[..., Any]:
    """`nnx_update` of a model with other state, in the modes that have no filters.

    There a gradient is that of a whole object, so what has none is split off.
    """

    def update(model, optimizer, x, y):
        graphdef, params, state = nnx.split(model, nnx.Param, ...)

        def split_loss(params, state):
            return loss_of(nnx.merge(graphdef, params, state), x, y)

        loss, grads = nnx.value_and_grad(split_loss, **mode)(params, state)
        nnx.update(model, state)
        optimizer.update(model, grads)
        return loss

    return update


def nnx_refs(
    nnx: Any,
    loss_of: Callable[..., Any],
    model_of: Callable[[], Any],
    batch: dict[str, jax.Array],
) -> Step:
    """Train step of a model in array refs, under plain ``jax.jit``."""
    with nnx.var_defaults(ref=True):
        model = model_of()
        optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)

    @jax.jit
    def function(model, optimizer, x, y):
        graphdef, params = nnx.split(model)

        def loss_of_params(params):
            return loss_of(nnx.merge(graphdef, params), x, y)

        frozen = nnx.with_vars(params, ref=False)
        loss, grads = jax.value_and_grad(loss_of_params)(frozen)
        optimizer.update(model, grads)
        return loss

    return Step(function, {"model": model, "optimizer": optimizer}, batch)


# ---------------------------------------------------------------------------- Equinox


def equinox(
    equinox: Any,
    loss_of: Callable[..., Any],
    model: Any,
    batch: dict[str, jax.Array],
    *,
    donate: bool = False,
    passing: Passing = POSITIONAL,
) -> Step:
    """Train step of Equinox: the model and the optimizer state are values."""
    opt_state = ADAM.init(equinox.filter(model, equinox.is_array))

    def update(model, opt_state, x, y):
        loss, grads = equinox.filter_value_and_grad(loss_of)(model, x, y)
        model, opt_state = updated(model, opt_state, grads)
        return (model, opt_state), loss

    if donate:  # all but the first argument, so the batch comes first
        passing = _BATCH_FIRST
    function = equinox.filter_jit(
        passing.wrap(update), donate="all-except-first" if donate else "none"
    )
    return PureStep(function, {"model": model, "opt_state": opt_state}, batch, passing)


_BATCH_FIRST = Passing(
    wrap=lambda update: lambda batch, objects: update(**objects, **batch),
    call=lambda step, objects, batch: step(batch, objects),
)
