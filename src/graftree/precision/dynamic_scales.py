"""Scaling of the loss, so that gradients in float16 are neither zero nor infinite."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from graftree import _jax
from graftree.annotations import Path
from graftree.core import filters
from graftree.core.graph import functional, nodes, traversals, updates
from graftree.core.objects.pytrees import Pytree
from graftree.core.rng.streams import RngState
from graftree.core.states import pure_dicts, states
from graftree.core.variables import variables
from graftree.core.variables.variables import Variable
from graftree.transforms.derivatives import grad


class DynamicScale(Pytree):
    """Scales a loss by as much as its float16 gradients can take.

    The smallest numbers of float16 are about 6e-8, and many gradients are smaller. So
    the loss is multiplied by ``scale``, and the gradients are divided by it in float32.
    Where a gradient is infinite or NaN, the scale is too large: the step is skipped and
    the scale is multiplied by ``backoff_factor``. After ``growth_interval`` steps in a
    row that were not skipped, the next such step multiplies it by ``growth_factor``.

    A step is two lines. They also protect all that a skipped step must not change:

        loss, grads = scaler.value_and_grad(loss_fn)(model, batch)
        scaler.update(optimizer, model, grads)

    The scale and the counts are Variables: pass the object to `nnx.jit` beside the
    model, and keep it in checkpoints.

    Args:
        scale: The initial scale.
        growth_factor: The factor by which the scale grows; more than one.
        backoff_factor: The factor by which it shrinks; between zero and one.
        growth_interval: After how many finite steps it grows.
        minimum_scale: The scale does not shrink below this.

    Attributes:
        scale: Variable, a float32: the current scale.
        finite_steps: Variable, an int32: how many steps in a row were finite.
        is_finite: Variable, a bool: whether the gradients of the last step were.

    Raises:
        ValueError: If an argument is out of its range.

    Example:
        >>> import optax
        >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        >>> scaler = nnx.precision.DynamicScale()
        >>> @nnx.jit
        ... def train_step(model, optimizer, scaler, x):
        ...     loss_fn = lambda model: jnp.mean(model(x) ** 2)
        ...     loss, grads = scaler.value_and_grad(loss_fn)(model)
        ...     scaler.update(optimizer, model, grads)
        ...     return loss
        >>> before = model.kernel[...]
        >>> loss = train_step(model, optimizer, scaler, jnp.full((1, 2), jnp.inf))
        >>> scaler.is_finite[...].item(), scaler.scale[...].item()
        (False, 32768.0)
        >>> bool((model.kernel[...] == before).all())
        True

    References:
        Micikevicius et al., 2018, "Mixed Precision Training", section 3.2.
    """

    def __init__(
        self,
        scale: float = 2.0**16,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        minimum_scale: float = float(jnp.finfo(jnp.float32).tiny),
    ) -> None:
        if not (growth_factor > 1 and 0 < backoff_factor < 1 and growth_interval >= 1):
            raise ValueError(
                "DynamicScale expects growth_factor > 1, 0 < backoff_factor < 1 and "
                f"growth_interval >= 1, got {growth_factor}, {backoff_factor} and "
                f"{growth_interval}."
            )
        if not 0 < minimum_scale <= scale <= float(jnp.finfo(jnp.float32).max):
            raise ValueError(
                "DynamicScale expects a float32 scale, not less than minimum_scale, "
                f"which is positive; got {scale} and {minimum_scale}."
            )
        self.scale = Variable(jnp.asarray(scale, jnp.float32))
        self.finite_steps = Variable(jnp.zeros((), jnp.int32))
        self.is_finite = Variable(jnp.ones((), bool))
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.minimum_scale = minimum_scale

    def value_and_grad(
        self,
        f: Callable[..., Any],
        *,
        has_aux: bool = False,
        axis_name: Any = None,
        **options: Any,
    ) -> Callable[..., tuple[Any, Any]]:
        """Makes a function that returns value and gradient of ``f``, and adapts.

        Args:
            f: As for `nnx.value_and_grad`. Its value is best computed in float32, as
                the outputs of a policy with ``output=f32`` are: it is multiplied by the
                scale in float32 or wider.
            has_aux: Whether ``f`` returns a pair.
            axis_name: A mapped axis to average the gradients over; all devices then
                agree whether they are finite. If the loss is a mean over a number of
                tokens that differs between devices, divide the sum by the mean number,
                ``losses.sum() / jax.lax.pmean(count, axis_name)``.
            **options: The other options of `nnx.value_and_grad`, such as ``argnums``.

        Returns:
            A function with the arguments of ``f`` that returns ``(value, gradients)``,
            the value as ``f`` gives it, the gradients divided by the scale, in float32
            or wider. It adjusts the scale and sets ``is_finite``. If a gradient is not
            finite, everything that ``f`` changed in its arguments, such as the
            statistics of `BatchNorm`, is restored, except random streams.

        Example:
            >>> scaler = nnx.precision.DynamicScale(scale=2.0**10)
            >>> weight = nnx.Dict(w=nnx.Param(jnp.array(2.0, jnp.float16)))
            >>> def loss(weight):
            ...     return weight.w[...].astype(jnp.float32) ** 2
            >>> value, grads = scaler.value_and_grad(loss)(weight)
            >>> value.item(), grads.w[...]
            (4.0, Array(4., dtype=float32))
        """

        @functools.wraps(f)
        def differentiated(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            scale = self.scale[...]

            @functools.wraps(f)
            def scaled(*args: Any, **kwargs: Any) -> Any:
                out = f(*args, **kwargs)
                value = out[0] if has_aux else out
                wide = jnp.promote_types(jnp.result_type(value), jnp.float32)
                return jnp.asarray(value, wide) * scale, out

            contents = _Contents([args, kwargs])
            gradient = grad.value_and_grad(scaled, has_aux=True, **options)
            (_, out), grads = gradient(*args, **kwargs)
            grads = jax.tree.map(lambda g: _divided(g, scale), grads)
            if axis_name is not None:
                grads = jax.tree.map(lambda g: _averaged(g, axis_name), grads)
            is_finite = _are_finite(grads)
            contents.bring_back(is_finite)
            self._adapt(is_finite)
            return out, grads

        return differentiated

    def _adapt(self, is_finite: jax.Array) -> None:
        """Moves the scale and the count after a step."""
        scale, steps = self.scale[...], self.finite_steps[...]
        grows = is_finite & (steps >= self.growth_interval)
        largest = jnp.finfo(jnp.float32).max
        larger = jnp.minimum(scale * self.growth_factor, largest)
        smaller = jnp.maximum(scale * self.backoff_factor, self.minimum_scale)
        finite_scale = jnp.where(grows, larger, scale)
        self.scale[...] = jnp.where(is_finite, finite_scale, smaller)
        self.finite_steps[...] = jnp.where(is_finite & ~grows, steps + 1, 0)
        self.is_finite[...] = is_finite

    def update(self, optimizer: Any, /, *args: Any, **kwargs: Any) -> None:
        """Updates a model with an optimizer, if the last gradients were finite.

        Otherwise model and optimizer stay as they are, including the count of steps.

        Args:
            optimizer: An `nnx.Optimizer`, or anything with such a method ``update``.
            *args: The arguments of ``update``: the model and the gradients.
            **kwargs: Its keyword arguments.

        Example:
            >>> import optax
            >>> model = nnx.Dict(w=nnx.Param(jnp.array(2.0)))
            >>> optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
            >>> scaler = nnx.precision.DynamicScale()
            >>> value, grads = scaler.value_and_grad(lambda m: m.w[...] ** 2)(model)
            >>> scaler.update(optimizer, model, grads)
            >>> model.w[...].item(), optimizer.step[...].item()
            (0.0, 1)
        """
        contents = _Contents([optimizer, args])
        optimizer.update(*args, **kwargs)
        contents.bring_back(self.is_finite[...])


def _averaged(gradient: jax.Array, axis_name: Any) -> jax.Array:
    """Takes the mean over axes; in `shard_map`, JAX may have added up the devices."""
    gradient, own_gradient = jax.lax.pmean(gradient, axis_name), gradient
    for name in axis_name if isinstance(axis_name, (tuple, list)) else (axis_name,):
        is_tracked = name in _jax.varying(jax.typeof(jax.lax.axis_index(name)))
        if is_tracked and name not in _jax.varying(jax.typeof(own_gradient)):
            gradient = gradient / jax.lax.axis_size(name)
    return gradient


def _divided(gradient: jax.Array, scale: jax.Array) -> jax.Array:
    if not jnp.issubdtype(gradient.dtype, jnp.inexact):
        return gradient
    wide = jnp.promote_types(gradient.dtype, jnp.float32)
    return gradient.astype(wide) / scale


def _are_finite(grads: Any) -> jax.Array:
    checks = [
        jnp.isfinite(x).all()
        for x in jax.tree.leaves(grads)
        if jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    return functools.reduce(jnp.logical_and, checks, jnp.asarray(True))


class _Contents:
    """Keeps the contents of objects: arrays, and Variables except random streams."""

    def __init__(self, tree: Any) -> None:
        is_node = nodes.is_graph_node
        leaves = jax.tree.leaves(tree, is_leaf=is_node)
        self._nodes = [x for x in leaves if is_node(x)]
        self._values = [
            (x, pure_dicts.as_pure(x))
            for _, x in traversals.iter_graph(self._nodes, graph=True)
            if isinstance(x, Variable) and not isinstance(x, RngState)
        ]
        self._arrays = self._bare()

    def _bare(self) -> dict[Path, Any]:
        arrays = functional.state(self._nodes, filters.Not(Variable), graph=True)
        return dict(states.to_flat_state(arrays))

    def bring_back(self, is_finite: jax.Array) -> None:
        """Restores the earlier contents if not all is finite."""
        pairs = [(x, pure_dicts.as_pure(x), old) for x, old in self._values]
        changed = [pair for pair in pairs if _is_changed(*pair[1:])]
        # Written raw, as they are read: what a Variable stores may be read as another
        # value, through a hook or as the array of a quantized kernel.
        variables.write_all(
            [variable for variable, _, _ in changed],
            [_chosen(is_finite, new, old) for _, new, old in changed],
        )
        arrays = self._bare()
        if arrays.keys() == self._arrays.keys():
            # Only what has changed: items of a tuple can't be replaced.
            chosen = {
                path: _chosen(is_finite, new, self._arrays[path])
                for path, new in arrays.items()
                if new is not self._arrays[path]
            }
            updates.update(self._nodes, states.from_flat_state(chosen))


def _is_changed(new: Any, old: Any) -> bool:
    """Whether a value of the same structure has other leaves."""
    leaves, treedef = jax.tree.flatten(new)
    others, other_treedef = jax.tree.flatten(old)
    return treedef == other_treedef and any(map(operator.is_not, leaves, others))


def _chosen(is_finite: jax.Array, new: Any, old: Any) -> Any:
    """Selects the new value, or the old one if not all is finite."""

    def choose(new: Any, old: Any) -> Any:
        if new is old or jnp.shape(new) != jnp.shape(old):
            return new
        return jnp.where(is_finite, new, jnp.asarray(old, jnp.result_type(new)))

    return jax.tree.map(choose, new, old)
