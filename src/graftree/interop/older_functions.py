"""Functions of earlier releases of Flax NNX that are one call today."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax

from graftree.annotations import Filter
from graftree.core.graph import updates
from graftree.core.modules import modules
from graftree.core.states.states import State
from graftree.nn import conv

A = TypeVar("A")


def train_mode(node: A, /, *, only: Filter = ..., **kwargs: Any) -> A:
    """Makes a view of a model for training; today: ``nnx.view``.

    Args:
        node: The model; it stays as it is.
        only: Which of its modules to change.
        **kwargs: More attributes to set.

    Returns:
        A view with ``deterministic=False`` and ``use_running_average=False`` where
        modules have them.

    Example:
        >>> model = nnx.Dropout(0.5, deterministic=True)
        >>> nnx.train_mode(model).deterministic, model.deterministic
        (False, True)
    """
    return _view(node, only, False, kwargs)


def eval_mode(node: A, /, *, only: Filter = ..., **kwargs: Any) -> A:
    """Makes a view of a model for evaluation; today: ``nnx.view``.

    Args:
        node: The model; it stays as it is.
        only: Which of its modules to change.
        **kwargs: More attributes to set.

    Returns:
        A view with ``deterministic=True`` and ``use_running_average=True`` where
        modules have them.

    Example:
        >>> nnx.eval_mode(nnx.Dropout(0.5)).deterministic
        True
    """
    return _view(node, only, True, kwargs)


def _view(node: A, only: Filter, evaluates: bool, attributes: dict[str, Any]) -> A:
    preset = {"deterministic": evaluates, "use_running_average": evaluates}
    return modules.view(
        node, only=only, raise_if_not_found=False, **preset | attributes
    )


def graph_pop(node: Any, filters: tuple[Filter, ...]) -> tuple[State, ...]:
    """Takes Variables out of an object; today: ``nnx.pop``.

    Args:
        node: The object, which loses them.
        filters: Which ones.

    Returns:
        A State for each filter.

    Example:
        >>> model = nnx.Dict(a=nnx.Param(1), b=nnx.Cache(2))
        >>> (caches,) = nnx.graphlib.graph_pop(model, (nnx.Cache,))
        >>> sorted(caches), hasattr(model, "b")
        (['b'], False)
    """
    # With one filter there is no tuple around its State.
    popped: Any = updates.pop(node, *filters)
    return (popped,) if len(filters) == 1 else popped


def conv_dimension_numbers(input_shape: Sequence[int]) -> jax.lax.ConvDimensionNumbers:
    """Where a convolution has batch, channels and spatial axes; they are always there.

    Args:
        input_shape: ``[batch, *spatial, channels]``.

    Example:
        >>> nnx.nn.linear._conv_dimension_numbers((1, 8, 8, 3)).rhs_spec
        (3, 2, 0, 1)
    """
    return conv.channels_last(len(input_shape) - 2)


@contextlib.contextmanager
def static_cache(cache: Any) -> Iterator[None]:
    """Does nothing: skeletons are cached without being asked for.

    Example:
        >>> with nnx.graphlib.static_cache({}):
        ...     graphdef = nnx.graphdef(nnx.Param(1))
    """
    yield


with_sharding_constraint = jax.lax.with_sharding_constraint
