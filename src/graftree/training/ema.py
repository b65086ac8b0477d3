"""Exponential moving averages of Variables.

An `EMA` keeps the averages in Variables of its own, with the types and metadata of
those it follows. Only floating-point and complex arrays are averaged; integers and
random keys take the newest value.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from graftree import errors
from graftree.annotations import Filter
from graftree.core import paths
from graftree.core.graph import functional
from graftree.core.objects import attributes, pytrees
from graftree.core.states import pure_dicts, states
from graftree.core.variables import sharding, values, variables
from graftree.core.variables.variables import Variable
from graftree.nn.support import arguments
from graftree.training import step_checks

M = TypeVar("M")


class EMA(pytrees.Pytree):
    """Exponential moving averages of the Variables of a model.

    Each `update` sets ``average = decay * average + (1 - decay) * newest``. Averages in
    half precision are computed in float32 and rounded once per update; if ``decay`` is
    near one, keep the params in float32, because rounding loses small changes.

    Args:
        params: A Module, State or other node with the Variables to follow. Their arrays
            are copied, so you may donate the model.
        decay: The weight of the old average, between 0 and 1.
        only: The filter that selects the leaves to follow; all must be Variables.
        graph: Whether shared references are followed (graph mode). ``None`` means
            the default in force at each use.

    Attributes:
        params: The averages, a State shaped like ``nnx.state(params, only)``.
        decay: As given; static.
        filter: The argument ``only``; static.
        graph: As given; static.

    Raises:
        TypeError: If ``only`` selects a leaf that is not a Variable.
        ValueError: If a Variable is shared, in tree mode.

    Example:
        >>> model = nnx.Dict(weight=nnx.Param(jnp.array(1.0)))
        >>> ema = nnx.EMA(model, decay=0.75)
        >>> model.weight[...] = jnp.array(2.0)
        >>> ema.update(model)
        >>> ema.apply_to(model).weight[...].item(), model.weight[...].item()
        (1.25, 2.0)
    """

    def __init__(
        self,
        params: Any,
        decay: float,
        *,
        only: Filter = ...,
        graph: bool | None = None,
    ) -> None:
        tracked = functional.state(params, only, graph=graph)
        self.graph = graph
        self.decay = decay
        self.filter = only
        self.params = attributes.data(
            jax.tree.map_with_path(
                _copy_variable, tracked, is_leaf=variables.is_variable
            )
        )

    @arguments.own_arithmetic
    def update(self, updates: Any) -> None:
        """Moves the averages towards new values, in place.

        Args:
            updates: A Module, State or dict in which ``only`` selects the same paths as
                in the model; its leaves are Variables or arrays.

        Raises:
            ValueError: If paths or shapes differ.
            TraceContextError: If another trace owns the averages.

        Example:
            >>> ema = nnx.EMA(nnx.Dict(weight=nnx.Param(jnp.array(0.0))), decay=0.5)
            >>> ema.update({"weight": jnp.array(1.0)})
            >>> ema.params["weight"][...].item()
            0.5
        """
        newest = functional.state(updates, self.filter, graph=self.graph)
        step_checks.check_shapes(*map(pure_dicts.as_pure, (self.params, newest)))
        averages, structure = jax.tree.flatten(
            self.params, is_leaf=variables.is_variable
        )
        newest = pure_dicts.as_pure(structure.flatten_up_to(newest))
        means = [
            jax.tree.map(self._average, pure_dicts.as_pure(variable), new)
            for variable, new in zip(averages, newest, strict=True)
        ]
        # Raw, as they are read: no hook runs.
        variables.write_all(averages, means)

    def _average(self, average: Any, newest: Any) -> Any:
        if not _is_array(average):
            return newest
        if not jnp.issubdtype(average.dtype, jnp.inexact):
            # Copied, because the model may be donated.
            new = jnp.copy(newest)
        else:
            # In half precision, a decay like 0.999 would round to one.
            wide = jnp.promote_types(average.dtype, jnp.float32)
            mean = self.decay * average.astype(wide) + (1.0 - self.decay) * newest
            new = mean.astype(average.dtype)
        return values.write_at(average, ..., sharding.kept(new, average))

    def apply_to(self, model: M) -> M:
        """Returns a model that holds the averages.

        Args:
            model: A node with the structure of the model that the EMA follows.

        Returns:
            A new object of the same structure. For the Variables that it follows, it
            has the EMA's, which change with later updates; the others are the model's.

        Raises:
            ValueError: If ``model`` lacks a path of the EMA or, in tree mode, shares a
                Variable.

        Example:
            >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
            >>> ema = nnx.EMA(model, decay=0.9, only=nnx.Param)
            >>> ema.apply_to(model).kernel is ema.params["kernel"]
            True
        """
        graphdef, state = functional.split(model, graph=self.graph)
        existing_paths = {*states.to_flat_state(state).paths}
        missing = [
            paths.to_string(path)
            for path in states.to_flat_state(self.params).paths
            if path not in existing_paths
        ]
        if missing:
            raise ValueError(
                errors.message(
                    f"EMA.apply_to: {type(model).__name__} lacks Variables that the "
                    "EMA follows.",
                    where="\n".join(missing),
                    way_out="Pass a model of the structure that the EMA was made for.",
                )
            )
        return functional.merge(graphdef, states.merge_state(state, self.params))


def _is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray))


def _copy_variable(path: tuple, leaf: Any) -> Variable:
    if not variables.is_variable(leaf):
        raise TypeError(
            f"EMA only supports Variable leaves, got {type(leaf).__name__} at path "
            f"'{paths.keystr(path)}'.\nUse the `only` filter to select Variables, e.g. "
            "only=nnx.Param."
        )
    # What it stores, which may be read as another value (`surgery.Quantized`).
    return leaf.copy(value=jax.tree.map(_copy_leaf, pure_dicts.as_pure(leaf)))


def _copy_leaf(leaf: Any) -> Any:
    numeric = _is_array(leaf) or isinstance(leaf, (int, float, complex))
    return jnp.copy(leaf) if numeric else leaf
